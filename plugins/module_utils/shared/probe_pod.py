# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""A pod for a few minutes: one that a container runtime has started, or else a network namespace,
connected by the conflist as a runtime would.

    probe_pod.py serve HOME      wait for the pod, and answer in it until stopped
    probe_pod.py clean HOME      take all of it away again

HOME is a folder of /run with the pod's state. Its name is also that of the namespace, the container
and the unit. This file stands alone, because it is the program of that transient unit, whose end,
however it comes, is also the end of the pod.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

NAME = "headcni-probe"
PORT = 8473  # the port on which the pod answers
DATA_PORT = 8474  # the port on which it counts the bytes that it receives
DATA_SECONDS = 60.0  # at most, of one connection
MOST_CONNECTIONS = 4  # that are counted at the same time
HOME = f"/run/{NAME}"
PYTHON = "/usr/bin/python3"
INTERFACE = "eth0"
CLONE_NEWNET = 0x40000000
CALL_SECONDS = 60
UNIT_SECONDS = 150  # systemd gives the unit's clean-up 90
WAIT_SECONDS = 200  # for the pod, before nobody is there to answer in it
LABEL = "headcni.probe=true"  # in a pod that a runtime has started


class ProbeError(Exception):
    """The pod cannot be created. The message says why."""


def name_of(home: str) -> str:
    return os.path.basename(home)


def netns_path(home: str = HOME) -> str:
    return f"/run/netns/{name_of(home)}"


def netconf(
    conf: Mapping[str, Any], plugin: Mapping[str, Any], previous: Any, host_port: int
) -> dict[str, Any]:
    """The configuration that a runtime passes to one plugin of a conflist."""
    made = {**plugin, "cniVersion": conf["cniVersion"], "name": conf["name"]}
    made.pop("capabilities", None)
    if plugin.get("capabilities", {}).get("portMappings") and host_port:
        mapping = {"hostPort": host_port, "containerPort": PORT, "protocol": "tcp"}
        made["runtimeConfig"] = {"portMappings": [mapping]}
    if previous is not None:
        made["prevResult"] = previous
    return made


def call(verb: str, plugin: Mapping[str, Any], bin_dirs: Sequence[str], home: str = HOME) -> Any:
    """Run one plugin, and return its result."""
    program = next(
        (p for p in (os.path.join(d, plugin["type"]) for d in bin_dirs) if os.path.exists(p)), ""
    )
    if not program:
        raise ProbeError(f"there is no {plugin['type']} in {', '.join(bin_dirs)}")
    env = {
        "CNI_COMMAND": verb,
        "CNI_CONTAINERID": name_of(home),
        "CNI_NETNS": netns_path(home),
        "CNI_IFNAME": INTERFACE,
        "CNI_PATH": ":".join(bin_dirs),
        "CNI_ARGS": "IgnoreUnknown=1",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }
    try:
        done = subprocess.run(
            [program],
            input=json.dumps(plugin),
            env=env,
            capture_output=True,
            text=True,
            timeout=CALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"{program} did not end its {verb} in {CALL_SECONDS} s") from None
    if done.returncode != 0:
        raise ProbeError(
            f"{program} {verb}: {complaint(done.stdout) or done.stderr.strip()[-300:]}"
        )
    return json.loads(done.stdout) if done.stdout.strip() else None


def complaint(text: str) -> str:
    try:
        said = json.loads(text)
        return f"{said['msg']} {said.get('details', '')}".strip()
    except (ValueError, KeyError, TypeError):
        return text.strip()[-300:]


def add(
    conf: Mapping[str, Any], bin_dirs: Sequence[str], host_port: int, home: str = HOME
) -> dict[str, Any]:
    result = None
    for plugin in conf["plugins"]:
        result = call("ADD", netconf(conf, plugin, result, host_port), bin_dirs, home)
    if not isinstance(result, dict) or not result.get("ips"):
        raise ProbeError("the conflist's plugins gave the pod no address")
    return result


def delete(
    conf: Mapping[str, Any], bin_dirs: Sequence[str], host_port: int, home: str = HOME
) -> None:
    for plugin in reversed(conf["plugins"]):
        call("DEL", netconf(conf, plugin, None, host_port), bin_dirs, home)


def by_plugins(state: Mapping[str, Any], home: str = HOME) -> dict[str, Any]:
    """Start a pod by calling the plugins. Returns the state with the pod's addresses."""
    ip("netns", "add", name_of(home))
    ip("-n", name_of(home), "link", "set", "lo", "up")
    state = {**state, "by_plugins": True, "netns": netns_path(home)}
    write_state(state, home)
    result = add(state["conf"], state["bin_dirs"], state["host_port"], home)
    addresses = [entry["address"].partition("/")[0] for entry in result["ips"]]
    state = {**state, "addresses": addresses, "dns": result.get("dns") or {}}
    write_state(state, home)
    return state


def serve_in_a_unit(program: str, home: str, seconds: int) -> None:
    """Start a unit that answers in the pod. Whenever the unit ends, it removes the pod.
    ``program`` is where this file is on the node."""
    run = [PYTHON, "-IS", program]
    command = ["systemd-run", "--quiet", "--collect", f"--unit={name_of(home)}.service"]
    command += [f"--property=RuntimeMaxSec={seconds}"]
    command += [f"--property=ExecStopPost={' '.join(run)} clean {home}"]
    done = systemd(*command, *run, "serve", home)
    if done.returncode != 0:
        raise ProbeError(f"systemd-run: {done.stderr.strip()}")


def stop(home: str = HOME) -> list[str]:
    """Stop the unit, which cleans up when it ends. Also clean up directly, if there is no unit."""
    systemd("systemctl", "stop", f"{name_of(home)}.service")
    return clean(home)


def systemd(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=UNIT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"{command[0]} did not end in {UNIT_SECONDS} s") from None
    except OSError as problem:
        raise ProbeError(f"{command[0]}: {problem.strerror}") from None


def crictl(command: Sequence[str], *arguments: str, seconds: float = CALL_SECONDS) -> str:
    """Returns its output. ``command`` is crictl with the options for the runtime."""
    try:
        done = subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no answer to crictl {arguments[0]} in {seconds:g} s") from None
    except OSError as problem:
        raise ProbeError(f"{command[0]}: {problem.strerror or problem}") from None
    if done.returncode != 0:
        raise ProbeError(runtimes_words(done.stderr) or f"crictl {arguments[0]} failed")
    return done.stdout


def runtimes_words(text: str) -> str:
    """The runtime's own message, without the text that crictl adds."""
    lines = text.strip().splitlines()
    said = lines[-1] if lines else ""
    said = said.partition("desc = ")[2] or said
    return said.rstrip('"').replace('\\"', '"').strip()[-1000:]


def remove_sandboxes(command: Sequence[str]) -> list[str]:
    """Every probe that this runtime has. kubelet may be quicker: it ends pods not its own."""
    found = crictl(command, "pods", "-q", "--label", LABEL).split()
    for sandbox in found:
        try:
            crictl(command, "rmp", "-f", sandbox)
        except ProbeError as problem:
            if sandbox in crictl(command, "pods", "-q", "--label", LABEL).split():
                raise ProbeError(
                    f"the runtime does not remove the pod {sandbox} ({problem}): crictl rmp -f "
                    f"{sandbox} does it by hand"
                ) from None
    return found


def ip(*arguments: str) -> None:
    try:
        done = subprocess.run(
            ["ip", *arguments], capture_output=True, text=True, timeout=30, check=False
        )
    except FileNotFoundError:
        raise ProbeError("there is no `ip` on this node: install iproute2") from None
    if done.returncode != 0:
        raise ProbeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def clean(home: str = HOME) -> list[str]:
    """Whatever of a probe is there, by whomever it was left; what was found. A DEL that fails is
    told when all the rest is gone: nobody would get further by trying it again. A runtime that does
    not remove its pod is asked again by whoever cleans next."""
    found = []
    failed = None
    if os.path.exists(os.path.join(home, "probe.json")):
        known = read_state(home)
        if known.get("crictl"):
            try:
                remove_sandboxes(known["crictl"])
            except ProbeError as problem:
                gone = f"if that runtime is gone, remove {home} and try again"
                raise ProbeError(f"{problem}; {gone}") from None
        try:
            if known.get("by_plugins"):
                delete(known["conf"], known["bin_dirs"], known["host_port"], home)
        except ProbeError as problem:
            failed = problem
        found.append("a pod")
    if os.path.exists(netns_path(home)):
        ip("netns", "del", name_of(home))
        found.append("a network namespace")
    if os.path.isdir(home):
        shutil.rmtree(home)
    if failed is not None:
        raise failed
    return found


def read_state(home: str = HOME) -> dict[str, Any]:
    with open(os.path.join(home, "probe.json")) as stream:
        state: dict[str, Any] = json.load(stream)
    return state


def write_state(state: Mapping[str, Any], home: str = HOME) -> None:
    path = os.path.join(home, "probe.json")
    with open(f"{path}.new", "w") as stream:
        json.dump(state, stream)
    os.replace(f"{path}.new", path)


def serve(home: str) -> None:
    """Answer each connection with the address that it comes from."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (netns := read_state(home).get("netns")):
        if time.monotonic() > deadline:
            raise SystemExit("no pod was made")
        time.sleep(0.1)
    handle = os.open(netns, os.O_RDONLY | os.O_CLOEXEC)
    if ctypes.CDLL(None, use_errno=True).setns(handle, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), netns)
    data = listening(DATA_PORT)
    for _unused in range(MOST_CONNECTIONS):
        threading.Thread(target=count, args=[data], daemon=True).start()
    with listening(PORT) as listener:
        while True:
            client, address = listener.accept()
            with client:
                client.settimeout(2)
                try:
                    client.sendall(address[0].replace("::ffff:", "").encode() + b"\n")
                except OSError:
                    continue


def listening(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("::", port))
    listener.listen(64)
    return listener


def count(listener: socket.socket) -> None:
    """Tell each client how many bytes it has sent, and how many seconds that took."""
    buffer = bytearray(1 << 18)
    while True:
        client, _unused = listener.accept()
        with client:
            client.settimeout(10)
            began, received = time.monotonic(), 0
            try:
                while (
                    more := client.recv_into(buffer)
                ) and time.monotonic() < began + DATA_SECONDS:
                    received += more
                client.sendall(f"{received} {time.monotonic() - began:.6f}\n".encode())
            except OSError:
                continue


def main(arguments: Sequence[str]) -> int:
    verb, home = arguments
    if verb == "serve":
        serve(home)
    else:
        clean(home)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
