"""Machines. Nodes are systemd-nspawn's, each an overlay on the base image in its own namespace.
Virtual machines are QEMU's: what is theirs alone is in vms.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Mapping, Sequence

from . import image, kubeadm, network, tools, vms
from .cgroups import Cgroup
from .layout import CONTROL, Lab, LabError, Plan, is_vm
from .run import run

BOOT_LIMIT = 90


def _programs(plan: Plan, machine: str) -> dict[Path, str]:
    """What the lab built and the machine sees, read-only. Nodes get tailscale from the mirror."""
    if machine == CONTROL:
        return {
            tools.headscale(plan.headscale).bin: "/opt/lab/headscale",
            tools.TAILSCALE.home / "mirror": "/opt/lab/mirror",
        }
    found = {tools.CNI.bin: "/opt/lab/cni", tools.CRI.bin: "/opt/lab/cri"}
    if plan.k3s:
        found[tools.K3S.home] = "/opt/lab/k3s"
        for name in ("k3s", "kubectl"):  # where its installer puts them
            found[tools.K3S.bin / name] = f"/usr/local/bin/{name}"
    if plan.kubeadm:
        for name in kubeadm.ON_NODES:
            found[tools.KUBERNETES.bin / name] = f"/usr/bin/{name}"
    return found


def make_keys(lab: Lab) -> None:
    """One key for the lab's SSH, made anew with each lab."""
    lab.ssh_key.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", lab.prefix, "-f", lab.ssh_key)


def write_ssh_config(lab: Lab, plan: Plan) -> None:
    hosts = "".join(f"Host {m}\n  HostName {plan.address(m)}\n" for m in plan.machines)
    lab.ssh_config.write_text(
        f"{hosts}Host *\n  User root\n  IdentityFile {lab.ssh_key}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {lab.ssh_key.parent}/known_hosts\n"
        "  StrictHostKeyChecking yes\n  LogLevel ERROR\n"
    )


def prepare(lab: Lab, plan: Plan, machine: str, files: Mapping[str, bytes]) -> None:
    """Lay the machine's own layer over its base image."""
    home = lab.node_dir(machine)
    for name in ("upper", "work", "root"):
        (home / name).mkdir(parents=True)
    _mount(lab, plan, machine)
    root = lab.root(machine)
    hosts = "".join(f"{plan.address(m)} {m}\n" for m in plan.machines)
    own = {
        "etc/machine-id": f"{uuid.uuid4().hex}\n".encode(),
        "etc/hostname": f"{machine}\n".encode(),
        "etc/hosts": f"127.0.0.1 localhost\n::1 localhost\n{hosts}".encode(),
        "etc/resolv.conf": f"nameserver {network.SLIRP_DNS}\n".encode(),
        "root/.ssh/authorized_keys": lab.ssh_key.with_suffix(".pub").read_bytes(),
        **files,
    }
    for path, content in own.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    host_key = root / "etc/ssh/ssh_host_ed25519_key"
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", machine, "-f", host_key)
    public = host_key.with_suffix(".pub").read_text().split(" ", 2)
    with (lab.ssh_key.parent / "known_hosts").open("a") as known:
        known.write(f"{plan.address(machine)} {public[0]} {public[1]}\n")
    if is_vm(machine):
        vms.make_disk(lab, machine, _programs(plan, machine))
        unmount(home)
        vms.forget_layers(lab, machine)


def _mount(lab: Lab, plan: Plan, machine: str) -> None:
    home = lab.node_dir(machine)
    base = image.of(machine, plan.suites).root
    layers = f"lowerdir={base},upperdir={home / 'upper'},workdir={home / 'work'}"
    run("mount", "-t", "overlay", lab.netns(machine), "-o", layers, lab.root(machine))


def boot(lab: Lab, plan: Plan, machine: str) -> None:
    """Start the machine. nspawn gives each start a boot id of its own, as a real reboot would."""
    if is_vm(machine):
        vms.boot(lab, plan, machine)
        return
    group = Cgroup(lab.prefix, machine)
    group.create()
    command = [
        "systemd-nspawn",
        "--quiet",
        "--register=no",
        "--keep-unit",
        "--boot",
        f"--directory={lab.root(machine)}",
        f"--machine={lab.netns(machine)}",
        f"--hostname={machine}",
        f"--network-namespace-path=/run/netns/{lab.netns(machine)}",
        "--capability=all",
        "--bind=/dev/net/tun",
        "--resolv-conf=off",
        "--timezone=off",
        "--link-journal=no",
        "--console=pipe",
        "--system-call-filter=@keyring",  # runc gives each container a keyring
        *(f"--bind-ro={source}:{target}" for source, target in _programs(plan, machine).items()),
    ]
    with (lab.node_dir(machine) / "console.log").open("ab") as console:
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=group.enter,
            env={**os.environ, "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network"},
        )


def wait_until_booted(lab: Lab, plan: Plan, machine: str) -> None:
    limit = vms.BOOT_LIMITS[plan.accelerator] if is_vm(machine) else BOOT_LIMIT
    deadline = time.monotonic() + limit
    # Each login costs a virtual machine without KVM a second: one that waits is cheaper than many.
    wait = ("--wait",) if is_vm(machine) else ()
    while True:
        done = inside(
            lab, machine, "systemctl", "is-system-running", *wait, check=False, timeout=limit
        )
        if done is not None and done.stdout.strip() in ("running", "degraded"):
            break
        if not Cgroup(lab.prefix, machine).alive() or time.monotonic() > deadline:
            raise LabError(
                f"{machine} did not boot within {limit} s: see {lab.node_dir(machine)}/console.log"
            )
        time.sleep(0.2)
    if done.stdout.strip() == "degraded":
        failed = inside(lab, machine, "systemctl", "--failed", "--plain", "--no-legend")
        raise LabError(f"{machine} booted with failed units: {failed and failed.stdout.strip()}")


def running(lab: Lab, machine: str) -> bool:
    if is_vm(machine):
        return Cgroup(lab.prefix, machine).alive()
    return leader(lab, machine) != 0


def leader(lab: Lab, machine: str) -> int:
    """The process that is PID 1 in the node; 0 if there is none."""
    wanted = os.stat(f"/run/netns/{lab.netns(machine)}").st_ino
    for process in _supervisors(lab, machine):
        for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
            try:
                name = Path(f"/proc/{child}/comm").read_text().strip()
                if name == "systemd" and os.stat(f"/proc/{child}/ns/net").st_ino == wanted:
                    return int(child)
            except OSError:
                continue
    return 0


def _supervisors(lab: Lab, machine: str) -> list[int]:
    mark = f"--machine={lab.netns(machine)}".encode()
    return [process for process in _processes() if mark in _title(process).split(b"\0")]


def _processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _title(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def inside(
    lab: Lab, machine: str, *argv: str, check: bool = True, timeout: float = 60
) -> subprocess.CompletedProcess[str] | None:
    """Run a command in the machine; in a node without SSH. None if the machine is not there."""
    if is_vm(machine):
        return vms.inside(lab, machine, *argv, check=check, timeout=timeout)
    process = leader(lab, machine)
    if not process:
        if check:
            raise LabError(f"{machine} is not running: `make status` shows what is")
        return None
    return run(
        "nsenter", "--target", str(process), "--all", "--", *argv, check=check, timeout=timeout
    )


def stop(lab: Lab, machine: str, hard: bool) -> None:
    """Shut the machine down as its power button would, or pull the plug."""
    group = Cgroup(lab.prefix, machine)
    if running(lab, machine) and not hard:
        if is_vm(machine):
            vms.power_off(lab, machine)
        else:
            os.kill(leader(lab, machine), signal.SIGRTMIN + 4)  # systemd: power off
        deadline = time.monotonic() + (vms.STOP_LIMIT if is_vm(machine) else 60)
        while group.alive() and time.monotonic() < deadline:
            time.sleep(0.1)
    group.kill()


def start(lab: Lab, plan: Plan, machine: str) -> None:
    """After a stop: the disk is kept, the network namespace is a new one, as after a reboot."""
    if running(lab, machine):
        raise LabError(f"{machine} is running already")
    network.unplug(lab, machine)
    network.plug(lab, plan, machine)
    boot(lab, plan, machine)


def hang_up(lab: Lab) -> None:
    """End the SSH connections that Ansible keeps open; their titles name a socket of the lab."""
    mark = f"ssh: {lab.dir}/".encode()
    for process in _processes():
        if _title(process).startswith(mark):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)


def discard(lab: Lab, machine: str) -> None:
    """Clear what an interrupted attempt at this machine left."""
    Cgroup(lab.prefix, machine).kill()
    network.unplug(lab, machine)
    unmount(lab.node_dir(machine))
    if lab.node_dir(machine).exists():
        shutil.rmtree(lab.node_dir(machine))


def unmount(below: Path) -> None:
    """Take off every mount below a folder, the innermost first."""
    with open("/proc/self/mounts") as mounts:
        points = [line.split()[1].encode().decode("unicode_escape") for line in mounts]
    for point in reversed(points):
        if point.startswith(f"{below}/"):
            run("umount", "-l", point, check=False)


def remove_files(lab: Lab) -> None:
    if lab.dir.exists():
        shutil.rmtree(lab.dir)
    parent = lab.dir.parent
    if parent.name == "headcni-lab" and parent.exists() and not os.listdir(parent):
        parent.rmdir()


def memory(lab: Lab, machines: Sequence[str]) -> dict[str, int]:
    return {m: Cgroup(lab.prefix, m).memory() for m in machines}
