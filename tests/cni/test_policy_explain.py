"""`headcnictl policy explain` says what the kernel does: random policies and real connections."""

from __future__ import annotations

import random
from ipaddress import ip_address
from typing import Any

import pytest
from policy_node import namespace_object, pod_object, policy_object

from headcni.policy.explain import NODE, explain_version, pod_with
from headcni.policy.objects import PROTOCOLS, Namespace, Pod, Policy, World
from tests.cni.test_policy_table import (
    ALL,
    FAR,
    MATE_PORTS,
    NEAR,
    PODS,
    WEB_PORTS,
    WORLD_RANGE,
    Case,
    Stage,
    app,
    block,
    expression,
    namespace,
    port,
    staged,
)

ROUNDS, POLICIES, LINES = 6, 4, 40
PORTS = {"tcp": (80, 81, 90, 8080), "udp": (80, 90), "sctp": (90, 100)}
NAMES = ("http", "alt", "udp", "sig", "nobody")


@pytest.fixture(scope="module", params=["bridge", "routed"])
def stage(request, plugins, tmp_path_factory):
    with staged(tmp_path_factory.mktemp("explain"), plugins, request.param) as made:
        yield made


class Author:
    """Writes policies, the same for the same seed."""

    def __init__(self, seed: int, version: int, node_address: str) -> None:
        self.random, self.version = random.Random(seed), version
        self.node = f"{node_address}/{32 if version == 4 else 128}"

    def policies(self) -> dict[str, Any]:
        spaces = [self.random.choice(["shop", "shop", "ops"]) for _unused in range(POLICIES)]
        return {f"{space}/p{number}": self.spec() for number, space in enumerate(spaces)}

    def spec(self) -> dict[str, Any]:
        pick = self.random
        selectors = [{}, app("web")["podSelector"], app("front")["podSelector"]]
        types = pick.choice([["Ingress"], ["Egress"], ["Ingress", "Egress"]])
        return {
            "podSelector": pick.choice([*selectors, expression("tier", "Exists")]),
            "policyTypes": types,
            "ingress": [self.rule("from") for _unused in range(pick.randint(0, 3))],
            "egress": [self.rule("to") for _unused in range(pick.randint(0, 3))],
        }

    def rule(self, key: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.random.random() < 0.8:
            found[key] = [self.peer() for _unused in range(self.random.choice([1, 1, 2, 6]))]
        if self.random.random() < 0.7:
            found["ports"] = [self.port() for _unused in range(self.random.randint(1, 3))]
        return found

    def peer(self) -> dict[str, Any]:
        of = self.version
        return self.random.choice(
            [
                app("front"),
                app("web"),
                {"podSelector": {}},
                namespace(team="b"),
                {"namespaceSelector": {}, **app("front")},
                {"namespaceSelector": {}},
                block(FAR[of]),
                block(WORLD_RANGE[of]),
                block(ALL[of], FAR[of]),
                block(ALL[of], WORLD_RANGE[of], self.node),
                block(self.node),
            ]
        )

    def port(self) -> dict[str, Any]:
        pick, protocol = self.random, self.random.choice(["TCP", "TCP", "UDP", "SCTP"])
        first = pick.choice([79, 80, 81, 90])
        return pick.choice(
            [
                {"protocol": protocol},
                port(first, protocol),
                port(first, protocol, first + pick.choice([0, 1, 10, 8000])),
                port(pick.choice(NAMES), protocol),
                port("http"),
            ]
        )

    def line(self, stations: list[str]) -> str:
        """One attempt. A node answers UDP from the address that is nearest to the pod, and not
        from the one that was asked."""
        source, destination = self.random.sample(stations, 2)
        protocol = self.random.choice([*PORTS, "tcp"]) if destination != "node" else "tcp"
        return f"{source} > {destination} {protocol} {self.random.choice(PORTS[protocol])}"


def world_of(stage: Stage, policies: dict[str, Any]) -> World:
    """As Kubernetes knows it: with the addresses that the pods have."""
    ports = {("shop", "web"): WEB_PORTS, ("ops", "mate"): MATE_PORTS}
    pods = [
        pod_object(*key, labels, ports.get(key), stage.stations[key[1]].addresses)
        for key, labels in PODS.items()
    ]
    pods.append(pod_object("ops", "far", {"app": "far"}, None, [*NEAR.values()]))
    spaces = [namespace_object("shop", team="a"), namespace_object("ops", team="b")]
    return World.of(
        map(Pod.from_object, pods),
        map(Namespace.from_object, spaces),
        [
            Policy.from_object(policy_object(*name.split("/"), spec))
            for name, spec in policies.items()
        ],
    )


def says(stage: Stage, world: World, line: str, version: int) -> bool:
    """What the explanation says of the pods of this node."""
    source, _arrow, destination, protocol, number = line.split()

    def end(name: str) -> Any:
        address = ip_address(stage.stations[name].address(version))
        return pod_with(world, address) or address

    first = NODE if source == "node" else end(source)
    found = explain_version(
        world, first, end(destination), int(number), PROTOCOLS[protocol.upper()], version
    )
    return all(one.allowed for one in found.decisions if one.pod != ("ops", "far"))


@pytest.mark.parametrize("version", [4, 6], ids=["IPv4", "IPv6"])
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_the_explanation_agrees_with_the_kernel(stage, seed, version):
    author = Author(seed, version, stage.stations["node"].address(version))
    policies = author.policies()
    world = world_of(stage, policies)
    ends = [*stage.stations]
    lines = dict.fromkeys(author.line(ends) for _unused in range(LINES))
    beside = {"far", "world", "node"}  # without a pod of this node at either end
    asked = [line for line in lines if not {line.split()[0], line.split()[2]} <= beside]
    verdicts = {line: says(stage, world, line, version) for line in asked}
    case = Case(
        f"seed {seed}",
        policies,
        tuple(line for line, allowed in verdicts.items() if allowed),
        tuple(line for line, allowed in verdicts.items() if not allowed),
    )
    stage.apply(policies)
    try:
        assert stage.wrong(case, version) == [], policies
    finally:
        stage.withdraw(policies)
