"""Each thing that stands in the way is a problem of its own, with what to do about it."""

from __future__ import annotations

import os
import socket
from ipaddress import ip_network

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import (
    kernel,
    node,
    node_config,
    node_platform,
    node_release,
    other_networks,
    preflight_cni,
    preflight_install,
    preflight_machine,
    preflight_network,
)
from ansible_collections.headcni.mesh.plugins.module_utils.shared import container_runtimes
from ansible_collections.headcni.mesh.plugins.modules import headcni_preflight as preflight
from ansible_module import run

GIVEN = {
    "require_pod_cidr": False,
    "enable_ipv6": None,
    "datapath": "bridge",
    "bridge": "headcni0",
    "cni_bin_dirs": ["/opt/cni/bin"],
    "cni_conf_dir": "/etc/cni/net.d",
    "bin_dir": "/usr/local/bin",
    "ignore_routes": [],
    "min_free_mib": 1,
    "max_clock_skew": 60,
    "now": None,
    "version": "1.1.0",
    "checksum": "d" * 64,
    "keep": 3,
    "conflist": None,
    "may_change_pod_cidr": False,
    "awaits_pod_cidr": False,
}


@pytest.mark.parametrize(
    ("skew", "said"), [(0, ""), (59, ""), (-59, ""), (3600, "ahead of"), (-3600, "behind")]
)
def test_a_clock_that_is_off_is_told(skew, said):
    problems = preflight_machine.clock({**GIVEN, "now": 1000.0}, 1000.0 + skew)
    assert bool(problems) == bool(said)
    assert said in "".join(problems)


@pytest.mark.parametrize(
    ("cidrs", "enable", "count"),
    [
        ("10.1.2.0/24", None, 0),
        ("10.1.2.0/24", True, 1),
        ("10.1.2.0/24", False, 0),
        ("10.1.2.0/24,fd00:1::/64", True, 0),
        ("10.1.2.0/24,fd00:1::/64", False, 1),
        ("10.1.2.1/24", None, 1),
        ("10.1.2.0/31", None, 1),
    ],
)
def test_pod_cidrs_are_found_or_refused(cidrs, enable, count):
    config = {"network": {"podCIDR": {"nodeLocal": cidrs}}}
    _, problems = preflight_network.pod_cidrs(config, {**GIVEN, "enable_ipv6": enable})
    assert len(problems) == count


def test_a_guess_is_a_problem_only_where_it_was_said_to_be():
    config = {"network": {"podCIDR": {"base": "10.1.0.0/16"}}}
    assert preflight_network.pod_cidrs(config, GIVEN)[1] == []
    problems = preflight_network.pod_cidrs(config, {**GIVEN, "require_pod_cidr": True})[1]
    assert "set headcni_node_pod_cidr" in problems[0]


@pytest.fixture
def routes(monkeypatch):
    known = [
        kernel.Route(ip_network("192.168.1.0/24"), "eth0", True),
        kernel.Route(ip_network("10.0.0.0/8"), "eth0", False),
    ]
    monkeypatch.setattr(kernel, "routes", lambda _: known)
    return known


def overlaps(own, config=None, **given):
    cidrs = [ip_network(one) for one in own.split(",")]
    return preflight_network.overlaps(config or {}, cidrs, {**GIVEN, **given})


def test_a_range_of_its_own_overlaps_nothing(routes):
    assert overlaps("10.1.2.0/24") == []


def test_the_underlay_may_not_be_taken(routes):
    assert (
        "overlaps 192.168.1.0/24, which this node reaches by eth0" in overlaps("192.168.1.0/24")[0]
    )
    assert overlaps("192.168.1.0/24", ignore_routes=["192.168.1.0/24"]) == []


def test_the_clusters_range_may_not_cover_the_underlay(routes):
    config = {"network": {"podCIDR": {"base": "192.168.0.0/16"}}}
    assert "cluster CIDR: 192.168.0.0/16" in overlaps("192.168.7.0/24", config)[0]


def test_the_services_may_not_be_taken(routes):
    config = {"network": {"serviceCIDR": "10.96.0.0/12,fd00:96::/108"}}
    assert overlaps("10.100.0.0/24", config) == [
        "pod CIDR: 10.100.0.0/24 overlaps the services' 10.96.0.0/12"
    ]


def test_a_port_that_is_taken_is_told_with_its_holder():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        problems = preflight_machine.services({"monitoring": {"port": number}})
    assert f"tcp port {number} is held by" in problems[-1]
    assert "headcni_node_monitoring_port" in problems[-1]


def test_the_port_of_our_own_daemon_is_no_problem(monkeypatch):
    ours = kernel.Holder(1, "headcni-daemon")
    monkeypatch.setattr(kernel, "port_holder", lambda *_: ours)
    monkeypatch.setattr(node, "has_systemd", lambda: True)
    assert preflight_machine.services({}) == []
    assert len(preflight_machine.services({"tailscale": {"mode": "daemon"}})) == 1


def test_a_machine_without_systemd_is_told(monkeypatch):
    monkeypatch.setattr(node, "has_systemd", lambda: False)
    assert any(
        one.startswith("systemd:")
        for one in preflight_machine.services({"monitoring": {"enabled": False}})
    )


def test_paths_that_cannot_be_used_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(node_release, "ROOT", str(tmp_path / "opt"))
    (tmp_path / "file").write_text("")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "headcni").write_text("another program")
    given = {**GIVEN, "cni_bin_dirs": [str(tmp_path / "bin"), "relative"], "min_free_mib": 1 << 30}
    given["bin_dir"] = str(tmp_path / "file" / "bin")
    problems = preflight_install.places(given)
    assert any("MiB free for" in one and "make room" in one for one in problems)
    assert any("headcni is another program" in one for one in problems)
    assert "path: 'relative', expected an absolute one" in problems
    assert any("file is not a directory" in one for one in problems)


def test_an_interface_of_our_name_that_is_no_bridge_is_told(monkeypatch):
    monkeypatch.setattr(kernel, "is_bridge", lambda name: False if name == "headcni0" else None)
    assert "headcni_node_bridge" in preflight_network.names({}, GIVEN)[0]
    assert preflight_network.names({}, {**GIVEN, "datapath": "routed"}) == []


def test_a_kernel_that_lacks_something_is_told_what(monkeypatch):
    monkeypatch.setattr(node_platform, "container", lambda: "")
    monkeypatch.setattr(kernel, "lacks_tun", lambda: "No such device")
    monkeypatch.setattr(kernel, "lacks_link", lambda kind: "Operation not supported")
    problems = preflight_machine.kernel_features(GIVEN)
    assert [one.partition(":")[0] for one in problems] == ["kernel"] * len(problems)
    assert len([one for one in problems if "load the module" in one]) >= 3


def runtime(name="containerd", **known) -> container_runtimes.Runtime:
    return container_runtimes.Runtime(name, "config.toml", **known)


def test_where_the_container_runtime_looks_is_compared(monkeypatch):
    """test_container_runtimes.py has all the ways in which it can differ."""
    found = [runtime(bin_dirs=("/usr/lib/cni",))]
    monkeypatch.setattr(container_runtimes, "running", lambda: found)
    monkeypatch.setattr(container_runtimes, "of_kubelet", lambda running: running)
    (problem,), notes = preflight_cni.runtimes(GIVEN)
    assert "headcni_node_cni_bin_dirs: [/opt/cni/bin, /usr/lib/cni]" in problem and notes == []
    found[:] = [runtime("CRI-O", network="mine")]
    assert preflight_cni.runtimes({**GIVEN, "conflist": {"name": "mine"}}) == ([], [])
    found.clear()
    problems, (note,) = preflight_cni.runtimes(GIVEN)
    assert problems == [] and "none runs on this node" in note


@pytest.mark.parametrize(
    ("interface", "said"),
    [
        ("cni0", ("which is flannel's", "docs/k3s.md#from-flannel", "headcni_node_cluster_cidr")),
        ("docker0", ("which is Docker's", "/etc/docker/daemon.json", "headcni_node_cluster_cidr")),
        ("virbr0", ("which is libvirt's", "virsh net-edit", "headcni_node_cluster_cidr")),
        ("eth1", ("headcni_node_cluster_cidr", "headcni_node_ignore_routes: [10.42.1.0/24]")),
    ],
)
def test_an_overlap_names_whose_network_it_is_and_how_to_change_either(
    monkeypatch, interface, said
):
    monkeypatch.setattr(other_networks, "has_flannel", lambda root: True)
    route = kernel.Route(ip_network("10.42.1.0/24"), interface, True)
    monkeypatch.setattr(kernel, "routes", lambda _: [route])
    problem = overlaps("10.42.1.0/24")[0]
    assert f"which this node reaches by {interface}" in problem
    assert all(one in problem for one in said)


def test_what_becomes_of_other_conflists_is_a_note(tmp_path):
    (tmp_path / "05-other.conf").write_text('{"name": "x"}')
    (tmp_path / "00-multus.conf").write_text('{"name": "multus"}')
    options = {"directory": str(tmp_path), "keep": ["00-multus.conf"]}
    given = {**GIVEN, "cni_conf_dir": str(tmp_path), "conflist": options}
    notes = "\n".join(preflight.notes({}, [ip_network("10.1.2.0/24")], given))
    assert "05-other.conf in" in notes and "uninstall.yml puts it back" in notes
    assert "00-multus.conf is kept, and comes before 10-headcni.conflist" in notes


def test_a_container_without_tun_is_told_its_hosts_part(monkeypatch):
    monkeypatch.setattr(kernel, "lacks_tun", lambda: "Operation not permitted")
    monkeypatch.setattr(node_platform, "container", lambda: "lxc")
    assert "lxc.mount.entry: /dev/net/tun" in preflight_machine.kernel_features(GIVEN)[0]


def test_the_module_reports_problems_and_notes_of_this_machine():
    """All of it at once, on a real machine: nothing of it may break."""
    told = run(
        "headcni_preflight",
        config={"network": {"podCIDR": {"nodeLocal": "10.1.2.0/24"}}},
        conflist={"name": "headcni"},
        report_only=True,
    )
    assert all(isinstance(one, str) for one in (*told["problems"], *told["notes"]))
    assert told["pod_cidrs"] == ["10.1.2.0/24"]
    broken = run("headcni_preflight", config={"network": "x"}, report_only=True)
    assert broken["pod_cidrs"] == []


def test_somebody_who_is_not_root_is_told(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "ansible_become" in preflight_machine.root()[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, ""),
        ({"version": None, "checksum": None}, ""),
        ({"version": "1.0.0", "checksum": ""}, ""),
        (
            {"version": "2.0.0", "checksum": ""},
            "version: 2.0.0 is not on this node, which has: 1.0.0",
        ),
        ({"keep": 1}, "keep: 1, expected 2 or more"),
    ],
)
def test_a_release_that_could_not_be_is_told(monkeypatch, given, said):
    there = [node_release.Release("1.0.0", "1.0.0", "", "/opt/headcni/releases/1.0.0")]
    monkeypatch.setattr(node_release, "installed", lambda: there)
    problems = preflight_install.release({**GIVEN, **given})
    assert bool(problems) == bool(said)
    assert said in "".join(problems)


@pytest.mark.parametrize(
    ("had", "asked", "given", "said"),
    [
        ("", "10.1.2.0/24", {}, ""),
        ("10.1.2.0/24", "10.1.2.0/24", {}, ""),
        ("10.1.2.0/24", "10.1.2.0/24,fd00:1::/64", {}, ""),  # both, from now on
        ("10.1.2.0/24", "10.1.9.0/24", {}, "has 10.1.2.0/24, and 10.1.9.0/24 is asked for"),
        ("10.1.2.0/24,fd00:1::/64", "10.1.2.0/24", {}, "has fd00:1::/64, and 10.1.2.0/24"),
        ("10.1.2.0/24", "10.1.9.0/24", {"may_change_pod_cidr": True}, ""),
        ("10.1.2.0/24", "10.1.9.0/24", {"awaits_pod_cidr": True}, ""),
    ],
)
def test_a_node_keeps_its_pod_cidr(monkeypatch, tmp_path, had, asked, given, said):
    """Its pods would keep addresses at which nobody reaches them, and Headscale the route."""
    path = str(tmp_path / "config.yaml")
    monkeypatch.setattr(node_config, "PATH", path)
    if had:
        config = {"network": {"podCIDR": {"nodeLocal": had, "base": "10.1.0.0/16"}}}
        pinned = node_config.pinned(config, node_config.resolved(config, {}))
        node_config.write(path, node_config.render(pinned))
    cidrs = [ip_network(one) for one in asked.split(",")]
    problems = preflight_network.former_cidrs(cidrs, {**GIVEN, **given})
    assert bool(problems) == bool(said)
    assert said in "".join(problems)
