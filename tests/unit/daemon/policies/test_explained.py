"""The answer to `headcnictl policy explain`."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

import pytest

from headcni.daemon.policies.explained import Here, explained
from headcni.errors import CniError
from headcni.policy.objects import ContainerPort, Pod, Policy, World


def pod(name: str, address: str, node: str = "node1", **labels: str) -> Pod:
    ports = (ContainerPort("sql", 5432, 6),)
    return Pod("shop", name, "", labels, (ip_address(address),), ports, node)


def policy(name: str, **spec: Any) -> Policy:
    meta = {"name": name, "namespace": "shop"}
    return Policy.from_object({"metadata": meta, "spec": {"podSelector": {}, **spec}})


WEB = {"podSelector": {"matchLabels": {"app": "web"}}}
PODS = [
    pod("db", "10.244.1.5", app="db"),
    pod("web", "10.244.1.6", app="web"),
    pod("far", "10.244.2.7", node="node2", app="web"),
]
ALLOW = policy("allow-web", ingress=[{"from": [WEB], "ports": [{"port": "sql"}]}])
HOST = {"cidr": "192.0.2.1/32"}
WORLD = World.of(PODS, policies=[ALLOW])
PROTECTED = {("shop", "db"), ("shop", "web")}


def asked(
    *words: str, world: World = WORLD, protected: Any = PROTECTED, **here: Any
) -> dict[str, Any]:
    return explained(world, Here("node1", protected, **here), words)


@pytest.mark.parametrize("port", ["5432/tcp", "sql/tcp", "sql"])
@pytest.mark.parametrize("source", ["shop/web", "10.244.1.6"])
def test_the_rule_that_allows_is_named(source, port):
    found = asked(source, "shop/db", port)
    assert found["allowed"] and (found["port"], found["protocol"]) == (5432, "TCP")
    ingress = found["decisions"][-1]
    assert (ingress["rule"], ingress["pod"]) == ("shop/allow-web ingress[0]", "shop/db")
    assert found["lines"][-1] == "allowed" and found["notes"] == []


@pytest.mark.parametrize(
    ("source", "port"), [("shop/web", "80/tcp"), ("shop/web", "sql/tcp"), ("192.0.2.1", "5432")]
)
def test_the_policy_that_denies_is_named(source, port):
    wanted = "5432/udp" if port == "sql/tcp" else port
    found = asked(source, "shop/db", wanted)
    assert not found["allowed"] and found["lines"][-1] == "denied"
    assert found["decisions"][-1]["isolated_by"] == ["shop/allow-web"]


def test_what_is_enforced_elsewhere_or_not_at_all_is_noted():
    found = asked("shop/db", "shop/far", "80")
    assert found["notes"] == ["the policies of shop/far are enforced by its own node, node2"]
    found = asked("shop/web", "shop/db", "80", protected=set())
    assert len(found["notes"]) == 2 and "they do not apply" in found["notes"][1]
    assert any(line.startswith("NOTE: ") for line in found["lines"])


def test_an_address_of_this_node_is_this_node():
    found = asked("192.0.2.1", "shop/db", "80", addresses={ip_address("192.0.2.1")})
    assert found["allowed"] and found["notes"] == ["192.0.2.1 is an address of this node"]
    found = asked("192.0.2.2", "shop/db", "80", addresses={ip_address("192.0.2.1")})
    assert not found["allowed"]


def test_this_node_is_an_address_for_pods_of_other_nodes():
    with pytest.raises(CniError) as raised:
        asked("node", "shop/far", "80")
    assert "an address of this node: shop/far is on node2" in str(raised.value)


def test_what_a_pod_of_the_hosts_network_reaches_depends_on_its_node():
    def on_host(node: str) -> Pod:
        return pod("host", "192.0.2.1", node)._replace(host_network=True, addresses=())

    world = World.of([*PODS, on_host("node1")], policies=[ALLOW])
    assert asked("shop/host", "shop/db", "80", world=world)["allowed"]
    world = World.of([*PODS, on_host("node2")], policies=[ALLOW])
    found = asked("shop/host", "shop/db", "80", world=world)
    assert not found["allowed"] and "ask with an address of that node" in found["notes"][0]


def test_a_connection_to_this_node_may_depend_on_the_address():
    only = policy("only", policyTypes=["Egress"], egress=[{"to": [{"ipBlock": HOST}]}])
    world = World.of(PODS, policies=[only])
    found = asked("shop/db", "node", "80", world=world)
    assert not found["allowed"] and "ask with the address" in found["notes"][0]
    assert asked("shop/db", "192.0.2.1", "80", world=world)["allowed"]


def test_an_address_of_a_pod_that_is_not_known_is_closed():
    closed = {ip_address("10.244.1.9"): ("shop", "new")}
    for words in (["10.244.1.9", "198.51.100.1", "80"], ["shop/web", "10.244.1.9", "80"]):
        found = asked(*words, world=World.of(PODS), closed=closed)
        assert not found["allowed"] and "shop/new: its labels are not known" in found["lines"][0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "SRC DST PORT"),
        (["shop/web", "shop/none", "80"], "'shop/none' is no pod that is known"),
        (["shop/web", "shop/db", "http"], "its name at DST"),
        (["shop/web", "192.0.2.1", "sql"], "its name at DST"),
        (["shop/web", "shop/db", "0"], "from 1 to 65535"),
        (["shop/web", "shop/db", "9" * 400], "from 1 to 65535"),
        (["shop/web", "shop/db", "80/icmp"], "tcp, udp, sctp"),
    ],
)
def test_a_question_that_is_not_understood_says_what_was_expected(words, said):
    with pytest.raises(CniError) as raised:
        asked(*words)
    assert said in str(raised.value) and len(str(raised.value)) < 700


def test_the_answer_is_bounded_however_many_policies_there_are():
    many = [policy(f"policy-{number:04}") for number in range(3000)]
    found = asked("shop/web", "shop/db", "80", world=World.of(PODS, policies=many))
    decision = found["decisions"][-1]
    assert (len(decision["isolated_by"]), decision["policies"]) == (50, 3000)
    assert len(decision["words"]) < 2100
