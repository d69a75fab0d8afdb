"""The part of Headscale's API that the daemon needs: the nodes, and the approval of routes. It is
used only if the operator gives the daemon an API key."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import socket
import ssl
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ipaddress import ip_address
from typing import Any, Callable, NamedTuple, Optional
from urllib.parse import urlsplit

from ..errors import IO_FAILURE, CniError
from ..exchange import Connection, Exchange, Exchanges
from ..log import Log

OLDEST = "0.26"  # the first version with approve_routes
PROBLEM = "application/problem+json"  # the errors of 0.30
LARGEST_ANSWER = 32 << 20  # a node is about a KiB
LARGEST_KEY = 4096
LONGEST_QUOTE = 200
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
FAILURES, REST_SECONDS, LONGEST_REST = 5, 30.0, 300.0

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half-open"

# Why a HeadscaleError was raised.
KEY_FILE, NO_ANSWER, RESTING, DENIED, REFUSED, TOO_OLD, UNKNOWN_NODE, STOPPED = (
    "key-file",
    "no-answer",
    "resting",
    "denied",
    "refused",
    "too-old",
    "unknown-node",
    "stopped",
)

Timed = Callable[[str], AbstractContextManager[None]]

log = Log("headscale")


class HeadscaleError(CniError):
    """Headscale cannot be asked, or refused. `kind` is one of the words above. `trouble` means that
    the server has a problem, so asking again later may help."""

    def __init__(self, kind: str, msg: str, details: str = "", trouble: bool = False) -> None:
        super().__init__(IO_FAILURE, msg, details)
        self.kind = kind
        self.trouble = trouble


class Node(NamedTuple):
    """A node as Headscale describes it. Routes are kept as Headscale writes them, because an
    approval counts only for exactly the prefix that the node advertises."""

    id: str
    key: str
    name: str
    online: bool
    approved: Optional[tuple[str, ...]]  # None: the server has no approvals of this kind
    served: tuple[str, ...]

    @property
    def routes(self) -> tuple[str, ...]:
        return self.approved or ()


class Breaker:
    """Stops asking a server that has problems. After some failures in a row it pauses, then lets a
    single request through, whose outcome decides. Each pause that did not help is doubled."""

    def __init__(
        self,
        failures: int = FAILURES,
        rest: float = REST_SECONDS,
        longest: float = LONGEST_REST,
    ) -> None:
        self._limit, self._first, self._longest = failures, rest, longest
        self._lock = threading.Lock()
        self._failures = 0
        self._rest = rest
        self._until: Optional[float] = None
        self._probing = False
        self._problem = ""

    @property
    def state(self) -> str:
        with self._lock:
            if self._until is None:
                return CLOSED
            return HALF_OPEN if self._probing or time.monotonic() >= self._until else OPEN

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around a request; raises a HeadscaleError at once while the server is left in peace."""
        self._admit()
        try:
            yield
        except HeadscaleError as problem:
            if problem.trouble:
                self._failed(str(problem))
            elif problem.kind != STOPPED:
                self._succeeded()  # it refused, so it is reachable
            raise
        else:
            self._succeeded()
        finally:
            with self._lock:
                self._probing = False

    def _admit(self) -> None:
        with self._lock:
            if self._until is None:
                return
            left = self._until - time.monotonic()
            if left > 0 or self._probing:
                raise HeadscaleError(
                    RESTING,
                    f"Headscale failed {self._failures} times in a row and is asked again "
                    + (f"in {left:.0f} s" if left > 0 else "just now"),
                    f"the last time: {self._problem}",
                )
            self._probing = True

    def _failed(self, problem: str) -> None:
        with self._lock:
            self._failures += 1
            self._problem = problem
            if self._failures < self._limit:
                return
            if self._until is not None:
                self._rest = min(self._rest * 2, self._longest)
            rest = self._rest * random.uniform(0.8, 1.2)  # noqa: S311
            self._until = time.monotonic() + rest
        log.warn("resting", failures=self._failures, seconds=round(rest, 1), problem=problem)

    def _succeeded(self) -> None:
        with self._lock:
            rested = self._until is not None
            self._failures, self._rest, self._until, self._problem = 0, self._first, None, ""
        if rested:
            log.info("Headscale answers again")


class HeadscaleClient:
    """What the daemon asks of Headscale. May be used by any thread.

    No proxy is used and no redirect followed, so the key goes only to the configured server.
    """

    def __init__(
        self,
        url: str,
        api_key_file: str,
        timeout: float = 10.0,
        retries: int = 3,
        *,
        breaker: Optional[Breaker] = None,
        timed: Timed = lambda _operation: nullcontext(),
        pauses: tuple[float, float] = (FIRST_PAUSE, LONGEST_PAUSE),
    ) -> None:
        """`timed` is given the name of an operation, as Metrics.headscale is."""
        parts = urlsplit(url)
        self.url = url.rstrip("/")
        self.breaker = breaker or Breaker()
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname or ""
        if self._tls is None and _may_be_public(self._host):
            log.warn("anybody on the way can read the API key: use https", url=self.url)
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        self._key_file = api_key_file
        self._timeout, self._retries, self._timed = timeout, retries, timed
        self._pauses = pauses
        self._exchanges = Exchanges()

    def nodes(self) -> list[Node]:
        """All nodes. Only this list says which routes are really served."""
        found = self._read("list", "/api/v1/node").get("nodes")
        if not isinstance(found, list):
            raise self._not_understood("there is no list of nodes in it")
        return [node for node in found if isinstance(node, Node)]

    def node(self, number: str) -> Optional[Node]:
        """A single node, without the routes it serves; None if Headscale has no node with that
        id."""
        try:
            found = self._read("get", f"/api/v1/node/{number}").get("node")
        except HeadscaleError as problem:
            if problem.kind == REFUSED and not problem.trouble:
                return None
            raise
        return found if isinstance(found, Node) else None

    def approve(self, node: Node, routes: Iterable[str]) -> None:
        """Approve exactly these routes for the node. Tried once: if the outcome is unknown, the
        caller reads again."""
        body = json.dumps({"routes": sorted(set(routes))}).encode()
        self._ask("approve", "POST", f"/api/v1/node/{node.id}/approve_routes", body)

    def cancel(self) -> None:
        """End what is in progress, including pauses. Later requests are not affected."""
        self._exchanges.end()

    def _read(self, operation: str, path: str) -> dict[str, Any]:
        pause, longest = self._pauses
        with self._exchanges.begin() as waiting:
            for attempt in range(self._retries + 1):
                try:
                    return self._ask(operation, "GET", path)
                except HeadscaleError as problem:
                    # If the breaker is open now, the next attempt would not be made anyway.
                    resting = self.breaker.state != CLOSED
                    if not problem.trouble or attempt == self._retries or resting:
                        raise
                    log.debug("asking again", path=path, attempt=attempt + 1, problem=problem)
                if waiting.ended.wait(pause * random.uniform(0.5, 1.5)):  # noqa: S311
                    raise _stopped()
                pause = min(pause * 2, longest)
        raise AssertionError  # the last attempt returns or raises

    def _ask(
        self, operation: str, method: str, path: str, body: Optional[bytes] = None
    ) -> dict[str, Any]:
        key = read_key(self._key_file)
        with self.breaker.guard(), self._timed(operation):
            with self._exchanges.begin(self._timeout) as exchange:
                status, content_type, answer = self._answer(exchange, method, path, key, body)
            if status != 200:
                raise self._refusal(status, content_type, answer, method, path, key)
            try:
                found = json.loads(answer, object_hook=_smaller)
            except (ValueError, RecursionError):
                raise self._not_understood(_quoted(_text(answer), key)) from None
            if not isinstance(found, dict):
                raise self._not_understood("it is no JSON object")
            return found

    def _answer(
        self, exchange: Exchange, method: str, path: str, key: str, body: Optional[bytes]
    ) -> tuple[int, str, bytes]:
        headers = {"Authorization": f"Bearer {key}", "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection = Connection(exchange, self._host, self._port, self._timeout, self._tls)
        try:
            connection.request(method, self._path + path, body, headers)
            answer = connection.getresponse()
            content = answer.read(LARGEST_ANSWER + 1)
            if len(content) > LARGEST_ANSWER:
                raise self._not_understood(f"it has more than {LARGEST_ANSWER >> 20} MiB")
            kind = answer.headers.get_content_type()
            if 300 <= answer.status < 400:
                content = f"it sends us to {answer.headers.get('Location', 'nowhere')}".encode()
                kind = "text/plain"
            # An answer without a length that we have cut off looks complete.
            if exchange.ended.is_set():
                raise OSError
            return answer.status, kind, content
        except (OSError, http.client.HTTPException) as problem:
            raise self._no_answer(exchange, problem) from None
        finally:
            connection.close()

    def _no_answer(self, exchange: Exchange, problem: Exception) -> HeadscaleError:
        if exchange.late or isinstance(problem, socket.timeout):
            return HeadscaleError(
                NO_ANSWER,
                f"Headscale at {self.url} did not answer in {self._timeout:g} s",
                "see that it runs and can be reached from this node",
                trouble=True,
            )
        if exchange.ended.is_set():
            return _stopped()
        if isinstance(problem, ssl.SSLCertVerificationError):
            return HeadscaleError(
                NO_ANSWER,
                f"the certificate of Headscale at {self.url} is not trusted",
                f"{problem.verify_message}; add its CA to the node's own",
                trouble=True,
            )
        said = getattr(problem, "strerror", None) or str(problem) or type(problem).__name__
        return HeadscaleError(
            NO_ANSWER,
            f"Headscale at {self.url} cannot be reached",
            f"{said}; see headscale.url, and that it runs",
            trouble=True,
        )

    def _refusal(
        self, status: int, content_type: str, answer: bytes, method: str, path: str, key: str
    ) -> HeadscaleError:
        said = _message(content_type, answer, key)
        if status in (401, 403):
            return HeadscaleError(
                DENIED,
                f"Headscale at {self.url} does not accept the API key in {self._key_file}",
                f"{said} (HTTP {status}); it may have expired: put a new one there "
                "(headscale apikeys create)",
            )
        # 0.30 has the call, and answers this for a node that is gone.
        if status == 404 and method == "POST" and content_type != PROBLEM:
            return too_old(self.url)
        return HeadscaleError(
            REFUSED,
            f"Headscale at {self.url} refused {method} {path}",
            f"{said} (HTTP {status}); see the log of Headscale",
            trouble=status >= 500 or status == 429,
        )

    def _not_understood(self, why: str) -> HeadscaleError:
        return HeadscaleError(
            REFUSED,
            f"the answer of {self.url} cannot be understood",
            f"{why}; see that headscale.url is Headscale's own",
            trouble=True,
        )


def _may_be_public(host: str) -> bool:
    """Whether the address may be a public one. A name counts as public."""
    try:
        return ip_address(host).is_global
    except ValueError:
        return host != "localhost"


def read_key(path: str) -> str:
    """The API key, read again for each request so that a new key counts at once.

    The key gives full control of the tailnet, so a file that others may read or write is not used.
    """
    how = "give it to root with mode 0600"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as problem:
        raise HeadscaleError(
            KEY_FILE,
            f"the API key file {path} cannot be read",
            f"{problem.strerror}; see headscale.apiKeyFile",
        ) from None
    try:
        seen = os.fstat(fd)
        if not stat.S_ISREG(seen.st_mode):
            raise HeadscaleError(KEY_FILE, f"the API key file {path} is not a regular file")
        if seen.st_uid != 0:
            raise HeadscaleError(
                KEY_FILE, f"the API key file {path} belongs to user {seen.st_uid}, not to root", how
            )
        if seen.st_mode & 0o077:
            raise HeadscaleError(
                KEY_FILE,
                f"the API key file {path} is open to others than root "
                f"(mode {stat.S_IMODE(seen.st_mode):04o})",
                how,
            )
        content = os.read(fd, LARGEST_KEY + 1)
    finally:
        os.close(fd)
    # Checked here, because http.client would quote a wrong key in its error.
    key = content.decode("ascii", errors="replace").strip()
    if len(content) > LARGEST_KEY or not re.match(r"[!-~]+\Z", key):
        raise HeadscaleError(
            KEY_FILE,
            f"the API key file {path} does not hold one key",
            "put there what headscale apikeys create prints, and nothing else",
        )
    return key


def _smaller(found: dict[str, Any]) -> Any:
    """Keep only the used part of a node as soon as it has been decoded: there may be thousands, and
    their pre-auth keys are none of our business."""
    if "nodeKey" not in found or "machineKey" not in found:
        return found
    approved = found.get("approvedRoutes")
    return Node(
        id=str(found.get("id") or ""),
        key=str(found["nodeKey"]),
        name=str(found.get("givenName") or found.get("name") or ""),
        online=bool(found.get("online")),
        approved=None if approved is None else tuple(map(str, approved)),
        served=tuple(map(str, found.get("subnetRoutes") or ())),
    )


def _message(content_type: str, answer: bytes, key: str) -> str:
    """The server's error message: Headscale's JSON, problem+json from 0.30 on, or plain text."""
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        words = [found.get(name) for name in ("message", "title", "detail")]
        errors = found.get("errors")
        for error in errors if isinstance(errors, list) else []:
            words.append(error.get("message") if isinstance(error, dict) else None)
        if said := ": ".join(dict.fromkeys(str(word) for word in words if word)):
            return _quoted(said, key)
    if content_type == "text/html":
        return "a web page"  # from a proxy, and of no help in a log
    return _quoted(_text(answer), key) or "it does not say why"


def _text(answer: bytes) -> str:
    return answer.decode(errors="replace")


def _quoted(said: str, key: str) -> str:
    """On a single line, not too long, and never with the key, which some proxies send back."""
    text = said.replace(key, "[the key]")[: 16 * LONGEST_QUOTE]
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= LONGEST_QUOTE else text[:LONGEST_QUOTE] + "…"


def too_old(url: str) -> HeadscaleError:
    return HeadscaleError(
        TOO_OLD,
        f"Headscale at {url} is too old to be asked for approvals by the daemon",
        f"upgrade it to {OLDEST} or newer, or approve the routes there and take "
        "headscale.apiKeyFile out of the config",
    )


def _stopped() -> HeadscaleError:
    return HeadscaleError(STOPPED, "the daemon is stopping")
