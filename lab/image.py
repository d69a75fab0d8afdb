"""The root file system that all nodes share, made once by mmdebstrap and kept in the cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import threading
from pathlib import Path

from .cgroups import Cgroup
from .layout import Lab, LabError, cache_dir
from .locks import locked
from .progress import Step, step

SUITE = "bookworm"
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
LIMIT = 15 * 60

# Run in the new root. Nodes differ only in what their own layer says.
FINISH = """
systemctl mask systemd-logind.service getty.target console-getty.service \
    e2scrub_reap.service e2scrub_all.timer apt-daily.timer apt-daily-upgrade.timer \
    fstrim.timer systemd-networkd.service systemd-resolved.service
systemctl disable containerd.service nftables.service
rm -f /etc/ssh/ssh_host_* /etc/machine-id /etc/hostname /etc/resolv.conf
passwd -d root >/dev/null
mkdir -p /root/.ssh /var/log/journal && chmod 700 /root/.ssh
printf 'PermitRootLogin prohibit-password\nPasswordAuthentication no\nUseDNS no\n' \
    > /etc/ssh/sshd_config.d/lab.conf
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
printf '[Journal]\nStorage=persistent\nSystemMaxUse=64M\n' > /etc/systemd/journald.conf
"""


def _key() -> str:
    recipe = "\n".join((SUITE, platform.machine(), *PACKAGES, FINISH))
    return hashlib.sha256(recipe.encode()).hexdigest()[:16]


def base_root() -> Path:
    return cache_dir() / "images" / f"{SUITE}-{_key()}"


def build(lab: Lab) -> None:
    if base_root().exists():
        return
    with locked("image", "another build of the base image", LIMIT):
        if base_root().exists():
            return
        _sweep()
        with step(f"making the nodes' base image (Debian {SUITE})") as progress:
            unfinished = base_root().with_name(f".unfinished-{base_root().name}")
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            _mmdebstrap(lab, unfinished, progress)
            unfinished.rename(base_root())


def _mmdebstrap(lab: Lab, target: Path, progress: Step) -> None:
    command = [
        "mmdebstrap",
        "--mode=root",
        "--variant=minbase",
        f"--include={','.join(PACKAGES)}",
        f"--customize-hook=chroot \"$1\" sh -ec '{FINISH.replace(chr(39), chr(34))}'",
        SUITE,
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
                if line.startswith("I: "):
                    progress.says(line[3:].strip())
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
