"""/etc/headcni/config.yaml: the settings of the daemon.

Each key is declared here once, with its default, its valid values, its purpose, and whether SIGHUP
is enough to change it. Reading the file, the JSON Schema for editors, the reference in
docs/configuration.md and the answer to ``changes`` all follow from the declaration.
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
        "the socket on which the plugin reaches the daemon; only root may use it",
    )
    data_dir: str = key(
        "/var/lib/cni/headcni",
        kinds.path(),
        "the folder of the allocation store; must equal the plugin's data_dir",
    )
    reconcile_interval: float = key(
        30.0,
        kinds.seconds(1, 3600),
        "how often the daemon compares desired and actual state if no event occurs",
        live=True,
    )
    stop_timeout: float = key(
        20.0,
        kinds.seconds(0, 300),
        "how long the daemon waits for calls in progress when it stops",
        live=True,
    )
    node_name: str = key(
        "",
        kinds.pattern(
            r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "a name that is valid in Kubernetes"
        ),
        "the name of this node in Kubernetes; by default NODE_NAME, or else the host name in lower "
        "case",
    )
    kubeconfig: str = key(
        "",
        kinds.path(),
        "the kubeconfig for watching this node's pods; without it the daemon uses a service "
        "account if it has one, and otherwise works without Kubernetes",
    )
    token_lifetime: float = key(
        7_776_000.0,
        kinds.seconds(bearer_token.SHORTEST, bearer_token.LONGEST),
        "how long the tokens are valid that the daemon requests for itself; the API server may "
        "shorten this",
    )
    pod_selector: str = key(
        "",
        kinds.pattern(r"[^\s&]+(?: [^\s&]+)*", "a label selector such as app=web,tier!=test"),
        "watch only pods with these labels",
    )


@dataclass(frozen=True)
class Headscale:
    url: str = key(
        "",
        kinds.pattern(_URL, "an http:// or https:// URL"),
        "the URL of the Headscale server",
        live=True,
    )
    api_key_file: str = key(
        "",
        kinds.path(),
        "a file with mode 0600 that contains an API key; with it the daemon approves its own "
        "routes. Without it the daemon only watches the approval",
        live=True,
    )
    timeout: float = key(10.0, kinds.seconds(0.1, 300), "the time limit of a request", live=True)
    retries: int = key(
        3,
        kinds.number(0, 20),
        "how often a failed request is retried, with growing pauses",
        live=True,
    )


@dataclass(frozen=True)
class TailscaleSocket:
    path: str = key(
        "", kinds.path(), "the socket of tailscaled's LocalAPI; the default depends on the mode"
    )


@dataclass(frozen=True)
class Tailscale:
    mode: str = key(
        "host",
        kinds.choice(*MODES),
        "host: use the node's own tailscaled; daemon: run a separate tailscaled in its own network "
        "namespace",
    )
    socket: TailscaleSocket = field(
        default_factory=TailscaleSocket, metadata=section("the API of tailscaled")
    )
    interface_name: str = key(
        "",
        kinds.text(is_interface_name, "an interface name of at most 15 characters"),
        "the interface to the other nodes; by default tailscale0 (host) or headcni01 (daemon)",
    )
    port: int = key(
        41642, kinds.number(1, 65535), "the UDP port of HeadCNI's own tailscaled (daemon mode)"
    )
    link_cidr: Tuple[Network, ...] = key(
        (),
        kinds.cidrs(kinds.any_cidrs),
        "the addresses of the link to HeadCNI's own tailscaled; by default a range that overlaps "
        "no route",
        name="linkCIDR",
    )
    answer_for_node: Union[bool, Tuple[PortRange, ...]] = key(
        True,
        kinds.answered(),
        "the ports on which the node answers at the tailnet address of HeadCNI's own tailscaled: "
        "true for all ports, a list such as [22, 6443/tcp, 30000-32767], or false for none. With "
        "false the node itself cannot reach the tailnet either (daemon mode)",
    )
    peer_tags: Tuple[str, ...] = key(
        ("tag:headcni",),
        kinds.tags(),
        "only peers with one of these tags may serve pod ranges; any, or an empty list, permits "
        "every peer",
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
        (), kinds.cidrs(parse_pod_cidrs), "the pod range of this node; overrides all other sources"
    )
    base: Tuple[Network, ...] = key(
        (),
        kinds.cidrs(kinds.any_cidrs),
        "the pod range of the whole cluster, which contains this node's range",
    )
    per_node: str = key(
        "", kinds.sizes(), "the prefix length of a node's part of base; by default /24 and /64"
    )
    peer_sizes: Tuple[int, ...] = key(
        (),
        kinds.several(kinds.number(1, 126), "a prefix length such as 24 or 64"),
        "further valid prefix lengths of other nodes' ranges, besides perNode and the length of "
        "this node's own range. Values up to 32 also apply to IPv4",
    )


@dataclass(frozen=True)
class NetworkSection:
    pod_cidr: PodCidr = field(
        default_factory=PodCidr, metadata=section("the source of the pods' addresses", "podCIDR")
    )
    service_cidr: Tuple[Network, ...] = key(
        (),
        kinds.cidrs(kinds.any_cidrs),
        "the range of services; pods never get an address from it",
        name="serviceCIDR",
    )
    mtu: int = key(
        1280,
        kinds.number(576, 65535),
        "the MTU of pods' interfaces; Tailscale carries packets of up to 1280 bytes",
    )
    bridge: str = key(
        "headcni0",
        kinds.text(is_interface_name, "an interface name of at most 15 characters"),
        "the bridge to which pods are connected; must equal the plugin's bridge",
    )
    firewall: str = key(
        "auto",
        kinds.choice("auto", "none"),
        "auto: configure the node's other firewalls to let pods' traffic through; none: leave them "
        "alone and only report what they block",
    )
    own_networks_first: bool = key(
        True,
        kinds.flag(),
        "whether the node reaches the networks in its main routing table directly even if a peer "
        "advertises them in the tailnet (host mode)",
    )
    tailnet_access: str = key(
        WHOLE_TAILNET,
        kinds.access(),
        "which tailnet addresses pods may reach; there they appear with the node's address and "
        "have its rights. all; pods: only pods of the mesh; or a list of more addresses and ports",
        live=True,
    )
    tailnet_access_namespaces: Tuple[Tuple[str, str], ...] = key(
        kinds.Accesses(),
        kinds.accesses(),
        "the same for pods of these namespaces; overrides their annotation "
        "headcni.dev/tailnet-access",
        live=True,
    )
    enable_network_policy: bool = key(
        False,
        kinds.flag(),
        "whether network policies are enforced for this node's pods; must equal the plugin's "
        "enable_network_policy",
    )
    unknown_policy: str = key(
        "deny",
        kinds.choice("deny", "allow"),
        "whether a new pod may communicate while its policies are not known yet; applies as soon "
        "as any policy is known",
        live=True,
    )
    log_denied: int = key(
        0,
        kinds.number(0, 1000),
        "how many denied packets per second are written to the kernel's log; 0 for none",
        live=True,
    )


@dataclass(frozen=True)
class IpamSection:
    type: str = key(
        "headcni-ipam", kinds.choice("headcni-ipam", "host-local"), "the source of pods' addresses"
    )
    strategy: str = key(
        "sequential", kinds.choice(*STRATEGIES), "how the next free address is chosen"
    )
    gc_interval: float = key(
        3600.0,
        kinds.seconds(10, 7 * 86400),
        "how often the daemon looks for addresses of pods that no longer exist",
        name="gcInterval",
        live=True,
    )


@dataclass(frozen=True)
class MagicDns:
    enabled: bool = key(False, kinds.flag(), "whether pods resolve names through the tailnet")
    base_domain: str = key("", kinds.pattern(_DOMAIN, "a domain name"), "the domain of the tailnet")
    nameservers: Tuple[str, ...] = key(
        (),
        kinds.several(_address, "an IP address"),
        "the name servers, in the order in which pods ask them",
    )
    search_domains: Tuple[str, ...] = key(
        (),
        kinds.several(kinds.pattern(_DOMAIN, "a domain name"), "a domain name"),
        "the domains that are appended to short names",
    )
    options: Tuple[str, ...] = key(
        (),
        kinds.several(kinds.pattern(r"\S+", "a resolver option"), "a resolver option"),
        "resolver options such as ndots:5",
    )


@dataclass(frozen=True)
class DnsSection:
    magic_dns: MagicDns = field(
        default_factory=MagicDns, metadata=section("the content of pods' resolv.conf", "magicDNS")
    )


@dataclass(frozen=True)
class Monitoring:
    enabled: bool = key(True, kinds.flag(), "whether the daemon serves HTTP", live=True)
    address: str = key(
        "127.0.0.1",
        _address,
        "the listening address; 0.0.0.0 or :: makes it reachable for everyone",
        live=True,
    )
    port: int = key(9001, kinds.number(1, 65535), "the listening port", live=True)
    path: str = key(
        "/metrics", kinds.pattern(r"/[\w./-]*", "a path"), "the path of the metrics", live=True
    )
    pprof: bool = key(False, kinds.flag(), "whether /debug/pprof is served", live=True)
    pod_name_label: bool = key(
        False,
        kinds.flag(),
        "also label the set-up time with the pod's name, which creates a time series for every pod",
    )


@dataclass(frozen=True)
class Logging:
    level: str = key(
        "INFO", kinds.choice(*LEVELS, any_case=True), "the lowest level that is logged", live=True
    )
    format: str = key(
        "logfmt", kinds.choice("logfmt", "json"), "the format of log lines", live=True
    )


@dataclass(frozen=True)
class DaemonConfig:
    """The whole file. Missing keys have their defaults."""

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
        default_factory=IpamSection, metadata=section("the assignment of addresses")
    )
    dns: DnsSection = field(default_factory=DnsSection, metadata=section("name resolution in pods"))
    monitoring: Monitoring = field(
        default_factory=Monitoring, metadata=section("health, metrics and profiles over HTTP")
    )
    logging: Logging = field(
        default_factory=Logging, metadata=section("what is written to the journal")
    )
