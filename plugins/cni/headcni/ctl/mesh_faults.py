"""The faults of this node's place in the mesh that ``headcnictl diagnose`` looks for: tailscaled,
Headscale's approvals and policy, routing rules, the tunnel and the paths to other nodes."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from ipaddress import ip_address, ip_network

from .. import settings as configuration
from ..datapath import netns
from ..datapath.netlink import Netlink
from ..errors import CniError
from ..mesh import lookup, packet_filter, paths
from ..mesh.claims import hear, plan
from ..mesh.localapi import TOO_OLD, LocalApi, Status, TailscaleError
from ..mesh.mesh import PRIORITY, TABLE
from ..mesh.route_socket import RouteSocket
from ..model import Address
from ..settings import DaemonConfig
from ..shared.localapi import NO_ANSWER, NO_SOCKET
from ..shared.node_status import KEY_DAYS, span
from ..shared.paths import NONE, RELAYED
from . import probe
from .daemon_client import daemon_status
from .faults import FORWARDING, versions
from .finding import CONTROLLER, HEADSCALE, SITE, Finding
from .routes import claim_rules

APPROVAL_SECONDS = 600.0  # Headscale 0.29 may take so long to tell a node about its own approval
TUNNEL_HEADERS = 80  # of IPv6, UDP and WireGuard: what the underlay must carry on top
MOST_PINGED = 8  # peers to which the path's MTU is tried
MOST_CHECKED = 10_000  # peers whose pods the policy is asked about
ROTATE = "ansible-playbook -i INVENTORY playbooks/rotate_keys.yml"


def tailscale(config: DaemonConfig) -> Iterator[Finding]:
    try:
        status = LocalApi(config.tailscale.socket_path).status(peers=False)
    except TailscaleError as problem:
        if problem.kind not in (NO_SOCKET, NO_ANSWER):
            raise
        unit = "tailscaled" if _is_host(config) else "headcni-tailscaled"
        yield Finding(
            "tailscaled-down",
            str(problem),
            "this node loses the others",
            f"systemctl restart {unit}",
        )
        return
    if not status.running:
        yield from not_running(status)
        return
    expires = paths.read(LocalApi(config.tailscale.socket_path), ()).key_expires
    if expires and expires < time.time() + KEY_DAYS * 86400:
        yield Finding(
            "key-expires",
            f"the key of this node expires in {span(expires - time.time())}",
            "when it has expired, this node loses all other nodes and their pods",
            ROTATE,
            CONTROLLER,
        )
    for line in status.health:
        if not ("IP forwarding is disabled" in line and forwards(config)):
            yield Finding("tailscaled-health", f"tailscaled says: {line}")


def not_running(status: Status) -> Iterator[Finding]:
    if status.state == "Stopped":
        yield Finding(
            "tailscale-stopped",
            "tailscaled is not connected: its state is Stopped",
            "this node reaches no other node",
            "tailscale up",
        )
        return
    yield Finding(
        "logged-out" if status.state == "NeedsLogin" else "tailscale-not-running",
        f"tailscaled is not connected: its state is {status.state}",
        "this node is not in the tailnet, so its pods reach no other node"
        if status.state == "NeedsLogin"
        else "this node reaches no other node",
        SITE,
        CONTROLLER,
    )


def forwards(config: DaemonConfig) -> bool:
    """Whether the kernel forwards, for all families that this node's pods have. tailscaled asks
    every link, and takes a pod's link that has just gone for a link that does not forward."""
    pods = versions(config)
    return bool(pods) and all(
        netns.read_sysctl(FORWARDING[version].replace(".", "/")) == "1" for version in pods
    )


def rules(config: DaemonConfig) -> Iterator[Finding]:
    """Rules of other programs that take packets to other nodes' pods away from our table."""
    own = configuration.pod_cidrs(config).cidrs
    with Netlink() as kernel, closing(RouteSocket()) as routes:
        said = set()
        for route in routes.routes(TABLE):
            dst = ip_address(route.dst.address) + 1
            src = next((cidr[2] for cidr in own if cidr.version == dst.version), None)
            bridge = kernel.index(config.network.bridge)
            used = lookup.decide(kernel, dst, src, bridge)
            if used.table == TABLE or (not bridge and used.problem):
                continue
            for rule in lookup.above(kernel, dst, src, config.network.bridge, PRIORITY):
                if rule in said:
                    continue
                said.add(rule)
                yield foreign_rule(rule, str(route.dst))


def foreign_rule(rule: lookup.AnyRule, dst: str) -> Finding:
    words = rule.command("add").split(" add ", 1)[-1].split(" del ", 1)[-1]
    return Finding(
        "foreign-rule",
        f"another program's routing rule takes packets to {dst} away: {words}",
        "pods do not reach the pods of that node: a rule with a smaller number than "
        f"{PRIORITY - 1} decides before HeadCNI's",
        rule.command("del"),
    )


def mtu(config: DaemonConfig) -> Iterator[Finding]:
    link = config.tailscale.interface
    have, want = mtu_of(link), config.network.mtu
    if have and have < want:
        # Below 1280 the kernel takes the link's IPv6 addresses away, which tailscaled gives it.
        again = " && systemctl restart tailscaled" if have < 1280 and _is_host(config) else ""
        yield Finding(
            "tunnel-mtu",
            f"{link} has the MTU {have}, and pods send packets of up to {want} bytes",
            "large packets are refused, and connections hang if the ICMP messages about that are "
            "lost; below 1280 bytes the link has no IPv6",
            f"ip link set dev {link} mtu {want}{again}",
        )
    if not _is_host(config):
        return
    uplink = _uplink()
    carried = mtu_of(uplink)
    if have and carried and carried < have + TUNNEL_HEADERS:
        yield Finding(
            "underlay-mtu",
            f"{uplink} has the MTU {carried}, and the tunnel needs {have + TUNNEL_HEADERS}",
            "full-sized packets to other nodes are fragmented or lost",
            f"ip link set dev {uplink} mtu {max(have + TUNNEL_HEADERS, 1500)}",
        )


def path_mtu(config: DaemonConfig) -> Iterator[Finding]:
    """Paths to other nodes that lose packets of full size and not small ones. What cannot be pinged
    at all is another fault, or may not answer."""
    size = mtu_of(config.tailscale.interface)
    if not _is_host(config) or not size:
        return
    api = LocalApi(config.tailscale.socket_path)
    status = api.status()
    if not status.running:
        return
    own = next((ip_address(one) for one in status.addresses if ip_address(one).version == 4), None)
    heard = hear(status, claim_rules(config), {})
    narrow, asked = [], 0
    for peer in paths.read(api, heard.claims).peers:
        there = next((one for one in map(ip_address, peer.addresses) if one.version == 4), None)
        if own is None or there is None or not peer.online or asked == MOST_PINGED:
            continue
        asked += 1
        if _answers(own, there, 1) and not _answers(own, there, 3, size) and _answers(own, there):
            narrow.append(peer.name)
    if narrow:
        yield Finding(
            "path-mtu",
            f"packets of {size} bytes are lost on the way to {', '.join(narrow)}, and small ones "
            "arrive",
            "large packets between pods are lost, and connections hang: the network between the "
            f"nodes has to carry UDP packets of {size + TUNNEL_HEADERS} bytes. Raise its MTU, or "
            "let it send the ICMP messages that say what is too large",
        )


def _answers(own: Address, there: Address, tries: int = probe.TRIES, size: int = 0) -> bool:
    try:
        probe.ping(own, there, size, tries)
    except probe.NoAnswer:
        return False
    return True


def _is_host(config: DaemonConfig) -> bool:
    return config.tailscale.mode == "host"


def mtu_of(link: str) -> int:
    said = netns.read_file(f"/sys/class/net/{link}/mtu") if link else None
    return int(said) if said and said.isdigit() else 0


def _uplink() -> str:
    """The link of the node's default route; empty if it has none."""
    with closing(RouteSocket()) as kernel:
        for route in kernel.routes(254):
            if not route.dst.length and route.link:
                link = kernel.link(index=route.link)
                return link.name if link else ""
    return ""


def claims(config: DaemonConfig) -> Iterator[Finding]:
    """Ranges that two nodes serve."""
    status = LocalApi(config.tailscale.socket_path).status()
    if not status.running:
        return
    found = claim_rules(config)
    for alarm in plan(hear(status, found, {}), found).alarms:
        holder = next((p for p in status.peers if alarm.prefix in (*p.primary, *p.routes)), None)
        run = ""
        if holder is not None and holder.id.isdigit():  # Headscale's ids are numbers
            others = [route for route in holder.primary if route != alarm.prefix]
            run = (
                f"headscale nodes approve-routes --identifier {holder.id} "
                f"--routes {shlex.quote(','.join(others))}"
            )
        yield Finding(
            f"duplicate-{alarm.kind}",
            alarm.message,
            "the pods of one of the two cannot be reached. The command leaves "
            f"{holder.name if holder else 'the other node'} with its other routes",
            run,
            HEADSCALE,
        )


def approval(config: DaemonConfig) -> Iterator[Finding]:
    status = LocalApi(config.tailscale.socket_path).status(peers=False)
    if not status.running:
        return
    missing = [
        str(cidr)
        for cidr in configuration.pod_cidrs(config).cidrs
        if str(cidr) not in status.served
    ]
    if missing:
        yield not_approved(missing, _uptime(config) > APPROVAL_SECONDS)


def not_approved(missing: Sequence[str], sure: bool) -> Finding:
    return Finding(
        "not-approved",
        f"Headscale has not approved {', '.join(missing)}, as far as this node knows",
        "pods of other nodes do not reach pods of this node, and get no answers from them. "
        "site.yml approves it, or names the rule that Headscale's policy lacks"
        + ("" if sure else ". Headscale may tell a new node minutes late"),
        SITE,
        CONTROLLER,
        sure,
    )


def _uptime(config: DaemonConfig) -> float:
    try:
        return time.time() - float(daemon_status(configuration.control_path(config))["since"])
    except CniError:
        return APPROVAL_SECONDS + 1


def policy(config: DaemonConfig) -> Iterator[Finding]:
    """What Headscale's policy lets in, as tailscaled applies it here."""
    api = LocalApi(config.tailscale.socket_path)
    status = api.status()
    if not status.running:
        return
    try:
        allowed = packet_filter.read(api)
    except TailscaleError as problem:
        if problem.kind == TOO_OLD:  # a tailscaled that does not show its rules
            return
        raise
    found = claim_rules(config)
    own = configuration.pod_cidrs(config).cidrs
    near = {cidr: [one for one in allowed if packet_filter.leads_to([one], cidr)] for cidr in own}
    refused = []
    every = [claim for claims in hear(status, found, {}).claims.values() for claim in claims]
    for claim in every[:MOST_CHECKED]:
        theirs = ip_network(str(claim.prefix))
        for cidr in own:
            if cidr.version == theirs.version and not packet_filter.allows(
                near[cidr], theirs, cidr
            ):
                refused.append(f"{claim.prefix} of {claim.peer}")
    if refused:
        more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
        yield denied(f"TCP in from all pods in {', '.join(refused[:3])}{more}")
        return
    # If a policy hides pods from a node, Headscale does not even tell it who serves them.
    closed = [
        str(cidr)
        for cidr in own
        if str(cidr) in status.served and not packet_filter.leads_to(allowed, cidr)
    ]
    if closed:
        yield denied(f"anybody in to the pods of this node ({', '.join(closed)})")


def denied(whom: str) -> Finding:
    return Finding(
        "policy-denies",
        f"Headscale's policy does not let {whom}",
        "pods of other nodes do not reach pods of this node: docs/headscale-policy.md shows the "
        "rule that the policy needs, and the command adds it",
        f"{SITE} -e headscale_routes_policy=merge",
        CONTROLLER,
    )


def peers(config: DaemonConfig) -> Iterator[Finding]:
    """Notes on relayed and missing paths: they are no fault of this node alone."""
    api = LocalApi(config.tailscale.socket_path)
    status = api.status()
    if not status.running:
        return
    heard = hear(status, claim_rules(config), {})
    tags = set(config.tailscale.peer_tags)
    silent = [
        peer.name
        for peer in status.peers
        if peer.online and peer.id not in heard.claims and not tags.isdisjoint(peer.tags)
    ]
    if silent:
        yield not_served(", ".join(silent[:5]), "no range of pods")
    found = paths.pinged(api, paths.read(api, heard.claims).peers)
    relayed = [peer for peer in found if peer.path.kind in RELAYED]
    if relayed:
        names = ", ".join(f"{peer.name} ({peer.path.in_words})" for peer in relayed[:5])
        yield Finding(
            "relayed",
            f"the path to {names} is relayed",
            "it is slower than a direct path: let UDP through between the nodes, at tailscaled's "
            "port (41641 by default); docs/verify.md#paths",
            sure=False,
        )
    for peer in found[:50]:
        if peer.path.kind == NONE:
            yield Finding(
                "no-path",
                f"{peer.name} does not answer tailscaled's ping"
                + ("" if peer.online else ", and Headscale says that it is offline"),
                "pods do not reach the pods of that node: look there",
                f"tailscale ping -c 3 {peer.addresses[0]}" if peer.addresses else "",
                sure=False,
            )


def not_served(who: str, what: str) -> Finding:
    return Finding(
        "not-served",
        f"{who} serves {what}, as far as this node knows",
        "Headscale has not approved the pod CIDR there, the node is not in the tailnet, or the "
        "policy hides it from this node",
        SITE,
        CONTROLLER,
        sure=False,
    )
