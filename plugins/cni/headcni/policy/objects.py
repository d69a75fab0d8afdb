"""Pods, namespaces and network policies, as far as the rules for pods depend on them.

The parsers take objects as the API server or a file has them. They name every mistake with its
field, its value and the fix, and they accept no field that is not known here: a policy that is
understood in part would allow or deny something else than its author wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from ipaddress import ip_address, ip_network
from sys import intern
from typing import Any, Dict, NamedTuple, Optional, Tuple, Union

from ..errors import INVALID_CONFIG, CniError
from ..model import Address, Network
from ..problems import Problem, named_mistakes, unknown_keys

API_VERSION = "networking.k8s.io/v1"
NAME_LABEL = "kubernetes.io/metadata.name"  # the API server sets it on each namespace
PROTOCOLS = {"TCP": 6, "UDP": 17, "SCTP": 132}
INGRESS, EGRESS = "Ingress", "Egress"
OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")

# Bounds of one object. An API server's own limit is 1.5 MiB, so its objects stay below these.
MOST_LABELS = 4096
MOST_RULES = 4096  # of a policy and direction
MOST_ENTRIES = 16384  # peers, exceptions, ports, requirements and values of a policy together
MOST_PORTS = 4096  # of a pod
MOST_ADDRESSES = 16  # of a pod
LONGEST_TEXT = 512  # characters of a name, of a label's key or of its value

_NAME = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?\Z"
_EXPECTED_NAME = "a name as Kubernetes has it: lower-case letters, digits, - and ."
_EXPECTED_LABELS = "an object with texts, such as {app: web}"
_PORT_NAME = r"[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?\Z"
# Annotations of a static pod's mirror pod that name the uid under which kubelet runs it.
_STATIC = ("kubernetes.io/config.hash", "kubernetes.io/config.mirror")

Labels = Mapping[str, str]
Key = Tuple[str, str]  # namespace and name, of a pod or a policy


class Requirement(NamedTuple):
    """One condition of a label selector. `values` is sorted."""

    key: str
    operator: str
    values: Tuple[str, ...] = ()

    def holds(self, labels: Labels) -> bool:
        value = labels.get(self.key)
        if self.operator == "In":
            return value is not None and value in self.values
        if self.operator == "NotIn":
            return value is None or value not in self.values
        return (value is not None) == (self.operator == "Exists")

    def __str__(self) -> str:
        values = ", ".join(self.values)
        return {
            "In": f"{self.key}={values}" if len(self.values) == 1 else f"{self.key} in ({values})",
            "NotIn": f"{self.key} not in ({values})",
            "Exists": self.key,
            "DoesNotExist": f"!{self.key}",
        }[self.operator]


class Selector(NamedTuple):
    """A label selector in its one form: the order in which it is written makes no difference.
    Without a requirement it selects everything."""

    requirements: Tuple[Requirement, ...] = ()

    def matches(self, labels: Labels) -> bool:
        return all(requirement.holds(labels) for requirement in self.requirements)

    def __str__(self) -> str:
        return ", ".join(map(str, self.requirements)) or "all"


EVERYTHING = Selector()


class Namespace(NamedTuple):
    name: str
    labels: Labels

    @classmethod
    def from_object(cls, found: Mapping[str, Any]) -> Namespace:
        """From the API's object. The label with the namespace's name is added if it is missing, as
        in files for nodes without Kubernetes."""
        with _Mistakes("Namespace", found) as read:
            meta = read.metadata()
            name = meta.name("name")
            labels = meta.labels()
            labels.setdefault(NAME_LABEL, name)
        return cls(name, labels)


class ContainerPort(NamedTuple):
    """A port that the pod has named."""

    name: str
    number: int
    protocol: int  # as in IP's header


class Pod(NamedTuple):
    """A pod of any node."""

    namespace: str
    name: str
    uid: str
    labels: Labels
    addresses: Tuple[Address, ...] = ()
    ports: Tuple[ContainerPort, ...] = ()
    node: str = ""
    host_network: bool = False
    phase: str = ""  # Pending, Running, Succeeded, Failed, Unknown
    runs_as: Tuple[str, ...] = ()  # uids that its sandbox may have beside `uid`; see _STATIC

    @property
    def key(self) -> Key:
        return self.namespace, self.name

    @property
    def counts(self) -> bool:
        """Whether selectors can select it: it has addresses of its own, and has not ended."""
        return not self.host_network and self.phase not in ("Succeeded", "Failed")

    def is_sandbox(self, uid: str) -> bool:
        """Whether a sandbox with this uid is of this pod, and not of another with the same name.
        A runtime that does not say the uid is believed."""
        return not uid or uid == self.uid or uid in self.runs_as

    @classmethod
    def from_object(cls, found: Mapping[str, Any]) -> Pod:
        with _Mistakes("Pod", found) as read:
            meta, spec, status = read.metadata(), read.section("spec"), read.section("status")
            notes = meta.section("annotations").values
            host_network = spec.flag("hostNetwork")
            return cls(
                namespace=intern(meta.name("namespace")),
                name=meta.name("name"),
                uid=meta.text("uid", required=False),
                labels=meta.labels(),
                addresses=() if host_network else _addresses(status),
                ports=_container_ports(spec),
                node=intern(spec.text("nodeName", required=False)),
                host_network=host_network,
                phase=intern(status.text("phase", required=False)),
                runs_as=tuple(str(notes[key])[:LONGEST_TEXT] for key in _STATIC if notes.get(key)),
            )


class Block(NamedTuple):
    """An ipBlock."""

    network: Network
    exceptions: Tuple[Network, ...] = ()

    def contains(self, address: Address) -> bool:
        return _within(address, self.network) and not any(
            _within(address, exception) for exception in self.exceptions
        )

    def __str__(self) -> str:
        without = ", ".join(map(str, self.exceptions))
        return f"{self.network} except {without}" if without else str(self.network)


class Peer(NamedTuple):
    """Either a block, or pods. `namespaces` is None for the policy's own namespace."""

    block: Optional[Block] = None
    pods: Selector = EVERYTHING
    namespaces: Optional[Selector] = None

    def __str__(self) -> str:
        if self.block is not None:
            return f"ipBlock {self.block}"
        if self.namespaces is None:
            return f"pods ({self.pods}) of its namespace"
        return f"pods ({self.pods}) of namespaces ({self.namespaces})"


class Port(NamedTuple):
    """Of a rule. `port` is a number, a container port's name, or None for every port."""

    protocol: int = PROTOCOLS["TCP"]
    port: Union[int, str, None] = None
    end: Optional[int] = None  # of a range that begins with `port`

    def __str__(self) -> str:
        protocol = next(name for name, number in PROTOCOLS.items() if number == self.protocol)
        if self.port is None:
            return f"every port/{protocol}"
        return f"{self.port}{f'-{self.end}' if self.end else ''}/{protocol}"


class Rule(NamedTuple):
    """What it allows: to or from these peers, on these ports. None is everything; as in the API, an
    empty list is the same."""

    peers: Optional[Tuple[Peer, ...]] = None
    ports: Optional[Tuple[Port, ...]] = None


class Policy(NamedTuple):
    namespace: str
    name: str
    pods: Selector
    ingress: Optional[Tuple[Rule, ...]] = None  # None: this direction is not its concern
    egress: Optional[Tuple[Rule, ...]] = None

    @property
    def key(self) -> Key:
        return self.namespace, self.name

    def rules(self, direction: str) -> Optional[Tuple[Rule, ...]]:
        return self.ingress if direction == INGRESS else self.egress

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @classmethod
    def from_object(cls, found: Mapping[str, Any], default_namespace: str = "") -> Policy:
        """From a NetworkPolicy. `default_namespace` is that of an object which names none."""
        with _Mistakes("NetworkPolicy", found, API_VERSION) as read:
            read.only(("apiVersion", "kind", "metadata", "spec", "status"))
            meta, spec = read.metadata(), read.section("spec")
            spec.only(("podSelector", "policyTypes", "ingress", "egress"))
            ingress, egress = _rules(spec, "ingress", "from"), _rules(spec, "egress", "to")
            types = _types(spec)
            if types is None:
                types = (INGRESS, EGRESS) if egress else (INGRESS,)
            return cls(
                namespace=intern(meta.name("namespace", default_namespace)),
                name=meta.name("name"),
                pods=spec.selector("podSelector"),
                ingress=ingress if INGRESS in types else None,
                egress=egress if EGRESS in types else None,
            )


class World(NamedTuple):
    """All that the rules depend on. `complete` is false as long as not everything was listed once:
    a policy that is not here may then exist all the same."""

    pods: Dict[Key, Pod]
    namespaces: Dict[str, Namespace]
    policies: Dict[Key, Policy]
    complete: bool = True

    @classmethod
    def of(
        cls,
        pods: Iterable[Pod] = (),
        namespaces: Iterable[Namespace] = (),
        policies: Iterable[Policy] = (),
        complete: bool = True,
    ) -> World:
        return cls(
            {pod.key: pod for pod in pods},
            {namespace.name: namespace for namespace in namespaces},
            {policy.key: policy for policy in policies},
            complete,
        )

    def labels_of(self, namespace: str) -> Labels:
        """Those of a namespace that may not be known yet: then its name is all there is."""
        known = self.namespaces.get(namespace)
        return known.labels if known is not None else {NAME_LABEL: namespace}


def selected(peer: Peer, own_namespace: str, pod: Pod, world: World) -> bool:
    """Whether a peer with selectors selects a pod."""
    if peer.block is not None or not pod.counts:
        return False
    if peer.namespaces is None:
        in_namespace = pod.namespace == own_namespace
    else:
        in_namespace = peer.namespaces.matches(world.labels_of(pod.namespace))
    return in_namespace and peer.pods.matches(pod.labels)


def _within(address: Address, network: Network) -> bool:
    return address.version == network.version and address in network


class _Section:
    """An object of the input, and where it is. What is wrong with it is added to `found`."""

    def __init__(self, values: Any, path: str, found: list[Problem], budget: list[int]) -> None:
        self.path, self.found, self._budget = path, found, budget
        if not isinstance(values, Mapping):
            self.wrong("", values, "an object")
            values = {}
        self.values: Mapping[str, Any] = values

    def at(self, key: str) -> str:
        return f"{self.path}.{key}".strip(".")

    def wrong(self, key: str, value: object, expected: str) -> None:
        self.found.append(Problem(self.at(key), value, expected))

    def only(self, known: Tuple[str, ...]) -> None:
        unknown_keys(self.values, known, self.path, self.found)

    def section(self, key: str, required: bool = False) -> _Section:
        value = self.values.get(key)
        if value is None and not required:
            value = {}
        return _Section(value, self.at(key), self.found, self._budget)

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            self.wrong(key, value, "true or false")
        return value is True

    def text(self, key: str, default: str = "", required: bool = True) -> str:
        value = self.values.get(key)
        if value is None and (default or not required):
            return default
        if not isinstance(value, str) or len(value) > LONGEST_TEXT or (required and not value):
            self.wrong(key, value, f"a text of at most {LONGEST_TEXT} characters")
            return default
        return value

    def name(self, key: str, default: str = "") -> str:
        value = self.text(key, default)
        if value and not re.match(_NAME, value):
            self.wrong(key, value, _EXPECTED_NAME)
        return value

    def labels(self) -> dict[str, str]:
        return self.pairs("labels", _EXPECTED_LABELS)

    def pairs(self, key: str, expected: str) -> dict[str, str]:
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping) or len(value) > MOST_LABELS:
            self.wrong(key, value, f"{expected}, with at most {MOST_LABELS} entries")
            return {}
        pairs = {}
        for name, text in value.items():
            if _is_text(name) and _is_text(text):
                pairs[intern(name)] = intern(text)
                continue
            self.wrong(f"{key}.{name}", text, f"a text of at most {LONGEST_TEXT} characters")
        return pairs

    def items(self, key: str, most: int, expected: str) -> list[Any]:
        """A list; empty if it is not given."""
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, (list, tuple)):
            self.wrong(key, value, expected)
            return []
        self._budget[0] -= len(value)
        if len(value) > most or self._budget[0] < 0:
            said = f"{len(value)} entries"
            self.wrong(key, said, f"at most {most} entries, and {MOST_ENTRIES} in the whole object")
            return []
        return list(value)

    def sections(self, key: str, most: int, expected: str) -> list[_Section]:
        return [
            _Section(item, f"{self.at(key)}[{at}]", self.found, self._budget)
            for at, item in enumerate(self.items(key, most, expected))
        ]

    def selector(self, key: str) -> Selector:
        section = self.section(key)
        section.only(("matchLabels", "matchExpressions"))
        wanted = section.pairs("matchLabels", _EXPECTED_LABELS)
        found = {Requirement(name, "In", (text,)) for name, text in wanted.items()}
        for one in section.sections("matchExpressions", MOST_ENTRIES, "a list of requirements"):
            requirement = one.requirement()
            if requirement is not None:
                found.add(requirement)
        return Selector(tuple(sorted(found)))

    def requirement(self) -> Optional[Requirement]:
        self.only(("key", "operator", "values"))
        key, operator = self.text("key"), self.text("operator")
        values = self.items("values", MOST_ENTRIES, "a list of texts")
        if not key or not operator:
            return None
        if operator not in OPERATORS:
            self.wrong("operator", operator, f"one of {', '.join(OPERATORS)}")
            return None
        if not all(isinstance(value, str) and len(value) <= LONGEST_TEXT for value in values):
            self.wrong("values", values, f"texts of at most {LONGEST_TEXT} characters")
            return None
        if bool(values) != (operator in ("In", "NotIn")):
            expected = "at least one value" if operator in ("In", "NotIn") else "no values"
            self.wrong("values", values, f"{expected}, as the operator is {operator}")
            return None
        return Requirement(intern(key), intern(operator), tuple(sorted(map(intern, set(values)))))


class _Mistakes:
    """Reads one object; all of its mistakes are raised at the end as one CniError."""

    def __init__(self, kind: str, values: Any, api_version: str = "v1") -> None:
        self._kind, self._found = kind, list[Problem]()
        self._section = _Section(values, "", self._found, [MOST_ENTRIES])
        # The items of a list carry neither of them.
        for key, expected in (("kind", kind), ("apiVersion", api_version)):
            said = self._section.values.get(key, expected)
            if said != expected:
                self._section.wrong(key, said, expected)
        self.section, self.only = self._section.section, self._section.only

    def metadata(self) -> _Section:
        return self._section.section("metadata", required=True)

    def __enter__(self) -> _Mistakes:
        return self

    def __exit__(self, kind: object, problem: object, trace: object) -> None:
        if kind is None and self._found:
            raise CniError(INVALID_CONFIG, self._title(), self._details())

    def _title(self) -> str:
        meta = self._section.values.get("metadata")
        meta = meta if isinstance(meta, Mapping) else {}
        names = [meta.get("namespace"), meta.get("name")]
        shown = "/".join(str(name)[:LONGEST_TEXT] for name in names if name)
        count = len(self._found)
        return f"{self._kind} {shown} has {'a mistake' if count == 1 else f'{count} mistakes'}"

    def _details(self) -> str:
        return "; ".join(named_mistakes(self._found, str))


def _addresses(status: _Section) -> Tuple[Address, ...]:
    listed = status.sections("podIPs", MOST_ADDRESSES, "a list of objects with an ip")
    texts = [(one, "ip") for one in listed] or [(status, "podIP")]
    found = []
    for section, key in texts:
        text = section.text(key, required=False)
        if text:
            try:
                found.append(ip_address(text))
            except ValueError:
                section.wrong(key, text, "an IP address")
    return tuple(found)


def _container_ports(spec: _Section) -> Tuple[ContainerPort, ...]:
    """The named ports. An init container serves only if it goes on beside the others."""
    containers = spec.sections("containers", MOST_PORTS, "a list of containers")
    for one in spec.sections("initContainers", MOST_PORTS, "a list of containers"):
        if one.values.get("restartPolicy") == "Always":
            containers.append(one)
    found = []
    for container in containers:
        for port in container.sections("ports", MOST_PORTS, "a list of ports"):
            name = port.text("name", required=False)
            number = port.values.get("containerPort")
            if not name:
                continue
            if not _is_port(number):
                port.wrong("containerPort", number, "a number from 1 to 65535")
                continue
            found.append(ContainerPort(intern(name), int(str(number)), _protocol(port)))
    return tuple(found)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_TEXT


def _is_port(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 65536


def _protocol(port: _Section) -> int:
    name = port.text("protocol", "TCP")
    if name not in PROTOCOLS:
        port.wrong("protocol", name, f"one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS.get(name, 0)


def _types(spec: _Section) -> Optional[Tuple[str, ...]]:
    """None if it is left to the rules which directions the policy is about."""
    types = spec.items("policyTypes", 2, f"a list of {INGRESS} and {EGRESS}")
    for at, name in enumerate(types):
        if name not in (INGRESS, EGRESS):
            spec.wrong(f"policyTypes[{at}]", name, f"{INGRESS} or {EGRESS}")
    return tuple(types) if types else None


def _rules(spec: _Section, direction: str, peers_key: str) -> Tuple[Rule, ...]:
    found = []
    for section in spec.sections(direction, MOST_RULES, "a list of rules"):
        section.only((peers_key, "ports"))
        peers = section.sections(peers_key, MOST_ENTRIES, "a list of peers")
        ports = section.sections("ports", MOST_ENTRIES, "a list of ports")
        found.append(
            Rule(
                tuple(dict.fromkeys(map(_peer, peers))) if peers else None,
                tuple(dict.fromkeys(map(_port, ports))) if ports else None,
            )
        )
    return tuple(found)


def _peer(section: _Section) -> Peer:
    section.only(("podSelector", "namespaceSelector", "ipBlock"))
    keys = [key for key, value in section.values.items() if value is not None]
    if not keys:
        section.wrong("", section.values, "podSelector, namespaceSelector or ipBlock")
    if "ipBlock" in keys:
        if len(keys) > 1:
            section.wrong("ipBlock", section.values["ipBlock"], "no selector beside it")
        return Peer(_block(section.section("ipBlock")))
    namespaces = section.selector("namespaceSelector") if "namespaceSelector" in keys else None
    return Peer(None, section.selector("podSelector"), namespaces)


def _block(section: _Section) -> Optional[Block]:
    section.only(("cidr", "except"))
    network = _network(section, "cidr", section.values.get("cidr"))
    if network is None:
        return None
    exceptions = []
    for at, text in enumerate(section.items("except", MOST_ENTRIES, "a list of CIDRs")):
        one = _network(section, f"except[{at}]", text)
        if one is None:
            continue
        if one.version != network.version or not network.overlaps(one):
            section.wrong(f"except[{at}]", text, f"a range within {network}")
        elif one.prefixlen <= network.prefixlen:
            section.wrong(f"except[{at}]", text, f"a smaller range than {network}")
        exceptions.append(one)
    return Block(network, tuple(sorted(set(exceptions), key=lambda one: (one.version, one))))


def _network(section: _Section, key: str, value: object) -> Optional[Network]:
    """Host bits may be set, as in the API; what counts is the range."""
    if isinstance(value, str) and "/" in value and len(value) <= LONGEST_TEXT:
        try:
            return ip_network(value, strict=False)
        except ValueError:
            pass
    section.wrong(key, value, "a CIDR such as 10.0.0.0/8 or fd00::/8")
    return None


def _port(section: _Section) -> Port:
    section.only(("protocol", "port", "endPort"))
    port, end = section.values.get("port"), section.values.get("endPort")
    if isinstance(port, str):
        if not re.match(_PORT_NAME, port) or not re.search("[a-z]", port):
            section.wrong("port", port, "a port's number, or its name: at most 15 of a-z, 0-9, -")
        port = intern(port)
    elif port is not None and not _is_port(port):
        section.wrong("port", port, "a number from 1 to 65535, or a container port's name")
        port = None
    if end is not None:
        if not isinstance(port, int):
            section.wrong("endPort", end, "a number as port beside it, or no endPort")
            end = None
        elif not _is_port(end) or end < port:
            section.wrong("endPort", end, f"a number from {port} to 65535")
            end = None
    return Port(_protocol(section), port, end)
