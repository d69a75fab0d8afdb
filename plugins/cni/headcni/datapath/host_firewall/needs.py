"""What pods need other firewalls to let through, as data that each firewall can be told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Tuple

from ...model import Address, Network
from ...port_ranges import ANSWERED_PROTOCOLS, Answered, intervals

ROUTED_LINKS = "hc+"  # the host's ends of pods' links; + stands for the rest of a name


@dataclass(frozen=True)
class Accept:
    """One kind of packet to let through. Empty means any."""

    hook: str  # forward, input or output
    version: int
    came_by: str = ""
    leaves_by: str = ""
    source: str = ""
    destination: str = ""
    state: str = ""  # "reply" to something that was let through, or "dnat": sent to a host port
    protocol: str = ""  # "tcp" or "udp", with `port`, or "ipv6-icmp"
    port: str = ""  # or several in a row: 30000-32767

    def as_iptables(self) -> str:
        words = []
        for option, value in (
            ("-i", self.came_by),
            ("-o", self.leaves_by),
            ("-s", self.source),
            ("-d", self.destination),
            ("-p", self.protocol),
        ):
            words += [option, value] if value else []
        if self.port:
            words += ["--dport", self.port.replace("-", ":")]
        if self.state:
            states = {"reply": "ESTABLISHED,RELATED", "dnat": "DNAT"}
            words += ["-m", "conntrack", "--ctstate", states[self.state]]
        return " ".join([*words, "-j", "ACCEPT"])

    def as_nft(self) -> str:
        family = "ip" if self.version == 4 else "ip6"
        words = []
        for key, value in (("iifname", self.came_by), ("oifname", self.leaves_by)):
            words += [f'{key} "{value.replace("+", "*")}"'] if value else []
        for key, value in (("saddr", self.source), ("daddr", self.destination)):
            words += [f"{family} {key} {value}"] if value else []
        if self.port:
            words.append(f"meta nfproto ipv{self.version} {self.protocol} dport {self.port}")
        elif self.protocol:
            words.append("meta nfproto ipv6 meta l4proto ipv6-icmp")
        if self.state:
            words.append(
                {"reply": "ct state established,related", "dnat": "ct status dnat"}[self.state]
            )
        return " ".join([*words, "accept"])


@dataclass(frozen=True)
class PodTraffic:
    """Where this node's pods are, and the ways that lead to them."""

    bridges: Tuple[str, ...] = ("headcni0",)
    pod_cidrs: Tuple[Network, ...] = ()
    cluster_cidrs: Tuple[Network, ...] = ()
    # The ranges that are known to be pods of this cluster, for a firewall that does not ask by
    # which link a packet came. A guess at the cluster's range is none.
    trusted: Tuple[Network, ...] = ()
    meshes: Tuple[str, ...] = ("tailscale0",)  # the links that other nodes' pods come by
    # The link to our own tailscaled, and its addresses there, where daemon mode has one.
    own_link: str = ""
    tailscaled: Tuple[Address, ...] = ()
    # The node's own addresses on that link, by which tailnet peers reach it, and on which ports.
    node: Tuple[Address, ...] = ()
    answers_for_node: Answered = False
    udp_port: int = 0  # of a tailscaled in the node's own network namespace

    @property
    def links(self) -> Tuple[str, ...]:
        return (*self.bridges, ROUTED_LINKS)

    def accepts(self, hook: str, version: int) -> list[Accept]:
        every = {"forward": self._forward, "input": self._input, "output": self._output}
        return [one for one in every[hook]() if one.version == version]

    def _forward(self) -> Iterator[Accept]:
        for cidr in self.pod_cidrs:
            pods, version = str(cidr), cidr.version
            for link in self.links:
                yield Accept("forward", version, came_by=link, source=pods)
                for mesh in self.meshes:
                    yield Accept("forward", version, mesh, link, destination=pods)
                for state in ("reply", "dnat"):
                    yield Accept("forward", version, "", link, destination=pods, state=state)
        for address in self.tailscaled:
            own, version = str(address), address.version
            yield Accept("forward", version, came_by=self.own_link, source=own)
            for state in ("reply", "dnat"):
                yield Accept("forward", version, "", self.own_link, destination=own, state=state)
        for address in self.node:  # a service may lead to a pod of another node
            for state in ("reply", "dnat"):
                yield Accept("forward", address.version, self.own_link, self.own_link, state=state)

    def _input(self) -> Iterator[Accept]:
        for cidr in self.pod_cidrs:
            for link in self.links:
                yield Accept("input", cidr.version, link, source=str(cidr))
                if cidr.version == 6:  # pods look for their gateway by link-local addresses
                    yield Accept("input", 6, link, protocol="ipv6-icmp")
        for cidr in self.cluster_cidrs:
            for mesh in self.meshes:
                yield Accept("input", cidr.version, mesh, source=str(cidr))
        for address in self.tailscaled:
            if self.answers_for_node:
                yield Accept("input", address.version, self.own_link, source=str(address))
            if address.version == 6:
                yield Accept("input", 6, self.own_link, protocol="ipv6-icmp")
        for address in self._answering():
            for protocol, port in self.answered_ports():
                yield Accept(
                    *("input", address.version, self.own_link),
                    destination=str(address),
                    protocol=protocol,
                    port=port,
                )
        for version in (4, 6) if self.udp_port else ():
            yield Accept("input", version, protocol="udp", port=str(self.udp_port))

    def _output(self) -> Iterator[Accept]:
        for cidr in self.pod_cidrs:
            for link in self.links:
                yield Accept("output", cidr.version, "", link, destination=str(cidr))
                if cidr.version == 6:
                    yield Accept("output", 6, "", link, protocol="ipv6-icmp")
        for cidr in self.cluster_cidrs:
            for mesh in self.meshes:
                yield Accept("output", cidr.version, "", mesh, destination=str(cidr))
        for address in self.tailscaled:
            yield Accept("output", address.version, "", self.own_link, destination=str(address))
            if address.version == 6:
                yield Accept("output", 6, "", self.own_link, protocol="ipv6-icmp")
        for address in self._answering():
            yield Accept(
                *("output", address.version, "", self.own_link),
                source=str(address),
                state="reply",
            )

    def _answering(self) -> Tuple[Address, ...]:
        return self.node if self.answers_for_node else ()

    def answered_ports(self) -> list[tuple[str, str]]:
        """Protocols and ports; ("", "") stands for everything."""
        if isinstance(self.answers_for_node, bool):
            return [("", "")] if self.answers_for_node else []
        return [
            (protocol, port)
            for protocol in ANSWERED_PROTOCOLS
            for port in intervals(self.answers_for_node, protocol)
        ]
