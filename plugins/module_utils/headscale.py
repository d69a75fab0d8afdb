# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Headscale's REST API, 0.23 to 0.29, and what is known of 0.30, as the controller uses it.

Reads are repeated if the server is not well, writes never: what became of one shows in the next
read. No redirect is followed, and the key is in no message: it goes to the server that was named.
No call has pages: each list is whole. Where versions differ, what the server says decides, not the
number it gives itself: a build from source calls itself "dev".
"""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from typing import Any, NoReturn, Optional
from urllib.parse import quote, urlsplit

from ansible.module_utils.basic import AnsibleModule, env_fallback, missing_required_lib

from .headscale_objects import Node, Policy, PreAuthKey, User, Version, read_time, texts, written

try:
    import requests
    import urllib3
except ImportError:
    HAS_REQUESTS = False
    REQUESTS_ERROR = traceback.format_exc()
else:
    HAS_REQUESTS = True
    REQUESTS_ERROR = ""

PAUSES = (0.5, 1.0, 2.0)  # between the attempts of a read
LARGEST_ANSWER = 64 << 20  # a node is about a KiB
LONGEST_QUOTE = 300
LONGEST_TIMEOUT = 600.0
NOT_WELL = (429, 502, 503, 504)  # 500 is what Headscale calls many mistakes of ours

# Why a HeadscaleError was raised.
OPTION, NO_ANSWER, DENIED, REFUSED, NOT_UNDERSTOOD, UNSUPPORTED, NOT_FOUND = (
    "option",
    "no-answer",
    "denied",
    "refused",
    "not-understood",
    "unsupported",
    "not-found",
)


class HeadscaleError(Exception):
    """One line that says what is wrong and what to do; `kind` is one of the words above."""

    def __init__(self, kind: str, message: str, status: int = 0, passing: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status
        self.passing = passing  # asking again may help


def connection_spec() -> dict[str, Any]:
    """The options that each module shares; documented in the fragment headcni.mesh.headscale."""
    return {
        "url": {"type": "str", "required": True, "fallback": (env_fallback, ["HEADSCALE_URL"])},
        "api_key": {
            "type": "str",
            "required": True,
            "no_log": True,
            "fallback": (env_fallback, ["HEADSCALE_API_KEY"]),
        },
        "ca_file": {"type": "path"},
        "validate_certs": {"type": "bool", "default": True},
        "timeout": {"type": "float", "default": 10.0},
    }


def connect(module: AnsibleModule) -> Headscale:
    """The server of a module's options; nothing is asked yet."""
    if not HAS_REQUESTS:
        module.fail_json(msg=missing_required_lib("requests"), exception=REQUESTS_ERROR)
    given = module.params
    if exposes_key(given["url"]):
        module.warn(
            f"url: {given['url']} is read over http, so anybody on the way can read the API key, "
            "which rules the whole tailnet. Use https://, or an address of a private network"
        )
    return Headscale(
        given["url"],
        given["api_key"],
        ca_file=given["ca_file"] or "",
        validate_certs=given["validate_certs"],
        timeout=given["timeout"],
    )


def exposes_key(url: str) -> bool:
    """Whether a key would go over http to a public address, or to a name, which may be anywhere."""
    try:
        parts = urlsplit(url.strip())
    except ValueError:
        return False  # for the check of the option to tell
    if parts.scheme != "http" or not parts.hostname or parts.hostname == "localhost":
        return False
    try:
        return ip_address(parts.hostname).is_global
    except ValueError:
        return True


def fail(module: AnsibleModule, problem: HeadscaleError, **more: Any) -> NoReturn:
    module.fail_json(msg=str(problem), error=problem.kind, status=problem.status, **more)
    raise AssertionError  # fail_json does not return


class Headscale:
    """One server, by one session."""

    def __init__(
        self,
        url: str,
        api_key: str,
        *,
        ca_file: str = "",
        validate_certs: bool = True,
        timeout: float = 10.0,
        pauses: Optional[Sequence[float]] = None,
    ) -> None:
        self.url = _checked_url(url)
        self._key = _checked_key(api_key)
        self._verify = _checked_trust(self.url, ca_file, validate_certs)
        if not 0 < timeout <= LONGEST_TIMEOUT:
            raise HeadscaleError(
                OPTION,
                f"timeout: {timeout:g}, expected seconds above 0 and up to {LONGEST_TIMEOUT:g}",
            )
        self._timeout = timeout
        self._pauses = tuple(PAUSES if pauses is None else pauses)
        if not validate_certs:
            # Whoever says so knows it.
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        self._session = requests.Session()
        self._session.auth = self._sign  # as a header alone, a ~/.netrc would overrule it
        self._server_time: Optional[datetime] = None
        self._version: Optional[Version] = None
        self.requests = 0

    # What the server is

    def version(self) -> Version:
        """By GET /version, which is there from 0.27; else by the API that the server describes."""
        if self._version is None:
            self._version = self._find_version()
        return self._version

    def _find_version(self) -> Version:
        try:
            said = str(self._ask("GET", "/version").get("version", ""))
        except HeadscaleError as problem:
            if problem.kind in (NO_ANSWER, DENIED):
                raise
            said = ""
        found = re.match(r"v?(\d+)\.(\d+)", said)
        if found:
            return Version((int(found[1]), int(found[2])), said.lstrip("v"))
        return self._version_of_api()

    def _version_of_api(self) -> Version:
        try:
            paths = self._ask("GET", "/swagger/v1/openapiv2.json").get("paths", {})
        except HeadscaleError as problem:
            if problem.kind in (NO_ANSWER, DENIED):
                raise
            paths = {}  # a proxy that lets only the API through: take it for a current one
        if paths and "/api/v1/node" not in paths:
            raise HeadscaleError(
                UNSUPPORTED, f"Headscale at {self.url} is older than 0.23: upgrade it"
            )
        for number, path, method in (
            (29, "/api/v1/policy/check", "post"),
            (28, "/api/v1/preauthkey", "delete"),
            (27, "/api/v1/health", "get"),
            (26, "/api/v1/node/{nodeId}/approve_routes", "post"),
            (24, "/api/v1/user/{id}", "delete"),
            (23, "/api/v1/user/{name}", "delete"),
        ):
            if method in paths.get(path, {}):
                return Version((0, number), f"0.{number}")
        return Version((0, 29), "unknown")

    def now(self) -> datetime:
        """The server's time as of its last answer, or ours."""
        return self._server_time or datetime.now(timezone.utc)

    # Users

    def users(self) -> list[User]:
        return [User.of(raw) for raw in self._list("/api/v1/user", "users")]

    def user(self, name: str) -> Optional[User]:
        """The one user of that name, or None."""
        found = [user for user in self.users() if user.name == name]
        if len(found) > 1:
            ids = ", ".join(user.id for user in found)
            raise HeadscaleError(
                REFUSED,
                f"user {name!r} is ambiguous: Headscale has {len(found)} of that name (ids {ids}); "
                "rename all but one",
            )
        return found[0] if found else None

    def create_user(self, name: str) -> User:
        return User.of(_object(self._ask("POST", "/api/v1/user", {"name": name}), "user"))

    def rename_user(self, user: User, name: str) -> None:
        self._ask("POST", f"/api/v1/user/{_quoted(user.reference)}/rename/{_quoted(name)}")

    def delete_user(self, user: User) -> None:
        self._ask("DELETE", f"/api/v1/user/{_quoted(user.reference)}")

    # Pre-auth keys

    def create_key(
        self,
        user: Optional[User],
        tags: Sequence[str],
        reusable: bool,
        ephemeral: bool,
        expiration: datetime,
    ) -> PreAuthKey:
        body: dict[str, Any] = {
            "reusable": reusable,
            "ephemeral": ephemeral,
            "aclTags": list(tags),
            "expiration": written(expiration),
        }
        if user is not None:
            body["user"] = self._key_owner(user)
        return PreAuthKey.of(_object(self._ask("POST", "/api/v1/preauthkey", body), "preAuthKey"))

    def keys(self, user: Optional[User] = None) -> list[PreAuthKey]:
        """All of them; before 0.28 those of one user."""
        if self.version().number >= (0, 28):
            return [PreAuthKey.of(raw) for raw in self._list("/api/v1/preauthkey", "preAuthKeys")]
        if user is None:
            raise HeadscaleError(
                OPTION,
                f"user: missing, and Headscale {self.version().text} lists keys by user only: "
                "name the user that the key belongs to",
            )
        path = f"/api/v1/preauthkey?user={_quoted(self._key_owner(user))}"
        return [PreAuthKey.of(raw) for raw in self._list(path, "preAuthKeys")]

    def expire_key(self, key: PreAuthKey, user: Optional[User]) -> None:
        body: dict[str, Any] = {"id": key.id}
        if self.version().number < (0, 28):
            if user is None:
                raise HeadscaleError(OPTION, "user: missing: name the one that the key belongs to")
            body = {"user": self._key_owner(user), "key": key.key}
        self._ask("POST", "/api/v1/preauthkey/expire", body)

    def delete_key(self, key: PreAuthKey) -> None:
        if self.version().number < (0, 28):
            raise HeadscaleError(
                UNSUPPORTED,
                f"state: absent, and Headscale {self.version().text} deletes no keys: "
                "use state=expired, or upgrade it to 0.28",
            )
        self._ask("DELETE", f"/api/v1/preauthkey?id={_quoted(key.id)}")

    def _key_owner(self, user: User) -> str:
        return user.id if self.version().number >= (0, 26) else user.name

    # Nodes

    def nodes(self) -> list[Node]:
        """Every node with its routes: one call, or up to 0.25 two."""
        found = self._list("/api/v1/node", "nodes")
        if not found or "approvedRoutes" in found[0]:
            return [Node.of(raw) for raw in found]
        by_node: dict[str, list[Mapping[str, Any]]] = {}
        for route in self._list("/api/v1/routes", "routes"):
            owner = route.get("node")
            if isinstance(owner, Mapping):
                by_node.setdefault(str(owner.get("id", "")), []).append(route)
        return [Node.of(raw, by_node.get(str(raw.get("id", "")), [])) for raw in found]

    def rename_node(self, node: Node, name: str) -> None:
        self._ask("POST", f"/api/v1/node/{node.id}/rename/{_quoted(name)}")

    def tag_node(self, node: Node, tags: Iterable[str]) -> None:
        self._ask("POST", f"/api/v1/node/{node.id}/tags", {"tags": sorted(tags)})

    def expire_node(self, node: Node) -> None:
        self._ask("POST", f"/api/v1/node/{node.id}/expire")

    def check_never(self) -> None:
        """Whether an expiry can be taken back: older ones pass over the word and expire it."""
        if self.version().number < (0, 29):
            raise HeadscaleError(
                UNSUPPORTED,
                f"expiry: never, and Headscale {self.version().text} cannot take an expiry back: "
                "upgrade it to 0.29, or let the node log in again",
            )

    def never_expire_node(self, node: Node) -> None:
        self.check_never()
        # 0.29 reads the query and 0.30 the body, without which it expires the node at once.
        path = f"/api/v1/node/{node.id}/expire?disableExpiry=true"
        self._ask("POST", path, {"disableExpiry": True})

    def delete_node(self, node: Node) -> None:
        # 0.26 to 0.28 keep the served routes of a node that is gone: no other is given them until
        # Headscale is restarted.
        if node.served and node.switches is None and self.version().number < (0, 29):
            self.approve(node, ())
        self._ask("DELETE", f"/api/v1/node/{node.id}")

    def approve(self, node: Node, routes: Iterable[str]) -> None:
        """Have just these approved for the node; who keeps the others' names them too."""
        wanted = set(routes)
        if node.switches is not None:
            self._switch(node, node.switches, wanted)
            return
        answer = self._ask(
            "POST", f"/api/v1/node/{node.id}/approve_routes", {"routes": sorted(wanted)}
        )
        kept = set(texts(_object(answer, "node").get("approvedRoutes")))
        if wanted - kept:
            raise HeadscaleError(
                REFUSED,
                f"Headscale did not keep the approval of {', '.join(sorted(wanted - kept))}",
            )

    def _switch(self, node: Node, switches: Mapping[str, str], wanted: set[str]) -> None:
        """The same by the API of 0.23 to 0.25, which has a switch for each route it knows of."""
        for prefix in sorted(wanted - set(node.approved)):
            self._ask("POST", f"/api/v1/routes/{switches[prefix]}/enable")
        for prefix in sorted(set(node.approved) - wanted):
            self._ask("POST", f"/api/v1/routes/{switches[prefix]}/disable")

    # Policy

    def policy(self) -> Policy:
        """The policy's text, empty if there is none."""
        try:
            found = self._ask("GET", "/api/v1/policy")
        except HeadscaleError as problem:
            if "policy not found" in str(problem):
                return Policy("")
            if 'reading policy from path ""' in str(problem):
                return Policy("", in_file=True)  # policy.mode: file without a file: no policy
            raise
        # Only the database knows when it was changed; otherwise 0.30 says Go's zero time.
        return Policy(str(found.get("policy") or ""), read_time(found.get("updatedAt")) is None)

    def set_policy(self, text: str) -> None:
        self._ask("PUT", "/api/v1/policy", {"policy": text})

    def check_policy(self, text: str) -> None:
        """Have the server judge a policy that is not to be kept; before 0.29 nobody can."""
        if self.version().number >= (0, 29):
            self._ask("POST", "/api/v1/policy/check", {"policy": text})

    # How it is asked

    def _list(self, path: str, name: str) -> list[Mapping[str, Any]]:
        found = self._ask("GET", path).get(name)
        if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
            raise self._not_understood(f"there is no list of {name} in it")
        return found

    def _ask(
        self, method: str, path: str, body: Optional[Mapping[str, Any]] = None
    ) -> dict[str, Any]:
        for pause in (*self._pauses, None) if method == "GET" else (None,):
            try:
                return self._ask_once(method, path, body)
            except HeadscaleError as problem:
                if pause is None or not problem.passing:
                    raise
            time.sleep(pause)
        raise AssertionError  # the last attempt returns or raises

    def _ask_once(
        self, method: str, path: str, body: Optional[Mapping[str, Any]]
    ) -> dict[str, Any]:
        self.requests += 1
        try:
            with self._session.request(
                method,
                self.url + path,
                json=body,
                headers={"Accept": "application/json"},
                timeout=self._timeout,
                verify=self._verify,  # of the session, the environment would overrule it
                allow_redirects=False,
                stream=True,
            ) as answer:
                content = self._content(answer)
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError) as problem:
            raise self._no_answer(problem) from None
        self._note_time(answer.headers.get("Date", ""))
        if answer.status_code != 200:
            raise self._refusal(answer, content, method, path)
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            raise self._not_understood(_summary(answer, content)) from None
        if not isinstance(found, dict):
            raise self._not_understood("it is no JSON object")
        return found

    def _sign(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._key}"
        return request

    def _content(self, answer: requests.Response) -> bytes:
        """The body, if it comes to an end; the session's time-out is only for silence."""
        deadline = time.monotonic() + 6 * self._timeout
        content = bytearray()
        for piece in _pieces(answer):
            content += piece
            if len(content) > LARGEST_ANSWER:
                raise self._not_understood(f"it has more than {LARGEST_ANSWER >> 20} MiB")
            if time.monotonic() > deadline:
                raise requests.exceptions.ReadTimeout
        return bytes(content)

    def _note_time(self, date: str) -> None:
        try:
            self._server_time = parsedate_to_datetime(date).astimezone(timezone.utc)
        except (TypeError, ValueError):
            self._server_time = None

    def _no_answer(self, problem: Exception) -> HeadscaleError:
        text = str(problem)
        if isinstance(problem, requests.exceptions.SSLError):
            found = re.search(r"certificate verify failed: (.*?)(?: \(_ssl|[')])", text)
            if found:
                return HeadscaleError(
                    NO_ANSWER,
                    f"url: the certificate of {self.url} is not trusted: {found[1]}; "
                    "give the CA's certificate as ca_file",
                )
            return HeadscaleError(
                NO_ANSWER, f"url: {self.url} does not speak TLS as it should: is it http?"
            )
        timeouts = (requests.exceptions.Timeout, urllib3.exceptions.TimeoutError)
        if isinstance(problem, timeouts) or "timed out" in text:
            return HeadscaleError(
                NO_ANSWER,
                f"url: {self.url} did not answer in {self._timeout:g} s; see that Headscale runs "
                "and can be reached from the controller",
                passing=True,
            )
        if isinstance(problem, requests.exceptions.ProxyError):
            return HeadscaleError(
                NO_ANSWER,
                f"url: {self.url} cannot be reached by the proxy that the environment names; "
                "set no_proxy if it needs none",
                passing=True,
            )
        reason = re.search(r"\[Errno -?\d+\] ([^'\")]*)", text)
        said = reason[1] if reason else "the connection broke off"
        return HeadscaleError(
            NO_ANSWER,
            f"url: {self.url} cannot be reached: {said}; see that Headscale runs and that the "
            "address and port are right",
            passing=True,
        )

    def _refusal(
        self, answer: requests.Response, content: bytes, method: str, path: str
    ) -> HeadscaleError:
        status = answer.status_code
        if 300 <= status < 400:
            where = self._clean(answer.headers.get("Location", "nowhere"))
            return HeadscaleError(
                REFUSED,
                f"url: {self.url} sends us to {where} (HTTP {status}), and the key goes nowhere "
                "but to the server that was named: give the final address",
                status,
            )
        if status in (401, 403):
            return HeadscaleError(
                DENIED,
                f"api_key: Headscale at {self.url} does not accept it "
                f"({self._clean(': '.join(filter(None, [f'HTTP {status}', _message(content)])))}): "
                "it may be expired, or another server's; make one with `headscale apikeys create`",
                status,
            )
        said = _message(content) or _summary(answer, content)
        where = f"{method} {path.split('?')[0]}, HTTP {status}"
        kind = NOT_FOUND if status == 404 else REFUSED
        return HeadscaleError(
            kind,
            f"Headscale at {self.url} said: {self._clean(said)} ({where}); {_fix(method, status)}",
            status,
            passing=status in NOT_WELL,
        )

    def _not_understood(self, why: str) -> HeadscaleError:
        return HeadscaleError(
            NOT_UNDERSTOOD,
            f"url: the answer of {self.url} is not Headscale's: {self._clean(why)}; give the "
            "address of Headscale itself, not of a page before it",
        )

    def _clean(self, text: str) -> str:
        """On one line, not too long, and without the key."""
        text = text.replace(self._key, "[the key]")[: 16 * LONGEST_QUOTE]
        line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return line if len(line) <= LONGEST_QUOTE else line[:LONGEST_QUOTE] + "…"


# What may be asked for


def check_user_name(option: str, name: str) -> None:
    """The rule that Headscale states and does not always keep to; other names do harm in policies
    and URLs."""
    if (
        len(name) < 2
        or not name[0].isalpha()
        or name.count("@") > 1
        or not all(c.isalpha() or c.isdigit() or c in "-._@" for c in name)
    ):
        raise HeadscaleError(
            OPTION,
            f"{option}: {name!r}, expected at least 2 characters: a letter, then letters, digits, "
            "- . _ and at most one @",
        )


def check_label(option: str, name: str) -> None:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", name):
        raise HeadscaleError(
            OPTION,
            f"{option}: {name!r}, expected a DNS label: up to 63 of a-z, 0-9 and -, "
            "with no - at either end",
        )


def check_tags(option: str, tags: Iterable[str]) -> None:
    for tag in tags:
        if not re.fullmatch(r"tag:[a-z0-9][a-z0-9-]*", tag):
            raise HeadscaleError(
                OPTION,
                f"{option}: {tag!r}, expected tag: and then a-z, 0-9 and -, such as tag:k8s",
            )


def find_node(
    nodes: Iterable[Node],
    *,
    id: Optional[str] = None,
    node_key: Optional[str] = None,
    name: Optional[str] = None,
) -> Optional[Node]:
    """The node that is meant, or None. A name that several have is refused, as one of them may be
    what a reinstalled machine left behind."""
    if id:
        found = [node for node in nodes if node.id == str(id)]
    elif node_key:
        found = [node for node in nodes if node.key == node_key]
    else:
        found = [node for node in nodes if name in (node.name, node.hostname)]
    if len(found) > 1:
        those = ", ".join(
            f"id {node.id} ({node.name}, {'online' if node.online else 'offline'})"
            for node in found
        )
        raise HeadscaleError(
            REFUSED, f"name: {name!r} is ambiguous: {those}; give the id or node_key of one"
        )
    return found[0] if found else None


def _checked_url(url: str) -> str:
    def wrong(expected: str) -> HeadscaleError:
        shown = re.sub(r"//[^/@]*@", "//…@", url)
        return HeadscaleError(OPTION, f"url: {shown!r}, expected {expected}")

    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError:
        raise wrong("an address such as https://headscale.example.org") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise wrong("http:// or https://, a host and perhaps a port")
    if parts.username or parts.password:
        raise wrong("no user or password in it: the API key is all that Headscale takes")
    if parts.query or parts.fragment or "/api/v1" in parts.path:
        raise wrong("the server's own address, without /api/v1 or anything behind it")
    return url.strip().rstrip("/")


def _checked_key(key: str) -> str:
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise HeadscaleError(
            OPTION,
            "api_key: "
            + ("empty" if not key else "not one word of plain characters")
            + ", expected what `headscale apikeys create` printed",
        )
    return key


def _checked_trust(url: str, ca_file: str, validate_certs: bool) -> bool | str:
    if not ca_file:
        return validate_certs
    if not validate_certs:
        raise HeadscaleError(
            OPTION, "ca_file: given, and validate_certs is false: leave one of them out"
        )
    if not url.startswith("https://"):
        raise HeadscaleError(OPTION, f"ca_file: given, and url is {url!r}: expected https://")
    if not os.path.isfile(ca_file) or not os.access(ca_file, os.R_OK):
        raise HeadscaleError(
            OPTION, f"ca_file: {ca_file!r}, expected a file on the controller that can be read"
        )
    return ca_file


# What it answers


def _pieces(answer: requests.Response) -> Iterator[bytes]:
    """The body as it comes. An older urllib3 waits until a piece is whole."""
    read = getattr(answer.raw, "read1", None)
    if read is None:
        yield from answer.iter_content(1 << 12)
        return
    while piece := read(1 << 16, decode_content=True):
        yield piece


def _object(answer: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = answer.get(name)
    if not isinstance(found, Mapping):
        raise HeadscaleError(NOT_UNDERSTOOD, f"Headscale's answer has no {name} in it")
    return found


def _message(content: bytes) -> str:
    """Of gRPC's shape {code, message}, or of application/problem+json."""
    try:
        said = json.loads(content)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(said, Mapping):
        return ""
    if said.get("message"):
        return str(said["message"])
    found = [str(said[part]) for part in ("title", "detail") if said.get(part)]
    parts = list(dict.fromkeys(found))  # a 401 has the same word as both
    errors = said.get("errors")
    for one in errors if isinstance(errors, list) else []:
        if isinstance(one, Mapping) and one.get("message"):
            place = f" ({one['location']})" if one.get("location") else ""
            parts.append(f"{one['message']}{place}")
    return ": ".join(parts)


def _fix(method: str, status: int) -> str:
    if status == 404 and method == "GET":  # a list, which Headscale always has
        return "give the address of Headscale itself as url"
    if status == 404:
        return "it may be gone by now: run again"
    if status == 409:
        return "another one has it: choose another name, or remove the other"
    if status in NOT_WELL:
        return "see the log of Headscale, and run again when it is well"
    if status >= 500:
        return "correct what it names, or see the log of Headscale"
    return "correct what it names"


def _summary(answer: requests.Response, content: bytes) -> str:
    text = content[: 4 * LONGEST_QUOTE].decode("utf-8", "replace").strip()
    if "html" in answer.headers.get("Content-Type", "") or text[:1] == "<":
        return "a web page"
    return text or "it does not say why"


def _quoted(text: str) -> str:
    return quote(text, safe="")


def in_minutes(now: datetime, minutes: int) -> datetime:
    return now + timedelta(minutes=minutes)
