"""headcni_release, _config, _conflist, _service and _info on a real node."""

from __future__ import annotations

import json
import tarfile
from io import BytesIO
from typing import Any

import pytest
from ansible_module import Failed
from lab_command import CHECKOUT, LabCommand
from leftovers import assert_nothing_left
from site_run import Site

NODE = "node1"
CONFIG = {"network": {"podCIDR": {"nodeLocal": "10.55.1.0/24", "base": "10.55.0.0/16"}}}


class Node:
    """Modules on one node of a lab."""

    def __init__(self, lab: LabCommand, folder) -> None:
        self.lab, self.folder = lab, folder

    def __call__(self, module: str, *words: str, **arguments: Any) -> dict[str, Any]:
        playbook = self.folder / "module.yml"
        task = {f"headcni.mesh.headcni_{module}": arguments}
        play = {"hosts": NODE, "gather_facts": False, "tasks": [task]}
        playbook.write_text(json.dumps([play]))
        found = Site(self.lab)("--diff", *words, playbook=str(playbook), check=False).tasks[-1]
        result: dict[str, Any] = found["result"]
        if found["status"] != "ok":
            raise Failed(result)
        return result

    def on(self, command: str, check: bool = True) -> str:
        return self.lab.on(NODE, command, check)


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    lab = LabCommand("modules")
    lab("down")
    before = lab.listing()
    lab("up", "--nodes", "1")
    yield Node(lab, tmp_path_factory.mktemp("play"))
    lab("down")
    assert_nothing_left(before, lab.listing())


@pytest.fixture(scope="module")
def tarball(node, tmp_path_factory):
    """The real release."""
    folder = tmp_path_factory.mktemp("dist")
    node.lab.run(".venv/bin/python", "plugins/cni/release.py", "--output", str(folder))
    return next(folder.iterdir())


def remade(tarball, target, version: str, **changes: str) -> str:
    """The same release by another version, with some files changed."""
    changes = {f"headcni-runtime-{version}/{name}": text for name, text in changes.items()}
    with tarfile.open(tarball) as old, tarfile.open(target, "w:gz") as new:
        for member in old:
            data = old.extractfile(member).read()
            top, _, rest = member.name.partition("/")
            if rest == "headcni/__init__.py":
                data = data.replace(top.rpartition("-")[2].encode(), version.encode())
            if rest == "VERSION":
                data = f"{version}\n".encode()
            member.name = f"headcni-runtime-{version}/{rest}"
            data = changes[member.name].encode() if member.name in changes else data
            member.size = len(data)
            new.addfile(member, BytesIO(data))
    return str(target)


@pytest.fixture(scope="module")
def installed(node, tarball):
    foretold = node("release", "--check", src=str(tarball), plugin_dirs=["/opt/lab/cni"])
    done = node("release", src=str(tarball), plugin_dirs=["/opt/lab/cni"])
    return foretold, done


def test_a_release_is_installed_as_check_mode_foretold(node, installed):
    foretold, done = installed
    assert foretold["changed"] and done["changed"]
    assert foretold["diff"] == done["diff"]
    assert done["previous"] is None
    assert node.on("headcnictl version").startswith(f"headcni {done['current']['version']},")
    asked = 'echo \'{"cniVersion": "1.0.0"}\' | CNI_COMMAND=VERSION /opt/cni/bin/headcni'
    assert "supportedVersions" in node.on(asked)
    assert "mesh" in node.on("systemctl cat headcni-tailscaled.service")
    assert node.on("readlink -f /opt/cni/bin/loopback") == "/opt/lab/cni/loopback\n"


def test_it_is_not_sent_again(node, installed, tarball):
    again = node("release", src=str(tarball), plugin_dirs=["/opt/lab/cni"])
    assert again["changed"] is False
    assert again["diff"] == {"before": "", "after": ""}


def test_a_node_with_another_python_gets_its_own_compiled_files(node, installed, tarball):
    current = "/opt/headcni/current/headcni"
    node.on(f"rm -r {current}/__pycache__")
    again = node("release", src=str(tarball), plugin_dirs=["/opt/lab/cni"])
    assert again["changed"] is True
    assert "shim.cpython-" in node.on(f"ls {current}/__pycache__")


def test_an_upgrade_and_the_way_back(node, installed, tarball, tmp_path):
    old = installed[1]["current"]["version"]
    newer = remade(tarball, tmp_path / "new.tar.gz", "9.0.0")
    up = node("release", src=newer, plugin_dirs=["/opt/lab/cni"])
    assert (up["previous"]["version"], up["current"]["version"]) == (old, "9.0.0")
    assert node.on("headcnictl version").startswith("headcni 9.0.0,")
    back = node("release", version=old, plugin_dirs=["/opt/lab/cni"])
    assert (back["previous"]["version"], back["current"]["version"]) == ("9.0.0", old)
    assert node.on("headcnictl version").startswith(f"headcni {old},")
    gone = node("release", version="9.0.0", state="absent")
    assert gone["removed"] == ["9.0.0"]
    with pytest.raises(Failed, match=r"version: 9\.0\.0 is not on this node; there are: "):
        node("release", version="9.0.0")


def test_a_release_that_does_not_run_is_never_switched_to(node, installed, tarball, tmp_path):
    broken = {"headcni/shim.py": "raise RuntimeError('broken')\n"}
    spoilt = remade(tarball, tmp_path / "spoilt.tar.gz", "9.9.9", **broken)
    before = node.on("readlink /opt/headcni/current; ls -A /opt/headcni/releases")
    with pytest.raises(Failed, match=r"does not run on this node: .*broken"):
        node("release", src=spoilt)
    assert node.on("readlink /opt/headcni/current; ls -A /opt/headcni/releases") == before


def test_a_checksum_of_something_else_is_refused_before_it_is_sent(node, tarball):
    with pytest.raises(Failed, match=f"checksum: .* expected {'0' * 64}"):
        node("release", src=str(tarball), checksum="0" * 64)


@pytest.mark.parametrize("size", ["8m", "0"], ids=["full", "read-only"])
def test_a_disk_that_takes_no_more_is_told_and_nothing_is_half_done(node, tarball, tmp_path, size):
    newer = remade(tarball, tmp_path / "new.tar.gz", "9.1.0")
    read_only = "mount -o remount,ro /opt/headcni; " if size == "0" else ""
    limit = f"size={size}," if size != "0" else ""
    node.on(
        f"mv /opt/headcni /opt/kept; mkdir /opt/headcni; mount -t tmpfs -o {limit}mode=755 none"
        f" /opt/headcni; mkdir /opt/headcni/releases; {read_only}"
    )
    try:
        with pytest.raises(Failed, match=r"No space left|Read-only file system"):
            node("release", src=newer)
        assert node.on("ls -A /opt/headcni/releases") == ""
        problems = node("preflight", config=CONFIG, report_only=True)["problems"]
        assert any(one.startswith("disk:") and "/opt/headcni" in one for one in problems)
    finally:
        node.on("umount /opt/headcni; rmdir /opt/headcni; mv /opt/kept /opt/headcni")


def test_the_configuration_is_checked_by_the_release_that_is_installed(node, installed):
    foretold = node("config", "--check", config=CONFIG)
    done = node("config", config=CONFIG)
    again = node("config", config=CONFIG)
    assert foretold["diff"] == done["diff"]
    assert (foretold["changed"], done["changed"], again["changed"]) == (True, True, False)
    assert node.on("stat -c %a /etc/headcni/config.yaml") == "600\n"
    assert "no mistakes" in node.on("headcnictl validate /etc/headcni/config.yaml")
    with pytest.raises(Failed, match=r"one mistake in the configuration: tailscale\.mode"):
        node("config", config={**CONFIG, "tailscale": {"mode": "sideways"}})
    changed = node("config", "--check", config={**CONFIG, "logging": {"level": "DEBUG"}})
    assert (changed["needs_reload"], changed["needs_restart"]) == (True, False)


def test_the_conflist_is_checked_by_the_plugin_that_is_installed(node, installed):
    node.on('mkdir -p /etc/cni/net.d; echo \'{"name": "x"}\' > /etc/cni/net.d/05-other.conf')
    given = {"pod_cidrs": ["10.55.1.0/24"], "cluster_cidrs": ["10.55.0.0/16"]}
    assert node("conflist", "--check", **given)["disabled"] == ["05-other.conf"]
    done = node("conflist", **given)
    assert done["in_charge"] == "10-headcni.conflist"
    assert node("conflist", **given)["changed"] is False
    with pytest.raises(Failed, match=r"the plugin refuses the conflist: .*rubbish"):
        node("conflist", **given, extra={"rubbish": 1})
    assert "no mistakes" in node.on("headcnictl validate /etc/cni/net.d/10-headcni.conflist")
    assert node("conflist", state="absent")["put_back"] == ["05-other.conf"]
    node.on("rm /etc/cni/net.d/05-other.conf")


def test_a_daemon_that_is_not_ready_is_told_by_each_condition(node, installed):
    """There is no tailscaled on this node."""
    node("config", config=CONFIG)
    with pytest.raises(
        Failed, match=r"headcni-daemon\.service is not ready after 3 s: .*tailscale"
    ):
        node("service", name="headcni-daemon", ready_address="127.0.0.1", ready_timeout=3)
    told = node("info")
    assert told["units"]["headcni-daemon"] == {"active": "active", "enabled": "enabled"}
    assert told["running_version"] == told["current"]["version"]
    assert told["ready"] is False
    assert told["pod_cidrs"] == ["10.55.1.0/24"] and told["pod_cidr_source"] == "config"
    assert told["mode"] == "host"


def test_a_service_is_reloaded_restarted_or_left_alone_as_it_needs(node, installed):
    def serve(*words: str, **how: Any) -> str:
        return str(node("service", *words, name="headcni-daemon", **how)["action"])

    assert serve() == "none"
    assert serve("--check", reload=True) == "reloaded"
    node("config", config={**CONFIG, "logging": {"level": "DEBUG"}})
    assert serve(reload=True) == "reloaded"
    assert serve() == "none"
    node("config", config=CONFIG)  # and the run ends here, before anybody reloads
    assert serve() == "restarted"
    assert serve() == "none"
    node.on("touch -h /opt/headcni/current")
    assert serve("--check") == "restarted"
    assert serve() == "restarted"
    assert serve() == "none"


def test_removal_leaves_nothing_of_a_release(node, installed, tmp_path):
    with pytest.raises(Failed, match=r"headcni-daemon\.service: still running; stop it first"):
        node("release", state="absent")
    assert node("service", name="headcni-daemon", state="stopped")["action"] == "stopped"
    assert node("service", name="headcni-daemon", state="stopped")["changed"] is False
    foretold = node("release", "--check", state="absent")
    done = node("release", state="absent")
    assert foretold["diff"] == done["diff"] and done["changed"] is True
    left = "ls -d /opt/headcni /usr/local/bin/headcnictl; ls /opt/cni/bin"
    assert node.on(f"{left}; ls /etc/systemd/system | grep headcni", check=False) == ""
    assert node("release", state="absent")["changed"] is False
    assert node("info")["current"] is None


def test_an_installed_collection_builds_its_release_by_itself(node, tmp_path):
    """Far from the checkout, as a user of the artifact has it."""
    galaxy = str(CHECKOUT / ".venv/bin/ansible-galaxy")
    node.lab.run(galaxy, "collection", "build", "--output-path", str(tmp_path))
    artifact = next(tmp_path.glob("*.tar.gz"))
    home = tmp_path / "collections"
    elsewhere = {"ANSIBLE_COLLECTIONS_PATH": str(home)}
    install = (galaxy, "collection", "install", "--offline", str(artifact))
    node.lab.run(*install, "--collections-path", str(home), **elsewhere)
    playbook = tmp_path / "play.yml"
    playbook.write_text(
        f"- hosts: {NODE}\n  gather_facts: false\n  tasks:\n"
        "    - headcni.mesh.headcni_release: {plugin_dirs: [/opt/lab/cni]}\n"
    )
    ansible = (str(CHECKOUT / ".venv/bin/ansible-playbook"), "-i", "inventories/lab")
    done = node.lab.run(*ansible, str(playbook), **elsewhere, HEADCNI_CACHE=str(tmp_path / "cache"))
    assert "changed=1" in done.stdout
    assert next((tmp_path / "cache" / "releases").iterdir())
    node("release", state="absent")
