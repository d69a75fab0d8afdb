"""What policies allow and deny, with real connections: each line of the table, for both datapaths
and both IP versions.

Pods: web, front and back in the namespace shop; mate (app=front) in ops. `far` is a pod of ops on
another node, and `world` is a host outside of the cluster. Each has an agent that answers on some
ports (tests/support/agent.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cni_node import CniNode
from policy_node import (
    PolicyDaemon,
    Station,
    add,
    namespace_object,
    pod_object,
    policy_object,
)

UDP = "UDP"
PATIENCE, DENIED_SECONDS = 5.0, 0.4
NEAR, FAR = {4: "10.55.2.5", 6: "fd55:0:0:2::5"}, {4: "10.55.2.0/24", 6: "fd55:0:0:2::/64"}
WORLD = {4: "192.0.2.2", 6: "2001:db8::2"}
WORLD_RANGE = {4: "192.0.2.0/24", 6: "2001:db8::/64"}
ALL = {4: "0.0.0.0/0", 6: "::/0"}
PODS = {
    ("shop", "web"): {"app": "web", "tier": "1"},
    ("shop", "front"): {"app": "front"},
    ("shop", "back"): {"app": "back", "tier": "2"},
    ("ops", "mate"): {"app": "front"},
}
WEB_PORTS = [("http", 80, "TCP"), ("alt", 8080, "TCP"), ("udp", 90, "UDP"), ("sig", 100, "SCTP")]
MATE_PORTS = [("http", 81, "TCP")]
OTHERS = ("front", "back", "mate", "far", "world")


class Case(NamedTuple):
    name: str
    policies: dict[str, Any]  # specs by namespace/name; {4: ..., 6: ...} are texts by IP version
    allowed: tuple[str, ...]  # "front > web tcp 80"
    denied: tuple[str, ...] = ()


def app(name: str) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": {"app": name}}}


def namespace(**labels: str) -> dict[str, Any]:
    return {"namespaceSelector": {"matchLabels": labels}}


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    one: dict[str, Any] = {"key": key, "operator": operator}
    return {"matchExpressions": [{**one, "values": list(values)} if values else one]}


def block(cidr: Any, *without: Any) -> dict[str, Any]:
    return {"ipBlock": {"cidr": cidr, **({"except": list(without)} if without else {})}}


def port(number: Any, protocol: str = "TCP", end: int = 0) -> dict[str, Any]:
    found = {"port": number, "protocol": protocol}
    return {**found, "endPort": end} if end else found


def ingress(*rules: dict[str, Any], pods: Any = None) -> dict[str, Any]:
    pods = app("web")["podSelector"] if pods is None else pods
    return {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": list(rules)}


def egress(*rules: dict[str, Any], pods: Any = None) -> dict[str, Any]:
    pods = app("web")["podSelector"] if pods is None else pods
    return {"podSelector": pods, "policyTypes": ["Egress"], "egress": list(rules)}


def each(sources: str, rest: str) -> tuple[str, ...]:
    """Every pod of the sources towards the rest."""
    return tuple(f"{one} {rest}" for one in sources.split())


def to_each(source: str, destinations: str, rest: str) -> tuple[str, ...]:
    return tuple(f"{source} > {one} {rest}" for one in destinations.split())


EVERYONE = "front back mate far world"
CASES = (
    Case("no policy", {}, (*each(EVERYONE, "> web tcp 80"), *to_each("web", EVERYONE, "tcp 80"))),
    Case(
        "default deny of ingress",
        {"shop/deny": ingress(pods={})},
        ("node > web tcp 80", "web > mate tcp 80", "web > world udp 90", "front > mate tcp 80"),
        (*each(EVERYONE, "> web tcp 80"), "front > back tcp 80", "front > web udp 90"),
    ),
    Case(
        "default deny of ingress, also of ICMP and SCTP",
        {"shop/deny": ingress(pods={})},
        ("node > web icmp 0", "web > mate icmp 0"),
        ("mate > web icmp 0", "mate > web sctp 100", "far > web icmp 0"),
    ),
    Case(
        "default deny of egress",
        {"shop/deny": egress(pods={})},
        ("mate > web tcp 80", "far > web tcp 80", "node > web tcp 80"),
        (*to_each("web", EVERYONE, "tcp 80"), "web > world udp 90", "web > node tcp 80"),
    ),
    Case(
        "default deny of both directions",
        {"shop/deny": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}},
        ("node > web tcp 80", "mate > world tcp 80", "far > mate tcp 80"),
        (*each(EVERYONE, "> web tcp 80"), *to_each("web", EVERYONE, "tcp 80")),
    ),
    Case(
        "policyTypes left out without egress rules",
        {"shop/deny": {"podSelector": {}}},
        ("web > mate tcp 80",),
        ("mate > web tcp 80",),
    ),
    Case(
        "policyTypes left out with egress rules",
        {"shop/some": {"podSelector": {}, "egress": [{"to": [app("front")]}]}},
        (),
        ("web > mate tcp 80", "mate > web tcp 80", "web > world tcp 80"),
    ),
    Case(
        "egress rules without Egress in policyTypes count for nothing",
        {"shop/some": {**ingress({}), "egress": []}},
        ("web > mate tcp 80", "mate > web tcp 80"),
    ),
    Case(
        "a rule without peers and ports allows everything",
        {"shop/open": ingress({})},
        (*each(EVERYONE, "> web tcp 80"), "world > web udp 90", "far > web icmp 0"),
    ),
    Case(
        "an empty list of peers is everyone",
        {"shop/open": ingress({"from": [], "ports": [port(80)]})},
        each(EVERYONE, "> web tcp 80"),
        ("front > web tcp 81", "front > web udp 80"),
    ),
    Case(
        "a policy that selects no pod changes nothing",
        {"shop/none": ingress(pods=app("nobody")["podSelector"])},
        each(EVERYONE, "> web tcp 80"),
    ),
    Case(
        "a policy applies in its own namespace only",
        {"ops/deny": ingress(pods={})},
        ("front > web tcp 80", "mate > web tcp 80"),
        ("front > mate tcp 80", "far > mate tcp 80"),
    ),
    Case(
        "podSelector: pods of the policy's namespace",
        {"shop/some": ingress({"from": [app("front")]})},
        ("front > web tcp 80", "front > web udp 90", "front > web icmp 0", "front > web sctp 100"),
        each("back mate far world", "> web tcp 80"),
    ),
    Case(
        "podSelector: empty is all pods of the namespace",
        {"shop/some": ingress({"from": [{"podSelector": {}}]})},
        each("front back", "> web tcp 80"),
        each("mate far world", "> web tcp 80"),
    ),
    Case(
        "podSelector: In",
        {"shop/some": ingress({"from": [{"podSelector": expression("app", "In", "back", "x")}]})},
        ("back > web tcp 80",),
        each("front mate far", "> web tcp 80"),
    ),
    Case(
        "podSelector: NotIn",
        {"shop/some": ingress({"from": [{"podSelector": expression("tier", "NotIn", "2")}]})},
        ("front > web tcp 80",),
        each("back mate far", "> web tcp 80"),
    ),
    Case(
        "podSelector: Exists",
        {"shop/some": ingress({"from": [{"podSelector": expression("tier", "Exists")}]})},
        ("back > web tcp 80",),
        each("front mate", "> web tcp 80"),
    ),
    Case(
        "podSelector: DoesNotExist",
        {"shop/some": ingress({"from": [{"podSelector": expression("tier", "DoesNotExist")}]})},
        ("front > web tcp 80",),
        each("back mate", "> web tcp 80"),
    ),
    Case(
        "the policy's own selector with an expression",
        {"shop/some": ingress(pods=expression("tier", "In", "1", "2"))},
        ("mate > front tcp 80",),
        ("mate > web tcp 80", "mate > back tcp 80"),
    ),
    Case(
        "namespaceSelector: all pods of another namespace",
        {"shop/some": ingress({"from": [namespace(team="b")]})},
        each("mate far", "> web tcp 80"),
        each("front back world", "> web tcp 80"),
    ),
    Case(
        "namespaceSelector: by the name that Kubernetes sets",
        {"shop/some": ingress({"from": [namespace(**{"kubernetes.io/metadata.name": "ops"})]})},
        each("mate far", "> web tcp 80"),
        each("front back world", "> web tcp 80"),
    ),
    Case(
        "namespaceSelector: empty is every pod, but not every address",
        {"shop/some": ingress({"from": [{"namespaceSelector": {}}]})},
        each("front back mate far", "> web tcp 80"),
        ("world > web tcp 80",),
    ),
    Case(
        "namespaceSelector: NotIn",
        {"shop/some": ingress({"from": [{"namespaceSelector": expression("team", "NotIn", "b")}]})},
        each("front back", "> web tcp 80"),
        each("mate far world", "> web tcp 80"),
    ),
    Case(
        "both selectors in one peer: both must match",
        {"shop/some": ingress({"from": [{**namespace(team="b"), **app("front")}]})},
        ("mate > web tcp 80",),
        each("front back far world", "> web tcp 80"),
    ),
    Case(
        "both selectors in two peers: either will do",
        {"shop/some": ingress({"from": [namespace(team="b"), app("front")]})},
        each("mate far front", "> web tcp 80"),
        each("back world", "> web tcp 80"),
    ),
    Case(
        "ipBlock of a host outside",
        {"shop/some": ingress({"from": [block(WORLD_RANGE)]})},
        ("world > web tcp 80", "world > web udp 90"),
        each("front mate far", "> web tcp 80"),
    ),
    Case(
        "ipBlock with an exception",
        {"shop/some": ingress({"from": [block(ALL, WORLD_RANGE)]})},
        each("front mate far", "> web tcp 80"),
        ("world > web tcp 80",),
    ),
    Case(
        "an exception does not take back what another peer allows",
        {"shop/some": ingress({"from": [block(ALL, FAR), {**namespace(team="b"), **app("far")}]})},
        each("world far", "> web tcp 80"),
    ),
    Case(
        "ipBlock of pods of another node",
        {"shop/some": ingress({"from": [block(FAR)]})},
        ("far > web tcp 80",),
        each("front mate world", "> web tcp 80"),
    ),
    Case(
        "ipBlock with ports",
        {
            "shop/some": ingress(
                {"from": [block(WORLD_RANGE)], "ports": [port(80), port(90, "UDP")]}
            )
        },
        ("world > web tcp 80", "world > web udp 90"),
        ("world > web tcp 81", "world > web udp 80", "front > web tcp 80", "world > web icmp 0"),
    ),
    Case(
        "a numeric port",
        {"shop/some": ingress({"from": [app("front")], "ports": [port(80)]})},
        ("front > web tcp 80",),
        ("front > web tcp 81", "front > web udp 80", "back > web tcp 80", "front > web icmp 0"),
    ),
    Case(
        "a UDP port",
        {"shop/some": ingress({"from": [app("front")], "ports": [port(90, "UDP")]})},
        ("front > web udp 90",),
        ("front > web tcp 90", "front > web udp 80", "back > web udp 90"),
    ),
    Case(
        "an SCTP port",
        {"shop/some": ingress({"from": [app("front")], "ports": [port(100, "SCTP")]})},
        ("front > web sctp 100",),
        ("front > web sctp 80", "front > web tcp 100", "back > web sctp 100"),
    ),
    Case(
        "a range of ports",
        {"shop/some": ingress({"ports": [port(80, end=90)]})},
        ("front > web tcp 80", "mate > web tcp 81", "far > web tcp 90"),
        ("front > web tcp 100", "front > web udp 81", "front > web tcp 8080"),
    ),
    Case(
        "a range of SCTP ports and one of UDP ports",
        {"shop/some": ingress({"ports": [port(81, "UDP", 95), port(95, "SCTP", 200)]})},
        ("front > web udp 90", "far > web sctp 100"),
        ("front > web udp 80", "front > web sctp 80", "front > web tcp 90"),
    ),
    Case(
        "a protocol without a port is all of its ports",
        {"shop/some": ingress({"ports": [{"protocol": "UDP"}]})},
        ("front > web udp 80", "world > web udp 8080"),
        ("front > web tcp 80", "front > web sctp 100"),
    ),
    Case(
        "a port's name",
        {"shop/some": ingress({"from": [app("front")], "ports": [port("http")]})},
        ("front > web tcp 80",),
        ("front > web tcp 8080", "back > web tcp 80", "front > web udp 80"),
    ),
    Case(
        "names of a UDP port and of an SCTP port",
        {"shop/some": ingress({"ports": [port("udp", "UDP"), port("sig", "SCTP")]})},
        ("front > web udp 90", "front > web sctp 100"),
        ("front > web tcp 90", "front > web udp 100", "front > web tcp 100"),
    ),
    Case(
        "a name with another protocol is another name",
        {"shop/some": ingress({"ports": [port("http", "UDP")]})},
        (),
        ("front > web tcp 80", "front > web udp 80"),
    ),
    Case(
        "a name that the pod does not have allows nothing",
        {"shop/some": ingress({"ports": [port("nobody")]})},
        (),
        ("front > web tcp 80", "front > web tcp 8080"),
    ),
    Case(
        "rules of a policy add up",
        {
            "shop/some": ingress(
                {"from": [app("front")], "ports": [port(80)]},
                {"from": [app("back")], "ports": [port(81)]},
            )
        },
        ("front > web tcp 80", "back > web tcp 81"),
        ("front > web tcp 81", "back > web tcp 80"),
    ),
    Case(
        "policies add up",
        {
            "shop/deny": ingress(pods={}),
            "shop/front": ingress({"from": [app("front")], "ports": [port(80)]}),
            "shop/range": ingress({"from": [app("back")], "ports": [port(80, end=100)]}),
            "shop/world": ingress({"from": [block(WORLD_RANGE)]}),
        },
        (
            *("front > web tcp 80", "back > web tcp 80", "back > web tcp 90"),
            *("world > web tcp 8080", "world > web udp 90"),
        ),
        ("front > web tcp 90", "back > web tcp 8080", "mate > web tcp 80", "front > back tcp 80"),
    ),
    Case(
        "many peers on one port",
        {
            "shop/some": ingress(
                {
                    "from": [app("front"), app("x1"), app("x2"), app("x3"), app("x4"), app("x5")],
                    "ports": [port(80)],
                }
            )
        },
        ("front > web tcp 80",),
        ("back > web tcp 80", "front > web tcp 81"),
    ),
    Case(
        "so many ranges that overlap that they need several maps",
        {
            "shop/some": ingress(
                *(
                    {"from": [app(f"x{n}")], "ports": [port(1 + n, end=200 + n)]}
                    for n in range(130)
                ),
                {"from": [app("front")], "ports": [port(50, end=99)]},
            )
        },
        ("front > web tcp 80", "front > web tcp 90"),
        ("front > web tcp 100", "back > web tcp 80", "far > web tcp 90", "front > web udp 80"),
    ),
    Case(
        "egress to pods of the namespace",
        {"shop/some": egress({"to": [app("front")]})},
        ("web > front tcp 80", "web > front udp 90", "back > mate tcp 80"),
        to_each("web", "back mate far world node", "tcp 80"),
    ),
    Case(
        "egress to pods of another namespace",
        {"shop/some": egress({"to": [namespace(team="b")]})},
        to_each("web", "mate far", "tcp 80"),
        to_each("web", "front back world", "tcp 80"),
    ),
    Case(
        "egress with both selectors",
        {"shop/some": egress({"to": [{**namespace(team="b"), **app("front")}]})},
        ("web > mate tcp 80",),
        to_each("web", "front far world", "tcp 80"),
    ),
    Case(
        "egress to an ipBlock",
        {"shop/some": egress({"to": [block(WORLD_RANGE)], "ports": [port(80), port(90, "UDP")]})},
        ("web > world tcp 80", "web > world udp 90"),
        ("web > world tcp 81", "web > front tcp 80", "web > far tcp 80", "web > world icmp 0"),
    ),
    Case(
        "egress to all but an exception",
        {"shop/some": egress({"to": [block(ALL, FAR)]})},
        to_each("web", "front mate world node", "tcp 80"),
        ("web > far tcp 80",),
    ),
    Case(
        "egress on a range of ports",
        {"shop/some": egress({"ports": [port(80, end=81), port(100, "SCTP")]})},
        ("web > mate tcp 81", "web > world tcp 80", "web > far sctp 100"),
        ("web > mate tcp 90", "web > world udp 80"),
    ),
    Case(
        "egress by a port's name, which means what the other pod says",
        {"shop/some": egress({"to": [{"namespaceSelector": {}}], "ports": [port("http")]})},
        ("web > mate tcp 81",),
        ("web > mate tcp 80", "web > front tcp 80", "web > world tcp 81"),
    ),
    Case(
        "egress by a port's name to anyone who has one",
        {"shop/some": egress({"ports": [port("http")]}, pods={})},
        ("back > mate tcp 81", "back > web tcp 80"),
        ("back > mate tcp 80", "back > world tcp 80", "back > web tcp 81"),
    ),
    Case(
        "both sides must allow it",
        {
            "shop/out": egress({"to": [namespace(team="b")]}, pods=app("front")["podSelector"]),
            "ops/in": ingress({"from": [namespace(team="a")], "ports": [port(80)]}, pods={}),
        },
        ("front > mate tcp 80", "back > mate tcp 80"),
        ("front > mate tcp 81", "front > web tcp 80", "far > mate tcp 80"),
    ),
    Case(
        "answers pass whatever the other direction says",
        {
            "shop/in": ingress({"from": [app("front")]}),
            "shop/out": egress(pods=app("web")["podSelector"]),
        },
        ("front > web tcp 80", "front > web udp 90", "front > web icmp 0", "node > web tcp 80"),
        ("web > front tcp 80", "web > front udp 90"),
    ),
    Case(
        "a pod reaches itself, whatever is denied",
        {"shop/deny": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}},
        ("web > web tcp 80", "web > web udp 90"),
        ("web > front tcp 80",),
    ),
    Case(
        "links of one pod alone do not open its neighbours",
        {"shop/some": ingress({"from": [app("mate")]}), "ops/deny": ingress(pods={})},
        ("mate > front tcp 80",),
        ("front > web tcp 80", "mate > web tcp 80", "front > mate tcp 80"),
    ),
)


class Stage:
    """A node with its pods, which all cases of a datapath share."""

    def __init__(self, node: CniNode, datapath: str) -> None:
        self.node, self.daemon = node, PolicyDaemon(node)
        # The node's other bridges are left alone, and ours must not depend on what is said of them.
        for which in ("iptables", "ip6tables"):
            node.netns.run("sysctl", "-qw", f"net.bridge.bridge-nf-call-{which}=0")
        conf = node.dual(enable_network_policy=True, datapath=datapath)
        ports = {("shop", "web"): WEB_PORTS, ("ops", "mate"): MATE_PORTS}
        objects = [pod_object(*key, labels, ports.get(key)) for key, labels in PODS.items()]
        objects.append(pod_object("ops", "far", {"app": "far"}, None, [*NEAR.values()]))
        namespaces = [namespace_object("shop", team="a"), namespace_object("ops", team="b")]
        self.daemon.ask("world", {"pods": objects, "namespaces": namespaces})
        self.stations = {}
        for where, name in PODS:
            netns, answer = add(node, conf, name, where, self.daemon)
            addresses = [one["address"].partition("/")[0] for one in answer.ok["ips"]]
            self.stations[name] = Station(netns, addresses)
        self._add_others()

    def _add_others(self) -> None:
        """The other node's pod is a namespace behind the world."""
        world, far = self.node.outside, self.node.pod()
        world.run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
        world.ip(f"link add far type veth peer name eth0 netns {far.name}")
        for version, via in ((4, "10.55.2.1/24"), (6, "fd55:0:0:2::1/64")):
            length = via.partition("/")[2]
            at_once = " nodad" if version == 6 else ""
            world.ip(f"-{version} addr add {via} dev far{at_once}")
            far.ip(f"-{version} addr add {NEAR[version]}/{length} dev eth0{at_once}")
        world.ip("link set far up")
        far.ip("link set eth0 up")
        for version, via in ((4, "10.55.2.1"), (6, "fd55:0:0:2::1")):
            far.ip(f"-{version} route add default via {via}")
            node = self.node.NODE_IP if version == 4 else self.node.NODE_IP6
            pods = "10.55.1.0/24" if version == 4 else "fd55:0:0:1::/64"
            world.ip(f"-{version} route add {pods} via {node}")
            self.node.netns.ip(f"-{version} route add {FAR[version]} via {WORLD[version]}")
        self.stations["far"] = Station(far, [*NEAR.values()])
        self.stations["world"] = Station(world, [*WORLD.values()])
        self.stations["node"] = Station(self.node.netns, [self.node.NODE_IP, self.node.NODE_IP6])

    def apply(self, policies: dict[str, Any]) -> None:
        for name, spec in policies.items():
            where, _slash, plain = name.partition("/")
            found = policy_object(where, plain, spec)
            self.daemon.ask("policy", {"key": [where, plain], "object": found})

    def withdraw(self, policies: dict[str, Any]) -> None:
        for name in policies:
            where, _slash, plain = name.partition("/")
            self.daemon.ask("policy", {"key": [where, plain]})

    def wrong(self, case: Case, version: int) -> list[str]:
        """The attempts that went otherwise than the case says."""
        asked: dict[str, list[tuple[str, bool, list[Any]]]] = {}
        for lines, allowed in ((case.allowed, True), (case.denied, False)):
            for line in lines:
                source, _arrow, destination, protocol, number = line.split()
                seconds = PATIENCE if allowed else DENIED_SECONDS
                to = self.stations[destination].address(version)
                attempt = [protocol, to, int(number), seconds]
                asked.setdefault(source, []).append((line, allowed, attempt))

        def ask(source: str) -> list[str]:
            said = self.stations[source].tries([attempt for _l, _a, attempt in asked[source]])
            return [
                f"{line} was {'allowed' if reached else 'denied'}"
                for (line, allowed, _unused), reached in zip(asked[source], said)
                if reached != allowed
            ]

        with ThreadPoolExecutor(len(self.stations)) as workers:
            return [line for lines in workers.map(ask, asked) for line in lines]

    def remove(self) -> None:
        for one in self.stations.values():
            one.end()
        self.daemon.kill()
        self.node.remove()


@contextmanager
def staged(folder: Path, plugins: Path, datapath: str) -> Iterator[Stage]:
    node = CniNode.create(folder, plugins)
    try:
        made = Stage(node, datapath)
    except BaseException:
        node.remove()
        raise
    yield made
    made.remove()


@pytest.fixture(scope="module", params=["bridge", "routed"])
def stage(request, plugins, tmp_path_factory):
    with staged(tmp_path_factory.mktemp("policies"), plugins, request.param) as made:
        yield made


def _of(version: int, found: Any) -> Any:
    """A specification with the texts of one IP version."""
    if isinstance(found, dict):
        if set(found) == {4, 6}:
            return found[version]
        return {key: _of(version, value) for key, value in found.items()}
    return [_of(version, one) for one in found] if isinstance(found, list) else found


@pytest.mark.parametrize("version", [4, 6], ids=["IPv4", "IPv6"])
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_only_what_policies_allow_gets_through(stage, case, version):
    policies = _of(version, case.policies)
    stage.apply(policies)
    try:
        assert stage.wrong(case, version) == []
        assert stage.daemon.ask("repair") == [], "the kernel does not have what was compiled"
    finally:
        stage.withdraw(policies)
