"""A client for Kubernetes' API server: lists and watches of this node's pods, single pods, and all
objects of a kind.

It covers only what the daemon needs, on the standard library. The only thing it creates is a new
token for its own account. Every exchange ends: by its time limit, by its size limit, or because
somebody called cancel().
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Optional, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from ...exchange import Connection, Exchange, Exchanges
from ...shared import bearer_token
from .access import Access, is_token
from .errors import (
    CONFIG,
    DENIED,
    GONE,
    MISSING,
    NO_ANSWER,
    REFUSED,
    KubeError,
    not_understood,
    stopped,
)
from .objects import (
    Change,
    Pod,
    PodList,
    quoted,
    read_change,
    read_event,
    read_items,
    read_object,
    read_pod,
    read_pods,
)

ANSWER_SECONDS = 15.0
WATCH_SECONDS = 300  # how long we ask the server to keep a watch open
SILENCE_SECONDS = 150.0  # bookmarks come about every minute, but that is not guaranteed
PAGE = 50  # pods in an answer: a whole page is in memory at once
MAX_PODS = 10_000
LARGEST_ANSWER = 32 << 20
LARGEST_EVENT = 8 << 20  # an object has at most 1.5 MiB in etcd; JSON is larger
LONGEST_RETRY_AFTER = 60.0

T = TypeVar("T")
Timed = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Selector:
    """Which pods: those of a node, optionally only those with these labels."""

    node: str
    labels: str = ""

    def query(self) -> dict[str, str]:
        asked = {"fieldSelector": f"spec.nodeName={self.node}"}
        if self.labels:
            asked["labelSelector"] = self.labels
        return asked


class Resource(NamedTuple):
    """All objects of a kind, in all namespaces."""

    path: str
    kind: str
    page: int  # objects in an answer: a whole page is in memory at once
    most: int

    def __str__(self) -> str:
        return self.path.rpartition("/")[2]


NAMESPACES = Resource("/api/v1/namespaces", "Namespace", page=200, most=20_000)


class KubeClient:
    """Requests to the API server, each on its own connection. May be used by any thread.

    No proxy is used and no redirect followed, so the token goes only to the configured server.
    """

    def __init__(
        self,
        source: Callable[[], Access],
        timeout: float = ANSWER_SECONDS,
        *,
        timed: Timed = lambda _operation: nullcontext(),
        watch_seconds: float = WATCH_SECONDS,
        silence: float = SILENCE_SECONDS,
    ) -> None:
        """`timed` is given the name of an operation, as Metrics.headscale is."""
        self._source = source
        self._timeout, self._timed = timeout, timed
        self._watch_seconds, self._silence = watch_seconds, silence
        self._exchanges = Exchanges()

    def pods(self, selector: Selector) -> PodList:
        """All pods as they are now. Without a resourceVersion the server answers from its
        storage, not from a cache that may be behind."""
        found: list[Pod] = []
        query = {**selector.query(), "limit": str(PAGE)}
        while True:
            some, version, meta = read_pods(self._get("list", "/api/v1/pods", query))
            found += some
            if len(found) > MAX_PODS:
                raise not_understood(f"it has more than {MAX_PODS} pods")
            if not meta.get("continue"):
                return PodList(tuple(found), version)
            query["continue"] = str(meta["continue"])

    def pod(self, namespace: str, name: str) -> Optional[Pod]:
        """A single pod; None if the API server itself says that it does not exist. Any other
        answer, such as a proxy's 404, is an error."""
        path = f"/api/v1/namespaces/{quote(namespace, '')}/pods/{quote(name, '')}"
        answer = self._get("get", path, {}, missing=("pods", name))
        return read_pod(answer) if answer else None

    def pod_of_node(self, node: str, namespace: str, name: str) -> Optional[Pod]:
        """The same with the credentials of a node. For a pod that is gone, the API server only
        tells a node that it may not ask, but a list without the pod is an answer."""
        path = f"/api/v1/namespaces/{quote(namespace, '')}/pods"
        answer = self._get(
            "list", path, {"fieldSelector": f"spec.nodeName={node},metadata.name={name}"}
        )
        return next(iter(read_pods(answer)[0]), None)

    def has_node(self, name: str) -> bool:
        """Whether Kubernetes has a node with that name."""
        return bool(self._get("node", f"/api/v1/nodes/{quote(name, '')}", {}, ("nodes", name)))

    def new_token(self, namespace: str, account: str, seconds: int) -> str:
        """A new token for a service account. The server may grant fewer seconds than requested."""
        path = (
            f"/api/v1/namespaces/{quote(namespace, '')}/serviceaccounts/{quote(account, '')}/token"
        )
        wanted = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": seconds},
        }
        status = self._get("token", path, {}, body=wanted).get("status")
        token = status.get("token") if isinstance(status, dict) else None
        if not isinstance(token, str) or not is_token(token):
            raise not_understood("it has no token")
        return token

    def watch(self, selector: Selector, version: str) -> AbstractContextManager[Iterator[Change]]:
        """The changes since a version. They end when the server ends them or is silent for too
        long. A KubeError of kind GONE means that the version is too old."""
        return self._watch("/api/v1/pods", selector.query(), version, read_change)

    def pages(self, resource: Resource) -> Iterator[tuple[list[Any], str]]:
        """All objects of a kind in parts, each with the version of the whole list."""
        count, query = 0, {"limit": str(resource.page)}
        while True:
            answer = self._get(str(resource), resource.path, query)
            items, version, meta = read_items(answer, f"{resource.kind}List")
            count += len(items)
            if count > resource.most:
                raise not_understood(f"there are more than {resource.most} {resource}")
            yield items, version
            if not meta.get("continue"):
                return
            query["continue"] = str(meta["continue"])

    def watch_all(
        self, resource: Resource, version: str
    ) -> AbstractContextManager[Iterator[tuple[str, str, Mapping[str, Any]]]]:
        """The events since a version: type, version and object."""
        return self._watch(resource.path, {}, version, read_event)

    @contextmanager
    def _watch(
        self, path: str, query: Mapping[str, str], version: str, parse: Callable[[bytes], T]
    ) -> Iterator[Iterator[T]]:
        query = {
            **query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(int(self._watch_seconds)),
        }
        with ExitStack() as stack:
            with self._timed("watch"):
                limit = self._watch_seconds + self._timeout
                exchange = stack.enter_context(self._exchanges.begin(limit))
                connection, answer = self._ask(stack, exchange, path, query)
                if answer.status != 200:
                    raise self._refusal(answer, f"GET {path}?watch=true")
                connection.sock.settimeout(self._silence)
            yield map(parse, self._lines(exchange, answer))

    def cancel(self) -> None:
        """End what is in progress. Later requests are not affected."""
        self._exchanges.end()

    def _lines(self, exchange: Exchange, answer: http.client.HTTPResponse) -> Iterator[bytes]:
        while True:
            try:
                line = answer.readline(LARGEST_EVENT + 1)
            except socket.timeout:
                return  # silence: the next request shows whether the server is still there
            except (OSError, http.client.HTTPException, ValueError) as problem:
                if exchange.late:
                    return
                raise self._no_answer(exchange, problem) from None
            if len(line) > LARGEST_EVENT:
                raise not_understood(f"an event has more than {LARGEST_EVENT >> 20} MiB")
            if exchange.ended.is_set() and not exchange.late:
                raise stopped()
            if not line.endswith(b"\n"):
                return  # the end, or half a line, which the next watch repeats
            if line.strip():
                yield line

    def _get(
        self,
        operation: str,
        path: str,
        query: Mapping[str, str],
        missing: Optional[tuple[str, str]] = None,
        body: Optional[Mapping[str, Any]] = None,
    ) -> dict[str, Any]:
        """The object that the server answers; {} if it is missing and may be `missing`. With a
        body, the request is a POST."""
        with self._timed(operation), ExitStack() as stack:
            exchange = stack.enter_context(self._exchanges.begin(self._timeout))
            _unused, answer = self._ask(stack, exchange, path, query, body)
            if answer.status not in (200, 201):
                asked = f"{'GET' if body is None else 'POST'} {path}"
                refusal = self._refusal(answer, asked, missing)
                if refusal.kind == MISSING:
                    return {}
                raise refusal
            try:
                content = answer.read(LARGEST_ANSWER + 1)
                if exchange.ended.is_set():
                    raise OSError  # an answer without a length that we have cut off looks complete
            except (OSError, http.client.HTTPException, ValueError) as problem:
                raise self._no_answer(exchange, problem) from None
            if len(content) > LARGEST_ANSWER:
                raise not_understood(f"it has more than {LARGEST_ANSWER >> 20} MiB")
            return read_object(content)

    def _ask(
        self,
        stack: ExitStack,
        exchange: Exchange,
        path: str,
        query: Mapping[str, str],
        body: Optional[Mapping[str, Any]] = None,
    ) -> tuple[Connection, http.client.HTTPResponse]:
        access = self._source()
        headers = {"Accept": "application/json", "User-Agent": "headcni-daemon"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if token := access.bearer():
            headers["Authorization"] = f"Bearer {token}"
        parts = urlsplit(access.server)
        try:
            tls = access.tls()
        except (OSError, ValueError) as problem:  # ssl.SSLError is an OSError
            raise _bad_certificates(access, problem) from None
        connection = Connection(
            exchange,
            parts.hostname or "",
            parts.port or 443,
            self._timeout,
            tls,
            access.server_name,
        )
        stack.callback(connection.close)
        target = parts.path + path + (f"?{urlencode(query)}" if query else "")
        try:
            if body is None:
                connection.request("GET", target, headers=headers)
            else:
                connection.request("POST", target, json.dumps(body).encode(), headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException, ValueError) as problem:
            raise self._no_answer(exchange, problem, access.server) from None
        return connection, answer

    def _no_answer(self, exchange: Exchange, problem: Exception, server: str = "") -> KubeError:
        name = f"the API server {server}".rstrip()
        if exchange.late or isinstance(problem, socket.timeout):
            return KubeError(
                NO_ANSWER,
                f"{name} did not answer in {self._timeout:g} s",
                "see that it runs and can be reached from this node",
            )
        if exchange.ended.is_set():
            return stopped()
        if isinstance(problem, ssl.SSLCertVerificationError):
            return KubeError(
                NO_ANSWER,
                f"the certificate of {name} is not trusted",
                f"{problem.verify_message}; see certificate-authority(-data) in the kubeconfig",
            )
        said = getattr(problem, "strerror", None) or str(problem) or type(problem).__name__
        return KubeError(NO_ANSWER, f"{name} cannot be reached", str(said))

    def _unaccepted(self) -> str:
        token = None
        with suppress(KubeError):
            token = bearer_token.read(self._source().bearer())
        if token is not None and token.has_expired(time.time()):
            when = bearer_token.date(token.expires)
            return f"its token expired on {when}: run site.yml for this node to get a new one"
        return "its credentials are not accepted; if site.yml has made them, run it again"

    def _refusal(
        self,
        answer: http.client.HTTPResponse,
        asked: str,
        missing: Optional[tuple[str, str]] = None,
    ) -> KubeError:
        status, found = answer.status, {}
        with suppress(OSError, http.client.HTTPException, ValueError, KubeError):
            found = read_object(answer.read(65536))
        genuine = found.get("kind") == "Status"
        said = f"{quoted(str(found.get('message') or answer.reason or ''))} (HTTP {status})"
        if status in (401, 403):
            hint = self._unaccepted() if status == 401 else _lacks(asked)
            return KubeError(DENIED, f"the API server refused {asked}", f"{said}; {hint}")
        if genuine and status == 410:
            return KubeError(GONE, "the watch is too old to go on from", said)
        if genuine and status == 404 and missing and _names(found, *missing):
            return KubeError(MISSING, f"{missing[1]} is not there", said)
        return KubeError(
            REFUSED,
            f"the API server refused {asked}",
            said,
            _retry_after(answer.getheader("Retry-After") or ""),
        )


def _lacks(asked: str) -> str:
    if asked.startswith("POST "):
        return "it needs create on serviceaccounts/token of its own account: run site.yml"
    if "/networkpolicies" in asked:
        return (
            "it needs list and watch on networkpolicies: set headcni_node_network_policy and run "
            "site.yml"
        )
    return (
        "it needs list, watch and get on pods, get on nodes, and list and watch on namespaces: "
        "run site.yml"
    )


def _names(status: Mapping[str, Any], kind: str, name: str) -> bool:
    """Whether a NotFound is about exactly this object, not about its namespace or the whole API."""
    details = status.get("details")
    if status.get("reason") != "NotFound" or not isinstance(details, dict):
        return False
    return details.get("kind") == kind and details.get("name") == name


def _retry_after(text: str) -> float:
    return min(float(text), LONGEST_RETRY_AFTER) if re.match(r"\d{1,6}\Z", text) else 0.0


def _bad_certificates(access: Access, problem: Exception) -> KubeError:
    names = [access.ca_file, access.certificate_file, access.key_file]
    files = ", ".join(filter(None, names)) or "those in the kubeconfig"
    said = getattr(problem, "strerror", None) or str(problem)
    return KubeError(
        CONFIG, "the certificates for the API server cannot be used", f"{said}; see {files}"
    )
