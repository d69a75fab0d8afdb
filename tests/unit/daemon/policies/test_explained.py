"""The answer to `headcnictl policy explain`."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

import pytest

from headcni.daemon.policies.explained import explained
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
WORLD = World.of(PODS, policies=[ALLOW])
PROTECTED = {("shop", "db"), ("shop", "web")}


def asked(*words: str, world: World = WORLD, protected: Any = PROTECTED) -> dict[str, Any]:
    return explained(world, "node1", protected, words)


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
