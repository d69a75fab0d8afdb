# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""A pod that the node's own container runtime starts, over CRI and with crictl.

It is only a sandbox without a container: its network is set up as for any pod, and it needs no
image except the pause image. That image is never downloaded, so that the node stays as it was.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .shared import container_runtimes, probe_pod
from .shared.container_runtimes import Runtime

START_SECONDS = 90.0
_FOLDERS = (
    "/usr/local/bin",
    "/usr/bin",
    "/usr/local/sbin",
    "/usr/sbin",
    "/opt/bin",
    "/opt/cni/bin",
)
_KUBELETS = ("kubelet", "kubelite", "k3s", "k3s-server", "k3s-agent")
# How containerd and CRI-O report that the network is the cause.
_NETWORK = re.compile(r"\bcni\b|network", re.IGNORECASE)
_IMAGE = re.compile(
    r"(get|pull|ensure)\w* (the )?(sandbox|pause|infra) (image|container image)"
    r"|pull(ing)? (and unpack )?image|initializing source docker://|image .*not (found|known)",
    re.IGNORECASE,
)


class NotCheckedError(Exception):
    """The runtime could not be asked to start a pod. The message says why and what to do."""


class Sandbox(NamedTuple):
    netns: str
    addresses: tuple[str, ...]
    nameservers: tuple[str, ...]


def chosen(root: str = "/") -> Runtime:
    """The runtime that starts this node's pods."""
    running = container_runtimes.running(root)
    if not running:
        raise NotCheckedError("no container runtime runs on this node")
    serving = container_runtimes.of_kubelet(running, root)
    if not serving:
        raise NotCheckedError(
            f"{running[0].name} runs with its CRI plugin turned off, so nothing can start pods by "
            "it: take cri out of disabled_plugins and restart it, unless it only serves Docker"
        )
    return serving[0]


def has_kubelet(runtime: Runtime, root: str = "/") -> bool:
    """kubelet ends every pod that it has not started itself within seconds."""
    return runtime.name in ("k3s", "RKE2") or bool(container_runtimes.processes(_KUBELETS, root))


def command(runtime: Runtime, given: str = "") -> list[str]:
    """crictl with the options for this runtime."""
    beside = os.path.dirname(runtime.program)
    found = given or shutil.which("crictl", path=os.pathsep.join(filter(None, (*_FOLDERS, beside))))
    if not found or not os.access(found, os.X_OK):
        there = f"{given} is not there" if given else "there is no crictl on this node"
        raise NotCheckedError(
            f"{there}, so {runtime.name} was not asked to start a pod: install crictl (the package "
            "cri-tools), or say where it is by headcni_verify_crictl"
        )
    at = f"unix://{runtime.socket}"
    return [found, "--runtime-endpoint", at, "--image-endpoint", at, "--timeout", "45s"]


def start(
    runtime: Runtime, crictl: Sequence[str], host_port: int, home: str = probe_pod.HOME
) -> Sandbox:
    """Start a sandbox. A ProbeError quotes the runtime."""
    info = _info(runtime, crictl)
    _see_image(runtime, crictl, info)
    config = os.path.join(home, "sandbox.json")
    with open(config, "w") as stream:
        json.dump(sandbox_config(runtime, info, host_port, home), stream)
    try:
        said = probe_pod.crictl(crictl, "runp", config, seconds=START_SECONDS)
    except probe_pod.ProbeError as problem:
        raise explained(runtime, str(problem)) from None
    return sandbox(json.loads(probe_pod.crictl(crictl, "inspectp", said.strip())))


def sandbox_config(
    runtime: Runtime, info: Mapping[str, Any], host_port: int, home: str
) -> dict[str, Any]:
    name, _unused, value = probe_pod.LABEL.partition("=")
    linux = {}
    if runtime.name != "CRI-O" and _systemd_cgroups(info):
        # runc requires it; CRI-O chooses one itself.
        linux["cgroup_parent"] = "system.slice"
    mapping = {"container_port": probe_pod.PORT, "host_port": host_port, "protocol": 0}
    return {
        "metadata": {
            "name": probe_pod.NAME,
            "namespace": "default",
            "uid": f"{probe_pod.NAME}-{secrets.token_hex(4)}",
            "attempt": 0,
        },
        "labels": {name: value},
        "log_directory": home,
        "port_mappings": [mapping] if host_port else [],
        "linux": linux,
    }


def sandbox(shown: Mapping[str, Any]) -> Sandbox:
    """From the output of inspectp."""
    network = (shown.get("status") or {}).get("network") or {}
    more = [one.get("ip") for one in network.get("additionalIps") or ()]
    addresses = tuple(str(one) for one in (network.get("ip"), *more) if one)
    info = shown.get("info") or {}
    spaces = ((info.get("runtimeSpec") or {}).get("linux") or {}).get("namespaces") or ()
    netns = next((one.get("path") for one in spaces if one.get("type") == "network"), "")
    netns = netns or (f"/proc/{info['pid']}/ns/net" if info.get("pid") else "")
    if not addresses:
        raise probe_pod.ProbeError("the runtime started a pod and gave it no address")
    if not netns:
        raise probe_pod.ProbeError("the runtime does not say where its pod's network is")
    settings = (info.get("cniResult") or {}).get("DNS") or ()
    servers = [name for one in settings for name in (one or {}).get("nameservers") or ()]
    return Sandbox(str(netns), addresses, tuple(dict.fromkeys(servers)))


def explained(runtime: Runtime, said: str) -> Exception:
    """Why the runtime did not start a pod. Only a missing image is not a problem of the node:
    every other reason affects the node's users, too."""
    if "unknown service runtime" in said:
        return NotCheckedError(
            f"crictl and {runtime.name} speak different versions of CRI ({said}): install the "
            "crictl that belongs to the runtime, or name it by headcni_verify_crictl"
        )
    if _IMAGE.search(said) and not re.search(r"network for sandbox|CNI network", said):
        return NotCheckedError(
            f"{runtime.name} has no image to start a pod from ({said}): {_get_image('IMAGE')}"
        )
    what = "does not start pods"
    if _NETWORK.search(said):
        what = "does not start pods, and says that their network is why"
    unit = {"CRI-O": "crio", "RKE2": "rke2-server -u rke2-agent", "k3s": "k3s -u k3s-agent"}
    return probe_pod.ProbeError(
        f"{runtime.name} {what}: {said}. Next: headcnictl diagnose on this node, and journalctl -u "
        f"{unit.get(runtime.name, runtime.name)}"
    )


def _info(runtime: Runtime, crictl: Sequence[str]) -> Mapping[str, Any]:
    try:
        found = json.loads(probe_pod.crictl(crictl, "info", "-o", "json"))
    except probe_pod.ProbeError as problem:
        raise explained(runtime, f"it does not answer at {runtime.socket}: {problem}") from None
    except ValueError:
        found = {}
    return found if isinstance(found, dict) else {}


def _see_image(runtime: Runtime, crictl: Sequence[str], info: Mapping[str, Any]) -> None:
    config = info.get("config")
    image = str((config if isinstance(config, dict) else {}).get("sandboxImage") or "")
    image = image or runtime.sandbox_image
    if not image:
        return
    try:
        probe_pod.crictl(crictl, "inspecti", image)
    except probe_pod.ProbeError:
        raise NotCheckedError(
            f"the image that every pod of {runtime.name} starts from, {image}, is not on this "
            f"node: {_get_image(image)}"
        ) from None


def _get_image(image: str) -> str:
    return (
        f"crictl pull {image}, or without internet ctr -n k8s.io images import FILE (podman load "
        "for CRI-O), then run verify.yml again"
    )


def _systemd_cgroups(info: Mapping[str, Any]) -> bool:
    known: Any = info.get("config")
    for key in ("containerd", "runtimes"):
        known = known.get(key) if isinstance(known, dict) else None
    runtimes = known.values() if isinstance(known, dict) else ()
    options = [one.get("options") or {} for one in runtimes if isinstance(one, dict)]
    return any(one.get("SystemdCgroup") is True for one in options)
