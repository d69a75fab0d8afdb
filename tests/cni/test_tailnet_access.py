"""What pods reach of the tailnet. A veth stands in for the tailnet's interface: the kernel is real.

Behind it are two devices of the tailnet, a pod of another node, and a network that a device routes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack

import pytest
from cni_node import REPAIR_FIREWALL, Namespace, asking, mapped

NODE, DEVICE, OTHER = "100.64.0.1", "100.64.0.7", "100.64.0.8"
NODE6, DEVICE6 = "fd7a:115c:a1e0::1", "fd7a:115c:a1e0::7"
MESH_POD, MESH_POD6 = "10.55.2.9", "fd55:0:0:2::9"
ROUTED = "198.51.100.5"  # behind a device that is a subnet router
SHOP, BANK = (
    {"args": f"IgnoreUnknown=1;K8S_POD_NAMESPACE={name};K8S_POD_NAME=web"}
    for name in ("shop", "bank")
)


def tailnet_behind(node, link: str) -> Namespace:
    made = Namespace.create("tailnet")
    node.pods.append(made)  # so that it is removed with them
    node.netns.ip(f"link add {link} type veth peer name {link} netns {made.name}")
    sides = (
        (node.netns, (f"{NODE}/32",), (f"{NODE6}/128",)),
        (made, (DEVICE, OTHER, MESH_POD, ROUTED), (DEVICE6, MESH_POD6)),
    )
    for side, v4, v6 in sides:
        for address in (*v4, *v6):
            side.ip(f"addr add {address} dev {link}" + (" nodad" if ":" in address else ""))
        side.ip(f"link set {link} up")
    for prefix in ("100.64.0.0/10", "10.55.2.0/24", "198.51.100.0/24"):
        node.netns.ip(f"route add {prefix} dev {link} src {NODE}")
    for prefix in ("fd7a:115c:a1e0::/48", "fd55:0:0:2::/64"):
        node.netns.ip(f"-6 route add {prefix} dev {link} src {NODE6}")
    made.ip(f"route add {NODE} dev {link}")
    made.ip(f"route add 10.55.1.0/24 via {NODE} dev {link} onlink")
    made.ip(f"-6 route add {NODE6} dev {link}")
    made.ip(f"-6 route add fd55:0:0:1::/64 via {NODE6} dev {link} onlink")
    return made


@pytest.fixture(params=["tailscale0", "headcni01"])
def tailnet(node, request):
    """In host mode and in daemon mode."""
    made = tailnet_behind(node, request.param)
    with ExitStack() as servers:
        for port in (80, 81):
            servers.enter_context(made.serving(port, address="::"))
        yield made


@pytest.fixture
def host_tailnet(node):
    """Where the mode makes no difference."""
    made = tailnet_behind(node, "tailscale0")
    with made.serving(80, address="::"), made.serving(81, address="::"):
        yield made


@pytest.fixture
def conf(node, datapath):
    return node.dual(datapath=datapath)


def added(node, conf, **how) -> Namespace:
    pod = node.pod()
    node.add(conf, pod, **how).succeeds()
    return pod


def reached(pod: Namespace, *targets: str) -> set[str]:
    """Those that answer, asked all at once: who is not let through says nothing for seconds."""
    asked = {}
    for target in targets:
        address, _unused, port = target.rpartition(":")
        command = ["ip", "netns", "exec", pod.name, *asking(address.strip("[]"), port)]
        asked[target] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    said = {target: process.communicate(timeout=30)[0] for target, process in asked.items()}
    return {target for target, answer in said.items() if answer.strip()}


TAILNET = {f"{DEVICE}:80", f"{DEVICE}:81", f"{OTHER}:80", f"{ROUTED}:80", f"[{DEVICE6}]:80"}
MESH = {f"{MESH_POD}:80", f"[{MESH_POD6}]:80"}
EVERYTHING = TAILNET | MESH


def test_by_default_a_pod_has_the_nodes_place_in_the_tailnet(node, conf, tailnet):
    pod = added(node, conf)
    assert reached(pod, *EVERYTHING) == EVERYTHING
    assert pod.asks(DEVICE, 80) == f"::ffff:{NODE}"
    assert pod.asks(DEVICE6, 80) == NODE6
    assert "tailnet" not in node.nft()


def test_with_pods_it_reaches_pods_of_the_mesh_and_nothing_else_of_the_tailnet(node, conf, tailnet):
    node.limit("pods")
    pod = added(node, conf)
    assert reached(pod, *EVERYTHING) == MESH
    with node.outside.serving(80):
        assert pod.asks(node.OUTSIDE_IP, 80) == node.NODE_IP


def test_a_list_opens_addresses_and_ports_beside_pods_of_the_mesh(node, conf, host_tailnet):
    node.limit([f"{DEVICE}:80", f"[{DEVICE6}]:80/tcp", "198.51.100.0/24"])
    pod = added(node, conf)
    opened = {f"{DEVICE}:80", f"[{DEVICE6}]:80", f"{ROUTED}:80"}
    assert reached(pod, *EVERYTHING) == MESH | opened


def test_a_protocol_is_part_of_an_entry(node, conf, host_tailnet):
    node.limit([f"{DEVICE}:80/udp", f"{DEVICE}:81"])
    pod = added(node, conf)
    assert reached(pod, f"{DEVICE}:80", f"{DEVICE}:81") == {f"{DEVICE}:81"}
    with host_tailnet.serving(80, "udp"), host_tailnet.serving(81, "udp"):
        assert pod.asks(DEVICE, 80, "udp") == NODE
        assert pod.asks(DEVICE, 81, "udp") == NODE
    assert pod.asks(DEVICE, 82, "udp") == ""


def test_a_namespace_is_limited_on_a_node_that_is_not(node, conf, host_tailnet):
    node.limit("all", shop="pods")
    shop, bank = added(node, conf, **SHOP), added(node, conf, **BANK)
    assert reached(shop, *EVERYTHING) == MESH
    assert reached(bank, *EVERYTHING) == EVERYTHING


def test_a_namespace_is_not_limited_on_a_node_that_is(node, conf, host_tailnet):
    node.limit("pods", shop="all", bank=[f"{DEVICE}:80"])
    shop, bank, other = added(node, conf, **SHOP), added(node, conf, **BANK), added(node, conf)
    assert reached(shop, *EVERYTHING) == EVERYTHING
    assert reached(bank, *EVERYTHING) == MESH | {f"{DEVICE}:80"}
    assert reached(other, *EVERYTHING) == MESH


BOTH = (f"{DEVICE}:80", f"[{DEVICE6}]:80")


def test_a_limit_that_is_set_goes_for_running_pods_and_ends_their_connections(
    node, conf, host_tailnet
):
    pod = added(node, conf, **SHOP)
    talk = (
        "import socket,sys; s = socket.create_connection((sys.argv[1], 7000), 3); s.settimeout(3);"
        "[(s.sendall(l.encode()), print(s.recv(9).decode(), flush=True)) for l in sys.stdin]"
    )
    answer = (
        "import socket; s = socket.create_server(('', 7000)); print('ready', flush=True);"
        "c, _ = s.accept()\nwhile True: c.sendall(c.recv(9) or exit())"
    )
    in_tailnet = ["ip", "netns", "exec", host_tailnet.name, sys.executable, "-c", answer]
    in_pod = ["ip", "netns", "exec", pod.name, sys.executable, "-c", talk, DEVICE]
    pipes = {"stdout": subprocess.PIPE, "stdin": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(in_tailnet, **pipes) as server:
        assert server.stdout.readline() == "ready\n"
        with subprocess.Popen(in_pod, **pipes, stderr=subprocess.DEVNULL) as client:
            client.stdin.write("one\n")
            assert client.stdout.readline() == "one\n"
            assert node.limit("all", shop="pods") is True
            client.stdin.write("two\n")
            assert client.stdout.read().strip() == ""
        server.kill()
    assert reached(pod, *BOTH) == set()
    assert node.limit("all", shop="pods") is False
    assert node.limit() is True
    assert reached(pod, *BOTH) == set(BOTH)
    assert "tailnet" not in node.nft()


def test_who_calls_a_limited_pod_from_the_tailnet_is_answered(node, conf, host_tailnet):
    node.limit("pods")
    pod = node.pod()
    made = node.add({**conf, **mapped((8080, 80, "tcp"))}, pod).ok
    own = [ip["address"].partition("/")[0] for ip in made["ips"]]
    with pod.serving(80, address="::"):
        assert host_tailnet.asks(own[0], 80)
        assert host_tailnet.asks(own[1], 80)
        assert host_tailnet.asks(NODE, 8080)


def elements(node) -> list[str]:
    """Of the sets of limited pods."""
    listed = json.loads(node.netns.run("nft", "-j", "list", "table", "inet", "headcni").stdout)
    sets = [one["set"] for one in listed["nftables"] if "set" in one]
    return [e for one in sets if one["name"].startswith("tailnet") for e in one.get("elem", ())]


def test_what_a_pod_was_limited_to_goes_with_it(node, conf, host_tailnet):
    node.limit("all", shop="pods")
    only = {
        "ranges": [[{"subnet": "10.55.1.0/24", "rangeStart": "10.55.1.9", "rangeEnd": "10.55.1.9"}]]
    }
    conf = {**node.conf(datapath=conf["datapath"]), "ipam": {"type": "headcni-ipam", **only}}
    shop = added(node, conf, **SHOP)
    assert elements(node) == ["10.55.1.9"]
    node.delete(conf, shop, **SHOP).succeeds()
    assert elements(node) == []
    bank = added(node, conf, **BANK)
    assert reached(bank, BOTH[0]) == {BOTH[0]}
    node.delete(conf, bank, **BANK).succeeds()


def test_an_element_that_was_left_behind_does_not_go_for_the_next_pod(node, conf, host_tailnet):
    """A process that was killed may have left it."""
    node.limit("pods", shop="all")
    first = node.add(conf, **BANK).address
    following = str(first).replace(".2", ".3")
    node.netns.run("nft", f"add element inet headcni tailnet_all_4 {{ {following} }}")
    pod = node.pod()
    assert node.add(conf, pod, **BANK).address == following
    assert reached(pod, BOTH[0]) == set()


@pytest.mark.parametrize(
    "change",
    [
        "flush ruleset",
        "flush chain inet headcni tailnet",
        "flush chain inet headcni tailnet_pods",
        "flush set inet headcni tailnet_pods_4",
        "delete rule inet headcni from_pods handle {handle}",
    ],
)
def test_what_somebody_takes_away_is_noticed_and_put_back(node, conf, host_tailnet, change):
    node.limit("100.64.0.8:80", shop="pods")
    pod = node.pod()
    made = node.add(conf, pod, **SHOP).ok
    node.check(conf, pod, made, **SHOP).succeeds()
    assert node.runs(REPAIR_FIREWALL) == [False, False]
    if "{handle}" in change:
        listed = node.netns.run("nft", "-a", "list", "chain", "inet", "headcni", "from_pods").stdout
        line = next(one for one in listed.splitlines() if "@tailnet_pods_4" in one)
        change = change.format(handle=line.rpartition(" ")[2])
    node.netns.run("nft", change)
    assert "nft" in node.check(conf, pod, made, **SHOP).error["details"]
    assert node.runs(REPAIR_FIREWALL) == [True, False]
    node.check(conf, pod, made, **SHOP).succeeds()
    assert reached(pod, *BOTH) == set()


def test_an_add_after_a_flushed_ruleset_limits_all_pods_again(node, conf, host_tailnet):
    node.limit("all", shop="pods")
    before = added(node, conf, **SHOP)
    node.netns.run("nft", "flush ruleset")
    after = added(node, conf, **SHOP)
    for pod in (before, after):
        assert reached(pod, *BOTH) == set()


def test_a_network_that_is_not_masqueraded_is_limited_too(node, conf, host_tailnet):
    plain = {**conf, "ip_masq": False}
    running = added(node, plain)
    assert reached(running, *BOTH) == set(BOTH)
    node.limit("pods")
    pod = added(node, plain)
    for one in (running, pod):
        assert reached(one, *BOTH, *MESH) == MESH
    node.limit("all", shop="pods")
    assert reached(added(node, plain, **SHOP), *BOTH, *MESH) == MESH
    assert reached(pod, *BOTH) == set(BOTH)


def test_a_netconf_cannot_make_the_tailnet_part_of_the_mesh(node, conf, host_tailnet):
    node.limit("pods")
    pod = added(node, conf)
    added(node, {**conf, "name": "other", "service_cidr": "100.64.0.0/10", "bridge": "other0"})
    assert reached(pod, *BOTH, *MESH) == MESH


def test_pods_of_another_plugin_are_limited_too(node, host_tailnet):
    node.limit("all", shop="pods")
    delegate = {
        "type": "bridge",
        "bridge": "other0",
        "isGateway": True,
        "ipMasq": True,
        "ipam": {"type": "host-local", "subnet": "10.77.1.0/24", "dataDir": str(node.tmp / "hl")},
    }
    conf = node.conf(delegate=delegate, pod_cidr=None, ipam=None)
    shop, bank = added(node, conf, **SHOP), added(node, conf, **BANK)
    assert reached(shop, BOTH[0]) == set()
    assert reached(bank, BOTH[0]) == {BOTH[0]}
    node.delete(conf, shop, **SHOP).succeeds()
    assert elements(node) == []


def test_a_lost_store_opens_nothing(node, conf, host_tailnet):
    node.limit("100.64.0.7:80")
    pod = added(node, conf)
    assert reached(pod, BOTH[0]) == {BOTH[0]}
    for name in ("headcni.db", "headcni.db-wal", "headcni.db-shm"):
        (node.tmp / "data" / name).unlink(missing_ok=True)
    added(node, conf)
    assert reached(pod, *BOTH) == set()
    assert node.limit("100.64.0.7:80") is True  # the daemon says it again
    assert reached(pod, *BOTH) == {BOTH[0]}


def test_an_annotation_of_the_pod_itself_widens_nothing(node, conf, host_tailnet):
    node.limit("pods")
    notes = {"io.kubernetes.cri.pod-annotations": {"headcni.dev/tailnet-access": "all"}}
    pod = added(node, {**conf, "runtimeConfig": notes}, **SHOP)
    assert reached(pod, *BOTH) == set()
