"""Everything that must hold before the lab changes anything. Each problem is one line."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path

from . import image, mirror, network, tools, vms
from .layout import MOST_NODES, MOST_VMS, Lab, LabError, Plan, cache_dir, vm_names

DISTRIBUTIONS = {"debian": (12, 13)}
COLD_GIB, WARM_GIB = 10, 2


def problems(lab: Lab, nodes: int, underlay: str, cluster: str = "", virtual: int = 0) -> list[str]:
    checks = (
        _root(),
        _python(),
        _distribution(),
        _machine(),
        _tun(),
        _overlay(),
        _disk(lab, cluster, virtual),
        _nodes(nodes, cluster),
        _vms(lab, virtual, cluster),
        _underlay(lab, underlay),
        _compiler(cluster),
        _inotify(lab, nodes, cluster),
    )
    return [problem for problem in checks if problem]


def _root() -> str | None:
    if os.geteuid() == 0:
        return None
    return "the lab makes network namespaces and mounts, so it needs root: run `sudo make …`"


def _python() -> str | None:
    if sys.version_info >= (3, 11):
        return None
    return (
        f"Python {platform.python_version()} is too old for the controller: 3.11 or newer is needed"
    )


def _distribution() -> str | None:
    known = {}
    for line in Path("/etc/os-release").read_text().splitlines():
        key, _, value = line.partition("=")
        known[key] = value.strip('"')
    name, version = known.get("ID", "?"), known.get("VERSION_ID", "?")
    if version.split(".")[0] in map(str, DISTRIBUTIONS.get(name, ())):
        return None
    return (
        f"the lab runs on Debian 12 and 13, this is {name} {version}: use such a machine "
        "(the collection itself provisions other systems: see README, “Real nodes”)"
    )


def _machine() -> str | None:
    if platform.machine() in mirror.ARCHITECTURES:
        return None
    return f"the lab builds for {', '.join(mirror.ARCHITECTURES)}, this is {platform.machine()}"


def _tun() -> str | None:
    device = "/dev/net/tun"
    try:
        os.close(os.open(device, os.O_RDWR))
    except OSError as problem:
        return (
            f"{device} cannot be opened ({problem.strerror}), and tailscaled needs it: "
            "`modprobe tun`, or give this machine the device"
        )
    return None


def _overlay() -> str | None:
    if "overlay" in Path("/proc/filesystems").read_text().split() or shutil.which("modprobe"):
        return None
    return "the kernel has no overlayfs, which the nodes' disks need: use a stock Debian kernel"


def _compiler(cluster: str) -> str | None:
    if cluster != "k3s" or tools.K3S.built or shutil.which("cc"):
        return None
    return "k3s has C in it (SQLite): install a compiler first, `apt install gcc libc6-dev`"


def _inotify(lab: Lab, nodes: int, cluster: str) -> str | None:
    """kubelet and containerd fail without a word of it where the machine has no more to give."""
    if not cluster or lab.plan_file.exists():
        return None
    allowed = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
    used, needed = _inotify_instances(), 16 + 20 * nodes
    if allowed - used >= needed:
        return None
    return (
        f"the kernel allows root {allowed} inotify instances and {used} are in use, but {cluster} "
        f"on {nodes} nodes needs {needed}: take other labs down, or "
        f"`sysctl fs.inotify.max_user_instances={max(512, used + 2 * needed)}`"
    )


def _inotify_instances() -> int:
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == 0:
                count += sum(
                    os.readlink(one) == "anon_inode:inotify" for one in (process / "fd").iterdir()
                )
        except OSError:
            continue  # it ended meanwhile
    return count


def _disk(lab: Lab, cluster: str, virtual: int) -> str | None:
    wanted = (*tools.ALL, *tools.CLUSTERS.get(cluster, ()))
    cold = bool(tools.missing(wanted)) or not image.base_root().exists()
    needed = (COLD_GIB if cold else WARM_GIB) + 2 * virtual
    for folder in {_existing(cache_dir()), _existing(lab.dir)}:
        free = shutil.disk_usage(folder).free / 2**30
        if free < needed:
            return (
                f"{folder} has {free:.1f} GiB free and the lab needs {needed}: free some, or "
                "put HEADCNI_CACHE and HEADCNI_LAB_DIR on a larger disk"
            )
    return None


def _existing(path: Path) -> Path:
    return next(p for p in (path, *path.parents) if p.exists())


def _nodes(nodes: int, cluster: str) -> str | None:
    if not 1 <= nodes <= MOST_NODES:
        return f"NODES={nodes}: choose a number from 1 to {MOST_NODES}"
    available, needed = _memory(), 0.6 + 0.15 * nodes
    if cluster:
        needed += 0.5 * nodes + 0.4
    if available >= needed:
        return None
    return f"{available:.1f} GiB of memory are free, {nodes} nodes need {needed:.1f}: lower NODES"


def _memory() -> float:
    """GiB to be had."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(n.split()[1]) for n in lines if n.startswith("MemAvailable")) / 2**20


def _vms(lab: Lab, count: int, cluster: str) -> str | None:
    if not count:
        return None
    if not 0 < count <= MOST_VMS:
        return f"VMS={count}: choose a number from 0 to {MOST_VMS}"
    if platform.machine() not in image.KERNEL_PACKAGES:
        known = ", ".join(image.KERNEL_PACKAGES)
        return f"VMS={count}: virtual machines are made for {known}, this is {platform.machine()}"
    if cluster:
        option = f"{cluster.upper()}=1"
        return f"VMS={count} and {option} do not go together: the cluster is on nodes only"
    started = sum(lab.node_dir(name).exists() for name in vm_names(count))
    available, needed = _memory(), 0.6 + vms.NEEDED_GIB * (count - started)
    if available >= needed:
        return None
    return f"{available:.1f} GiB of memory are free, {count} VMs need {needed:.1f}: lower VMS"


def _underlay(lab: Lab, wanted: str) -> str | None:
    if lab.plan_file.exists():
        running = str(Plan.load(lab).underlay)
        if wanted and wanted != running:
            return f"the lab is up on {running}: `make down` before you choose UNDERLAY={wanted}"
        return None
    if not shutil.which("ip"):
        return None  # a bare machine; the check runs again once iproute2 is installed
    try:
        network.choose_underlay(wanted)
    except LabError as problem:
        return str(problem)
    return None
