"""Virtual machines: QEMU with a kernel, a disk and a power button of their own.

A machine's disk is made from the same kind of layers as a node's root, so it starts with the same
files; its card is a tap in the machine's namespace, bridged to the cable that the switch sees.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any, Mapping

from . import image, network
from .cgroups import Cgroup
from .layout import Lab, LabError, Plan
from .run import run

QEMU = "qemu-system-x86_64"
MEMORY_MIB = 1024
DISK = "4G"  # sparse: what the machine does not write takes no room
# Debian's kernel without a root to mount panics after about a second; hung it is at the limit.
PROBE_LIMIT = 15
STOP_LIMIT = 180
BOOT_LIMITS = {"kvm": 120, "tcg": 600}
# In software, QEMU keeps what it has translated (a GiB of it, if it may), and every feature of a
# processor that it imitates costs time.
ACCELERATORS = {"kvm": ("kvm", "host"), "tcg": ("tcg,tb-size=512", "qemu64")}
NEEDED_GIB = 1.5  # with what QEMU takes for itself
CARD = "card"


def accelerator() -> str:
    """KVM if it really runs a Debian kernel. A /dev/kvm that is there may still hang one."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "tcg"
    kernel, _ = _kernel(image.VMS[0])
    command = [
        *_qemu("kvm"),
        *("-m", "256", "-no-reboot", "-serial", "stdio"),
        *("-kernel", str(kernel), "-append", "console=ttyS0 panic=-1"),
    ]
    try:
        said = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_LIMIT,
            check=False,
        ).stdout
    except subprocess.TimeoutExpired:
        return "tcg"
    return "kvm" if b"Unable to mount root fs" in said else "tcg"


def _qemu(accel: str) -> list[str]:
    how, processor = ACCELERATORS[accel]
    return [QEMU, "-accel", how, "-cpu", processor, "-nodefaults", "-display", "none"]


def _kernel(base: image.Image) -> tuple[Path, Path]:
    """The kernel and its initramfs."""
    boot = base.root / "boot"
    kernel = max(boot.glob("vmlinuz-*"))
    return kernel, boot / kernel.name.replace("vmlinuz", "initrd.img")


def files(plan: Plan, machine: str) -> dict[str, bytes]:
    """What the machine needs to bring its network up by itself."""
    settings = f"""\
[Match]
Name=eth0

[Network]
Address={plan.address(machine)}/24
Address={plan.address6(machine)}/64
Gateway={plan.gateway}
Gateway={plan.gateway6}
IPv6AcceptRA=no
"""
    return {"etc/systemd/network/10-eth0.network": settings.encode()}


def make_disk(lab: Lab, machine: str, programs: Mapping[Path, str]) -> None:
    """Pour the machine's root, with what a node would be shown there, into a disk."""
    root = lab.root(machine)
    for source, target in programs.items():
        shown = root / target.lstrip("/")
        shown.mkdir(parents=True)
        run("mount", "--bind", source, shown)
    run("mke2fs", "-q", "-t", "ext4", "-d", root, _disk(lab, machine), DISK, timeout=300)


def forget_layers(lab: Lab, machine: str) -> None:
    """The disk has it all; the caller has taken the mounts off."""
    for name in ("upper", "work", "root"):
        shutil.rmtree(lab.node_dir(machine) / name)


def _disk(lab: Lab, machine: str) -> Path:
    return lab.node_dir(machine) / "disk.img"


def boot(lab: Lab, plan: Plan, machine: str) -> None:
    kernel, initramfs = _kernel(image.of(machine))
    command = [
        *("nsenter", f"--net=/run/netns/{lab.netns(machine)}"),
        *_qemu(plan.accelerator),
        *("-name", lab.netns(machine), "-machine", "q35", "-m", str(MEMORY_MIB)),
        *("-kernel", str(kernel), "-initrd", str(initramfs)),
        *("-append", "root=/dev/vda rw console=ttyS0 net.ifnames=0 loglevel=4"),
        # The host keeps what a killed QEMU had written, so flushes can be saved.
        *("-drive", f"file={_disk(lab, machine)},format=raw,if=virtio,cache=unsafe,discard=unmap"),
        *("-netdev", f"tap,id={CARD},ifname={network.TAP},script=no,downscript=no"),
        *("-device", f"virtio-net-pci,netdev={CARD},mac={network.mac(lab, machine)},romfile="),
        *("-device", "virtio-rng-pci"),
        *("-serial", "stdio", "-qmp", "unix:monitor,server=on,wait=off"),
    ]
    group = Cgroup(lab.prefix, machine)
    group.create()
    with (lab.node_dir(machine) / "console.log").open("ab") as console:
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=group.enter,
            cwd=lab.node_dir(machine),
        )


def inside(
    lab: Lab, machine: str, *argv: str, check: bool, timeout: float
) -> subprocess.CompletedProcess[str] | None:
    """Over SSH: there is no other way in. None if it does not answer."""
    patience = ("BatchMode=yes", "ConnectTimeout=30", "ServerAliveInterval=20")
    options = [word for option in patience for word in ("-o", option)]
    command = ["ssh", "-F", str(lab.ssh_config), *options, machine, shlex.join(argv)]
    try:
        done = run(*command, check=False, timeout=timeout)
    except LabError:
        if check:
            raise
        return None
    if done.returncode == 255 and not check:
        return None
    if check and done.returncode != 0:
        raise LabError(f"`{shlex.join(argv)}` failed on {machine}: {done.stderr.strip()}")
    return done


def power_off(lab: Lab, machine: str) -> None:
    """Press the power button."""
    _monitor(lab, machine, "system_powerdown")


def set_link(lab: Lab, machine: str, up: bool) -> None:
    """Let the machine's card see that its cable is in, or out."""
    _monitor(lab, machine, "set_link", name=CARD, up=up)


def _monitor(lab: Lab, machine: str, command: str, **arguments: Any) -> None:
    """One command to QEMU. Its socket is opened by way of the folder: its path may be too long."""
    folder = os.open(lab.node_dir(machine), os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(f"/proc/self/fd/{folder}/monitor")
            with connection.makefile("rw") as stream:
                stream.readline()  # the greeting
                for name, given in (("qmp_capabilities", {}), (command, arguments)):
                    stream.write(json.dumps({"execute": name, "arguments": given}) + "\n")
                    stream.flush()
                    answer = json.loads(stream.readline())
                    while "event" in answer:
                        answer = json.loads(stream.readline())
                    if "error" in answer:
                        raise LabError(f"QEMU refuses {name}: {answer['error']['desc']}")
    except (OSError, ValueError) as problem:
        raise LabError(f"QEMU of {machine} does not answer: {problem}") from None
    finally:
        os.close(folder)
