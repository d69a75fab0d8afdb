"""A node in a network namespace, with the release on it and the daemon running, and its peers."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from ansible_collections.headcni.mesh.plugins.module_utils import node_shim
from cni_node import CniNode, Namespace, sh

from headcni import __version__
from headcni.datapath import netns
from lab import tools
from lab.layout import CHECKOUT

SUBNET, PEER_SUBNET = "10.55.0.0/16", "10.66.0.0/16"
POOL = 250  # pod namespaces that are made beforehand
PATIENCE = 30.0
IDLE_SECONDS = 1.5  # longer than the daemon waits between two looks at the firewalls
# As on a real node, /sys shows the links of the node's own network namespace.
OWN_SYS = ("unshare", "--mount", "sh", "-c", 'mount -t sysfs sysfs /sys && exec "$@"', "sh")


class Stage:
    """Whoever is inside `entered` runs programs as containerd would, on that node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opt = folder / "opt"
        self.node: CniNode
        self.daemon: subprocess.Popen[bytes] | None = None
        self._pods: list[Namespace] = []
        self._number = 0

    @property
    def bin(self) -> Path:
        return self.opt / "bin"

    @property
    def socket(self) -> Path:
        return self.folder / "run" / "cni.sock"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def install(self) -> None:
        """As the role does: unpacked, compiled, linked, with the native shim."""
        made = sh(sys.executable, CHECKOUT / "plugins/cni/release.py", "--output", self.folder)
        tarball = self.folder / made.stdout.strip().rpartition("/")[2]
        with tarfile.open(tarball) as archive:
            archive.extractall(self.opt / "releases", filter="data")
        release = next((self.opt / "releases").iterdir())
        (self.opt / "current").symlink_to(release)
        sh("/usr/bin/python3", "-m", "compileall", "-q", release, check=False)
        for name, content in node_shim.choose(str(release), wanted=True).programs.items():
            (release / "bin" / name).write_bytes(content)
        self.bin.mkdir()
        for name in ("headcni", "headcni-ipam"):
            (self.bin / name).symlink_to(release / "bin" / name)

    def start_daemon(self) -> None:
        config = {
            "daemon": {"socket": str(self.socket), "dataDir": str(self.data)},
            "network": {"podCIDR": {"nodeLocal": SUBNET, "base": SUBNET}},
            "logging": {"level": "ERROR"},
        }
        path = self.folder / "config.yaml"
        path.write_text(json.dumps(config))
        self.socket.parent.mkdir(exist_ok=True)
        program = self.opt / "current" / "bin" / "headcni-daemon"
        with (self.folder / "daemon.log").open("ab") as log:
            self.daemon = subprocess.Popen(
                [*OWN_SYS, "/usr/bin/python3", "-IS", str(program), "--config", str(path)],
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + PATIENCE
        while not self.socket.exists():
            if time.monotonic() > until or self.daemon.poll() is not None:
                raise RuntimeError(f"no daemon:\n{(self.folder / 'daemon.log').read_text()}")
            time.sleep(0.05)

    def stop_daemon(self) -> None:
        if self.daemon is not None:
            self.daemon.terminate()
            self.daemon.wait(PATIENCE)
            self.daemon = None

    def measured(self, name: str) -> dict[str, float]:
        """A metric of the daemon's, by its labels as they are written."""
        with urllib.request.urlopen("http://127.0.0.1:9001/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        found = {}
        for line in lines:
            if line.startswith((f"{name} ", f"{name}{{")):
                labels, _, value = line.removeprefix(name).rpartition(" ")
                found[labels] = float(value)
        return found

    def settle(self) -> None:
        """The daemon deletes links after it has answered: the next one's turn is not for that."""
        until = time.monotonic() + PATIENCE
        with closing(sqlite3.connect(self.data / "headcni.db")) as db:
            while db.execute("SELECT count(*) FROM tombstone").fetchone() != (0,):
                if time.monotonic() > until:
                    raise RuntimeError(f"links are not deleted within {PATIENCE} s")
                time.sleep(0.005)

    def rest(self) -> None:
        """Until the daemon has nothing to do. Some time after a peer has changed rules of the node,
        it looks at all of them, which is no part of anybody's ADD."""
        until = time.monotonic() + PATIENCE
        before, now = -1.0, self.cpu()
        while now - before > 0.02 and time.monotonic() < until:
            time.sleep(IDLE_SECONDS)
            before, now = now, self.cpu()

    def cpu(self) -> float:
        """Seconds that the daemon has had of the processors."""
        assert self.daemon is not None
        with open(f"/proc/{self.daemon.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss(self) -> float:
        """MiB of the daemon."""
        assert self.daemon is not None
        with open(f"/proc/{self.daemon.pid}/status") as status:
            lines = dict(line.split(":", 1) for line in status)
        return int(lines["VmRSS"].split()[0]) / 1024

    def pod(self) -> Namespace:
        """One that has no interface; they are used again, as they are left as they were."""
        self._number += 1
        return self._pods[self._number % len(self._pods)]

    def make_pods(self, count: int = POOL) -> None:
        while len(self._pods) < count:
            self._pods.append(self.node.pod())

    def environment(self, verb: str, pod: Namespace | None, **extra: str) -> dict[str, str]:
        how: dict[str, Any] = {"HEADCNI_SOCKET": str(self.socket), **extra}
        env = self.node.environment(verb, pod, **how)
        env["CNI_PATH"] = f"{self.bin}:{tools.CNI.bin}"
        return env

    def run(self, program: Path, conf: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
        done = subprocess.run(
            [str(program)],
            input=json.dumps(conf).encode(),
            capture_output=True,
            env=env,
            timeout=60,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{program.name}: {done.stdout.decode()} {done.stderr.decode()}")
        return json.loads(done.stdout) if done.stdout.strip() else {}


@contextmanager
def entered() -> Iterator[Stage]:
    folder = Path(tempfile.mkdtemp(prefix="hct-bench-"))
    stage = Stage(folder)
    try:
        stage.install()
        stage.node = CniNode.create(folder, stage.bin)
        with netns.opened(stage.node.netns.path) as fd, netns.entered(fd):
            stage.start_daemon()
            stage.make_pods()
            yield stage
    finally:
        stage.stop_daemon()
        if hasattr(stage, "node"):
            stage.node.remove()
        shutil.rmtree(folder, ignore_errors=True)


def versions() -> dict[str, str]:
    """What was measured, and on what."""
    plugins = "github.com/containernetworking/plugins"
    return {
        "headcni": __version__,
        "python": sh("/usr/bin/python3", "--version").stdout.split()[-1],
        "kernel": os.uname().release,
        "containernetworking/plugins": tools.CNI.pinned(plugins),
        "headscale": tools.headscale_version(),
        "tailscale": tools.tailscale_version(),
        "cores": str(os.cpu_count()),
        "load": " ".join(f"{one:.1f}" for one in os.getloadavg()),
    }
