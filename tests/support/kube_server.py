"""An API server for the errors that a real one won't make on demand: pods by list, watch and get,
namespaces by list and watch, over TLS, with streams that are cut, silent, too old or too large."""

from __future__ import annotations

import base64
import datetime
import json
import queue
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

TOKEN = "a-token-that-nobody-may-see"
NODE = "node1"
ACCOUNT = "system:serviceaccount:kube-system:headcni-node-node1"


def jwt(issued: float, expires: float, subject: str = ACCOUNT) -> str:
    """A token as Kubernetes makes them, but for the signature."""

    def coded(part: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")

    claims = {"sub": subject, "iat": int(issued), "exp": int(expires)}
    return f"{coded({'alg': 'none'})}.{coded({k: v for k, v in claims.items() if v})}.c2ln"


class Authority:
    """A CA, and what it signs."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._certificate = self._sign(self._name, self._key, is_ca=True)
        self.file = folder / f"{name}.crt"
        self.file.write_bytes(self.pem)

    @property
    def pem(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self, name: str, addresses: tuple[str, ...] = (), group: str = ""
    ) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        groups = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group)] if group else []
        subject = x509.Name([*groups, x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._sign(subject, key, addresses=addresses)
        paths = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return paths

    def _sign(
        self, subject: Any, key: Any, is_ca: bool = False, addresses: tuple[str, ...] = ()
    ) -> Any:
        """Without key identifiers, as the certificates of many clusters are."""
        now = datetime.datetime.now(datetime.timezone.utc)
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(is_ca, None), critical=True)
        )
        if addresses:
            names = [x509.IPAddress(ip_address(one)) for one in addresses]
            made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return made.sign(self._key, hashes.SHA256())


def pod(
    name: str,
    uid: str = "",
    *,
    namespace: str = "default",
    phase: str = "Running",
    ip: str = "10.55.1.7",
    host_network: bool = False,
    terminating: bool = False,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    node: str = NODE,
) -> dict[str, Any]:
    """As the API server shows it, with some of the things that nobody here asks about."""
    meta: dict[str, Any] = {
        "namespace": namespace,
        "name": name,
        "uid": uid or f"uid-{name}",
        "labels": labels or {},
        "annotations": annotations or {},
        "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}],
    }
    if terminating:
        meta["deletionTimestamp"] = "2026-11-16T12:00:00Z"
    spec: dict[str, Any] = {"nodeName": node, "containers": [{"name": "c", "image": "i"}]}
    if host_network:
        spec["hostNetwork"] = True
    status = {"phase": phase, "podIP": ip, "podIPs": [{"ip": ip}]} if ip else {"phase": phase}
    return {"kind": "Pod", "apiVersion": "v1", "metadata": meta, "spec": spec, "status": status}


@dataclass
class KubeServer:
    """Serves until close(). What the next answers are is set on it."""

    folder: Path
    nodes: set[str] = field(default_factory=lambda: {NODE})
    oldest: int = 0  # a watch from before it is gone
    gone_by_event: bool = False
    answer_with: Any = None  # (status, headers, body), to whatever is asked
    asked: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    client_names: list[str] = field(default_factory=list)
    delay: float = 0.0
    page: int = 0  # so many pods in an answer, whatever is asked for
    accepts: set[str] = field(default_factory=lambda: {TOKEN})
    longest_token: float = 1e9  # seconds; fewer are granted if more are asked for
    clock: Callable[[], float] = time.time
    token_requests: list[dict[str, Any]] = field(default_factory=list)
    forgets_lists: bool = False  # the rest of a list is too old to be asked for
    as_node: bool = False  # as the node authorizer has it: who is gone may not be asked about

    def __post_init__(self) -> None:
        self.authority = Authority(self.folder)
        self.pods: dict[str, dict[str, Any]] = {}
        self.version = 100
        self.lock = threading.RLock()
        self.streams: set[queue.Queue[bytes | None]] = set()
        self.namespaces: dict[str, dict[str, Any]] = {}
        self.namespace_streams: set[queue.Queue[bytes | None]] = set()
        self.released = threading.Event()
        self._listen(0)

    def _listen(self, port: int) -> None:
        certificate, key = self.authority.issue("server", ("127.0.0.1",))
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate, key)
        tls.load_verify_locations(self.authority.file)
        tls.verify_mode = ssl.CERT_OPTIONAL
        self._http = _Server(("127.0.0.1", port), _Handler)
        self._http.owner = self
        self._http.socket = tls.wrap_socket(
            self._http.socket, server_side=True, do_handshake_on_connect=False
        )
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._http.server_address[1])

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def close(self) -> None:
        self.released.set()
        self.cut()
        self._http.shutdown()
        self._http.server_close()

    def restart(self) -> None:
        """The same server again, after it was away: same port, CA and pods."""
        self._listen(self.port)

    def kubeconfig(self, **changes: Any) -> Path:
        """With a token; `changes` are of the user, or with cluster_ in front of the cluster."""
        cluster = {
            "server": self.url,
            "certificate-authority-data": base64.b64encode(self.authority.pem).decode(),
        }
        user: dict[str, Any] = {"token": TOKEN}
        for name, value in changes.items():
            section = cluster if name.startswith("cluster_") else user
            section[name.removeprefix("cluster_").replace("_", "-")] = value
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [
                {"name": "there", "context": {"cluster": "no", "user": "no"}},
                {"name": "here", "context": {"cluster": "c", "user": "u"}},
            ],
            "clusters": [{"name": "c", "cluster": {k: v for k, v in cluster.items() if v}}],
            "users": [{"name": "u", "user": {k: v for k, v in user.items() if v}}],
        }
        path = self.folder / "kubeconfig"
        path.write_text(json.dumps(config))  # which is YAML
        return path

    def put(self, made: dict[str, Any]) -> None:
        with self.lock:
            key = f"{made['metadata']['namespace']}/{made['metadata']['name']}"
            kind = "MODIFIED" if key in self.pods else "ADDED"
            self.version += 1
            made["metadata"]["resourceVersion"] = str(self.version)
            self.pods[key] = made
            self._announce(kind, made)

    def delete(self, name: str, namespace: str = "default") -> None:
        with self.lock:
            made = self.pods.pop(f"{namespace}/{name}")
            self.version += 1
            made["metadata"]["resourceVersion"] = str(self.version)
            self._announce("DELETED", made)

    def put_namespace(self, name: str, annotations: dict[str, str] | None) -> None:
        """None for one that is gone."""
        with self.lock:
            self.version += 1
            kind = "MODIFIED" if name in self.namespaces else "ADDED"
            version = str(self.version)
            made = {
                "kind": "Namespace",
                "metadata": {
                    "name": name,
                    "resourceVersion": version,
                    "annotations": annotations or {},
                },
            }
            self.namespaces[name] = made
            if annotations is None:
                kind = "DELETED"
                del self.namespaces[name]
            for stream in self.namespace_streams:
                stream.put(json.dumps({"type": kind, "object": made}).encode() + b"\n")

    def bookmark(self) -> None:
        with self.lock:
            self.version += 1
            meta = {"resourceVersion": str(self.version), "creationTimestamp": None}
            self._announce("BOOKMARK", {"kind": "Pod", "metadata": meta})

    def send(self, raw: bytes) -> None:
        """To all who watch."""
        with self.lock:
            for stream in self.streams:
                stream.put(raw)

    def cut(self) -> None:
        """End every stream where it is."""
        with self.lock:
            for stream in (*self.streams, *self.namespace_streams):
                stream.put(None)

    def _announce(self, kind: str, found: dict[str, Any]) -> None:
        self.send(json.dumps({"type": kind, "object": found}).encode() + b"\n")

    def count(self, what: str) -> int:
        return sum(what in one for one in self.asked)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    owner: KubeServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away, or do not trust us, are what is tested."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        self.request.settimeout(20)
        self.request.do_handshake()
        super().setup()

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_POST(self) -> None:
        """A token for the account in the path, to whoever has one of it."""
        owner = self.server.owner
        owner.asked.append(f"POST {self.path}")
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        words = self.path.strip("/").split("/")
        if owner.answer_with is not None:
            self._send(*owner.answer_with)
        elif self._token() not in owner.accepts:
            self._status(401, "Unauthorized")
        elif words[4:5] != ["serviceaccounts"] or words[6:] != ["token"]:
            self._status(404, "NotFound")
        else:
            owner.token_requests.append(asked)
            now, wanted = owner.clock(), asked["spec"]["expirationSeconds"]
            subject = f"system:serviceaccount:{words[3]}:{words[5]}"
            token = jwt(now, now + min(wanted, owner.longest_token), subject)
            owner.accepts.add(token)
            self._send(201, {}, json.dumps({**asked, "status": {"token": token}}).encode())

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def do_GET(self) -> None:
        owner = self.server.owner
        owner.asked.append(self.path)
        owner.headers.append(dict(self.headers.items()))
        certificate = self.request.getpeercert()
        if certificate:
            owner.client_names.append(certificate["subject"][0][0][1])
        if owner.delay:
            owner.released.wait(owner.delay)
        if owner.answer_with is not None:
            self._send(*owner.answer_with)
            return
        if not certificate and self._token() not in owner.accepts:
            self._status(401, "Unauthorized")
            return
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        words = parts.path.strip("/").split("/")
        if parts.path == "/api/v1/pods" and query.get("watch") == "true":
            self._watch(query, self._matching(query), owner.streams)
        elif parts.path == "/api/v1/pods":
            self._list(query, "PodList", self._matching(query))
        elif parts.path == "/api/v1/namespaces":
            found = list(owner.namespaces.values())
            if query.get("watch") == "true":
                self._watch(query, found, owner.namespace_streams)
            else:
                self._list(query, "NamespaceList", found)
        elif words[:3] == ["api", "v1", "namespaces"] and words[4:] == ["pods"]:
            self._list(query, "PodList", self._matching(query, words[3]))
        elif words[:3] == ["api", "v1", "namespaces"] and words[4:5] == ["pods"]:
            self._get(words[3], words[5])
        elif words[:3] == ["api", "v1", "nodes"]:
            self._node(words[3])
        else:
            self._status(404, "NotFound")

    def _matching(self, query: dict[str, str], namespace: str = "") -> list[dict[str, Any]]:
        asked = query.get("fieldSelector", "")
        fields = dict(one.split("=") for one in asked.split(",")) if asked else {}
        label, _, value = query.get("labelSelector", "").partition("=")
        return [
            one
            for one in self.server.owner.pods.values()
            if one["spec"]["nodeName"] == fields.get("spec.nodeName", one["spec"]["nodeName"])
            and one["metadata"]["name"] == fields.get("metadata.name", one["metadata"]["name"])
            and (not label or one["metadata"]["labels"].get(label) == value)
            and namespace in ("", one["metadata"]["namespace"])
        ]

    def _list(self, query: dict[str, str], kind: str, found: list[dict[str, Any]]) -> None:
        owner = self.server.owner
        with owner.lock:
            start = int(query.get("continue", 0))
            if start and owner.forgets_lists:
                self._status(410, "Expired")
                return
            size = owner.page or int(query.get("limit", 500))
            meta = {"resourceVersion": str(owner.version)}
            if start + size < len(found):
                meta["continue"] = str(start + size)
            answer = {
                "kind": kind,
                "apiVersion": "v1",
                "metadata": meta,
                "items": found[start : start + size],
            }
        self._send(200, {}, json.dumps(answer).encode())

    def _get(self, namespace: str, name: str) -> None:
        found = self.server.owner.pods.get(f"{namespace}/{name}")
        if found is None and self.server.owner.as_node:
            self._status(403, "Forbidden")
        elif found is None:
            self._status(404, "NotFound", {"kind": "pods", "name": name})
        else:
            self._send(200, {}, json.dumps(found).encode())

    def _node(self, name: str) -> None:
        if name in self.server.owner.nodes:
            found = {"kind": "Node", "metadata": {"name": name}, "spec": {}}
            self._send(200, {}, json.dumps(found).encode())
        else:
            self._status(404, "NotFound", {"kind": "nodes", "name": name})

    def _watch(
        self,
        query: dict[str, str],
        found: list[dict[str, Any]],
        streams: set[queue.Queue[bytes | None]],
    ) -> None:
        owner, since = self.server.owner, int(query["resourceVersion"])
        if since < owner.oldest and not owner.gone_by_event:
            self._status(410, "Expired")
            return
        stream: queue.Queue[bytes | None] = queue.Queue()
        with owner.lock:
            for one in found:
                if int(one["metadata"]["resourceVersion"]) > since:
                    event = {"type": "ADDED", "object": one}
                    stream.put(json.dumps(event).encode() + b"\n")
            if since < owner.oldest:
                status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                stream.put(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
            streams.add(stream)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            while not owner.released.is_set():
                chunk = stream.get()
                if chunk is None:
                    return
                self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
                self.wfile.flush()
        finally:
            with owner.lock:
                streams.discard(stream)
            self.close_connection = True

    def _status(self, code: int, reason: str, details: dict[str, str] | None = None) -> None:
        status = {"kind": "Status", "status": "Failure", "message": reason, "reason": reason}
        body = json.dumps({**status, "code": code, "details": details or {}}).encode()
        self._send(code, {}, body)

    def _send(self, code: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True
