# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""A node's status in one line, from what its daemon says: for headcnictl and for the controller."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .paths import KINDS, NONE, RELAYED

HEAD = (
    *("NODE", "READY", "MODE", "VERSION", "PODS", "POOL"),
    *("PEERS", "KEY", "FIREWALL", "DRIFT"),
)
UNKNOWN = "?"
KEY_DAYS = 7  # a key that expires sooner is a warning
FULL_PERCENT = 90  # a pool that is fuller is a warning
NAMES_SHOWN = 5
# Findings that cut no pod off yet, or not at all. The alerts make the same difference.
MILD = ("key-expires", "pod-cidr-guessed", "tailscaled-health")
NOT_KNOWN = "-unknown"  # the end of an id: something could not be found out, perhaps for a moment
SHORT = {"peer-relay": "relay"}


def row(name: str, status: Mapping[str, Any] | None, now: float) -> list[str]:
    """The cells of a line. A node without a status did not answer."""
    if status is None:
        return [name, "NO", *[UNKNOWN] * (len(HEAD) - 2)]
    return [
        name,
        _ready(status),
        str(status["mode"]),
        str(status["version"]),
        str(status["attachments"]),
        _pool(status.get("pools")),
        _peers(status.get("peers")),
        _key(status, now),
        _firewalls(status["firewalls"]),
        _drift(status.get("drift")),
    ]


def is_well(status: Mapping[str, Any]) -> bool:
    """A node is ready for kubelet although pods may be cut off by a fault."""
    return bool(status["ready"]) and not _grave(status)


def _ready(status: Mapping[str, Any]) -> str:
    if not status["ready"]:
        return "NO"
    return "yes" if is_well(status) else "FAULT"


def _grave(status: Mapping[str, Any]) -> bool:
    """Whether a fault cuts pods off. A daemon of an earlier release does not look for faults."""
    return any(not _is_mild(fault) for fault in status.get("faults") or ())


def _is_mild(fault: Mapping[str, Any]) -> bool:
    return fault["id"] in MILD or fault["id"].endswith(NOT_KNOWN)


def problems(status: Mapping[str, Any]) -> list[str]:
    """Why the node is not ready."""
    return [
        f"{condition['name']}: {condition['reason']}"
        for condition in status["conditions"]
        if not condition["ok"]
    ]


def warnings(status: Mapping[str, Any], now: float) -> list[str]:
    """What somebody should look at although the node is ready."""
    return [*_faults(status), *_warnings(status, now), *alarms(status)]


def _faults(status: Mapping[str, Any]) -> Iterator[str]:
    """What the daemon's last look has found. The key's expiry has a line of its own."""
    for fault in status.get("faults") or ():
        if fault["id"] == "key-expires":
            continue
        word = "WARNING" if _is_mild(fault) else "FAULT"
        run = f": {fault['run']}" if fault["run"] and fault["where"] == "node" else ""
        yield f"{word}: {fault['found']}{run or ': headcnictl diagnose has the command'}"
    if status.get("faults_problem"):
        yield str(status["faults_problem"])


def alarms(status: Mapping[str, Any]) -> list[str]:
    """The daemon's alarms and warnings. A daemon of an earlier release that still runs has no
    warnings."""
    held = [alarm for alarm in status["alarms"] if not alarm.get("holds_back", True)]
    return [f"ALARM: {alarm['message']}" for alarm in held] + [
        f"WARNING: {warning['message']}" for warning in status.get("warnings", ())
    ]


def _warnings(status: Mapping[str, Any], now: float) -> Iterator[str]:
    expires = float(status.get("key_expires") or 0)
    if expires and expires < now:
        yield "the node's key for the tailnet has expired: playbooks/rotate_keys.yml renews it"
    elif expires and expires < now + KEY_DAYS * 86400:
        yield (
            f"the node's key for the tailnet expires in {span(expires - now)}: "
            "playbooks/rotate_keys.yml renews it"
        )
    for pool in status.get("pools") or ():
        if _percent(pool) >= FULL_PERCENT:
            yield (
                f"{pool['free']} of {pool['total']} addresses of {', '.join(pool['subnets'])} are "
                "free: headcnictl ipam shows who has them"
            )
    for kind, said in ((RELAYED, "relayed"), ((NONE,), "without a path")):
        found = [peer for peer in status.get("troubled_peers") or () if peer["path"] in kind]
        if found:
            yield f"{said}: {_names(found)}"


def _names(peers: Sequence[Mapping[str, Any]]) -> str:
    shown = [
        f"{peer['name']} ({peer['through']})" if peer["through"] else str(peer["name"])
        for peer in peers[:NAMES_SHOWN]
    ]
    more = len(peers) - NAMES_SHOWN
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _pool(pools: Sequence[Mapping[str, Any]] | None) -> str:
    """How full the fullest pool is. A network has a pool from its first pod on."""
    if pools is None:
        return UNKNOWN
    return f"{max(map(_percent, pools), default=0)}%"


def _percent(pool: Mapping[str, Any]) -> int:
    total = int(pool["total"])
    return 100 * (total - int(pool["free"])) // total if total else 100


def _peers(peers: Mapping[str, int] | None) -> str:
    if peers is None:
        return UNKNOWN
    found = [f"{peers[kind]} {SHORT.get(kind, kind)}" for kind in KINDS if peers.get(kind)]
    return " ".join(found) or "0"


def _key(status: Mapping[str, Any], now: float) -> str:
    if "key_expires" not in status:
        return UNKNOWN
    expires = float(status["key_expires"])
    if not expires:
        return "never"
    return span(expires - now) if expires > now else "EXPIRED"


def span(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"


def _firewalls(found: Sequence[Mapping[str, Any]]) -> str:
    names = [str(firewall["name"]) + ("" if firewall["ok"] else "!") for firewall in found]
    return ",".join(names) or "-"


def _drift(drift: Mapping[str, Any] | None) -> str:
    return UNKNOWN if drift is None else str(sum(drift["repaired"].values()))


def lines(
    found: Mapping[str, Mapping[str, Any] | str], now: float | None = None
) -> tuple[list[list[str]], list[str]]:
    """Of many nodes: a row for each, problems first, and then what is wrong with which node. A node
    that has no status has the reason instead."""
    at = time.time() if now is None else now
    rows, said = [], []
    for name in sorted(found, key=lambda name: (_rank(found[name], at), name)):
        status = found[name]
        rows.append(row(name, None if isinstance(status, str) else status, at))
        said += [f"{name}: {text}" for text in _all_wrong(status, at)]
    return rows, said


def _all_wrong(status: Mapping[str, Any] | str, now: float) -> list[str]:
    if isinstance(status, str):
        return [status]
    return [*problems(status), *warnings(status, now)]


def _rank(status: Mapping[str, Any] | str, now: float) -> int:
    if isinstance(status, str):
        return 0
    if not status["ready"]:
        return 1
    if _grave(status):
        return 2
    return 3 if warnings(status, now) else 4
