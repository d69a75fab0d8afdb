# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""How a node stands with its tailnet, what is wanted of it, and the way from one to the other.

What tailscaled says is the truth: nothing is remembered between runs. A node that is joined needs
no key, whatever became of the one it joined with.

A node that has been logged in before logs in from a new profile, which gets the prefs of the old
one. If that fails, it steps back into the old profile and is where it was: a wrong key or a login
server that is down does not cost a node its network. If it succeeds, the old profile goes.

Only the standard library is used, because this runs on nodes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from ipaddress import ip_address, ip_network
from typing import Any, Callable, NamedTuple, Optional
from urllib.parse import urlsplit

from .shared.localapi import NO_ANSWER, NO_SOCKET, LocalAPI, LocalAPIError, Status

# The names that Tailscale's own service has had.
TAILSCALE_INC = ("", "https://login.tailscale.com", "https://controlplane.tailscale.com")
_DEFAULT_ROUTES = ("0.0.0.0/0", "::/0")
_UNSETTLED = ("NoState", "Starting")
_LAST_ERROR = "last login error was: "
PAUSE_SECONDS = 0.2
STALE_SECONDS = 0.5  # an error of the login before may be told for so long
BACK_SECONDS = 15.0

_TAG = re.compile(r"tag:[A-Za-z][A-Za-z0-9-]*")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")


class TailnetError(Exception):
    """The node cannot be as it is wanted; the message says why and what to do."""


class Standing(NamedTuple):
    """tailscaled as it is. Without a ``status`` it does not answer, and ``problem`` says why."""

    status: Optional[Status]
    prefs: Mapping[str, Any]
    problem: str = ""

    @property
    def login_server(self) -> str:
        return str(self.prefs.get("ControlURL") or "")


class Wishes(NamedTuple):
    """What is wanted of tailscaled's prefs. None leaves a pref as it is."""

    hostname: Optional[str] = None
    tags: Optional[Sequence[str]] = None
    accept_routes: Optional[bool] = None
    accept_dns: Optional[bool] = None
    shields_up: Optional[bool] = None
    snat_subnet_routes: Optional[bool] = None
    advertise_routes: Optional[Sequence[str]] = None
    routes_state: str = "merge"

    def mistakes(self) -> list[str]:
        wrong = []
        if self.hostname and not _LABEL.fullmatch(self.hostname):
            wrong.append(
                f"hostname: {self.hostname!r} is no host name: 1 to 63 letters, digits and dashes, "
                "with no dash at either end"
            )
        wrong += [
            f"tags: {tag!r} is no tag: expected tag:NAME, of letters, digits and dashes"
            for tag in self.tags or ()
            if not _TAG.fullmatch(tag)
        ]
        for route in self.advertise_routes or ():
            wrong += _route_mistakes(route)
        return wrong

    def of(self, prefs: Mapping[str, Any]) -> dict[str, Any]:
        """The prefs that must change, with their new values."""
        snat = self.snat_subnet_routes
        wanted = {
            "Hostname": self.hostname,
            "RouteAll": self.accept_routes,
            "CorpDNS": self.accept_dns,
            "ShieldsUp": self.shields_up,
            "NoSNAT": None if snat is None else not snat,
        }
        edits: dict[str, Any] = {
            name: value
            for name, value in wanted.items()
            if value is not None and (prefs.get(name) or type(value)()) != value
        }
        if self.tags is not None and set(self.tags) != set(prefs.get("AdvertiseTags") or ()):
            edits["AdvertiseTags"] = sorted(set(self.tags))
        if self.advertise_routes is not None:
            have = list(prefs.get("AdvertiseRoutes") or ())
            routes = routed(have, self.advertise_routes, self.routes_state)
            if set(routes) != set(have):
                edits["AdvertiseRoutes"] = routes
        if not prefs.get("WantRunning"):
            edits["WantRunning"] = True
        return edits


class Plan(NamedTuple):
    """What has to be done: why to log in, if at all, and what of the prefs to change."""

    login: str
    login_server: str
    before: Mapping[str, Any]
    edits: Mapping[str, Any]

    @property
    def changed(self) -> bool:
        return bool(self.login or self.edits)

    def prefs_changed(self) -> dict[str, dict[str, Any]]:
        return {
            name: {"before": self.before.get(name), "after": value}
            for name, value in self.edits.items()
        }

    def diff(self) -> dict[str, Any]:
        shown = self.prefs_changed()
        before = {name: both["before"] for name, both in shown.items()}
        after = {name: both["after"] for name, both in shown.items()}
        if self.login:
            before["login"], after["login"] = self.login, f"logged in to {self.login_server}"
        return {"before": before, "after": after}

    @classmethod
    def of(cls, now: Standing, login_server: str, wishes: Wishes, force: bool = False) -> Plan:
        edits = wishes.of(now.prefs)
        login = why_login(now, login_server, force)
        server = login_server or now.login_server
        if login and not same_server(server, now.login_server):
            edits["ControlURL"] = server
            # An exit node of another tailnet does not exist in this one, and tailscaled drops all
            # traffic of a node whose exit node does not exist.
            edits.update({name: "" for name in _EXIT_NODE if now.prefs.get(name)})
        return cls(login, server, now.prefs, edits)


_EXIT_NODE = ("ExitNodeID", "ExitNodeIP", "AutoExitNode")


def _route_mistakes(route: str) -> list[str]:
    try:
        right = ip_network(route, strict=False)
    except ValueError:
        return [f"advertise_routes: {route!r} is no CIDR such as 10.244.1.0/24"]
    if "/" not in route:
        return [f"advertise_routes: {route!r} has no prefix length: expected {right}"]
    if str(right) in _DEFAULT_ROUTES:
        return [
            f"advertise_routes: {route} would make this node an exit node for the whole tailnet; "
            "if that is meant, run `tailscale set --advertise-exit-node`: it is kept"
        ]
    host_bits = str(right.network_address) != str(ip_address(route.partition("/")[0]))
    return [f"advertise_routes: {route} has host bits set: expected {right}"] if host_bits else []


def routed(have: Iterable[str], given: Iterable[str], how: str) -> list[str]:
    """What to advertise. Being an exit node is a switch of its own: ``exact`` leaves it alone."""
    have = list(have)
    given = [str(ip_network(route)) for route in given]
    if how == "absent":
        return [route for route in have if route not in given]
    kept = have if how == "merge" else [r for r in have if r in _DEFAULT_ROUTES or r in given]
    return [*kept, *(route for route in dict.fromkeys(given) if route not in kept)]


def server_mistakes(url: str) -> list[str]:
    """What is wrong with a login server's address, if anything."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        return [f"login_server: {url!r} is no address such as https://headscale.example.org"]
    if parts.username or parts.path not in ("", "/") or parts.query or parts.fragment:
        return [f"login_server: {url!r} has more than a scheme, a host and a port"]
    return []


def key_mistakes(key: str) -> list[str]:
    """What is wrong with a pre-auth key by its looks; the key itself is never shown."""
    key = key.strip()
    if key.startswith("file:"):
        return ["auth_key: it starts with file:, expected the key itself"]
    return ["auth_key: there is a blank in it, expected one word"] if len(key.split()) > 1 else []


def plain_http_warning(url: str) -> str:
    """tailscaled takes plain http only from private addresses; elsewhere it soon tries https."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme != "http" or host == "localhost":
        return ""
    with suppress(ValueError):
        if ip_address(host).is_private:
            return ""
    return (
        f"login_server {url} is plain http and not at a private address: "
        "tailscaled will insist on https, at port 443"
    )


def canonical(url: str) -> str:
    """One spelling for each server."""
    if url.rstrip("/") in TAILSCALE_INC:
        return TAILSCALE_INC[-1]
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    host = f"[{host}]" if ":" in host else host
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    return f"{parts.scheme}://{host}:{port}"


def same_server(one: str, other: str) -> bool:
    return canonical(one) == canonical(other)


def why_login(now: Standing, login_server: str = "", force: bool = False) -> str:
    """Why this node must log in; empty if it need not."""
    status = now.status
    if status is None:
        return now.problem
    if not status.have_node_key:
        return "it is not logged in"
    if login_server and not same_server(login_server, now.login_server):
        return f"it is joined to {now.login_server or TAILSCALE_INC[-1]}, not to {login_server}"
    if status.expired or _is_past(status.expiry):
        return "its node key has expired"
    if status.state == "NeedsLogin" or status.asked:
        # One that remembers its network from before a restart may say Running all the same.
        return "its login server does not know it any more, or has logged it out"
    if status.state == "NeedsMachineAuth":
        return "it waits to be approved at its login server"
    return "force_reauth is set" if force else ""


def _is_past(moment: str) -> bool:
    if not moment or moment.startswith("0001-"):
        return False
    with suppress(ValueError):
        # 2026-11-16T06:00:00.123456789Z: the fraction is finer than Python takes it.
        then = datetime.strptime(moment[:19], "%Y-%m-%dT%H:%M:%S")
        return then.replace(tzinfo=timezone.utc) < datetime.now(timezone.utc)
    return False


def read(api: LocalAPI, patience: float = 5.0, peers: bool = False) -> Standing:
    """tailscaled as it is, once it knows that itself: it may have been started just now."""
    until = time.monotonic() + patience
    try:
        status = api.status(peers)
        while not _settled(status) and time.monotonic() < until:
            time.sleep(PAUSE_SECONDS)
            status = api.status(peers)
        return Standing(status, api.prefs())
    except LocalAPIError as problem:
        if problem.kind not in (NO_SOCKET, NO_ANSWER):
            raise
        return Standing(None, {}, str(problem))


def _settled(status: Status) -> bool:
    """Not while its login server has still to say what it thinks of this node."""
    if status.state == "Running":
        return status.online or status.asked
    return status.state not in _UNSETTLED


class Joining:
    """One node on its way to what a plan says, within a time that is set once."""

    def __init__(
        self, api: LocalAPI, timeout: float, say: Callable[[str], None] = lambda _unused: None
    ) -> None:
        self._api = api
        self._timeout = timeout
        self._until = time.monotonic() + timeout
        self._say = say

    def carry_out(self, plan: Plan, auth_key: str) -> Status:
        """Do it, and wait until tailscaled runs; its status then."""
        if plan.login:
            return self._log_in(plan, auth_key)
        if "AdvertiseTags" in plan.edits:
            # Only a new start tells the login server of other tags.
            self._api.start({**self._api.prefs(), **plan.edits})
        elif plan.edits:
            self._api.edit_prefs(plan.edits)
        return self._until_running(plan.login_server)

    def _log_in(self, plan: Plan, auth_key: str) -> Status:
        former = self._api.current_profile()
        prefs = {**plan.before, **plan.edits, "WantRunning": True, "LoggedOut": False}
        name = prefs.pop("ProfileName", "")  # two profiles cannot have one name
        self._say(f"logging in to {plan.login_server}: {plan.login}")
        try:
            if former:
                self._api.new_profile()
            self._api.start(prefs, auth_key)
            self._api.log_in()
            status = self._until_running(plan.login_server, time.monotonic() + STALE_SECONDS)
        except BaseException as problem:
            back = self._go_back(former, plan.before)
            if isinstance(problem, (TailnetError, LocalAPIError)):
                raise TailnetError(f"{problem}. {back}") from None
            raise
        if former and self._api.current_profile() != former:
            self._api.delete_profile(former)
        if name:
            self._api.edit_prefs({"ProfileName": name})
        return status

    def _go_back(self, former: str, prefs: Mapping[str, Any]) -> str:
        """Forget the key, and be as before; in a sentence, how that went."""
        try:
            if self._api.status().have_node_key:
                return "The node is registered there, and tailscaled goes on trying"
            if not former:
                self._api.start(prefs)
                return "The node is as it was"
            self._api.switch_profile(former)
            until = time.monotonic() + BACK_SECONDS
            while not _settled(self._api.status()) and time.monotonic() < until:
                time.sleep(PAUSE_SECONDS)
            server = self._api.prefs().get("ControlURL") or TAILSCALE_INC[-1]
            return f"The node is as it was: {self._api.status().state} at {server}"
        except LocalAPIError as problem:
            return f"Nor could the node be put back: {problem}"

    def _until_running(self, server: str, fresh_from: float = 0.0) -> Status:
        last = "it did not answer"
        status = None
        while True:
            try:
                status = self._api.status()
                if status.state == "Running":
                    return status
                last = f"its state is {status.state}"
            except LocalAPIError as problem:
                if problem.kind not in (NO_SOCKET, NO_ANSWER):
                    raise
            now = time.monotonic()
            if status is not None and (now >= fresh_from or now >= self._until):
                said = _login_error(status.health)
                if hint := _final(said):
                    raise TailnetError(f"{server} did not let this node in: {said}: {hint}")
            if now >= self._until:
                raise TailnetError(
                    f"tailscaled does not run after {self._timeout:g} s: {last}"
                    + _in_words(status, server)
                )
            time.sleep(PAUSE_SECONDS)


def _login_error(health: Iterable[str]) -> str:
    return next((text.partition(_LAST_ERROR)[2] for text in health if _LAST_ERROR in text), "")


# What a login server says of a key that no waiting makes better, and what to do about it.
_FINAL = (
    ("expired", "make a new key; it was too old when it was used"),
    (
        "already used",
        "make a new key, or a reusable one if several nodes share it. If the key was new: a node "
        "with tags that has logged out stays expired, and Headscale says so only after it has used "
        "the key up: run `headscale nodes expire --identifier ID --disable` there",
    ),
    ("tags", "leave `tags` out: Headscale gives a node the tags of its key"),
    ("invalid", "give a key that this very server has made"),
    ("not found", "give a key that this very server has made"),
    ("failed to parse", "give a key that this very server has made, and all of it"),
    ("after prefix", "give a key that this very server has made, and all of it"),
    ("http 401", "give a key that this very server has made"),
    ("http 403", "see the login server's log"),
    ("http 400", "see the login server's log"),
)


def _final(error: str) -> str:
    if "http 4" not in error and "authkey" not in error and "auth key" not in error:
        return ""
    return next((hint for mark, hint in _FINAL if mark in error), "")


def _in_words(status: Optional[Status], server: str) -> str:
    if status is None:
        return "; see the journal of tailscaled"
    said = _login_error(status.health)
    if said:
        return f", and the last login failed: {said}: see that this node reaches {server}"
    health = "; ".join(status.health)
    if status.state == "NeedsMachineAuth":
        return f": approve this node at {server}"
    return (f", and it says: {health}" if health else "") + f": see that this node reaches {server}"
