"""/etc/headcni/config.yaml: what the operator tells the daemon.

Each key is declared here once, with its default, what may stand there, what it is for, and whether
SIGHUP is enough to change it. Reading, the JSON Schema for editors and the answer to ``changes``
follow from the declaration, so they cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Tuple, Union

from ..ipam.pool import STRATEGIES
from ..model import Network, PortRange
from ..shared import bearer_token
from ..shared.modes import LINKS, MODES, socket_of
from ..shared.podcidr import parse_pod_cidrs
from ..skel import is_interface_name
from ..tailnet_access import ALL as WHOLE_TAILNET
from . import kinds
from .keys import key, section

LEVELS = ("DEBUG", "INFO", "WARN", "ERROR", "FATAL")

_URL = r"https?://[^\s/@?#]+(?:/[^\s@]*)?"
_DOMAIN = r"(?:[A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?"
_address = kinds.text(kinds.is_address, "an IP address")


@dataclass(frozen=True)
class Daemon:
    socket: str = key(
        "/run/headcni/cni.sock",
        kinds.path(),
        "where the plugin finds the daemon; root alone may use it",
    )
    data_dir: str = key(
        "/var/lib/cni/headcni",
        kinds.path(),
        "the allocation store; the plugin's data_dir must agree",
    )
    reconcile_interval: float = key(
        30.0,
        kinds.seconds(1, 3600),
        "how often desired and actual state are compared when no event asks for it",
        live=True,
    )
    stop_timeout: float = key(
        20.0,
        kinds.seconds(0, 300),
        "how long a stopping daemon waits for calls in progress",
        live=True,
    )
    node_name: str = key(
        "",
        kinds.pattern(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "a name as Kubernetes has it"),
        "what Kubernetes calls this node; else NODE_NAME, else the host name in lower case",
    )
    kubeconfig: str = key(
        "",
        kinds.path(),
        "watch this node's pods with it; without one, a service account's, or none",
    )
    token_lifetime: float = key(
        7_776_000.0,
        kinds.seconds(bearer_token.SHORTEST, bearer_token.LONGEST),
        "how long a token lives that the daemon renews for itself; the API server may grant less",
    )
    pod_selector: str = key(
        "",
        kinds.pattern(r"[^\s&]+(?: [^\s&]+)*", "a label selector such as app=web,tier!=test"),
        "watch only the pods with these labels",
    )


@dataclass(frozen=True)
class Headscale:
    url: str = key(
        "", kinds.pattern(_URL, "an http:// or https:// URL"), "the control server", live=True
    )
    api_key_file: str = key(
        "",
        kinds.path(),
        "a file, 0600, with an API key: the daemon then asks for its own routes itself. "
        "Without it the approval is only watched",
        live=True,
    )
    timeout: float = key(10.0, kinds.seconds(0.1, 300), "of one request", live=True)
    retries: int = key(3, kinds.number(0, 20), "of a request that failed, with back-off", live=True)


@dataclass(frozen=True)
class TailscaleSocket:
    path: str = key("", kinds.path(), "of tailscaled's LocalAPI; by default as the mode has it")


@dataclass(frozen=True)
class Tailscale:
    mode: str = key(
        "host",
        kinds.choice(*MODES),
        "host: the node's own tailscaled; daemon: one of ours, in a network namespace of its own",
    )
    socket: TailscaleSocket = field(
        default_factory=TailscaleSocket, metadata=section("where tailscaled answers")
    )
    interface_name: str = key(
        "",
        kinds.text(is_interface_name, "an interface name of at most 15 characters"),
        "the way to the other nodes; by default tailscale0 (host) or headcni01 (daemon)",
    )
    port: int = key(
        41642, kinds.number(1, 65535), "the UDP port of our own tailscaled (daemon mode)"
    )
    link_cidr: Tuple[Network, ...] = key(
        (),
        kinds.cidrs(kinds.any_cidrs),
        "addresses of the link to our own tailscaled; by default such as clash with no route",
        name="linkCIDR",
    )
    answer_for_node: Union[bool, Tuple[PortRange, ...]] = key(
        True,
        kinds.answered(),
        "on which ports the node answers at the tailnet address of our own tailscaled: true for "
        "all, a list such as [22, 6443/tcp, 30000-32767], or false for none, in which case the "
        "node itself does not reach the tailnet either (daemon mode)",
    )
    peer_tags: Tuple[str, ...] = key(
        ("tag:headcni",),
        kinds.tags(),
        "only peers with one of these tags may serve pods; any, or an empty list: every peer may",
    )

    @property
    def socket_path(self) -> str:
        return socket_of(self.mode, self.socket.path)

    @property
    def interface(self) -> str:
        return self.interface_name or LINKS[self.mode]


@dataclass(frozen=True)
class PodCidr:
    node_local: Tuple[Network, ...] = key(
        (), kinds.cidrs(parse_pod_cidrs), "this node's own; the answer that needs no guessing"
    )
    base: Tuple[Network, ...] = key(
        (), kinds.cidrs(kinds.any_cidrs), "the cluster's, of which it is a part"
    )
    per_node: str = key(
        "", kinds.sizes(), "the size of a node's share of base; /24 and /64 if not set"
    )
    peer_sizes: Tuple[int, ...] = key(
        (),
        kinds.several(kinds.number(1, 126), "a prefix length such as 24 or 64"),
        "prefix lengths that other nodes' ranges may also have; without it, all must be as long as "
        "perNode or this node's own. 32 or less: of IPv4",
    )


@dataclass(frozen=True)
class NetworkSection:
    pod_cidr: PodCidr = field(
        default_factory=PodCidr, metadata=section("where the pods' addresses come from", "podCIDR")
    )
    service_cidr: Tuple[Network, ...] = key(
        (),
        kinds.cidrs(kinds.any_cidrs),
        "the services' range, which no pod may have",
        name="serviceCIDR",
    )
    mtu: int = key(
        1280, kinds.number(576, 65535), "of pods' interfaces; 1280 is what Tailscale carries"
    )
    bridge: str = key(
        "headcni0",
        kinds.text(is_interface_name, "an interface name of at most 15 characters"),
        "the bridge that pods are on; the plugin's bridge must agree",
    )
    firewall: str = key(
        "auto",
        kinds.choice("auto", "none"),
        "auto: other firewalls on the node are told to let pods through; none: they are left "
        "alone, and what they block is only reported",
    )
    own_networks_first: bool = key(
        True,
        kinds.flag(),
        "whether networks in the node's main routing table are reached directly although a peer "
        "advertises them in the tailnet (host mode)",
    )
    tailnet_access: str = key(
        WHOLE_TAILNET,
        kinds.access(),
        "what pods may reach of the tailnet, where they have the node's address and so its rights: "
        "all; pods: only pods of the mesh; or a list of addresses and ports beside those",
        live=True,
    )
    tailnet_access_namespaces: Tuple[Tuple[str, str], ...] = key(
        kinds.Accesses(),
        kinds.accesses(),
        "the same for pods of these namespaces, over their annotation headcni.dev/tailnet-access",
        live=True,
    )
    enable_network_policy: bool = key(
        False,
        kinds.flag(),
        "whether network policies are enforced for this node's pods; the plugin's "
        "enable_network_policy must agree",
    )
    unknown_policy: str = key(
        "deny",
        kinds.choice("deny", "allow"),
        "what a new pod may do while it is not known which policies select it, once any policy is "
        "known: nothing, or everything",
        live=True,
    )
    log_denied: int = key(
        0,
        kinds.number(0, 1000),
        "how many packets per second that a pod's network policies deny are written to the "
        "kernel's log; 0: none",
        live=True,
    )


@dataclass(frozen=True)
class IpamSection:
    type: str = key(
        "headcni-ipam", kinds.choice("headcni-ipam", "host-local"), "who gives addresses"
    )
    strategy: str = key("sequential", kinds.choice(*STRATEGIES), "which free address a pod gets")
    gc_interval: float = key(
        3600.0,
        kinds.seconds(10, 7 * 86400),
        "how often addresses of pods that are gone are looked for",
        name="gcInterval",
        live=True,
    )


@dataclass(frozen=True)
class MagicDns:
    enabled: bool = key(False, kinds.flag(), "whether pods resolve by way of the tailnet")
    base_domain: str = key("", kinds.pattern(_DOMAIN, "a domain name"), "the tailnet's domain")
    nameservers: Tuple[str, ...] = key(
        (), kinds.several(_address, "an IP address"), "asked in this order"
    )
    search_domains: Tuple[str, ...] = key(
        (),
        kinds.several(kinds.pattern(_DOMAIN, "a domain name"), "a domain name"),
        "tried for short names",
    )
    options: Tuple[str, ...] = key(
        (),
        kinds.several(kinds.pattern(r"\S+", "a resolver option"), "a resolver option"),
        "such as ndots:5",
    )


@dataclass(frozen=True)
class DnsSection:
    magic_dns: MagicDns = field(
        default_factory=MagicDns, metadata=section("what pods' resolv.conf says", "magicDNS")
    )


@dataclass(frozen=True)
class Monitoring:
    enabled: bool = key(True, kinds.flag(), "whether to answer over HTTP at all", live=True)
    address: str = key(
        "127.0.0.1", _address, "where to listen; 0.0.0.0 or :: lets everyone ask", live=True
    )
    port: int = key(9001, kinds.number(1, 65535), "where to listen", live=True)
    path: str = key("/metrics", kinds.pattern(r"/[\w./-]*", "a path"), "of the metrics", live=True)
    pprof: bool = key(False, kinds.flag(), "whether /debug/pprof is served", live=True)
    pod_name_label: bool = key(
        False, kinds.flag(), "label the set-up time by pod as well: a time series for every pod"
    )


@dataclass(frozen=True)
class Logging:
    level: str = key(
        "INFO", kinds.choice(*LEVELS, any_case=True), "the least that is written", live=True
    )
    format: str = key("logfmt", kinds.choice("logfmt", "json"), "how a line is written", live=True)


@dataclass(frozen=True)
class DaemonConfig:
    """The whole file, complete. What it does not say has its default."""

    daemon: Daemon = field(default_factory=Daemon, metadata=section("the daemon itself"))
    headscale: Headscale = field(
        default_factory=Headscale,
        metadata=section("the control server; the daemon works without it"),
    )
    tailscale: Tailscale = field(
        default_factory=Tailscale, metadata=section("the tailscaled that carries the packets")
    )
    network: NetworkSection = field(
        default_factory=NetworkSection, metadata=section("the addresses of pods and services")
    )
    ipam: IpamSection = field(
        default_factory=IpamSection, metadata=section("how addresses are given")
    )
    dns: DnsSection = field(default_factory=DnsSection, metadata=section("how pods resolve names"))
    monitoring: Monitoring = field(
        default_factory=Monitoring, metadata=section("health, metrics and profiles over HTTP")
    )
    logging: Logging = field(
        default_factory=Logging, metadata=section("what is written to the journal")
    )
