# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which container runtimes run on this node, and where each of them looks for CNI plugins and
networks.

A running process decides which configuration is used: the files of a runtime that does not run do
not matter. What cannot be read is reported, never guessed.
"""

from __future__ import annotations

import glob
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Tuple

from .toml_reader import TomlError, parse

# The default of all runtimes.
BIN_DIRS: tuple[str, ...] = ("/opt/cni/bin",)
CONF_DIR = "/etc/cni/net.d"
MIGRATION = "docs/k3s.md#from-flannel"
_MOST_FILES = 64  # of one runtime's configuration
_MOST_BYTES = 512 << 10
_RANCHER = "/agent/etc/containerd/config.toml"  # below the data directory of k3s and RKE2
# The section with the runtime's own settings, by the version of the configuration.
_CRI_SECTION = {
    1: "cri",
    2: "io.containerd.grpc.v1.cri",
    3: "io.containerd.cri.v1.runtime",
}


File = Tuple[str, Mapping[str, Any]]  # its path and content


class Runtime(NamedTuple):
    """A container runtime that runs on this node."""

    name: str  # containerd, k3s, RKE2, CRI-O
    source: str  # the configuration file; empty if there is none
    bin_dirs: tuple[str, ...] = BIN_DIRS
    conf_dir: str = CONF_DIR
    socket: str = ""
    network: str = ""  # the name of the only network that it uses; empty if it uses the first one
    serves_pods: bool = True  # whether kubelet and crictl can use it
    certain: bool = True  # whether its files are unambiguous
    notes: tuple[str, ...] = ()
    program: str = ""  # its program; related programs may be in the same directory
    sandbox_image: str = ""  # the pause image; empty if its files do not name it

    @property
    def runs_flannel(self) -> bool:
        """k3s has directories of its own only while it runs its built-in flannel."""
        return self.name in ("k3s", "RKE2") and self.conf_dir.endswith("/agent/etc/cni/net.d")


class Process(NamedTuple):
    pid: int
    name: str
    arguments: tuple[str, ...]
    started: float  # seconds since 1970; 0 if that is not known
    parent: str  # its name
    program: str = ""  # the file that runs

    def option(self, *names: str) -> str:
        """The value of a command-line option; empty if it is not given."""
        for at, word in enumerate(self.arguments):
            name, equals, value = word.partition("=")
            if name in names:
                return value if equals else "".join(self.arguments[at + 1 : at + 2])
        return ""


def running(root: str = "/") -> list[Runtime]:
    """Every container runtime of this node, except those inside containers."""
    found = []
    for process in processes(("containerd", "crio"), root):
        if process.name == "crio":
            found.append(_crio(process, root))
        elif "/docker/containerd/" not in process.option("-c", "--config"):  # Docker's private one
            found.append(_containerd(process, root))
    return found


def of_kubelet(runtimes: Sequence[Runtime], root: str = "/") -> list[Runtime]:
    """The runtimes that start pods, as far as that is known: k3s' own, or the one that kubelet
    is configured to use. All of them, if there is no kubelet yet."""
    for runtime in runtimes:
        if runtime.name in ("k3s", "RKE2"):
            return [runtime]
    for kubelet in processes(("kubelet",), root):
        endpoint = kubelet.option("--container-runtime-endpoint") or _configured_endpoint(
            kubelet.option("--config") or "/var/lib/kubelet/config.yaml", root
        )
        chosen = [one for one in runtimes if endpoint and _socket(endpoint) == one.socket]
        if chosen:
            return chosen
    return [one for one in runtimes if one.serves_pods]


def compare(
    runtimes: Sequence[Runtime],
    deciding: Sequence[Runtime],
    bin_dirs: Sequence[str],
    conf_dir: str,
    network: str,
) -> tuple[list[str], list[str]]:
    """Problems and notes: what prevents the runtimes from using our plugins and our conflist."""
    problems: list[str] = []
    notes: list[str] = []
    agreeing = [one for one in deciding if not _differences(one, bin_dirs, conf_dir, network)]
    for one in runtimes:
        notes += one.notes
        said = _differences(one, bin_dirs, conf_dir, network)
        stops = one in deciding and one.certain and one.serves_pods
        if stops and (not agreeing or one.runs_flannel):
            problems += said
        elif one.serves_pods:
            notes += said
    return problems, notes


def _differences(one: Runtime, bin_dirs: Sequence[str], conf_dir: str, network: str) -> list[str]:
    if one.runs_flannel:
        return [
            f"container runtime: {one.name} runs its own flannel, so its pods would not use "
            "HeadCNI: start every server with --flannel-backend=none --disable-network-policy, "
            f"and move the nodes as {MIGRATION} says"
        ]
    where = f" ({one.source or 'by its own default'})"
    wrong = []
    if not {*map(_same, one.bin_dirs)} & {*map(_same, bin_dirs)}:
        line = ", ".join((*bin_dirs, one.bin_dirs[0].rstrip("/")))
        wrong.append(
            f"container runtime: {one.name} looks for plugins in {', '.join(one.bin_dirs)}{where} "
            f"and HeadCNI's are put into {', '.join(bin_dirs)}, so no pod could start: set "
            f"headcni_node_cni_bin_dirs: [{line}]"
        )
    if _same(one.conf_dir) != _same(conf_dir):
        wrong.append(
            f"container runtime: {one.name} looks for networks in {one.conf_dir}{where} and "
            f"HeadCNI's conflist is put into {conf_dir}, so no pod would use it: set "
            f"headcni_node_cni_conf_dir: {one.conf_dir}"
        )
    if one.network and one.network != network:
        wrong.append(
            f"container runtime: {one.name} uses only the network called {one.network}{where} and "
            f"HeadCNI's is called {network}: empty cni_default_network and restart crio, or set "
            f"headcni_node_conflist_name: {one.network}"
        )
    return wrong


def _same(path: str) -> str:
    """Two names of one directory, by links, are one."""
    return os.path.realpath(path)


# Processes.


def processes(names: Sequence[str], root: str = "/") -> list[Process]:
    """The processes of this node with these names, except those inside containers."""
    proc = _at(root, "/proc")
    here = _link(os.path.join(proc, "self/ns/pid"))
    return [
        one
        for one in _named(names, proc)
        if _link(os.path.join(proc, str(one.pid), "ns/pid")) == here
    ]


def in_containers_too(names: Sequence[str], root: str = "/") -> set[str]:
    """Which of these names processes have, wherever they run: network agents run in pods."""
    return {one.name for one in _named(names, _at(root, "/proc"))}


def _named(names: Sequence[str], proc: str) -> Iterator[Process]:
    try:
        pids = sorted(map(int, filter(str.isdigit, os.listdir(proc))))
    except OSError:
        return
    for pid in pids:
        folder = os.path.join(proc, str(pid))
        name = _read(os.path.join(folder, "comm"), 64).strip()
        if name in names:
            line = _read(os.path.join(folder, "cmdline"), 16 << 10)
            parent, started = _parent_and_start(folder, proc)
            program = _link(os.path.join(folder, "exe"))
            yield Process(pid, name, tuple(line.split("\0")[1:]), started, parent, program)


def _parent_and_start(folder: str, proc: str) -> tuple[str, float]:
    fields = _read(os.path.join(folder, "stat"), 4096).rpartition(")")[2].split()
    booted = re.search(r"(?m)^btime (\d+)$", _read(os.path.join(proc, "stat"), 1 << 20))
    if len(fields) < 20 or not booted:
        return "", 0.0
    parent = _read(os.path.join(proc, fields[1], "comm"), 64).strip()
    return parent, int(booted[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")


# containerd, k3s' and RKE2's included.


def _containerd(process: Process, root: str) -> Runtime:
    path, name = _containerd_config(process)
    files, unread = _containerd_files(path, root)
    found, read = _looks(files), files
    certain = not unread
    for at, (_unused, content) in enumerate(files):
        cri = _cri(content, _version(files))
        if cri and "cni" not in cri and _looks(files[:at])[2] and _version(files) < 3:
            # containerd 1 replaces the whole section by the imported one, containerd 2 merges them.
            certain = False
    merged = _merged(process, path, root) if name == "containerd" else None
    if merged is not None:
        # It also knows its own defaults: containerd of Debian 13 uses /usr/lib/cni by default.
        files, unread, certain = [(path, merged)], [], True
        bin_dirs, conf_dir, _unused = _looks(files)
        found = bin_dirs, conf_dir, found[2] if found[:2] == (bin_dirs, conf_dir) else ""
    notes = [*unread, *_changed_since(process, name, read, root)]
    disabled = {
        one for _unused, content in files for one in _texts(content.get("disabled_plugins"))
    }
    off = bool(disabled & {*_CRI_SECTION.values()})
    if off:
        notes.append(
            f"container runtime: {name} has its CRI plugin turned off (disabled_plugins in {path}, "
            "as Docker's package has it), so kubelet cannot start pods by it: take cri out of that "
            "list and restart containerd, unless it only serves Docker"
        )
    addresses = [_texts(_table(content, "grpc").get("address"))[:1] for _unused, content in files]
    socket = process.option("-a", "--address") or "".join(next(filter(None, addresses[::-1]), ()))
    bin_dirs, conf_dir, source = found
    return Runtime(
        *(name, source, bin_dirs, conf_dir, _socket(socket or "/run/containerd/containerd.sock")),
        serves_pods=not off,
        certain=certain,
        notes=tuple(notes),
        program=process.program,
        sandbox_image=_sandbox_image(files),
    )


def _sandbox_image(files: Sequence[File]) -> str:
    image = ""
    for _unused, content in files:
        pinned = _table(content, "plugins", "io.containerd.cri.v1.images", "pinned_images")
        found = _texts(pinned.get("sandbox"))
        found = found or _texts(_cri(content, _version(files)).get("sandbox_image"))
        image = found[0] if found else image
    return image


def _looks(files: Sequence[File]) -> tuple[tuple[str, ...], str, str]:
    """The plugin directories and the networks' one by these files, and which of them says so."""
    bin_dirs, conf_dir, source = BIN_DIRS, CONF_DIR, ""
    for file, content in files:
        cni = _table(_cri(content, _version(files)), "cni")
        dirs = _texts(cni.get("bin_dirs")) or _texts(cni.get("bin_dir"))
        conf = _texts(cni.get("conf_dir"))
        bin_dirs, conf_dir = dirs or bin_dirs, conf[0] if conf else conf_dir
        source = file if dirs or conf else source
    return bin_dirs, conf_dir, source


def _cri(content: Mapping[str, Any], version: int) -> Mapping[str, Any]:
    """The runtime's own settings; an imported file has its version or else the first file's."""
    return _table(content, "plugins", _CRI_SECTION[_version([("", content)], version)])


def _version(files: Sequence[File], default: int = 1) -> int:
    found = files[0][1].get("version", default) if files else default
    return found if found in _CRI_SECTION else max(_CRI_SECTION)


def _merged(process: Process, path: str, root: str) -> Mapping[str, Any] | None:
    """The whole configuration as the very program that runs puts it together; None if it does not
    say. Nothing is started or changed by asking."""
    program = os.path.join(_at(root, "/proc"), str(process.pid), "exe")
    command = ["containerd", "--config", _at(root, path), "config", "dump"]
    try:
        done = subprocess.run(
            command,
            executable=program,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        return parse(done.stdout) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, TomlError):
        return None


def _containerd_config(process: Process) -> tuple[str, str]:
    """Its path, and whose containerd it is. That of k3s may hide its arguments."""
    given = process.option("-c", "--config")
    if given.endswith(_RANCHER):
        return given, "RKE2" if "rke2" in given else "k3s"
    for owner, name in (("k3s", "k3s"), ("rke2", "RKE2")):
        if not given and process.parent.startswith(owner):
            return f"/var/lib/rancher/{owner}{_RANCHER}", name
    return given or "/etc/containerd/config.toml", "containerd"


def _containerd_files(path: str, root: str) -> tuple[list[File], list[str]]:
    """The configuration and what it imports, in the order in which later ones win."""
    found: list[File] = []
    notes: list[str] = []
    waiting, seen = [path], set()
    while waiting:
        one = waiting.pop(0)
        if one in seen or not os.path.exists(_at(root, one)):
            continue
        seen.add(one)
        if len(seen) > _MOST_FILES:
            notes.append(f"container runtime: {path} imports more than {_MOST_FILES} files")
            break
        content, problem = _toml(one, root)
        notes += [problem] if problem else []
        if content is None:
            continue
        found.append((one, content))
        for pattern in _texts(content.get("imports")):
            waiting += _matching(os.path.join(os.path.dirname(one), pattern), root)
    return found, notes


# CRI-O.


def _crio(process: Process, root: str) -> Runtime:
    folder = process.option("-d", "--config-dir") or "/etc/crio/crio.conf.d"
    paths = [process.option("-c", "--config") or "/etc/crio/crio.conf", *_listed(folder, root)]
    files, unread = [], []
    for path in paths[:_MOST_FILES]:
        if os.path.exists(_at(root, path)):
            content, problem = _toml(path, root)
            unread += [problem] if problem else []
            files += [(path, content)] if content is not None else []
    notes = [*unread, *_changed_since(process, "CRI-O", files, root)]
    bin_dirs, conf_dir, source, network = BIN_DIRS, CONF_DIR, "", ""
    socket, image = "/run/crio/crio.sock", ""
    for path, content in files:
        image = "".join(_texts(_table(content, "crio", "image").get("pause_image"))[:1]) or image
        section = _table(content, "crio", "network")
        dirs = _texts(section.get("plugin_dirs")) or _texts(section.get("plugin_dir"))
        bin_dirs, source = (dirs, path) if dirs else (bin_dirs, source)
        conf = _texts(section.get("network_dir"))
        conf_dir, source = (conf[0], path) if conf else (conf_dir, source)
        if "cni_default_network" in section:
            network = "".join(_texts(section["cni_default_network"])[:1])
        socket = "".join(_texts(_table(content, "crio", "api").get("listen"))[:1]) or socket
    bin_dirs = tuple(filter(None, [process.option("--cni-plugin-dir")])) or bin_dirs
    conf_dir = process.option("--cni-config-dir") or conf_dir
    network = process.option("--cni-default-network") or network
    return Runtime(
        *("CRI-O", source, bin_dirs, conf_dir, _socket(socket), network),
        certain=not unread,
        notes=tuple(notes),
        program=process.program,
        sandbox_image=image,
    )


# Files.


def _toml(path: str, root: str) -> tuple[Mapping[str, Any] | None, str]:
    unknown = "so it is not known where the runtime looks: compare headcni_node_cni_bin_dirs and "
    unknown += "headcni_node_cni_conf_dir with it yourself"
    try:
        size = os.stat(_at(root, path)).st_size
        if size > _MOST_BYTES:
            return None, f"container runtime: {path} has {size} bytes, {unknown}"
        return parse(_read(_at(root, path), _MOST_BYTES)), ""
    except (OSError, TomlError) as problem:
        return None, f"container runtime: {path} cannot be read ({problem}), {unknown}"


def _changed_since(process: Process, name: str, files: Sequence[File], root: str) -> list[str]:
    changed = []
    for path, _unused in files:
        with suppress(OSError):
            if process.started and os.stat(_at(root, path)).st_mtime > process.started + 1:
                changed.append(path)
    if not changed:
        return []
    return [
        f"container runtime: {', '.join(changed[:3])} was changed after {name} was started, which "
        "has not read it: restart it"
    ]


def _configured_endpoint(path: str, root: str) -> str:
    text = _read(_at(root, path), _MOST_BYTES)
    found = re.search(r"""(?m)^containerRuntimeEndpoint:\s*["']?([^"'\s]+)""", text)
    return found[1] if found else ""


def _socket(endpoint: str) -> str:
    path = endpoint[len("unix://") :] if endpoint.startswith("unix://") else endpoint
    return path[len("/var") :] if path.startswith("/var/run/") else path


def _matching(pattern: str, root: str) -> list[str]:
    base = _at(root, "/")
    found = sorted(glob.iglob(_at(root, pattern)))[: _MOST_FILES + 1]
    return [os.path.join("/", os.path.relpath(one, base)) for one in found]


def _listed(folder: str, root: str) -> list[str]:
    try:
        names = sorted(os.listdir(_at(root, folder)))
    except OSError:
        return []
    return [os.path.join(folder, name) for name in names[:_MOST_FILES]]


def _table(content: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    for key in path:
        inner = content.get(key)
        content = inner if isinstance(inner, Mapping) else {}
    return content


def _texts(value: Any) -> tuple[str, ...]:
    listed = value if isinstance(value, list) else [value]
    return tuple(one for one in listed if isinstance(one, str) and one)


def _at(root: str, path: str) -> str:
    return os.path.join(root, path.lstrip("/"))


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _read(path: str, most: int) -> str:
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as stream:
        return stream.read(most)
    return ""
