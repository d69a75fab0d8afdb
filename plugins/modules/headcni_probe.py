#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Make a pod for a few minutes, see what it reaches, and take it away again."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headcni_probe
short_description: See what a pod on this node reaches
version_added: 0.1.0
description:
  - V(present) makes a pod and answers in it. With I(runtime) the node's container runtime starts
    it, over CRI. Otherwise a network namespace is connected by the conflist that is in charge, with
    the installed plugins, just as a container runtime would do it.
  - V(tested) has that pod ask the pods of other nodes, and what else is wanted.
  - V(absent) takes it away. A pod that nobody takes away ends by itself after I(lifetime), and the
    next V(present) begins with what an earlier one left.
author:
  - The HeadCNI authors (@headcni)
options:
  state:
    description: What to do.
    type: str
    choices: [present, tested, absent]
    required: true
  name:
    description: What the others call this node. By default its host name.
    type: str
  cni_conf_dir:
    description: Where the conflist is.
    type: path
    default: /etc/cni/net.d
  cni_bin_dirs:
    description: Where the plugins are.
    type: list
    elements: path
    default: [/opt/cni/bin]
  host_port:
    description: A port of the node that leads to the pod. V(0) does without.
    type: int
    default: 18473
  runtime:
    description:
      - Have the container runtime that runs on this node start the pod. A runtime that does not
        start it, or gives it another network, is a failure.
      - Where this cannot be tried, because no runtime runs, there is no crictl, or the image that
        every pod starts from is not on the node, RV(runtime) says so and the plugins are called
        instead. No image is ever fetched.
      - kubelet ends pods that it has not started. Where it runs, the runtime starts one for a
        moment, and then another pod is made by calling the plugins.
    type: bool
    default: false
  crictl:
    description: Where crictl is, if neither on the usual paths nor beside the runtime's program.
    type: path
  socket:
    description: The socket of the node's own tailscaled, which carries the mesh in host mode.
    type: path
    default: /run/tailscale/tailscaled.sock
  targets:
    description: What I(state=present) returned as RV(probe) on the other nodes. For V(tested).
    type: list
    elements: dict
    default: []
  paths:
    description: Find out which way tailscaled sends what goes to each target. For V(tested).
    type: bool
    default: false
  outside:
    description:
      - What the pod should reach outside of the cluster, all of it. For V(tested).
      - C(ADDRESS:PORT), C(NAME:PORT) or a URL is a TCP connection, C(ADDRESS) or C(NAME) a ping.
        The node itself resolves names. V(headscale) is the server that the node is joined to.
    type: list
    elements: str
    default: []
  cluster:
    description:
      - Where a kubelet runs, ask the cluster's DNS for the service C(kubernetes), and connect to
        it. For V(tested).
    type: bool
    default: false
  cluster_dns:
    description: The addresses of the cluster's DNS, if kubelet's configuration does not say so.
    type: list
    elements: str
    default: []
  timeout:
    description:
      - How many seconds to try for. The cluster's DNS and service get four times as many, because
        DNS may have begun to start only when the network was there.
    type: int
    default: 15
  lifetime:
    description: After how many seconds the pod ends by itself.
    type: int
    default: 600
attributes:
  check_mode:
    support: none
    details: Does nothing then, and says so by being skipped.
  diff_mode:
    support: none
    details: There is nothing to compare.
extends_documentation_fragment:
  - headcni.mesh.node
seealso:
  - module: headcni.mesh.headcni_conflist
"""

EXAMPLES = r"""
- name: Make a pod on each node
  headcni.mesh.headcni_probe:
    state: present
    name: "{{ inventory_hostname }}"
    runtime: true
  register: headcni_probe

- name: Choose who asks whom
  ansible.builtin.set_fact:
    headcni_probe_pairs: "{{ ansible_play_hosts | headcni.mesh.probe_pairs(hostvars) }}"
  run_once: true

- name: See what it reaches
  headcni.mesh.headcni_probe:
    state: tested
    targets: >-
      {{ headcni_probe_pairs.targets[inventory_hostname]
      | map('extract', headcni_probe_pairs.probes) }}
    paths: true
    outside: [headscale, "192.0.2.80:443"]
  register: headcni_probed

- name: Take it away
  headcni.mesh.headcni_probe:
    state: absent
"""

RETURN = r"""
probe:
  description: The pod that was made, for the other nodes.
  type: dict
  returned: state is present
runtime:
  description:
    - C(ok) is true if the container runtime has started a pod, and none if it was not asked.
      C(detail) says which runtime, or why not and what to do about it.
  type: dict
  returned: state is present
  sample: {ok: true, detail: containerd}
reached:
  description:
    - For each target by name, each check with C(ok) and C(detail). C(ok) is none for what was not
      asked.
    - With I(paths), C(path) has C(kind) (V(direct), V(relayed) or V(unknown)), C(through) (an
      endpoint, a peer relay or a DERP region) and C(ms).
  type: dict
  returned: state is tested
beyond:
  description: The checks C(outside), C(service) and C(cluster_dns), in the same form.
  type: dict
  returned: state is tested
found:
  description: What an earlier probe had left here.
  type: list
  elements: str
  returned: state is present or absent
"""

import fcntl
import inspect
import json
import os
import socket
import struct
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ipaddress import ip_address, ip_network

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import (
    kernel,
    node,
    probe,
    probe_cluster,
    probe_cri,
    probe_pod,
)
from ansible_collections.headcni.mesh.plugins.module_utils.shared import conflist, modes
from ansible_collections.headcni.mesh.plugins.module_utils.shared.localapi import (
    LocalAPI,
    LocalAPIError,
)

PROGRAM = os.path.join(probe_pod.HOME, "probe.py")
STATE = os.path.join(probe_pod.HOME, "probe.json")
UNIT = f"{probe_pod.NAME}.service"
PATH_SECONDS = 10  # that a path gets to become a direct one
PING_SECONDS = 3.0
CLUSTER_PATIENCE = 4  # times the timeout
MOST_PLACES = 32
SIOCGIFMTU = 0x8921


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"choices": ["present", "tested", "absent"], "required": True},
            "name": {},
            "cni_conf_dir": {"type": "path", "default": conflist.DIRECTORY},
            "cni_bin_dirs": {
                "type": "list",
                "elements": "path",
                "default": ["/opt/cni/bin"],
            },
            "host_port": {"type": "int", "default": 18473},
            "runtime": {"type": "bool", "default": False},
            "crictl": {"type": "path"},
            "socket": {"type": "path", "default": modes.SOCKETS["host"]},
            "targets": {"type": "list", "elements": "dict", "default": []},
            "paths": {"type": "bool", "default": False},
            "outside": {"type": "list", "elements": "str", "default": []},
            "cluster": {"type": "bool", "default": False},
            "cluster_dns": {"type": "list", "elements": "str", "default": []},
            "timeout": {"type": "int", "default": 15},
            "lifetime": {"type": "int", "default": 600},
        },
    )
    node.refuse_other_platforms(module)
    work = {"present": present, "tested": tested, "absent": absent}[module.params["state"]]
    try:
        module.exit_json(changed=False, **work(module.params))
    except (probe_pod.ProbeError, node.NodeError, LocalAPIError) as problem:
        module.fail_json(msg=str(problem))
    except OSError as problem:
        module.fail_json(msg=f"{problem.filename or 'the probe'}: {problem.strerror or problem}")


def present(given: dict) -> dict:
    conf = in_charge(given["cni_conf_dir"])
    found = take_away()
    os.makedirs(probe_pod.HOME, mode=0o700)
    with open(PROGRAM, "w") as stream:
        stream.write(inspect.getsource(probe_pod))
    state = {"conf": conf, "bin_dirs": given["cni_bin_dirs"], "host_port": given["host_port"]}
    probe_pod.write_state(state)
    keep(given["lifetime"])
    try:
        runtime = probe.outcome(None, "it was not asked")
        sandbox = None
        if given["runtime"]:
            sandbox, runtime = by_runtime(given, state)
        addresses = list(sandbox.addresses) if sandbox else by_plugins(given, state)
    except BaseException:
        with suppress(probe_pod.ProbeError, node.NodeError):
            take_away()
        raise
    status = asked(socket_of(conf, given["socket"]))
    me = status.get("Self") or {}
    mapped = any(plugin.get("capabilities", {}).get("portMappings") for plugin in conf["plugins"])
    described = {
        "node": given["name"] or os.uname().nodename,
        "addresses": addresses,
        "mtu": mtu_of(conf),
        "host_port": given["host_port"] if mapped else 0,
        "host_addresses": [*(status.get("TailscaleIPs") or ()), *underlay()],
        "tailnet_addresses": list(status.get("TailscaleIPs") or ()),
        "tailnet_name": str(me.get("DNSName") or "").rstrip("."),
        "pod_cidrs": pod_cidrs(conf),
    }
    return {"probe": described, "runtime": runtime, "found": found}


def by_runtime(given: dict, state: dict) -> tuple:
    """A pod of the container runtime's, or None; and what can be said of the runtime."""
    try:
        runtime = probe_cri.chosen()
        crictl = probe_cri.command(runtime, given["crictl"] or "")
    except probe_cri.NotCheckedError as problem:
        return None, probe.outcome(None, str(problem))
    not_removed(crictl)  # by an earlier run; the runtime may be able to do so by now
    probe_pod.write_state({**state, "crictl": crictl})
    try:
        sandbox = probe_cri.start(runtime, crictl, given["host_port"])
        see_network(runtime.name, sandbox, state["conf"])
    except probe_cri.NotCheckedError as problem:
        not_removed(crictl)
        return None, probe.outcome(None, str(problem))
    except probe_pod.ProbeError as problem:
        kept = not_removed(crictl)
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


def not_removed(crictl: list[str]) -> str:
    """Have the runtime remove its probes. One that cannot call a plugin to set up a pod cannot call
    it to take the pod down either, and keeps it: then a sentence about that."""
    try:
        probe_pod.remove_sandboxes(crictl)
    except probe_pod.ProbeError as problem:
        return f". The next run of verify.yml tries again to remove what is left: {problem}"
    return ""


def tailnet_servers(conf: dict) -> list[str]:
    """Whom the plugin names to the runtime. Not every runtime shows what it was told."""
    known = ours(conf).get("magic_dns") or {}
    return list(known.get("nameservers") or ()) if known.get("enable") else []


def see_network(runtime: str, sandbox: probe_cri.Sandbox, conf: dict) -> None:
    """Whether the pod has the network that the conflist describes, and not another one."""
    ranges = [ip_network(one) for one in pod_cidrs(conf)]
    foreign = [
        one for one in sandbox.addresses if not any(ip_address(one) in range_ for range_ in ranges)
    ]
    if ranges and foreign:
        raise probe_pod.ProbeError(
            f"{runtime} gave its pod the address {foreign[0]}, which is not in this node's "
            f"{', '.join(map(str, ranges))}: it uses another network or has not read the conflist. "
            f"Next: ansible-playbook … site.yml --tags preflight compares where {runtime} looks "
            f"with where HeadCNI is; or restart {runtime}"
        )
    wanted = mtu_of(conf)
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


def by_plugins(given: dict, state: dict) -> list[str]:
    """A pod by calling the plugins; its addresses."""
    probe_pod.ip("netns", "add", probe_pod.NAME)
    probe_pod.ip("-n", probe_pod.NAME, "link", "set", "lo", "up")
    state = {**state, "by_plugins": True, "netns": probe_pod.netns_path()}
    probe_pod.write_state(state)
    result = probe_pod.add(state["conf"], given["cni_bin_dirs"], given["host_port"])
    addresses = [entry["address"].partition("/")[0] for entry in result["ips"]]
    probe_pod.write_state({**state, "addresses": addresses, "dns": result.get("dns") or {}})
    return addresses


def tested(given: dict) -> dict:
    if not os.path.exists(STATE):
        raise probe_pod.ProbeError("there is no probe on this node: state=present makes one")
    state = probe_pod.read_state()
    api = socket_of(state["conf"], given["socket"])
    places = places_outside(given["outside"], api)
    servers = state.get("dns", {}).get("nameservers") or []
    seconds, targets = given["timeout"], given["targets"]
    pings = [
        echo
        for target in targets
        for echo in probe.echoes(target["node"], target["addresses"], target["mtu"])
    ]

    def in_pod(work):
        try:
            return kernel.apart(work, state["netns"])
        except OSError as problem:
            raise probe_pod.ProbeError(
                f"nothing can be asked from the pod: {problem.strerror}. Run it again; if that "
                f"happens again, see journalctl -u {probe_pod.NAME}"
            ) from None

    answers = in_pod(lambda: probe.ping(pings, seconds))
    results = {target["node"]: {} for target in targets}
    for echo, answer in zip(pings, answers):
        results[echo.target][echo.check] = answer
    peers = list((asked(api, peers=True).get("Peer") or {}).values())
    # Before the first thread here: the C library of Debian 11 ends a child that is forked while a
    # thread is ending.
    dns = in_pod(lambda: at_once(lambda target: names(target, servers, seconds), targets))
    beyond = {}
    if places:
        versions = {ip_address(one).version for one in state["addresses"]}
        beyond["outside"] = outside(places, versions, seconds, in_pod)
    if given["cluster"]:
        beyond.update(cluster(given, state["conf"], in_pod))
    ports = at_once(lambda target: port(target, seconds), targets)
    for target, its_port, its_name in zip(targets, ports, dns):
        results[target["node"]].update(
            route=probe.route(target["pod_cidrs"], target["tailnet_addresses"], peers),
            port=its_port,
            dns=its_name,
        )
    if given["paths"]:
        until = time.monotonic() + min(seconds, PATH_SECONDS)
        ways = at_once(lambda target: way(target, api, until), targets, 64)
        for target, its_way in zip(targets, ways):
            results[target["node"]]["path"] = its_way
    return {"reached": results, "beyond": beyond}


def way(target: dict, api: str, until: float) -> dict:
    if not target["tailnet_addresses"]:
        return {"kind": probe.UNKNOWN, "through": "it has no tailnet address", "ms": None}
    asking = LocalAPI(api, PING_SECONDS)
    return probe.path(lambda: asking.ping(target["tailnet_addresses"][0]), until)


def places_outside(given: list, api: str) -> list:
    """Each with its addresses, or with why it is not tried."""
    if len(given) > MOST_PLACES:
        raise probe_pod.ProbeError(f"outside: {len(given)} places, expected at most {MOST_PLACES}")
    found = []
    for text in given:
        try:
            spot = probe.place(text if text != probe.HEADSCALE else headscale_url(api))
        except ValueError as problem:
            raise probe_pod.ProbeError(f"outside (headcni_verify_outside): {problem}") from None
        try:
            addresses, said = probe.addresses_of(spot.host), ""
        except OSError as problem:
            addresses = []
            said = f"this node does not know the name {spot.host} ({problem.strerror})"
        found.append((text, spot, addresses, said))
    return found


def headscale_url(api: str) -> str:
    return str(LocalAPI(api).prefs().get("ControlURL") or "")


def outside(places: list, versions: set, seconds: int, in_pod) -> dict:
    """What the operator named must answer. The server, which is only our own choice, is not held
    against pods if the node itself does not reach it either."""
    answered, open_questions, wrong = [], [], []
    for text, spot, addresses, said in places:
        own = [one for one in addresses if probe.is_own(one)]
        if text == probe.HEADSCALE and (own or said):
            why = said or f"Headscale ({spot.text}) runs on this node itself"
            open_questions.append(f"{why}: name something else by headcni_verify_outside")
            continue
        result = probe.outcome(False, said or "pods have no address of its family")
        usable = [one for one in addresses if ip_address(one).version in versions]
        if usable:
            result = in_pod(lambda spot=spot, to=usable: probe.reach(to, spot.port, seconds))
        if result["ok"]:
            answered.append(f"{spot.text} ({result['detail']})")
            continue
        by_node = probe.reach(usable, spot.port, 4) if usable else {"ok": False}
        if text == probe.HEADSCALE and not by_node["ok"]:
            open_questions.append(
                f"the node itself does not connect to Headscale ({spot.text}) without a proxy "
                f"either ({result['detail']}): name something else by headcni_verify_outside"
            )
            continue
        node_too = "the node itself does" if by_node["ok"] else "nor does the node itself"
        wrong.append(f"the pod does not reach {spot.text} ({result['detail']}), {node_too}")
    if wrong:
        return probe.outcome(False, "; ".join(wrong))
    if open_questions:
        return probe.outcome(None, "; ".join(open_questions))
    return probe.outcome(True, ", ".join(answered))


def cluster(given: dict, conf: dict, in_pod) -> dict:
    """Nothing, if no kubelet runs here."""
    ranges = listed(ours(conf).get("service_cidr"))
    known = probe_cluster.names(ranges)
    if known is None:
        return {}
    servers = given["cluster_dns"] or known.servers
    if not servers:
        unknown = "kubelet's configuration does not say who resolves names: name the cluster's "
        unknown += "DNS by headcni_verify_cluster_dns"
        return dict.fromkeys(("cluster_dns", "service"), probe.outcome(None, unknown))
    seconds = given["timeout"] * CLUSTER_PATIENCE
    name = f"kubernetes.default.svc.{known.domain}"
    resolved = in_pod(lambda: probe.resolve(name, servers, seconds))
    addresses = resolved.pop("addresses", None) or probe_cluster.kubernetes_service(ranges)
    if not addresses:
        service = probe.outcome(None, f"the address of {name} is not known without DNS")
    else:
        service = in_pod(lambda: probe.reach(addresses, 443, given["timeout"]))
    return {"cluster_dns": resolved, "service": service}


def at_once(work, targets: list, most: int = 16) -> list:
    with ThreadPoolExecutor(max_workers=most) as pool:
        return list(pool.map(work, targets))


def port(target: dict, seconds: int) -> dict:
    if not target["host_port"]:
        return probe.outcome(None, "the conflist does not ask for portMappings")
    return probe.port(target["host_addresses"], target["host_port"], seconds)


def names(target: dict, servers: list, seconds: int) -> dict:
    if not servers:
        return probe.outcome(None, "pods have no nameserver of the tailnet's")
    if not target["tailnet_name"]:
        return probe.outcome(None, "the tailnet gives nodes no names")
    return probe.resolve(target["tailnet_name"], servers, seconds)


def absent(given: dict) -> dict:
    del given
    return {"found": take_away()}


def take_away() -> list[str]:
    """By ending the unit, whose end cleans up; and by hand, if there is none."""
    if node.unit(UNIT).active not in ("inactive", "failed", ""):
        node.order("stop", UNIT)
    return probe_pod.clean()


def keep(seconds: int) -> None:
    """A unit that answers in the pod. Its end, by whatever cause, is the end of the pod."""
    program = [probe_pod.PYTHON, "-IS", PROGRAM]
    command = ["systemd-run", "--quiet", "--collect", f"--unit={UNIT}"]
    command += [f"--property=RuntimeMaxSec={seconds}"]
    command += [f"--property=ExecStopPost={' '.join(program)} clean {probe_pod.HOME}"]
    done = subprocess.run(
        [*command, *program, "serve", probe_pod.HOME],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode != 0:
        raise node.NodeError(f"systemd-run: {done.stderr.strip()}")


def in_charge(directory: str) -> dict:
    picked = conflist.survey(directory).picked()
    if not picked:
        raise probe_pod.ProbeError(f"there is no conflist in {directory}: run site.yml first")
    path = os.path.join(directory, picked)
    with open(path) as stream:
        conf = json.load(stream)
    return conf if "plugins" in conf else {**conf, "plugins": [conf]}


def ours(conf: dict) -> dict:
    return next((one for one in conf["plugins"] if one["type"] == "headcni"), {})


def socket_of(conf: dict, of_the_node: str) -> str:
    configured = ours(conf).get("tailscale_socket")
    if ours(conf).get("mode", "host") == "daemon":
        return modes.socket_of("daemon", configured)
    return configured or of_the_node


def pod_cidrs(conf: dict) -> list[str]:
    """As the conflist has them: those are the pods that there can be."""
    return listed(ours(conf).get("pod_cidr"))


def listed(given) -> list[str]:
    """A list, or the same as text with commas."""
    given = given or []
    return [one.strip() for one in given.split(",")] if isinstance(given, str) else list(given)


def mtu_of(conf: dict) -> int:
    return next((one["mtu"] for one in conf["plugins"] if one.get("mtu")), 1280)


def underlay() -> list[str]:
    """The addresses by which this node would speak to others, apart from the tailnet."""
    found = []
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as one:
                one.connect((far, 9))
                found.append(one.getsockname()[0])
        except OSError:
            continue
    return found


def asked(path: str, peers: bool = False) -> dict:
    deadline = time.monotonic() + 10
    while True:
        try:
            return LocalAPI(path).raw_status(peers)
        except LocalAPIError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


if __name__ == "__main__":
    main()
