# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""The conflist: build it, check it, write it, and put back what was there before.

A container runtime takes the first file, by name, that ends in .conf, .conflist or .json. So all
other files are set aside while ours is active: ``X`` is renamed to ``X.headcni-backup`` in the same
directory. That keeps its mode, owner, times and label, cannot be half done, and is its own record:
no other note is needed to know what to put back.

Every change is a single rename or unlink, and each run computes what is to be done from the
directory. So the next run finishes a run that was interrupted anywhere. Ours is written before the
others are set aside, and they are back before ours is removed: there is always a network.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from ipaddress import ip_address, ip_network
from typing import Any, NamedTuple

from .filelock import lock

DIRECTORY = "/etc/cni/net.d"
NAME = "10-headcni.conflist"
# Only root reads it, and the CIS benchmark for Kubernetes (1.1.9) wants CNI files closed to others.
MODE = 0o600
# Networks of other engines, which find them by name; they do not compete with ours.
KEEP = ("*podman*", "nerdctl-*")

# What the plugin asks the runtime for. The last one passes the annotation headcni.dev/ip.
CAPABILITIES = (
    *("portMappings", "bandwidth", "ipRanges", "ips", "mac"),
    "io.kubernetes.cri.pod-annotations",
)

SUFFIX = ".headcni-backup"
EXTENSIONS = (".conf", ".conflist", ".json")
CNI_VERSIONS = ("0.3.1", "0.4.0", "1.0.0", "1.1.0")
_FLAGS = ("disableCheck", "disableGC", "loadOnlyInlinedPlugins")
_KEYS = ("cniVersion", "cniVersions", "name", "plugins", *_FLAGS)
_MARK = ("_managed_by", "headcni")
_LARGEST_FILE = 1 << 20


class ConflistError(ValueError):
    """The conflist has mistakes, or cannot be written."""


class Mistake(NamedTuple):
    """Something that is wrong: where, and what was expected there."""

    path: str
    value: Any
    expected: str

    def __str__(self) -> str:
        shown = "missing" if self.value is None else json.dumps(self.value, default=str)
        return f"{self.path}: {shown}, expected {self.expected}"


@dataclass(frozen=True)
class Options:
    """What our conflist is built from. ``pod_cidrs`` are the node's own, one for each family."""

    pod_cidrs: Sequence[str]
    name: str = "headcni"
    plugin: str = "headcni"  # or "bridge": the Go bridge plugin, with no HeadCNI at run time
    cni_version: str = "1.0.0"
    mode: str = "host"
    datapath: str = "bridge"
    bridge: str = "headcni0"
    mtu: int = 1280
    ip_masq: bool = True
    hairpin: bool = True
    anti_spoofing: bool = True
    anti_spoofing_exempt: Sequence[str] = ()  # patterns of namespace/name
    reserved_ports: Sequence[str] | None = None  # None: as the runtime has them
    host_ports_over_listeners: bool = False
    ip_annotation_namespaces: Sequence[str] = ()  # patterns
    network_policy: bool = False
    ipam: str = "headcni-ipam"  # or "host-local"
    strategy: str = ""
    service_cidrs: Sequence[str] = ()
    cluster_cidrs: Sequence[str] = ()
    headscale_url: str = ""
    tailscale_socket: str = ""
    magic_dns: Mapping[str, Any] = field(default_factory=dict)
    capabilities: Sequence[str] = CAPABILITIES
    chained: Sequence[Mapping[str, Any]] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)  # added to the first plugin as it is

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Of a module's parameters, where None is not given and a list may be a comma list."""
        unknown = set(given) - {option.name for option in fields(cls)}
        if unknown:
            raise ConflistError(f"no such option of a conflist: {', '.join(sorted(unknown))}")
        options = {key: value for key, value in given.items() if value is not None}
        lists = ("pod_cidrs", "service_cidrs", "cluster_cidrs", "capabilities")
        more = ("anti_spoofing_exempt", "reserved_ports", "ip_annotation_namespaces")
        for key in (*lists, *more):
            if isinstance(options.get(key), str):
                options[key] = [text.strip() for text in options[key].split(",") if text.strip()]
        return cls(**options)


def build(options: Options) -> dict[str, Any]:
    """The conflist for these options, as data; mistakes in it raise ConflistError."""
    if options.plugin not in ("headcni", "bridge"):
        raise ConflistError(f"plugin: {options.plugin!r}, expected headcni or bridge")
    families = {":" in cidr for cidr in options.pod_cidrs}
    if not families or len(families) != len(options.pod_cidrs):
        raise ConflistError(f"pod_cidrs: {options.pod_cidrs}, expected one, or one of a family")
    conf: dict[str, Any] = {"cniVersion": options.cni_version, "name": options.name}
    if options.plugin == "headcni":
        if options.cni_version == "1.0.0" and not options.chained:
            # An older libcni does not know this key, a newer one takes the best it speaks: with
            # 1.1.0 come GC and STATUS. Chained plugins of other makers may not be that far.
            conf["cniVersions"] = ["1.0.0", "1.1.0"]
        first = _headcni_plugin(options)
    else:
        first = _bridge_plugin(options)
    first.update(options.extra)
    conf["plugins"] = [first, *(dict(plugin) for plugin in options.chained)]
    _refuse(validate(conf))
    return conf


def _ipam(options: Options) -> dict[str, Any]:
    families = [":" in cidr for cidr in options.pod_cidrs]
    ipam: dict[str, Any] = {
        "type": options.ipam,
        "ranges": [[{"subnet": cidr}] for cidr in options.pod_cidrs],
        "routes": [{"dst": "::/0" if six else "0.0.0.0/0"} for six in families],
    }
    if options.strategy:
        ipam["strategy"] = options.strategy
    if options.ip_annotation_namespaces:
        ipam["annotationNamespaces"] = list(options.ip_annotation_namespaces)
    return ipam


def _headcni_plugin(options: Options) -> dict[str, Any]:
    # Every plugin of a chain gets the capabilities it asks for: two would map the same port.
    taken = {name for plugin in options.chained for name in plugin.get("capabilities", {})}
    plugin: dict[str, Any] = {
        "type": "headcni",
        "mode": options.mode,
        "datapath": options.datapath,
        "mtu": options.mtu,
        "ipMasq": options.ip_masq,
        "hairpin": options.hairpin,
        "pod_cidr": list(options.pod_cidrs),
        "enable_ipv6": any(":" in cidr for cidr in options.pod_cidrs),
        "ipam": _ipam(options),
        "capabilities": {name: True for name in options.capabilities if name not in taken},
    }
    if options.datapath == "bridge":
        plugin["bridge"] = options.bridge
    optional: dict[str, Any] = {
        "service_cidr": list(options.service_cidrs),
        "cluster_cidr": list(options.cluster_cidrs),
        "headscale_url": options.headscale_url,
        "tailscale_socket": options.tailscale_socket,
        "magic_dns": dict(options.magic_dns),
        "anti_spoofing_exempt": list(options.anti_spoofing_exempt),
    }
    if not options.anti_spoofing:  # older releases refuse keys that they do not know
        plugin["anti_spoofing"] = False
    if options.reserved_ports is not None:
        plugin["reserved_ports"] = list(options.reserved_ports)
    if options.network_policy:
        plugin["enable_network_policy"] = True
    if options.host_ports_over_listeners:
        plugin["host_ports_over_listeners"] = True
    plugin.update((key, value) for key, value in optional.items() if value)
    return plugin


def _bridge_plugin(options: Options) -> dict[str, Any]:
    return {
        "type": "bridge",
        "bridge": options.bridge,
        "isGateway": True,
        "ipMasq": options.ip_masq,
        "hairpinMode": options.hairpin,
        "mtu": options.mtu,
        "ipam": _ipam(options),
    }


def validate(conf: Any) -> list[Mistake]:
    """Everything that is wrong with a conflist, as far as it does not depend on a plugin."""
    if not isinstance(conf, Mapping):
        return [Mistake("", conf, "an object with cniVersion, name and plugins")]
    wrong: list[Mistake] = []
    name = conf.get("name")
    if not isinstance(name, str) or not _is_name(name):
        wrong.append(
            Mistake("name", name, "letters, digits, _ . -, starting with one of the first")
        )
    if conf.get("cniVersion") not in CNI_VERSIONS:
        wrong.append(Mistake("cniVersion", conf.get("cniVersion"), " or ".join(CNI_VERSIONS)))
    versions = conf.get("cniVersions", [])
    if not isinstance(versions, list) or any(v not in CNI_VERSIONS for v in versions):
        wrong.append(Mistake("cniVersions", versions, f"a list of {', '.join(CNI_VERSIONS)}"))
    wrong += [
        Mistake(key, conf[key], "true or false")
        for key in _FLAGS
        if not isinstance(conf.get(key, False), bool)
    ]
    wrong += [
        Mistake(key, conf[key], f"one of {', '.join(_KEYS)}")
        for key in conf
        if key not in _KEYS and "." not in key and key[:1] != "_"
    ]
    plugins = conf.get("plugins")
    if not isinstance(plugins, list) or not plugins:
        return [*wrong, Mistake("plugins", plugins, "a list of at least one plugin")]
    for at, plugin in enumerate(plugins):
        wrong += _validate_plugin(plugin, f"plugins[{at}]")
    return wrong


def _is_name(text: str) -> bool:
    return text.isascii() and text[:1].isalnum() and all(c.isalnum() or c in "_.-" for c in text)


def _validate_plugin(plugin: Any, path: str) -> list[Mistake]:
    if not isinstance(plugin, Mapping):
        return [Mistake(path, plugin, "an object with a type")]
    wrong: list[Mistake] = []
    kind = plugin.get("type")
    if not isinstance(kind, str) or not kind or "/" in kind:
        wrong.append(Mistake(f"{path}.type", kind, "the name of a plugin's executable"))
    capabilities = plugin.get("capabilities", {})
    if not isinstance(capabilities, Mapping) or not all(
        isinstance(v, bool) for v in capabilities.values()
    ):
        wrong.append(Mistake(f"{path}.capabilities", capabilities, "an object of true and false"))
    mtu = plugin.get("mtu", 1280)
    if isinstance(mtu, bool) or not isinstance(mtu, int) or not (mtu == 0 or 576 <= mtu <= 65535):
        wrong.append(Mistake(f"{path}.mtu", mtu, "a number from 576 to 65535"))
    bridge = plugin.get("bridge", "br0")
    if (
        not isinstance(bridge, str)
        or not 1 <= len(bridge.encode()) <= 15
        or set(bridge) & set("/: ")
    ):
        wrong.append(Mistake(f"{path}.bridge", bridge, "an interface name of 1 to 15 characters"))
    if "ipam" in plugin:
        wrong += _validate_ipam(plugin["ipam"], f"{path}.ipam")
    return wrong


def _validate_ipam(ipam: Any, path: str) -> list[Mistake]:
    if not isinstance(ipam, Mapping):
        return [Mistake(path, ipam, "an object with a type")]
    wrong: list[Mistake] = []
    if ipam and not isinstance(ipam.get("type"), str):
        wrong.append(Mistake(f"{path}.type", ipam.get("type"), "the name of an IPAM plugin"))
    if "subnet" in ipam:
        wrong += _validate_range(ipam, path)
    sets = ipam.get("ranges", [])
    if not isinstance(sets, list):
        return [*wrong, Mistake(f"{path}.ranges", sets, "a list of lists of ranges")]
    for i, range_set in enumerate(sets):
        if not isinstance(range_set, list) or not range_set:
            wrong.append(Mistake(f"{path}.ranges[{i}]", range_set, "a list of at least one range"))
            continue
        for j, given in enumerate(range_set):
            wrong += _validate_range(given, f"{path}.ranges[{i}][{j}]")
    routes = ipam.get("routes", [])
    if not isinstance(routes, list):
        return [*wrong, Mistake(f"{path}.routes", routes, "a list of routes")]
    for i, route in enumerate(routes):
        dst = route.get("dst") if isinstance(route, Mapping) else route
        if _network(dst) is None:
            wrong.append(Mistake(f"{path}.routes[{i}].dst", dst, "a CIDR such as 0.0.0.0/0"))
    return wrong


def _validate_range(given: Any, path: str) -> list[Mistake]:
    if not isinstance(given, Mapping):
        return [Mistake(path, given, "an object with a subnet")]
    subnet = _network(given.get("subnet"))
    if subnet is None:
        return [
            Mistake(f"{path}.subnet", given.get("subnet"), _the_right_cidr(given.get("subnet")))
        ]
    wrong: list[Mistake] = []
    for key in ("rangeStart", "rangeEnd", "gateway"):
        if key in given:
            try:
                inside = ip_address(given[key]) in subnet if isinstance(given[key], str) else False
            except ValueError:
                inside = False
            if not inside:
                wrong.append(Mistake(f"{path}.{key}", given[key], f"an address in {subnet}"))
    return wrong


def _network(value: Any) -> Any:
    try:
        return ip_network(value) if isinstance(value, str) and "/" in value else None
    except ValueError:
        return None


def _the_right_cidr(value: Any) -> str:
    try:
        return f"no host bits: {ip_network(value, strict=False)}" if "/" in value else "a CIDR"
    except (TypeError, ValueError):
        return "a CIDR such as 10.244.1.0/24"


def _refuse(mistakes: Sequence[Mistake]) -> None:
    if mistakes:
        count = "one mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        raise ConflistError(f"{count} in the conflist: " + "; ".join(str(m) for m in mistakes))


def render(conf: Mapping[str, Any]) -> str:
    """The text of the file. A mark in it tells readers, and us, who maintains it."""
    return json.dumps({_MARK[0]: _MARK[1], **conf}, indent=2, ensure_ascii=False) + "\n"


class Survey(NamedTuple):
    """The files of a CNI directory that a runtime or we would read."""

    directory: str
    files: Mapping[str, bytes]
    modes: Mapping[str, int]

    def picked(self) -> str:
        """The file that a container runtime takes; empty if there is none."""
        return next((name for name in sorted(self.files) if _is_picked_up(name)), "")


class Plan(NamedTuple):
    """What to do in a CNI directory so that ours is active, or is removed.

    ``after`` is None if ours is removed. ``left`` are files that stay although that may be
    surprising, each with the reason.
    """

    directory: str
    name: str
    before: str | None
    after: str | None
    mode: int
    writes: bool
    back_up: tuple[str, ...] = ()
    put_back: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return os.path.join(self.directory, self.name)

    @property
    def changed(self) -> bool:
        return bool(self.writes or self.back_up or self.put_back or self.remove)

    def diff(self) -> list[dict[str, str]]:
        """For Ansible's diff mode: the text of ours, then the names that change."""
        moves = [(name, name + SUFFIX) for name in self.back_up]
        moves += [(name + SUFFIX, name) for name in self.put_back]
        moves += [(name, "") for name in self.remove if name != self.name]
        shown: list[tuple[str, str, str]] = []
        if self.before != self.after:
            shown.append((self.path, self.before or "", self.after or ""))
        if moves:
            old, new = ("".join(f"{name}\n" for name in names if name) for names in zip(*moves))
            shown.append((self.directory, old, new))
        return [
            {"before_header": where, "after_header": where, "before": old, "after": new}
            for where, old, new in shown
        ]


def survey(directory: str = DIRECTORY) -> Survey:
    files: dict[str, bytes] = {}
    modes: dict[str, int] = {}
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        names = []
    for name in names:
        path = os.path.join(directory, name)
        if (_is_picked_up(name) or name.endswith(SUFFIX)) and not _is_directory(path):
            modes[name] = os.lstat(path).st_mode & 0o7777
            # A dangling link or a pipe is not a conflist, but stops a runtime all the same.
            files[name] = _read(path) if os.path.isfile(path) else b""
    return Survey(directory, files, modes)


def _read(path: str) -> bytes:
    with open(path, "rb") as stream:
        return stream.read(_LARGEST_FILE)


def plan(
    seen: Survey,
    conf: Mapping[str, Any],
    name: str = NAME,
    mode: int = MODE,
    keep: Sequence[str] = KEEP,
) -> Plan:
    """What to do so that ``conf`` is in charge, under ``name``. Touches nothing.

    ``keep`` are patterns of file names that stay where they are, or come back.
    """
    from fnmatch import fnmatchcase

    if not name.endswith(".conflist") or os.path.basename(name) != name or name[:1] == ".":
        raise ConflistError(f"{name!r} is not a file name that ends in .conflist")
    back_up, put_back, remove, left = [], [], [], []
    for other, content in seen.files.items():
        if other.endswith(SUFFIX):
            original = other[: -len(SUFFIX)]
            kept = any(fnmatchcase(original, pattern) for pattern in keep)
            if kept and original not in seen.files and original != name:
                put_back.append(original)
        elif other == name:
            if not _is_ours(content):
                back_up.append(other)
        elif _is_ours(content):
            remove.append(other)  # ours by a former name
        elif any(fnmatchcase(other, pattern) for pattern in keep):
            if other < name:
                left.append(f"{other} is kept, and comes before {name}")
        elif other < name or not _only_loopback(content):
            back_up.append(other)
    after = render(conf)
    before = seen.files.get(name)
    return Plan(
        seen.directory,
        name,
        None if before is None else before.decode("utf-8", "replace"),
        after,
        mode,
        before != after.encode() or seen.modes.get(name) != mode,
        tuple(back_up),
        tuple(put_back),
        tuple(remove),
        tuple(left),
    )


def plan_restore(seen: Survey, name: str = NAME) -> Plan:
    """What to do so that the directory is as if ours had never been there. Touches nothing."""
    ours = [n for n, content in seen.files.items() if _is_picked_up(n) and _is_ours(content)]
    put_back, left, spare = [], [], []
    for backup, content in seen.files.items():
        original = backup[: -len(SUFFIX)]
        if not backup.endswith(SUFFIX):
            continue
        if original not in seen.files or original in ours:
            put_back.append(original)
        elif seen.files[original] == content:
            spare.append(backup)  # left by a write that was interrupted
        else:
            left.append(f"{backup} stays: somebody has written {original} anew")
    if name in seen.files and name not in ours:
        left.append(f"{name} stays: it is not HeadCNI's")
    before = seen.files[name].decode("utf-8", "replace") if name in ours else None
    remove = (*spare, *(n for n in ours if n not in put_back))
    return Plan(
        seen.directory, name, before, None, MODE, False, (), tuple(put_back), remove, tuple(left)
    )


def write(
    conf: Mapping[str, Any],
    directory: str = DIRECTORY,
    name: str = NAME,
    mode: int = MODE,
    keep: Sequence[str] = KEEP,
) -> Plan:
    """Make ``conf`` active in ``directory``, and return what was done. A second call changes
    nothing."""
    _refuse(validate(conf))
    os.makedirs(directory, exist_ok=True)
    with _alone_in(directory) as handle:
        todo = plan(survey(directory), conf, name, mode, keep)
        _apply(todo, handle)
    return todo


def restore(directory: str = DIRECTORY, name: str = NAME) -> Plan:
    """Put back what was set aside, then remove ours. Returns what was done."""
    if not os.path.isdir(directory):
        return plan_restore(Survey(directory, {}, {}), name)
    with _alone_in(directory) as handle:
        todo = plan_restore(survey(directory), name)
        _apply(todo, handle)
    return todo


def _apply(todo: Plan, handle: int) -> None:
    def path(name: str) -> str:
        return os.path.join(todo.directory, name)

    # Names that no runtime reads, and always the same: they reuse what a killed run has left.
    fresh, spare = path(f".{todo.name}.headcni-new"), path(f".{todo.name}.headcni-old")
    for stale in (fresh, spare):
        _unlink(stale)
    if todo.writes and todo.after is not None:
        _write_and_sync(fresh, todo.after.encode(), todo.mode)
        if todo.name in todo.back_up:
            _back_up_in_place(todo.path, spare)
        os.replace(fresh, todo.path)
        os.fsync(handle)
    for name in todo.put_back:
        os.replace(path(name + SUFFIX), path(name))
    for name in todo.back_up:
        if name != todo.name:
            # An older backup of this name was replaced by its owner since then.
            os.replace(path(name), path(name + SUFFIX))
    for name in todo.remove:
        _unlink(path(name))
    if todo.changed:
        os.fsync(handle)


def _back_up_in_place(path: str, spare: str) -> None:
    """With a second hard link, so that a file of this name exists at every moment."""
    try:
        os.link(path, spare, follow_symlinks=False)
    except OSError:  # a file system without hard links: the rename leaves a short gap
        os.replace(path, path + SUFFIX)
        return
    os.replace(spare, path + SUFFIX)
    _unlink(spare)  # rename leaves it if both names were the same file already


def _write_and_sync(path: str, content: bytes, mode: int) -> None:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(target, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fchmod(target, mode)
        os.fsync(target)


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


@contextmanager
def _alone_in(directory: str) -> Iterator[int]:
    """A handle on the directory, while nobody else of ours works in it."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        lock(handle, directory)
        yield handle
    finally:
        os.close(handle)


def _is_picked_up(name: str) -> bool:
    return name.endswith(EXTENSIONS)


def _is_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _decode(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _is_ours(content: bytes) -> bool:
    conf = _decode(content)
    return isinstance(conf, dict) and conf.get(_MARK[0]) == _MARK[1]


def _only_loopback(content: bytes) -> bool:
    conf = _decode(content)
    if not isinstance(conf, dict):
        return False
    plugins = conf.get("plugins", [conf])
    return bool(plugins) and all(
        isinstance(plugin, dict) and plugin.get("type") == "loopback" for plugin in plugins
    )
