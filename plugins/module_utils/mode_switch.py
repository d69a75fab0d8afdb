# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""A node on its way from one mode to the other: how far it has come, and what a cut-off run left.

What mode a node is in, its configuration says. That a switch has begun and is not finished, a note
beside the daemon's state says, with the keys of both identities, as the one that is left may be
gone when Headscale has still to be told.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from ipaddress import ip_network
from typing import Any, NamedTuple

from . import node, node_config
from .shared import modes
from .shared.filelock import lock

NOTE = "/var/lib/headcni/switch.json"
NEXT = f"{node_config.PATH}.next"
PREVIOUS = f"{node_config.PATH}.previous"
STATE_OF_OURS = "/var/lib/headcni/tailscaled"
LOCK = "/run/headcni-switch.lock"
LOCK_SECONDS = 120.0
DAEMON = "headcni-daemon.service"
COMMAND = os.path.join(node_config.RELEASE, "bin", "headcnictl")


class SwitchError(Exception):
    """The switch cannot go on; the message says why and what to do."""


class Note(NamedTuple):
    """A switch that has begun. `keys` are the node keys of the identities, by mode."""

    left: str
    to: str
    keys: Mapping[str, str]


@contextmanager
def alone() -> Iterator[int]:
    """One at a time: of a run that was killed, a step may still be under way here."""
    handle = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            lock(handle, LOCK, LOCK_SECONDS)
        except TimeoutError:
            raise SwitchError(
                f"another switch works on this node since {LOCK_SECONDS:g} s: see what holds {LOCK}"
            ) from None
        yield handle
    finally:
        os.close(handle)


def read_note() -> Note | None:
    try:
        with open(NOTE, encoding="utf-8") as stream:
            found = json.load(stream)
        return Note(str(found["from"]), str(found["to"]), dict(found["keys"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise SwitchError(
            f"{NOTE} cannot be understood: see `headcnictl mode show` and remove it"
        ) from None


def write_note(note: Note) -> bool:
    """Whether it said something else before."""
    if read_note() == note:
        return False
    fresh = f"{NOTE}.new"
    with suppress(FileNotFoundError):
        os.unlink(fresh)
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(handle, "w", encoding="utf-8") as stream:
        json.dump({"from": note.left, "to": note.to, "keys": dict(note.keys)}, stream)
        stream.flush()
        os.fsync(handle)
    os.replace(fresh, NOTE)
    return True


def configuration() -> dict[str, Any]:
    text = node_config.read()
    if text is None:
        raise SwitchError(f"{node_config.PATH} is not there: run site.yml first")
    return node_config.effective(text)


def mode_of(config: Mapping[str, Any]) -> str:
    return str(config["tailscale"]["mode"])


def left_behind() -> list[str]:
    """What a move that was cut off needs put right, in words."""
    found = []
    if os.path.exists(PREVIOUS):
        found.append(f"{PREVIOUS} is left of a move that was cut off")
    if node.unit(DAEMON).active in ("inactive", "failed"):
        found.append(f"{DAEMON} does not run")
    return found


def put_right() -> None:
    """Without a configuration, the former; with one, that one: the move had got so far."""
    if os.path.exists(PREVIOUS):
        if os.path.exists(node_config.PATH):
            os.unlink(PREVIOUS)
        else:
            os.replace(PREVIOUS, node_config.PATH)
    if not node.unit(DAEMON).is_active:
        node.order("start", DAEMON)


def drop(handle: int, mode: str, own_socket: str) -> str:
    """What was changed for a mode that the node is not in. Of the node's own tailscaled, a release
    before 0.2 knows the usual socket only."""
    moved = mode == "host" and own_socket != modes.SOCKETS["host"]
    return ctl(handle, "drop", mode, *(("--socket", own_socket) if moved else ()))


def ctl(handle: int, *words: str) -> str:
    """`headcnictl mode …`, which goes on holding the lock if this process is killed."""
    try:
        done = subprocess.run(
            [COMMAND, "mode", *words],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            stdin=subprocess.DEVNULL,
            pass_fds=(handle,),
        )
    except FileNotFoundError:
        raise SwitchError(f"{COMMAND} is not there: run site.yml first") from None
    except subprocess.TimeoutExpired:
        raise SwitchError(f"headcnictl mode {words[0]} did not end in 240 s") from None
    if done.returncode != 0:
        said = " ".join((done.stderr.strip() or done.stdout.strip()).split())
        raise SwitchError(f"headcnictl mode {' '.join(words)}: {said[-600:]}")
    return " ".join(done.stdout.split())


def forget_ours() -> bool:
    """The keys of a tailscaled of ours that the tailnet does not know any more."""
    if not os.path.isdir(STATE_OF_OURS):
        return False
    shutil.rmtree(STATE_OF_OURS)
    return True


def targets(config: Mapping[str, Any], status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What pods of this node should reach: each other node, by its gateway of pods, which is there
    if it has any, and by its address in the tailnet. As the module headcni_probe takes them."""
    own = [ip_network(one) for one in config["network"]["podCIDR"]["nodeLocal"]]
    base = [ip_network(one) for one in config["network"]["podCIDR"]["base"] or ()]
    found = []
    for peer in (status.get("Peer") or {}).values():
        routes = [ip_network(one) for one in peer.get("PrimaryRoutes") or ()]
        pods = [
            one
            for one in routes
            if one not in own
            and any(one.version == wide.version and one.subnet_of(wide) for wide in base or [one])  # type: ignore[arg-type]
        ]
        if not pods or not peer.get("Online"):
            continue
        name = str(peer.get("DNSName") or "").partition(".")[0] or str(peer.get("HostName"))
        found.append(_target(f"{name} (pods)", [str(one[1]) for one in pods]))
        found.append(_target(f"{name} (node)", list(peer.get("TailscaleIPs") or ())))
    return found


def _target(name: str, addresses: list[str]) -> dict[str, Any]:
    return {
        "node": name,
        "addresses": addresses,
        "mtu": 1280,
        "host_port": 0,
        "host_addresses": [],
        "tailnet_addresses": [],
        "tailnet_name": "",
        "pod_cidrs": [],
    }
