"""Headscale, where the operator gives the daemon an API key: this node's own routes are approved,
kept approved, and given back on departure. Without a key none of this runs.

Headscale's API has one call for it, which replaces all approved routes of a node and knows no "only
if unchanged". So each write follows right upon a read, keeps what it found there, and is itself
never repeated: what became of it shows in the next read. A key may do anything to any node; what
keeps us to our own is that a node is found by the key of the tailscaled beside us, never by a name.
"""

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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Optional
from urllib.parse import urlsplit

from ..errors import IO_FAILURE, CniError
from ..model import Network
from .exchange import Connection, Exchange, Exchanges
from .kernel_routes import Prefix
from .log import Log
from .routes import Alarm, Condition
from .tailscale import LocalApi

OLDEST = "0.26"  # the first with approve_routes
LARGEST_ANSWER = 32 << 20  # a node is about a KiB
LARGEST_KEY = 4096
LONGEST_QUOTE = 200
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
FAILURES, REST_SECONDS, LONGEST_REST = 5, 30.0, 300.0
INTERVAL_SECONDS = 30.0
STALE_SECONDS = 300.0
STOP_SECONDS = 5.0
WITHDRAW_TRIES = 3

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
    """Headscale cannot be asked, or said no. `kind` is one of the words above; `trouble` says that
    the server is not well, so that asking again later may help."""

    def __init__(self, kind: str, msg: str, details: str = "", trouble: bool = False) -> None:
        super().__init__(IO_FAILURE, msg, details)
        self.kind = kind
        self.trouble = trouble


class Node(NamedTuple):
    """A node as Headscale has it. Routes are kept as Headscale writes them: an approval counts
    only where it is the very prefix that the node advertises."""

    id: str
    key: str
    name: str
    online: bool
    approved: Optional[tuple[str, ...]]  # None: a server that knows no approvals of this kind
    served: tuple[str, ...]

    @property
    def routes(self) -> tuple[str, ...]:
        return self.approved or ()


class Identity(NamedTuple):
    """This node, as its own tailscaled knows it. Not with the routes that it believes to serve:
    Headscale 0.29 tells a node of its own approvals only when it has other news for it."""

    key: str
    name: str


def identify(api: LocalApi) -> Identity:
    """Who we are at Headscale; an error while tailscaled is logged out."""
    status = api.status(peers=False)
    if not status.key:
        raise HeadscaleError(
            UNKNOWN_NODE,
            f"tailscaled is not logged in (its state is {status.state or 'unknown'})",
            "join the node first: ansible-playbook site.yml, or tailscale up",
        )
    return Identity(status.key, status.name)


class Breaker:
    """Stops asking a server that is not well: after some failures in a row it rests, then lets one
    question through, and what becomes of that decides. Each rest that did not help doubles."""

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
        """One question; a HeadscaleError at once while the server is given a rest."""
        self._admit()
        try:
            yield
        except HeadscaleError as problem:
            if problem.trouble:
                self._failed(str(problem))
            elif problem.kind != STOPPED:
                self._succeeded()  # it said no: it is there
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
    """What the daemon asks of Headscale: the nodes, and an approval. May be used by any thread.

    No proxy is used and no redirect followed: the key goes to the server that was named.
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
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        self._key_file = api_key_file
        self._timeout, self._retries, self._timed = timeout, retries, timed
        self._pauses = pauses
        self._exchanges = Exchanges()

    def nodes(self) -> list[Node]:
        """Every node; the list alone tells which routes are really served."""
        found = self._read("list", "/api/v1/node").get("nodes")
        if not isinstance(found, list):
            raise self._not_understood("there is no list of nodes in it")
        return [node for node in found if isinstance(node, Node)]

    def node(self, number: str) -> Optional[Node]:
        """One node, without what it serves; None if Headscale says that it has none of that
        number."""
        try:
            found = self._read("get", f"/api/v1/node/{number}").get("node")
        except HeadscaleError as problem:
            if problem.kind == REFUSED and not problem.trouble:
                return None
            raise
        return found if isinstance(found, Node) else None

    def approve(self, node: Node, routes: Iterable[str]) -> None:
        """Have just these approved for the node. Asked once: who cannot know what came of it reads
        again."""
        body = json.dumps({"routes": sorted(set(routes))}).encode()
        self._ask("approve", "POST", f"/api/v1/node/{node.id}/approve_routes", body)

    def cancel(self) -> None:
        """End what is in progress, waiting included; what is asked later is asked as ever."""
        self._exchanges.end()

    def _read(self, operation: str, path: str) -> dict[str, Any]:
        pause, longest = self._pauses
        with self._exchanges.begin() as waiting:
            for attempt in range(self._retries + 1):
                try:
                    return self._ask(operation, "GET", path)
                except HeadscaleError as problem:
                    # A server that is at rest now would not be asked again anyway.
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
            except ValueError:
                raise self._not_understood(_quoted(answer, key)) from None
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
            # Ended by us in the middle of an answer without a length, it looks whole.
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
        if status == 404 and method == "POST":
            return _too_old(self.url)
        return HeadscaleError(
            REFUSED,
            f"Headscale at {self.url} refused {method} {path}",
            f"{said} (HTTP {status})",
            trouble=status >= 500 or status == 429,
        )

    def _not_understood(self, why: str) -> HeadscaleError:
        return HeadscaleError(
            REFUSED,
            f"the answer of {self.url} cannot be understood",
            f"{why}; see that headscale.url is Headscale's own",
            trouble=True,
        )


def read_key(path: str) -> str:
    """The API key, read anew for each question so that a new one counts at once.

    Whoever has it rules the tailnet: a file that others may read, or write, is not used.
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
    # Checked here, as http.client would quote a wrong one in its complaint.
    key = content.decode("ascii", errors="replace").strip()
    if len(content) > LARGEST_KEY or not re.match(r"[!-~]+\Z", key):
        raise HeadscaleError(
            KEY_FILE,
            f"the API key file {path} does not hold one key",
            "put there what headscale apikeys create prints, and nothing else",
        )
    return key


def _smaller(found: dict[str, Any]) -> Any:
    """A node, as soon as it is read, becomes the little of it that is used: there may be thousands,
    and their pre-auth keys are none of our business."""
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
    """What the server says is wrong: Headscale's JSON, problem+json from 0.30 on, or plain text."""
    with suppress(ValueError):
        found = json.loads(answer)
        if isinstance(found, dict):
            words = [found.get(name) for name in ("message", "title", "detail")]
            said = ": ".join(str(word) for word in words if word)
            if said:
                return _quoted(said.encode(), key)
    if content_type == "text/html":
        return "a web page"  # a proxy's, and of no help in a log
    return _quoted(answer, key) or "it does not say why"


def _quoted(said: bytes, key: str) -> str:
    """On one line, not too long, and never with the key, which some proxies send back."""
    text = said[: 16 * LONGEST_QUOTE].decode(errors="replace").replace(key, "[the key]")
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= LONGEST_QUOTE else text[:LONGEST_QUOTE] + "…"


def _too_old(url: str) -> HeadscaleError:
    return HeadscaleError(
        TOO_OLD,
        f"Headscale at {url} is too old to be asked for approvals by the daemon",
        f"upgrade it to {OLDEST} or newer, or approve the routes there and take "
        "headscale.apiKeyFile out of the config",
    )


def _stopped() -> HeadscaleError:
    return HeadscaleError(STOPPED, "the daemon is stopping")


class Clash(NamedTuple):
    """Another node that serves, or has approved, what overlaps a CIDR of ours."""

    cidr: str
    theirs: str
    node: Node


def clashes(own: Sequence[str], others: Iterable[Node]) -> list[Clash]:
    """Default routes aside: those of an exit node overlap everything, and harm nothing here."""
    mine = [(cidr, Prefix.parse(cidr)) for cidr in own]
    found = []
    for node in others:
        for theirs in dict.fromkeys((*node.routes, *node.served)):
            with suppress(ValueError, OSError):
                prefix = Prefix.parse(theirs)
                found += [
                    Clash(cidr, theirs, node)
                    for cidr, one in mine
                    if prefix.length and prefix.overlaps(one)
                ]
    return found


def find(nodes: Iterable[Node], me: Identity, url: str) -> Node:
    """This node among all. A name proves nothing: anybody may have taken it."""
    namesake = ""
    for node in nodes:
        if node.key == me.key:
            if node.approved is None:
                raise _too_old(url)
            return node
        if node.name == me.name:
            namesake = f"; the {node.name} there (node {node.id}) has another key"
    raise HeadscaleError(
        UNKNOWN_NODE,
        f"Headscale at {url} does not know this node by its key",
        f"see that tailscaled is joined to this very server{namesake}",
    )


_WELL = Condition("headscale", True, "")


@dataclass(frozen=True)
class ApprovalReport:
    """What a pass found and did. `restored` had been approved, and no longer was."""

    approved: tuple[str, ...] = ()
    restored: tuple[str, ...] = ()
    withdrawn: tuple[str, ...] = ()
    alarms: tuple[Alarm, ...] = ()
    problem: str = ""
    condition: Condition = _WELL

    @property
    def changed(self) -> bool:
        return bool(self.approved or self.restored or self.withdrawn)


class RouteKeeper:
    """Keeps this node's own CIDRs approved at Headscale, and touches nothing else there.

    While all is well it asks for this node alone, and for all of them but now and then: every node
    asks, and the list has every node in it.
    """

    def __init__(
        self,
        client: HeadscaleClient,
        identity: Callable[[], Identity],
        own_cidrs: Iterable[Network],
        on_report: Optional[Callable[[ApprovalReport], None]] = None,
        *,
        interval: float = INTERVAL_SECONDS,
        stale: float = STALE_SECONDS,
    ) -> None:
        """`identity` asks tailscaled: `lambda: identify(api)`."""
        self._client = client
        self._identity = identity
        self._own = tuple(dict.fromkeys(map(str, own_cidrs)))
        self._on_report = on_report
        self._interval, self._stale = interval, stale
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: Optional[threading.Thread] = None
        self._me: Optional[Identity] = None
        self._had: set[str] = set()
        self._settled: Optional[Node] = None  # as it was when all was approved, and ours alone
        self._looked_at = 0.0
        self._condition = Condition("headscale", False, "Headscale has not been asked yet")
        self._told: tuple[object, ...] = ()

    @property
    def condition(self) -> Condition:
        """For /ready, as of the last pass. An approval that was seen is taken to last while
        Headscale is away: pods go on talking then."""
        return self._condition

    def held_back(self) -> str:
        """The same as the monitor asks for it: why the node is not ready, or nothing."""
        return "" if self._condition.ok else self._condition.message

    def start(self) -> None:
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(self._stopping,), name="headscale", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Ends the passes; the approvals stay."""
        self._stopping.set()
        self._client.cancel()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)
            self._thread = None

    def ensure_once(self) -> ApprovalReport:
        """One pass, with a look at Headscale. Never raises what a later one may find mended."""
        with self._lock:
            return self._pass(self._ensure)

    def withdraw(self) -> ApprovalReport:
        """For the departure: our CIDRs are approved no longer, whoever approved them. It is best
        to stop advertising them first, or an autoApprover of the policy may bring them back."""
        self.stop()
        with self._lock:
            return self._pass(self._withdraw)

    def _run(self, stopping: threading.Event) -> None:
        pause = FIRST_PAUSE
        while not stopping.is_set():
            with self._lock:
                report = self._pass(self._ensure_if_needed)
            if self._on_report is not None and not stopping.is_set():
                with suppress(Exception):  # a listener's mistake keeps nobody from serving
                    self._on_report(report)
            wait = self._interval
            if report.problem:
                wait, pause = min(pause, self._interval), min(pause * 2, self._interval)
            else:
                pause = FIRST_PAUSE
            # Nodes that were started together do not ask together for ever.
            stopping.wait(wait * random.uniform(0.8, 1.2))  # noqa: S311

    def _pass(self, act: Callable[[], ApprovalReport]) -> ApprovalReport:
        try:
            report = act()
        except (CniError, OSError) as problem:
            if isinstance(problem, HeadscaleError) and problem.kind == STOPPED:
                return ApprovalReport(problem=str(problem), condition=self._condition)
            report = ApprovalReport(problem=str(problem), condition=self._doubtful(str(problem)))
        self._condition = report.condition
        self._tell(report)
        return report

    def _doubtful(self, problem: str) -> Condition:
        if self._had.issuperset(self._own):
            return Condition("headscale", True, f"approved when last seen; {problem}")
        return Condition("headscale", False, problem)

    def _ensure_if_needed(self) -> ApprovalReport:
        if self._settled is not None and time.monotonic() - self._looked_at < self._stale:
            self._me = self._identity()
            mine = self._client.node(self._settled.id)
            if mine is not None and mine.key == self._me.key and set(self._own) <= set(mine.routes):
                return ApprovalReport()
        return self._ensure()

    def _ensure(self) -> ApprovalReport:
        self._settled = None
        self._me = self._identity()
        nodes = self._client.nodes()
        mine = find(nodes, self._me, self._client.url)
        found = clashes(self._own, (node for node in nodes if node.id != mine.id))
        taken = {clash.cidr for clash in found}
        adding = [cidr for cidr in self._own if cidr not in mine.routes and cidr not in taken]
        if adding:
            self._client.approve(mine, (*mine.routes, *adding))
            # Another node may have asked for the same in this very moment, having seen none of it
            # either. Who looks last sees both, and takes its own back.
            nodes = self._client.nodes()
            mine = find(nodes, self._me, self._client.url)
            found = clashes(self._own, (node for node in nodes if node.id != mine.id))
            taken = {clash.cidr for clash in found}
            if taken.intersection(adding):
                keep = [one for one in mine.routes if one not in taken.intersection(adding)]
                self._client.approve(mine, keep)
                mine = mine._replace(approved=tuple(keep))
        had, self._had = self._had, set(self._own) & set(mine.routes)
        got = [cidr for cidr in adding if cidr in mine.routes]
        if self._had.issuperset(self._own) and not found:
            self._settled = mine
        self._looked_at = time.monotonic()
        return ApprovalReport(
            approved=tuple(cidr for cidr in got if cidr not in had),
            restored=tuple(cidr for cidr in got if cidr in had),
            alarms=tuple(_alarm(clash, clash.cidr in mine.routes) for clash in found),
            condition=self._judge(mine, found),
        )

    def _judge(self, mine: Node, found: Sequence[Clash]) -> Condition:
        """Approved is enough where nobody else has it: that it is also advertised, and by that
        served, is for the route manager to say."""
        lost = [one for one in found if one.cidr not in mine.served]
        if lost:
            return Condition("headscale", False, _sentence(lost[0], lost[0].cidr in mine.routes))
        missing = [cidr for cidr in self._own if cidr not in mine.routes]
        if missing:
            what = ", ".join(missing)
            return Condition("headscale", False, f"Headscale did not keep the approval of {what}")
        return _WELL

    def _withdraw(self) -> ApprovalReport:
        self._settled = None
        try:
            self._me = self._identity()
        except (CniError, OSError):
            if self._me is None:  # a tailscaled that has gone before us does not hold us up
                raise
        gone: tuple[str, ...] = ()
        for attempt in range(WITHDRAW_TRIES):
            try:
                mine = find(self._client.nodes(), self._me, self._client.url)
            except HeadscaleError as problem:
                if problem.kind != UNKNOWN_NODE:
                    raise
                break  # and with the node went its approvals
            ours = tuple(cidr for cidr in mine.routes if cidr in self._own)
            if not ours:
                break
            gone = ours
            try:
                self._client.approve(mine, [one for one in mine.routes if one not in ours])
                break
            except HeadscaleError as problem:
                # It may have been done for all that: the next read tells.
                if not problem.trouble or attempt == WITHDRAW_TRIES - 1:
                    raise
        self._had.clear()
        left = Condition("headscale", False, "this node has withdrawn its routes")
        return ApprovalReport(withdrawn=gone, condition=left)

    def _tell(self, report: ApprovalReport) -> None:
        """What was done, always; what is wrong, when it changes."""
        for word in ("approved", "restored", "withdrawn"):
            cidrs = getattr(report, word)
            if cidrs:
                log.info(word, cidrs=cidrs)
        # Without its figures: of a server that rests each pass would tell other seconds.
        now = (re.sub(r"\d+", "", report.problem), report.alarms)
        if now == self._told:
            return
        before, self._told = self._told, now
        for alarm in report.alarms:
            log.error("alarm", kind=alarm.kind, prefix=alarm.prefix, problem=alarm.message)
        if report.problem:
            log.warn("approval not certain", problem=report.problem)
        elif before and not report.alarms:
            log.info("all is well again")


def _alarm(clash: Clash, approved: bool) -> Alarm:
    claimants = ("this node", clash.node.name)
    return Alarm("own-cidr", clash.theirs, claimants, _sentence(clash, approved))


def _sentence(clash: Clash, approved: bool) -> str:
    node = clash.node
    away = "" if node.online else ", offline"
    stand = "is approved for both" if approved else "is not asked for"
    return (
        f"{node.name} (node {node.id}{away}) has {clash.theirs} approved, so this node's own "
        f"{clash.cidr} {stand}: give one of them another pod CIDR, or take it from {node.name} "
        f"(headscale nodes approve-routes, or headscale nodes delete if it is no more)"
    )
