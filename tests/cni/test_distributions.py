"""The plugin with the Python and the libnftables of each Debian release that nodes may have."""

from __future__ import annotations

import pytest
from cni_node import EMPTY, mapped

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
