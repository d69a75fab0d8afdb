"""headcnictl as it is installed: from the release, by the node's own Python."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from headcni.shared.conflist import Options, build, write

NETCONF = {
    "cniVersion": "1.0.0",
    "name": "pods",
    "type": "headcni",
    "pod_cidr": "10.55.1.0/24",
    "cluster_cidr": "10.55.0.0/16",
    "mtu": 1280,
    "ip_masq": True,
}


class Ctl:
    def __init__(self, program: Path, python: str = "/usr/bin/python3") -> None:
        self.program, self.python = program, python

    def __call__(self, *argv: object, stdin: str = "", **env: str):
        return subprocess.run(
            [self.python, "-IS", self.program, *map(str, argv)],
            input=stdin,
            text=True,
            capture_output=True,
            timeout=60,
            check=False,
            env={"PATH": "/usr/bin:/bin", **env},
        )


@pytest.fixture
def program(plugins):
    return (plugins / "headcni").resolve().with_name("headcnictl")


@pytest.fixture
def ctl(program):
    return Ctl(program)


@pytest.fixture
def write_file(tmp_path):
    def make(name: str, content: object) -> Path:
        file = tmp_path / name
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return file

    return make


def test_it_runs_by_its_own_first_line(program):
    done = subprocess.run(
        [program, "version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("headcni 0.")


def test_it_runs_on_every_python_of_a_node(program, python, write_file):
    file = write_file("config.yaml", "network: {podCIDR: {nodeLocal: 10.7.3.0/24}}\n")
    ctl = Ctl(program, python)
    assert ctl("validate", file).returncode == 0
    assert json.loads(ctl("pod-cidr", "--json", "--config", file).stdout)["cidrs"] == [
        "10.7.3.0/24"
    ]


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.conf", NETCONF, "netconf"),
        (
            "a.conflist",
            build(Options(["10.55.1.0/24"], cluster_cidrs=["10.55.0.0/16"])),
            "conflist",
        ),
        ("config.yaml", "logging: {level: debug}\n", "config.yaml"),
        ("config.json", {"logging": {"level": "debug"}}, "config.yaml"),
        ("chain.conf", {**NETCONF, "plugins": [{"type": "bridge"}]}, "netconf"),
    ],
)
def test_a_good_file_of_any_kind_is_found_valid(ctl, write_file, name, content, kind):
    file = write_file(name, content)
    done = ctl("validate", file)
    assert (done.returncode, done.stdout) == (0, f"{file} ({kind}): no mistakes\n")
    answer = json.loads(ctl("validate", "--json", file).stdout)
    assert answer == {"file": str(file), "kind": kind, "valid": True, "problems": []}


@pytest.mark.parametrize(
    ("name", "content", "kind", "lines"),
    [
        (
            "a.conf",
            {**NETCONF, "mtuu": 1, "mode": "hots"},
            "netconf",
            ["mtuu is 1: expected a known key: mtu?", 'mode is "hots": expected host or daemon'],
        ),
        (
            "a.conflist",
            {"cniVersion": "1.0.0", "name": "x", "plugins": [{**NETCONF, "mtu": 1}]},
            "conflist",
            ["plugins[0].mtu is 1: expected a number from 576 to 65535"],
        ),
        ("broken.conflist", "{", "conflist", ['the configuration is "{": expected valid JSON']),
        (
            "config.yaml",
            "network: {mtu: x}\nloging: {}\n",
            "config.yaml",
            ['network.mtu is "x": expected a number', "expected a known key: logging?"],
        ),
    ],
)
def test_every_mistake_is_told_at_once(ctl, write_file, name, content, kind, lines):
    file = write_file(name, content)
    done = ctl("validate", file)
    assert done.returncode == 1
    assert done.stdout.startswith(f"{file} ({kind}): {len(lines)} mistake")
    for line in lines:
        assert line in done.stdout
    answer = json.loads(ctl("validate", "--json", file).stdout)
    assert answer["valid"] is False
    assert len(answer["problems"]) == len(lines)


def test_stdin_will_do_for_a_file(ctl):
    assert ctl("validate", "-", stdin=json.dumps(NETCONF)).stdout == "- (netconf): no mistakes\n"


def test_a_file_that_cannot_be_read_is_neither_valid_nor_invalid(ctl, tmp_path):
    done = ctl("validate", tmp_path / "none.conf")
    assert done.returncode == 3
    assert done.stdout == ""
    assert "none.conf cannot be read: No such file" in done.stderr
    assert ctl("validate", tmp_path).returncode == 3
    assert ctl("pod-cidr", "--config", tmp_path / "none.yaml").returncode == 3


def test_wrong_usage_is_two_and_names_the_verbs(ctl):
    done = ctl("fix-everything")
    assert done.returncode == 2
    assert "pod-cidr" in done.stderr
    assert ctl().returncode == 2
    assert ctl("validate").returncode == 2
    assert "exit codes" in ctl("--help").stdout


def test_the_pod_cidr_is_explained_with_winner_and_losers(ctl, tmp_path):
    kubelet = tmp_path / "var/lib/kubelet/config.yaml"
    kubelet.parent.mkdir(parents=True)
    kubelet.write_text("podCIDR: 10.7.9.0/24\n")
    done = ctl("pod-cidr", "--root", tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("pod CIDR 10.7.9.0/24, from file\n")
    assert "not there: network.podCIDR.nodeLocal" in done.stdout

    own = tmp_path / "etc/headcni/config.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("network: {podCIDR: {nodeLocal: 10.7.3.0/24}}\n")
    answer = json.loads(ctl("pod-cidr", "--json", "--root", tmp_path).stdout)
    assert (answer["cidrs"], answer["source"]) == (["10.7.3.0/24"], "config")
    losers = {one["path"]: one["verdict"] for one in answer["considered"]}
    assert "10.7.3.0/24" not in losers["/var/lib/kubelet/config.yaml"]

    own.write_text("logging: {level: info}\n")
    done = ctl("pod-cidr", "--root", tmp_path, NODE_POD_CIDR="10.7.4.0/24")
    assert done.stdout.startswith("pod CIDR 10.7.4.0/24, from env\n")


def test_a_pod_cidr_that_cannot_be_had_is_a_no_with_the_reason(ctl, tmp_path):
    done = ctl("pod-cidr", "--root", tmp_path, NODE_POD_CIDR="100.64.1.0/24")
    assert done.returncode == 1
    assert "NODE_POD_CIDR" in done.stderr
    file = tmp_path / "config.yaml"
    file.write_text("network: {podCIDR: {nodeLocal: 10.7.3.1/24}}\n")
    done = ctl("pod-cidr", "--config", file, "--json")
    assert done.returncode == 1
    assert "network.podCIDR.nodeLocal" in json.loads(done.stdout)["error"]


def test_the_conflist_in_charge_is_shown_and_handed_back(ctl, tmp_path):
    (tmp_path / "10-flannel.conflist").write_text('{"name": "f", "plugins": [{"type": "x"}]}')
    done = ctl("conflist", "show", "--directory", tmp_path)
    assert done.returncode == 1, "somebody else is in charge"
    assert "10-flannel.conflist is in charge" in done.stdout

    write(build(Options(["10.55.1.0/24"])), str(tmp_path))
    done = ctl("conflist", "show", "--directory", tmp_path)
    assert done.returncode == 0
    assert "10-headcni.conflist is in charge" in done.stdout
    assert "10-flannel.conflist.headcni-backup: set aside" in done.stdout

    before = sorted(file.name for file in tmp_path.iterdir())
    done = ctl("conflist", "restore", "--dry-run", "--directory", tmp_path)
    assert "10-flannel.conflist: would be put back" in done.stdout
    assert sorted(file.name for file in tmp_path.iterdir()) == before

    done = ctl("conflist", "restore", "--json", "--directory", tmp_path)
    assert json.loads(done.stdout)["put_back"] == ["10-flannel.conflist"]
    assert [file.name for file in tmp_path.iterdir()] == ["10-flannel.conflist"]
    done = ctl("conflist", "restore", "--directory", tmp_path)
    assert "nothing to do" in done.stdout


def test_version_tells_what_runs(ctl):
    answer = json.loads(ctl("version", "--json").stdout)
    assert answer["cni"] == ["0.3.1", "0.4.0", "1.0.0", "1.1.0"]
    assert set(answer) == {"headcni", "cni", "python", "shim"}


def test_a_reader_that_has_seen_enough_is_no_error(program, tmp_path):
    done = subprocess.run(
        ["/bin/bash", "-c", f"{program} pod-cidr --root {tmp_path}; echo $? >&2"],
        stdout=_closed_pipe(),
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == "0\n"


def _closed_pipe() -> int:
    import os

    reader, writer = os.pipe()
    os.close(reader)
    return writer


def test_a_conflist_is_written_as_the_daemons_configuration_has_it(ctl, write_file, tmp_path):
    config = write_file(
        "config.yaml",
        """
        network: {podCIDR: {nodeLocal: 10.7.3.0/24, base: 10.7.0.0/16}, mtu: 1300}
        ipam: {strategy: random}
        tailscale: {mode: daemon}
        dns: {magicDNS: {enabled: true, baseDomain: mesh.example, options: ["ndots:2"]}}
        """,
    )
    directory = tmp_path / "net.d"
    directory.mkdir()
    (directory / "00-other.conf").write_text('{"cniVersion": "1.0.0", "name": "o", "type": "x"}')
    where = ("--config", config, "--directory", directory)
    assert "would be written" in ctl("conflist", "write", "--dry-run", *where).stdout
    assert sorted(one.name for one in directory.iterdir()) == ["00-other.conf"]
    done = ctl("conflist", "write", *where)
    assert done.returncode == 0, done.stderr
    plugin = json.loads((directory / "10-headcni.conflist").read_text())["plugins"][0]
    assert plugin["mode"] == "daemon" and plugin["mtu"] == 1300
    assert plugin["ipam"]["strategy"] == "random"
    assert plugin["ipam"]["ranges"] == [[{"subnet": "10.7.3.0/24"}]]
    assert plugin["cluster_cidr"] == ["10.7.0.0/16"]
    assert plugin["magic_dns"] == {"enable": True, "base_domain": "mesh.example"}
    assert plugin["dns"] == {"options": ["ndots:2"]}
    assert "nothing to do" in ctl("conflist", "write", *where).stdout
    assert ctl("validate", directory / "10-headcni.conflist").returncode == 0


def test_without_a_daemon_status_and_events_say_so_and_that_it_is_not_known(ctl, write_file):
    config = write_file("config.yaml", "daemon: {socket: /run/there-is-no-such/cni.sock}\n")
    for verb in ("status", "events"):
        done = ctl(verb, "--config", config)
        assert done.returncode == 3
        assert "systemctl status headcni-daemon" in done.stderr


def test_validate_names_an_unknown_key_of_the_ipam_section(ctl):
    netconf = {**NETCONF, "ipam": {"type": "headcni-ipam", "someday": 1}}
    done = ctl("validate", "-", stdin=json.dumps(netconf))
    assert done.returncode == 1
    assert "ipam.someday is 1: expected a known key" in done.stdout


def test_validate_warns_of_a_cluster_range_that_nobody_knows(ctl):
    netconf = {**NETCONF, "subnet_file": "/nowhere/subnet.env"}
    netconf.pop("cluster_cidr", None)
    done = ctl("validate", "-", stdin=json.dumps(netconf))
    assert done.returncode == 0, done.stdout
    assert "warning: cluster_cidr is not known" in done.stdout
    answer = json.loads(ctl("validate", "--json", "-", stdin=json.dumps(netconf)).stdout)
    assert answer["valid"] is True and len(answer["warnings"]) == 1
    known = {**netconf, "cluster_cidr": "10.0.0.0/8"}
    assert "warning" not in ctl("validate", "-", stdin=json.dumps(known)).stdout
