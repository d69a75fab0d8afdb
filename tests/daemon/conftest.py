"""A node with the release on it, as in tests/cni, and the CNI server of the daemon at its side."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cni_node import EMPTY, CniNode
from patience import until

from headcni.shim import request
from tests.cni.conftest import datapath as datapath
from tests.cni.conftest import plugins as plugins
from tests.cni.conftest import python as python
from tests.cni.conftest import release as release

PATIENCE = 20.0


@dataclass
class ServedNode(CniNode):
    """Its calls go to the server, if one is up. A socket's path must be short: not in `tmp`."""

    run_dir: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="hct-")))
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def socket(self) -> Path:
        return self.run_dir / "headcni" / "cni.sock"

    @property
    def log(self) -> Path:
        return self.tmp / "server.log"

    def environment(self, verb: str, pod: Any = None, **how: Any) -> dict[str, str]:
        how.setdefault("HEADCNI_SOCKET", str(self.socket))
        return super().environment(verb, pod, **how)

    def python_command(self, *arguments: str) -> tuple[list[str], dict[str, str]]:
        """Python on the node with the runtime on its path, and the environment for it."""
        home = (self.plugins / "headcni").resolve().parent.parent
        argv = ["ip", "netns", "exec", self.netns.name, self.python, "-S", *arguments]
        return argv, {"PATH": os.environ["PATH"], "PYTHONPATH": f"{home}:{home}/vendor"}

    def start(
        self, *options: str, code: str = "", before: tuple[str, ...] = ()
    ) -> subprocess.Popen[bytes]:
        """Start a server, and wait until it listens. `before` is a command that runs it."""
        main = ("-c", code) if code else ("-m", "headcni.daemon.cni.server")
        argv, env = self.python_command(
            *main, "--socket", str(self.socket), "--data-dir", str(self.tmp / "data"), *options
        )
        return self.start_command([*before, *argv], env, "listening=")

    def start_command(
        self, argv: list[str], env: dict[str, str], ready: str
    ) -> subprocess.Popen[bytes]:
        """Start a server by a command, and wait until its log says that it is ready."""
        already = self.said(ready)
        with self.log.open("ab") as log:
            server = subprocess.Popen(argv, stdout=log, stderr=log, env=env, cwd="/")
        self.servers.append(server)
        self.wait_for(lambda: self.said(ready) > already or server.poll() is not None)
        assert server.poll() is None, self.log.read_text()
        return server

    def end(self, server: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> int:
        server.send_signal(number)
        return server.wait(PATIENCE)

    def wait_for(self, condition: Any, seconds: float = PATIENCE) -> None:
        until(condition, seconds, self.log.read_text, every=0.01)

    def is_empty(self) -> bool:
        """Nothing is left of any pod; the daemon deletes links after it has answered a DEL."""
        self.wait_for(lambda: self.leftovers() == EMPTY)
        return True

    def said(self, text: str) -> int:
        """How many lines of the server's log have the text."""
        if not self.log.exists():
            return 0
        return sum(text in line for line in self.log.read_text().splitlines())

    def served(self, verb: str) -> int:
        return self.said(f"verb={verb} ")

    def has_served(self, **verbs: int) -> bool:
        """Just so many calls of these verbs; it notes a call after it has answered."""
        self.wait_for(lambda: all(self.served(verb) >= count for verb, count in verbs.items()))
        return all(self.served(verb) == count for verb, count in verbs.items())

    def raw(self, verb: str, stdin: str, pod: Any = None, **how: Any) -> tuple[int, str]:
        """The exit code and the very bytes on stdout."""
        done = subprocess.run(
            self.command(),
            input=stdin,
            text=True,
            capture_output=True,
            env=self.environment(verb, pod, **how),
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout

    def request(self, verb: str, pod: Any = None, **how: Any) -> bytes:
        """What the shim would send."""
        env = self.environment(verb, pod, **how).items()
        netns = f"net:[{os.stat(self.netns.path).st_ino}]".encode()
        stdin = json.dumps(self.conf()).encode()
        return request({os.fsencode(k): os.fsencode(v) for k, v in env}, netns, stdin)

    def connect(self) -> socket.socket:
        """To the server, with nothing said."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PATIENCE)
        connection.connect(str(self.socket))
        return connection

    def remove(self) -> None:
        for server in self.servers:
            server.kill()
            server.wait(PATIENCE)
        super().remove()
        shutil.rmtree(self.run_dir)


@pytest.fixture
def node(tmp_path, plugins):
    made = ServedNode.create(tmp_path, plugins)
    yield made
    made.remove()


@pytest.fixture
def server(node):
    """One that is up."""
    return node.start()
