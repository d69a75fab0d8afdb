"""``headcnictl trace SRC DST``: every hop of a packet, checked against the kernel and tailscaled.

Each hop is asked for the answer that it gives now; nothing is inferred from the configuration. What
only the other node knows is shown as unknown. At the end a real packet is sent from the pod, so
that the answer is never better than what the pod sees.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from ipaddress import ip_address, ip_network
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from .. import settings as configuration
from ..datapath import firewall, guard, netns
from ..datapath.host_firewall import chains
from ..datapath.netlink import Netlink
from ..errors import CniError
from ..mesh import lookup, packet_filter, paths
from ..mesh.claims import hear
from ..mesh.localapi import LocalApi, Peer, Status
from ..mesh.mesh import PRIORITY, TABLE
from ..mesh.prefix import Prefix
from ..mesh.route_socket import RouteSocket
from ..model import Address
from ..settings import DaemonConfig
from ..shared.paths import NONE, RELAYED
from ..store import Attachment, Store
from . import drops, faults, mesh_faults, node, probe
from .finding import CONTROLLER, SITE, Finding
from .main import NO, OK, CannotTell, show
from .routes import claim_rules
from .terminal import BAD, DOUBTFUL, GOOD, paint, wrapped

FINE, BROKEN, OPEN = "ok", "broken", "unknown"
COLOURS = {FINE: GOOD, BROKEN: BAD, OPEN: DOUBTFUL}
MOST_DOUBTS = 5


class Hop(NamedTuple):
    """A layer that the packet passes. A broken one has a finding with the fix."""

    name: str
    state: str
    said: str
    finding: Optional[Finding] = None


class Question(NamedTuple):
    """Who sends what to whom. `near` is the pod of this node; the packet leaves it or comes to
    it."""

    config: DaemonConfig
    near: Attachment
    src: Address
    dst: Address
    leaves: bool
    protocol: str
    port: int

    @property
    def own(self) -> Address:
        return self.src if self.leaves else self.dst

    @property
    def other(self) -> Address:
        return self.dst if self.leaves else self.src

    @property
    def bridge(self) -> str:
        """The link by which pods' packets arrive at the node."""
        if self.near.config.get("datapath") == "routed":
            return self.near.host_ifname
        return str(self.near.config.get("bridge") or self.config.network.bridge)


def arguments(parser: argparse.ArgumentParser) -> None:
    node.with_config(parser)
    about = "a pod of this node (namespace/name, address or container id) or an address"
    parser.add_argument("source", metavar="SRC", help=about)
    parser.add_argument("target", metavar="DST", help="the same; one of the two is of this node")
    parser.add_argument("--port", type=int, default=0, help="a port of DST; without, a ping")
    parser.add_argument("--udp", action="store_true", help="the port is one of UDP, not TCP")


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.port <= 65535 or (args.udp and not args.port):
        raise CannotTell(f"--port is {args.port}: expected 1 to 65535")
    question = _question(args)
    hops = list(_hops(question))
    broken = next((hop for hop in hops if hop.state == BROKEN), None)
    if args.json:
        show(_as_dict(question, hops, broken), as_json=True)
    else:
        show(_in_words(question, hops, broken), as_json=False)
    return NO if broken else OK


def _question(args: argparse.Namespace) -> Question:
    config = node.load(args)
    every = node.attachments(config)
    source, target = _pod(every, args.source), _pod(every, args.target)
    near = source or target
    if near is None:
        raise CannotTell(
            f"neither {args.source} nor {args.target} is a pod of this node (headcnictl pods): "
            "run this on the node of one of them"
        )
    wanted = _address(args.target if source else args.source)
    if wanted is None and not (source and target):
        name = args.target if source else args.source
        raise CannotTell(f"{name!r} is no address, and no pod of this node: give its address")
    version = wanted.version if wanted is not None else 4
    src = _of_pod(source, args.source, version) if source else wanted
    dst = _of_pod(target, args.target, version) if target else wanted
    if src is None or dst is None:
        raise CannotTell("the two have no address of the same family")
    icmp = packet_filter.ICMP if dst.version == 4 else packet_filter.ICMP6
    protocol = icmp if not args.port else packet_filter.UDP if args.udp else packet_filter.TCP
    return Question(config, near, src, dst, source is not None, protocol, args.port)


def _pod(every: Sequence[Attachment], wanted: str) -> Optional[Attachment]:
    found = [attachment for attachment in every if node.is_called(attachment, wanted)]
    if len(found) > 1:
        ids = ", ".join(one.owner.container_id[:12] for one in found)
        raise CannotTell(f"{wanted!r} is more than one pod: {ids}; give the container's id")
    return found[0] if found else None


def _address(text: str) -> Optional[Address]:
    try:
        return ip_address(text)
    except ValueError:
        return None


def _of_pod(pod: Attachment, given: str, version: int) -> Optional[Address]:
    """The address that was given, or the pod's first of the family."""
    own = [ip_address(text) for text in node.addresses(pod)]
    wanted = _address(given)
    if wanted in own:
        return wanted
    return next((address for address in own if address.version == version), None)


def _hops(question: Question) -> Iterator[Hop]:
    """In the order of the packet. The last one sends a real packet, if it leaves from here."""
    layers = (
        (_in_pod, _link, _spoofing, _forwarding, _routing, _firewalls, _mesh)
        if question.leaves
        else (_mesh, _forwarding, _firewalls, _delivery, _link, _spoofing, _in_pod)
    )
    for layer in layers:
        try:
            yield from layer(question)
        except (CniError, OSError) as problem:
            yield Hop(layer.__name__.strip("_"), OPEN, str(problem))
    if question.leaves:
        yield from _sent(question)


def _in_pod(question: Question) -> Iterator[Hop]:
    """The route in the pod's own namespace, by which it sends or answers."""
    pod = question.near
    recreate = "the pod cannot send: delete it, so that its controller starts a new one"
    try:
        with netns.opened(pod.netns) as fd, netns.entered(fd), Netlink() as kernel:
            index = kernel.index(pod.owner.ifname)
            used = lookup.decide(kernel, question.other, question.own)
    except CniError as problem:
        yield Hop("pod", BROKEN, str(problem), Finding("pod-gone", str(problem), recreate))
        return
    if not index:
        said = f"the pod has no interface {pod.owner.ifname}"
        yield Hop("pod", BROKEN, said, Finding("pod-interface", said, recreate))
        return
    if used.is_refused or used.link != index:
        said = f"its route to {question.other}: {used.problem or 'by another interface'}"
        gateway = next(
            (
                str(ip["gateway"])
                for ip in pod.result.get("ips", ())
                if ip.get("gateway") and ip_address(ip["gateway"]).version == question.own.version
            ),
            "",
        )
        six = " -6" if question.own.version == 6 else ""
        run = (
            f"nsenter --net={pod.netns} ip{six} route replace default via {gateway} "
            f"dev {pod.owner.ifname}"
            if gateway
            else ""
        )
        yield Hop("pod", BROKEN, said, Finding("pod-route", said, recreate, run))
        return
    via = socket.inet_ntop(_family(question), used.gateway) if used.gateway else "its own link"
    yield Hop("pod", FINE, f"{pod.owner.ifname} {question.own}: {used.prefix} via {via}")


def _link(question: Question) -> Iterator[Hop]:
    """The host's end of the pod's cable."""
    pod, name = question.near, question.near.host_ifname
    with closing(RouteSocket()) as kernel:
        link = kernel.link(name) if name else None
    if link is None:
        said = f"{name or 'the host side of the cable'} is missing"
        means = "the pod is not connected: delete it, so that its controller starts a new one"
        yield Hop("veth", BROKEN, said, Finding("veth-missing", said, means))
        return
    if not link.up:
        said = f"{name} is down"
        fix = Finding("veth-down", said, "the pod is cut off", f"ip link set dev {name} up")
        yield Hop("veth", BROKEN, said, fix)
        return
    if pod.config.get("datapath") == "routed":
        yield Hop("veth", FINE, f"{name} is up")
        return
    master = netns.read_file(f"/sys/class/net/{name}/master/uevent") or ""
    if f"INTERFACE={question.bridge}" not in master.splitlines():
        said = f"{name} is not a port of {question.bridge}"
        run = f"ip link set dev {name} master {question.bridge}"
        yield Hop("veth", BROKEN, said, Finding("veth-unplugged", said, "the pod is cut off", run))
        return
    state = netns.read_file(f"/sys/class/net/{question.bridge}/flags") or "0x0"
    if not int(state, 16) & 1:
        said = f"the bridge {question.bridge} is down"
        run = f"ip link set dev {question.bridge} up"
        yield Hop("veth", BROKEN, said, Finding("bridge-down", said, "all pods are cut off", run))
        return
    yield Hop("veth", FINE, f"{name} is up, on {question.bridge}")


def _spoofing(question: Question) -> Iterator[Hop]:
    """The filter that lets the pod send with its own addresses only."""
    station = guard.station_of_attachment(question.near)
    if station is None:
        yield Hop("anti-spoofing", FINE, "this pod is not checked")
        return
    with Netlink() as kernel:
        wrong = guard.difference(kernel, station)
    if wrong:
        means = "what the pod sends may be dropped, or is not checked"
        fix = Finding("anti-spoofing", wrong, means, "systemctl restart headcni-daemon")
        yield Hop("anti-spoofing", BROKEN, wrong, fix)
    else:
        yield Hop("anti-spoofing", FINE, f"lets {station.mac} with {question.own} pass")


def _forwarding(question: Question) -> Iterator[Hop]:
    if _is_node(question.other):
        return
    name = faults.FORWARDING[question.dst.version]
    found = next(
        (one for one in faults.forwarding(question.config) if one.found.startswith(name)), None
    )
    yield Hop(
        "forwarding", BROKEN if found else FINE, found.found if found else f"{name} is 1", found
    )


def _routing(question: Question) -> Iterator[Hop]:
    """Which table and link the kernel chooses for the pod's packet."""
    with Netlink() as kernel:
        used = lookup.decide(kernel, question.dst, question.src, kernel.index(question.bridge))
        before = lookup.above(kernel, question.dst, question.src, question.bridge, PRIORITY)
    name = _link_name(used.link)
    said = f"table {lookup.table_name(used.table)}: {used.prefix} dev {name}"
    wanted = _wanted_table(question)
    if wanted is None or (used.table == wanted and not used.is_refused):
        if used.is_refused:
            text = f"no route to {question.dst}: {used.problem or used.prefix}"
            yield Hop("route", BROKEN, text, _no_route(text))
        else:
            yield Hop("route", FINE, said)
        return
    text = used.problem or said
    if before:
        fix = mesh_faults.foreign_rule(before[0], str(question.dst))
        yield Hop("rule", BROKEN, fix.found, fix)
        return
    if not _has_rule(question):
        text = f"no rule sends packets for {question.dst} to table {TABLE}"
        means = "pods do not reach the pods of other nodes"
    else:
        text = f"table {TABLE} has no usable route to {question.dst}: {text}"
        means = (
            "no node serves this address, as far as this node knows: headcnictl routes shows what "
            "was refused, and why"
        )
    if _server(question)[1] is None:
        yield Hop(
            "route", OPEN, f"no route to {question.dst}, because no node serves it: see below"
        )
        return
    fix = Finding("no-route", text, means, "systemctl restart headcni-daemon")
    yield Hop("route", BROKEN, text, fix)


def _no_route(text: str) -> Finding:
    return Finding("no-route", text, "the node itself has no way there: ip route")


def _wanted_table(question: Question) -> Optional[int]:
    """Ours, for the pods of other nodes; None for any."""
    if _is_node(question.dst) or any(question.dst in cidr for cidr in _own(question)):
        return None
    there = Prefix.parse(str(question.dst))
    cluster = claim_rules(question.config).cluster
    return TABLE if any(prefix.covers(there) for prefix in cluster) else None


def _has_rule(question: Question) -> bool:
    there = Prefix.parse(str(question.dst))
    with closing(RouteSocket()) as kernel:
        return any(
            rule.priority == PRIORITY and rule.table == TABLE and rule.dst.covers(there)
            for rule in kernel.rules()
        )


def _delivery(question: Question) -> Iterator[Hop]:
    """How the node hands a packet from elsewhere to its pod."""
    with Netlink() as kernel:
        used = lookup.decide(kernel, question.dst)
    name = _link_name(used.link)
    if used.is_refused or name != question.bridge:
        said = f"{question.dst} is routed to {name or 'nowhere'}: {used.problem or used.prefix}"
        means = f"packets for the pod do not reach {question.bridge}"
        fix = Finding("pod-misrouted", said, means, "systemctl restart headcni-daemon")
        yield Hop("route", BROKEN, said, fix)
    else:
        yield Hop("route", FINE, f"{used.prefix} dev {name}")


def _firewalls(question: Question) -> Iterator[Hop]:
    """What other programs' chains drop, and whether our own table is whole."""
    if _is_neighbour(question):
        return
    config = question.config
    for other in faults.firewalls(config):
        if (other.missing or other.problem) and not other.blocks_node:
            found = faults.blocking(other, config)
            yield Hop("firewall", BROKEN, found.found, found)
            return
    with Store.in_directory(config.daemon.data_dir) as store:
        if not firewall.is_whole(store):
            for found in faults.filters(config):
                yield Hop("firewall", BROKEN, found.found, found)
                return
    doubtful = list(_conditional_drops())
    if doubtful:
        listed = ", ".join(doubtful[:MOST_DOUBTS])
        more = f" and {len(doubtful) - MOST_DOUBTS} more" if len(doubtful) > MOST_DOUBTS else ""
        said = f"rules that drop some packets are in {listed}{more}: see nft list chain"
        yield Hop("firewall", OPEN, said)
    else:
        yield Hop("firewall", FINE, "no filter drops what it does not know")


def _conditional_drops() -> Iterator[str]:
    """Chains of other programs, on the way of forwarded packets, with rules that drop under
    conditions. What the conditions say is not interpreted."""
    with chains.open_netlink() as kernel:
        every = chains.tables(kernel)
    for table in every:
        if table.name.startswith("headcni"):
            continue
        entries = [one for one in table.chains.values() if one.hook in ("prerouting", "forward")]
        for chain in entries:
            for name in _reached(table, chain.name):
                if name.startswith(("ts-", "HEADCNI", "headcni")):
                    continue
                dropping = (
                    rule.verdict == chains.DROP and rule.conditional
                    for rule in table.rules.get(name, ())
                )
                if any(dropping):
                    yield f"{table.family} {table.name} {name}"


def _reached(table: chains.Table, start: str) -> List[str]:
    found: List[str] = []
    todo = [start]
    while todo and len(found) < 1000:
        name = todo.pop()
        if name not in found:
            found.append(name)
            todo += [rule.target for rule in table.rules.get(name, ()) if rule.target]
    return found


def _mesh(question: Question) -> Iterator[Hop]:
    """The tunnel, the peer, the approvals, the path and the policy."""
    if _is_neighbour(question) or _wanted_table(_reversed(question)) is None:
        return
    config = question.config
    for finding in mesh_faults.mtu(config):
        yield Hop("tunnel", BROKEN, finding.found, finding)
    api = LocalApi(config.tailscale.socket_path)
    for finding in mesh_faults.tailscale(config):
        if finding.id in ("tailscaled-down", "logged-out", "tailscale-stopped") or (
            finding.id == "tailscale-not-running"
        ):
            yield Hop("tailscaled", BROKEN, finding.found, finding)
            return
    status, peer = _server(question)
    if peer is None:
        # Headscale also withholds the routes of nodes whose pods the policy hides.
        for denied in mesh_faults.policy(config):
            yield Hop("policy", BROKEN, denied.found, denied)
            return
        found = mesh_faults.not_served("no node of the tailnet", str(question.other))
        yield Hop("approval", BROKEN, found.found, found)
        return
    heard = hear(status, claim_rules(config), {})
    if peer.id not in heard.claims:
        said = f"{peer.name} serves {question.other}, and its claim is refused"
        means = "headcnictl routes shows why"
        yield Hop("approval", BROKEN, said, Finding("refused", said, means, "headcnictl routes"))
        return
    yield Hop("approval", FINE, f"Headscale sends packets for {question.other} to {peer.name}")
    own = [str(cidr) for cidr in _own(question) if question.own in cidr]
    missing = [cidr for cidr in own if cidr not in status.served]
    if missing:
        found = next(mesh_faults.approval(config), None) or mesh_faults.not_approved(
            missing, sure=False
        )
        yield Hop("approval", BROKEN, found.found, found)
    else:
        yield Hop("approval", FINE, f"{', '.join(own)} of this node is approved")
    yield _path(api, peer)
    yield from _policy(api, question)
    yield Hop(
        "remote",
        OPEN,
        f"only {peer.name} knows: headcnictl trace {question.src} {question.dst} there",
    )


def _path(api: LocalApi, peer: Peer) -> Hop:
    found = next(iter(paths.pinged(api, paths.read(api, {peer.id}).peers)), None)
    if found is None or found.path.kind == NONE:
        said = f"{peer.name} does not answer tailscaled's ping"
        means = (
            "the node is off, or no path to it works: UDP to its tailscaled and DERP are both "
            "blocked"
        )
        fix = Finding("no-path", said, means, "tailscale netcheck")
        return Hop("path", BROKEN, said, fix)
    kind = "relayed by" if found.path.kind in RELAYED else "direct to"
    return Hop("path", FINE, f"{kind} {found.path.in_words}, {found.path.latency_ms} ms")


def _policy(api: LocalApi, question: Question) -> Iterator[Hop]:
    """This node's tailscaled has the rules for what comes in. Answers to what went out pass."""
    if question.leaves:
        said = "whether it lets the packet in, only the other node knows; answers pass here"
        yield Hop("policy", OPEN, said)
        return
    allowed = packet_filter.read(api)
    src, dst = ip_network(question.src), ip_network(question.dst)
    if packet_filter.allows(allowed, src, dst, question.protocol, question.port):
        yield Hop("policy", FINE, f"lets {question.protocol} from {question.src} in")
        return
    said = f"Headscale's policy does not let {question.protocol} from {question.src} in"
    means = "tailscaled drops it: docs/headscale-policy.md shows the rule that the policy needs"
    run = f"{SITE} -e headscale_routes_policy=merge"
    yield Hop("policy", BROKEN, said, Finding("policy-denies", said, means, run, CONTROLLER))


def _sent(question: Question) -> Iterator[Hop]:
    """The packet itself, from the pod's namespace. If it is lost, another one is traced."""
    dst = str(question.dst)
    problem = ""
    try:
        took = _probed(question)
    except probe.NoAnswer as lost:
        took, problem = None, str(lost)
    if took is not None:
        yield Hop("packet", FINE, f"{dst} answered the pod in {took * 1000:.1f} ms")
        return
    if (culprit := _dropped(question)) is not None:
        found = culprit.finding(f"packets between {question.src} and {dst}")
        yield Hop("firewall", BROKEN, found.found, found)
    if not problem:
        yield Hop("packet", OPEN, f"{dst} said nothing, as UDP services may")
        return
    said = f"{dst} does not answer the pod: {problem}"
    means = (
        "if every hop above is in order, the other side drops it or has no service there: run "
        "headcnictl trace and diagnose on its node"
    )
    yield Hop("packet", BROKEN, said, Finding("no-answer", said, means))


def _probed(question: Question) -> Optional[float]:
    with netns.opened(question.near.netns) as fd, netns.entered(fd):
        return probe.send(question.src, question.dst, question.port, question.protocol)


def _dropped(question: Question) -> Optional[drops.Dropped]:
    """The rule of this node that drops it; None if no rule does, or if that cannot be traced."""
    with suppress(CniError, OSError), drops.watched(question.src, question.dst) as first:
        with suppress(probe.NoAnswer):
            _probed(question)
        return first()
    return None


def _own(question: Question) -> Sequence[Any]:
    return tuple(configuration.pod_cidrs(question.config).cidrs)


def _reversed(question: Question) -> Question:
    """With the other end as the target, whichever way the packet goes."""
    return question._replace(src=question.own, dst=question.other)


def _is_neighbour(question: Question) -> bool:
    """Whether the other end is a pod of this node, or the node itself."""
    return _is_node(question.other) or any(question.other in cidr for cidr in _own(question))


def _is_node(address: Address) -> bool:
    with closing(RouteSocket()) as kernel:
        return kernel.is_local(address.packed)


def _server(question: Question) -> Tuple[Status, Optional[Peer]]:
    """The peer to which tailscaled sends packets for the other end, by its longest match."""
    status = LocalApi(question.config.tailscale.socket_path).status()
    there = Prefix.parse(str(question.other))
    best: Optional[Peer] = None
    length = 0  # a default route is an exit node's
    for peer in status.peers:
        for text in peer.routes:
            prefix = Prefix.parse(text)
            if prefix.length > length and prefix.covers(there):
                best, length = peer, prefix.length
    return status, best


def _link_name(index: int) -> str:
    if not index:
        return ""
    with closing(RouteSocket()) as kernel:
        link = kernel.link(index=index)
    return link.name if link else ""


def _family(question: Question) -> int:
    return int(socket.AF_INET if question.dst.version == 4 else socket.AF_INET6)


def _as_dict(question: Question, hops: List[Hop], broken: Optional[Hop]) -> Dict[str, Any]:
    return {
        "source": str(question.src),
        "target": str(question.dst),
        "protocol": question.protocol,
        "port": question.port,
        "reached": not broken,
        "broken": broken.name if broken else "",
        "hops": [
            {
                "name": hop.name,
                "state": hop.state,
                "said": hop.said,
                "finding": hop.finding.as_dict() if hop.finding else None,
            }
            for hop in hops
        ],
    }


def _in_words(question: Question, hops: List[Hop], broken: Optional[Hop]) -> str:
    what = f"{question.protocol} {question.port}" if question.port else "ping"
    lines = [f"{question.src} -> {question.dst} ({what})"]
    for hop in hops:
        state = paint(
            f"{hop.state.upper() if hop.state == BROKEN else hop.state:8}", COLOURS[hop.state]
        )
        lines.append(wrapped(hop.said, f"{hop.name:14}{state} ", " " * 23))
        if hop is broken and hop.finding is not None:
            lines += hop.finding.advice(" " * 14)
    return "\n".join(lines)
