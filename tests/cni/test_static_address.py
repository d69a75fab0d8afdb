"""A pod's author asks for an address by annotation, and libcni hands it to the plugin."""

from __future__ import annotations

from cni_node import EMPTY

from headcni.errors import ADDRESS_TAKEN, INVALID_CONFIG, PORT_TAKEN

ANNOTATIONS = "io.kubernetes.cri.pod-annotations"


def ipam(*namespaces: str) -> dict:
    return {
        "type": "headcni-ipam",
        "subnet": "10.55.1.0/24",
        "annotationNamespaces": list(namespaces),
    }


def asking(node, address: str, *namespaces: str) -> dict:
    given = {ANNOTATIONS: {"headcni.dev/ip": address, "kubernetes.io/config.source": "api"}}
    own = ipam(*(namespaces or ("*",)))
    return node.conf(capabilities={ANNOTATIONS: True}, runtimeConfig=given, ipam=own)


def test_a_pod_gets_the_address_of_its_annotation(node):
    conf, pod = asking(node, "10.55.1.77"), node.pod()
    assert node.add(conf, pod).address == "10.55.1.77"
    assert "10.55.1.77/24" in pod.addresses("eth0")
    node.delete(conf, pod).succeeds()
    assert node.leftovers() == EMPTY


def test_libcni_passes_the_annotations_on_where_they_are_asked_for(node):
    pod = node.pod()
    annotations = {ANNOTATIONS: {"headcni.dev/ip": "10.55.1.78"}}
    conf = node.conf(cniVersion="1.0.0", capabilities={ANNOTATIONS: True}, ipam=ipam("*"))
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


def of(namespace: str, name: str = "web-0") -> str:
    return f"IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name}"


def test_only_pods_of_allowed_namespaces_may_ask(node):
    conf, pod = asking(node, "10.55.1.77", "shop", "team-*"), node.pod()
    refused = node.add(conf, pod, args=of("evil")).error
    assert refused["code"] == INVALID_CONFIG
    assert "'evil' may not ask for an address by the annotation headcni.dev/ip" in refused["msg"]
    assert node.add(conf, args=of("shop")).address == "10.55.1.77"
    node.add(asking(node, "10.55.1.78", "shop", "team-*"), args=of("team-a")).succeeds()
    nobody = {**conf, "ipam": ipam()}
    assert node.add(nobody, args=of("shop")).error["code"] == INVALID_CONFIG


def test_headcni_ipam_by_itself_asks_for_the_namespace_too(node):
    conf = {**asking(node, "10.55.1.77", "shop"), "type": "bridge"}
    conf["ipam"] = {**conf["ipam"], "dataDir": str(node.tmp / "data")}
    how = {"plugin": "headcni-ipam"}
    assert node.add(conf, args=of("evil"), **how).error["code"] == INVALID_CONFIG
    assert node.add(conf, args=of("shop"), **how).address == "10.55.1.77"


def test_who_has_an_address_or_a_host_port_is_told_only_within_the_namespace(node):
    ports = {"portMappings": [{"hostPort": 8080, "containerPort": 80}]}
    conf = asking(node, "10.55.1.77")
    both = {**conf, "runtimeConfig": {**conf["runtimeConfig"], **ports}}
    owner = node.pod()
    node.add(both, owner, args=of("shop", "database-0")).succeeds()
    only_ports = node.conf(runtimeConfig=ports)
    for asked, code in ((conf, ADDRESS_TAKEN), (only_ports, PORT_TAKEN)):
        mine = node.add(asked, args=of("shop")).error
        assert mine["code"] == code
        assert "shop/database-0" in f"{mine}"
        others = node.add(asked, args=of("evil")).error
        assert others["code"] == code
        assert "database-0" not in f"{others}" and owner.name not in f"{others}"
