"""The values that all parts of the runtime use: plain data without I/O."""

from __future__ import annotations

from .record import TYPE_CHECKING, dataclass, field
from .shared.modes import SOCKETS

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
    from typing import Any, Mapping, Optional, Tuple, TypeAlias, Union

Address: TypeAlias = "Union[IPv4Address, IPv6Address]"
Network: TypeAlias = "Union[IPv4Network, IPv6Network]"


@dataclass(frozen=True, order=True)
class Owner:
    """The holder of an address: an interface of a container on a network."""

    network: str
    container_id: str
    ifname: str


@dataclass(frozen=True)
class PodRef:
    """The pod of the container in Kubernetes. Values that the runtime did not give are empty."""

    namespace: str = ""
    name: str = ""
    uid: str = ""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.name else ""


@dataclass(frozen=True)
class Route:
    dst: Network
    gateway: Optional[Address] = None
    mtu: Optional[int] = None
    advmss: Optional[int] = None
    priority: Optional[int] = None
    table: Optional[int] = None  # None: the main one
    scope: Optional[int] = None


@dataclass(frozen=True)
class Range:
    """Addresses for pods: from start to end of the subnet, without the gateway and exclusions."""

    subnet: Network
    start: Address
    end: Address
    gateway: Optional[Address]
    exclude: Tuple[Tuple[Address, Address], ...] = ()


@dataclass(frozen=True)
class IpamConfig:
    """A pod gets one address of each range set: from the first range of the set with room."""

    type: str  # "" for a link without addresses
    range_sets: Tuple[Tuple[Range, ...], ...] = ()
    strategy: str = "sequential"
    routes: Tuple[Route, ...] = ()
    requested: Tuple[Address, ...] = ()
    annotated: bool = False  # whether the pod's annotation requests an address
    annotation_namespaces: Tuple[str, ...] = ()  # patterns of namespaces whose pods may request
    raw: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LeasedAddress:
    address: Address
    prefixlen: int
    gateway: Optional[Address]

    @property
    def interface(self) -> str:
        return f"{self.address}/{self.prefixlen}"


@dataclass(frozen=True)
class Lease:
    owner: Owner
    pod: str
    addresses: Tuple[LeasedAddress, ...]


@dataclass(frozen=True)
class Dns:
    nameservers: Tuple[str, ...] = ()
    domain: str = ""
    search: Tuple[str, ...] = ()
    options: Tuple[str, ...] = ()


@dataclass(frozen=True)
class PortMapping:
    host_port: int
    container_port: int
    protocol: str = "tcp"
    host_ip: Optional[Address] = None


@dataclass(frozen=True)
class PortRange:
    """A range of ports, of some protocols."""

    first: int
    last: int
    protocols: Tuple[str, ...] = ("tcp", "udp", "sctp")

    def __str__(self) -> str:
        span = str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
        return f"{span}/{self.protocols[0]}" if len(self.protocols) == 1 else span


# Host ports that no pod may have: those of kubelet, of the node's tailscaled, and of HeadCNI's
# tailscaled, whose sockets are in another namespace.
RESERVED_PORTS = (
    PortRange(10250, 10250, ("tcp",)),
    PortRange(41641, 41642, ("udp",)),
)


@dataclass(frozen=True)
class Bandwidth:
    """Bits per second, and bits of burst; 0 means no limit. Ingress is into the pod."""

    ingress_rate: int = 0
    ingress_burst: int = 0
    egress_rate: int = 0
    egress_burst: int = 0


@dataclass(frozen=True)
class NetworkConfig:
    """A netconf of type headcni, checked and complete."""

    cni_version: str
    name: str
    ipam: IpamConfig
    datapath: str = "bridge"  # or "routed"
    bridge: str = "headcni0"
    mtu: int = 1280
    mode: str = "host"
    ip_masq: bool = True
    enable_ipv6: bool = False
    enable_network_policy: bool = False
    hairpin: bool = True
    is_gateway: bool = True  # whether the bridge has the gateway's address
    anti_spoofing: bool = True
    anti_spoofing_exempt: Tuple[str, ...] = ()  # patterns of namespace/name
    default_route: bool = True
    pod_cidrs: Tuple[Network, ...] = ()
    cluster_cidrs: Tuple[Network, ...] = ()
    service_cidrs: Tuple[Network, ...] = ()
    headscale_url: str = ""
    tailscale_socket: str = SOCKETS["host"]
    dns: Dns = Dns()
    mac: str = ""
    port_mappings: Tuple[PortMapping, ...] = ()
    reserved_ports: Tuple[PortRange, ...] = RESERVED_PORTS
    host_ports_over_listeners: bool = False
    bandwidth: Bandwidth = Bandwidth()
    delegates: Tuple[Mapping[str, Any], ...] = ()
    delegate_timeout: float = 60.0
    mesh_grace: float = 60.0  # seconds without the mesh interface until STATUS fails
    data_dir: str = "/var/lib/cni/headcni"
    prev_result: Optional[Mapping[str, Any]] = None
    runtime_config: Mapping[str, Any] = field(default_factory=dict)
    raw: Mapping[str, Any] = field(default_factory=dict)
