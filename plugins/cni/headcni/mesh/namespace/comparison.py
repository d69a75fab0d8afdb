"""Comparing links, routes, rules and nft tables with what they should be, and repairing them.

Each function acts in the network namespace in which its netlink handle was opened.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Callable, Optional

from ...datapath import netns, nft
from ...datapath.rtnl import IFF_UP, RT_TABLE_MAIN, RTPROT_HEADCNI
from ...model import Address
from .plan import ANYWHERE, PRIORITIES, TAILSCALED_MASK, Cable, Rule

TABLE = "headcni_mesh"  # of nft; there is one on the host and one inside


class Comparison:
    """Records differences, and repairs them if asked to: `check` and `ensure` share their code."""

    def __init__(self, repairing: bool) -> None:
        self.repairing = repairing
        self.found: list[str] = []

    def __call__(self, right: bool, difference: str, repair: Callable[[], object]) -> bool:
        """Returns whether it is right now."""
        if right:
            return True
        self.found.append(difference)
        if self.repairing:
            repair()
        return self.repairing

    def sysctl(self, path: str, value: str, where: str = "") -> None:
        have = netns.read_sysctl(path)
        self(
            have in (None, value),
            f"{where}sysctl {path.replace('/', '.')}: {have}, expected {value}",
            lambda: netns.write_sysctl(path, value),
        )


def see_link(
    see: Comparison, kernel: Any, where: str, name: str, cable: Cable, end: Mapping[int, Address]
) -> int:
    link = link_named(kernel, name)
    index: int = link["index"]
    see(
        link.get("IFLA_MTU") == cable.mtu,
        f"{where}{name} has MTU {link.get('IFLA_MTU')}, expected {cable.mtu}",
        lambda: kernel.link("set", index=index, mtu=cable.mtu),
    )
    have, want = addresses_of(kernel, index), cable.prefixed(end)
    for address in sorted(want - have):
        # Without duplicate address detection: nobody else is on the link.
        see(
            False,
            f"{where}{name} has no address {address}",
            partial(kernel.addr, "add", index=index, address=address, flags=0x02),
        )
    for address in sorted(have - want):
        see(
            False,
            f"{where}{name} has the address {address}, which is not of the link",
            partial(kernel.addr, "del", index=index, address=address),
        )
    see(
        bool(link["flags"] & IFF_UP),
        f"{where}{name} is down",
        lambda: kernel.link("set", index=index, state="up"),
    )
    return index


def see_routes(
    see: Comparison,
    kernel: Any,
    where: str,
    index: int,
    wanted: Sequence[Mapping[str, Any]],
    table: int,
    exactly: bool = False,
) -> None:
    have = [
        route
        for family in (socket.AF_INET, socket.AF_INET6)
        for route in _routes(kernel, family, table)
    ]

    def replace(route: Mapping[str, Any]) -> None:
        extra = {key: route[key] for key in ("prefsrc",) if key in route}
        if "mtu" in route:
            extra["metrics"] = {"mtu": route["mtu"]}
        kernel.route(
            "replace",
            family=socket.AF_INET6 if ":" in route["dst"] else socket.AF_INET,
            dst=route["dst"],
            gateway=route["gateway"],
            oif=index,
            table=table,
            proto=RTPROT_HEADCNI,
            **extra,
        )

    for route in wanted:
        full = {**route, "oif": index}
        see(
            any(full.items() <= route.items() for route in have),
            f"{where}no route {route['dst']} via {route['gateway']}",
            partial(replace, route),
        )
    known = {route["dst"] for route in wanted}
    for route in have if exactly else ():
        see(
            route["dst"] in known,
            f"{where}a route {route['dst']} too many in table {table}",
            partial(kernel.route, "del", dst=route["dst"], table=table),
        )


def see_rules(see: Comparison, kernel: Any, where: str, wanted: Iterable[Rule]) -> None:
    want, have = set(wanted), our_rules(kernel)
    for rule in sorted(want - set(have)):
        see(False, f"{where}no rule {_shown(rule)}", partial(change_rule, kernel, "add", rule))
    for rule in sorted(set(have) - want):
        see(
            False,
            f"{where}a rule too many: {_shown(rule)}",
            partial(change_rule, kernel, "del", rule),
        )


def _shown(rule: Rule) -> str:
    words = [f"{rule.priority}:"]
    mark = f"{rule.mark:#x}/{TAILSCALED_MASK:#x}" if rule.mark else ""
    shown = {"from": rule.src or "all", "to": rule.dst, "iif": rule.iif, "fwmark": mark}
    for word, value in shown.items():
        words += [word, value] if value else []
    table = "main" if rule.table == RT_TABLE_MAIN else rule.table
    return " ".join([*words, f"goto {rule.goto}" if rule.goto else f"lookup {table}"])


def change_rule(kernel: Any, verb: str, rule: Rule) -> None:
    given: dict[str, Any] = {"priority": rule.priority}
    keys = ("table", "src", "dst", "goto")
    given.update({key: value for key in keys if (value := getattr(rule, key))})
    if rule.iif:
        given["iifname"] = rule.iif
    if rule.mark:
        given.update(fwmark=rule.mark, fwmask=TAILSCALED_MASK)
    if rule.goto:
        given["action"] = "goto"
    family = socket.AF_INET if rule.version == 4 else socket.AF_INET6
    kernel.rule(verb, family=family, protocol=RTPROT_HEADCNI, **given)


def our_rules(kernel: Any) -> list[Rule]:
    found = []
    for version, family in ((4, socket.AF_INET), (6, socket.AF_INET6)):
        for rule in kernel.get_rules(family=family):
            if rule.get("FRA_PROTOCOL") != RTPROT_HEADCNI:
                continue
            if rule.get("FRA_PRIORITY") not in PRIORITIES:
                continue
            ends = {
                key: f"{rule.get(attribute)}/{rule[f'{key}_len']}" if rule.get(attribute) else ""
                for key, attribute in (("src", "FRA_SRC"), ("dst", "FRA_DST"))
            }
            found.append(
                Rule(
                    version,
                    rule.get("FRA_PRIORITY"),
                    rule.get("FRA_TABLE") or 0,
                    rule.get("FRA_IIFNAME") or "",
                    mark=rule.get("FRA_FWMARK") or 0,
                    goto=rule.get("FRA_GOTO") or 0,
                    **ends,
                )
            )
    return found


def see_table(see: Comparison, where: str, chains: Mapping[str, Sequence[str]]) -> None:
    """Replace the whole table in one transaction if its digest or its rules differ. Each rule has a
    comment, which shows when a rule was replaced by another."""
    body, expected = "", []
    for name, (hook, *rules) in chains.items():
        lines = [f'{rule} comment "rule {at}"' for at, rule in enumerate(rules, 1)]
        expected += [(name, f"rule {at}") for at in range(1, len(rules) + 1)]
        body += "\n".join([f"chain {name} {{", hook, *lines, "}", ""])
    comment = f"headcni {hashlib.sha256(body.encode()).hexdigest()[:24]}"
    have = nft.table_comment(TABLE, here_only=True)
    if have is None:
        what = "missing"
    elif have != comment:
        what = "not what this release and configuration would write"
    else:
        have_rules = nft.contents_here(TABLE).rules
        missing = sum(rule not in have_rules for rule in expected)
        changed = f"lacks {missing} of its rules" if missing else "its rules were changed"
        what = "" if have_rules == tuple(expected) else changed
    see(
        not what,
        f"{where}nft table inet {TABLE}: {what}",
        lambda: nft.run_here(
            f"table inet {TABLE}\ndelete table inet {TABLE}\n"
            f'table inet {TABLE} {{ comment "{comment}"\n{body}}}\n'
        ),
    )


def link_named(kernel: Any, name: str) -> Any:
    return next((link for link in kernel.get_links() if link.get("IFLA_IFNAME") == name), None)


def name_of(kernel: Any, index: Optional[int]) -> str:
    links = kernel.get_links(index) if index else ()
    return next((link.get("IFLA_IFNAME") for link in links), "")


def kind_of(link: Any) -> Optional[str]:
    info = link.get("IFLA_LINKINFO")
    kind: Optional[str] = info.get("IFLA_INFO_KIND") if info else None
    return kind


def addresses_of(kernel: Any, index: int) -> set[str]:
    """The addresses of global scope, with their prefix lengths."""
    if not index:
        return set()
    return {
        f"{found.get('IFA_LOCAL') or found.get('IFA_ADDRESS')}/{found['prefixlen']}"
        for found in kernel.get_addr(index=index)
        if found["scope"] == 0
    }


def _routes(kernel: Any, family: int, table: int) -> Iterator[dict[str, Any]]:
    for route in kernel.get_routes(family=family, table=table):
        metrics = route.get("RTA_METRICS")
        yield {
            "dst": f"{route.get('RTA_DST') or ANYWHERE[family]}/{route['dst_len']}",
            "gateway": route.get("RTA_GATEWAY"),
            "oif": route.get("RTA_OIF"),
            "prefsrc": route.get("RTA_PREFSRC"),
            "mtu": metrics.get("RTAX_MTU") if metrics else None,
        }
