"""A real kube-apiserver with its etcd, on loopback: no nodes, no controllers."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kube_server import Authority
from patience import until

from lab import tools

PATIENCE = 60.0


class ApiServer:
    """Where it is, and its administrator."""

    def __init__(self, folder: Path, port: int, netns: str = "") -> None:
        self.folder, self.url = folder, f"https://127.0.0.1:{port}"
        self.within = ("ip", "netns", "exec", netns) if netns else ()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.authority = Authority(folder)
        self.admin = folder / "admin.kubeconfig"
        certificate, key = self.authority.issue("admin", group="system:masters")
        self._write(self.admin, {"client-certificate": str(certificate), "client-key": str(key)})

    @property
    def kubectl_program(self) -> str:
        return str(tools.KUBERNETES.bin / "kubectl")

    def kubeconfig(self, name: str, **user: str) -> Path:
        """With a tokenFile, as site.yml writes it for a daemon."""
        path = self.folder / name
        self._write(path, user)
        return path

    def _write(self, path: Path, user: dict[str, str]) -> None:
        cluster = {
            "server": self.url,
            "certificate-authority-data": base64.b64encode(self.authority.pem).decode(),
        }
        made = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": user}],
        }
        path.touch(0o600)
        path.write_text(json.dumps(made))

    def kubectl(self, *words: str, given: Any = None, check: bool = True) -> str:
        done = subprocess.run(
            [*self.within, self.kubectl_program, f"--kubeconfig={self.admin}", *words],
            input=json.dumps(given) if given is not None else None,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout


@contextmanager
def serving(folder: Path, netns: str = "") -> Iterator[ApiServer]:
    """On this machine's loopback, or on that of a network namespace."""
    etcd, peers, port = _free_ports(3)
    server = ApiServer(folder, port, netns)
    certificate, key = server.authority.issue("kube-apiserver", ("127.0.0.1",))
    public, accounts = server.authority.issue("service-accounts")
    urls = f"http://127.0.0.1:{etcd}"
    with ExitStack() as running:
        _start(
            running,
            server,
            "etcd",
            f"--data-dir={folder}/etcd",
            f"--listen-client-urls={urls}",
            f"--advertise-client-urls={urls}",
            f"--listen-peer-urls=http://127.0.0.1:{peers}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peers}",
            f"--initial-cluster=default=http://127.0.0.1:{peers}",
            "--unsafe-no-fsync",
        )
        _start(
            running,
            server,
            "kube-apiserver",
            f"--etcd-servers={urls}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={port}",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            f"--client-ca-file={server.authority.file}",
            f"--service-account-key-file={public}",
            f"--service-account-signing-key-file={accounts}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--authorization-mode=Node,RBAC",
        )
        _wait(server)
        yield server


def _start(running: ExitStack, server: ApiServer, name: str, *options: str) -> None:
    log = running.enter_context((server.folder / f"{name}.log").open("wb"))
    command = [*server.within, str(tools.KUBERNETES.bin / name), *options]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    server.processes[name] = process
    running.callback(process.wait, 30)
    running.callback(process.terminate)


def _wait(server: ApiServer) -> None:
    until(
        lambda: "ok" in server.kubectl("get", "--raw", "/readyz", check=False),
        PATIENCE,
        lambda: (server.folder / "kube-apiserver.log").read_text()[-3000:],
        every=0.5,
    )


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        found = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in found]
