"""tailscaled as the daemon and headcnictl use it: its status, its prefs and its event bus.

Everyone may read, only root may change. Nothing here starts, stops or logs in a tailscaled. The
requests themselves are made by shared/localapi.py, which Ansible's modules use too.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Optional

from ..errors import IO_FAILURE, CniError
from ..shared import localapi
from ..shared.localapi import ANSWER_SECONDS, REFUSED, SOCKET

OLDEST = (1, 34)  # the first version with watch-ipn-bus
UPGRADE = f"upgrade it to {'.'.join(map(str, OLDEST))} or newer"
SILENCE_SECONDS = 300.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0

# What we ask the bus for (ipn.NotifyWatchOpt): the state and prefs at once, and peers that come,
# go or change. Changes of endpoints and the like come as patches, which we ignore.
INITIAL_PREFS = 1 << 2
_INITIAL_STATE, _PEER_CHANGES, _PEER_PATCHES = 1 << 1, 1 << 12, 1 << 15
_EVERYTHING = _INITIAL_STATE | INITIAL_PREFS | _PEER_CHANGES | _PEER_PATCHES

# Why a TailscaleError was raised; the other reasons are in shared/localapi.py.
TOO_OLD, LOGGED_OUT = "too-old", "logged-out"


class TailscaleError(CniError):
    """tailscaled cannot be asked, or refused. `kind` says why."""

    def __init__(self, kind: str, msg: str, details: str = "") -> None:
        super().__init__(IO_FAILURE, msg, details)
        self.kind = kind


class Peer(NamedTuple):
    """A machine of the tailnet. `routes` are the prefixes whose packets tailscaled sends to it,
    without the machine's own addresses. `primary` are those that the control server says it serves.
    Both are text, because few of thousands of peers concern us. Only the control server decides
    which `tags` a machine has."""

    id: str
    name: str
    routes: tuple[str, ...]
    primary: tuple[str, ...]
    online: bool
    expired: bool
    key: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Status:
    version: str
    state: str  # Running, Starting, Stopped, NeedsLogin, NeedsMachineAuth, NoState
    name: str
    addresses: tuple[str, ...]
    served: tuple[str, ...]  # our own routes that the control server has approved
    health: tuple[str, ...]
    peers: tuple[Peer, ...]
    key: str = ""  # "" while logged out
    tags: tuple[str, ...] = ()  # this node's own

    @property
    def running(self) -> bool:
        return self.state == "Running"


class Note(NamedTuple):
    """Something happened: the names of the fields that the bus sent (State, Prefs, SelfChange,
    PeersChanged, …), or the reason why the bus was lost."""

    fields: frozenset[str]
    problem: str = ""


class _Client(localapi.LocalAPI):
    """The client with the advice that fits the daemon and headcnictl."""

    socket_option = "tailscale_socket"
    become_root = "run as root"
    upgrade = UPGRADE


@contextmanager
def _as_cni_error() -> Iterator[None]:
    try:
        yield
    except localapi.LocalAPIError as problem:
        kind = TOO_OLD if problem.kind == localapi.UNKNOWN else problem.kind
        raise TailscaleError(kind, problem.what, problem.hint) from None


@dataclass(frozen=True)
class LocalApi:
    """`timed` is given the name of each operation, for the metrics."""

    socket_path: str = SOCKET
    timeout: float = ANSWER_SECONDS
    timed: Callable[[str], AbstractContextManager[None]] = lambda _unused: nullcontext()

    def status(self, peers: bool = True) -> Status:
        found = self.read("status", f"status?peers={str(peers).lower()}", _reduced)
        version = str(found.get("Version", ""))
        if _numbers(version) < OLDEST:
            raise TailscaleError(
                TOO_OLD,
                f"tailscaled {version or 'of unknown version'} is too old for HeadCNI",
                UPGRADE,
            )
        me = found.get("Self")
        me = me if isinstance(me, Peer) else Peer("", "", (), (), False, False)
        return Status(
            version=version,
            state=str(found.get("BackendState", "")),
            name=me.name,
            addresses=tuple(found.get("TailscaleIPs") or ()),
            served=me.primary,
            health=tuple(found.get("Health") or ()),
            peers=tuple(p for p in (found.get("Peer") or {}).values() if isinstance(p, Peer)),
            key=me.key if me.key.partition(":")[2].strip("0") else "",
            tags=me.tags,
        )

    def endpoints(self) -> tuple[str, ...]:
        """Where peers may find this node: its own addresses and those that a NAT gives it, each
        with a port."""
        found = self.read("status", "status?peers=false")
        return tuple(map(str, (found.get("Self") or {}).get("Addrs") or ()))

    def prefs(self) -> dict[str, Any]:
        with self.timed("prefs"), _as_cni_error():
            return self._client.prefs()

    def edit_prefs(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Change these prefs and no others. Returns all prefs as they are now."""
        with self.timed("patch-prefs"), _as_cni_error():
            return self._client.edit_prefs(values)

    def ping(self, address: str) -> dict[str, Any]:
        """Have tailscaled ping a peer: the path of the answer, and how long it took."""
        with self.timed("ping"), _as_cni_error():
            return self._client.ping(address)

    def read(
        self, operation: str, path: str, hook: Optional[Callable[[dict[str, Any]], Any]] = None
    ) -> dict[str, Any]:
        """`hook` may reduce each object of the answer as soon as it has been decoded."""
        with self.timed(operation), _as_cni_error():
            return self._client.read("GET", path, hook=hook)

    def read_list(self, operation: str, path: str) -> list[Any]:
        """A list that only root may read."""
        with self.timed(operation), _as_cni_error():
            answer = self._client.ask("POST", path)
        found = None
        with suppress(ValueError):
            found = json.loads(answer)
        if found is not None and not isinstance(found, list):
            raise TailscaleError(REFUSED, f"tailscaled's answer about its {operation} is no list")
        return found or []

    def watch(self, silence: float = SILENCE_SECONDS) -> Bus:
        return Bus(self, silence)

    @contextmanager
    def stream(self, mask: int, silence: float) -> Iterator[Stream]:
        """The bus, line by line. If it is silent for too long, reading ends in a time-out."""
        with ExitStack() as stack:
            with _as_cni_error():
                opened = self._client.opened("GET", f"watch-ipn-bus?mask={mask}")
                connection, answer = stack.enter_context(opened)
            connection.settimeout(silence)
            yield Stream(connection, answer)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """For reading a stream: a TailscaleError in place of a socket's error."""
        with _as_cni_error(), self._client.explained():
            yield

    @property
    def _client(self) -> _Client:
        return _Client(self.socket_path, self.timeout)


@dataclass(frozen=True)
class Stream:
    socket: socket.socket
    _answer: http.client.HTTPResponse

    def lines(self) -> Iterator[bytes]:
        while True:
            line = self._answer.readline()
            if not line:
                return
            yield line


class Bus:
    """What tailscaled announces. Iterating over it reconnects whenever the bus is lost.

    A tailscaled that hangs is as silent as one without news. So after `silence` seconds the bus is
    opened again, which also brings a first note with the current state.
    """

    def __init__(self, api: LocalApi, silence: float) -> None:
        self._api = api
        self._silence = silence
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._socket: Optional[socket.socket] = None

    def close(self) -> None:
        """End the iteration, from any thread."""
        self._closed.set()
        with self._lock:
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def __iter__(self) -> Iterator[Note]:
        pause = FIRST_PAUSE
        while not self._closed.is_set():
            problem = "tailscaled ended the bus"
            try:
                for fields in self._session():
                    pause = FIRST_PAUSE
                    yield Note(fields)
            except socket.timeout:
                continue
            except (CniError, OSError, http.client.HTTPException, ValueError) as failure:
                problem = str(failure) or type(failure).__name__
            if self._closed.is_set():
                return
            yield Note(frozenset(), problem)
            self._closed.wait(pause * random.uniform(0.5, 1.5))  # noqa: S311
            pause = min(pause * 2, LONGEST_PAUSE)

    def _session(self) -> Iterator[frozenset[str]]:
        with self._api.stream(_EVERYTHING, self._silence) as stream:
            with self._lock:
                self._socket = stream.socket
            try:
                if self._closed.is_set():
                    return
                for line in stream.lines():
                    # A line may describe thousands of nodes: we keep only which fields are set.
                    yield json.loads(line, object_hook=_field_names)
            finally:
                with self._lock:
                    self._socket = None


def _field_names(found: dict[str, Any]) -> frozenset[str]:
    return frozenset(name for name, value in found.items() if value is not None)


def _reduced(found: dict[str, Any]) -> Any:
    """Keep only the used part of a machine's description, as soon as it has been decoded."""
    if "PublicKey" not in found or "TailscaleIPs" not in found:
        return found
    own = {f"{ip}/{128 if ':' in ip else 32}" for ip in found["TailscaleIPs"] or ()}
    primary = tuple(found.get("PrimaryRoutes") or ())
    allowed = found.get("AllowedIPs")
    return Peer(
        id=str(found.get("ID") or found["PublicKey"]),
        name=str(found.get("DNSName") or "").partition(".")[0] or str(found.get("HostName") or ""),
        routes=primary
        if allowed is None
        else tuple(prefix for prefix in allowed if prefix not in own),
        primary=primary,
        online=bool(found.get("Online")),
        expired=bool(found.get("Expired")),
        key=str(found["PublicKey"]),
        tags=tuple(found.get("Tags") or ()),
    )


def _numbers(version: str) -> tuple[int, ...]:
    """(1, 102) for 1.102.5-t0123abc."""
    parts = version.partition("-")[0].split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())
