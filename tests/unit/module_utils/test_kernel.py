"""What is read of the kernel: routes, and who holds a port."""

from __future__ import annotations

import errno
import os
import socket
from ipaddress import ip_network

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import kernel, preflight_machine
from ansible_collections.headcni.mesh.plugins.module_utils.kernel import Route

ROUTE4 = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t0100A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t0000A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
eth0\t0000000A\t0100A8C0\t0003\t0\t0\t0\t000000FF\t0\t0\t0
headcni0\t0001370A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
*\t0001370A\t00000000\t0201\t0\t0\t2147483647\t00FFFFFF\t0\t0\t0
"""
ROUTE6 = (
    "fd000000000000000000000000000000 40 00000000000000000000000000000000 00 "
    "00000000000000000000000000000000 00000100 00000001 00000000 00000001 eth0\n"
    "fe800000000000000000000000000000 40 00000000000000000000000000000000 00 "
    "00000000000000000000000000000000 00000100 00000001 00000000 00000001 eth0\n"
    "00000000000000000000000000000000 00 00000000000000000000000000000000 00 "
    "fd000000000000000000000000000001 00000400 00000001 00000000 00000003 eth0\n"
    "00000000000000000000000000000001 80 00000000000000000000000000000000 00 "
    "00000000000000000000000000000000 00000000 00000002 00000000 80200001 lo\n"
)


def net(text):
    return ip_network(text)


def test_routes_are_read_without_the_default_ones_and_our_own(tmp_path):
    (tmp_path / "route").write_text(ROUTE4)
    (tmp_path / "ipv6_route").write_text(ROUTE6)
    assert kernel.routes(lambda name: name == "headcni0", str(tmp_path)) == [
        Route(net("192.168.0.0/24"), "eth0", True),
        Route(net("10.0.0.0/8"), "eth0", False),
        Route(net("fd00::/64"), "eth0", True),
    ]


def test_a_kernel_without_ipv6_has_no_such_routes(tmp_path):
    (tmp_path / "route").write_text(ROUTE4)
    assert all(r.network.version == 4 for r in kernel.routes(lambda _: False, str(tmp_path)))


@pytest.mark.parametrize(
    ("route", "connected", "clash"),
    [
        ("10.1.2.0/24", True, True),  # the very same
        ("10.1.2.128/25", False, True),  # a part of it elsewhere
        ("10.0.0.0/8", True, True),  # our neighbours' own range
        ("10.0.0.0/8", False, False),  # a company's wide route by a gateway: ours is narrower
        ("10.1.3.0/24", True, False),
        ("fd00::/64", True, False),
    ],
)
def test_which_routes_clash(route, connected, clash):
    found = list(kernel.clashes([net("10.1.2.0/24")], [Route(net(route), "eth0", connected)], []))
    assert bool(found) == clash


def test_a_route_that_may_be_overlapped_does_not_clash():
    route = Route(net("10.0.0.0/8"), "eth0", True)
    assert not list(kernel.clashes([net("10.1.2.0/24")], [route], [net("10.0.0.0/8")]))


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_who_holds_a_port_is_named(protocol):
    kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM
    with socket.socket(socket.AF_INET, kind) as taken:
        taken.bind(("127.0.0.1", 0))
        if protocol == "tcp":
            taken.listen()
        number = taken.getsockname()[1]
        holder = kernel.port_holder("127.0.0.1", number, protocol)
        assert holder is not None and holder.pid == os.getpid()
        assert str(os.getpid()) in str(holder)
    assert kernel.port_holder("127.0.0.1", number, protocol) is None


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["/usr/bin/python3", "-IS", "/opt/headcni/current/bin/headcni-daemon"], "headcni-daemon"),
        (["/usr/sbin/nginx", "-g", "daemon off;"], "nginx"),
        (["python3"], "python3"),
    ],
)
def test_a_script_is_called_by_its_own_name(words, program):
    assert kernel._program(words) == program


def test_what_a_child_finds_comes_back(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        kernel.apart(lambda: 1, str(tmp_path / "no-namespace"))


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a network namespace")
def test_links_are_tried_out_apart_from_this_machine():
    assert kernel.lacks_link("veth") == ""
    assert kernel.lacks_frame_filters() == ""
    assert kernel.lacks_link("no-such-kind") == "Operation not supported"
    assert "probe0" not in os.listdir("/sys/class/net")


def test_anti_spoofing_needs_a_kernel_that_can_check_frames(monkeypatch):
    said = "kernel: no filters of tc for anti-spoofing: No such file or directory; "
    for name in ("lacks_tun", "lacks_nftables", "lacks_rules"):
        monkeypatch.setattr(kernel, name, lambda: "")
    monkeypatch.setattr(kernel, "lacks_link", lambda _kind: "")
    monkeypatch.setattr(kernel, "apart", lambda work: work())
    monkeypatch.setattr(kernel, "_asked", lambda *_: errno.ENOENT)
    (problem,) = preflight_machine.kernel_features({"datapath": "bridge", "conflist": None})
    assert problem.startswith(said)
    assert "cls_bpf" in problem
    without = {"datapath": "bridge", "conflist": {"anti_spoofing": False}}
    assert preflight_machine.kernel_features(without) == []


def test_policies_on_a_bridge_need_br_netfilter_loaded_or_installed(tmp_path):
    proc = str(tmp_path / "proc")
    assert kernel.lacks_bridge_filter(proc, "/bin/true") == ""
    assert "neither loaded nor installed" in kernel.lacks_bridge_filter(proc, "/bin/false")
    assert "neither loaded nor installed" in kernel.lacks_bridge_filter(proc, "/no/modprobe")
    loaded = tmp_path / "proc/sys/net/bridge/bridge-nf-call-iptables"
    loaded.parent.mkdir(parents=True)
    loaded.touch()
    assert kernel.lacks_bridge_filter(proc, "/bin/false") == ""


def test_preflight_names_what_a_node_lacks_for_policies(monkeypatch):
    for name in ("tun", "nftables", "rules", "frame_filters"):
        monkeypatch.setattr(kernel, f"lacks_{name}", lambda: "")
    monkeypatch.setattr(kernel, "lacks_link", lambda _kind: "")
    monkeypatch.setattr(kernel, "lacks_bridge_filter", lambda: "it is not installed")
    given = {"datapath": "bridge", "conflist": {"network_policy": True}}
    (problem,) = preflight_machine.kernel_features(given)
    assert problem.startswith("kernel: no network policies on a bridge: it is not installed; ")
    assert problem.endswith("or set headcni_node_datapath: routed")
    assert preflight_machine.kernel_features({**given, "datapath": "routed"}) == []
    assert preflight_machine.kernel_features({"datapath": "bridge", "conflist": {}}) == []
    assert preflight_machine.policies(given) == []
    given["conflist"]["anti_spoofing"] = False
    assert "headcni_node_anti_spoofing: true" in preflight_machine.policies(given)[0]


def test_a_device_that_is_not_there_is_missed(tmp_path):
    assert kernel.lacks_tun(str(tmp_path / "tun")) == "No such file or directory"
