"""A pod's author asks for an address by annotation, and libcni hands it to the plugin."""

from __future__ import annotations

from cni_node import EMPTY

from headcni.errors import ADDRESS_TAKEN, INVALID_CONFIG

ANNOTATIONS = "io.kubernetes.cri.pod-annotations"


def asking(node, address: str) -> dict:
    given = {ANNOTATIONS: {"headcni.dev/ip": address, "kubernetes.io/config.source": "api"}}
    return node.conf(capabilities={ANNOTATIONS: True}, runtimeConfig=given)


def test_a_pod_gets_the_address_of_its_annotation(node):
    conf, pod = asking(node, "10.55.1.77"), node.pod()
    assert node.add(conf, pod).address == "10.55.1.77"
    assert "10.55.1.77/24" in pod.addresses("eth0")
    node.delete(conf, pod).succeeds()
    assert node.leftovers() == EMPTY


def test_libcni_passes_the_annotations_on_where_they_are_asked_for(node):
    pod = node.pod()
    annotations = {ANNOTATIONS: {"headcni.dev/ip": "10.55.1.78"}}
    conf = node.conf(cniVersion="1.0.0", capabilities={ANNOTATIONS: True})
    node.cnitool("add", conf, pod, **annotations).succeeds()
    assert "10.55.1.78/24" in pod.addresses("eth0")
    node.cnitool("del", conf, pod, **annotations).succeeds()
    assert node.leftovers() == EMPTY


def test_an_address_that_is_taken_or_makes_no_sense_is_refused_by_name(node):
    node.add(asking(node, "10.55.1.77")).succeeds()
    taken = node.add(asking(node, "10.55.1.77")).error
    assert taken["code"] == ADDRESS_TAKEN
    assert "10.55.1.77" in taken["msg"]
    wrong = node.add(asking(node, "10.55.1.777")).error
    assert wrong["code"] == INVALID_CONFIG
    assert "annotation headcni.dev/ip" in wrong["details"]
    elsewhere = node.add(asking(node, "10.99.1.7")).error
    assert "is in no range of the network" in elsewhere["msg"]
