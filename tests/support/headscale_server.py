"""A real Headscale on loopback, with a folder, a database and a key of its own; and real nodes."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from patience import until

from lab import tools

PATIENCE = 30.0
# Which Headscale the tests run, and its version as numbers.
HEADSCALE = tools.headscale(os.environ.get("HEADCNI_HEADSCALE", ""))
VERSION = tuple(map(int, tools.headscale_version(HEADSCALE).split(".")))


def from_headscale(*oldest: int) -> pytest.MarkDecorator:
    wanted = f"for Headscale {'.'.join(map(str, oldest))} and newer"
    return pytest.mark.skipif(oldest > VERSION, reason=wanted)


def before_headscale(*too_new: int) -> pytest.MarkDecorator:
    wanted = f"for Headscale before {'.'.join(map(str, too_new))}: make test-headscale-versions"
    return pytest.mark.skipif(too_new <= VERSION, reason=wanted)


def free_port(kind: socket.SocketKind = socket.SOCK_STREAM) -> int:
    with socket.socket(socket.AF_INET, kind) as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Refused(AssertionError):
    """What the API says of a question of ours."""


@dataclass
class HeadscaleServer:
    home: Path
    policy_file: str = ""  # its text; by default the policy is in the database
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    key: str = field(default="", repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.home / "log"

    def config(self) -> str:
        mode = f"file\n  path: {self.home}/policy.hujson" if self.policy_file else "database"
        return f"""\
server_url: {self.url}
listen_addr: 127.0.0.1:{self.port}
metrics_listen_addr: 127.0.0.1:{free_port()}
grpc_listen_addr: 127.0.0.1:{free_port()}
noise:
  private_key_path: {self.home}/noise.key
prefixes:
  v4: 100.64.0.0/10
  v6: fd7a:115c:a1e0::/48
derp:
  server:
    enabled: true
    region_id: 999
    region_code: test
    region_name: Test
    stun_listen_addr: 127.0.0.1:{free_port(socket.SOCK_DGRAM)}
    private_key_path: {self.home}/derp.key
    automatically_add_embedded_derp_region: true
    ipv4: 127.0.0.1
  urls: []
  paths: []
  auto_update_enabled: false
disable_check_updates: true
database:
  type: sqlite
  sqlite:
    path: {self.home}/db.sqlite
policy:
  mode: {mode}
dns:
  magic_dns: true
  base_domain: test.invalid
  override_local_dns: false
  nameservers:
    global: []
unix_socket: {self.home}/sock
logtail:
  enabled: false
log:
  level: info
"""

    def start(self) -> None:
        if not (self.home / "config.yaml").exists():
            (self.home / "config.yaml").write_text(self.config())
        if self.policy_file:
            (self.home / "policy.hujson").write_text(self.policy_file)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._program, "serve"], stdout=log, stderr=log, cwd=self.home
            )
        until(self._answers)

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)  # a test may have stopped it
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
            self.process = None

    @property
    def _program(self) -> list[str]:
        return [str(HEADSCALE.bin / "headscale"), "--config", str(self.home / "config.yaml")]

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def command(self, *words: str) -> str:
        return subprocess.run(
            [*self._program, *words],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
            cwd=self.home,
        ).stdout

    def make_key(self, expiration: str = "1h") -> str:
        return self.command("apikeys", "create", "--expiration", expiration).split()[-1]

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """What the API itself says, past the code under test."""
        request = urllib.request.Request(
            f"{self.url}/api/v1/{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as problem:
            raise Refused(f"{method} {path}: {problem.read().decode()}") from None

    @property
    def nodes(self) -> dict[str, dict[str, Any]]:
        """By their names, which are unique."""
        return {node["givenName"]: node for node in self.ask("GET", "node")["nodes"]}

    @property
    def users(self) -> dict[str, dict[str, Any]]:
        return {user["name"]: user for user in self.ask("GET", "user")["users"]}

    @property
    def policy(self) -> str:
        return str(self.ask("GET", "policy")["policy"])

    def add_user(self, name: str) -> None:
        self.ask("POST", "user", {"name": name})

    def add_node(self, name: str, user: str = "headcni", *routes: str) -> dict[str, Any]:
        """Registered by the API that Headscale has for it: all of a node but a tailscaled."""
        if user not in self.users:
            self.add_user(user)
        number = secrets.token_urlsafe(18)  # 24 characters
        registration = number if VERSION < (0, 29) else f"hskey-authreq-{number}"
        body = {"user": user, "key": registration, "name": name, "routes": list(routes)}
        self.ask("POST", "debug/node", body)
        made = self.ask("POST", f"node/register?user={user}&key={registration}")["node"]
        assert isinstance(made, dict)
        return made

    def approve(self, node: dict[str, Any], *routes: str) -> None:
        self.ask("POST", f"node/{node['id']}/approve_routes", {"routes": list(routes)})

    def approved(self, name: str) -> set[str]:
        return set(self.nodes[name]["approvedRoutes"])

    def forget(self) -> None:
        """Its nodes, users and rules."""
        for node in self.nodes.values():
            if node.get("approvedRoutes"):
                self.approve(node)  # up to 0.28, routes of a node that is gone stay taken
            self.ask("DELETE", f"node/{node['id']}")
        for user in self.users.values():
            self.ask("DELETE", f"user/{user['id']}")


@dataclass
class Tailscaled:
    """A real one, without a TUN: it needs no root and touches nothing of the machine."""

    home: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.home.mkdir(exist_ok=True)
        with (self.home / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    str(tools.TAILSCALE.bin / "tailscaled"),
                    "--tun=userspace-networking",
                    f"--statedir={self.home}",
                    f"--socket={self.home}/sock",
                    "--port=0",
                    "--no-logs-no-support",
                ],
                stdout=log,
                stderr=log,
                env={"TS_DEBUG_USE_DERP_HTTP": "true", "HOME": str(self.home)},
            )
        until(lambda: (self.home / "sock").exists())

    def tailscale(self, *words: str) -> str:
        return subprocess.run(
            [str(tools.TAILSCALE.bin / "tailscale"), f"--socket={self.home}/sock", *words],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout

    def join(self, url: str, key: str, hostname: str, *routes: str) -> str:
        """The node key, once it has joined."""
        file = self.home / "auth-key"
        file.write_text(key)
        self.tailscale(
            "up",
            f"--login-server={url}",
            f"--auth-key=file:{file}",
            f"--hostname={hostname}",
            f"--advertise-routes={','.join(routes)}",
            "--timeout=30s",
        )
        return str(json.loads(self.tailscale("status", "--json"))["Self"]["PublicKey"])

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(10)
            self.process = None
