# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""How a node was before HeadCNI came, so that it can be so again: written down once, at the first
installation, and read when HeadCNI leaves."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from .shared.localapi import SOCKET, LocalAPI, LocalAPIError

PATH = "/var/lib/headcni/before.json"
# What tailscaled, the daemon or a pod's network turn.
_SYSCTLS = (
    "net/ipv4/ip_forward",
    "net/ipv6/conf/all/forwarding",
    "net/ipv4/conf/*/rp_filter",
    "net/ipv4/conf/*/route_localnet",
    "net/ipv6/conf/*/accept_ra",
)
_DIRECTORIES = ("/etc/cni/net.d", "/var/lib/cni", "/etc/netns")
# What a join turns. Routes are the daemon's, which knows its own.
SWITCHES = ("RouteAll", "NoSNAT", "CorpDNS", "Hostname")


def remember(directories: Iterable[str], socket: str = SOCKET, path: str = PATH) -> None:
    """Once: what is there already counts. The socket is that of the node's own tailscaled."""
    if os.path.exists(path):
        return
    found = {
        "sysctls": dict(_sysctls()),
        "missing": sorted(set(_missing((*_DIRECTORIES, *directories)))),
        "tailscale": _tailscale(socket),
    }
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    _write(found, path)


def note_turned(edits: Mapping[str, Any], path: str = PATH) -> None:
    """What a join is about to turn, of a tailscaled that was somebody's: this alone is turned back,
    and not what he has turned since."""
    before = recall(path)
    noted = (before.get("tailscale") or {}).get("turned")
    ours = {name: edits[name] for name in SWITCHES if name in edits}
    if isinstance(noted, dict) and ours and {**noted, **ours} != noted:
        noted.update(ours)
        _write(before, path)


def note_tailscale_is_ours(path: str = PATH) -> None:
    """Before any of it is removed: a run that is cut off then leaves nothing that shows it."""
    before = recall(path)
    tailscale = before.get("tailscale")
    if isinstance(tailscale, dict) and not tailscale.get("ours"):
        tailscale["ours"] = True
        _write(before, path)


def prefs_to_turn_back(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """A note of an older release does not say who turned what: then all count as ours."""
    tailscale = before.get("tailscale") or {}
    was, turned = tailscale.get("prefs") or {}, tailscale.get("turned")
    found = {}
    for name in SWITCHES:
        if name in was:
            value = now.get(name) or type(was[name])()
            is_ours = turned is None or (name in turned and turned[name] == value)
            if value != was[name] and is_ours:
                found[name] = was[name]
    return found


def _write(found: Mapping[str, Any], path: str) -> None:
    fresh = f"{path}.new"
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(handle, "w", encoding="utf-8") as stream:
        json.dump(found, stream)
        stream.flush()
        os.fsync(handle)
    os.replace(fresh, path)


def recall(path: str = PATH) -> dict[str, Any]:
    """Nothing, if nobody wrote it down, or not so that it can be read."""
    with suppress(OSError, ValueError):
        with open(path, encoding="utf-8") as stream:
            found = json.load(stream)
        if isinstance(found, dict):
            return found
    return {}


def turned(before: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Sysctls that are another now: path, value now, value before. Forwarding first, as it turns
    others along."""
    found = []
    for path, value in sorted(dict(before.get("sysctls") or {}).items(), key=_forwarding_first):
        now = read_sysctl(path)
        if now is not None and now != value:
            found.append((path, now, value))
    return found


def _forwarding_first(item: tuple[str, str]) -> tuple[bool, str]:
    return "forward" not in item[0], item[0]


def turn_back(path: str, value: str) -> None:
    with open(f"/proc/sys/{path}", "w", encoding="ascii") as stream:
        stream.write(value)


def read_sysctl(path: str) -> str | None:
    try:
        with open(f"/proc/sys/{path}", encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return None


def _sysctls() -> Iterator[tuple[str, str]]:
    for pattern in _SYSCTLS:
        for found in glob.glob(f"/proc/sys/{pattern}"):
            path = found[len("/proc/sys/") :]
            value = read_sysctl(path)
            if value is not None:
                yield path, value


def _missing(directories: Iterable[str]) -> Iterator[str]:
    for directory in directories:
        while directory not in ("/", "") and not os.path.isdir(directory):
            yield directory
            directory = os.path.dirname(directory)


def _tailscale(socket: str) -> dict[str, Any]:
    """Of the node's own tailscaled, if it has joined a tailnet: then it is somebody's."""
    api = LocalAPI(socket)
    try:
        if not api.status().have_node_key:
            return {"joined": False, "socket": socket}
        prefs = api.prefs()
    except LocalAPIError:
        return {"joined": False, "socket": socket}
    kept = {name: prefs.get(name) for name in (*SWITCHES, "ControlURL")}
    return {"joined": True, "prefs": kept, "turned": {}, "socket": socket}


def own_socket(before: Mapping[str, Any]) -> str:
    """Where the node's own tailscaled answered. A note of an older release does not say it."""
    return str((before.get("tailscale") or {}).get("socket") or SOCKET)
