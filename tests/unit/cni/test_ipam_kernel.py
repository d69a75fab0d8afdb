"""Is an address in use on this node, by /proc."""

from __future__ import annotations

import subprocess
from ipaddress import ip_address
from pathlib import Path

import pytest

from headcni.ipam.kernel import in_use

FIB_TRIE = """\
Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 10.1.2.0/24 2 0 2
        |-- 10.1.2.0
           /24 link UNICAST
        |-- 10.1.2.7
           /32 link UNICAST
        |-- 10.1.2.70
           /31 link UNICAST
Id 52:
  +-- 100.64.0.0/10 2 0 2
     |-- 100.64.0.9
        /32 link UNICAST
Local:
  +-- 10.1.2.0/24 2 0 2
     |-- 10.1.2.1
        /24 link UNICAST
        /32 host LOCAL
     |-- 10.1.2.255
        /32 link BROADCAST
"""
ZEROES = "0" * 32
IPV6_ROUTE = "".join(
    f"{int(ip_address(address)):032x} {length} {ZEROES} 00 {ZEROES} 00000400 00000001 00000000"
    f" {flags}     eth0\n"
    for address, length, flags in [
        ("fd00:1::", "40", "00000001"),
        ("fd00:1::7", "80", "80200001"),
        ("fd00:1::8", "80", "01000003"),
        ("::", "00", "00000003"),
    ]
)


@pytest.fixture
def proc_net(tmp_path) -> str:
    (tmp_path / "fib_trie").write_text(FIB_TRIE)
    (tmp_path / "ipv6_route").write_text(IPV6_ROUTE)
    return str(tmp_path)


@pytest.mark.parametrize(
    "address", ["10.1.2.1", "10.1.2.7", "10.1.2.255", "100.64.0.9", "fd00:1::7"]
)
def test_the_hosts_own_addresses_and_routes_to_one_are_in_use(proc_net, address):
    assert in_use(ip_address(address), proc_net)


@pytest.mark.parametrize("address", ["10.1.2.0", "10.1.2.70", "10.1.2.2", "fd00:1::", "fd00:1::9"])
def test_an_address_that_only_lies_in_a_routed_subnet_is_free(proc_net, address):
    assert not in_use(ip_address(address), proc_net)


def test_a_remembered_path_is_no_route(proc_net):
    assert not in_use(ip_address("fd00:1::8"), proc_net)


def test_a_kernel_without_these_files_is_taken_to_have_nothing(tmp_path):
    assert not in_use(ip_address("10.1.2.7"), str(tmp_path))
    assert not in_use(ip_address("fd00:1::7"), str(tmp_path))


def test_the_real_kernel_has_its_loopback_address():
    assert in_use(ip_address("127.0.0.1"))
    assert not in_use(ip_address("192.0.2.200"))
    if Path("/proc/net/if_inet6").exists() and "00000001 01 80 10" in (
        Path("/proc/net/if_inet6").read_text()
    ):
        assert in_use(ip_address("::1"))


def test_a_real_route_to_a_pod_is_seen(tmp_path):
    script = (
        "ip link set lo up && ip route add 10.99.0.7/32 dev lo"
        " && ip -6 route add fd99::7/128 dev lo"
        " && cp /proc/self/net/fib_trie /proc/self/net/ipv6_route ."
    )
    made = subprocess.run(["unshare", "-n", "sh", "-c", script], cwd=tmp_path, capture_output=True)
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.decode()}")
    assert in_use(ip_address("10.99.0.7"), str(tmp_path))
    assert in_use(ip_address("fd99::7"), str(tmp_path))
    assert not in_use(ip_address("10.99.0.8"), str(tmp_path))
    assert not in_use(ip_address("fd99::8"), str(tmp_path))
