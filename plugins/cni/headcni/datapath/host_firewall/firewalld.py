"""firewalld, by its own command: pods in its zone `trusted`, and tailscaled's port.

A zone of our own would need a reload of firewalld, which drops everything that was set at run time
only, such as bans. Members of a zone that exists are added at run time and permanently without
one, so they outlast firewalld's own reloads and restarts. What we added is written down, and only
that is removed again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_network
from typing import NamedTuple

from ...errors import KERNEL, CniError
from .chains import Table
from .needs import PodTraffic

SECONDS = 60  # firewalld may be busy with a reload
COMMAND, OFFLINE = "firewall-cmd", "firewall-offline-cmd"
TABLE = "firewalld"  # begins the names of its tables
ZONE = "trusted"
STATE_FILE = "/var/lib/headcni/firewalld.json"
_IPTABLES_CHAIN = "FORWARD_direct"  # what firewalld makes where its back end is iptables
_CONFLICT = "ZONE_CONFLICT"


class Member(NamedTuple):
    """What a zone has: `kind` is source, interface, port or rich-rule."""

    zone: str
    kind: str
    value: str

    def __str__(self) -> str:
        return f"{self.kind} {self.value}"


def writes(table: Table) -> bool:
    return table.name.startswith(TABLE) or _IPTABLES_CHAIN in table.chains


def fingerprint(table: Table) -> int:
    """Differs whenever firewalld has changed its rules: each rule has a number of its own."""
    return hash(tuple((name, rule.handle) for name, rules in table.rules.items() for rule in rules))


def differences(traffic: PodTraffic) -> list[str]:
    """What of ours firewalld does not have, in words."""
    wanted = _wanted(traffic)
    _refuse_overlaps(traffic)
    found = []
    for permanent in (False, True):
        have = _have(wanted, permanent)
        when = "permanent" if permanent else "runtime"
        found += [
            f"firewalld: zone {one.zone} has no {one} ({when})" for one in wanted if one not in have
        ]
    stale = _recall() - set(wanted)
    return found + [f"firewalld: zone {one.zone} has a former {one}" for one in sorted(stale)]


def ensure(traffic: PodTraffic) -> None:
    wanted, ours = _wanted(traffic), _recall()
    stale = ours - set(wanted)
    for permanent in (False, True):
        have = _have(wanted, permanent)
        for one in wanted:
            if one not in have:
                ours.add(one)
                _remember(ours)  # first: what we add must never go unnoted
                _add(one, permanent)
        for one in stale:
            _run(*_where(one.zone, permanent), f"--remove-{one.kind}={one.value}", missing_ok=True)
    _remember(ours - stale)


def remove() -> list[str]:
    """Take out what we added, also while firewalld does not run; what that was."""
    ours = sorted(_recall())
    if not ours:
        return []
    running = runs()
    for one in ours:
        option = f"--remove-{one.kind}={one.value}"
        if running:
            _run(*_where(one.zone, False), option, missing_ok=True)
            _run(*_where(one.zone, True), option, missing_ok=True)
        elif shutil.which(OFFLINE):
            _run(f"--zone={one.zone}", option, missing_ok=True, command=OFFLINE)
    with suppress(FileNotFoundError):  # also if firewalld was removed since, with all that it had
        os.unlink(STATE_FILE)
    return [f"firewalld zone {one.zone} {one}" for one in ours]


def added() -> tuple[str, ...]:
    """What is ours there, in words."""
    return tuple(f"{one} to zone {one.zone}" for one in sorted(_recall()))


def runs() -> bool:
    with suppress(CniError):
        return _run("--state").strip() == "running"
    return False


def _wanted(traffic: PodTraffic) -> list[Member]:
    """This node's pods by their links, those of other nodes and our own tailscaled by their
    addresses: the tailnet's other machines come by the same links."""
    found = [Member(ZONE, "interface", one) for one in traffic.links]
    found += [Member(ZONE, "source", str(one)) for one in traffic.trusted]
    found += [Member(ZONE, "source", str(one)) for one in traffic.tailscaled]
    in_default = [Member("", "rich-rule", one) for one in _rich_rules(traffic)]
    if traffic.udp_port:
        in_default.append(Member("", "port", f"{traffic.udp_port}/udp"))
    zone = _run("--get-default-zone").strip() if in_default else ""
    return found + [one._replace(zone=zone) for one in in_default]


def _rich_rules(traffic: PodTraffic) -> list[str]:
    """What tailnet peers may reach of the node, in the form in which firewalld lists it. They have
    addresses of any kind, so the rules are about the node's end of the link; our own table keeps
    packets of other links from it. A rule of the operator's that denies comes first."""
    found = []
    for address in traffic.node:
        where = f'rule family="ipv{address.version}" destination address="{address}"'
        for protocol, port in traffic.answered_ports():
            chosen = f' port port="{port}" protocol="{protocol}"' if port else ""
            found.append(f"{where}{chosen} accept")
    return found


def _have(wanted: Iterable[Member], permanent: bool) -> set[Member]:
    found = set()
    for zone, kind in dict.fromkeys((one.zone, one.kind) for one in wanted):
        listed = _run(*_where(zone, permanent), f"--list-{kind}s")
        for value in listed.splitlines() if kind == "rich-rule" else listed.split():
            found.add(Member(zone, kind, value))
    return found


def _refuse_overlaps(traffic: PodTraffic) -> None:
    """firewalld asks its zones in the order of their names: a range in an earlier one wins."""
    zone = ""
    for line in _run("--get-active-zones").splitlines():
        if line and not line.startswith(" "):
            zone = line.split()[0]
        elif line.strip().startswith("sources:") and zone < ZONE:
            for text in line.partition(":")[2].split():
                with suppress(ValueError):
                    theirs = ip_network(text, strict=False)
                    for one in traffic.trusted:
                        if one.version == theirs.version and one.overlaps(theirs):
                            raise _in_another_zone(text, zone, False)


def _add(one: Member, permanent: bool) -> None:
    try:
        _run(*_where(one.zone, permanent), f"--add-{one.kind}={one.value}")
    except CniError as problem:
        if _CONFLICT not in problem.details:
            raise
        asked = f"--get-zone-of-{one.kind}={one.value}"
        when = ["--permanent"] if permanent else []
        zone = _run(*when, asked, missing_ok=True).strip() or "another zone"
        raise _in_another_zone(one.value, zone, one.kind == "interface") from None


def _in_another_zone(value: str, zone: str, is_interface: bool) -> CniError:
    kind = "interface" if is_interface else "source"
    option = f"--zone={zone} --remove-{kind}={value}"
    return CniError(
        KERNEL,
        f"firewalld has {value}, which pods use, in its zone {zone}",
        f"take it out there: {COMMAND} --permanent {option} && {COMMAND} {option}; or, if that "
        "zone lets pods through, set network.firewall to none",
    )


def _where(zone: str, permanent: bool) -> list[str]:
    return [*(["--permanent"] if permanent else []), f"--zone={zone}"]


def _recall() -> set[Member]:
    """What we added."""
    try:
        with open(STATE_FILE, encoding="utf-8") as file:
            return {Member(*map(str, one)) for one in json.load(file)}
    except (OSError, ValueError, TypeError):
        return set()


def _remember(ours: Iterable[Member]) -> None:
    content = json.dumps(sorted(ours))
    with suppress(OSError), open(STATE_FILE, encoding="utf-8") as file:
        if file.read() == content:
            return
    os.makedirs(os.path.dirname(STATE_FILE), mode=0o700, exist_ok=True)
    with open(f"{STATE_FILE}.new", "w", encoding="utf-8") as file:
        file.write(content)
    os.replace(f"{STATE_FILE}.new", STATE_FILE)


def _run(*options: str, missing_ok: bool = False, command: str = COMMAND) -> str:
    try:
        done = subprocess.run(
            [command, *options], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise CniError(KERNEL, f"{command} could not be run", str(problem)) from None
    if done.returncode != 0 and not missing_ok:
        said = " ".join(done.stderr.split())[:300]
        raise CniError(KERNEL, f"{command} {' '.join(options)} failed", said)
    return done.stdout
