"""tailscaled, by the LocalAPI on its unix socket: what it knows, what it says, what we ask of it.

Anyone may read; only root may change. Nothing here starts, stops or logs in a tailscaled: in host
mode it is the operator's own, and what we change in it we put back.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from ipaddress import ip_network
from typing import Any, Callable, NamedTuple, Optional

from ..errors import IO_FAILURE, CniError
from ..model import Network
from ..shared.modes import SOCKETS

SOCKET = SOCKETS["host"]
STATE_FILE = "/var/lib/headcni/tailscale-prefs.json"
HOST = "local-tailscaled.sock"  # any other Host is refused
OLDEST = (1, 34)  # the first with watch-ipn-bus
ANSWER_SECONDS = 10.0
SILENCE_SECONDS = 300.0
ECHO_SECONDS = 2.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
EDIT_TRIES = 5

# What the bus is asked for (ipn.NotifyWatchOpt): the state and prefs at once, and peers that come,
# go or change. Patches of endpoints and the like come as patches, which we need not look at.
_INITIAL_STATE, _INITIAL_PREFS, _PEER_CHANGES, _PEER_PATCHES = 1 << 1, 1 << 2, 1 << 12, 1 << 15
_EVERYTHING = _INITIAL_STATE | _INITIAL_PREFS | _PEER_CHANGES | _PEER_PATCHES

# Why a TailscaleError was raised.
NO_SOCKET, NO_ANSWER, DENIED, TOO_OLD, LOGGED_OUT, REFUSED = (
    "no-socket",
    "no-answer",
    "denied",
    "too-old",
    "logged-out",
    "refused",
)


class TailscaleError(CniError):
    """tailscaled cannot be asked, or said no. `kind` is one of the words above."""

    def __init__(self, kind: str, msg: str, details: str = "") -> None:
        super().__init__(IO_FAILURE, msg, details)
        self.kind = kind


class Peer(NamedTuple):
    """A machine of the tailnet. `routes` are the prefixes that tailscaled sends to it, its own
    addresses aside, and `primary` those that the control server says it serves. As text: of
    thousands of peers a few may concern us. `tags` come from the control server, which alone
    decides who has one."""

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
    PeersChanged, …), or, where the bus is lost, the reason."""

    fields: frozenset[str]
    problem: str = ""


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__(HOST, timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass(frozen=True)
class LocalApi:
    """A connection for each question: they are rare, and a restarted tailscaled is no special
    case."""

    socket_path: str = SOCKET
    timeout: float = ANSWER_SECONDS
    timed: Callable[[str], AbstractContextManager[None]] = lambda _unused: (
        nullcontext()
    )  # by what is asked for

    def status(self, peers: bool = True) -> Status:
        body = self._asked("GET", f"/localapi/v0/status?peers={str(peers).lower()}")
        found = _object(body, _smaller)
        version = str(found.get("Version", ""))
        if _numbers(version) < OLDEST:
            raise TailscaleError(
                TOO_OLD,
                f"tailscaled {version or 'of unknown version'} is too old for HeadCNI",
                f"upgrade it to {'.'.join(map(str, OLDEST))} or newer",
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
        found = _object(self._asked("GET", "/localapi/v0/status?peers=false"))
        return tuple(map(str, (found.get("Self") or {}).get("Addrs") or ()))

    def prefs(self) -> dict[str, Any]:
        return _object(self._asked("GET", "/localapi/v0/prefs"))

    def edit_prefs(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Change these prefs and no others; what they all are now."""
        masked = {**values, **{f"{name}Set": True for name in values}}
        return _object(self._asked("PATCH", "/localapi/v0/prefs", json.dumps(masked).encode()))

    def watch(self, silence: float = SILENCE_SECONDS) -> Bus:
        return Bus(self, silence)

    @contextmanager
    def stream(self, mask: int, silence: float) -> Iterator[Stream]:
        """The bus as it comes; where it is silent for too long, the lines end in a time-out."""
        path = f"/localapi/v0/watch-ipn-bus?mask={mask}"
        connection = _Connection(self.socket_path, self.timeout)
        with closing(connection):
            answer = self._ask(connection, "GET", path)
            connection.sock.settimeout(silence)
            yield Stream(connection.sock, answer)

    def _asked(self, method: str, path: str, body: Optional[bytes] = None) -> bytes:
        connection = _Connection(self.socket_path, self.timeout)
        operation = path.rpartition("/")[2].partition("?")[0]
        if method != "GET":
            operation = f"{method.lower()}-{operation}"
        with self.timed(operation), closing(connection), _explained(self.socket_path):
            return self._ask(connection, method, path, body).read()

    def _ask(
        self, connection: _Connection, method: str, path: str, body: Optional[bytes] = None
    ) -> http.client.HTTPResponse:
        with _explained(self.socket_path):
            connection.request(method, path, body)
            answer = connection.getresponse()
            if answer.status != 200:
                raise _refusal(answer.status, answer.read(65536), f"{method} {path}")
            return answer


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
    """What tailscaled announces, for as long as it is iterated over: a lost bus is found again.

    A tailscaled with nothing to say is silent, and so is one that hangs: after `silence` seconds
    the bus is asked for anew, which also brings a first note with the state as it is.
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
                    # Whole nodes are in it, thousands at times: only which fields are set is kept.
                    yield json.loads(line, object_hook=_field_names)
            finally:
                with self._lock:
                    self._socket = None


def _field_names(found: dict[str, Any]) -> frozenset[str]:
    return frozenset(name for name, value in found.items() if value is not None)


def _smaller(found: dict[str, Any]) -> Any:
    """A machine's description, as soon as it is read, becomes the little of it that is used."""
    if "PublicKey" not in found or "TailscaleIPs" not in found:
        return found
    own = {f"{one}/{128 if ':' in one else 32}" for one in found["TailscaleIPs"] or ()}
    primary = tuple(found.get("PrimaryRoutes") or ())
    allowed = found.get("AllowedIPs")
    return Peer(
        id=str(found.get("ID") or found["PublicKey"]),
        name=str(found.get("DNSName") or "").partition(".")[0] or str(found.get("HostName") or ""),
        routes=primary if allowed is None else tuple(one for one in allowed if one not in own),
        primary=primary,
        online=bool(found.get("Online")),
        expired=bool(found.get("Expired")),
        key=str(found["PublicKey"]),
        tags=tuple(found.get("Tags") or ()),
    )


def _object(body: bytes, hook: Optional[Callable[[dict[str, Any]], Any]] = None) -> dict[str, Any]:
    with suppress(ValueError):
        found = json.loads(body, object_hook=hook)
        if isinstance(found, dict):
            return found
    raise TailscaleError(
        REFUSED,
        "tailscaled's answer cannot be understood",
        repr(body[:80].decode(errors="replace")),
    )


def _numbers(version: str) -> tuple[int, ...]:
    """(1, 102) of 1.102.5-t0123abc."""
    parts = version.partition("-")[0].split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())


@contextmanager
def _explained(path: str) -> Iterator[None]:
    """What went wrong on the socket, and what to do about it."""
    try:
        yield
    except FileNotFoundError:
        raise TailscaleError(
            NO_SOCKET,
            f"tailscaled's socket {path} is not there",
            "start tailscaled, or say where its socket is (tailscale_socket)",
        ) from None
    except PermissionError:
        raise TailscaleError(
            DENIED, f"tailscaled's socket {path} may not be used", "run as root"
        ) from None
    except ConnectionRefusedError:
        raise TailscaleError(
            NO_ANSWER, f"nobody answers at tailscaled's socket {path}", "start tailscaled"
        ) from None
    except socket.timeout:
        raise TailscaleError(
            NO_ANSWER,
            f"tailscaled did not answer in time at {path}",
            "see journalctl -u tailscaled",
        ) from None
    except (OSError, http.client.HTTPException) as problem:
        said = str(problem) or type(problem).__name__
        raise TailscaleError(
            NO_ANSWER, f"tailscaled went away while asked at {path}", said
        ) from None


def _refusal(code: int, body: bytes, what: str) -> TailscaleError:
    said = body.decode(errors="replace").strip()
    with suppress(ValueError, AttributeError):
        said = str(json.loads(said).get("Error") or said)
    if code == 403:
        return TailscaleError(DENIED, f"tailscaled does not allow {what}", f"{said}; run as root")
    if code == 404:
        return TailscaleError(
            TOO_OLD,
            f"tailscaled does not know {what}",
            f"upgrade it to {'.'.join(map(str, OLDEST))} or newer",
        )
    return TailscaleError(REFUSED, f"tailscaled refused {what}", f"{said} (HTTP {code})")


@dataclass(frozen=True)
class _State:
    """What is ours in tailscaled's prefs: routes we added, and switches we turned, with the value
    they had."""

    advertised: tuple[str, ...] = ()
    former: Mapping[str, bool] = field(default_factory=dict)


class NodePrefs:
    """What HeadCNI wants of a tailscaled that is not its own, merged with what the operator wants.

    A route that was advertised before we asked for it is the operator's, and stays when ours go.
    What is ours is written down before tailscaled is told: whoever dies in between leaves a note
    of a route that is not there, never a route of which there is no note.
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
        """Advertise just these and set the switches; what was changed, in words. None leaves a
        switch alone."""
        switches = {"RouteAll": route_all, "NoSNAT": no_snat}
        wanted = {name: value for name, value in switches.items() if value is not None}
        with self._lock:
            return self._change(tuple(map(str, cidrs)), wanted)

    def advertise(self, cidrs: Iterable[Network]) -> tuple[str, ...]:
        """Advertise these; what we advertised before and do not name now is withdrawn."""
        return self.ensure(cidrs, route_all=None, no_snat=None)

    def withdraw(self, cidrs: Optional[Iterable[Network]] = None) -> tuple[str, ...]:
        """Take these back, or all; only what is ours."""
        with self._lock:
            state = self._read()
            gone = set(state.advertised if cidrs is None else map(str, cidrs))
            return self._change(tuple(one for one in state.advertised if one not in gone), {})

    def restore(self) -> tuple[str, ...]:
        """For the uninstall: our routes go, and each switch gets its former value back."""
        with self._lock:
            changed = self._change((), self._read().former)
            with suppress(FileNotFoundError):
                os.unlink(self._file)
            return changed

    def approved(self, cidrs: Iterable[Network]) -> dict[str, bool]:
        """Which of these the control server has this node serve, as far as the node knows:
        Headscale tells the other nodes at once, and this one up to minutes later."""
        served = set(self._api.status(peers=False).served)
        return {str(one): str(one) in served for one in cidrs}

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
        path = self._api.socket_path
        with self._api.stream(_INITIAL_PREFS, ECHO_SECONDS) as stream, _explained(path):
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
        ours = tuple(one for one in cidrs if one not in theirs)
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
        """A file that cannot be understood is put aside. Then nothing is ours: what we advertised
        stays when we go, which is the better mistake."""
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
    return {str(ip_network(one)) for one in prefs.get("AdvertiseRoutes") or ()}


def _edits(
    prefs: Mapping[str, Any],
    ours: Iterable[str],
    cidrs: Iterable[str],
    switches: Mapping[str, bool],
) -> dict[str, Any]:
    """What of the prefs must change so that `cidrs` take the place of `ours`."""
    edits: dict[str, Any] = {
        name: value for name, value in switches.items() if bool(prefs.get(name)) != value
    }
    have = _routes(prefs)
    want = (have - set(ours)) | set(cidrs)
    if want != have:
        edits["AdvertiseRoutes"] = sorted(want)
    return edits


def _announced_prefs(stream: Stream) -> Iterator[dict[str, Any]]:
    """Prefs as they were when the bus was opened, then each time they change."""
    for line in stream.lines():
        prefs = json.loads(line).get("Prefs")
        if prefs is not None:
            yield prefs


def _overwritten(
    announced: Iterator[dict[str, Any]], read: Mapping[str, Any], edits: Mapping[str, Any]
) -> Optional[dict[str, Any]]:
    """The prefs that somebody else set between our reading and our writing, if somebody did.

    The LocalAPI has no "only if unchanged"; but the bus tells every change in its order, so what
    stands between what we read and what we wrote is what we wrote over.
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
    words = [f"advertise {one}" for one in sorted(has - had)]
    words += [f"withdraw {one}" for one in sorted(had - has)]
    for name in ("RouteAll", "NoSNAT"):
        if bool(before.get(name)) != bool(after.get(name)):
            words.append(f"set {name} to {str(bool(after.get(name))).lower()}")
    return tuple(words)
