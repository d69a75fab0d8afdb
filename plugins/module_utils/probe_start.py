# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Start a node's probe pod with the container runtime, and one pod at a time."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address, ip_network
from typing import Any

from . import kernel, probe_cri
from .shared import probe, probe_conflist, probe_pod
from .shared.filelock import lock

PROGRAM = os.path.join(probe_pod.HOME, "probe.py")
LOCK = f"{probe_pod.HOME}.lock"
ALONE_SECONDS = 240.0  # as long as it may take to start a pod
SIOCGIFMTU = 0x8921


def by_runtime(
    given: Mapping[str, Any], state: Mapping[str, Any]
) -> tuple[probe_cri.Sandbox | None, dict[str, Any]]:
    """A pod that the container runtime started, or None; and the result of the check `runtime`."""
    try:
        runtime = probe_cri.chosen()
        crictl = probe_cri.command(runtime, given["crictl"] or "")
    except probe_cri.NotCheckedError as problem:
        return None, probe.outcome(None, str(problem))
    remove_sandboxes(crictl)  # left by an earlier run; the runtime may be able to remove them now
    probe_pod.write_state({**state, "crictl": crictl})
    try:
        sandbox = probe_cri.start(runtime, crictl, given["host_port"])
        check_network(runtime.name, sandbox, state["conf"])
    except probe_cri.NotCheckedError as problem:
        remove_sandboxes(crictl)
        return None, probe.outcome(None, str(problem))
    except probe_pod.ProbeError as problem:
        kept = remove_sandboxes(crictl)
        probe_pod.write_state(state)
        raise probe_pod.ProbeError(f"{problem}{kept}") from None
    if not probe_cri.has_kubelet(runtime):
        probe_pod.write_state(
            {
                **state,
                "crictl": crictl,
                "netns": sandbox.netns,
                "addresses": sandbox.addresses,
                "dns": {"nameservers": sandbox.nameservers or tailnet_servers(state["conf"])},
            }
        )
        return sandbox, probe.outcome(True, runtime.name)
    probe_pod.remove_sandboxes(crictl)
    return None, probe.outcome(True, f"{runtime.name}, for a moment")


def remove_sandboxes(crictl: list[str]) -> str:
    """Let the runtime remove its probe pods. A runtime that cannot call a plugin to set up a pod
    cannot call it to remove the pod either, and keeps it: then return a sentence that says so."""
    try:
        probe_pod.remove_sandboxes(crictl)
    except probe_pod.ProbeError as problem:
        return f". The next run of verify.yml tries again to remove what is left: {problem}"
    return ""


def tailnet_servers(conf: Mapping[str, Any]) -> list[str]:
    """The nameservers that the plugin returns to the runtime. Not every runtime shows them."""
    known = probe_conflist.ours(conf).get("magic_dns") or {}
    return list(known.get("nameservers") or ()) if known.get("enable") else []


def check_network(runtime: str, sandbox: probe_cri.Sandbox, conf: Mapping[str, Any]) -> None:
    """Fail if the pod has another network than the conflist describes."""
    ranges = [ip_network(cidr) for cidr in probe_conflist.pod_cidrs(conf)]
    foreign = [
        address
        for address in sandbox.addresses
        if not any(ip_address(address) in range_ for range_ in ranges)
    ]
    if ranges and foreign:
        raise probe_pod.ProbeError(
            f"{runtime} gave its pod the address {foreign[0]}, which is not in this node's "
            f"{', '.join(map(str, ranges))}: it uses another network or has not read the conflist. "
            f"Next: ansible-playbook … site.yml --tags preflight compares where {runtime} looks "
            f"with where HeadCNI is; or restart {runtime}"
        )
    wanted = probe_conflist.mtu_of(conf)
    try:
        has = kernel.apart(lambda: mtu_inside(probe_pod.INTERFACE), sandbox.netns)
    except OSError:
        return  # kubelet has ended the pod by now
    if has != wanted:
        raise probe_pod.ProbeError(
            f"{runtime} gave its pod an MTU of {has}, and the conflist has {wanted}: restart "
            f"{runtime}, which has read an older one"
        )


def mtu_inside(interface: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, SIOCGIFMTU, struct.pack("16sI12x", interface.encode(), 0))
    return int(struct.unpack("16sI12x", answer)[1])


@contextmanager
def alone() -> Iterator[None]:
    """Only one process at a time starts or removes a probe: if a run is interrupted while its
    module still starts a pod, the module that removes the pod waits for it."""
    until = time.monotonic() + ALONE_SECONDS
    while True:
        handle = os.open(LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            lock(handle, LOCK, max(0.0, until - time.monotonic()))
            if os.path.exists(LOCK) and os.path.samestat(os.fstat(handle), os.stat(LOCK)):
                try:
                    yield
                finally:
                    os.unlink(LOCK)
                return
        finally:
            os.close(handle)
