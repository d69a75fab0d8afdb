"""Keeps the node's nft table as the store has it. The table masquerades pods, leads host ports to
them, and limits what they may reach of the tailnet.

The table's comment has a digest of the part that rarely changes. So an ordinary ADD asks the kernel
one question and changes nothing. A table that is missing, or that an older release made, is
replaced in one transaction. The daemon compares the whole table regularly, and replaces a table
that other programs have changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from ipaddress import ip_address

from .. import light_json as json
from ..errors import KERNEL_LACKS, CniError
from ..model import Address, NetworkConfig, Owner, PodRef
from ..record import TYPE_CHECKING
from ..store import Store
from ..tailnet_access import FORGOTTEN, PODS, Policy
from . import netns, nft, pod_ranges, ruleset, tailnet
from .netlink import KernelError
from .ruleset import TABLE, Port

if TYPE_CHECKING:
    import sqlite3

NOBODY = PodRef()


_SAMPLE_POLICY = Policy(
    "100.64.0.7:443,100.64.0.0/24,[fd7a:115c:a1e0::7]:8000-8100/tcp", (("limited", PODS),)
)
_SAMPLE_RANGES = ["192.0.2.0/24", "2001:db8::/64"]


def concerns(store: Store, network: NetworkConfig) -> bool:
    """Whether pods of the network need the table, or are limited by it."""
    used = bool(network.ip_masq or network.port_mappings)
    return used or not store.read(tailnet.policy_of).is_open


def ensure(
    store: Store,
    name: str,
    ranges: Mapping[str, Sequence[str]],
    pod: PodRef = NOBODY,
    addresses: Sequence[Address] = (),
) -> None:
    """Make sure that the table has what a pod of the network `name` needs, and the pod's limits."""
    needs, policy = store.read(lambda db: (pod_ranges.needs_of(db), tailnet.policy_of(db)))
    if not ranges and policy.is_open:
        return
    need = name, json.dumps(ranges, sort_keys=True)
    comment = nft.table_comment(TABLE)
    if (not ranges or pod_ranges.is_met(needs, need)) and comment == ruleset.digest(needs, policy):
        pods = ruleset.each_with_namespace(pod, addresses)
        if policy.namespaces or tailnet.members(policy, pod_ranges.ranges_of_pods(needs), pods):
            store.atomically(lambda db: _limit(db, pod, addresses))
        return

    def work(db: sqlite3.Connection) -> None:
        pod_ranges.settle(db)
        if ranges and not pod_ranges.is_met(pod_ranges.needs_of(db), need):
            pod_ranges.add(db, need)
            pod_ranges.write_rows(db)
        ruleset.replace(db)
        _limit(db, pod, addresses)

    store.atomically(work)
    if comment is None:  # clients may have come while the table was missing
        from . import host_ports

        host_ports.forget_connections(store.read(ruleset.all_ports))


def set_policy(store: Store, policy: Policy) -> bool:
    """Apply this policy to all pods; whether that was a change. The store has it first: an ADD
    reads the policy after it got its address. So either the ADD sees this policy, or this sees the
    pod."""
    if store.read(tailnet.policy_of) == policy:
        return False

    def work(db: sqlite3.Connection) -> None:
        tailnet.record(db, policy)
        if nft.table_comment(TABLE) is not None or ruleset.is_needed(db):
            ruleset.replace(db)

    store.atomically(work)
    return True


def adopt_policy(db: sqlite3.Connection) -> None:
    """After a loss of the store: if the kernel limits pods, the policy is unknown. So pods may
    reach nothing until the daemon sets it again."""
    limited = any(chain == "tailnet" for chain, _unused in ruleset.live().rules)
    if limited and tailnet.policy_of(db).is_open:
        tailnet.record(db, FORGOTTEN)


def _limit(db: sqlite3.Connection, pod: PodRef, addresses: Sequence[Address]) -> None:
    """Put the pod's addresses into the right sets. Another pod may have had them before."""
    policy = tailnet.policy_of(db)
    if policy.is_open or not addresses:
        return
    wanted = tailnet.members(
        policy,
        pod_ranges.ranges_of_pods(pod_ranges.needs_of(db)),
        ruleset.each_with_namespace(pod, addresses),
    )
    try:
        tailnet.settle(TABLE, policy, wanted, addresses)
    except KernelError:
        ruleset.replace(db)  # another program has removed the sets
        tailnet.settle(TABLE, policy, wanted, addresses)


def forget_limits(store: Store, addresses: Sequence[Address]) -> None:
    """Remove the limits of a pod that can no longer send. If that fails, the daemon or the next pod
    with the address removes them."""

    def work(db: sqlite3.Connection) -> None:
        with suppress(KernelError):
            tailnet.settle(TABLE, tailnet.policy_of(db), {}, addresses)

    if addresses and not store.read(tailnet.policy_of).is_open:
        store.atomically(work)


def forget_unused(store: Store) -> None:
    """Remove the ranges that no pod needs any more."""

    def work(db: sqlite3.Connection) -> None:
        if pod_ranges.settle(db):
            ruleset.replace(db)

    store.atomically(work)


def differences(store: Store, owner: Owner, shared: bool = False) -> list[str]:
    """How the owner's part of the table differs from the store. With `shared`, also the rules and
    sets that all pods share."""
    comment = nft.table_comment(TABLE)
    if comment is None:
        return [f"nft table inet {TABLE}: missing"]
    needs, policy, ports, known, limited = store.read(
        lambda db: (
            *(
                pod_ranges.needs_of(db),
                tailnet.policy_of(db),
                ruleset.ports_of_owner(db, owner),
                store.attachment(owner),
            ),
            ruleset.limited_pods(db) if shared else {},
        )
    )
    found = []
    if comment != ruleset.digest(needs, policy):
        found.append(f"nft table inet {TABLE}: not what this release would write")
    found += pod_ranges.missing(needs, known.state.get("ranges") if known is not None else None)
    held = nft.contents(TABLE) if ports or shared else nft.NOTHING
    if shared and not found:
        found += _shared_differences(held, ruleset.contents(needs, policy, (), limited))
    for port in ports:
        have = [held.elements.get((name, key), "missing") for name, key, _unused in port.elements]
        expected = [value for _unused, _unused, value in port.elements]
        if have != expected:
            found.append(
                f"host port {port.protocol}/{port.host_port}: {':'.join(have)}, "
                f"expected {':'.join(expected)}"
            )
    return found


def _shared_differences(held: nft.Contents, wanted: nft.Contents) -> Iterator[str]:
    if held.rules != wanted.rules:
        missing = [rule[1] for rule in wanted.rules if rule not in held.rules]
        what = f"lacks the rules {', '.join(missing)}" if missing else "its rules were changed"
        yield f"nft table inet {TABLE}: {what}"
    for name, expected in wanted.sets.items():
        have = held.sets.get(name, ())
        if have != expected:
            shown, right = (", ".join(one) or "nothing" for one in (have, expected))
            yield f"nft set {name}: holds {shown}, expected {right}"


def repair(store: Store, deleted: Collection[Owner] = ()) -> bool:
    """Make the table what live pods need; whether anything had changed it. The ranges of a network
    whose last pod has gone are removed without counting as that. A node without networks needs no
    table. `deleted` are pods whose ports the store may still have."""

    def differs(db: sqlite3.Connection) -> bool:
        return any(pod_ranges.changes(db)) or was_changed(db)

    def was_changed(db: sqlite3.Connection) -> bool:
        _unused, missing = pod_ranges.changes(db)
        return bool(missing) or (ruleset.is_needed(db) and not _is_whole(db, deleted))

    def work(db: sqlite3.Connection) -> bool:
        if not differs(db):
            return False
        changed = was_changed(db)
        ruleset.replace(db, deleted)
        return changed

    repaired = store.read(differs) and store.atomically(work)
    if store.read(pod_ranges.rows_differ):
        store.atomically(pod_ranges.write_rows)
    if repaired:  # clients may have come while the rules were missing
        from . import host_ports

        host_ports.forget_connections(store.read(lambda db: ruleset.all_ports(db, deleted)))
    return repaired


def is_whole(store: Store) -> bool:
    """Whether the whole table is as the store has it. Its comment does not show whether another
    program has removed rules or elements."""
    return store.read(_is_whole)


def _is_whole(db: sqlite3.Connection, deleted: Collection[Owner] = ()) -> bool:
    if nft.table_comment(TABLE) != ruleset.comment_of(db):
        return False
    wanted = (
        pod_ranges.needs_of(db),
        tailnet.policy_of(db),
        ruleset.all_ports(db, deleted),
        ruleset.limited_pods(db, deleted),
    )
    return nft.contents(TABLE) == ruleset.contents(*wanted)


def is_current(store: Store) -> bool:
    return nft.table_comment(TABLE) == store.read(ruleset.comment_of)


@lru_cache(maxsize=1)
def try_out() -> None:
    """CniError if this node refuses the complete ruleset, with members in each set and map, or
    lists it differently. This uses a network namespace of its own, so that nothing stays. Success
    is remembered."""
    ranges = json.dumps(dict.fromkeys(("pods", "masqueraded", "cluster"), _SAMPLE_RANGES))
    needs = (("sample", ranges),)
    ports = [
        Port(family, protocol, host_ip, 8080, pod_ip, 80)
        for family, own, pod_ip in (
            (4, "192.0.2.1", "192.0.2.2"),
            (6, "2001:db8::1", "2001:db8::2"),
        )
        for protocol in ruleset.PROTOCOLS
        for host_ip in ("", own)
    ]

    pods = [("limited", ip_address(pod_ip)) for pod_ip in ("192.0.2.2", "2001:db8::2")]
    limited = tailnet.members(_SAMPLE_POLICY, pod_ranges.ranges_of_pods(needs), pods)

    def write() -> bool:
        nft.run_here(ruleset.text(needs, _SAMPLE_POLICY, ports, limited))
        same = nft.contents_here(TABLE) == ruleset.contents(needs, _SAMPLE_POLICY, ports, limited)
        comment = nft.table_comment(TABLE, here_only=True)
        return same and comment == ruleset.digest(needs, _SAMPLE_POLICY)

    try:
        same = netns.apart(write)
    except (CniError, OSError) as problem:
        raise CniError(
            KERNEL_LACKS,
            "this node's nftables refuses the rules that pods need",
            f"{problem}; expected libnftables 0.9.8 or newer and Linux 5.10 or newer",
        ) from problem
    if not same:
        raise CniError(
            KERNEL_LACKS,
            "this node's nftables lists other rules than were written",
            "expected libnftables 0.9.8 or newer and Linux 5.10 or newer",
        )
