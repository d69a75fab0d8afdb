"""The root file systems that machines share, made once by mmdebstrap and kept in the cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .cgroups import Cgroup
from .layout import CONTROL, Lab, LabError, cache_dir, is_vm
from .locks import locked
from .progress import Step, step

PACKAGES = (
    # a machine
    "systemd",
    "systemd-sysv",
    "dbus",
    "openssh-server",
    "python3",
    "ca-certificates",
    "kmod",
    "procps",
    # its network
    "iproute2",
    "iputils-ping",
    "nftables",
    "iptables",
    "conntrack",
    # what runs pods on it
    "containerd",
    "runc",
    "busybox-static",
    # what looks at traffic in tests
    "curl",
    "netcat-openbsd",
    "iperf3",
    "tcpdump",
)
KERNEL_PACKAGES = {"x86_64": ("linux-image-cloud-amd64", "e2fsprogs", "udev")}
LIMIT = 15 * 60

# Run in the new root. Machines differ only in what their own layer says.
LOGINS = """\
rm -f /etc/ssh/ssh_host_* /etc/machine-id /etc/hostname /etc/resolv.conf
passwd -d root >/dev/null
mkdir -p /root/.ssh /var/log/journal && chmod 700 /root/.ssh
printf 'PermitRootLogin prohibit-password\nPasswordAuthentication no\nUseDNS no\n' \
    > /etc/ssh/sshd_config.d/lab.conf"""
JOURNAL = """\
printf '[Journal]\nStorage=persistent\nSystemMaxUse=64M\n' > /etc/systemd/journald.conf"""
FINISH = f"""
systemctl mask systemd-logind.service getty.target console-getty.service \
    e2scrub_reap.service e2scrub_all.timer apt-daily.timer apt-daily-upgrade.timer \
    fstrim.timer systemd-networkd.service systemd-resolved.service
systemctl disable containerd.service nftables.service
{LOGINS}
# nspawn mounts cgroup v1 controllers read-only; containerd has to make cgroups for its pods.
cat > /etc/systemd/system/lab-cgroups.service <<EOF
[Unit]
DefaultDependencies=no
Before=sysinit.target
[Service]
Type=oneshot
ExecStart=/bin/sh -c "for d in /sys/fs/cgroup/*/; do mount -o remount,bind,rw \\$d || true; done"
[Install]
WantedBy=sysinit.target
EOF
systemctl enable -q lab-cgroups.service
{JOURNAL}
"""

# Run before the kernel is installed: its initramfs needs to find the disk and no more.
VM_INITRAMFS = """
mkdir -p /etc/initramfs-tools/conf.d /usr/share/initramfs-tools/modules.d
echo MODULES=list > /etc/initramfs-tools/conf.d/lab
printf 'virtio_pci\nvirtio_blk\next4\n' > /usr/share/initramfs-tools/modules.d/lab
"""
# A virtual machine has a kernel, a network and a power button of its own: it keeps what it needs
# for them.
VM_FINISH = f"""
systemctl mask getty.target e2scrub_reap.service e2scrub_all.timer apt-daily.timer \
    apt-daily-upgrade.timer fstrim.timer
systemctl disable containerd.service nftables.service
systemctl enable -q systemd-networkd.service
{LOGINS}
echo '/dev/vda / ext4 errors=remount-ro 0 1' > /etc/fstab
{JOURNAL}
"""


@dataclass(frozen=True)
class Image:
    """One root file system, by its recipe: what changes that makes another."""

    what: str
    suite: str
    packages: tuple[str, ...]
    finish: str
    begin: str = ""

    @property
    def root(self) -> Path:
        parts = (self.suite, platform.machine(), *self.packages, self.begin + self.finish)
        key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
        return cache_dir() / "images" / f"{self.suite}-{key}"


NODE_SUITES = ("bullseye", "bookworm", "trixie")  # Debian 11, 12 and 13
NODES = Image("the nodes' base image", "bookworm", PACKAGES, FINISH)
VMS = tuple(
    Image(
        "the virtual machines' base image",
        suite,
        (*PACKAGES, *KERNEL_PACKAGES.get(platform.machine(), ())),
        VM_FINISH,
        VM_INITRAMFS,
    )
    for suite in ("bookworm", "trixie")
)


def of(machine: str, suites: Sequence[str] = ()) -> Image:
    """Virtual machines take turns: vm1 is Debian 12, vm2 is Debian 13, vm3 is Debian 12, …
    So do nodes, if the lab has `suites`. The control machine is always Debian 12."""
    if is_vm(machine):
        return VMS[(int(machine.removeprefix("vm")) - 1) % len(VMS)]
    if machine == CONTROL or not suites:
        return NODES
    return of_suite(suites[(int(machine.removeprefix("node")) - 1) % len(suites)])


def of_suite(suite: str) -> Image:
    return replace(NODES, suite=suite)


def base_root() -> Path:
    return NODES.root


def build(lab: Lab, *images: Image) -> None:
    for image in images or (NODES,):
        if image.root.exists():
            continue
        with locked("image", "another build of a base image", LIMIT):
            if image.root.exists():
                continue
            _sweep()
            with step(f"making {image.what} (Debian {image.suite})") as progress:
                unfinished = image.root.with_name(f".unfinished-{image.root.name}")
                unfinished.parent.mkdir(parents=True, exist_ok=True)
                _mmdebstrap(lab, image, unfinished, progress)
                unfinished.rename(image.root)


def _hook(when: str, script: str) -> str:
    return f"--{when}-hook=chroot \"$1\" sh -ec '{script.replace(chr(39), chr(34))}'"


def _mmdebstrap(lab: Lab, image: Image, target: Path, progress: Step) -> None:
    command = [
        "mmdebstrap",
        "--mode=root",
        "--variant=minbase",
        f"--include={','.join(image.packages)}",
        *([_hook("essential", image.begin)] if image.begin else []),
        _hook("customize", image.finish),
        image.suite,
        str(target),
    ]
    if mirror := os.environ.get("DEBIAN_MIRROR"):
        command.append(mirror)
    log = target.with_suffix(".log")
    group = Cgroup(lab.prefix, "build")
    group.create()
    worker = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=group.enter,
    )
    timer = threading.Timer(LIMIT, worker.kill)
    timer.start()
    try:
        assert worker.stdout is not None
        with log.open("w") as out:
            for line in worker.stdout:
                out.write(line)
                if line.startswith(("I: ", "Unpacking ", "Setting up ")):
                    progress.says(line.removeprefix("I: ").partition(" (")[0].strip())
        if worker.wait() != 0:
            raise LabError(
                f"mmdebstrap failed: see {log}; behind a mirror of your own, "
                "set DEBIAN_MIRROR to its address"
            )
    finally:
        timer.cancel()
        group.kill()
    log.unlink()


def _sweep() -> None:
    """Clear what an interrupted build left."""
    for path in (cache_dir() / "images").glob(".unfinished-*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
