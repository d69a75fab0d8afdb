"""The compiled table does what the policies say, and however it came about it is the same."""

from __future__ import annotations

import random
import time
from ipaddress import ip_address

import pytest

from headcni.model import Owner, PodRef
from headcni.policy import compiler as compiler_module
from headcni.policy import layout
from headcni.policy.bindings import Binding
from headcni.policy.compiler import Compiler
from headcni.policy.explain import NODE, explain, explain_version, pod_with
from headcni.policy.objects import ContainerPort, Namespace, Pod, Policy, World
from tests.unit.policy.ruleset import ESTABLISHED, Packet, passes

TCP, UDP, SCTP, ICMP = 6, 17, 132, 1
APPS, TIERS, SPACES = ("web", "db", "cache"), ("1", "2", ""), ("a", "b", "c")
PORTS = (79, 80, 81, 443, 1000, 1001, 65535)
OUTSIDE = ("192.0.2.9", "198.51.100.7", "2001:db8::9")
NAMED = {
    "web": (ContainerPort("http", 80, TCP), ContainerPort("http", 443, TCP)),
    "db": (ContainerPort("http", 1000, TCP), ContainerPort("sig", 81, SCTP)),
    "cache": (ContainerPort("sig", 80, UDP),),
}


def pod(
    space: str, name: str, number: int, app: str = "web", tier: str = "", node: str = ""
) -> Pod:
    labels = {"app": app, **({"tier": tier} if tier else {})}
    where = "10.1" if node == "here" else "10.2"
    addresses = (
        ip_address(f"{where}.{number // 250}.{number % 250 + 1}"),
        ip_address(f"fd0{where[-1]}::{number + 1:x}"),
    )
    return Pod(space, name, f"uid-{name}-{number}", labels, addresses, NAMED.get(app, ()), node)


def bound(of: Pod, exempt: bool = False) -> Binding:
    owner = Owner("pods", f"box-{of.name}-{of.uid}", "eth0")
    ref = PodRef(of.namespace, of.name, of.uid)
    return Binding(owner, ref, of.addresses, (), "headcni0", exempt)


def policy(spec: dict, name: str = "one", space: str = "a") -> Policy:
    return Policy.from_object({"metadata": {"namespace": space, "name": name}, "spec": spec})


def world_of(pods: list[Pod], *policies: Policy) -> World:
    return World.of(pods, [Namespace(one, {"team": one}) for one in SPACES], policies)


def compiled(world: World, bindings: list[Binding], **settings) -> Compiler:
    made = Compiler(**settings)
    made.load(world, bindings)
    return made


def state_of(compiler: Compiler) -> tuple:
    desired = compiler.desired
    return desired.sets, desired.elements, desired.chains, desired.counters


class Random:
    """A cluster in which anything may happen, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pods: dict[tuple[str, str], Pod] = {}
        self.number = 0

    def selector(self, key: str, values: tuple[str, ...]) -> dict:
        pick, some = self.random, [one for one in values if one]
        return pick.choice(
            [
                {},
                {"matchLabels": {key: pick.choice(some)}},
                *(
                    {"matchExpressions": [one]}
                    for one in (
                        {"key": key, "operator": "In", "values": pick.sample(some, 2)},
                        {"key": key, "operator": "NotIn", "values": [pick.choice(some)]},
                        {"key": "tier", "operator": pick.choice(["Exists", "DoesNotExist"])},
                    )
                ),
            ]
        )

    def peer(self) -> dict:
        kind = self.random.randrange(4)
        if kind == 0:
            without = {"except": ["10.2.0.0/29", "10.2.0.128/25"]}
            return {
                "ipBlock": self.random.choice(
                    [
                        {"cidr": "10.2.0.0/16", **without},
                        {"cidr": "192.0.2.0/24"},
                        {"cidr": "0.0.0.0/0", "except": ["192.0.0.0/8"]},
                        {"cidr": "fd02::/64"},
                        {"cidr": "::/0", "except": ["fd01::/16"]},
                    ]
                )
            }
        found = {}
        if kind != 1:
            found["podSelector"] = self.selector("app", APPS)
        if kind != 2:
            found["namespaceSelector"] = self.selector("team", SPACES)
        return found

    def port(self) -> dict:
        protocol = self.random.choice(["TCP", "UDP", "SCTP"])
        kind = self.random.randrange(4)
        if kind == 0:
            return {"protocol": protocol}
        if kind == 1:
            return {"protocol": protocol, "port": self.random.choice(["http", "sig"])}
        first = self.random.choice(PORTS)
        if kind == 2:
            return {"protocol": protocol, "port": first}
        last = self.random.choice([one for one in PORTS if one >= first])
        return {"protocol": protocol, "port": first, "endPort": last}

    def rule(self, peers: str) -> dict:
        found: dict = {}
        if self.random.random() < 0.8:
            found[peers] = [self.peer() for _unused in range(self.random.choice([1, 1, 2, 7]))]
        if self.random.random() < 0.7:
            found["ports"] = [self.port() for _unused in range(self.random.randint(1, 3))]
        return found

    def policy(self, name: str) -> Policy:
        spec: dict = {"podSelector": self.selector("app", APPS)}
        types = self.random.choice([["Ingress"], ["Egress"], ["Ingress", "Egress"]])
        for direction, peers in (("ingress", "from"), ("egress", "to")):
            count = self.random.choice([0, 1, 1, 2])
            spec[direction] = [self.rule(peers) for _unused in range(count)]
        return policy({**spec, "policyTypes": types}, name, self.random.choice(SPACES))

    def pod(self, node: str = "") -> Pod:
        self.number += 1
        pick = self.random.choice
        name = f"pod{self.number}"
        return pod(
            pick(SPACES), name, self.number, pick(APPS), pick(TIERS), node or pick(["here", "far"])
        )

    def packet(self, world: World) -> Packet:
        addresses = [str(a) for one in world.pods.values() for a in one.addresses] + list(OUTSIDE)
        source = self.random.choice(addresses)
        same = [one for one in addresses if (":" in one) == (":" in source)]
        protocol = self.random.choice([TCP, TCP, UDP, SCTP, ICMP])
        return Packet(source, self.random.choice(same), protocol, self.random.choice(PORTS))


def as_policies_say(world: World, here: set[tuple[str, str]], packet: Packet) -> bool:
    """By the explanation, which reads the policies. Only pods of this node are judged here."""
    ends = [ip_address(packet.source), ip_address(packet.destination)]
    source, destination = (pod_with(world, one) or one for one in ends)
    version = ends[0].version
    found = explain_version(world, source, destination, packet.port, packet.protocol, version)
    return all(one.allowed for one in found.decisions if one.pod in here)


def links_of(world: World, here: set[tuple[str, str]], packet: Packet) -> Packet:
    """Pods of other nodes and hosts are behind another link."""
    ends = [pod_with(world, ip_address(one)) for one in (packet.source, packet.destination)]
    names = ["headcni0" if one and one.key in here else "tailscale0" for one in ends]
    return packet._replace(iifname=names[0], oifname=names[1])


@pytest.mark.parametrize("seed", range(40))
def test_the_table_says_what_the_policies_say(seed):
    cluster = Random(seed)
    pods = [cluster.pod() for _unused in range(14)]
    world = world_of(pods, *(cluster.policy(f"p{number}") for number in range(6)))
    bindings = [bound(one) for one in pods if one.node == "here"]
    here = {one.key for one in bindings}
    desired = compiled(world, bindings).desired
    for _unused in range(150):
        packet = links_of(world, here, cluster.packet(world))
        expected = as_policies_say(world, here, packet)
        assert passes(desired, packet) == expected, packet


@pytest.mark.parametrize("seed", range(25))
def test_many_changes_lead_to_the_same_table_as_a_fresh_start(seed):
    cluster = Random(seed)
    pods = [cluster.pod() for _unused in range(8)]
    compiler = compiled(world_of(pods), [bound(one) for one in pods if one.node == "here"])
    for step in range(40):
        change(cluster, compiler)
        compiler.sweep()
        compiler.desired.taken()
        fresh = compiled(copy_of(compiler.world), list(compiler.bindings.values()))
        assert state_of(compiler) == state_of(fresh), step


def copy_of(world: World) -> World:
    return World(dict(world.pods), dict(world.namespaces), dict(world.policies))


def change(cluster: Random, compiler: Compiler) -> None:
    world, pick = compiler.world, cluster.random
    kind = pick.randrange(7)
    if kind == 0 or not world.pods:
        made = cluster.pod()
        compiler.pod_changed(made.key, made)
        if made.node == "here":
            compiler.bind(bound(made))
    elif kind == 1:
        gone = pick.choice(list(world.pods.values()))
        compiler.unbind(bound(gone).owner)
        compiler.pod_changed(gone.key, None)
    elif kind == 2:
        one = pick.choice(list(world.pods.values()))
        app = pick.choice(APPS)
        labelled = one._replace(labels={**one.labels, "app": app}, ports=NAMED[app])
        compiler.pod_changed(one.key, labelled)
    elif kind == 3:
        ended = pick.choice(list(world.pods.values()))
        if ended.node != "here":
            compiler.pod_changed(ended.key, ended._replace(phase="Failed"))
    elif kind == 4:
        name = pick.choice(SPACES)
        compiler.namespace_changed(name, Namespace(name, {"team": pick.choice(SPACES)}))
    else:
        made_policy = cluster.policy(f"p{pick.randrange(5)}")
        same = world.policies.get(made_policy.key)
        compiler.policy_changed(
            made_policy.key, None if same and pick.random() < 0.5 else made_policy
        )


# What the explanation does not know of


WEB, MATE = pod("a", "web", 1, "web", node="here"), pod("a", "mate", 2, "db", node="here")
FAR = pod("b", "far", 3, "db", node="far")
FROM_DB = {
    "podSelector": {"matchLabels": {"app": "web"}},
    "ingress": [{"from": [{"podSelector": {}}]}],
}


def towards(of: Pod, source: Pod, **how) -> Packet:
    return Packet(str(source.addresses[0]), str(of.addresses[0]), TCP, 80, **how)


@pytest.fixture
def compiler():
    world = world_of([WEB, MATE, FAR], policy(FROM_DB))
    return compiled(world, [bound(WEB), bound(MATE)])


def test_established_connections_pass(compiler):
    packet = towards(WEB, FAR, iifname="tailscale0")
    assert not passes(compiler.desired, packet)
    assert passes(compiler.desired, packet._replace(state=ESTABLISHED))


def test_what_does_not_lead_to_pods_is_not_judged(compiler):
    packet = towards(WEB, FAR, iifname="tailscale0", oifname="eth0")
    assert passes(compiler.desired, packet)


def test_neighbour_discovery_passes(compiler):
    link_local = Packet("fe80::1", "fe80::2", 58, 135, hop_limit=255)
    assert passes(compiler.desired, link_local)
    assert passes(compiler.desired, link_local._replace(port=136))
    assert not passes(compiler.desired, link_local._replace(port=128))
    assert not passes(compiler.desired, link_local._replace(port=134))


def test_what_came_through_a_router_is_no_neighbour_discovery(compiler):
    client, web = FAR.addresses[1], WEB.addresses[1]
    forged = Packet(str(client), str(web), 58, 135, iifname="tailscale0", hop_limit=254)
    assert not passes(compiler.desired, forged)
    assert not passes(compiler.desired, forged._replace(port=136))


@pytest.mark.parametrize(
    ("deny", "policies", "open_"), [(True, True, False), (True, False, True), (False, True, True)]
)
def test_an_unknown_pod_is_closed_as_soon_as_any_policy_is_known(deny, policies, open_):
    world = world_of([MATE], *([policy(FROM_DB, space="c")] if policies else []))
    desired = compiled(world, [bound(MATE), bound(WEB)], deny_unknown=deny).desired
    assert passes(desired, towards(MATE, WEB)) is open_
    assert passes(desired, towards(WEB, MATE)) is open_


def test_a_pod_of_the_same_name_with_another_uid_is_not_known():
    world = world_of([WEB._replace(uid="another"), MATE], policy(FROM_DB, space="c"))
    desired = compiled(world, [bound(WEB), bound(MATE)]).desired
    assert not passes(desired, towards(WEB, MATE))


def test_a_pod_that_was_deleted_while_it_runs_is_treated_as_before(compiler):
    compiler.pod_changed(WEB.key, None)
    assert not passes(compiler.desired, towards(WEB, FAR, iifname="tailscale0"))
    assert passes(compiler.desired, towards(WEB, MATE))


def test_an_address_takes_nothing_along_to_the_next_pod(compiler):
    heir = pod("c", "heir", 2, "cache", node="here")
    assert heir.addresses == MATE.addresses
    assert passes(compiler.desired, towards(WEB, MATE))
    compiler.pod_changed(heir.key, heir._replace(addresses=()))
    compiler.bind(bound(heir))  # although nobody has said that the other one is gone
    assert bound(MATE).owner not in compiler.bindings
    assert not passes(compiler.desired, towards(WEB, heir))


def test_on_other_nodes_the_last_pod_with_an_address_counts():
    client = pod("a", "client", 3, "db", node="far")
    world = world_of([WEB, client], policy(FROM_DB))
    compiler = compiled(world, [bound(WEB)])
    packet = towards(WEB, client, iifname="tailscale0")
    assert passes(compiler.desired, packet)
    heir = pod("c", "heir", 3, "db", node="far")
    compiler.pod_changed(heir.key, heir)
    assert not passes(compiler.desired, packet)


def test_a_pod_that_lost_its_address_does_not_get_it_back_by_a_late_update():
    client = pod("a", "client", 3, "db", node="far")
    compiler = compiled(world_of([WEB, client], policy(FROM_DB)), [bound(WEB)])
    packet = towards(WEB, client, iifname="tailscale0")
    heir = pod("c", "heir", 3, "db", node="far")
    compiler.pod_changed(heir.key, heir)
    for late in (
        client._replace(phase="Running"),
        client._replace(labels={**client.labels, "tier": "2"}),
        client._replace(ports=()),
    ):
        compiler.pod_changed(late.key, late)
        assert not passes(compiler.desired, packet)
    compiler.pod_changed(heir.key, heir._replace(labels={"app": "web"}))
    assert not passes(compiler.desired, packet)
    compiler.pod_changed(heir.key, None)
    assert passes(compiler.desired, packet), "nobody else has it now"
    compiler.pod_changed(client.key, None)
    assert not passes(compiler.desired, packet) and compiler.peers == 2


def test_a_pod_that_changes_its_labels_and_its_address_leaves_the_address_to_others(compiler):
    client = pod("a", "client", 3, "db", node="far")
    heir = pod("c", "heir", 3, "db", node="far")
    for one in (client, heir, heir._replace(labels={"app": "x"}, addresses=())):
        compiler.pod_changed(one.key, one)
    assert passes(compiler.desired, towards(WEB, client, iifname="tailscale0"))


def test_an_address_that_many_claim_goes_from_the_last_to_the_one_before(compiler):
    clients = [pod("a", f"c{n}", 3, "db", node="far") for n in range(4)]
    for one in clients:
        compiler.pod_changed(one.key, one)
    everyone = sorted(one.key for one in clients)
    for key in everyone[1:3] + everyone[3:]:
        compiler.pod_changed(key, None)
    packet = towards(WEB, clients[0], iifname="tailscale0")
    assert passes(compiler.desired, packet)
    compiler.pod_changed(clients[0].key, None)
    assert not passes(compiler.desired, packet)


def test_groups_of_pods_are_reached_only_while_nobody_is_isolated(compiler):
    mdns = Packet(str(MATE.addresses[0]), "224.0.0.251", UDP, 443, pkttype=2)
    assert not passes(compiler.desired, mdns)
    compiler.policy_changed(("a", "one"), None)
    assert passes(compiler.desired, mdns)


@pytest.mark.parametrize("group", ["224.0.0.251", "255.255.255.255", "ff02::fb"])
@pytest.mark.parametrize("pkttype", [0, 1, 2])
@pytest.mark.parametrize("deny_unknown", [True, False])
def test_groups_are_closed_to_isolated_pods_in_frames_of_every_kind(group, pkttype, deny_unknown):
    world = world_of([WEB, MATE], policy(FROM_DB))
    desired = compiled(world, [bound(WEB), bound(MATE)], deny_unknown=deny_unknown).desired
    source = str(MATE.addresses[":" in group])
    assert not passes(desired, Packet(source, group, UDP, 5353, pkttype=pkttype))


def test_groups_are_closed_while_a_pod_is_not_known():
    elsewhere = policy(FROM_DB, space="c")
    compiler = compiled(world_of([MATE], elsewhere), [bound(MATE)])
    mdns = Packet(str(MATE.addresses[0]), "224.0.0.251", UDP, 443, pkttype=2)
    from_unknown = mdns._replace(source=str(WEB.addresses[0]))
    assert passes(compiler.desired, mdns)
    compiler.bind(bound(WEB))
    assert not passes(compiler.desired, mdns)
    assert not passes(compiler.desired, from_unknown)
    compiler.deny_unknown(False)
    assert passes(compiler.desired, from_unknown)
    compiler.deny_unknown(True)
    compiler.pod_changed(WEB.key, WEB)
    assert passes(compiler.desired, from_unknown)
    compiler.awaits(bound(FAR).owner)
    assert not passes(compiler.desired, mdns)
    compiler.arrived(bound(FAR).owner)
    assert passes(compiler.desired, mdns)


def test_a_network_without_policies_on_the_same_bridge_is_open():
    everything = policy({"podSelector": {}})
    world = world_of([WEB, MATE], everything)
    desired = compiled(world, [bound(WEB), bound(MATE, exempt=True)]).desired
    assert not passes(desired, towards(WEB, MATE))
    assert passes(desired, towards(MATE, WEB))


def test_pods_with_the_same_policies_share_a_profile_and_peers_share_a_set():
    twin = pod("a", "twin", 4, "web", node="here")
    other = policy({**FROM_DB, "podSelector": {"matchLabels": {"app": "db"}}}, "two")
    world = world_of([WEB, twin, MATE], policy(FROM_DB), other)
    desired = compiled(world, [bound(WEB), bound(twin), bound(MATE)]).desired
    assert len([one for one in desired.chains if one.startswith("ingress_")]) == 2 * 2
    assert len([one for one in desired.sets if one.startswith(layout.PEERS)]) == 2


def test_a_thousand_policies_on_one_pod_are_no_more_rules_than_one():
    rules = [
        {"from": [{"podSelector": {"matchLabels": {"n": str(n)}}}], "ports": [{"port": n}]}
        for n in range(1, 1001)
    ]
    many = [policy({"podSelector": {}, "ingress": [rule]}, f"p{n}") for n, rule in enumerate(rules)]
    longest = {}
    for count in (1, 1000):
        desired = compiled(world_of([WEB], *many[:count]), [bound(WEB)]).desired
        longest[count] = max(len(chain.rules) for chain in desired.chains.values())
    assert longest[1000] == longest[1]


def egress_by_name(name: str, *peers: dict) -> Policy:
    rule = {"ports": [{"port": name}], **({"to": list(peers)} if peers else {})}
    return policy({"podSelector": {}, "policyTypes": ["Egress"], "egress": [rule]})


def test_a_changed_port_name_counts_although_no_pod_had_either_name():
    far = pod("a", "peer", 5, "x", node="far")
    packet = Packet(str(WEB.addresses[0]), str(far.addresses[0]), TCP, 443, oifname="tailscale0")
    compiler = compiled(world_of([WEB], egress_by_name("one", {"podSelector": {}})), [bound(WEB)])
    compiler.policy_changed(("a", "one"), egress_by_name("two", {"podSelector": {}}))
    compiler.pod_changed(far.key, far._replace(ports=(ContainerPort("two", 443, TCP),)))
    assert passes(compiler.desired, packet)
    compiler.pod_changed(far.key, far._replace(ports=(ContainerPort("one", 443, TCP),)))
    assert not passes(compiler.desired, packet)


@pytest.mark.parametrize(
    ("peers", "host_network", "allowed"),
    [
        ([{"ipBlock": {"cidr": "10.2.0.0/16"}}], False, False),
        ([{"ipBlock": {"cidr": "10.2.0.0/16"}}, {"podSelector": {}}], False, True),
        ([], False, True),
        ([], True, False),
    ],
)
def test_a_port_name_means_the_ports_of_pods_and_not_of_an_ip_block(peers, host_network, allowed):
    far = pod("a", "peer", 5, "x", node="far")
    far = far._replace(ports=(ContainerPort("two", 443, TCP),), host_network=host_network)
    world = world_of([WEB, far], egress_by_name("two", *peers))
    packet = Packet(str(WEB.addresses[0]), str(far.addresses[0]), TCP, 443, oifname="tailscale0")
    assert passes(compiled(world, [bound(WEB)]).desired, packet) is allowed
    assert explain(world, WEB, far, 443).allowed is allowed


def overlapping(count: int, **labels: str) -> Policy:
    """Ranges of ports that overlap pairwise, each for other peers."""
    rules = [
        {
            "from": [{"podSelector": {"matchExpressions": [{"key": "n", **operator(n)}]}}],
            "ports": [{"port": n, "endPort": 30000 + n}],
        }
        for n in range(1, count + 1)
    ]
    return policy({"podSelector": {"matchLabels": labels}, "ingress": rules}, f"o{count}")


def operator(number: int) -> dict:
    return {"operator": "NotIn", "values": [str(number)]}


def test_ranges_that_overlap_pairwise_cost_no_more_than_they_are():
    crowd = [pod("a", f"p{n}", 10 + n, node="far") for n in range(400)]
    sizes = {}
    for count in (200, 400):
        began = time.thread_time()
        made = compiled(world_of([WEB, *crowd], overlapping(count)), [bound(WEB)])
        assert time.thread_time() - began < 5
        rules = sum(len(one.rules) for one in made.desired.chains.values())
        sizes[count] = made.desired.size / count, rules / count
        assert made.left_out(bound(WEB).owner, "Ingress") == ()
    assert sizes[400] == pytest.approx(sizes[200], rel=0.1)


@pytest.mark.parametrize("seed", range(10))
def test_many_maps_say_the_same_as_one(seed, monkeypatch):
    monkeypatch.setattr(compiler_module, "MOST_SPREAD", 3)
    monkeypatch.setattr(compiler_module, "MOST_PAIRS", 2)
    test_the_table_says_what_the_policies_say(seed)
    test_many_changes_lead_to_the_same_table_as_a_fresh_start(seed)


def test_a_rule_with_many_peers_and_ports_does_not_multiply_them():
    peers = [{"podSelector": {"matchLabels": {"n": str(n)}}} for n in range(5000)]
    ports = [{"port": 2 * n + 1} for n in range(5000)]
    big = policy({"podSelector": {}, "ingress": [{"from": peers, "ports": ports}]})
    client = pod("a", "client", 5, node="far")._replace(labels={"n": "4999"})
    desired = compiled(world_of([WEB, client, FAR], big), [bound(WEB)]).desired
    assert desired.size < 25_000
    packet = towards(WEB, client, iifname="tailscale0")._replace(port=9999)
    assert passes(desired, packet)
    assert not passes(desired, packet._replace(port=9998))
    assert not passes(desired, packet._replace(source=str(FAR.addresses[0])))


@pytest.mark.parametrize(("limit", "most"), [("MOST_ALLOWED", 20), ("MOST_ELEMENTS", 100)])
def test_a_policy_that_is_too_large_isolates_and_allows_nothing(limit, most, monkeypatch):
    monkeypatch.setattr(compiler_module, limit, most)
    crowd = [pod("a", f"p{n}", 10 + n, node="far") for n in range(10)]
    world = world_of([WEB, *crowd, FAR], overlapping(30), policy(FROM_DB))
    made = compiled(world, [bound(WEB)])
    packet = towards(WEB, crowd[0], iifname="tailscale0")
    assert made.left_out(bound(WEB).owner, "Ingress") == (("a", "o30"),)
    assert made.isolating(bound(WEB).owner, "Ingress") == (("a", "o30"), ("a", "one"))
    assert passes(made.desired, packet), "the other policy still counts"
    made.policy_changed(("a", "one"), None)
    assert not passes(made.desired, packet)
    left_out = {(WEB.key, "Ingress"): [("a", "o30")]}
    found = explain(made.world, crowd[0], WEB, 80, left_out=left_out)
    assert not found.allowed and "a/o30 is too large" in found.words
    made.policy_changed(("a", "o30"), None)
    assert made.left_out(bound(WEB).owner, "Ingress") == ()
    assert passes(made.desired, packet)


def test_nothing_is_left_when_all_is_gone(compiler):
    empty = state_of(Compiler())
    for one in (WEB, MATE):
        compiler.unbind(bound(one).owner)
    for one in (WEB, MATE, FAR):
        compiler.pod_changed(one.key, None)
    compiler.policy_changed(("a", "one"), None)
    compiler.sweep()
    assert state_of(compiler) == empty
    assert compiler.peers == 0


def test_only_what_differs_is_sent(compiler):
    compiler.desired.taken()
    assert compiler.desired.changes("t").requests == []
    added = pod("a", "added", 9, "cache", node="far")
    compiler.pod_changed(added.key, added)
    assert compiler.desired.changes("t").elements == 2  # its addresses in the set of its namespace
    compiler.desired.taken()
    compiler.pod_changed(added.key, added._replace(phase="Running", labels=dict(added.labels)))
    assert compiler.desired.changes("t").requests == []


def test_a_nodes_own_traffic_is_explained_as_allowed():
    found = explain(world_of([WEB], policy({"podSelector": {}})), NODE, WEB, 80)
    assert found.allowed and "a node always reaches its own pods" in found.words


def test_a_pod_that_is_about_to_be_added_finds_its_profiles_made():
    compiler = Compiler(node="here")
    compiler.load(world_of([MATE], policy(FROM_DB)), [bound(MATE)])
    compiler.pod_changed(WEB.key, WEB._replace(addresses=()))
    compiler.desired.taken()
    chains = dict(compiler.desired.chains)
    compiler.bind(bound(WEB))
    assert {**chains, "groups": compiler.desired.chains["groups"]} == compiler.desired.chains
    assert not passes(compiler.desired, towards(WEB, FAR, iifname="tailscale0"))


def test_profiles_wait_for_the_next_pod_until_they_are_swept(compiler):
    compiler.unbind(bound(WEB).owner)
    assert any(name.startswith("ingress_") for name in compiler.desired.chains)
    compiler.sweep()
    assert not any(name.startswith("ingress_") for name in compiler.desired.chains)
