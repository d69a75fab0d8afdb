"""Objects of the API as records, and what is said of those with mistakes."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest

from headcni.errors import CniError
from headcni.policy.objects import (
    MOST_ENTRIES,
    Block,
    ContainerPort,
    Namespace,
    Peer,
    Pod,
    Policy,
    Port,
    Requirement,
    Rule,
    Selector,
)


def policy(spec):
    return Policy.from_object({"metadata": {"namespace": "shop", "name": "web"}, "spec": spec})


def refused(spec):
    with pytest.raises(CniError) as caught:
        policy(spec)
    return str(caught.value)


def ingress(rule):
    return {"podSelector": {}, "ingress": [rule]}


def test_a_policy_is_read_completely():
    spec = {
        "podSelector": {"matchLabels": {"app": "web"}},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {
                "from": [{"ipBlock": {"cidr": "10.1.2.3/8", "except": ["10.9.0.0/16"]}}],
                "ports": [{"port": 80, "endPort": 90}, {"protocol": "UDP"}],
            }
        ],
        "egress": [{"to": [{"namespaceSelector": {}}], "ports": [{"port": "dns"}]}],
    }
    block = Block(ip_network("10.0.0.0/8"), (ip_network("10.9.0.0/16"),))
    assert policy(spec) == Policy(
        "shop",
        "web",
        Selector((Requirement("app", "In", ("web",)),)),
        (Rule((Peer(block),), (Port(6, 80, 90), Port(17))),),
        (Rule((Peer(None, Selector(), Selector()),), (Port(6, "dns"),)),),
    )


@pytest.mark.parametrize(
    ("spec", "directions"),
    [
        ({}, (True, False)),
        ({"egress": []}, (True, False)),
        ({"egress": [{}]}, (True, True)),
        ({"policyTypes": ["Egress"], "ingress": [{}]}, (False, True)),
        ({"policyTypes": ["Ingress"], "egress": [{}]}, (True, False)),
    ],
)
def test_the_directions_are_those_of_the_api(spec, directions):
    found = policy({"podSelector": {}, **spec})
    assert (found.ingress is not None, found.egress is not None) == directions


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"podSelectr": {}}, "spec.podSelectr is {}: expected a known key: podSelector?"),
        ({"policyTypes": ["Both"]}, "spec.policyTypes[0] is 'Both': expected Ingress or Egress"),
        (ingress({"from": [{}]}), "spec.ingress[0].from[0] is {}: expected podSelector,"),
        (ingress({"to": []}), "spec.ingress[0].to is []: expected a known key"),
        (ingress({"ports": [{"port": 0}]}), "ports[0].port is 0: expected a number from 1 to"),
        (ingress({"ports": [{"port": "80"}]}), "ports[0].port is '80': expected a port's number"),
        (ingress({"ports": [{"port": True}]}), "ports[0].port is True: expected a number"),
        (ingress({"ports": [{"endPort": 9}]}), "endPort is 9: expected a number as port beside"),
        (ingress({"ports": [{"port": 9, "endPort": 8}]}), "endPort is 8: expected a number from 9"),
        (ingress({"ports": [{"protocol": "ICMP"}]}), "protocol is 'ICMP': expected one of TCP"),
        (ingress({"from": [{"ipBlock": {"cidr": "10.0.0.1"}}]}), "cidr is '10.0.0.1': expected a"),
        (
            ingress({"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["11.0.0.0/16"]}}]}),
            "except[0] is '11.0.0.0/16': expected a range within 10.0.0.0/8",
        ),
        (
            ingress({"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}}]}),
            "expected no selector beside it",
        ),
        (
            {"podSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}},
            "values is []: expected at least one value",
        ),
        (
            {"podSelector": {"matchExpressions": [{"key": "a", "operator": "Near"}]}},
            "operator is 'Near': expected one of In, NotIn, Exists, DoesNotExist",
        ),
        ({"podSelector": {"matchLabels": {"a": 1}}}, "matchLabels.a is 1: expected a text"),
        ({"ingress": {}}, "spec.ingress is {}: expected a list of rules"),
    ],
)
def test_a_mistake_is_named_with_its_field_its_value_and_the_fix(spec, told):
    said = refused(spec)
    assert said.startswith("NetworkPolicy shop/web has a mistake: ")
    assert told in said


def test_all_mistakes_are_named_at_once():
    said = refused({"policyTypes": ["x"], "ingress": [{"ports": [{"port": 0}, {"port": 70000}]}]})
    assert "has 3 mistakes" in said


def test_what_is_too_large_is_refused_shortly():
    many = [{"ipBlock": {"cidr": "10.0.0.0/8"}} for _unused in range(MOST_ENTRIES + 1)]
    said = refused(ingress({"from": many}))
    assert f"at most {MOST_ENTRIES} entries" in said
    assert len(said) < 1000


@pytest.mark.parametrize("found", [None, [], "text", {"metadata": []}, {"kind": "Pod"}])
def test_what_is_no_policy_is_refused(found):
    with pytest.raises(CniError):
        Policy.from_object(found)


@pytest.mark.parametrize(
    ("requirement", "holds"),
    [
        (Requirement("a", "In", ("1", "2")), [True, True, False, False]),
        (Requirement("a", "NotIn", ("1",)), [False, True, True, True]),
        (Requirement("a", "Exists"), [True, True, True, False]),
        (Requirement("a", "DoesNotExist"), [False, False, False, True]),
    ],
)
def test_requirements_hold_as_in_the_api(requirement, holds):
    labels = ({"a": "1"}, {"a": "2", "b": "x"}, {"a": "3"}, {"b": "x"})
    assert [requirement.holds(one) for one in labels] == holds


def test_a_pod_is_read_with_its_named_ports():
    found = {
        "metadata": {
            "namespace": "shop",
            "name": "web",
            "uid": "u1",
            "labels": {"app": "web"},
            "annotations": {"kubernetes.io/config.hash": "static"},
        },
        "spec": {
            "nodeName": "n1",
            "containers": [
                {"ports": [{"name": "http", "containerPort": 80}, {"containerPort": 9}]}
            ],
            "initContainers": [
                {"ports": [{"name": "once", "containerPort": 1}]},
                {
                    "restartPolicy": "Always",
                    "ports": [{"name": "side", "containerPort": 2, "protocol": "UDP"}],
                },
            ],
        },
        "status": {"phase": "Running", "podIPs": [{"ip": "10.1.1.1"}, {"ip": "fd00::1"}]},
    }
    pod = Pod.from_object(found)
    assert pod.addresses == (ip_address("10.1.1.1"), ip_address("fd00::1"))
    assert pod.ports == (ContainerPort("http", 80, 6), ContainerPort("side", 2, 17))
    assert pod.counts and pod.node == "n1"
    assert [pod.is_sandbox(uid) for uid in ("u1", "static", "", "u2")] == [True, True, True, False]


def test_pods_that_have_ended_and_those_of_the_host_do_not_count():
    base = {"metadata": {"namespace": "a", "name": "b"}, "status": {"podIP": "10.1.1.1"}}
    assert Pod.from_object(base).counts
    ended = {**base, "status": {"phase": "Succeeded", "podIP": "10.1.1.1"}}
    assert not Pod.from_object(ended).counts
    on_host = Pod.from_object({**base, "spec": {"hostNetwork": True}})
    assert not on_host.counts and on_host.addresses == ()


def test_a_namespace_has_the_label_with_its_name():
    found = Namespace.from_object({"metadata": {"name": "shop", "labels": {"team": "a"}}})
    assert found.labels == {"team": "a", "kubernetes.io/metadata.name": "shop"}
