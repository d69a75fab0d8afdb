"""headcnictl on a node whose daemon runs: as it is installed, by the node's own Python."""

from __future__ import annotations

import base64
import json
import secrets
import shutil
import signal
import stat
import string
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from cni_node import EMPTY

from headcni.shared.conflist import Options, build, write

DAEMON = "import sys; from headcni.daemon.main import main; sys.exit(main(sys.argv[1:]))"


class Ctl:
    """A node with a configuration, a daemon, and headcnictl."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.file = node.tmp / "config.yaml"
        self.program = (node.plugins / "headcni").resolve().with_name("headcnictl")
        self.results: dict[str, Any] = {}
        self.net_d = node.tmp / "net.d"
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
        run = [shutil.which("ip"), "netns", "exec", self.node.netns.name, self.node.python, "-IS"]
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
        self.results[name] = self.node.add(self.node.conf(), pod, args=args, **how).ok
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


def random(length: int, letters: str = string.ascii_letters + string.digits) -> str:
    return "".join(secrets.choice(letters) for _unused in range(length))


def planted() -> dict[str, str]:
    """Secrets that look like real ones, each new."""
    digits = "0123456789abcdef"
    parts = (b'{"alg":"RS256"}', b'{"sub":"system:node"}', secrets.token_bytes(64))
    return {
        "tailscale": f"tskey-auth-{random(12)}CNTRL-{random(32)}",
        "headscale": f"hskey-api-{random(12)}-{random(64)}",
        "old headscale": f"{random(10)}.{random(43)}",
        "pre-auth": random(48, digits),
        "nodekey": f"nodekey:{random(64, digits)}",
        "private": f"privkey:{random(64, digits)}",
        "jwt": ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts),
        "pem": random(64),
        "password": "correct-horse",
        "kubeconfig": base64.b64encode(secrets.token_bytes(60)).decode(),
    }


def as_text(known: dict[str, str]) -> str:
    pem = f"-----BEGIN PRIVATE KEY-----\n{known['pem']}\n-----END PRIVATE KEY-----"
    named = f"password={known['password']}\nclient-key-data: {known['kubeconfig']}\n"
    rest = "\n".join(known[key] for key in known if key not in ("pem", "password", "kubeconfig"))
    return f"before\n{rest}\n{named}{pem}\nafter\n"


class Sources:
    """Everything that a bundle takes, with secrets of its own in each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.secrets = folder, {}
        self.bin = folder / "planted"
        self.bin.mkdir()

    def text(self, source: str) -> str:
        self.secrets[source] = planted()
        return as_text(self.secrets[source])

    def program(self, name: str) -> None:
        (self.bin / f"{name}.txt").write_text(self.text(name))
        (self.bin / name).write_text(f"#!/bin/sh\ncat {self.bin}/{name}.txt\n")
        (self.bin / name).chmod(0o755)

    def journal(self) -> None:
        text = self.text("journalctl")
        entries = [
            {
                "__REALTIME_TIMESTAMP": f"{1_800_000_000_000_000 + at}",
                "__CURSOR": f"{at}",
                "_SYSTEMD_UNIT": "headcni-daemon.service",
                "MESSAGE": line,
            }
            for at, line in enumerate(text.splitlines())
        ]
        lines = "\n".join(map(json.dumps, entries))
        (self.bin / "journalctl.txt").write_text(f"{lines}\n")
        (self.bin / "journalctl").write_text(f"#!/bin/sh\ncat {self.bin}/journalctl.txt\n")
        (self.bin / "journalctl").chmod(0o755)


def test_a_support_bundle_has_everything_but_the_secrets(ctl):
    node = ctl.node
    sources = Sources(node.tmp)
    for name in ("ip", "nft", "sysctl", "systemctl", "tailscale", "uname"):
        sources.program(name)
    sources.journal()
    net_d = node.tmp / "net.d"
    net_d.mkdir()
    (net_d / "10-headcni.conflist").write_text(json.dumps({"x": sources.text("conflist")}))
    (net_d / "20-other.conf").write_text(sources.text("other conflist"))
    key, kubeconfig = node.tmp / "key", node.tmp / "kubeconfig"
    key.write_text("a-plain-word-as-key\n")
    kubeconfig.write_text("users:\n- user:\n    token: a-plain-word-as-token\n")
    own = planted()
    sources.secrets["settings"] = {"tailscale": own["tailscale"], "jwt": own["jwt"]}
    ctl.configure(
        daemon={"podSelector": f"app={own['tailscale']}"},
        network={"logDenied": 1, "x-note": own["jwt"]},
    )
    ctl.start()
    pod = node.pod()
    name = own["tailscale"].lower()
    args = f"K8S_POD_NAMESPACE=shop;K8S_POD_NAME={name}"
    node.add(node.conf(), pod, args=args).ok  # noqa: B018
    node.add(node.conf(mtu="token: hunter22"), node.pod(), args=args)  # an event with a reason
    ctl.configure(  # what only the bundle reads: the daemon has started
        daemon={"podSelector": f"app={own['tailscale']}", "kubeconfig": str(kubeconfig)},
        headscale={"url": "https://headscale.example", "apiKeyFile": str(key)},
    )
    notes = sources.text("config.yaml") + "a-plain-word-as-key and a-plain-word-as-token\n"
    with ctl.file.open("a") as config:
        config.write("".join(f"\n# {line}" for line in notes.splitlines()))
    file = node.tmp / "bundle.tar.gz"
    path = f"{sources.bin}:/usr/sbin:/usr/bin:/sbin:/bin"
    done = ctl("support-bundle", file, "--cni-dir", net_d, PATH=path)
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with tarfile.open(file) as archive:
        found = {
            member.name.partition("/")[2]: archive.extractfile(member).read().decode()
            for member in archive
        }
    everything = "\n".join(found.values())
    for source, known in sources.secrets.items():
        for kind, secret in known.items():
            value = secret.partition(":")[2] if secret.startswith(("node", "priv")) else secret
            assert value not in everything, (
                f"{kind} of {source}: {[one for one in found if value in found[one]]}"
            )
    for word in ("hunter22", "a-plain-word-as-key", "a-plain-word-as-token", name):
        assert word not in everything, [one for one in found if word in found[one]]

    problems = {
        part["name"]: part["problem"] for part in json.loads(found["manifest.json"])["parts"]
    }
    assert set(problems) - set(found) <= {name for name in problems if problems[name]}
    for part in ("status.json", "ipam.json", "pods.json", "config.json", "metrics.txt"):
        assert problems[part] == "", part
    assert json.loads(found["status.json"])["attachments"] == 1
    assert json.loads(found["pods.json"])[0]["addresses"] == ["10.55.1.2"]
    for part in ("logs.txt", "network/nft.txt", "versions/tailscale.txt", "cni/20-other.conf"):
        assert "before" in found[part] and "(redacted)" in found[part], part
    assert "network.mtu" in found["config.json"]
    assert problems["routes.json"], "there is no tailscaled"


@pytest.fixture
def saved(ctl):
    """A node with two pods, and a backup of it."""
    (ctl.node.tmp / "net.d").mkdir()
    options = Options(["10.55.1.0/24"], extra={"data_dir": str(ctl.node.tmp / "data")})
    write(build(options), str(ctl.net_d))
    ctl.pods = {name: ctl.add(name) for name in ("web", "db")}
    ctl.file_of_backup = ctl.node.tmp / "backup.tar.gz"
    done = ctl("backup", ctl.file_of_backup, "--cni-dir", ctl.net_d)
    assert done.returncode == 0, done.stderr
    return ctl


def addresses(ctl: Ctl) -> dict[str, list[str]]:
    return {pod["pod"]: pod["addresses"] for pod in ctl.json("pods")}


def test_a_backup_is_of_a_daemon_that_runs_and_only_root_reads_it(saved):
    saved.start()
    file = saved.node.tmp / "second.tar.gz"
    answer = saved.json("backup", file, "--cni-dir", saved.net_d)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert set(answer["files"]) == {"headcni.db", "config.yaml", "10-headcni.conflist"}
    assert (answer["pods"], answer["pod_cidrs"]) == (2, ["10.55.1.0/24"])
    assert saved("backup", file).returncode == 3, "it exists"
    check = saved("restore", file, "--check", "--cni-dir", saved.net_d)
    assert check.returncode == 0, check.stdout + check.stderr
    done = saved("restore", file, "--cni-dir", saved.net_d)
    assert done.returncode == 3
    assert "systemctl stop headcni-daemon" in done.stderr


def test_a_lost_store_is_restored_with_its_pods_and_their_addresses(saved):
    before = addresses(saved)
    assert set(before) == {"web", "db"}
    shutil.rmtree(saved.node.tmp / "data")
    text, conf = saved.file.read_text(), saved.net_d / "10-headcni.conflist"
    saved.file.write_text(text.replace("10.55.1.0/24", "10.55.1.0/24,fd55::/64"))
    kept = conf.read_bytes()
    conf.unlink()
    refused = saved("restore", saved.file_of_backup, "--cni-dir", saved.net_d)
    assert refused.returncode == 1 and "pod CIDR" in refused.stdout
    saved.file.unlink()
    answer = saved.json("restore", saved.file_of_backup, "--cni-dir", saved.net_d)
    assert answer["refused"] == [] and len(answer["restored"]) == 3, answer
    assert addresses(saved) == before
    assert (saved.file.read_text(), conf.read_bytes()) == (text, kept)
    assert stat.S_IMODE(saved.file.stat().st_mode) == 0o600
    for name, pod in saved.pods.items():
        saved.node.check(saved.node.conf(), pod, saved.results[name]).succeeds()
    third = saved.add("third")
    assert len({address for those in addresses(saved).values() for address in those}) == 3
    for pod in (third, *saved.pods.values()):
        saved.node.delete(saved.node.conf(), pod).succeeds()
    assert saved.node.leftovers() == EMPTY


def test_a_pod_that_the_backup_does_not_know_is_named_and_nothing_is_changed(saved):
    saved.add("late")
    before = addresses(saved)
    for words in (("--check",), ()):
        done = saved("restore", saved.file_of_backup, *words, "--cni-dir", saved.net_d)
        assert done.returncode == 1
        assert "pod shop/late runs, and the backup does not know it" in done.stdout
    assert addresses(saved) == before
    shutil.rmtree(saved.node.tmp / "data")  # now only the kernel knows
    done = saved("restore", saved.file_of_backup, "--check", "--cni-dir", saved.net_d)
    assert done.returncode == 1 and "the backup does not know it" in done.stdout
    assert not (saved.node.tmp / "data").exists()


def test_an_address_that_another_pod_has_by_now_is_a_contradiction(saved):
    taken = addresses(saved)["web"][0]
    saved.node.delete(saved.node.conf(), saved.pods["web"]).succeeds()
    pod = saved.node.pod()
    wanted = saved.node.conf(args={"cni": {"ips": [taken]}})
    name = "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=thief"
    assert saved.node.add(wanted, pod, args=name).address == taken
    done = saved("restore", saved.file_of_backup, "--cni-dir", saved.net_d)
    assert done.returncode == 1
    assert f"pod shop/thief runs with {taken}, and the backup has given that to another" in (
        done.stdout
    )


def test_an_address_of_an_add_at_work_is_kept_or_refused(saved):
    held = "INSERT INTO allocation VALUES (?, 'pods', ?, 'eth0', 0, 24, NULL, '', 1)"
    saved.node.sql(held, bytes([10, 55, 1, 77]), "working")
    done = saved("restore", saved.file_of_backup, "--cni-dir", saved.net_d)
    assert done.returncode == 0, done.stdout
    assert "10.55.1.77" in saved("ipam", "--list").stdout

    gone = addresses(saved)["db"][0]
    saved.node.delete(saved.node.conf(), saved.pods["db"]).succeeds()
    saved.node.sql(held, bytes(map(int, gone.split("."))), "busy")
    done = saved("restore", saved.file_of_backup, "--cni-dir", saved.net_d)
    assert done.returncode == 1
    assert f"{gone} is held by container busy" in done.stdout


def test_pods_that_are_gone_since_come_back_as_leaks_and_their_addresses_are_not_reused(saved):
    before = addresses(saved)
    saved.node.delete(saved.node.conf(), saved.pods["web"]).succeeds()
    done = saved("restore", saved.file_of_backup, "--cni-dir", saved.net_d)
    assert done.returncode == 0, done.stdout + done.stderr
    assert addresses(saved) == before
    new = saved.add("new")
    assert new
    assert not set(addresses(saved)["new"]) & {one for those in before.values() for one in those}


def test_what_was_there_before_a_restore_can_be_restored(saved):
    original = saved.file.read_text()
    saved.configure(logging={"level": "DEBUG"})
    changed = saved.file.read_text()
    answer = saved.json("restore", saved.file_of_backup, "--cni-dir", saved.net_d)
    assert saved.file.read_text() == original
    undo = saved.json("restore", answer["undo"], "--cni-dir", saved.net_d)
    assert undo["refused"] == []
    assert saved.file.read_text() == changed
    for _unused in range(4):
        saved("restore", saved.file_of_backup, "--cni-dir", saved.net_d)
    assert len(list((saved.node.tmp / "data").glob("before-restore-*"))) == 3


KILLED = """
import os, signal, sys
from headcni.ctl import main, restore
def die(*_unused, **_also):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(*{place}, die)
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("place", "settled"),
    [
        ('(restore, "_backed_up")', ""),
        ('(restore.os, "replace")', "had not changed anything, was removed"),
        ('(restore, "_replace")', "had not changed anything, was removed"),
        ('(restore, "_insert")', "had not changed anything, was removed"),
        ('(restore, "_finish")', "was finished"),
        ('(restore.conflist, "write")', "was finished"),
        ('(restore, "_forget")', "was finished"),
    ],
)
def test_a_restore_that_is_killed_anywhere_is_undone_or_finished_by_the_next(saved, place, settled):
    saved.node.delete(saved.node.conf(), saved.pods["web"]).succeeds()
    original = saved.file.read_text()
    saved.configure(logging={"level": "DEBUG"})
    changed = saved.file.read_text()
    argv, env = saved.node.python_command(
        *("-c", KILLED.replace("{place}", place), "restore", str(saved.file_of_backup)),
        *("--config", str(saved.file), "--cni-dir", str(saved.net_d)),
    )
    killed = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    (left,) = (saved.node.tmp / "data").glob("copy-*")
    committed = settled == "was finished"
    assert ("web" in addresses(saved)) == committed
    if not committed:
        assert saved.file.read_text() == changed

    late = None if committed else saved.add("late")
    done = saved("restore", saved.file_of_backup, "--cni-dir", saved.net_d)
    assert settled in done.stdout, done.stdout + done.stderr
    assert done.returncode == (1 if late else 0), done.stdout + done.stderr
    assert saved.file.read_text() == (changed if late else original)
    assert not (saved.node.tmp / "data/restore").exists()
    assert not left.exists()
    assert ("late" in addresses(saved)) == bool(late)


def test_events_are_followed_across_a_restart_of_the_daemon(ctl):
    first = ctl.start()
    out = ctl.node.tmp / "events"
    with out.open("wb") as file:
        follower = subprocess.Popen(
            ctl.command("events", "--follow", "--json"), stdout=file, stderr=subprocess.DEVNULL
        )

    def pods() -> list[tuple[str, str]]:
        return [(one["type"], one["pod"]) for one in map(json.loads, out.read_text().splitlines())]

    try:
        web = ctl.add("web")
        ctl.node.wait_for(lambda: pods() == [("pod-added", "web")])
        ctl.node.end(first)
        ctl.start()
        ctl.node.delete(ctl.node.conf(), web).succeeds()
        ctl.node.wait_for(lambda: pods() == [("pod-added", "web"), ("pod-deleted", "web")])
        follower.send_signal(signal.SIGINT)
        assert follower.wait(20) == 0
    finally:
        follower.kill()
        follower.wait()


def test_every_python_of_a_node_does(saved, python):
    saved.node.python = python
    file = saved.node.tmp / "of-this-python.tar.gz"
    assert saved("backup", file, "--cni-dir", saved.net_d).returncode == 0
    done = saved("restore", file, "--cni-dir", saved.net_d)
    assert done.returncode == 0, done.stderr
    assert addresses(saved) and saved("config", "show").returncode == 0
    words = saved.command("completion", "bash")[:-2]
    assert "_headcnictl" in subprocess.run(words, capture_output=True, text=True, check=True).stdout
    bundle = saved("support-bundle", saved.node.tmp / "bundle.tar.gz", "--json")
    assert bundle.returncode == 0, bundle.stderr
    parts = {part["name"]: part for part in json.loads(bundle.stdout)["parts"]}
    assert parts["pods.json"]["problem"] == parts["ipam.json"]["problem"] == ""
    assert "headcni-daemon does not answer" in parts["metrics.txt"]["problem"]
