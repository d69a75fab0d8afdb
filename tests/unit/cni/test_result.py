"""Results in each version's own shape, and back."""

from __future__ import annotations

import json

import pytest

from headcni import errors
from headcni.model import Dns, IpamConfig, Lease, LeasedAddress, Owner
from headcni.plugins import headcni_ipam
from headcni.result import before, read, shape
from headcni.skel import ALL_VERSIONS, VERSIONS

FULL = {
    "cniVersion": "1.1.0",
    "interfaces": [
        {"name": "headcni0", "mac": "02:00:00:00:00:01", "mtu": 1280},
        {
            "name": "eth0",
            "mac": "02:00:00:00:00:02",
            "mtu": 1280,
            "sandbox": "/run/netns/x",
            "socketPath": "/run/vhost.sock",
            "pciID": "0000:00:1f.6",
        },
    ],
    "ips": [
        {"interface": 1, "address": "10.1.2.3/24", "gateway": "10.1.2.1"},
        {"interface": 0, "address": "fd00:1::3/64"},
    ],
    "routes": [
        {"dst": "0.0.0.0/0"},
        {
            "dst": "fd99::/64",
            "gw": "fd00:1::1",
            "mtu": 1400,
            "advmss": 1340,
            "priority": 7,
            "table": 51,
            "scope": 0,
        },
    ],
    "dns": {
        "nameservers": ["100.100.100.100"],
        "domain": "mesh",
        "search": ["pods.mesh"],
        "options": ["ndots:5"],
    },
}
PLAIN_INTERFACES = [
    {"name": "headcni0", "mac": "02:00:00:00:00:01"},
    {"name": "eth0", "mac": "02:00:00:00:00:02", "sandbox": "/run/netns/x"},
]
PLAIN_ROUTES = [{"dst": "0.0.0.0/0"}, {"dst": "fd99::/64", "gw": "fd00:1::1"}]
IPS_WITH_VERSION = [
    {"version": "4", "interface": 1, "address": "10.1.2.3/24", "gateway": "10.1.2.1"},
    {"version": "6", "interface": 0, "address": "fd00:1::3/64"},
]
SHAPES = {
    "0.3.1": (PLAIN_INTERFACES, IPS_WITH_VERSION, PLAIN_ROUTES),
    "0.4.0": (PLAIN_INTERFACES, IPS_WITH_VERSION, PLAIN_ROUTES),
    "1.0.0": (PLAIN_INTERFACES, FULL["ips"], PLAIN_ROUTES),
    "1.1.0": (FULL["interfaces"], FULL["ips"], FULL["routes"]),
}


def with_values(**changes):
    return {**json.loads(json.dumps(FULL)), **changes}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_result_has_the_shape_of_the_version_that_was_asked_for(version):
    interfaces, ips, routes = SHAPES[version]
    assert shape(FULL, version) == {
        "cniVersion": version,
        "interfaces": interfaces,
        "ips": ips,
        "routes": routes,
        "dns": FULL["dns"],
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_version_can_say_survives_being_shaped_and_read(version):
    interfaces, _, routes = SHAPES[version]
    assert read(shape(FULL, version), version) == with_values(interfaces=interfaces, routes=routes)


@pytest.mark.parametrize("version", VERSIONS)
def test_shaping_leaves_the_canonical_result_as_it_was(version):
    kept = with_values()
    shape(kept, version)
    assert kept == FULL


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_empty_is_left_out(version):
    hollow = {"interfaces": [], "ips": None, "routes": [], "dns": {"search": [], "domain": ""}}
    assert shape(hollow, version) == {"cniVersion": version}
    assert read({**hollow, "cniVersion": version}, version) == {"cniVersion": "1.1.0"}


def test_a_zero_is_kept_where_it_says_something():
    shaped = shape(
        {
            "interfaces": [{"name": "eth0", "mtu": 0}],
            "ips": [{"address": "10.1.2.3/24", "interface": 0}],
            "routes": [{"dst": "10.0.0.0/8", "table": 0, "scope": 0, "mtu": 0, "priority": 0}],
        },
        "1.1.0",
    )
    assert shaped["interfaces"] == [{"name": "eth0"}]
    assert shaped["ips"] == [{"address": "10.1.2.3/24", "interface": 0}]
    assert shaped["routes"] == [{"dst": "10.0.0.0/8", "table": 0, "scope": 0}]


@pytest.mark.parametrize("version", ["0.3.1", "1.0.0"])
def test_a_prev_result_without_a_version_is_of_the_configurations(version):
    prev_result = shape(FULL, version)
    del prev_result["cniVersion"]
    assert read(prev_result, version) == read(shape(FULL, version), version)


def test_a_result_that_names_its_version_is_read_by_that_one():
    assert read(shape(FULL, "0.4.0"), "1.1.0")["ips"] == FULL["ips"]
    with pytest.raises(errors.CniError) as caught:
        read({"cniVersion": "0.2.0", "ip4": {"ip": "10.1.2.3/24"}}, "1.1.0")
    assert caught.value.code == errors.INCOMPATIBLE_VERSION


def test_what_libcni_writes_into_older_results_is_kept():
    old = {**FULL, "cniVersion": "0.4.0"}
    assert read(old, "0.4.0") == FULL


@pytest.mark.parametrize("version", ["0.5.0", "1.2.0", "", None, 1])
def test_an_unknown_version_is_refused_with_those_that_are_known(version):
    with pytest.raises(errors.CniError) as caught:
        shape(FULL, version)
    assert caught.value.code == errors.INCOMPATIBLE_VERSION
    assert json.dumps(version) in caught.value.details
    assert "0.3.1, 0.4.0, 1.0.0, 1.1.0" in caught.value.details


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ips": {}}, "ips is {}: expected a list"),
        ({"ips": ["10.1.2.3/24"]}, 'ips[0] is "10.1.2.3/24": expected an object'),
        ({"ips": [None]}, "ips[0].address is missing"),
        (
            {"ips": [{"address": "10.1.2.3"}]},
            'ips[0].address is "10.1.2.3": expected an address in',
        ),
        ({"ips": [{"address": "10.1.2/24"}]}, "expected an address in CIDR notation"),
        ({"ips": [{"address": "10.1.2.3/33"}]}, "expected an address in CIDR notation"),
        ({"ips": [{"address": "10.1.2.3/24", "gateway": "x"}]}, "expected an IP address"),
        ({"ips": [{"address": "10.1.2.3/24", "interface": "0"}]}, "expected a number"),
        ({"ips": [{"address": "10.1.2.3/24", "interface": True}]}, "expected a number"),
        ({"interfaces": [{"mac": "x"}]}, "interfaces[0].name is missing"),
        ({"interfaces": [{"name": 7}]}, "interfaces[0].name is 7: expected a string"),
        ({"routes": [{"gw": "10.1.2.1"}]}, "routes[0].dst is missing"),
        ({"dns": []}, "dns is []: expected an object"),
        ({"dns": {"search": "x"}}, 'dns.search is "x": expected a list of strings'),
    ],
)
def test_a_malformed_result_is_refused_by_the_path_of_its_mistake(changes, said):
    with pytest.raises(errors.CniError) as caught:
        read(with_values(**changes), "1.1.0")
    assert caught.value.code == errors.INVALID_CONFIG
    assert said in caught.value.details


def test_all_mistakes_of_a_result_are_named_at_once():
    with pytest.raises(errors.CniError) as caught:
        read(with_values(ips=[{}], dns=7), "1.1.0")
    assert caught.value.details == "ips[0].address is missing; dns is 7: expected an object"


def test_addresses_are_written_as_everybody_writes_them():
    given = {"ips": [{"address": "FD00:1:0::3/64", "gateway": "FE80::0:1"}]}
    assert read(given, "1.0.0")["ips"] == [{"address": "fd00:1::3/64", "gateway": "fe80::1"}]


def test_versions_are_ordered():
    assert before("0.3.1", "0.4.0")
    assert before("0.3.0", "0.3.1")
    assert not before("1.1.0", "1.1.0")


@pytest.mark.parametrize("version", ALL_VERSIONS)
def test_our_ipam_answers_in_the_same_shapes(version):
    """Two pieces of code know the shapes: this one, and headcni-ipam."""
    network = IpamConfig("headcni-ipam", raw={"routes": FULL["routes"]})
    addresses = (
        LeasedAddress(*parsed("10.1.2.3/24", "10.1.2.1")),
        LeasedAddress(*parsed("fd00:1::3/64", None)),
    )
    lease = Lease(Owner("pods", "c1", "eth0"), "", addresses)
    dns = Dns(("100.100.100.100",), "mesh", ("pods.mesh",), ("ndots:5",))
    ips = [{k: v for k, v in ip.items() if k != "interface"} for ip in FULL["ips"]]
    expected = shape({"ips": ips, "routes": FULL["routes"], "dns": FULL["dns"]}, version)
    assert headcni_ipam.result(lease, network, dns, version) == expected


def parsed(cidr, gateway):
    from ipaddress import ip_address, ip_interface

    interface = ip_interface(cidr)
    return interface.ip, interface.network.prefixlen, gateway and ip_address(gateway)
