"""Addresses from another IPAM plugin: what its result says is what the pod gets."""

from __future__ import annotations

import pytest
from cni_node import EMPTY

STATIC = {
    "type": "static",
    "addresses": [{"address": "10.66.1.5/24", "gateway": "10.66.1.1"}],
    "routes": [{"dst": "10.88.0.0/16"}, {"dst": "10.89.0.0/16", "gw": "10.66.1.1"}],
    "dns": {
        "nameservers": ["10.96.0.10"],
        "domain": "cluster.local",
        "search": ["svc.cluster.local"],
        "options": ["ndots:5"],
    },
}


def conf_with(node, ipam, **changes):
    return node.conf(**{"pod_cidr": None, "cluster_cidr": None, "ipam": ipam, **changes})


def test_routes_and_dns_of_gos_static_reach_the_pod(node, datapath):
    pod, conf = node.pod(), conf_with(node, STATIC, datapath=datapath)
    result = node.add(conf, pod).ok
    assert result["routes"] == [
        {"dst": "10.88.0.0/16", "gw": "10.66.1.1"},
        {"dst": "10.89.0.0/16", "gw": "10.66.1.1"},
        {"dst": "0.0.0.0/0", "gw": "10.66.1.1"},
    ]
    assert result["dns"] == STATIC["dns"]
    assert pod.ip_json("route show 10.88.0.0/16")[0]["gateway"] == "10.66.1.1"
    node.check(conf, pod, result).succeeds()
    node.delete(conf, pod).succeeds()
    assert node.leftovers() == EMPTY


def test_a_route_of_the_ipam_may_have_another_gateway_on_the_bridge(node):
    ipam = {**STATIC, "routes": [{"dst": "10.89.0.0/16", "gw": "10.66.1.9"}]}
    pod = node.pod()
    node.add(conf_with(node, ipam), pod).succeeds()
    assert pod.ip_json("route show 10.89.0.0/16")[0]["gateway"] == "10.66.1.9"


def test_the_netconfs_own_dns_wins_over_the_ipams(node):
    conf = conf_with(node, STATIC, dns={"nameservers": ["192.0.2.53"]})
    dns = node.add(conf).ok["dns"]
    assert dns["nameservers"] == ["192.0.2.53"]
    assert dns["search"] == ["svc.cluster.local"]


@pytest.mark.parametrize("kind", ["static", "host-local"])
def test_pods_are_masqueraded_by_the_range_of_their_addresses(node, datapath, kind):
    local = {"type": "host-local", "ranges": [[{"subnet": "10.66.1.0/24"}]]}
    local["dataDir"] = str(node.tmp / "leases")
    conf = conf_with(node, STATIC if kind == "static" else local, datapath=datapath)
    pod = node.pod()
    node.add(conf, pod).succeeds()
    with node.outside.serving(7000):
        assert pod.asks(node.OUTSIDE_IP, 7000) == node.NODE_IP


def test_a_pod_of_another_range_does_not_end_the_masquerading_of_the_first(node):
    first, second = node.pod(), node.pod()
    other = {"type": "static", "addresses": [{"address": "10.67.1.5/24", "gateway": "10.67.1.1"}]}
    node.add(conf_with(node, STATIC), first).succeeds()
    node.add(conf_with(node, other), second).succeeds()
    with node.outside.serving(7000):
        assert [pod.asks(node.OUTSIDE_IP, 7000) for pod in (first, second)] == [node.NODE_IP] * 2


def test_the_routes_of_host_local_are_applied_once(node):
    routes = [{"dst": "0.0.0.0/0"}, {"dst": "10.88.0.0/16"}]
    ipam = {"type": "host-local", "subnet": "10.55.1.0/24", "routes": routes}
    ipam["dataDir"] = str(node.tmp / "leases")
    conf, pod = node.conf(ipam=ipam), node.pod()
    result = node.add(conf, pod).ok
    assert [route["dst"] for route in result["routes"]] == ["0.0.0.0/0", "10.88.0.0/16"]
    node.check(conf, pod, result).succeeds()


def test_resolv_conf_is_read_with_our_own_ipam_too(node):
    resolver = node.tmp / "resolv.conf"
    resolver.write_text("nameserver 192.0.2.53\nsearch example.org\noptions ndots:2\n")
    ipam = {"type": "headcni-ipam", "subnet": "10.55.1.0/24", "resolvConf": str(resolver)}
    assert node.add(node.conf(ipam=ipam)).ok["dns"] == {
        "nameservers": ["192.0.2.53"],
        "search": ["example.org"],
        "options": ["ndots:2"],
    }
    resolver.unlink()
    error = node.add(node.conf(ipam=ipam)).error
    assert error["code"] == 7 and str(resolver) in error["details"]
    assert len(node.leftovers()["allocation"]) == 1
    assert node.call("STATUS", node.conf(ipam=ipam)).error["code"] == 50
