# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""A client for tailscaled's LocalAPI, which it serves on a unix socket.

Everyone may read, root may write. An auth key travels in the body of a request, so it is never in
an argument list and never on disk.

The modules use it as it is. The runtime (headcni/mesh/localapi.py) adds the event bus, its own
error type and its own view of peers.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Any, Callable, NamedTuple, Optional
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
    """tailscaled cannot be asked, or refused. ``kind`` is one of the words above, ``what`` says
    what happened, ``hint`` what to do about it."""

    def __init__(self, kind: str, what: str, hint: str = "") -> None:
        super().__init__(f"{what}: {hint}" if hint else what)
        self.kind, self.what, self.hint = kind, what, hint


class Status(NamedTuple):
    """The part of tailscaled's status that provisioning uses."""

    version: str  # 1.102.5, without the commit that a build may add
    state: str  # Running, Starting, Stopped, NeedsLogin, NeedsMachineAuth, NoState
    have_node_key: bool
    node_key: str  # nodekey:…, as Headscale shows it; empty while there is none
    name: str
    domain: str  # in which the tailnet's names are resolved; empty if they are not
    addresses: tuple[str, ...]
    tags: tuple[str, ...]
    served: tuple[str, ...]  # the node's own routes that the control server has approved
    expiry: str  # of the node key; empty if it does not expire
    expired: bool
    online: bool  # connected to the login server, which sends it the network's changes
    asked: bool  # the login server wants somebody to log in on a web page
    health: tuple[str, ...]
    peers: int
    peers_online: int

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Status:
        me, net = found.get("Self") or {}, found.get("CurrentTailnet") or {}
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
            domain=str(net.get("MagicDNSSuffix") or "") if net.get("MagicDNSEnabled") else "",
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
    """Opens a connection for each request, so a restart of tailscaled needs no special handling."""

    # What error messages advise. The runtime has other words for the same things.
    socket_option = "socket"
    become_root = "become root"
    upgrade = "upgrade it"

    def __init__(self, path: str = SOCKET, timeout: float = ANSWER_SECONDS) -> None:
        self.path = path
        self.timeout = timeout

    def status(self, peers: bool = False) -> Status:
        return Status.of(self.raw_status(peers))

    def raw_status(self, peers: bool = False) -> dict[str, Any]:
        """The whole status as tailscaled writes it, with each peer."""
        return self.read("GET", f"status?peers={str(peers).lower()}")

    def ping(self, address: str) -> dict[str, Any]:
        """Have tailscaled ping a peer: the path that the answer took, and how long it took. Waits
        at most for this client's timeout."""
        return self.read("POST", f"ping?ip={quote(address, safe='')}&type=disco")

    def prefs(self) -> dict[str, Any]:
        return _without_keys(self.read("GET", "prefs"))

    def edit_prefs(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Change these prefs and no others. Returns all prefs as they are now."""
        masked = {**values, **{f"{name}Set": True for name in values}}
        return _without_keys(self.read("PATCH", "prefs", masked))

    def start(self, prefs: Mapping[str, Any], auth_key: str = "") -> None:
        """Start again with exactly these prefs. The key is kept for ``log_in`` only."""
        self.ask("POST", "start", {"UpdatePrefs": prefs, "AuthKey": auth_key})

    def log_in(self) -> None:
        """Make a new node key and register it with the auth key that ``start`` was given."""
        self.ask("POST", "login-interactive")

    def current_profile(self) -> str:
        """The id of the profile in use; empty for a profile that has never been logged in."""
        return str(self.read("GET", "profiles/current").get("ID") or "")

    def new_profile(self) -> None:
        """Switch to an empty profile. A restart forgets it unless it is logged in by then."""
        self.ask("PUT", "profiles/")

    def switch_profile(self, profile: str) -> None:
        self.ask("POST", f"profiles/{quote(profile, safe='')}")

    def delete_profile(self, profile: str) -> None:
        self.ask("DELETE", f"profiles/{quote(profile, safe='')}")

    def read(
        self,
        method: str,
        path: str,
        body: Any = None,
        hook: Optional[Callable[[dict[str, Any]], Any]] = None,
    ) -> dict[str, Any]:
        """The JSON object that tailscaled answers. ``hook`` is json's object_hook."""
        answer = self.ask(method, path, body)
        found = None
        with suppress(ValueError):
            found = json.loads(answer, object_hook=hook)
        if not isinstance(found, dict):
            raise LocalAPIError(
                REFUSED,
                f"the answer at {self.path} is not tailscaled's: it cannot be understood",
                f"{answer[:80].decode(errors='replace')!r}; is this tailscaled's socket?",
            )
        return found

    def ask(self, method: str, path: str, body: Any = None) -> bytes:
        with self.opened(method, path, body) as (_unused, answer), self.explained():
            return answer.read()

    @contextmanager
    def opened(
        self, method: str, path: str, body: Any = None
    ) -> Iterator[tuple[socket.socket, http.client.HTTPResponse]]:
        """The socket and the answer, whose body the caller reads while the block lasts."""
        data = None if body is None else json.dumps(body).encode()
        connection = _Connection(self.path, self.timeout)
        with closing(connection):
            with self.explained():
                connection.request(method, f"/localapi/v0/{path}", data)
                answer = connection.getresponse()
                said = answer.read(65536) if answer.status >= 300 else b""
            if answer.status >= 300:
                raise self._refusal(answer.status, said, f"{method} {path.partition('?')[0]}")
            yield connection.sock, answer

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn an error on the socket into one that says what to do about it."""
        path = self.path
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            raise LocalAPIError(
                NO_SOCKET,
                f"tailscaled's socket {path} is not there",
                f"start tailscaled, or say where its socket is ({self.socket_option})",
            ) from None
        except PermissionError:
            raise LocalAPIError(
                DENIED, f"tailscaled's socket {path} may not be used", self.become_root
            ) from None
        except ConnectionRefusedError:
            raise LocalAPIError(
                NO_ANSWER, f"nobody answers at tailscaled's socket {path}", "start tailscaled"
            ) from None
        except socket.timeout:
            raise LocalAPIError(
                NO_ANSWER,
                f"tailscaled did not answer in time at {path}",
                "see journalctl -u tailscaled",
            ) from None
        except (OSError, http.client.HTTPException) as problem:
            said = str(problem) or type(problem).__name__
            raise LocalAPIError(
                NO_ANSWER, f"tailscaled went away while asked at {path}", said
            ) from None

    def _refusal(self, code: int, body: bytes, what: str) -> LocalAPIError:
        said = body[:2000].decode(errors="replace").strip()
        with suppress(ValueError, AttributeError):
            said = str(json.loads(body).get("Error") or said)
        if code == 403:
            return LocalAPIError(
                DENIED, f"tailscaled does not allow {what}", f"{said}; {self.become_root}"
            )
        if code == 404:
            return LocalAPIError(UNKNOWN, f"tailscaled does not know {what}", self.upgrade)
        return LocalAPIError(REFUSED, f"tailscaled refused {what}", f"{said} (HTTP {code})")


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__(HOST, timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def short_version(text: str) -> str:
    """1.102.5 for 1.102.5-t0123abc; empty if the text is not a version."""
    number = text.strip().partition("-")[0]
    parts = number.split(".")
    return number if len(parts) >= 2 and all(part.isdigit() for part in parts) else ""


def _without_keys(prefs: dict[str, Any]) -> dict[str, Any]:
    """Drop the private keys. tailscaled blanks them; we do not even carry the blanks."""
    prefs.pop("Config", None)
    return prefs
