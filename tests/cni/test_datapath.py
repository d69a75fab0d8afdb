"""What pods can reach, and which address they are seen to come from."""

from __future__ import annotations

import sys

import pytest
from patience import until

V4, V6 = 0, 1
# A router's advertisement to all: hop limit 64, for half an hour.
ADVERTISE = """
import socket, struct
link = socket.if_nametoindex("eth0")
with socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6) as router:
    router.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
    advertisement = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0)
    router.sendto(advertisement, ("ff02::1", 0, 0, link))
"""


def addresses(result):
    return [ip["address"].partition("/")[0] for ip in result["ips"]]


def any_address(family):
    return "::" if family == V6 else "0.0.0.0"


@pytest.fixture(params=[V4, V6], ids=["IPv4", "IPv6"])
def family(request):
    return request.param


@pytest.fixture
def conf(node, datapath):
    return node.dual(datapath=datapath)


def test_a_pod_reaches_its_neighbour_and_is_seen_as_itself(node, conf, family):
    one, two = node.pod(), node.pod()
    first, second = addresses(node.add(conf, one).ok), addresses(node.add(conf, two).ok)
    with two.serving(8000, address=any_address(family)):
        assert one.asks(second[family], 8000) == first[family]


def test_the_node_reaches_a_pod_from_the_pods_gateway(node, conf, family):
    pod = node.pod()
    result = node.add(conf, pod).ok
    with pod.serving(8000, address=any_address(family)):
        assert node.netns.asks(addresses(result)[family], 8000) == result["ips"][family]["gateway"]


def test_a_pod_reaches_the_node(node, conf, family):
    pod = node.pod()
    own = addresses(node.add(conf, pod).ok)[family]
    with node.netns.serving(8000, address=any_address(family)):
        assert pod.asks([node.NODE_IP, node.NODE_IP6][family], 8000) == own


def test_a_pod_reaches_the_outside_under_the_nodes_address(node, conf, family):
    pod = node.pod()
    node.add(conf, pod).succeeds()
    with node.outside.serving(8000, address=any_address(family)):
        seen = pod.asks([node.OUTSIDE_IP, node.OUTSIDE_IP6][family], 8000)
    assert seen == [node.NODE_IP, node.NODE_IP6][family]


def test_a_pod_reaches_the_rest_of_the_cluster_under_its_own_address(node, conf, family):
    """Another node's pod, here an address of the outside, with a route back."""
    far = ["10.55.2.9", "fd55:0:0:2::9"][family]
    node.outside.ip(f"addr add {far} dev eth0 nodad")
    node.outside.ip(
        f"route add {['10.55.1.0/24', 'fd55:0:0:1::/64'][family]} via "
        f"{[node.NODE_IP, node.NODE_IP6][family]}"
    )
    pod = node.pod()
    own = addresses(node.add(conf, pod).ok)[family]
    with node.outside.serving(8000, address=any_address(family)):
        assert pod.asks(far, 8000) == own


def test_a_tailnet_device_that_accepts_no_routes_is_reached_under_the_nodes_address(node, datapath):
    """100.64.0.0/10 is not part of the cluster: such a device could not answer a pod."""
    node.outside.ip("addr add 100.64.0.7 dev eth0")
    pod = node.pod()
    node.add(node.conf(datapath=datapath), pod).succeeds()
    with node.outside.serving(8000):
        assert pod.asks("100.64.0.7", 8000) == node.NODE_IP


def test_without_ip_masq_a_pod_is_seen_as_itself_everywhere(node, datapath):
    node.outside.ip(f"route add 10.55.1.0/24 via {node.NODE_IP}")
    pod = node.pod()
    own = node.add(node.conf(datapath=datapath, ipMasq=False), pod).address
    with node.outside.serving(8000):
        assert pod.asks(node.OUTSIDE_IP, 8000) == own


def test_an_address_that_no_pod_has_is_unreachable_and_not_sent_elsewhere(node):
    """Routed, the node has no subnet; its range must not follow the default route."""
    pod = node.pod()
    node.add(node.conf(datapath="routed"), pod).succeeds()
    assert "unreachable" in node.netns.ip("route show 10.55.1.0/24")
    assert (
        "10.55.1.99 via"
        not in node.netns.run("ip", "route", "get", "10.55.1.99", check=False).stdout
    )


def test_a_node_can_change_its_data_path_while_pods_run(node, family):
    """Old pods stay as they were wired, new ones get the other kind; the node reaches both."""
    pods = [node.pod() for _ in range(3)]
    wired = ["routed", "bridge", "routed"]
    given = [
        addresses(node.add(node.dual(datapath=kind), pod).ok)[family]
        for kind, pod in zip(wired, pods)
    ]
    for pod, own in zip(pods, given):
        with pod.serving(8000, address=any_address(family)):
            assert node.netns.asks(own, 8000)


def test_an_ipv6_address_is_usable_as_soon_as_add_returns(node, conf):
    pod = node.pod()
    node.add(conf, pod).succeeds()
    shown = pod.ip("-6 addr show dev eth0 scope global")
    assert "fd55:0:0:1::" in shown and "tentative" not in shown


def test_a_pod_keeps_no_ear_open_for_router_advertisements(node, conf):
    pod = node.pod()
    node.add(conf, pod).succeeds()
    assert pod.run("sysctl", "-n", "net.ipv6.conf.eth0.accept_ra").stdout == "0\n"


def test_a_namespace_with_ipv6_switched_off_gets_it_for_its_pods_address(node, conf):
    pod = node.pod()
    pod.run("sysctl", "-qw", "net.ipv6.conf.default.disable_ipv6=1")
    result = node.add(conf, pod).ok
    assert result["ips"][V6]["address"] in pod.addresses("eth0")


def test_the_first_ipv6_pod_does_not_cost_the_node_the_router_that_it_has_learnt_of(node, conf):
    node.netns.run("sysctl", "-qw", "net.ipv6.conf.all.forwarding=0")
    node.netns.run("sysctl", "-qw", "net.ipv6.conf.eth0.accept_ra=1")
    node.netns.ip("-6 route flush default")
    node.outside.ip("addr add fe80::99/64 dev eth0 nodad")

    def is_learnt():
        node.outside.run(sys.executable, "-c", ADVERTISE, check=False)  # the link is just up
        return "proto ra" in node.netns.ip("-6 route show default")

    until(is_learnt)
    node.add(conf).succeeds()
    assert "proto ra" in node.netns.ip("-6 route show default")
    assert node.netns.run("sysctl", "-n", "net.ipv6.conf.eth0.accept_ra").stdout == "2\n"
    assert node.netns.run("sysctl", "-n", "net.ipv6.conf.lo.accept_ra").stdout == "1\n"


def test_forwarding_is_turned_on(node, conf):
    node.netns.run("sysctl", "-qw", "net.ipv4.ip_forward=0", "net.ipv6.conf.all.forwarding=0")
    node.add(conf).succeeds()
    shown = node.netns.run("sysctl", "-n", "net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding")
    assert shown.stdout == "1\n1\n"


@pytest.mark.parametrize("how", ["args", "runtimeConfig"])
def test_a_requested_mac_is_given(node, datapath, how):
    pod, mac = node.pod(), "02:11:22:33:44:55"
    conf = node.conf(datapath=datapath)
    if how == "args":
        result = node.add(conf, pod, args=f"MAC={mac}").ok
    else:
        asked = {"capabilities": {"mac": True}, "runtimeConfig": {"mac": mac}}
        result = node.add({**conf, **asked}, pod).ok
    assert result["interfaces"][-1]["mac"] == mac
    assert mac in pod.ip("link show eth0")


@pytest.mark.parametrize("mtu", [1280, 1400])
def test_both_ends_have_the_configured_mtu(node, datapath, mtu):
    pod = node.pod()
    result = node.add(node.conf(datapath=datapath, mtu=mtu), pod).ok
    host = result["interfaces"][-2]["name"]
    assert f"mtu {mtu} " in pod.ip("link show eth0")
    assert f"mtu {mtu} " in node.netns.ip(f"link show {host}")


def test_configured_routes_are_in_the_pod_and_in_the_result(node, datapath):
    routes = [{"dst": "0.0.0.0/0"}, {"dst": "198.51.100.0/24", "mtu": 1300, "priority": 50}]
    ipam = {"type": "headcni-ipam", "subnet": "10.55.1.0/24", "routes": routes}
    pod = node.pod()
    result = node.add(node.conf(datapath=datapath, ipam=ipam), pod).ok
    assert {"dst": "198.51.100.0/24", "gw": "10.55.1.1", "mtu": 1300, "priority": 50} in (
        result["routes"]
    )
    assert "metric 50 mtu 1300" in pod.ip("route show 198.51.100.0/24")


def test_a_route_for_another_table_is_there_and_not_in_the_main_one(node, datapath):
    routes = [
        {"dst": "0.0.0.0/0", "gw": "10.55.1.77", "table": 100},
        {"dst": "198.51.100.0/24", "table": 5300},
    ]
    ipam = {"type": "headcni-ipam", "subnet": "10.55.1.0/24", "routes": routes}
    pod, conf = node.pod(), node.conf(datapath=datapath, ipam=ipam)
    if datapath == "routed":
        routes[0]["gw"] = "10.55.1.1"
    result = node.add(conf, pod).ok
    assert {"dst": "198.51.100.0/24", "gw": "10.55.1.1", "table": 5300} in result["routes"]
    assert "198.51.100.0/24 via 10.55.1.1" in pod.ip("route show table 5300")
    assert f"default via {routes[0]['gw']}" in pod.ip("route show table 100")
    assert pod.ip("route show default").split()[:3] == ["default", "via", "10.55.1.1"]
    assert pod.ip("route show 198.51.100.0/24") == ""
    node.check(conf, pod, result).succeeds()
    pod.ip("route flush table 5300")
    said = node.check(conf, pod, result).error["details"]
    missing = "pod: no route 198.51.100.0/24 via 10.55.1.1 in table 5300"
    assert said == f"{missing} [headcnictl explain HC108]"


def test_magic_dns_reaches_the_result_and_the_runtimes_own_wins(node):
    conf = node.conf(
        magic_dns={
            "enable": True,
            "base_domain": "mesh.lab",
            "nameservers": ["100.100.100.100"],
            "search_domains": ["a.lab"],
        }
    )
    dns = node.add(conf).ok["dns"]
    assert dns["nameservers"] == ["100.100.100.100"]
    assert dns["domain"] == "mesh.lab" and "a.lab" in dns["search"]
    given = {"servers": ["10.96.0.10"], "searches": ["svc.cluster.local"], "options": ["ndots:5"]}
    asked = {"capabilities": {"dns": True}, "runtimeConfig": {"dns": given}}
    assert node.add({**conf, **asked}).ok["dns"]["nameservers"] == ["10.96.0.10"]


def test_the_bridge_is_not_promiscuous_and_its_ports_are_in_hairpin_mode(node):
    result = node.add(node.conf()).ok
    shown = node.netns.ip(f"-d link show {result['interfaces'][1]['name']}")
    assert "hairpin on" in shown
    assert "PROMISC" not in node.netns.ip("link show headcni0")
    off = node.add(node.conf(hairpin=False)).ok["interfaces"][1]["name"]
    assert "hairpin off" in node.netns.ip(f"-d link show {off}")


def test_the_hosts_end_says_whose_it_is(node, datapath):
    pod = node.pod()
    result = node.add(node.conf(datapath=datapath), pod).ok
    shown = node.netns.ip(f"link show {result['interfaces'][-2]['name']}")
    assert f"alias headcni pods {pod.name} eth0" in shown


def test_two_networks_share_one_nft_table(node):
    node.add(node.conf()).succeeds()
    other = node.conf(
        name="other",
        bridge="headcni1",
        pod_cidr="10.55.8.0/24",
        ipam={"type": "headcni-ipam", "subnet": "10.55.8.0/24"},
    )
    node.add(other).succeeds()
    node.add(node.conf()).succeeds()
    rules = node.nft()
    assert rules.count("table inet headcni {") == 1
    assert "10.55.1.0/24" in rules and "10.55.8.0/24" in rules


def test_the_same_range_on_two_networks_gives_no_address_twice(node):
    other = node.conf(name="other")
    given = [node.add(conf).address for conf in (node.conf(), other, node.conf(), other)]
    assert len(set(given)) == 4
