"""firewalld, by its own command: pods' addresses in its zone `trusted`, and tailscaled's port.

A zone of our own would need a reload of firewalld, which drops everything that was set at run time
only, such as bans. Members of a zone that exists are added at run time and permanently without
one, so they outlast firewalld's own reloads and restarts. What we added is written down, and only
that is removed again.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from contextlib import suppress

from ...errors import KERNEL, CniError
from .chains import Table
from .needs import PodTraffic

SECONDS = 60  # firewalld may be busy with a reload
COMMAND = "firewall-cmd"
TABLE = "firewalld"
ZONE = "trusted"
STATE_FILE = "/var/lib/headcni/firewalld.json"
_IPTABLES_CHAIN = "FORWARD_direct"  # what firewalld makes where its back end is iptables
_CONFLICT = "ZONE_CONFLICT"


def writes(table: Table) -> bool:
    return table.name == TABLE or _IPTABLES_CHAIN in table.chains


def fingerprint(table: Table) -> int:
    """Differs whenever firewalld has changed its rules: each rule has a number of its own."""
    return hash(tuple((name, rule.handle) for name, rules in table.rules.items() for rule in rules))


def wanted(traffic: PodTraffic) -> list[str]:
    """Members of the zone: pods of all nodes, and in daemon mode our own tailscaled."""
    return [*map(str, traffic.cluster_cidrs), *map(str, traffic.tailscaled)]


def differences(traffic: PodTraffic) -> list[str]:
    """What of ours firewalld does not have, in words."""
    found = []
    for permanent in (False, True):
        when = "permanent" if permanent else "runtime"
        have = _sources(permanent)
        found += [
            f"firewalld: {one} is not in zone {ZONE} ({when})"
            for one in wanted(traffic)
            if one not in have
        ]
        port = _port(traffic)
        zone = _run("--get-default-zone").strip()
        if port and port not in _run(*_where(zone, permanent), "--list-ports").split():
            found.append(f"firewalld: port {port} is not open in zone {zone} ({when})")
    return found


def ensure(traffic: PodTraffic) -> None:
    sources, ports = _recall()
    for permanent in (False, True):
        have = _sources(permanent)
        for one in wanted(traffic):
            if one not in have:
                sources.add(one)
                _remember(sources, ports)  # first: what we add must never go unnoted
                _add_source(one, permanent)
        for one in sources - set(wanted(traffic)):
            _run(*_where(ZONE, permanent), f"--remove-source={one}", missing_ok=True)
        port, zone = _port(traffic), _run("--get-default-zone").strip()
        if port and port not in _run(*_where(zone, permanent), "--list-ports").split():
            ports.add((zone, port))
            _remember(sources, ports)
            _run(*_where(zone, permanent), f"--add-port={port}")
    _remember(sources & set(wanted(traffic)), ports)


def remove() -> list[str]:
    """Take out what we added, also while firewalld does not run; what that was."""
    sources, ports = _recall()
    options = [(ZONE, f"--remove-source={one}") for one in sorted(sources)]
    options += [(zone, f"--remove-port={port}") for zone, port in sorted(ports)]
    if not options:
        return []
    for zone, option in options:
        if runs():
            _run(*_where(zone, False), option, missing_ok=True)
            _run(*_where(zone, True), option, missing_ok=True)
        else:
            _run(f"--zone={zone}", option, missing_ok=True, command="firewall-offline-cmd")
    with suppress(FileNotFoundError):
        os.unlink(STATE_FILE)
    return [f"firewalld zone {zone} {option.partition('=')[2]}" for zone, option in options]


def added() -> tuple[str, ...]:
    """What is ours there, in words."""
    sources, ports = _recall()
    found = [f"{one} to zone {ZONE}" for one in sorted(sources)]
    return (*found, *(f"port {port} to zone {zone}" for zone, port in sorted(ports)))


def runs() -> bool:
    with suppress(CniError):
        return _run("--state").strip() == "running"
    return False


def _add_source(source: str, permanent: bool) -> None:
    try:
        _run(*_where(ZONE, permanent), f"--add-source={source}")
    except CniError as problem:
        if _CONFLICT not in problem.details:
            raise
        zone = _run(f"--get-zone-of-source={source}").strip() or "another zone"
        raise CniError(
            KERNEL,
            f"firewalld has {source}, pods' addresses, in zone {zone}",
            f"move it: firewall-cmd --permanent --zone={zone} --remove-source={source} && "
            f"firewall-cmd --zone={zone} --remove-source={source}; or, if that zone lets pods "
            "through, set network.firewall to none",
        ) from None


def _sources(permanent: bool) -> list[str]:
    return _run(*_where(ZONE, permanent), "--list-sources").split()


def _where(zone: str, permanent: bool) -> list[str]:
    return [*(["--permanent"] if permanent else []), f"--zone={zone}"]


def _port(traffic: PodTraffic) -> str:
    return f"{traffic.udp_port}/udp" if traffic.udp_port else ""


def _recall() -> tuple[set[str], set[tuple[str, str]]]:
    """The sources and the ports, each with its zone, that we added."""
    try:
        with open(STATE_FILE, encoding="utf-8") as file:
            found = json.load(file)
        return set(found["sources"]), {(zone, port) for zone, port in found["ports"]}
    except (OSError, ValueError, KeyError, TypeError):
        return set(), set()


def _remember(sources: Iterable[str], ports: Iterable[tuple[str, str]]) -> None:
    content = json.dumps({"sources": sorted(sources), "ports": sorted(ports)})
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
