"""A second interface, as Multus asks for it: the pod's first one keeps what it has."""

from __future__ import annotations

import pytest
from cni_node import EMPTY

GO_SUBNET = "10.77.1.0/24"


def go_bridge(node, name="go", **changes):
    """The CNI project's bridge with host-local."""
    ipam = {"type": "host-local", "subnet": GO_SUBNET, "dataDir": str(node.tmp / "leases")}
    conf = {"cniVersion": "1.0.0", "name": name, "type": "bridge", "bridge": "br-go", "ipam": ipam}
    return {**conf, **changes}


def defaults(pod, family="-4"):
    return [
        (route["dev"], route.get("gateway"), route.get("metric"))
        for route in pod.ip_json(f"{family} route show default")
    ]


def by_go(node, verb, conf, pod, **how):
    """Go's own plugin, in the node's namespace."""
    import json
    import subprocess

    from lab import tools

    done = subprocess.run(
        ["ip", "netns", "exec", node.netns.name, str(tools.CNI.bin / conf["type"])],
        input=json.dumps(conf),
        text=True,
        capture_output=True,
        env=node.environment(verb, pod, **how),
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


class TestDefaultRoute:
    def test_that_of_gos_bridge_stays_and_outlives_our_interface(self, node, datapath):
        pod, conf = node.pod(), node.conf(datapath=datapath)
        by_go(node, "ADD", go_bridge(node, isDefaultGateway=True), pod)
        assert defaults(pod) == [("eth0", "10.77.1.1", None)]
        result = node.add(conf, pod, ifname="net1").ok
        assert defaults(pod) == [("eth0", "10.77.1.1", None)]
        assert "0.0.0.0/0" not in [route["dst"] for route in result.get("routes", ())]
        node.check(conf, pod, result, ifname="net1").succeeds()
        node.delete(conf, pod, ifname="net1").succeeds()
        assert defaults(pod) == [("eth0", "10.77.1.1", None)]

    def test_ours_stays_when_gos_bridge_comes_second_and_goes(self, node, datapath):
        pod, conf = node.pod(), node.conf(datapath=datapath)
        result = node.add(conf, pod).ok
        by_go(node, "ADD", go_bridge(node), pod, ifname="net1")
        by_go(node, "DEL", go_bridge(node), pod, ifname="net1")
        assert defaults(pod) == [("eth0", "10.55.1.1", None)]
        node.check(conf, pod, result).succeeds()

    def test_two_networks_of_ours_have_one_the_first_ones(self, node, datapath):
        pod, first = node.pod(), node.dual(datapath=datapath)
        second = node.conf(
            name="second",
            datapath=datapath,
            bridge="headcni1",
            pod_cidr="10.55.2.0/24",
            ipam={"type": "headcni-ipam", "subnet": "10.55.2.0/24"},
        )
        node.add(first, pod).succeeds()
        before = defaults(pod), defaults(pod, "-6")
        result = node.add(second, pod, ifname="net1").ok
        assert (defaults(pod), defaults(pod, "-6")) == before
        node.check(second, pod, result, ifname="net1").succeeds()
        node.delete(second, pod, ifname="net1").succeeds()
        assert (defaults(pod), defaults(pod, "-6")) == before
        node.delete(first, pod).succeeds()
        assert node.leftovers() == EMPTY

    def test_two_interfaces_on_one_network_both_work(self, node, datapath):
        pod, conf = node.pod(), node.conf(datapath=datapath)
        first = node.add(conf, pod).ok
        second = node.add(conf, pod, ifname="net1").ok
        node.check(conf, pod, first).succeeds()
        node.check(conf, pod, second, ifname="net1").succeeds()
        node.delete(conf, pod, ifname="net1").succeeds()
        node.check(conf, pod, first).succeeds()
        assert defaults(pod) == [("eth0", "10.55.1.1", None)]
        with node.netns.serving(7000):
            assert pod.asks("10.55.1.1", 7000) == first["ips"][0]["address"].partition("/")[0]

    def test_a_worse_one_of_another_metric_is_not_shadowed(self, node):
        """A default route with a metric would lose to one without."""
        pod = node.pod()
        pod.ip("link add eth0 type veth peer name other")
        pod.ip("addr add 10.99.0.2/24 dev eth0")
        pod.ip("link set eth0 up")
        pod.ip("link set other up")
        pod.ip("route add default via 10.99.0.1 metric 100")
        routes = [{"dst": "0.0.0.0/0"}, {"dst": "10.88.0.0/16"}]
        ipam = {"type": "headcni-ipam", "subnet": "10.55.1.0/24", "routes": routes}
        result = node.add(node.conf(ipam=ipam), pod, ifname="net1").ok
        assert defaults(pod) == [("eth0", "10.99.0.1", 100)]
        assert [route["dst"] for route in result["routes"]] == ["10.88.0.0/16"]

    def test_one_with_a_worse_priority_is_added_beside_it(self, node):
        pod = node.pod()
        by_go(node, "ADD", go_bridge(node, isDefaultGateway=True), pod)
        routes = [{"dst": "0.0.0.0/0", "priority": 500}]
        ipam = {"type": "headcni-ipam", "subnet": "10.55.1.0/24", "routes": routes}
        node.add(node.conf(ipam=ipam), pod, ifname="net1").succeeds()
        assert sorted(defaults(pod)) == [
            ("eth0", "10.77.1.1", None),
            ("net1", "10.55.1.1", 500),
        ]

    def test_a_route_that_another_interface_has_is_not_replaced(self, node):
        pod = node.pod()
        pod.ip("link add eth0 type veth peer name other")
        pod.ip("link set eth0 up")
        pod.ip("link set other up")
        pod.ip("route add 10.88.0.0/16 dev eth0")
        routes = [{"dst": "10.88.0.0/16"}]
        ipam = {"type": "headcni-ipam", "subnet": "10.55.1.0/24", "routes": routes}
        node.add(node.conf(ipam=ipam), pod, ifname="net1").succeeds()
        assert [route["dev"] for route in pod.ip_json("route show 10.88.0.0/16")] == ["eth0"]


class TestIsGateway:
    def test_false_gives_the_bridge_no_address_and_the_pod_no_default_route(self, node):
        pod, conf = node.pod(), node.conf(isGateway=False)
        result = node.add(conf, pod).ok
        assert not [a for a in node.netns.addresses("headcni0") if a.startswith("10.")]
        assert defaults(pod) == []
        node.check(conf, pod, result).succeeds()

    def test_it_is_refused_where_it_cannot_be(self, node):
        error = node.add(node.conf(isGateway=False, datapath="routed")).error
        assert "isGateway is false: expected true with datapath routed" in error["details"]
        error = node.add(node.conf(isGateway=False, default_route=True)).error
        assert "default_route is true: expected false beside isGateway false" in error["details"]


class TestWithoutAddresses:
    @pytest.mark.parametrize("pod_cidr", ["10.55.1.0/24", None])
    def test_an_empty_ipam_makes_a_link_and_no_more(self, node, pod_cidr):
        pod, conf = node.pod(), node.conf(ipam={}, pod_cidr=pod_cidr)
        result = node.add(conf, pod, ifname="net1").ok
        assert "ips" not in result and "routes" not in result
        assert not [a for a in pod.addresses("net1") if not a.startswith("fe80")]
        assert not [a for a in node.netns.addresses("headcni0") if not a.startswith("fe80")]
        assert pod.ip_json("link show dev net1")[0]["operstate"] == "UP"
        assert node.add(conf, pod, ifname="net1").ok == result
        node.check(conf, pod, result, ifname="net1").succeeds()
        node.call("STATUS", conf).succeeds()
        node.call("GC", {**conf, "cni.dev/valid-attachments": []}).succeeds()
        assert node.leftovers() == EMPTY

    def test_two_such_pods_reach_each_other_on_the_link(self, node):
        conf, pods = node.conf(ipam={}), [node.pod(), node.pod()]
        for at, pod in enumerate(pods):
            node.add(conf, pod).succeeds()
            pod.ip(f"addr add 10.66.0.{at + 1}/24 dev eth0")
        with pods[0].serving(7000):
            assert pods[1].asks("10.66.0.1", 7000) == "10.66.0.2"

    def test_a_routed_pod_needs_addresses(self, node):
        error = node.add(node.conf(ipam={}, datapath="routed")).error
        assert "ipam is {}: expected addresses with datapath routed" in error["details"]
