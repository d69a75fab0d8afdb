"""Where the API server is, and who we are there: a kubeconfig, or a pod's service account."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from stat import S_IMODE, S_IRGRP, S_IROTH, S_IWGRP, S_IWOTH
from typing import Any, Optional
from urllib.parse import urlsplit

from ...log import Log
from ...shared import bearer_token
from .errors import CONFIG, KubeError

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
LARGEST_FILE = 1 << 20
_MFD_NOEXEC_SEAL = 8

log = Log("kubernetes")


@dataclass(frozen=True)
class Access:
    """Where the API server is, and who we are there. Files are read again for each connection,
    so a rotated token or certificate counts."""

    server: str
    ca: str = ""  # PEM
    ca_file: str = ""
    server_name: str = ""  # the name in the certificate, if it differs from the URL's
    certificate: str = field(default="", repr=False)  # PEM, with its key
    certificate_file: str = ""
    key_file: str = ""
    token: str = field(default="", repr=False)
    token_file: str = ""

    def tls(self) -> ssl.SSLContext:
        """Trust only the cluster's own CA. create_default_context is not used: from Python 3.13
        on it refuses certificates without a key identifier, which many clusters have."""
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
        if token and not is_token(token):  # http.client would quote it in its error
            where = self.token_file or "the kubeconfig's users[].user.token"
            raise KubeError(CONFIG, f"the token in {where} is not one word of ASCII")
        return token


class Source:
    """Where the access comes from: a kubeconfig, or the service account of a pod. Read again
    when the file has changed."""

    def __init__(self, kubeconfig: str, env: Optional[Mapping[str, str]] = None) -> None:
        self.kubeconfig = kubeconfig
        self._env = os.environ if env is None else env
        self._seen: tuple[int, ...] = ()
        self._known: Optional[Access] = None

    @property
    def given(self) -> bool:
        """Whether the operator or Kubernetes has named an API server."""
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
        # A change of owner or mode changes only st_ctime.
        seen = (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size)
        if self._known is None or seen != self._seen:
            refuse_others(self.kubeconfig, stat)
            self._known = read_kubeconfig(self.kubeconfig)
            self._seen = seen
        return self._known


def refuse_others(path: str, found: os.stat_result) -> None:
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
    """From the variables and files that Kubernetes gives to a pod."""
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


def _is_https(url: Any) -> bool:
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        return parts.scheme == "https" and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port, or half an IPv6 address
        return False


def read_kubeconfig(path: str) -> Access:
    """The current context of a kubeconfig. A KubeError names the wrong field."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    text = _read_text(path)
    try:
        found = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError, RecursionError):
        # The parser's message may quote the line, which may hold a key.
        raise KubeError(CONFIG, f"{path} is not valid YAML", "make it anew") from None
    return _Kubeconfig(path, found).access()


class _Kubeconfig:
    """A decoded kubeconfig, and errors about it."""

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
        """Refuse ways to log in that are unsafe, or not meant for a daemon."""
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
        """A path; a relative one is relative to the kubeconfig's folder."""
        value = self._text(section, name)
        return os.path.join(os.path.dirname(self._path), value) if value else ""

    def _data(self, section: Mapping[str, Any], name: str) -> str:
        import binascii

        given = self._text(section, name, secret=True)
        pem = ""
        with suppress(ValueError):
            pem = binascii.a2b_base64(given).decode("ascii")
        if given and "-----BEGIN " not in pem:  # if it were ignored, other CAs would be trusted
            raise self._wrong(name, None, "PEM in base64")
        return pem

    def _wrong(self, where: str, value: Any, expected: str) -> KubeError:
        shown = "" if value is None else f" is {str(value)[:80]!r}"
        return KubeError(CONFIG, f"{self._path}: {where}{shown}", f"expected {expected}")


@contextmanager
def _in_memory(content: str) -> Iterator[str]:
    """A path for content that OpenSSL reads from files only, so that a key is never on disk."""
    try:  # required with vm.memfd_noexec=2; unknown to kernels before 6.3
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


def is_token(token: str) -> bool:
    return len(token) <= bearer_token.LARGEST and bool(re.match(r"[!-~]+\Z", token))
