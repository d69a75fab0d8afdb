# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Where this node's pod CIDR comes from, and why.

Five sources, in this order; the first that has an answer wins:

1. ``network.podCIDR.nodeLocal`` of the configuration;
2. the environment variable ``NODE_POD_CIDR``;
3. a file of k3s, kubelet or kubeadm that names this node's own CIDR;
4. a hash of the host name, into ``network.podCIDR.base`` or, where that is not given, into the
   cluster's CIDR as such a file tells it (k3s without one: its default, 10.42.0.0/16);
5. ``10.244.0.0/24``.

The first three are answers; the last two are guesses (``Resolution.guessed``), because this node
cannot see the others. A /16 has 255 subnets of /24 to hash into, so among 10 nodes two share one
with a probability of one in six, among 20 nodes of one in two; and the default is the same
everywhere. Two nodes with one CIDR break both: Headscale makes them an HA pair and serves one.
``site.yml`` sees every node and refuses such a pair by name. The operator then gives one of the
two a ``nodeLocal``, which for anything beyond a trial is the right thing for every node.

Nothing here talks to etcd or to an API server.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network
from typing import Any, NamedTuple

from .cidr import Network, PodCidrError, parse_cidr, unfit_for_pods

__all__ = [  # the callers' one place for pod CIDRs, with what the hot path imports from `cidr`
    "Network",
    "PodCidrError",
    "parse_cidr",
    "unfit_for_pods",
]

DEFAULT_CIDR = "10.244.0.0/24"
K3S_CLUSTER_CIDR = "10.42.0.0/16"
PER_NODE = {4: 24, 6: 64}

_K3S_CONFIG = "/etc/rancher/k3s/config.yaml"
_K3S_SIGNS = ("/etc/rancher/k3s", "/var/lib/rancher/k3s")

# (path, whether it is written for this node alone). A file that is the same on every node cannot
# know a node's CIDR, so any CIDR in it is the cluster's.
_FILES: tuple[tuple[str, bool], ...] = (
    ("/var/lib/rancher/k3s/agent/etc/node-{node}.yaml", True),
    (_K3S_CONFIG, True),
    ("/etc/rancher/k3s/k3s.yaml", False),
    ("/var/lib/rancher/k3s/agent/etc/kubelet.config", True),
    ("/var/lib/kubelet/config.yaml", True),
    ("/etc/kubernetes/kubeadm-config.yaml", False),
    ("/etc/kubernetes/admin.conf", False),
    ("/etc/kubernetes/manifests/kube-controller-manager.yaml", False),
    ("/etc/kubernetes/manifests/kube-apiserver.yaml", False),
)

# A "node" CIDR as wide as this is a cluster's, whatever its key is called.
_CLUSTER_SIZED = {4: 16, 6: 56}
_LARGEST_FILE = 1 << 20

_NODE_KEYS = ("podCIDRs", "podCIDR", "podCidr", "pod-cidr")
_CLUSTER_KEYS = ("cluster-cidr", "clusterCIDR", "clusterCidr", "podSubnet", "pod-network-cidr")
_SIZE_KEYS = {
    "node-cidr-mask-size": (4, 6),
    "node-cidr-mask-size-ipv4": (4,),
    "node-cidr-mask-size-ipv6": (6,),
}


class Candidate(NamedTuple):
    """A place that was looked at, what was there, and the verdict."""

    source: str
    path: str
    value: str
    verdict: str


class Resolution(NamedTuple):
    """The node's pod CIDRs (one, or one of each family), and how they were found."""

    cidrs: tuple[Network, ...]
    source: str  # config, env, file, hash or default
    considered: tuple[Candidate, ...]

    @property
    def guessed(self) -> bool:
        """Whether another node may have come to the same answer."""
        return self.source in ("hash", "default")

    def explain(self) -> str:
        """The chosen candidate and the others, a line for each."""
        lines = [f"pod CIDR {join(self.cidrs)}, from {self.source}"]
        if self.guessed:
            lines[0] += " (a guess: set network.podCIDR.nodeLocal to be sure)"
        absent = []
        for seen in self.considered:
            where = seen.path or _LABELS[seen.source]
            if seen.verdict in _ABSENT:
                absent.append(where)
            else:
                value = f" = {seen.value}" if seen.value else ""
                lines.append(f"  {where}{value}: {seen.verdict}")
        if absent:
            lines.append("  not there: " + ", ".join(absent))
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for the result of an Ansible module or for JSON."""
        return {
            "cidrs": [str(cidr) for cidr in self.cidrs],
            "source": self.source,
            "guessed": self.guessed,
            "considered": [seen._asdict() for seen in self.considered],
        }


_ABSENT = ("not given", "not there")
_LABELS = {
    "config": "network.podCIDR.nodeLocal",
    "env": "NODE_POD_CIDR",
    "base": "network.podCIDR.base",
    "k3s": "k3s's default",
    "hash": "hash of the host name",
    "default": "default",
}


def cluster_around(own: Sequence[Network]) -> tuple[Network, ...]:
    """The cluster's CIDRs if nobody has named them: a /16 and a /48 around the node's own."""
    widths = {4: 16, 6: 48}
    return tuple(
        cidr.supernet(new_prefix=min(cidr.prefixlen, widths[cidr.version])) for cidr in own
    )


def join(cidrs: Sequence[Network]) -> str:
    return ",".join(str(cidr) for cidr in cidrs)


def parse_pod_cidrs(value: Any) -> tuple[Network, ...]:
    """One CIDR, or one of each family: a string, a comma list or a list."""
    cidrs = tuple(parse_cidr(text) for text in _texts(value))
    for cidr in cidrs:
        reason = unfit_for_pods(cidr)
        if reason:
            raise PodCidrError(f"{cidr} {reason}")
    return _one_of_each_family(cidrs)


def parse_sizes(value: Any) -> dict[int, int]:
    """The prefix length of a node's share by IP version, of 24, "24", "/24" or "/24,/64".

    A single number up to 32 is the IPv4 length, a larger one the IPv6 length.
    """
    sizes: dict[int, int] = {}
    for text in _texts(value):
        digits = text.removeprefix("/")
        if not (digits.isascii() and digits.isdigit()) or not 1 <= int(digits) <= 126:
            raise PodCidrError(f"{value!r} is not a prefix length such as /24")
        version = 4 if int(digits) <= 32 else 6
        if version in sizes:
            raise PodCidrError(f"{value!r} names two prefix lengths for IPv{version}")
        if version == 4 and int(digits) > 30:
            raise PodCidrError(f"/{digits} leaves no room for a gateway and a pod")
        sizes[version] = int(digits)
    return sizes


def derive(base: Network, prefixlen: int, hostname: str) -> Network:
    """The share of ``base`` that falls to a host by the SHA-256 of its name.

    The first share is left out as long as there is another: it is what cluster controllers give
    to the first node, and what the default of last resort is.
    """
    from hashlib import sha256

    if prefixlen < base.prefixlen:
        raise PodCidrError(f"{base} is smaller than the /{prefixlen} that each node should get")
    shares = 1 << (prefixlen - base.prefixlen)
    digest = sha256(hostname.strip().rstrip(".").lower().encode("utf-8", "replace")).digest()
    index = 1 + int.from_bytes(digest, "big") % (shares - 1) if shares > 1 else 0
    start = int(base.network_address) + (index << (base.max_prefixlen - prefixlen))
    if base.version == 4:
        return IPv4Network((start, prefixlen))
    return IPv6Network((start, prefixlen))


class Scan(NamedTuple):
    """What a file says: CIDRs of the node, CIDRs of the cluster, sizes of a node's share."""

    node: list[str]
    cluster: list[str]
    sizes: dict[int, int]


def scan(text: str) -> Scan:
    """Pick CIDRs out of YAML, JSON or command lines without a YAML parser.

    Understands ``key: value``, block and flow lists, quotes, comments, ``--flag=value``,
    ``--flag value``, a flag and its value as successive list items, k3s's ``flag=value`` items and
    kubeadm's ``name: flag`` / ``value: x`` pairs.
    """
    found = Scan([], [], {})
    if text.lstrip().startswith("{") and _scan_json(text, found):
        return found
    _scan_lines(text, found)
    return found


def _keep(found: Scan, key: str, values: Sequence[str]) -> None:
    if key in _SIZE_KEYS:
        for size in values[:1]:
            if size.isascii() and size.isdigit():
                for version in _SIZE_KEYS[key]:
                    # The plain flag is for single-stack clusters: a /24 says nothing about IPv6.
                    if len(_SIZE_KEYS[key]) == 1 or (version == 4) == (int(size) <= 32):
                        found.sizes[version] = int(size)
        return
    kept = found.node if key in _NODE_KEYS else found.cluster
    kept.extend(value for value in values if value not in kept)


def _scan_json(text: str, found: Scan) -> bool:
    import json

    try:
        pending: list[Any] = [json.loads(text)]
    except (ValueError, RecursionError):
        return False
    keys = {*_NODE_KEYS, *_CLUSTER_KEYS, *_SIZE_KEYS}
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            for key, inner in value.items():
                if key in keys:
                    given = inner if isinstance(inner, list) else [inner]
                    _keep(found, key, _texts([v for v in given if type(v) in (str, int)]))
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
            _scan_lines("\n".join(f"- {v}" for v in value if isinstance(v, str)), found)
    return True


def _scan_lines(text: str, found: Scan) -> None:
    import re

    flags = "|".join(re.escape(k) for k in (*_SIZE_KEYS, *_CLUSTER_KEYS, *_NODE_KEYS) if "-" in k)
    names = "|".join(re.escape(k) for k in (*_SIZE_KEYS, *_CLUSTER_KEYS, *_NODE_KEYS))
    key = re.compile(rf"""(^|[{{,])\s*(?:-\s+)*(["']?)({names})["']?\s*:(?:\s+|$)""")
    given = re.compile(rf"""(?<![\w-])(?:--)?({flags})=["']?([^\s"'\]]+)""")
    spaced = re.compile(
        rf"""(?<![\w-])--({flags})["']?(?:\s*,\s*|\s+)["']?([^\s"'\]-][^\s"'\]]*)"""
    )
    dangling = re.compile(rf"""(?<![\w-])--({flags})["']?\s*$""")
    named = re.compile(rf"""^\s*(?:-\s+)?name:\s*["']?({flags})["']?\s*$""")
    item = re.compile(r"^\s*-\s+(.*)$")
    paired = re.compile(r"^\s*value:\s*(.*)$")

    lines = [line for line in map(_without_comment, text.splitlines()) if line.strip()]
    for at, line in enumerate(lines):
        following = lines[at + 1] if at + 1 < len(lines) else ""
        for flag, value in given.findall(line) + spaced.findall(line):
            _keep(found, flag, [v for v in _texts(value) if not v.startswith("-")])
        for pattern, continuation in ((dangling, item), (named, paired)):
            flag_alone, rest = pattern.search(line), continuation.match(following)
            if flag_alone and rest and not rest[1].strip("\"'").startswith("-"):
                _keep(found, flag_alone[1], _texts(rest[1]))
        for match in key.finditer(line):
            value = line[match.end() :].strip()
            items = (
                _flow(value, bool(match[1])) if value else _block(lines[at + 1 :], match.start(2))
            )
            _keep(found, match[3], items)


def _flow(text: str, in_braces: bool) -> list[str]:
    """The value after a key on its line; between braces it ends with the next comma or brace."""
    if text[0] in "\"'":
        return _texts(text[1:].split(text[0], 1)[0])
    if text[0] == "[":
        return _texts(text[1:].split("]", 1)[0])
    if in_braces:
        text = text.split(",", 1)[0].split("}", 1)[0]
    return [] if text in ("null", "~") or text[:1] in ("|", ">", "{") else _texts(text)


def _block(lines: Sequence[str], column: int) -> list[str]:
    """The items of the block list that starts with the first of these lines, if one does."""
    values: list[str] = []
    for line in lines:
        item = line.lstrip()
        if not item.startswith("- ") or len(line) - len(item) < column:
            break
        values += _texts(item[2:])
    return values


def _without_comment(line: str) -> str:
    quote = ""
    for at, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char == "#" and (at == 0 or line[at - 1].isspace()):
            return line[:at]
    return line


def _texts(value: Any) -> list[str]:
    """The items of a string, a comma list or a list of these, unquoted, blanks dropped."""
    if value is None:
        return []
    if isinstance(value, (list, tuple)):
        return [text for inner in value for text in _texts(inner)]
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise PodCidrError(f"{value!r} is not a string or a list of strings")
    pieces = (piece.strip().strip("\"'").strip() for piece in str(value).split(","))
    return [piece for piece in pieces if piece]


def _one_of_each_family(cidrs: Sequence[Network]) -> tuple[Network, ...]:
    chosen: dict[int, Network] = {}
    for cidr in cidrs:
        other = chosen.setdefault(cidr.version, cidr)
        if other != cidr:
            raise PodCidrError(
                f"{other} and {cidr} are both IPv{cidr.version}; a node has one CIDR of a family"
            )
    return tuple(chosen.values())


class _Base(NamedTuple):
    """A CIDR of the whole cluster, and the sizes of a node's share that came with it."""

    source: str
    path: str
    cidrs: tuple[Network, ...]
    sizes: Mapping[int, int]

    @property
    def label(self) -> str:
        return self.path or _LABELS[self.source]


class _Ledger:
    """What was looked at so far, and the first answer."""

    def __init__(self) -> None:
        self.seen: list[Candidate] = []
        self.source = ""
        self.cidrs: tuple[Network, ...] = ()

    def answer(self, source: str, path: str, cidrs: tuple[Network, ...], how: str = "") -> None:
        if not self.source:
            self.source, self.cidrs = source, cidrs
            verdict = "chosen"
        elif set(cidrs) == set(self.cidrs):
            verdict = "agrees"
        else:
            verdict = "overruled"
        self.note(source, path, join(cidrs), verdict + how)

    def note(self, source: str, path: str, value: str, verdict: str) -> None:
        self.seen.append(Candidate(source, path, value, verdict))


def resolve(
    config: Mapping[str, Any],
    env: Mapping[str, str],
    root: str = "/",
    hostname: str = "",
    node_name: str = "",
) -> Resolution:
    """The pod CIDRs of this node. See the head of this file for the sources and their order.

    What somebody asked for in so many words (``nodeLocal``, ``NODE_POD_CIDR``, ``base``,
    ``perNode``) and cannot be had raises PodCidrError, if it would have been used. A file that
    makes no sense is passed over, with the reason in ``considered``.

    ``hostname`` is what is hashed, ``node_name`` what Kubernetes calls the node; by default the
    kernel's name, and ``NODE_NAME`` or the same.
    """
    hostname = hostname or os.uname().nodename
    node_name = node_name or env.get("NODE_NAME", "") or hostname.lower()
    pod = _section(config, "network", "podCIDR")
    ledger = _Ledger()
    _ask_operator(ledger, pod, env)
    bases = _ask_files(ledger, root, node_name)
    _ask_hash(ledger, pod, bases, _runs_k3s(root), hostname)
    ledger.answer("default", "", (parse_cidr(DEFAULT_CIDR),))
    return Resolution(ledger.cidrs, ledger.source, tuple(ledger.seen))


def _ask_operator(ledger: _Ledger, pod: Mapping[str, Any], env: Mapping[str, str]) -> None:
    for source, given in (("config", pod.get("nodeLocal")), ("env", env.get("NODE_POD_CIDR"))):
        try:
            cidrs = parse_pod_cidrs(given)
        except PodCidrError as wrong:
            if not ledger.source:
                raise PodCidrError(f"{_LABELS[source]}: {wrong}") from None
            ledger.note(source, "", str(given), f"overruled, and wrong: {wrong}")
            continue
        if cidrs:
            ledger.answer(source, "", cidrs)
        else:
            ledger.note(source, "", "", "not given")


def _ask_files(ledger: _Ledger, root: str, node_name: str) -> list[_Base]:
    """Answer with the first file that knows the node's own CIDR; hand back the cluster's."""
    bases: list[_Base] = []
    for path, of_node in _local_files(root, node_name):
        text, verdict = _read(_under(root, path))
        found = scan(text or "")
        if not found.node and not found.cluster:
            ledger.note("file", path, "", verdict or "holds no CIDR")
            continue
        try:
            own, cluster = _told_apart(found, of_node)
        except PodCidrError as wrong:
            shown = ",".join(found.node + found.cluster)
            ledger.note("file", path, shown, f"passed over: {wrong}")
            continue
        if own:
            ledger.answer("file", path, own)
        if cluster:
            bases.append(_Base("file", path, cluster, found.sizes))
    return bases


def _told_apart(found: Scan, of_node: bool) -> tuple[tuple[Network, ...], tuple[Network, ...]]:
    """The node's own CIDRs and the cluster's, as far as a file distinguishes them."""
    own = _one_of_each_family([parse_cidr(value) for value in found.node])
    cluster = [parse_cidr(value) for value in found.cluster]
    if any(not of_node or cidr.prefixlen <= _CLUSTER_SIZED[cidr.version] for cidr in own):
        own, cluster = (), cluster or list(own)
    for cidr in own:
        reason = unfit_for_pods(cidr)
        if reason:
            raise PodCidrError(f"{cidr} {reason}")
    return own, _one_of_each_family(cluster)


def _ask_hash(
    ledger: _Ledger, pod: Mapping[str, Any], bases: list[_Base], k3s: bool, hostname: str
) -> None:
    """Answer with this host's share of the cluster's CIDR, from the first base that can be used."""
    decided = bool(ledger.source)
    per_node: Mapping[int, int] = {}
    try:
        per_node = parse_sizes(pod.get("perNode"))
        given = _one_of_each_family([parse_cidr(text) for text in _texts(pod.get("base"))])
        if given:
            bases = [_Base("base", "", given, {}), *bases]
        elif k3s and not bases:
            bases = [_Base("k3s", "", (parse_cidr(K3S_CLUSTER_CIDR),), {})]
    except PodCidrError as wrong:
        if not decided:
            raise PodCidrError(f"network.podCIDR.base or perNode: {wrong}") from None
        ledger.note("base", "", str(pod.get("base") or ""), f"overruled, and wrong: {wrong}")
    for base in bases:
        if decided:
            ledger.note(base.source, base.path, join(base.cidrs), _remark(ledger.cidrs, base.cidrs))
            continue
        try:
            shares = _shares(base, per_node, hostname)
        except PodCidrError as wrong:
            if base.source == "base":
                raise PodCidrError(f"{base.label}: {wrong}") from None
            ledger.note(base.source, base.path, join(base.cidrs), f"passed over: {wrong}")
            continue
        ledger.note(base.source, base.path, join(base.cidrs), "the cluster's CIDR, taken as base")
        ledger.answer("hash", "", shares, f", as the share of {hostname!r} in {join(base.cidrs)}")
        decided = True


def _remark(chosen: Sequence[Network], cluster: Sequence[Network]) -> str:
    for cidr in chosen:
        same_family = [base for base in cluster if base.version == cidr.version]
        if same_family and not any(_within(cidr, base) for base in same_family):
            return f"the cluster's CIDR; {cidr} is not in it"
    return "the cluster's CIDR, not needed"


def _within(inner: Network, outer: Network) -> bool:
    return inner.prefixlen >= outer.prefixlen and outer.overlaps(inner)


def _shares(base: _Base, per_node: Mapping[int, int], hostname: str) -> tuple[Network, ...]:
    sizes = {**PER_NODE, **base.sizes, **per_node}
    shares = tuple(derive(cidr, sizes[cidr.version], hostname) for cidr in base.cidrs)
    for share in shares:
        reason = unfit_for_pods(share)
        if reason:
            raise PodCidrError(f"{share}, the share of {hostname!r}, {reason}")
    return shares


def _section(config: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    section: Mapping[str, Any] = config
    for at, key in enumerate(keys):
        inner = section.get(key)
        if inner is None:
            return {}
        if not isinstance(inner, Mapping):
            raise PodCidrError(f"{'.'.join(keys[: at + 1])} must be a mapping, not {inner!r}")
        section = inner
    return section


def _local_files(root: str, node_name: str) -> list[tuple[str, bool]]:
    """The files above in order, and k3s's own configuration with its drop-ins."""
    files: list[tuple[str, bool]] = []
    for path, of_node in _FILES:
        if "{node}" in path and "/" in node_name:
            continue
        files.append((path.format(node=node_name), of_node))
        if path == _K3S_CONFIG:
            # A later drop-in overrides an earlier one and the file itself: read them backwards.
            dropins = [(f"{path}.d/{name}", of_node) for name in _names(_under(root, path + ".d"))]
            files[-1:] = [*reversed(dropins), files[-1]]
    return files


def _names(directory: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if name.endswith((".yaml", ".yml")))
    except OSError:
        return []


def _read(path: str) -> tuple[str | None, str]:
    """The text of a file, or None and the verdict on it."""
    try:
        with open(path, "rb") as stream:
            return stream.read(_LARGEST_FILE).decode("utf-8", "replace"), ""
    except (FileNotFoundError, NotADirectoryError):
        return None, "not there"
    except OSError as wrong:
        return None, f"passed over: cannot be read ({wrong.strerror})"


def _runs_k3s(root: str) -> bool:
    return any(os.path.isdir(_under(root, sign)) for sign in _K3S_SIGNS)


def _under(root: str, path: str) -> str:
    return os.path.join(root, path.lstrip("/"))
