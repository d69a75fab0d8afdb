"""Kubernetes' API server, asked for this node's pods: list, watch, and one pod at a time. And for
an annotation of namespaces.

As little of it as the daemon needs, on the standard library: a kubeconfig or a service account says
where the server is and who we are. All it makes there is a new token of its own account. Every
exchange ends: by its own time limit, by its size limit, or because somebody called cancel().
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from stat import S_IMODE, S_IRGRP, S_IROTH, S_IWGRP, S_IWOTH
from typing import Any, Callable, NamedTuple, Optional, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from ...errors import IO_FAILURE, CniError
from ...exchange import Connection, Exchange, Exchanges
from ...log import Log
from ...model import PodRef
from ...shared import bearer_token

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
ANSWER_SECONDS = 15.0
WATCH_SECONDS = 300  # how long the server is to keep a watch open
SILENCE_SECONDS = 150.0  # bookmarks come about every minute, though nobody promises them
PAGE = 50  # pods in one answer: a whole page is in memory at once
MAX_PODS = 10_000
NAMESPACE_PAGE = 200
MAX_NAMESPACES = 5_000
LONGEST_ANNOTATION = 4100  # longer than any that is understood
LARGEST_ANSWER = 32 << 20
LARGEST_EVENT = 8 << 20  # an object has at most 1.5 MiB in etcd; JSON is larger
LARGEST_FILE = 1 << 20
LONGEST_QUOTE = 200
LONGEST_RETRY_AFTER = 60.0
_MFD_NOEXEC_SEAL = 8

# Why a KubeError was raised.
CONFIG, NO_ANSWER, DENIED, GONE, MISSING, REFUSED, STOPPED = (
    "config",
    "no-answer",
    "denied",
    "gone",
    "missing",
    "refused",
    "stopped",
)

ADDED, MODIFIED, DELETED, BOOKMARK = "ADDED", "MODIFIED", "DELETED", "BOOKMARK"

# By which a static pod's twin at the API server tells the uid that kubelet runs it under.
_STATIC = ("kubernetes.io/config.hash", "kubernetes.io/config.mirror")

_NAMESPACES = "/api/v1/namespaces"

T = TypeVar("T")
Timed = Callable[[str], AbstractContextManager[None]]

log = Log("kubernetes")


class KubeError(CniError):
    """The API server cannot be asked, or said no. `kind` is one of the words above."""

    def __init__(self, kind: str, msg: str, details: str = "", retry_after: float = 0.0) -> None:
        super().__init__(IO_FAILURE, msg, details)
        self.kind = kind
        self.retry_after = retry_after


class Pod(NamedTuple):
    """A pod, as far as its network is concerned."""

    namespace: str
    name: str
    uid: str
    runs_as: tuple[str, ...]  # the uids that its sandbox may have been given; see _STATIC
    node: str
    phase: str  # Pending, Running, Succeeded, Failed, Unknown
    host_network: bool
    ips: tuple[str, ...]
    terminating: bool

    @property
    def ref(self) -> PodRef:
        return PodRef(self.namespace, self.name, self.uid)

    @property
    def ended(self) -> bool:
        """It runs no more, and never will again."""
        return self.phase in ("Succeeded", "Failed")


class NamespaceList(NamedTuple):
    """What namespaces say by an annotation; those without it are left out."""

    annotated: dict[str, str]
    version: str


class NamespaceChange(NamedTuple):
    """One event of a watch. A bookmark has no name; without the annotation, the text is None."""

    version: str
    name: str = ""
    annotation: Optional[str] = None


class PodList(NamedTuple):
    pods: tuple[Pod, ...]
    version: str  # from which on to watch


class Change(NamedTuple):
    """One event of a watch. A bookmark has no pod."""

    type: str
    version: str
    pod: Optional[Pod] = None


@dataclass(frozen=True)
class Access:
    """Where the API server is, and who we are there. Files are read anew for each connection, so
    that what was rotated counts."""

    server: str
    ca: str = ""  # PEM
    ca_file: str = ""
    server_name: str = ""  # in the certificate, where it is not the one in the URL
    certificate: str = field(default="", repr=False)  # PEM, with its key
    certificate_file: str = ""
    key_file: str = ""
    token: str = field(default="", repr=False)
    token_file: str = ""

    def tls(self) -> ssl.SSLContext:
        """Only the cluster's own CA is trusted. Not by create_default_context: from Python 3.13 on
        it refuses certificates without a key identifier, which many clusters have."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.ca or self.ca_file:
            context.load_verify_locations(self.ca_file or None, cadata=self.ca or None)
        else:
            context.load_default_certs()
        if self.certificate:
            with _in_memory(self.certificate) as path:
                context.load_cert_chain(path)
        elif self.certificate_file:
            context.load_cert_chain(self.certificate_file, self.key_file or None)
        return context

    def bearer(self) -> str:
        token = _read_text(self.token_file).strip() if self.token_file else self.token
        if token and not _is_word(token):  # http.client would quote a wrong one
            where = self.token_file or "the kubeconfig's users[].user.token"
            raise KubeError(CONFIG, f"the token in {where} is not one word of ASCII")
        return token


class Source:
    """Whence the access comes: a kubeconfig, or the service account of a pod. Read again when the
    file has changed."""

    def __init__(self, kubeconfig: str, env: Optional[Mapping[str, str]] = None) -> None:
        self.kubeconfig = kubeconfig
        self._env = os.environ if env is None else env
        self._seen: tuple[int, ...] = ()
        self._known: Optional[Access] = None

    @property
    def given(self) -> bool:
        """Whether the operator, or Kubernetes, has said anything at all of an API server."""
        return bool(self.kubeconfig or self._env.get("KUBERNETES_SERVICE_HOST"))

    def __str__(self) -> str:
        return self.kubeconfig or "the service account"

    def __call__(self) -> Access:
        if not self.kubeconfig:
            return in_cluster(self._env)
        try:
            stat = os.stat(self.kubeconfig)
        except OSError as problem:
            raise _unreadable(self.kubeconfig, problem, "see daemon.kubeconfig") from None
        # A change of owner or mode moves the time of change only.
        seen = (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size)
        if self._known is None or seen != self._seen:
            _refuse_others(self.kubeconfig, stat)
            self._known = read_kubeconfig(self.kubeconfig)
            self._seen = seen
        return self._known


def _refuse_others(path: str, found: os.stat_result) -> None:
    """Whoever may write the kubeconfig decides which server tells us about pods."""
    mode = S_IMODE(found.st_mode)
    if found.st_uid not in (0, os.geteuid()) or mode & (S_IWGRP | S_IWOTH):
        raise KubeError(
            CONFIG,
            f"{path} may be changed by others: its owner is {found.st_uid}, its mode {mode:04o}",
            "give it to root with mode 0600",
        )
    if mode & (S_IRGRP | S_IROTH):
        log.warn("others may read the kubeconfig: give it mode 0600", path=path, mode=f"{mode:04o}")


def in_cluster(env: Mapping[str, str], folder: str = SERVICE_ACCOUNT) -> Access:
    """As a pod is told by Kubernetes."""
    host, port = env.get("KUBERNETES_SERVICE_HOST", ""), env.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise KubeError(
            CONFIG,
            "no API server is known",
            "set daemon.kubeconfig; KUBERNETES_SERVICE_HOST is not set either",
        )
    shown = f"[{host}]" if ":" in host else host
    server = f"https://{shown}:{port}"
    if not _is_https(server):
        raise KubeError(
            CONFIG,
            f"KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT make {server}",
            "expected a host and a port",
        )
    return Access(server, ca_file=f"{folder}/ca.crt", token_file=f"{folder}/token")


def _is_word(token: str) -> bool:
    return len(token) <= bearer_token.LARGEST and bool(re.match(r"[!-~]+\Z", token))


def _is_https(url: Any) -> bool:
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        return parts.scheme == "https" and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, or half an IPv6 address
        return False


def read_kubeconfig(path: str) -> Access:
    """The current context of a kubeconfig; one KubeError that names the field that is wrong."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    text = _read_text(path)
    try:
        found = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError, RecursionError):
        # What the parser says may quote the line, and that may be a key.
        raise KubeError(CONFIG, f"{path} is not valid YAML", "make it anew") from None
    return _Kubeconfig(path, found).access()


class _Kubeconfig:
    """What was decoded, and the complaints about it."""

    def __init__(self, path: str, found: Any) -> None:
        self._path = path
        self._found = found if isinstance(found, dict) else {}

    def access(self) -> Access:
        current = self._found.get("current-context")
        if not isinstance(current, str) or not current:
            raise self._wrong("current-context", current, "the name of one of its contexts")
        context = self._named("contexts", "context", current, "current-context")
        cluster = self._named("clusters", "cluster", context.get("cluster"), "contexts[].cluster")
        user = self._named("users", "user", context.get("user"), "contexts[].user")
        self._refuse(cluster, user)
        server = cluster.get("server")
        if not _is_https(server):
            raise self._wrong("clusters[].cluster.server", server, "an https:// URL")
        ca = self._data(cluster, "certificate-authority-data")
        certificate = self._data(user, "client-certificate-data")
        key = self._data(user, "client-key-data")
        token_file = self._file(user, "tokenFile")
        access = Access(
            server=str(server).rstrip("/"),
            ca=ca,
            ca_file="" if ca else self._file(cluster, "certificate-authority"),
            server_name=self._text(cluster, "tls-server-name"),
            certificate=f"{certificate}\n{key}" if certificate and key else "",
            certificate_file="" if certificate else self._file(user, "client-certificate"),
            key_file="" if key else self._file(user, "client-key"),
            token="" if token_file else self._text(user, "token", secret=True),
            token_file=token_file,
        )
        if bool(certificate or access.certificate_file) != bool(key or access.key_file):
            raise self._wrong("users[].user", None, "a client certificate together with its key")
        if bool(certificate) != bool(key):
            expected = "client-certificate and client-key both as data, or both as files"
            raise self._wrong("users[].user", None, expected)
        if not (access.certificate or access.certificate_file or access.token or token_file):
            raise self._wrong("users[].user", None, "a client certificate, a token or a tokenFile")
        return access

    def _refuse(self, cluster: Mapping[str, Any], user: Mapping[str, Any]) -> None:
        """Ways to log in that are not for a node's daemon, or not safe."""
        for name in ("exec", "auth-provider", "username", "password", "as"):
            if user.get(name):
                expected = "none: give a client certificate, a token or a tokenFile"
                raise self._wrong(f"users[].user.{name}", None, expected)
        if cluster.get("insecure-skip-tls-verify"):
            expected = "false: give the cluster's CA as certificate-authority(-data)"
            raise self._wrong("clusters[].cluster.insecure-skip-tls-verify", True, expected)
        if cluster.get("proxy-url"):
            expected = "none: the daemon asks the API server without a proxy"
            raise self._wrong("clusters[].cluster.proxy-url", None, expected)

    def _named(self, section: str, inner: str, name: Any, asked_by: str) -> Mapping[str, Any]:
        entries = self._found.get(section)
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and entry.get("name") == name:
                found = entry.get(inner)
                return found if isinstance(found, dict) else {}
        raise self._wrong(asked_by, name, f"a name that is under {section}")

    def _text(self, section: Mapping[str, Any], name: str, secret: bool = False) -> str:
        value = section.get(name)
        if value is None or isinstance(value, str):
            return value or ""
        raise self._wrong(name, None if secret else value, "a text")

    def _file(self, section: Mapping[str, Any], name: str) -> str:
        """A path; one that is relative is so to the kubeconfig's folder."""
        value = self._text(section, name)
        return os.path.join(os.path.dirname(self._path), value) if value else ""

    def _data(self, section: Mapping[str, Any], name: str) -> str:
        import binascii

        given = self._text(section, name, secret=True)
        pem = ""
        with suppress(ValueError):
            pem = binascii.a2b_base64(given).decode("ascii")
        if given and "-----BEGIN " not in pem:  # taken for none, it would trust others
            raise self._wrong(name, None, "PEM in base64")
        return pem

    def _wrong(self, where: str, value: Any, expected: str) -> KubeError:
        shown = "" if value is None else f" is {str(value)[:80]!r}"
        return KubeError(CONFIG, f"{self._path}: {where}{shown}", f"expected {expected}")


@contextmanager
def _in_memory(content: str) -> Iterator[str]:
    """A path for what OpenSSL takes from files alone; a key gets to no disk by that."""
    try:  # with vm.memfd_noexec=2 the kernel makes no others; before 6.3 it does not know the flag
        fd = os.memfd_create("headcni", os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError:
        fd = os.memfd_create("headcni", os.MFD_CLOEXEC)
    with open(fd, "wb") as file:
        file.write(content.encode("ascii"))
        file.flush()
        yield f"/proc/self/fd/{fd}"


def _read_text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as problem:
        raise _unreadable(path, problem, "see daemon.kubeconfig") from None
    if len(content) > LARGEST_FILE:
        raise KubeError(CONFIG, f"{path} has more than {LARGEST_FILE >> 20} MiB")
    return content.decode(errors="replace")


def _unreadable(path: str, problem: OSError, hint: str) -> KubeError:
    return KubeError(CONFIG, f"{path} cannot be read", f"{problem.strerror}; {hint}")


@dataclass(frozen=True)
class Selector:
    """Which pods: those of a node, and of these only such with these labels."""

    node: str
    labels: str = ""

    def query(self) -> dict[str, str]:
        asked = {"fieldSelector": f"spec.nodeName={self.node}"}
        if self.labels:
            asked["labelSelector"] = self.labels
        return asked


class KubeClient:
    """Questions to the API server, each on a connection of its own. May be used by any thread.

    No proxy is used and no redirect followed: the token goes to the server that was named.
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
        """All of them, as they are now: no resourceVersion means that the server answers from what
        is stored, not from a cache that may be behind."""
        found: list[Pod] = []
        query = {**selector.query(), "limit": str(PAGE)}
        while True:
            some, version, meta = _pods(self._get("list", "/api/v1/pods", query))
            found += some
            if len(found) > MAX_PODS:
                raise _not_understood(f"it has more than {MAX_PODS} pods")
            if not meta.get("continue"):
                return PodList(tuple(found), version)
            query["continue"] = str(meta["continue"])

    def pod(self, namespace: str, name: str) -> Optional[Pod]:
        """One pod; None if the API server itself says that there is none. Any other answer, such
        as a proxy's 404, is an error."""
        path = f"/api/v1/namespaces/{quote(namespace, '')}/pods/{quote(name, '')}"
        answer = self._get("get", path, {}, missing=("pods", name))
        return _pod(answer) if answer else None

    def pod_of_node(self, node: str, namespace: str, name: str) -> Optional[Pod]:
        """The same as a node's own credentials may ask it: of a pod that is gone the API server
        tells a node no more than that it may not ask, but a list without it is an answer."""
        path = f"/api/v1/namespaces/{quote(namespace, '')}/pods"
        answer = self._get(
            "list", path, {"fieldSelector": f"spec.nodeName={node},metadata.name={name}"}
        )
        return next(iter(_pods(answer)[0]), None)

    def has_node(self, name: str) -> bool:
        """Whether Kubernetes has a node of that name."""
        return bool(self._get("node", f"/api/v1/nodes/{quote(name, '')}", {}, ("nodes", name)))

    def new_token(self, namespace: str, account: str, seconds: int) -> str:
        """A new token of a service account. The server may grant fewer seconds than asked for."""
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
        if not isinstance(token, str) or not _is_word(token):
            raise _not_understood("it has no token")
        return token

    def watch(self, selector: Selector, version: str) -> AbstractContextManager[Iterator[Change]]:
        """The changes since a version. They end when the server ends them, or is silent for long;
        a KubeError of kind GONE says that the version is too old to go on from."""
        return self._watch("/api/v1/pods", selector.query(), version, _change)

    def namespaces(self, annotation: str) -> NamespaceList:
        """Those with the annotation."""
        found: dict[str, str] = {}
        query = {"limit": str(NAMESPACE_PAGE)}
        while True:
            answer = self._get("namespaces", _NAMESPACES, query)
            items, version, meta = _items(answer, "NamespaceList")
            for name, text in (_annotated(item, annotation) for item in items):
                if text is not None:
                    found[name] = text
            if len(found) > MAX_NAMESPACES:
                raise _not_understood(f"it has more than {MAX_NAMESPACES} annotated namespaces")
            if not meta.get("continue"):
                return NamespaceList(found, version)
            query["continue"] = str(meta["continue"])

    def watch_namespaces(
        self, annotation: str, version: str
    ) -> AbstractContextManager[Iterator[NamespaceChange]]:
        def change(line: bytes) -> NamespaceChange:
            kind, new_version, found = _event(line)
            if kind == BOOKMARK:
                return NamespaceChange(new_version)
            name, text = _annotated(found, annotation)
            return NamespaceChange(new_version, name, None if kind == DELETED else text)

        return self._watch(_NAMESPACES, {}, version, change)

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
        """End what is in progress; what is asked later is asked as ever."""
        self._exchanges.end()

    def _lines(self, exchange: Exchange, answer: http.client.HTTPResponse) -> Iterator[bytes]:
        while True:
            try:
                line = answer.readline(LARGEST_EVENT + 1)
            except socket.timeout:
                return  # silence: whether it is still there shows when it is asked again
            except (OSError, http.client.HTTPException, ValueError) as problem:
                if exchange.late:
                    return
                raise self._no_answer(exchange, problem) from None
            if len(line) > LARGEST_EVENT:
                raise _not_understood(f"an event has more than {LARGEST_EVENT >> 20} MiB")
            if exchange.ended.is_set() and not exchange.late:
                raise _stopped()
            if not line.endswith(b"\n"):
                return  # the end, or half a line that was cut off and will be told again
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
        """An object; {} if it is one that may be `missing`, and is. With a body it is posted."""
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
                    raise OSError  # ended by us, an answer without a length looks whole
            except (OSError, http.client.HTTPException, ValueError) as problem:
                raise self._no_answer(exchange, problem) from None
            if len(content) > LARGEST_ANSWER:
                raise _not_understood(f"it has more than {LARGEST_ANSWER >> 20} MiB")
            return _object(content)

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
            return _stopped()
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
            found = _object(answer.read(65536))
        genuine = found.get("kind") == "Status"
        said = f"{_quoted(str(found.get('message') or answer.reason or ''))} (HTTP {status})"
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
    return (
        "it needs list, watch and get on pods, get on nodes, and list and watch on namespaces: "
        "run site.yml"
    )


def _names(status: Mapping[str, Any], kind: str, name: str) -> bool:
    """Whether a NotFound is about this very object, and not its namespace or the whole API."""
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


def _change(line: bytes) -> Change:
    kind, version, found = _event(line)
    return Change(kind, version, None if kind == BOOKMARK else _pod(found))


def _event(line: bytes) -> tuple[str, str, Mapping[str, Any]]:
    """The kind, the version and the object."""
    event = _object(line)
    kind, found = event.get("type"), event.get("object")
    if not isinstance(found, dict):
        raise _not_understood("an event has no object")
    if kind == "ERROR":
        said = f"{_quoted(str(found.get('message') or ''))} (code {found.get('code')})"
        if found.get("code") == 410:
            raise KubeError(GONE, "the watch is too old to go on from", said)
        raise KubeError(REFUSED, "the API server ended the watch", said)
    meta = found.get("metadata")
    version = meta.get("resourceVersion") if isinstance(meta, dict) else None
    if not isinstance(version, str) or not version:
        raise _not_understood("an event has no resourceVersion")
    if kind in (ADDED, MODIFIED, DELETED, BOOKMARK):
        return str(kind), version, found
    raise _not_understood(f"an event is of the type {kind!r}")


def _pods(answer: Mapping[str, Any]) -> tuple[list[Pod], str, Mapping[str, Any]]:
    items, version, meta = _items(answer, "PodList")
    return [_pod(item) for item in items], version, meta


def _items(answer: Mapping[str, Any], kind: str) -> tuple[list[Any], str, Mapping[str, Any]]:
    """A list, its version and what else stands beside it; what only looks like one is an error."""
    meta, items = answer.get("metadata"), answer.get("items")
    if answer.get("kind") != kind or not isinstance(meta, dict):
        raise _not_understood(f"it is no {kind}")
    # A Go server writes an empty list as [], or as null.
    if items is not None and not isinstance(items, list):
        raise _not_understood("its items are no list")
    version = meta.get("resourceVersion")
    if not isinstance(version, str) or not version:
        raise _not_understood("the list has no resourceVersion")
    return items or [], version, meta


def _annotated(found: Any, annotation: str) -> tuple[str, Optional[str]]:
    """A namespace's name, and what it says; no more of it than can be of use."""
    try:
        meta = found["metadata"]
        text = (meta.get("annotations") or {}).get(annotation)
        return str(meta["name"]), None if text is None else str(text)[:LONGEST_ANNOTATION]
    except (KeyError, TypeError, AttributeError) as problem:
        raise _not_understood(f"a namespace lacks {problem}") from None


def _pod(found: Any) -> Pod:
    """What is used of a pod; what is of another shape than a pod's is an error, as it would be
    taken for a pod without an address."""
    try:
        meta, spec, status = found["metadata"], found.get("spec") or {}, found.get("status") or {}
        uid, notes = meta["uid"], meta.get("annotations") or {}
        ips = status.get("podIPs") or ([{"ip": status["podIP"]}] if status.get("podIP") else [])
        return Pod(
            namespace=meta["namespace"],
            name=meta["name"],
            uid=uid,
            runs_as=(uid, *(notes[key] for key in _STATIC if notes.get(key))),
            node=spec.get("nodeName") or "",
            phase=status.get("phase") or "",
            host_network=bool(spec.get("hostNetwork")),
            ips=tuple(str(one["ip"]) for one in ips if one.get("ip")),
            terminating=bool(meta.get("deletionTimestamp")),
        )
    except (KeyError, TypeError, AttributeError) as problem:
        raise _not_understood(f"a pod lacks {problem}") from None


def _object(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise _not_understood(_quoted(content[:400].decode(errors="replace"))) from None
    if not isinstance(found, dict):
        raise _not_understood("it is no JSON object")
    return found


def _quoted(said: str) -> str:
    text = " ".join("".join(c if c.isprintable() else " " for c in said).split())
    return text if len(text) <= LONGEST_QUOTE else text[:LONGEST_QUOTE] + "…"


def _not_understood(why: str) -> KubeError:
    return KubeError(REFUSED, "the API server's answer cannot be understood", why)


def _stopped() -> KubeError:
    return KubeError(STOPPED, "the daemon is stopping")
