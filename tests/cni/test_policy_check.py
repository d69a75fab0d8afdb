"""CHECK, STATUS and networks side by side, for pods with network policies."""

from __future__ import annotations

import pytest
from cni_node import mapped
from policy_node import (
    PORTS,
    Station,
    add,
    daemon_of,
    namespace_object,
    pod_args,
    pod_object,
    policy_object,
)

DENY = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


@pytest.fixture
def daemon(node):
    with daemon_of(node) as made:
        yield made


@pytest.fixture
def conf(node, datapath):
    return node.dual(enable_network_policy=True, datapath=datapath)


def checked(node, conf, pod, made):
    return node.check(conf, pod, made, args=pod_args("shop", "web"))


def test_check_names_a_pod_that_is_not_protected(node, conf, datapath):
    """Without the daemon, which would not let it happen."""
    pod, answer = add(node, conf, "web")
    made = answer.ok
    checked(node, conf, pod, made).succeeds()
    node.netns.run("nft", "flush", "set", "inet", "headcni-policy", "links")
    assert "are not checked" in checked(node, conf, pod, made).error["details"]
    node.netns.run("nft", "delete", "table", "inet", "headcni-policy")
    assert "headcni-policy is missing" in checked(node, conf, pod, made).error["details"]


def test_check_names_a_bridge_that_does_not_filter(node, daemon):
    conf = node.dual(enable_network_policy=True)
    pod, answer = add(node, conf, "web", daemon=daemon)
    made = answer.ok
    node.netns.ip("link set headcni0 type bridge nf_call_iptables 0")
    assert "between pods of headcni0" in checked(node, conf, pod, made).error["details"]
    daemon.ask("repair")
    checked(node, conf, pod, made).succeeds()


def test_only_the_bridge_with_policies_filters(node, daemon):
    """Others on the node may be somebody else's."""
    add(node, node.dual(enable_network_policy=True), "web", daemon=daemon)[1].succeeds()
    plain = node.conf(name="plain", bridge="plain0", pod_cidr="10.55.3.0/24", ipam=None)
    add(node, plain, "other", daemon=daemon)[1].succeeds()
    shown = node.netns.ip("-d link show headcni0"), node.netns.ip("-d link show plain0")
    assert ["nf_call_iptables 1" in one for one in shown] == [True, False]


def test_a_network_without_policies_on_the_same_links_stays_open(node, daemon, datapath):
    objects = [pod_object("shop", name, {"app": name}) for name in ("web", "open")]
    policies = [policy_object("shop", "deny", DENY)]
    spaces = [namespace_object("shop")]
    daemon.ask("world", {"pods": objects, "namespaces": spaces, "policies": policies})
    stations = {}
    for name, enabled in (("web", True), ("open", False), ("mate", False)):
        conf = node.dual(name=f"net-{name}", datapath=datapath, enable_network_policy=enabled)
        netns, answer = add(node, conf, name, daemon=daemon)
        addresses = [one["address"].partition("/")[0] for one in answer.ok["ips"]]
        stations[name] = Station(netns, addresses)
    try:
        for version in (4, 6):
            to = {name: one.address(version) for name, one in stations.items()}
            asked = [("tcp", to["mate"], PORTS[0], 5.0), ("tcp", to["web"], PORTS[0], 0.5)]
            assert stations["open"].tries(asked) == [True, False]
            assert stations["web"].tries([("tcp", to["open"], PORTS[0], 0.5)]) == [False]
    finally:
        for one in stations.values():
            one.end()


def test_the_table_goes_with_the_last_pod_that_has_policies(node, conf, daemon):
    daemon.ask("world", {"policies": [policy_object("shop", "deny", DENY)]})
    pod, answer = add(node, conf, "web", daemon=daemon)
    answer.succeeds()
    assert "headcni-policy" in node.nft()
    node.delete(conf, pod, HEADCNI_SOCKET=daemon.socket).succeeds()
    assert "headcni-policy" not in node.nft()


def test_policies_need_links_of_our_own(node):
    conf = node.conf(enable_network_policy=True, delegate={"type": "bridge"})
    for verb in ("ADD", "STATUS"):
        error = node.call(verb, conf, node.pod() if verb == "ADD" else None).error
        assert "only on links of its own" in error["msg"]


def test_pods_of_another_ipam_are_protected_when_their_add_returns(node, daemon, datapath):
    """Their ADD runs in a process of its own, which cannot change the daemon's table."""
    objects = [pod_object("shop", name, {"app": name}) for name in ("web", "mate")]
    daemon.ask("world", {"pods": objects, "policies": [policy_object("shop", "deny", DENY)]})
    stations = []
    for number, name in enumerate(("web", "mate"), 1):
        given = [{"address": f"10.55.1.{80 + number}/24", "gateway": "10.55.1.1"}]
        ipam = {"type": "static", "addresses": given}
        conf = node.conf(enable_network_policy=True, datapath=datapath, ipam=ipam)
        netns, answer = add(node, conf, name, daemon=daemon)
        answer.succeeds()
        stations.append(Station(netns, [f"10.55.1.{80 + number}"]))
    try:
        attempt = ("tcp", "10.55.1.82", PORTS[0], 0.5)
        assert stations[0].tries([attempt]) == [False]
        assert [one["known"] for one in daemon.ask("report")["pods"]] == [True, True]
        daemon.ask("policy", {"key": ["shop", "deny"]})
        assert stations[0].tries([(*attempt[:3], 5.0)]) == [True]
    finally:
        for one in stations:
            one.end()


@pytest.mark.parametrize("version", [4, 6])
def test_host_ports_are_judged_by_the_pod_behind_them(node, daemon, datapath, version):
    """And a pod reaches itself by its host port, through the node and back."""
    objects = [pod_object("shop", name, {"app": name}) for name in ("web", "mate")]
    daemon.ask("world", {"pods": objects, "policies": [policy_object("shop", "deny", DENY)]})
    conf = node.dual(enable_network_policy=True, datapath=datapath)
    stations = {"world": Station(node.outside, [])}
    for name, ports in (("web", mapped((9080, PORTS[0], "tcp"))), ("mate", {})):
        netns, answer = add(node, {**conf, **ports}, name, daemon=daemon)
        answer.succeeds()
        stations[name] = Station(netns, [])
    host = {4: node.NODE_IP, 6: node.NODE_IP6}[version]
    caller = {4: f"{node.OUTSIDE_IP}/32", 6: f"{node.OUTSIDE_IP6}/128"}[version]

    def reaches(name, seconds):
        return stations[name].tries([("tcp", host, 9080, seconds)]) == [True]

    try:
        assert reaches("web", 5.0), "itself"
        assert not reaches("mate", 0.5) and not reaches("world", 0.5)
        rules = [{"from": [{"ipBlock": {"cidr": caller}}], "ports": [{"port": PORTS[0]}]}]
        found = policy_object("shop", "world", {"podSelector": {}, "ingress": rules})
        daemon.ask("policy", {"key": ["shop", "world"], "object": found})
        assert reaches("world", 5.0), "its real address is allowed, on the pod's port"
        assert not reaches("mate", 0.5)
    finally:
        for one in stations.values():
            one.end()
