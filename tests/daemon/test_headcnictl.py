"""headcnictl on a node whose daemon runs: as it is installed, by the node's own Python."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import Any

import pytest

DAEMON = "import sys; from headcni.daemon.main import main; sys.exit(main(sys.argv[1:]))"


class Ctl:
    """A node with a configuration, a daemon, and headcnictl."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.file = node.tmp / "config.yaml"
        self.program = (node.plugins / "headcni").resolve().with_name("headcnictl")
        self.configure()

    def configure(self, **sections: dict[str, Any]) -> None:
        base = {
            "daemon": {"socket": str(self.node.socket), "dataDir": str(self.node.tmp / "data")},
            "tailscale": {"socket": {"path": str(self.node.tmp / "no.sock")}},
            "network": {"podCIDR": {"nodeLocal": "10.55.1.0/24"}, "firewall": "none"},
        }
        for name, keys in sections.items():
            base[name] = {**base.get(name, {}), **keys}
        self.file.write_text(json.dumps(base))

    def start(self) -> Any:
        argv, env = self.node.python_command("-c", DAEMON, "--config", str(self.file))
        return self.node.start_command(argv, env, "msg=ready")

    def command(self, *words: object) -> list[str]:
        run = ["ip", "netns", "exec", self.node.netns.name, self.node.python, "-IS"]
        return [*run, str(self.program), *map(str, words), "--config", str(self.file)]

    def __call__(self, *words: object, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **env},
        )

    def json(self, *words: object) -> Any:
        return json.loads(self(*words, "--json").stdout)

    def add(self, name: str, **how: Any) -> Any:
        pod = self.node.pod()
        args = f"K8S_POD_NAMESPACE=shop;K8S_POD_NAME={name}"
        self.node.add(self.node.conf(), pod, args=args, **how).ok  # noqa: B018
        return pod


@pytest.fixture
def ctl(node):
    return Ctl(node)


def test_config_shows_what_the_daemon_uses_and_what_it_does_not_use_yet(ctl):
    daemon = ctl.start()
    before = {one["key"]: one for one in ctl.json("config", "show")["settings"]}
    assert before["network.podCIDR.nodeLocal"]["value"] == ["10.55.1.0/24"]
    assert before["network.podCIDR.nodeLocal"]["origin"] == "file"
    assert before["logging.level"]["value"] == "INFO"

    ctl.configure(logging={"level": "DEBUG"}, network={"mtu": 1300})
    waiting = {
        one["key"]: one["in_file"]
        for one in ctl.json("config", "show")["settings"]
        if "in_file" in one
    }
    assert waiting == {"logging.level": "DEBUG", "network.mtu": 1300}
    daemon.send_signal(signal.SIGHUP)
    ctl.node.wait_for(lambda: ctl.node.said("network.mtu: 1280 → 1300"))
    said = " ".join(ctl("config", "show").stdout.split())
    assert "logging.level is" not in said
    assert "network.mtu is 1300 in the file: systemctl restart headcni-daemon" in said
    assert ctl("config", "validate").returncode == 0


def test_metrics_come_from_the_daemon_even_if_its_monitor_is_off(ctl):
    ctl.configure(monitoring={"enabled": False})
    ctl.start()
    ctl.add("web")
    found = {one["name"]: one for one in ctl.json("metrics")["metrics"]}
    assert found["headcni_attachments"]["series"] == [{"labels": {}, "value": 1.0, "outside": ""}]
    [setup] = found["headcni_pod_network_setup_duration_seconds"]["series"]
    assert setup["labels"] == {"namespace": "shop"} and 0 < setup["mean"] < 5
    assert found["headcni_condition"]["outside"], "there is no tailscaled"
    done = ctl("metrics")
    assert done.returncode == 1
    assert done.stdout.startswith("! headcni_condition\n")
    assert "condition=tailscale: 0" in done.stdout
