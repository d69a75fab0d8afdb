"""A netconf becomes one typed value, or every mistake is named at once."""

from __future__ import annotations

import json
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headcni import config, subnet_env, validation
from headcni.config import parse
from headcni.errors import (
    BAD_ENVIRONMENT,
    INCOMPATIBLE_VERSION,
    INVALID_CONFIG,
    UNDECODABLE,
    CniError,
)
from headcni.model import Bandwidth, Dns, NetworkConfig, PodRef, PortMapping
from headcni.problems import Problem, UnknownKey, render
from headcni.shared.conflist import Options, build
from headcni.skel import Call, pod_ref, split_cni_args, valid_attachments
from headcni.validation import problems

GOOD = {
    "cniVersion": "1.0.0",
    "name": "mesh",
    "type": "headcni",
    "pod_cidr": "10.244.1.0/24",
}


busy_machine = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(autouse=True)
def no_subnet_env_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subnet_env, "DEFAULT_FILE", str(tmp_path / "none" / "subnet.env"))


def text(**changes: Any) -> bytes:
    """The good netconf with some keys changed; None takes one away."""
    conf = {**GOOD, **changes}
    return json.dumps({key: value for key, value in conf.items() if value is not None}).encode()


def network(env: dict[str, str] | None = None, /, **changes: Any) -> NetworkConfig:
    return parse(text(**changes), env or {})


def mistakes(env: dict[str, str] | None = None, /, **changes: Any) -> list[Problem]:
    return problems(text(**changes), env or {})


def runtime(**given: Any) -> dict[str, Any]:
    return {"runtimeConfig": given}


def ipam(**given: Any) -> dict[str, Any]:
    return {"pod_cidr": None, "ipam": {"type": "headcni-ipam", **given}}


def test_the_smallest_netconf_gets_every_default() -> None:
    assert network() == NetworkConfig(
        cni_version="1.0.0",
        name="mesh",
        ipam=network().ipam,
        pod_cidrs=(ip_network("10.244.1.0/24"),),
        raw=GOOD,
    )
    [[only]] = network().ipam.range_sets
    assert only.subnet == ip_network("10.244.1.0/24")
    assert only.gateway == ip_address("10.244.1.1")


def test_the_example_of_the_original_documents_is_understood() -> None:
    conf = parse(
        b"""{
          "cniVersion": "1.0.0", "name": "tailscale-cni", "type": "headcni",
          "headscale_url": "https://hs.binrc.com",
          "tailscale_socket": "/var/run/tailscale/tailscaled.sock",
          "pod_cidr": "10.244.0.0/24", "service_cidr": "10.96.0.0/16",
          "ipam": {"type": "host-local", "subnet": "10.244.0.0/24",
                   "rangeStart": "10.244.0.10", "rangeEnd": "10.244.0.254",
                   "gateway": "10.244.0.1"},
          "magic_dns": {"enable": true, "base_domain": "cluster.local",
                        "nameservers": ["10.2.0.1"], "search_domains": ["c.binrc.com"]},
          "mtu": 1280, "enable_ipv6": false, "enable_network_policy": true
        }""",
        {},
    )
    assert conf.headscale_url == "https://hs.binrc.com"
    assert conf.service_cidrs == (ip_network("10.96.0.0/16"),)
    assert conf.dns == Dns(("10.2.0.1",), "cluster.local", ("c.binrc.com",))
    assert str(conf.ipam.range_sets[0][0].start) == "10.244.0.10"
    assert conf.enable_network_policy is True, "the verbs decide what to make of it"


def test_the_examples_of_the_meta_plugin_are_understood() -> None:
    env = {"HEADCNI_SUBNET": "10.244.1.0/24"}
    one = parse(
        b'{"cniVersion": "0.4.0", "name": "headcni-network", "type": "headcni",'
        b' "delegate": {"type": "bridge", "bridge": "cni0"}}',
        env,
    )
    assert one.delegates == ({"type": "bridge", "bridge": "cni0"},)
    chain = parse(
        b'{"cniVersion": "0.4.0", "name": "headcni-chain", "type": "headcni", "plugins": ['
        b' {"type": "headcni", "delegate": {"type": "bridge"}},'
        b' {"type": "portmap", "capabilities": {"portMappings": true}}]}',
        env,
    )
    assert [conf["type"] for conf in chain.delegates] == ["headcni", "portmap"]


def test_what_the_conflist_builder_writes_is_without_a_mistake() -> None:
    conf = build(
        Options(
            ["10.244.1.0/24", "fd00:244:0:1::/64"],
            cluster_cidrs=["10.244.0.0/16", "fd00:244::/48"],
            service_cidrs=["10.96.0.0/16", "fd00:96::/108"],
            headscale_url="https://hs.example.org",
            tailscale_socket="/run/tailscale/tailscaled.sock",
            magic_dns={"enable": True, "base_domain": "mesh.example.org"},
            datapath="routed",
            mode="daemon",
            strategy="random",
        )
    )
    assert validation.conflist_problems(json.dumps(conf).encode(), {}) == []
    plugin = {**conf["plugins"][0], "name": conf["name"], "cniVersion": "1.1.0"}
    made = parse(json.dumps(plugin).encode(), {})
    assert (made.datapath, made.mode, made.enable_ipv6) == ("routed", "daemon", True)
    assert made.ipam.strategy == "random"
    assert len(made.ipam.range_sets) == 2


@pytest.mark.parametrize("version", ["0.3.1", "0.4.0", "1.0.0", "1.1.0"])
def test_four_versions_are_spoken(version: str) -> None:
    assert network(cniVersion=version).cni_version == version


@pytest.mark.parametrize("version", [None, "0.1.0", "0.2.0", "0.3.0", "1.2.0", "", 1, ["1.0.0"]])
def test_other_versions_are_refused_by_the_code_for_it(version: Any) -> None:
    with pytest.raises(CniError) as refused:
        network(cniVersion=version)
    assert refused.value.code == INCOMPATIBLE_VERSION
    assert "0.3.1, 0.4.0, 1.0.0, 1.1.0" in refused.value.details
    assert [p.path for p in mistakes(cniVersion=version)] == ["cniVersion"]


@pytest.mark.parametrize(
    "stdin",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe\x00", b"{'name': 1}", b"[" * 100_000, b"{}{}"],
)
def test_what_is_no_json_object_is_undecodable(stdin: bytes) -> None:
    with pytest.raises(CniError) as refused:
        parse(stdin, {})
    assert refused.value.code == UNDECODABLE
    [problem] = problems(stdin, {})
    assert "valid JSON" in problem.expected


# What is changed in the good netconf; the path that is named; what is said to be expected.
MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    ({"name": None}, "name", "letters"),
    ({"name": ""}, "name", "letters"),
    ({"name": "-mesh"}, "name", "starting with a letter"),
    ({"name": "a/b"}, "name", "letters"),
    ({"name": "a\n"}, "name", "letters"),
    ({"name": 7}, "name", "letters"),
    ({"type": None}, "type", "headcni"),
    ({"type": "bridge"}, "type", "headcni"),
    ({"disableCheck": "no"}, "disableCheck", "true or false"),
    ({"disableGC": 0}, "disableGC", "true or false"),
    ({"mtu": "1280"}, "mtu", "576 to 65535"),
    ({"mtu": 575}, "mtu", "576 to 65535"),
    ({"mtu": 65536}, "mtu", "576 to 65535"),
    ({"mtu": 1280.5}, "mtu", "576 to 65535"),
    ({"mtu": True}, "mtu", "576 to 65535"),
    ({"mtu": 1279, "pod_cidr": "fd00::/64"}, "mtu", "1280 to 65535"),
    ({"mode": "cluster"}, "mode", "host or daemon"),
    ({"mode": 1}, "mode", "host or daemon"),
    ({"datapath": "vxlan"}, "datapath", "bridge or routed"),
    ({"bridge": "sixteen-letters-"}, "bridge", "15 characters"),
    ({"bridge": "a b"}, "bridge", "15 characters"),
    ({"bridge": "tailscale0"}, "bridge", "not the system's"),
    ({"ipMasq": "yes"}, "ipMasq", "true or false"),
    ({"ip_masq": 1}, "ip_masq", "true or false"),
    ({"ip_masq": True, "ipMasq": False}, "ipMasq", "the same as ip_masq, which is true"),
    ({"hairpin": "on"}, "hairpin", "true or false"),
    ({"anti_spoofing": "no"}, "anti_spoofing", "true or false"),
    ({"anti_spoofing_exempt": "a/b"}, "anti_spoofing_exempt", "a list, of namespace/name"),
    ({"anti_spoofing_exempt": ["*"]}, "anti_spoofing_exempt[0]", "namespace/name of pods"),
    ({"anti_spoofing_exempt": ["a/b/c"]}, "anti_spoofing_exempt[0]", "namespace/name of pods"),
    ({"default_route": []}, "default_route", "true or false"),
    ({"isDefaultGateway": 1}, "isDefaultGateway", "true or false"),
    ({"enable_network_policy": "true"}, "enable_network_policy", "true or false"),
    ({"headscale_url": "hs.example.org"}, "headscale_url", "http:// or https://"),
    ({"headscale_url": "https://user:secret@hs"}, "headscale_url", "http:// or https://"),
    ({"headscale_url": "https://"}, "headscale_url", "http:// or https://"),
    ({"tailscale_socket": "tailscaled.sock"}, "tailscale_socket", "absolute path"),
    ({"data_dir": "var"}, "data_dir", "absolute path"),
    ({"dataDir": "var"}, "dataDir", "absolute path"),
    ({"subnet_file": "subnet.env"}, "subnet_file", "absolute path"),
    ({"delegate_timeout": 0}, "delegate_timeout", "more than 0"),
    ({"delegate_timeout": "60"}, "delegate_timeout", "seconds"),
    ({"pod_cidr": "10.244.1.7/24"}, "pod_cidr", "10.244.1.0/24"),
    ({"pod_cidr": ["fd00::7/64"]}, "pod_cidr[0]", "fd00::/64"),
    ({"pod_cidr": "10.244.1.0"}, "pod_cidr", "a CIDR such as"),
    ({"pod_cidr": 10}, "pod_cidr", "a CIDR or a list"),
    ({"pod_cidr": [10]}, "pod_cidr[0]", "a CIDR such as"),
    ({"pod_cidr": "10.244.1.0/31"}, "pod_cidr", "too small"),
    ({"pod_cidr": "fd00::/127"}, "pod_cidr", "too small"),
    ({"pod_cidr": "100.100.0.0/24"}, "pod_cidr", "Tailscale"),
    ({"pod_cidr": "224.0.0.0/24"}, "pod_cidr", "unicast"),
    ({"pod_cidr": "10.1.0.0/24,10.2.0.0/24"}, "pod_cidr", "one range of a family"),
    ({"pod_cidr": ["10.1.0.0/24", "10.1.0.0/25"]}, "pod_cidr[1]", "apart from 10.1.0.0/24"),
    ({"service_cidr": "10.244.0.0/16"}, "pod_cidr", "apart from service_cidr 10.244.0.0/16"),
    ({"service_cidr": "x"}, "service_cidr", "a CIDR such as"),
    ({"cluster_cidr": "10.245.0.0/16"}, "pod_cidr", "within cluster_cidr 10.245.0.0/16"),
    ({"cluster_cidr": ["10.244.0.0/16", "x"]}, "cluster_cidr[1]", "a CIDR such as"),
    (
        {"cluster_cidr": "10.244.0.0/16", "service_cidr": "10.244.9.0/24"},
        "cluster_cidr",
        "apart from service_cidr",
    ),
    ({"enable_ipv6": True}, "enable_ipv6", "an IPv6 range"),
    ({"enable_ipv6": False, "pod_cidr": "fd00::/64"}, "enable_ipv6", "true, as there is"),
    ({"enable_ipv6": "yes"}, "enable_ipv6", "true or false"),
    ({"pod_cidr": None}, "ipam", "subnet.env"),
    ({"pod_cidr": None, "ipam": {"type": "host-local"}}, "ipam", "ipam.subnet or ipam.ranges"),
    ({"ipam": []}, "ipam", "an object"),
    (ipam(subnet="10.1.0.9/24"), "ipam.subnet", "10.1.0.0/24"),
    (ipam(subnet="10.1.0.0/24", gateway="10.2.0.1"), "ipam.gateway", "an address in 10.1.0.0/24"),
    (ipam(subnet="10.1.0.0/24", gateway="169.254.1.1"), "ipam.gateway", "an address in"),
    (
        ipam(ranges=[[{"subnet": "10.1.0.0/24", "gateway": "10.2.0.1"}]]),
        "ipam.ranges[0][0].gateway",
        "an address in 10.1.0.0/24",
    ),
    (
        ipam(subnet="10.1.0.0/24", rangeStart="10.1.0.9", rangeEnd="10.1.0.8"),
        "ipam.rangeStart",
        "up to 10.1.0.8",
    ),
    (ipam(subnet="10.1.0.0/24", rangeEnd="10.1.1.8"), "ipam.rangeEnd", "an address in"),
    (ipam(subnet="10.1.0.0/24", strategy="first"), "ipam.strategy", "sequential"),
    (ipam(subnet="100.64.0.0/24"), "ipam.subnet", "Tailscale"),
    (
        {"service_cidr": "10.1.0.0/16", **ipam(subnet="10.1.0.0/24")},
        "ipam.subnet",
        "apart from service_cidr",
    ),
    ({"ipam": {"subnet": "10.9.0.0/24"}}, "ipam.subnet", "within pod_cidr 10.244.1.0/24"),
    ({"ipam": {"exclude": ["10.244.1.0/24"]}}, "ipam", "at least one address"),
    ({"ipam": {"gateway": "10.9.0.1"}}, "ipam.gateway", "an address in 10.244.1.0/24"),
    ({"magic_dns": {"enable": True}}, "magic_dns.enable", "beside it"),
    ({"magic_dns": {"base_domain": "x"}}, "magic_dns.enable", "true or false"),
    ({"magic_dns": []}, "magic_dns", "an object"),
    (
        {"magic_dns": {"enable": True, "nameservers": ["dns.example"]}},
        "magic_dns.nameservers[0]",
        "an IP address",
    ),
    (
        {"magic_dns": {"enable": True, "nameservers": "10.0.0.1"}},
        "magic_dns.nameservers",
        "a list",
    ),
    (
        {"magic_dns": {"enable": False, "base_domain": "no spaces"}},
        "magic_dns.base_domain",
        "a domain name",
    ),
    (
        {"magic_dns": {"enable": True, "search_domains": ["a..b"]}},
        "magic_dns.search_domains[0]",
        "a domain name",
    ),
    ({"dns": {"nameservers": [1]}}, "dns.nameservers[0]", "an IP address"),
    ({"dns": {"servers": ["10.0.0.1"]}}, "dns.servers", "nameservers?"),
    ({"mac": "01:00:5e:00:00:01"}, "mac", "one station"),
    ({"mac": "00:00:00:00:00:00"}, "mac", "one station"),
    ({"mac": "02:42"}, "mac", "one station"),
    ({"capabilities": {"portMappings": 1}}, "capabilities.portMappings", "true or false"),
    ({"capabilities": {"portmapping": True}}, "capabilities.portmapping", "portMappings"),
    ({"capabilities": ["dns"]}, "capabilities", "an object"),
    ({"prevResult": []}, "prevResult", "an object"),
    ({"args": []}, "args", "an object"),
    ({"args": {"cni": []}}, "args.cni", "an object"),
    ({"args": {"cni": {"mac": "x"}}}, "args.cni.mac", "one station"),
    ({"args": {"cni": {"ips": ["x"]}}}, "args.cni.ips[0]", "an address"),
    ({"runtimeConfig": []}, "runtimeConfig", "an object"),
    (runtime(mac="ff:ff:ff:ff:ff:ff"), "runtimeConfig.mac", "one station"),
    (runtime(ips=["10.244.1.300"]), "runtimeConfig.ips[0]", "an address"),
    (runtime(ipRanges={}), "runtimeConfig.ipRanges", "a list"),
    (
        runtime(ipRanges=[[{"subnet": "10.9.0.0/24"}]]),
        "runtimeConfig.ipRanges[0][0].subnet",
        "within pod_cidr",
    ),
    (runtime(portMappings={}), "runtimeConfig.portMappings", "a list"),
    (runtime(portMappings=[80]), "runtimeConfig.portMappings[0]", "hostPort and containerPort"),
    (
        runtime(portMappings=[{"containerPort": 80}]),
        "runtimeConfig.portMappings[0].hostPort",
        "1 to 65535",
    ),
    (
        runtime(portMappings=[{"hostPort": True, "containerPort": 80}]),
        "runtimeConfig.portMappings[0].hostPort",
        "1 to 65535",
    ),
    (
        runtime(portMappings=[{"hostPort": 80, "containerPort": 0}]),
        "runtimeConfig.portMappings[0].containerPort",
        "1 to 65535",
    ),
    (
        runtime(portMappings=[{"hostPort": 80, "containerPort": 80, "protocol": "icmp"}]),
        "runtimeConfig.portMappings[0].protocol",
        "tcp or udp or sctp",
    ),
    (
        runtime(portMappings=[{"hostPort": 80, "containerPort": 80, "hostIP": "eth0"}]),
        "runtimeConfig.portMappings[0].hostIP",
        "an IP address",
    ),
    (
        runtime(
            portMappings=[
                {"hostPort": 80, "containerPort": 80},
                {"hostPort": 80, "containerPort": 81, "hostIP": "10.0.0.1"},
            ]
        ),
        "runtimeConfig.portMappings[1].hostPort",
        "runtimeConfig.portMappings[0] has not taken",
    ),
    (runtime(bandwidth=[]), "runtimeConfig.bandwidth", "an object"),
    (runtime(bandwidth={"ingressRate": 8}), "runtimeConfig.bandwidth.ingressBurst", "burst"),
    (runtime(bandwidth={"egressBurst": 8}), "runtimeConfig.bandwidth.egressRate", "per second"),
    (
        runtime(bandwidth={"ingressRate": -1, "ingressBurst": 9}),
        "runtimeConfig.bandwidth.ingressRate",
        "a number from 0",
    ),
    (
        runtime(bandwidth={"ingressRate": 1, "ingressBurst": 8 * (2**32 - 1)}),
        "runtimeConfig.bandwidth.ingressBurst",
        "a number from 0",
    ),
    (
        runtime(bandwidth={"ingresRate": 1}),
        "runtimeConfig.bandwidth.ingresRate",
        "ingressRate?",
    ),
    ({"delegate": {"type": "x"}, "plugins": [{"type": "y"}]}, "delegate", "not both"),
    ({"delegate": {"bridge": "cni0"}}, "delegate.type", "a plugin's executable"),
    ({"delegate": {"type": "/bin/sh"}}, "delegate.type", "a plugin's executable"),
    ({"delegate": "bridge"}, "delegate", "an object"),
    ({"delegate": {"type": "bridge", "name": "other"}}, "delegate.name", "that of the network"),
    ({"delegate": {"type": "bridge", "ipam": 1}}, "delegate.ipam", "an object"),
    ({"delegate": {"type": "bridge"}, "pod_cidr": None}, "delegate.ipam", "ranges of its own"),
    (
        {"plugins": [{"type": "tuning"}, {"type": "ptp"}], "pod_cidr": None},
        "plugins[1].ipam",
        "ranges of its own",
    ),
    ({"plugins": []}, "plugins", "at least one"),
    ({"plugins": {}}, "plugins", "a list"),
    ({"plugins": ["bridge"]}, "plugins[0]", "an object"),
    ({"plugins": [{"type": "bridge"}, {}]}, "plugins[1].type", "a plugin's executable"),
    (
        {"plugins": [{"type": "portmap", "capabilities": {"portMappings": "y"}}]},
        "plugins[0].capabilities.portMappings",
        "true or false",
    ),
    ({"cni.dev/valid-attachments": {}}, "cni.dev/valid-attachments", "a list"),
    (
        {"cni.dev/valid-attachments": [{"containerID": "a"}]},
        "cni.dev/valid-attachments[0]",
        "containerID and ifname",
    ),
    ({"mut": 1280}, "mut", "mtu?"),
    ({"podCIDR": "10.1.0.0/24"}, "podCIDR", "pod_cidr?"),
    ({"enable_ip6": True}, "enable_ip6", "enable_ipv6?"),
    ({"zzz": 1}, "zzz", "one of cniVersion"),
]


@pytest.mark.parametrize(("changes", "path", "expected"), MISTAKES, ids=str)
def test_a_mistake_is_named_once_with_its_path_and_what_was_expected(
    changes: dict[str, Any], path: str, expected: str
) -> None:
    found = mistakes(**changes)
    assert [problem.path for problem in found] == [path], render(found)
    assert expected in found[0].expected
    with pytest.raises(CniError) as refused:
        network(**changes)
    assert refused.value.code == INVALID_CONFIG
    assert refused.value.msg == "the configuration has 1 mistake"
    assert path in refused.value.details


def test_all_mistakes_are_in_one_answer() -> None:
    with pytest.raises(CniError) as refused:
        network(mtu=1, mode="x", nmae="y", pod_cidr="10.1.0.1/24")
    assert refused.value.msg == "the configuration has 4 mistakes"
    assert refused.value.details.count("; ") == 3
    for path in ("mtu is 1:", 'mode is "x":', 'nmae is "y":', 'pod_cidr is "10.1.0.1/24":'):
        assert path in refused.value.details


def test_a_key_given_twice_is_a_mistake() -> None:
    [problem] = problems(text()[:-1] + b', "mtu": 1300, "mtu": 1400}', {})
    assert problem == ("mtu", 1400, "to be given once")


def test_foreign_keys_and_comments_are_left_alone() -> None:
    network(**{"example.org/x": 1, "cni.dev/x": 1, "_comment": "x", "ipam": {"_why": "x"}})


def test_null_and_the_empty_string_are_not_given() -> None:
    stdin = json.dumps(
        {**GOOD, "mtu": None, "ipam": None, "mac": "", "headscale_url": "", "mode": ""}
    ).encode()
    assert parse(stdin, {}).mtu == 1280
    assert parse(stdin, {}).mode == "host"


def test_the_names_that_other_plugins_use_mean_the_same() -> None:
    made = network(
        ipMasq=False, hairpinMode=False, isDefaultGateway=False, dataDir="/d", subnetFile="/s"
    )
    assert (made.ip_masq, made.hairpin, made.default_route) == (False, False, False)
    assert made.data_dir == "/d"


def test_ranges_of_the_ipam_section_are_the_pod_cidrs_where_none_are_given() -> None:
    made = network(**ipam(ranges=[[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00::/64"}]]))
    assert made.pod_cidrs == (ip_network("10.1.0.0/24"), ip_network("fd00::/64"))
    assert made.enable_ipv6 is True


def test_the_pod_cidr_completes_an_ipam_section_that_names_no_subnet() -> None:
    made = network(ipam={"rangeStart": "10.244.1.50", "strategy": "dense-pack"})
    [[only]] = made.ipam.range_sets
    assert (str(only.start), str(only.subnet)) == ("10.244.1.50", "10.244.1.0/24")
    assert made.ipam.type == "headcni-ipam"


def test_ranges_of_the_runtime_come_in_place_of_the_pod_cidr() -> None:
    made = network(**runtime(ipRanges=[[{"subnet": "10.244.1.128/25"}]]))
    assert [[str(r.subnet) for r in ranges] for ranges in made.ipam.range_sets] == [
        ["10.244.1.128/25"]
    ]


def test_another_ipam_plugin_is_handed_its_section_unread() -> None:
    made = network(ipam={"type": "whereabouts", "range": "10.244.1.0/24", "log_level": "debug"})
    assert made.ipam.type == "whereabouts"
    assert made.ipam.raw["log_level"] == "debug"


@pytest.mark.parametrize(
    ("datapath", "gateway", "subnet"),
    [("routed", "169.254.1.1", "10.1.0.0/24"), ("bridge", "fe80::1", "fd00::/64")],
)
def test_a_link_local_gateway_is_taken_where_it_works(
    datapath: str, gateway: str, subnet: str
) -> None:
    made = network(datapath=datapath, **ipam(subnet=subnet, gateway=gateway))
    assert str(made.ipam.range_sets[0][0].gateway) == gateway


def test_the_runtime_may_ask_for_addresses_in_three_places() -> None:
    made = network(
        {"CNI_ARGS": "IP=10.244.1.5"},
        args={"cni": {"ips": ["10.244.1.6/24"]}},
        runtimeConfig={"ips": ["10.244.1.7"]},
    )
    assert [str(a) for a in made.ipam.requested] == ["10.244.1.5", "10.244.1.6", "10.244.1.7"]


def test_a_static_address_by_annotation_is_asked_for_where_the_conflist_is_ours() -> None:
    asked = build(Options(["10.244.1.0/24"]))["plugins"][0]["capabilities"]
    assert asked["io.kubernetes.cri.pod-annotations"] is True
    annotations = {"headcni.dev/ip": "10.244.1.77"}
    given = runtime(**{"io.kubernetes.cri.pod-annotations": annotations})
    made = network(capabilities=asked, **given)
    assert [str(a) for a in made.ipam.requested] == ["10.244.1.77"]
    [problem] = mistakes(**runtime(**{"io.kubernetes.cri.pod-annotations": "x"}))
    assert problem.path == "runtimeConfig.io.kubernetes.cri.pod-annotations"


def test_the_mac_of_the_runtime_wins_over_args_over_the_environment_over_the_netconf() -> None:
    every: dict[str, Any] = {
        "mac": "02:00:00:00:00:01",
        "args": {"cni": {"mac": "02-00-00-00-00-03"}},
        "runtimeConfig": {"mac": "0200.0000.0004"},
    }
    env = {"CNI_ARGS": "MAC=02:00:00:00:00:02"}
    assert network(env, **every).mac == "02:00:00:00:00:04"
    del every["runtimeConfig"]
    assert network(env, **every).mac == "02:00:00:00:00:03"
    del every["args"]
    assert network(env, **every).mac == "02:00:00:00:00:02"
    assert network(**every).mac == "02:00:00:00:00:01"
    assert network(mac="02:AB:00:00:00:0F").mac == "02:ab:00:00:00:0f"


def test_dns_is_the_runtimes_over_magic_dns_over_the_static_section() -> None:
    conf: dict[str, Any] = {
        "dns": {"nameservers": ["10.0.0.1"], "domain": "static", "options": ["ndots:1"]},
        "magic_dns": {
            "enable": True,
            "base_domain": "mesh.example.org",
            "nameservers": ["100.100.100.100"],
            "search_domains": ["a.example.org"],
        },
    }
    assert network(**conf).dns == Dns(
        ("100.100.100.100",), "mesh.example.org", ("a.example.org",), ("ndots:1",)
    )
    asked = runtime(dns={"servers": ["10.96.0.10", "fe80::1%eth0"], "searches": ["."]})
    assert network(**conf, **asked).dns == Dns(
        ("10.96.0.10", "fe80::1%eth0"), "mesh.example.org", (".",), ("ndots:1",)
    )
    conf["magic_dns"]["enable"] = False
    assert network(**conf).dns == Dns(("10.0.0.1",), "static", (), ("ndots:1",))


def test_port_mappings_are_taken_as_the_runtime_writes_them() -> None:
    made = network(
        **runtime(
            portMappings=[
                {"hostPort": 8080, "containerPort": 80, "protocol": "TCP", "hostIP": ""},
                {"hostPort": 8080, "containerPort": 80, "protocol": "udp"},
                {"hostPort": 53, "containerPort": 53, "hostIP": "10.0.0.1"},
                {"hostPort": 53, "containerPort": 53, "hostIP": "10.0.0.2"},
                {"hostPort": 53, "containerPort": 53, "hostIP": "::"},
            ]
        )
    )
    assert made.port_mappings[:3] == (
        PortMapping(8080, 80, "tcp"),
        PortMapping(8080, 80, "udp"),
        PortMapping(53, 53, "tcp", ip_address("10.0.0.1")),
    )
    assert made.runtime_config["portMappings"][0]["hostPort"] == 8080


@pytest.mark.parametrize("other", [None, "0.0.0.0", "10.0.0.1"])
def test_a_host_port_cannot_be_given_twice_on_one_address(other: str | None) -> None:
    mappings = [
        {"hostPort": 53, "containerPort": 53, "hostIP": "10.0.0.1"},
        {"hostPort": 53, "containerPort": 54, **({"hostIP": other} if other else {})},
    ]
    assert len(mistakes(**runtime(portMappings=mappings))) == 1


def test_bandwidth_is_in_bits() -> None:
    limits = {"ingressRate": 1000, "ingressBurst": 4294967295, "egressRate": 2, "egressBurst": 1}
    assert network(**runtime(bandwidth=limits)).bandwidth == Bandwidth(1000, 4294967295, 2, 1)
    assert network(**runtime(bandwidth={})).bandwidth == Bandwidth()


def test_capabilities_of_others_are_passed_through() -> None:
    made = network(
        capabilities={"io.kubernetes.cri.pod-annotations": True, "aliases": True},
        runtimeConfig={"io.kubernetes.cri.pod-annotations": {"a": "b"}, "cgroupPath": "/x"},
    )
    assert made.runtime_config["io.kubernetes.cri.pod-annotations"] == {"a": "b"}


def test_delegates_need_no_ipam_of_ours_when_they_have_their_own() -> None:
    own = {"type": "bridge", "ipam": {"type": "host-local", "subnet": "10.1.0.0/24"}}
    assert network(pod_cidr=None, delegate=own).delegates == (own,)
    link_only = {"type": "bridge", "ipam": {}}
    assert network(pod_cidr=None, delegate=link_only).delegates == (link_only,)
    assert network(pod_cidr=None, plugins=[{"type": "loopback"}]).ipam.range_sets == ()


def test_prev_result_is_kept_for_the_verbs() -> None:
    previous = {"cniVersion": "1.0.0", "ips": []}
    assert network(prevResult=previous).prev_result == previous
    assert network().prev_result is None


def test_the_attachments_that_gc_must_spare() -> None:
    pair = {"containerID": "abc", "ifname": "eth0"}
    made = network(**{"cni.dev/valid-attachments": [pair], "cni.dev/attachments": [pair]})
    assert valid_attachments(made.raw) == frozenset([("abc", "eth0")])
    older = network(**{"cni.dev/attachments": [pair]})
    assert valid_attachments(older.raw) == frozenset([("abc", "eth0")])
    empty = parse(text()[:-1] + b', "cni.dev/valid-attachments": null}', {})
    assert valid_attachments(empty.raw) == frozenset(), "libcni writes an empty list as null"
    assert valid_attachments(network().raw) is None


def test_what_del_reads_is_forgiven_except_for_the_name() -> None:
    made = parse(
        text(mtu="x", ipam=[], bridge="a b", plugins=[{"type": "bridge"}, 7], zzz=1), {}, True
    )
    assert (made.name, made.mtu, made.bridge) == ("mesh", 1280, "headcni0")
    assert made.delegates == ({"type": "bridge"},)
    with pytest.raises(CniError):
        parse(text(name="../x"), {}, forgiving=True)


def test_pods_are_named_by_cni_args() -> None:
    env = {
        "CNI_ARGS": "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web-0;"
        "K8S_POD_INFRA_CONTAINER_ID=abc;K8S_POD_UID=1-2-3;OTHER=x=y"
    }
    assert pod_ref(env) == PodRef("default", "web-0", "1-2-3")
    assert split_cni_args(env["CNI_ARGS"])["OTHER"] == "x=y"
    assert pod_ref({}) == PodRef()
    assert network(env).name == "mesh"


@pytest.mark.parametrize(
    ("args", "path", "expected"),
    [
        ("nonsense", "CNI_ARGS", "KEY=VALUE"),
        ("=x", "CNI_ARGS", "KEY=VALUE"),
        ("K8S_POD_NAM=x", "CNI_ARGS.K8S_POD_NAM", "K8S_POD_NAME?"),
        ("IgnoreUnknown=perhaps", "CNI_ARGS.IgnoreUnknown", "1 or 0"),
        ("IP=10.1", "CNI_ARGS.IP", "an address"),
        ("MAC=1", "CNI_ARGS.MAC", "one station"),
    ],
)
def test_mistakes_in_cni_args_are_named_with_the_others(
    args: str, path: str, expected: str
) -> None:
    [problem] = mistakes({"CNI_ARGS": args})
    assert problem.path == path
    assert expected in problem.expected


def test_mistakes_are_rendered_for_people_and_for_programs() -> None:
    found = mistakes(mtu=1, pod_cidr=None)
    lines = render(found).splitlines()
    assert lines[0] == "2 mistakes"
    assert "  mtu is 1: expected a number from 576 to 65535" in lines
    assert any(line.startswith("  ipam is missing: expected ipam.subnet") for line in lines)
    data = json.loads(render(found, as_json=True))
    assert data["valid"] is False
    assert {"path": "mtu", "value": 1, "expected": "a number from 576 to 65535"} in (
        data["problems"]
    )
    assert render([]) == "no mistakes"
    assert json.loads(render([], as_json=True)) == {"valid": True, "problems": []}


def test_a_long_value_is_cut_short_for_people() -> None:
    assert len(render(mistakes(zzz="x" * 10_000))) < 2_000


def test_a_conflist_is_checked_with_the_netconfs_in_it() -> None:
    conf = {
        "cniVersion": "1.0.0",
        "name": "mesh",
        "plugins": [
            {"type": "headcni", "mtu": 1, "pod_cidr": "10.1.0.0/24", "mdoe": "host"},
            {"type": "portmap", "whatever": 1},
        ],
    }
    found = validation.conflist_problems(json.dumps(conf).encode(), {})
    assert sorted(p.path for p in found) == ["plugins[0].mdoe", "plugins[0].mtu"]
    assert [p.path for p in validation.conflist_problems(b"[", {})] == [""]
    assert "plugins" in [p.path for p in validation.conflist_problems(b"{}", {})]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
KNOWN = sorted({*config._KEYS, *config._ALIASES.values(), "cni.dev/valid-attachments"})
shapes = st.sampled_from(
    [
        {"portMappings": [{"hostPort": 1, "containerPort": []}]},
        {"type": "host-local", "subnet": "10.1.0.0/24", "ranges": [[{"subnet": {}}]]},
        [{"type": []}],
        {"cni": {"ips": {}, "mac": []}},
        {"dns": [], "bandwidth": 1, "ipRanges": [[1]], "ips": 1, "mac": {}},
    ]
)


@busy_machine
@given(st.dictionaries(st.sampled_from(KNOWN), json_values | shapes, max_size=8))
def test_whatever_json_a_key_holds_the_answer_is_a_value_or_a_list_of_mistakes(
    changes: dict[str, Any],
) -> None:
    stdin = json.dumps({**GOOD, **changes, "cniVersion": "1.0.0"}).encode()
    found = problems(stdin, {})
    render(found)
    render(found, as_json=True)
    try:
        made = parse(stdin, {})
    except CniError as refused:
        assert refused.code == INVALID_CONFIG
        assert found
    else:  # host-local ignores unknown keys in ipam, and so do we; `headcnictl validate` does not
        assert all(type(one) is UnknownKey and one.path.startswith("ipam.") for one in found)
        assert made.ipam.range_sets or made.delegates or made.ipam.type not in config._OWN_IPAM


@busy_machine
@given(st.binary(max_size=80))
def test_whatever_comes_in_on_stdin_nothing_but_a_cni_error_comes_out(stdin: bytes) -> None:
    with pytest.raises(CniError):
        parse(stdin, {})


@busy_machine
@given(st.text(max_size=60))
def test_whatever_cni_args_hold_they_can_be_taken_apart(args: str) -> None:
    pod_ref({"CNI_ARGS": args})
    problems(text(), {"CNI_ARGS": args})


FULL = {
    "CNI_COMMAND": "ADD",
    "CNI_CONTAINERID": "abc-1.2_3",
    "CNI_NETNS": "/run/netns/x",
    "CNI_IFNAME": "eth0",
    "CNI_ARGS": "A=B",
    "CNI_PATH": "/opt/cni/bin",
}


def test_the_environment_of_a_call_becomes_a_value() -> None:
    assert Call.of(FULL) == Call("ADD", "abc-1.2_3", "/run/netns/x", "eth0")
    assert Call.of(FULL).env == FULL


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("ADD", ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"]),
        ("CHECK", ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"]),
        ("DEL", ["CNI_CONTAINERID", "CNI_IFNAME"]),
        ("GC", ["CNI_PATH"]),
        ("STATUS", []),
        ("VERSION", []),
    ],
)
def test_each_verb_names_all_that_it_misses_at_once(command: str, missing: list[str]) -> None:
    if not missing:
        assert Call.of({"CNI_COMMAND": command}).command == command
        return
    with pytest.raises(CniError) as refused:
        Call.of({"CNI_COMMAND": command})
    assert refused.value.code == BAD_ENVIRONMENT
    named = [part.split()[0] for part in refused.value.details.split("; ")]
    assert named == missing
    Call.of({**dict.fromkeys(missing, "x"), "CNI_COMMAND": command})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CNI_COMMAND", ""),
        ("CNI_COMMAND", "add"),
        ("CNI_COMMAND", "UPDATE"),
        ("CNI_CONTAINERID", "../x"),
        ("CNI_CONTAINERID", "-x"),
        ("CNI_CONTAINERID", "a b"),
        ("CNI_CONTAINERID", "a\n"),
        ("CNI_IFNAME", "sixteen-letters-"),
        ("CNI_IFNAME", "."),
        ("CNI_IFNAME", ".."),
        ("CNI_IFNAME", "a/b"),
        ("CNI_IFNAME", "a:b"),
        ("CNI_IFNAME", "a b"),
    ],
)
def test_a_variable_that_is_wrong_is_named(name: str, value: str) -> None:
    with pytest.raises(CniError, match=name) as refused:
        Call.of({**FULL, name: value})
    assert refused.value.code == BAD_ENVIRONMENT


def test_a_verb_does_not_mind_variables_that_it_does_not_need() -> None:
    Call.of({"CNI_COMMAND": "STATUS", "CNI_IFNAME": "a/b", "CNI_CONTAINERID": "-"})


def test_reading_a_netconf_imports_nothing_slow() -> None:
    import subprocess
    import sys

    code = (
        "import sys, headcni.config as c;"
        f"c.parse({text()!r}, {{'HEADCNI_SUBNET_FILE': ''}});"
        "slow = {'logging', 'argparse', 'subprocess', 'difflib', 'pathlib', 'hashlib', 'socket',"
        " 'sqlite3', 'pyroute2', 'urllib.parse', 'tempfile'} & set(sys.modules);"
        "print(sorted(slow))"
    )
    path = str(Path(config.__file__).parents[1])
    answer = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {path!r});{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == "[]"


def for_pod(name: str, **args: str) -> dict[str, str]:
    given = {"IgnoreUnknown": "1", "K8S_POD_NAMESPACE": "default", "K8S_POD_NAME": name, **args}
    return {"CNI_ARGS": ";".join(f"{key}={value}" for key, value in given.items())}


def test_a_configuration_is_understood_once_for_all_pods_that_have_it() -> None:
    first = network(for_pod("web-0"))
    assert network(for_pod("web-1")) is first
    assert network(for_pod("web-1"), mtu=1400) is not first
    asked_for = network(for_pod("web-2", IP="10.244.1.9")).ipam.requested
    assert asked_for == (ip_address("10.244.1.9"),)
    assert network(for_pod("web-3")).ipam.requested == ()


def test_what_is_remembered_hides_no_mistake() -> None:
    network({"CNI_ARGS": "K8S_POD_NAME=web-0"})
    for wrong in ("K8S_POD_NAME", "K8S_POD_NAEM=web-0"):
        with pytest.raises(CniError, match="CNI_ARGS"):
            network({"CNI_ARGS": wrong})


def test_a_subnet_env_that_changes_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "subnet.env"
    assert network(subnet_file=str(file)).mtu == 1280
    for mtu in (1400, 1300):
        subnet_env.write(str(file), subnet_env.SubnetEnv(mtu=mtu))
        assert network(subnet_file=str(file)).mtu == mtu
    file.unlink()
    assert network(subnet_file=str(file)).mtu == 1280


def test_no_more_is_remembered_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    remembered: dict[Any, Any] = {}
    monkeypatch.setattr(config, "_known", remembered)
    for mtu in range(1280, 1280 + 2 * config.KEPT):
        network(mtu=mtu)
    assert 0 < len(remembered) <= config.KEPT
    remembered.clear()
    network(prevResult={"cniVersion": "1.0.0", "ips": []})
    assert not remembered, "each pod's is another"
