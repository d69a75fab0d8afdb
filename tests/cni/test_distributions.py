"""The plugin with the Python and the libnftables of each Debian release that nodes may have."""

from __future__ import annotations

import pytest
from cni_node import EMPTY, mapped, sh

from lab import image


@pytest.fixture(params=image.NODE_SUITES)
def old_node(request, node):
    made = image.of_suite(request.param)
    if not made.root.exists():
        pytest.skip(f"make cache builds the image of {request.param}")
    node.root = made.root
    return node


def test_a_pod_is_added_checked_and_deleted(old_node, datapath):
    node, pod = old_node, old_node.pod()
    ports = mapped((8080, 80, "tcp"), (8053, 53, "udp", "192.0.2.1"), (9000, 90, "sctp"))
    conf = {**node.dual(datapath=datapath), **ports}
    result = node.add(conf, pod).ok
    with pod.serving(80):
        assert node.outside.asks(node.NODE_IP, 8080) == node.OUTSIDE_IP
    with pod.serving(80, address="::"):
        assert node.outside.asks(node.NODE_IP6, 8080) == node.OUTSIDE_IP6
    with pod.serving(53, "udp"):
        assert node.outside.asks(node.NODE_IP, 8053, "udp") == node.OUTSIDE_IP
    with node.outside.serving(8000):
        assert pod.asks(node.OUTSIDE_IP, 8000) == node.NODE_IP
    node.check(conf, pod, result).succeeds()
    node.delete(conf, pod).succeeds()
    assert node.leftovers() == EMPTY


def test_a_pod_that_is_limited_is_added_checked_and_deleted(old_node, datapath):
    """The table is written and listed by the distribution's own libnftables."""
    node, pod = old_node, old_node.pod()
    node.limit(["100.64.0.7:443", "[fd7a:115c:a1e0::7]:53/udp", "100.64.1.0/24"], shop="pods")
    node.netns.run("nft", "flush ruleset")
    conf = node.dual(datapath=datapath)
    shop = {"args": "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web"}
    result = node.add(conf, pod, **shop).ok
    node.check(conf, pod, result, **shop).succeeds()
    assert "@tailnet_pods_4 goto tailnet_pods" in node.nft()
    node.delete(conf, pod, **shop).succeeds()
    assert node.leftovers() == EMPTY


# Runs the rest with this library hidden, as on a node that does not have it.
WITHOUT = """\
for library in $(ldconfig -p | sed -n 's,.*libnftables.so.1 .*=> ,,p'); do
    mount --bind /dev/null "$library"
done
exec "$@"
"""


@pytest.fixture
def without_libnftables(node, monkeypatch):
    *inside, python, isolated, _unused = node.command()
    hidden = [*inside, "unshare", "--mount", "sh", "-ec", WITHOUT, "sh", python, isolated]
    monkeypatch.setattr(node, "command", lambda plugin="headcni": [*hidden, node.plugins / plugin])
    return node


def check_firewall(node):
    """What the release says when it is tried out on a node."""
    daemon = (node.plugins / "headcni").resolve().with_name("headcni-daemon")
    command = [*node.command()[:-1], daemon, "--check-firewall"]
    done = sh(*command, check=False)
    return done.returncode, done.stdout.strip()


def test_a_release_finds_out_that_the_node_takes_its_rules(old_node):
    assert check_firewall(old_node) == (0, "this node takes the nft rules")
    assert "headcni" not in old_node.nft()
    old_node.call("STATUS", old_node.conf()).succeeds()
    assert "headcni" not in old_node.nft()


def test_a_node_that_does_not_take_the_rules_is_not_ready(without_libnftables):
    node = without_libnftables
    code, said = check_firewall(node)
    assert code == 1
    assert "this node's nftables refuses the rules that pods need" in said
    assert "install the package nftables" in said
    error = node.call("STATUS", node.conf()).error
    assert error["code"] == 50
    assert "install the package nftables" in error["details"]
    node.call("STATUS", node.conf(ipMasq=False)).succeeds()


TRY_OUT = """
import json
from headcni.datapath import firewall, netlink
firewall.try_out()
print(json.dumps(len(netlink._idle)))
"""


def test_the_namespace_that_rules_are_tried_in_ends(node):
    """A socket that was kept for later would keep it."""
    assert node.runs(TRY_OUT) == 0
