# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""tailscaled's LocalAPI, over its unix socket: what provisioning asks of it.

Everyone may read, root may write. A key travels in the body of a request, so it is never in an
argument list and never on disk.

Only the standard library is used, because this runs on nodes.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from contextlib import closing, contextmanager, suppress
from typing import Any, Iterator, NamedTuple
from urllib.parse import quote

from .modes import SOCKETS

SOCKET = SOCKETS["host"]
HOST = "local-tailscaled.sock"  # any other Host is refused
ANSWER_SECONDS = 10.0

# Why a LocalAPIError was raised.
NO_SOCKET, NO_ANSWER, DENIED, UNKNOWN, REFUSED = (
    "no-socket",
    "no-answer",
    "denied",
    "unknown",
    "refused",
)


class LocalAPIError(Exception):
    """tailscaled cannot be asked, or said no. ``kind`` is one of the words above."""

    def __init__(self, kind: str, what: str, hint: str = "") -> None:
        super().__init__(f"{what}: {hint}" if hint else what)
        self.kind = kind


class Status(NamedTuple):
    """What of tailscaled's status provisioning looks at."""

    version: str  # 1.102.5, without the commit that a build may add
    state: str  # Running, Starting, Stopped, NeedsLogin, NeedsMachineAuth, NoState
    have_node_key: bool
    node_key: str  # nodekey:…, as Headscale shows it; empty while there is none
    name: str
    addresses: tuple[str, ...]
    tags: tuple[str, ...]
    served: tuple[str, ...]  # own routes that the control server has approved
    expiry: str  # of the node key; empty if it does not expire
    expired: bool
    online: bool  # the login server sends it the network's changes
    asked: bool  # the login server wants somebody to log in, by a web page
    health: tuple[str, ...]
    peers: int
    peers_online: int

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Status:
        me = found.get("Self") or {}
        key = str(me.get("PublicKey") or "")
        if not key.replace("nodekey:", "").strip("0"):
            key = ""
        peers = (found.get("Peer") or {}).values()
        return cls(
            version=short_version(str(found.get("Version") or "")),
            state=str(found.get("BackendState") or "NoState"),
            have_node_key=bool(found.get("HaveNodeKey", key)),
            node_key=key,
            name=str(me.get("DNSName") or "").rstrip(".") or str(me.get("HostName") or ""),
            addresses=tuple(found.get("TailscaleIPs") or ()),
            tags=tuple(me.get("Tags") or ()),
            served=tuple(me.get("PrimaryRoutes") or ()),
            expiry=str(me.get("KeyExpiry") or ""),
            expired=bool(me.get("Expired")),
            online=bool(me.get("Online")),
            asked=bool(found.get("AuthURL")),
            health=tuple(found.get("Health") or ()),
            peers=len(peers),
            peers_online=sum(bool(peer.get("Online")) for peer in peers),
        )


class LocalAPI:
    """A connection for each question: a restarted tailscaled is then no special case."""

    def __init__(self, path: str = SOCKET, timeout: float = ANSWER_SECONDS) -> None:
        self.path = path
        self.timeout = timeout

    def status(self, peers: bool = False) -> Status:
        return Status.of(self.raw_status(peers))

    def raw_status(self, peers: bool = False) -> dict[str, Any]:
        """As tailscaled writes it: each peer, and what else ``Status`` leaves out."""
        return self._object("GET", f"status?peers={str(peers).lower()}")

    def ping(self, address: str) -> dict[str, Any]:
        """Have tailscaled ask a peer for an answer: which way it came, and how long it took. It
        waits for as long as this object's timeout."""
        return self._object("POST", f"ping?ip={quote(address, safe='')}&type=disco")

    def prefs(self) -> dict[str, Any]:
        return _without_keys(self._object("GET", "prefs"))

    def edit_prefs(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Change these prefs and no others; what they all are now."""
        masked = {**values, **{f"{name}Set": True for name in values}}
        return _without_keys(self._object("PATCH", "prefs", masked))

    def start(self, prefs: Mapping[str, Any], auth_key: str = "") -> None:
        """Begin anew with these prefs, all of them. A key is only kept for ``log_in``."""
        self._ask("POST", "start", {"UpdatePrefs": prefs, "AuthKey": auth_key})

    def log_in(self) -> None:
        """Make a new node key and register it, with the key that ``start`` was given."""
        self._ask("POST", "login-interactive")

    def current_profile(self) -> str:
        """The id of the profile in use; empty for one that has never been logged in."""
        return str(self._object("GET", "profiles/current").get("ID") or "")

    def new_profile(self) -> None:
        """Step into an empty profile. Until it is logged in, a restart forgets it."""
        self._ask("PUT", "profiles/")

    def switch_profile(self, profile: str) -> None:
        self._ask("POST", f"profiles/{quote(profile, safe='')}")

    def delete_profile(self, profile: str) -> None:
        self._ask("DELETE", f"profiles/{quote(profile, safe='')}")

    def _object(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        answer = self._ask(method, path, body)
        try:
            found = json.loads(answer)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise LocalAPIError(
                REFUSED,
                f"the answer at {self.path} is not tailscaled's",
                f"{answer[:80].decode(errors='replace')!r}; is this tailscaled's socket?",
            )
        return found

    def _ask(self, method: str, path: str, body: Any = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        connection = _Connection(self.path, self.timeout)
        with closing(connection), _explained(self.path):
            connection.request(method, f"/localapi/v0/{path}", data)
            answer = connection.getresponse()
            said = answer.read()
        if answer.status >= 300:
            raise _refusal(answer.status, said, f"{method} {path.partition('?')[0]}")
        return said


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__(HOST, timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def short_version(text: str) -> str:
    """1.102.5 of 1.102.5-t0123abc; empty if this is no version."""
    number = text.strip().partition("-")[0]
    parts = number.split(".")
    return number if len(parts) >= 2 and all(part.isdigit() for part in parts) else ""


def _without_keys(prefs: dict[str, Any]) -> dict[str, Any]:
    """tailscaled blanks the private keys that are in here; we do not even carry the blanks."""
    prefs.pop("Config", None)
    return prefs


@contextmanager
def _explained(path: str) -> Iterator[None]:
    """What went wrong on the socket, and what to do about it."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise LocalAPIError(
            NO_SOCKET,
            f"tailscaled's socket {path} is not there",
            "start tailscaled, or say where its socket is (socket)",
        ) from None
    except PermissionError:
        raise LocalAPIError(
            DENIED, f"tailscaled's socket {path} may not be used", "become root"
        ) from None
    except ConnectionRefusedError:
        raise LocalAPIError(
            NO_ANSWER, f"nobody answers at tailscaled's socket {path}", "start tailscaled"
        ) from None
    except socket.timeout:
        raise LocalAPIError(
            NO_ANSWER, f"tailscaled did not answer in time at {path}", "see journalctl"
        ) from None
    except (OSError, http.client.HTTPException) as problem:
        said = str(problem) or type(problem).__name__
        raise LocalAPIError(
            NO_ANSWER, f"tailscaled went away while asked at {path}", said
        ) from None


def _refusal(code: int, body: bytes, what: str) -> LocalAPIError:
    said = body[:2000].decode(errors="replace").strip()
    with suppress(ValueError, AttributeError):
        said = str(json.loads(body).get("Error") or said)
    if code == 403:
        return LocalAPIError(DENIED, f"tailscaled does not allow {what}", f"{said}; become root")
    if code == 404:
        return LocalAPIError(UNKNOWN, f"tailscaled does not know {what}", "upgrade it")
    return LocalAPIError(REFUSED, f"tailscaled refused {what}", f"{said} (HTTP {code})")
