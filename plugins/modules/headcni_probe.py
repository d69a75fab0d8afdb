#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Start a probe pod for a few minutes, test what it reaches, and remove it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headcni_probe
short_description: Test what a pod on this node reaches
version_added: 0.1.0
description:
  - V(present) starts a pod that answers other nodes. With I(runtime) the node's container runtime
    starts it, over CRI. Otherwise the module creates a network namespace and calls the installed
    plugins with the conflist in use, as a container runtime does.
  - V(tested) tests from that pod whether it reaches the pods of other nodes and other addresses.
  - V(measured) sends data from that pod to the pods of other nodes, one after the other, for
    I(seconds) each. Let one node at a time do that.
  - V(absent) removes the pod. A pod that is not removed ends by itself after I(lifetime). The next
    V(present) first removes what an earlier probe has left.
author:
  - The HeadCNI authors (@headcni)
options:
  state:
    description: What to do.
    type: str
    choices: [present, tested, measured, absent]
    required: true
  name:
    description: This node's name in the results. By default its host name.
    type: str
  cni_conf_dir:
    description: The directory of the conflist.
    type: path
    default: /etc/cni/net.d
  cni_bin_dirs:
    description: The directories of the plugins.
    type: list
    elements: path
    default: [/opt/cni/bin]
  host_port:
    description: A host port of the pod. V(0) means none.
    type: int
    default: 18473
  runtime:
    description:
      - Let the node's container runtime start the pod. It is a failure if the runtime does not
        start it or gives it another network.
      - If this cannot be tried, because no runtime runs, crictl is missing, or the pause image is
        not on the node, RV(runtime) says so and the module calls the plugins instead. It never
        downloads an image.
      - kubelet ends pods that it has not started. If it runs, the runtime starts a pod only for a
        moment, and the module then starts another pod by calling the plugins.
    type: bool
    default: false
  crictl:
    description: The path of crictl, if it is neither on the usual paths nor next to the runtime.
    type: path
  socket:
    description: The socket of the node's own tailscaled, which carries the mesh in host mode.
    type: path
    default: /run/tailscale/tailscaled.sock
  targets:
    description:
      - The values of RV(probe) that V(present) returned on other nodes. For V(tested) and
        V(measured).
    type: list
    elements: dict
    default: []
  paths:
    description: Whether to find out the path to each target, direct or relayed. For V(tested).
    type: bool
    default: false
  pings:
    description:
      - How many pings to send to each target that answers, to count how many are lost. More than
        10 % is a failure. V(0) leaves this out. For V(tested).
    type: int
    default: 0
  seconds:
    description: How many seconds to send data to each target. For V(measured).
    type: int
    default: 2
  outside:
    description:
      - Places outside of the cluster. The pod must reach all of them. For V(tested).
      - C(ADDRESS:PORT), C(NAME:PORT) or a URL means a TCP connection, C(ADDRESS) or C(NAME) a ping.
        The node itself resolves names. V(headscale) is the server that the node has joined.
    type: list
    elements: str
    default: []
  cluster:
    description:
      - If a kubelet runs, resolve the service C(kubernetes) with the cluster's DNS and connect to
        it. For V(tested).
    type: bool
    default: false
  cluster_dns:
    description: The addresses of the cluster's DNS, if kubelet's configuration has none.
    type: list
    elements: str
    default: []
  timeout:
    description:
      - How many seconds to try. The cluster's DNS and service get four times as many, because the
        cluster's DNS can start only when the network works.
    type: int
    default: 15
  lifetime:
    description: After how many seconds the pod ends by itself.
    type: int
    default: 600
attributes:
  check_mode:
    support: none
    details: The task is skipped in check mode.
  diff_mode:
    support: none
    details: There is nothing to compare.
extends_documentation_fragment:
  - headcni.mesh.node
seealso:
  - module: headcni.mesh.headcni_conflist
"""

EXAMPLES = r"""
- name: Start a probe pod on each node
  headcni.mesh.headcni_probe:
    state: present
    name: "{{ inventory_hostname }}"
    runtime: true
  register: headcni_probe

- name: Choose the pairs of pods to test
  ansible.builtin.set_fact:
    headcni_probe_pairs: "{{ ansible_play_hosts | headcni.mesh.probe_pairs(hostvars) }}"
  run_once: true

- name: Test what the pod reaches
  headcni.mesh.headcni_probe:
    state: tested
    targets: >-
      {{ headcni_probe_pairs.targets[inventory_hostname]
      | map('extract', headcni_probe_pairs.probes) }}
    paths: true
    outside: [headscale, "192.0.2.80:443"]
  register: headcni_probed

- name: Measure the throughput, one node at a time
  headcni.mesh.headcni_probe:
    state: measured
    targets: >-
      {{ headcni_probe_pairs.measured[inventory_hostname]
      | map('extract', headcni_probe_pairs.probes) }}
  throttle: 1
  register: headcni_measured

- name: Remove the probe pod
  headcni.mesh.headcni_probe:
    state: absent
"""

RETURN = r"""
probe:
  description: The pod, as O(targets) of other nodes takes it.
  type: dict
  returned: state is present
runtime:
  description:
    - C(ok) is true if the container runtime has started a pod, and none if it was not asked.
      C(detail) names the runtime, or the reason and what to do about it.
  type: dict
  returned: state is present
  sample: {ok: true, detail: containerd}
reached:
  description:
    - The results of each check by target, each with C(ok) and C(detail). C(ok) is none for a check
      that was not made.
    - With I(paths), C(path) has C(kind) (V(direct), V(relayed) or V(unknown)), C(through) (an
      endpoint, a peer relay or a DERP region) and C(ms).
    - C(mtu) is the size of the packets of C(mtu4) and C(mtu6).
    - With I(pings), C(loss) also has C(percent), and C(ms), the median of the answers.
  type: dict
  returned: state is tested
throughput:
  description:
    - The result by target, with C(ok), C(detail) and C(mbit), which are Mbit/s as the target has
      counted them. V(null) if it could not be measured.
  type: dict
  returned: state is measured
beyond:
  description: The checks C(outside), C(service) and C(cluster_dns), in the same form.
  type: dict
  returned: state is tested
found:
  description: What an earlier probe had left on this node.
  type: list
  elements: str
  returned: state is present or absent
"""

import inspect
import os
import time
from contextlib import suppress
from functools import partial
from ipaddress import ip_address

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import kernel, node, probe_start
from ansible_collections.headcni.mesh.plugins.module_utils.shared import (
    conflist,
    modes,
    probe,
    probe_checks,
    probe_conflist,
    probe_pod,
)
from ansible_collections.headcni.mesh.plugins.module_utils.shared.localapi import (
    LocalAPI,
    LocalAPIError,
)

STATE = os.path.join(probe_pod.HOME, "probe.json")
PATH_SECONDS = 10  # how long a path may take to become direct


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"choices": ["present", "tested", "measured", "absent"], "required": True},
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
            "pings": {"type": "int", "default": 0},
            "seconds": {"type": "int", "default": 2},
            "outside": {"type": "list", "elements": "str", "default": []},
            "cluster": {"type": "bool", "default": False},
            "cluster_dns": {"type": "list", "elements": "str", "default": []},
            "timeout": {"type": "int", "default": 15},
            "lifetime": {"type": "int", "default": 600},
        },
    )
    node.refuse_other_platforms(module)
    work = {"present": present, "tested": tested, "measured": measured, "absent": absent}
    try:
        module.exit_json(changed=False, **work[module.params["state"]](module.params))
    except (probe_pod.ProbeError, node.NodeError, LocalAPIError) as problem:
        module.fail_json(msg=str(problem))
    except OSError as problem:
        module.fail_json(msg=f"{problem.filename or 'the probe'}: {problem.strerror or problem}")


def present(given: dict) -> dict:
    with probe_start.alone():
        return start(given)


def start(given: dict) -> dict:
    conf = probe_conflist.in_use(given["cni_conf_dir"])
    found = probe_pod.stop()
    os.makedirs(probe_pod.HOME, mode=0o700)
    with open(probe_start.PROGRAM, "w") as stream:
        stream.write(inspect.getsource(probe_pod))
    state = {"conf": conf, "bin_dirs": given["cni_bin_dirs"], "host_port": given["host_port"]}
    probe_pod.write_state(state)
    probe_pod.serve_in_a_unit(probe_start.PROGRAM, probe_pod.HOME, given["lifetime"])
    try:
        runtime = probe.outcome(None, "it was not asked")
        sandbox = None
        if given["runtime"]:
            sandbox, runtime = probe_start.by_runtime(given, state)
        addresses = list(sandbox.addresses) if sandbox else probe_pod.by_plugins(state)["addresses"]
    except BaseException:
        with suppress(probe_pod.ProbeError, node.NodeError):
            probe_pod.stop()
        raise
    status = status_of(probe_conflist.socket_of(conf, given["socket"]))
    me = status.get("Self") or {}
    mapped = any(plugin.get("capabilities", {}).get("portMappings") for plugin in conf["plugins"])
    described = {
        "node": given["name"] or os.uname().nodename,
        "addresses": addresses,
        "mtu": probe_conflist.mtu_of(conf),
        "host_port": given["host_port"] if mapped else 0,
        "host_addresses": [*(status.get("TailscaleIPs") or ()), *probe.own_addresses()],
        "tailnet_addresses": list(status.get("TailscaleIPs") or ()),
        "tailnet_name": str(me.get("DNSName") or "").rstrip("."),
        "pod_cidrs": probe_conflist.pod_cidrs(conf),
    }
    return {"probe": described, "runtime": runtime, "found": found}


def started() -> dict:
    if not os.path.exists(STATE):
        raise probe_pod.ProbeError("there is no probe on this node: run state=present first")
    return probe_pod.read_state()


def in_the_pod(state: dict, work):
    try:
        return kernel.apart(work, state["netns"])
    except OSError as problem:
        raise probe_pod.ProbeError(
            f"nothing can be asked from the pod: {problem.strerror}. Run it again; if that "
            f"happens again, see journalctl -u {probe_pod.NAME}"
        ) from None


def tested(given: dict) -> dict:
    state = started()
    in_pod = partial(in_the_pod, state)
    api = probe_conflist.socket_of(state["conf"], given["socket"])
    places = probe_checks.places_outside(given["outside"], api)
    servers = state.get("dns", {}).get("nameservers") or []
    seconds, targets = given["timeout"], given["targets"]
    pings = [
        echo
        for target in targets
        for echo in probe.echoes(target["node"], target["addresses"], target["mtu"])
    ]

    answers = in_pod(lambda: probe.ping(pings, seconds))
    results = {target["node"]: {"mtu": target["mtu"]} for target in targets}
    for echo, answer in zip(pings, answers):
        results[echo.target][echo.check] = answer
    if given["pings"]:
        good = {
            echo.target: echo
            for echo, answer in reversed(list(zip(pings, answers)))
            if answer["ok"] and not echo.size
        }
        lost = in_pod(lambda: probe.quality(list(good.values()), given["pings"])) if good else []
        for name, loss in zip(good, lost):
            results[name]["loss"] = loss
    peers = list((status_of(api, peers=True).get("Peer") or {}).values())
    # Before the first thread: the C library of Debian 11 ends a child process that is forked
    # while a thread is ending.
    dns = in_pod(
        lambda: probe_checks.at_once(
            lambda target: probe_checks.names(target, servers, seconds), targets
        )
    )
    beyond = {}
    if places:
        versions = {ip_address(address).version for address in state["addresses"]}
        beyond["outside"] = probe_checks.outside(places, versions, seconds, in_pod)
    if given["cluster"]:
        beyond.update(probe_checks.cluster(given, state["conf"], in_pod))
    ports = probe_checks.at_once(lambda target: probe_checks.port(target, seconds), targets)
    for target, its_port, its_name in zip(targets, ports, dns):
        results[target["node"]].update(
            route=probe.route(target["pod_cidrs"], target["tailnet_addresses"], peers),
            port=its_port,
            dns=its_name,
        )
    if given["paths"]:
        until = time.monotonic() + min(seconds, PATH_SECONDS)
        paths = probe_checks.at_once(
            lambda target: probe_checks.path(target, api, until), targets, 64
        )
        for target, its_path in zip(targets, paths):
            results[target["node"]]["path"] = its_path
    return {"reached": results, "beyond": beyond}


def measured(given: dict) -> dict:
    state = started()
    found = {}
    for target in given["targets"]:
        address, port = target["addresses"][0], probe_pod.DATA_PORT
        send = partial(probe.throughput, address, port, given["seconds"])
        try:
            found[target["node"]] = in_the_pod(state, send)
        except probe_pod.ProbeError as problem:
            found[target["node"]] = {**probe.outcome(False, str(problem)), "mbit": None}
    return {"throughput": found}


def absent(given: dict) -> dict:
    del given
    with probe_start.alone():
        return {"found": probe_pod.stop()}


def status_of(path: str, peers: bool = False) -> dict:
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
