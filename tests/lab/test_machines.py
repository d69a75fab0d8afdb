"""The lab's machines are what they claim to be: real systems, joined by a real network."""

from __future__ import annotations

import json

import pytest

MACHINES = ["control", "node1", "node2"]


@pytest.mark.parametrize("machine", MACHINES)
def test_a_machine_runs_systemd_and_nothing_has_failed(lab, machine):
    assert lab.on(machine, "cat /proc/1/comm; systemctl is-system-running") == "systemd\nrunning\n"


@pytest.mark.parametrize("machine", MACHINES)
def test_a_machine_is_called_what_the_inventory_calls_it(lab, machine):
    assert lab.on(machine, "hostname").strip() == machine


@pytest.mark.parametrize("node", ["node1", "node2"])
def test_a_node_reaches_headscale(lab, node):
    url = lab.inventory()["lab"]["vars"]["lab_headscale_url"]
    fetch = f'import urllib.request as u; print(u.urlopen("{url}/health", timeout=5).status)'
    assert lab.on(node, f"python3 -c '{fetch}'").strip() == "200"


@pytest.mark.parametrize("node", ["node1", "node2"])
def test_a_node_can_create_a_tun_and_a_veth_and_a_namespace(lab, node):
    lab.on(node, "ip tuntap add hctest0 mode tun && ip link del hctest0")
    lab.on(node, "ip netns add t && ip link add v0 type veth peer v1 netns t && ip netns del t")
    assert "v0" not in lab.on(node, "ip -br link")


def test_a_node_can_turn_on_forwarding_without_touching_its_neighbour_or_the_host(bare):
    before = bare.run("sysctl", "-n", "net.ipv4.ip_forward").stdout
    bare.on("node1", "sysctl -qw net.ipv4.ip_forward=1")
    assert bare.on("node1", "sysctl -n net.ipv4.ip_forward") == "1\n"
    assert bare.on("node2", "sysctl -n net.ipv4.ip_forward") == "0\n"
    assert bare.run("sysctl", "-n", "net.ipv4.ip_forward").stdout == before


def test_a_node_does_not_have_tailscale_until_site_yml_brings_it(bare):
    assert (
        bare.on("node1", "command -v tailscale tailscaled; systemctl cat tailscaled", check=False)
        == ""
    )


def test_the_mirror_serves_a_tarball_laid_out_like_the_official_one_with_its_checksum(
    lab, tmp_path
):
    known = lab.inventory()["lab"]["vars"]
    stable = known["lab_mirror_url"] + "/stable"
    index = json.loads(lab.run("curl", "-fsS", f"{stable}/?mode=json").stdout)
    assert index["TarballsVersion"] == known["lab_tailscale_version"]
    name = next(iter(index["Tarballs"].values()))
    lab.run("curl", "-fsS", "-o", str(tmp_path / name), f"{stable}/{name}")
    checksum = lab.run("curl", "-fsS", f"{stable}/{name}.sha256").stdout
    assert lab.run("sha256sum", str(tmp_path / name)).stdout.split()[0] == checksum
    top = name.removesuffix(".tgz")
    assert lab.run("tar", "-tzf", str(tmp_path / name)).stdout.split() == [
        f"{top}/tailscale",
        f"{top}/tailscaled",
        f"{top}/systemd/tailscaled.defaults",
        f"{top}/systemd/tailscaled.service",
    ]


@pytest.mark.parametrize("hard", [False, True], ids=["shut down", "plug pulled"])
def test_a_reboot_keeps_the_disk_and_changes_the_boot_id_but_not_the_address(lab, hard):
    look = "cat /proc/sys/kernel/random/boot_id /root/kept; ip -4 -o addr show eth0; ls /run/gone"
    lab.on("node2", "echo kept > /root/kept; sync; touch /run/gone; ip netns add gone")
    before = lab.on("node2", look).splitlines()
    lab("reboot", "node2", *(["--hard"] if hard else []))
    after = lab.on("node2", look, check=False).splitlines()
    assert before[0] != after[0]
    assert before[1:3] == after[1:3]
    assert before[3:] == ["/run/gone"]
    assert after[3:] == []
    assert lab.on("node2", "ip netns") == ""


def test_ansible_pings_every_machine_with_plain_ansible(lab):
    done = lab.run(".venv/bin/ansible", "-i", "inventories/lab", "all", "-m", "ping")
    assert done.stdout.count("SUCCESS") == len(MACHINES)


def test_the_api_key_is_readable_by_root_alone_and_opens_headscale(lab):
    known = lab.inventory()["lab"]["vars"]
    path = f"{known['lab_dir']}/headscale-api-key"
    assert lab.run("stat", "-c", "%a %U", path).stdout.strip() == "600 root"
    with open(path) as file:
        key = file.read().strip()
    listed = lab.run(
        "curl",
        "-fsS",
        "-H",
        f"Authorization: Bearer {key}",
        f"{known['lab_headscale_url']}/api/v1/node",
    )
    assert "nodes" in json.loads(listed.stdout)
    assert key not in lab("inventory").stdout
