# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""What kind of machine the node is, as far as it matters for pods: containers without a TUN device,
libraries and programs, SELinux, cgroups, and clock synchronisation.

`kernel` checks the kernel itself, and `node_places` the directories that we write to.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from contextlib import suppress

from .node_release import PYTHON

LIBRARY = "libnftables.so.1"  # as the runtime loads it, in datapath/nft.py
PROGRAMS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# With the paths in headcni-tailscaled.service.
_LEAD_INTO_THE_NAMESPACE = ("/usr/bin/nsenter", "/usr/bin/setpriv")
_FOR_OPERATORS = {"ip": "iproute2 (iproute on RHEL and kin)", "nft": "nftables"}
_UNSYNCHRONISED = 0x40  # STA_UNSYNC of adjtimex


# Containers.


def container(root: str = "/") -> str:
    """The kind of container that this node is, in systemd's terms. Empty for a machine."""
    found = _read(os.path.join(root, "run/systemd/container"))
    if found:
        return found
    environment = _read(os.path.join(root, "proc/1/environ")).split("\0")
    return next((one[10:] for one in environment if one.startswith("container=")), "")


def tun_fix(kind: str) -> str:
    """How to give a node of this kind its /dev/net/tun."""
    if kind == "lxc":
        return (
            "add to the container's configuration on its host (Proxmox: /etc/pve/lxc/ID.conf) "
            "`lxc.cgroup2.devices.allow: c 10:200 rwm` and "
            "`lxc.mount.entry: /dev/net/tun dev/net/tun none bind,create=file`, and restart it "
            "(LXD and Incus: config device add NAME tun unix-char path=/dev/net/tun)"
        )
    if kind == "systemd-nspawn":
        return "start the container with --bind=/dev/net/tun and DeviceAllow=/dev/net/tun rw"
    if kind in ("docker", "podman"):
        return f"start the container with {kind} run --device /dev/net/tun --cap-add NET_ADMIN"
    return f"give the {kind} container /dev/net/tun" if kind else module_fix("tun", "")


def module_fix(module: str, kind: str) -> str:
    """How to give a node of this kind a kernel module."""
    if kind:
        return f"load the module {module} on the machine that runs this {kind} container"
    return f"load the module {module}: modprobe {module}, and put it into /etc/modules-load.d"


# Libraries and programs.


def lacks_library(python: str = PYTHON, library: str = LIBRARY) -> list[str]:
    """Why the runtime could not load libnftables, with the interpreter that it uses."""
    question = f"import ctypes; ctypes.CDLL({library!r}).nft_ctx_new"
    try:
        done = subprocess.run(
            [python, "-IS", "-c", question],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []  # the check of Python reports it
    if done.returncode == 0 or "No module named" in done.stderr:
        return []
    said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return [
        f"library: pods of the release could not be networked on this node: {library} cannot be "
        f"loaded ({said.partition(': ')[2][:200] or said[:200]}): install the package nftables"
    ]


def lacks_programs(mode: str, root: str = "/") -> list[str]:
    """The programs that our services run. The runtime and tailscaled talk to the kernel without
    `ip`, `nft` or `iptables`."""
    if mode != "daemon":
        return []
    missing = [
        path
        for path in _LEAD_INTO_THE_NAMESPACE
        if not os.access(os.path.join(root, path.lstrip("/")), os.X_OK)
    ]
    if not missing:
        return []
    return [f"programs: {', '.join(missing)} not there: install the package util-linux"]


def program_notes(path: str = PROGRAMS) -> list[str]:
    return [
        f"programs: {name} is not on this node: HeadCNI does not need it, but you will to look for "
        f"faults: install {package}"
        for name, package in _FOR_OPERATORS.items()
        if not shutil.which(name, path=path)
    ]


# What else decides.


def selinux_notes(root: str = "/") -> list[str]:
    if _read(os.path.join(root, "sys/fs/selinux/enforce")) != "1":
        return []
    return [
        "SELinux: it is enforcing, and HeadCNI sets no labels: if a service or a pod does not "
        "start, `ausearch -m avc -ts recent` shows what was denied; `restorecon -R /opt/headcni "
        "/opt/cni /etc/cni /etc/headcni /var/lib/headcni` sets the policy's own labels "
        "(docs/platforms.md)"
    ]


def cgroup_notes(root: str = "/") -> list[str]:
    folder = os.path.join(root, "sys/fs/cgroup")
    if not os.path.isdir(folder) or os.path.exists(os.path.join(folder, "cgroup.controllers")):
        return []
    return [
        "cgroups: this node has version 1: kubelet 1.35 and newer does not start with it unless "
        "failCgroupV1 is false: boot with systemd.unified_cgroup_hierarchy=1"
    ]


def clock_notes(status: int | None) -> list[str]:
    """Notes about the result of `clock_status`."""
    if status is None or not status & _UNSYNCHRONISED:
        return []
    return [
        "clock: no time service keeps it, so keys and certificates may be refused one day: run "
        "chrony or systemd-timesyncd"
    ]


class _Timex(ctypes.Structure):
    _fields_ = (
        ("modes", ctypes.c_uint),
        *((name, ctypes.c_long) for name in ("offset", "freq", "maxerror", "esterror")),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def clock_status() -> int | None:
    """The kernel's status flags of its clock. None if it does not return them. Changes nothing."""
    with suppress(OSError, AttributeError):
        asked = _Timex()
        if ctypes.CDLL(None).adjtimex(ctypes.byref(asked)) >= 0:
            return int(asked.status)
    return None


def _read(path: str) -> str:
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as stream:
        return stream.read(64 << 10).strip()
    return ""
