"""The prefs that HeadCNI sets in a tailscaled: routes to advertise, and switches.

In host mode the tailscaled is the operator's own, so what we change in it we put back.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_network
from typing import Any, Optional

from ..model import Network
from ..shared.localapi import REFUSED
from .localapi import INITIAL_PREFS, LOGGED_OUT, LocalApi, Stream, TailscaleError

STATE_FILE = "/var/lib/headcni/tailscale-prefs.json"
ECHO_SECONDS = 2.0
EDIT_TRIES = 5


@dataclass(frozen=True)
class _State:
    """What we changed in tailscaled's prefs: the routes that we added, and the switches that we
    turned with the values they had before."""

    advertised: tuple[str, ...] = ()
    former: Mapping[str, bool] = field(default_factory=dict)


class NodePrefs:
    """Merges the prefs that HeadCNI needs with those that the operator has set.

    A route that was advertised before we asked for it is the operator's, and stays when ours go.
    What is ours is written to a file before tailscaled is told. A process that dies in between
    leaves a note about a route that does not exist, never a route without a note.
    """

    def __init__(self, api: LocalApi, state_file: str = STATE_FILE) -> None:
        self._api = api
        self._file = state_file
        self._lock = threading.Lock()

    def ensure(
        self,
        cidrs: Iterable[Network],
        *,
        route_all: Optional[bool] = True,
        no_snat: Optional[bool] = True,
    ) -> tuple[str, ...]:
        """Advertise exactly these of ours and set the switches. None leaves a switch alone. Returns
        what was changed, in words."""
        switches = {"RouteAll": route_all, "NoSNAT": no_snat}
        wanted = {name: value for name, value in switches.items() if value is not None}
        with self._lock:
            return self._change(tuple(map(str, cidrs)), wanted)

    def advertise(self, cidrs: Iterable[Network]) -> tuple[str, ...]:
        """Advertise these, and withdraw what we advertised before and do not name now."""
        return self.ensure(cidrs, route_all=None, no_snat=None)

    def withdraw(self, cidrs: Optional[Iterable[Network]] = None) -> tuple[str, ...]:
        """Stop advertising these, or all of ours; never the operator's routes."""
        with self._lock:
            state = self._read()
            gone = set(state.advertised if cidrs is None else map(str, cidrs))
            return self._change(tuple(cidr for cidr in state.advertised if cidr not in gone), {})

    def restore(self) -> tuple[str, ...]:
        """For the uninstall: withdraw our routes and give each switch its former value."""
        with self._lock:
            changed = self._change((), self._read().former)
            with suppress(FileNotFoundError):
                os.unlink(self._file)
            return changed

    def approved(self, cidrs: Iterable[Network]) -> dict[str, bool]:
        """Which of these the control server has approved, as far as this node knows: Headscale
        tells the other nodes at once, and this node up to minutes later."""
        served = set(self._api.status(peers=False).served)
        return {str(cidr): str(cidr) in served for cidr in cidrs}

    def _change(self, cidrs: tuple[str, ...], switches: Mapping[str, bool]) -> tuple[str, ...]:
        state = self._read()
        prefs = self._api.prefs()
        if not _edits(prefs, state.advertised, cidrs, switches):
            self._write(state, prefs, cidrs, switches)
            return ()
        adding = set(cidrs) - _routes(prefs)
        if adding and self._api.status(peers=False).state == "NeedsLogin":
            raise TailscaleError(
                LOGGED_OUT,
                "this node is not logged in to a tailnet",
                "join it first: ansible-playbook site.yml, or tailscale up",
            )
        before = prefs
        with self._api.stream(INITIAL_PREFS, ECHO_SECONDS) as stream, self._api.explained():
            announced = _announced_prefs(stream)
            prefs = next(announced, prefs)
            for _unused in range(EDIT_TRIES):
                edits = _edits(prefs, state.advertised, cidrs, switches)
                if not edits:
                    break
                self._write(state, prefs, cidrs, switches)
                self._api.edit_prefs(edits)
                overwritten = _overwritten(announced, prefs, edits)
                if overwritten is None:
                    break
                prefs = overwritten
            else:
                raise TailscaleError(
                    REFUSED,
                    "tailscaled's prefs change faster than HeadCNI can merge its routes into them",
                    "see who runs `tailscale set` or `tailscale up` again and again",
                )
        return _in_words(before, self._api.prefs())

    def _write(
        self,
        state: _State,
        prefs: Mapping[str, Any],
        cidrs: tuple[str, ...],
        switches: Mapping[str, bool],
    ) -> None:
        theirs = _routes(prefs) - set(state.advertised)
        former = dict(state.former)
        for name, value in switches.items():
            if bool(prefs.get(name)) != value:
                former.setdefault(name, bool(prefs.get(name)))
        ours = tuple(cidr for cidr in cidrs if cidr not in theirs)
        if (ours, former) == (state.advertised, state.former):
            return
        content = {"advertised": ours, "former": former}
        os.makedirs(os.path.dirname(self._file), mode=0o755, exist_ok=True)
        fresh = f"{self._file}.new"
        with open(fresh, "w", encoding="utf-8", opener=_private) as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self._file)

    def _read(self) -> _State:
        """A file that cannot be parsed is set aside. Nothing counts as ours then, so what we
        advertised stays when we go, which is the safer mistake."""
        try:
            with open(self._file, encoding="utf-8") as file:
                found = json.load(file)
            return _State(tuple(found["advertised"]), dict(found["former"]))
        except FileNotFoundError:
            return _State()
        except (ValueError, KeyError, TypeError):
            os.replace(self._file, f"{self._file}.broken")
            return _State()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _routes(prefs: Mapping[str, Any]) -> set[str]:
    return {str(ip_network(route)) for route in prefs.get("AdvertiseRoutes") or ()}


def _edits(
    prefs: Mapping[str, Any],
    ours: Iterable[str],
    cidrs: Iterable[str],
    switches: Mapping[str, bool],
) -> dict[str, Any]:
    """The prefs that must change so that `cidrs` replace `ours`."""
    edits: dict[str, Any] = {
        name: value for name, value in switches.items() if bool(prefs.get(name)) != value
    }
    have = _routes(prefs)
    want = (have - set(ours)) | set(cidrs)
    if want != have:
        edits["AdvertiseRoutes"] = sorted(want)
    return edits


def _announced_prefs(stream: Stream) -> Iterator[dict[str, Any]]:
    """The prefs as they were when the bus was opened, and then each change."""
    for line in stream.lines():
        prefs = json.loads(line).get("Prefs")
        if prefs is not None:
            yield prefs


def _overwritten(
    announced: Iterator[dict[str, Any]], read: Mapping[str, Any], edits: Mapping[str, Any]
) -> Optional[dict[str, Any]]:
    """The prefs that somebody else set between our read and our write, or None.

    The LocalAPI cannot write "only if unchanged". But the bus announces every change in order, so
    whatever comes between what we read and what we wrote is what we have overwritten.
    """
    theirs: Optional[dict[str, Any]] = None
    with suppress(socket.timeout):
        for prefs in announced:
            if all(_same(prefs, name, value) for name, value in edits.items()):
                return theirs
            if any(not _same(prefs, name, read.get(name)) for name in edits):
                theirs = prefs
    return theirs


def _same(prefs: Mapping[str, Any], name: str, value: Any) -> bool:
    if name == "AdvertiseRoutes":
        return _routes(prefs) == _routes({name: value})
    return bool(prefs.get(name)) == bool(value)


def _in_words(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    had, has = _routes(before), _routes(after)
    words = [f"advertise {route}" for route in sorted(has - had)]
    words += [f"withdraw {route}" for route in sorted(had - has)]
    for name in ("RouteAll", "NoSNAT"):
        if bool(before.get(name)) != bool(after.get(name)):
            words.append(f"set {name} to {str(bool(after.get(name))).lower()}")
    return tuple(words)
