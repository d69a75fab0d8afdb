#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Whether a machine can be a node, with everything that stands in the way named at once."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headcni_preflight
short_description: Check that a machine can be a HeadCNI node
version_added: 0.1.0
description:
  - Looks at the node and changes nothing. Every problem is named at once, each with what to do.
  - Checks Python, the kernel (TUN, veth, bridge, nftables, policy routing), libnftables,
    forwarding, systemd, the ports, the clock, the CIDRs, the names of interfaces and the conflist;
    whether the directories can be written to and run from; and whether other CNIs are at work.
  - Compares where the running container runtimes (containerd, that of k3s and RKE2, CRI-O) look for
    plugins and networks with where HeadCNI's are put.
  - Everything that would keep pods from working is a problem. The rest is a note, such as SELinux,
    cgroup version 1, a clock that nobody keeps, and firewalls with what HeadCNI does about them.
  - The controller checks the configuration with the runtime's own code, and that there is a release
    to install.
  - Finds this node's pod CIDR, so that the nodes can be compared before anything is changed.
  - Says which parts of the node are as they should be, so that a playbook can pass them over.
author:
  - The HeadCNI authors (@headcni)
options:
  config:
    description: The daemon's configuration, as for M(headcni.mesh.headcni_config).
    type: dict
    default: {}
  src:
    description: The tarball of the release, as for M(headcni.mesh.headcni_release).
    type: path
  wheels:
    description: The wheels on the controller, as for M(headcni.mesh.headcni_release).
    type: path
  version:
    description: The version of the release, as for M(headcni.mesh.headcni_release).
    type: str
  checksum:
    description: The SHA-256 of its tarball. The controller fills it in.
    type: str
  plugin_dirs:
    description: Where the loopback plugin may be, as for M(headcni.mesh.headcni_release).
    type: list
    elements: path
    default:
      - /usr/lib/cni
      - /usr/libexec/cni
      - /var/lib/rancher/k3s/data/cni
      - /var/lib/rancher/k3s/data/current/bin
  keep:
    description: How many releases to keep, as for M(headcni.mesh.headcni_release).
    type: int
    default: 3
  native_shim:
    description: Whether to use the native shim, as for M(headcni.mesh.headcni_release).
    type: bool
    default: true
    version_added: 0.2.0
  conflist:
    description: The options of M(headcni.mesh.headcni_conflist), but for the pod and cluster CIDRs.
      Without it, that part is not looked at.
    type: dict
  require_pod_cidr:
    description: Whether a guessed pod CIDR is a problem.
    type: bool
    default: false
  awaits_pod_cidr:
    description: Whether the pod CIDR is still to come, from Kubernetes. What would be guessed
      meanwhile is not told.
    type: bool
    default: false
  may_change_pod_cidr:
    description: Whether a node that has another pod CIDR already is no problem.
    type: bool
    default: false
  enable_ipv6:
    description: Whether pods must have IPv6, or must not. By default either is right.
    type: bool
  datapath:
    description: V(bridge) or V(routed).
    type: str
    choices: [bridge, routed]
    default: bridge
  bridge:
    description: The bridge's name.
    type: str
    default: headcni0
  cni_bin_dirs:
    description: Where the container runtime looks for CNI plugins.
    type: list
    elements: path
    default: [/opt/cni/bin]
  cni_conf_dir:
    description: Where the container runtime looks for conflists.
    type: path
    default: /etc/cni/net.d
  bin_dir:
    description: Where C(headcnictl) is linked.
    type: path
    default: /usr/local/bin
  ignore_routes:
    description: Routes of the host that pods may overlap, as CIDRs.
    type: list
    elements: str
    default: []
  min_free_mib:
    description: How much room there must be for releases, in MiB.
    type: int
    default: 128
  max_clock_skew:
    description: By how many seconds the node's clock may differ from the controller's.
    type: int
    default: 60
  now:
    description: The controller's time, in seconds since 1970. The controller fills it in.
    type: float
  report_only:
    description: Whether to return the problems rather than to fail.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    details: It never changes anything.
  diff_mode:
    support: none
    details: There is nothing to compare.
  platform:
    details: It refuses others with a clear message.
    support: full
    platforms: linux
extends_documentation_fragment:
  - headcni.mesh.node
seealso:
  - module: headcni.mesh.headcni_config
  - module: headcni.mesh.headcni_release
"""

EXAMPLES = r"""
- name: See whether these machines can be nodes
  headcni.mesh.headcni_preflight:
    config:
      network:
        podCIDR:
          base: 10.244.0.0/16
"""

RETURN = r"""
problems:
  description: Everything that stands in the way, each with what to do.
  type: list
  elements: str
  returned: always
notes:
  description: Warnings. None of them keeps pods from working; C(site.yml) shows them in the end.
  type: list
  elements: str
  returned: always
pod_cidrs:
  description: This node's pod CIDRs; empty if they cannot be found.
  type: list
  elements: str
  returned: always
pod_cidr_source:
  description: Who said so, V(config), V(env), V(file), V(hash) or V(default).
  type: str
  returned: always
pod_cidr_guessed:
  description: Whether it is a guess.
  type: bool
  returned: always
cluster_cidrs:
  description: The cluster's CIDRs, as given or as the daemon takes them to be.
  type: list
  elements: str
  returned: always
networks:
  description: The networks in the node's main routing table, but for HeadCNI's and Tailscale's.
  type: list
  elements: dict
  returned: always
  sample:
    - {network: 192.168.7.0/24, interface: eth0}
controller:
  description: The address that the controller has logged in from. Empty if it has not come by SSH,
    or has come through the tailnet.
  type: str
  returned: always
mode:
  description: The mode asked for, V(host) or V(daemon).
  type: str
  returned: always
current:
  description: The release in use, with its name, version and digest; none on a fresh node.
  type: dict
  returned: always
settled:
  description: The parts that need nothing, of V(release), V(config) and V(conflist). The module of
    any of them would change nothing, and warn of nothing.
  type: list
  elements: str
  returned: always
"""

import os
import shutil
import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import (
    container_runtimes,
    kernel,
    node,
    node_config,
    node_places,
    node_platform,
    node_release,
    node_settled,
    other_networks,
    package_owner,
    ssh_client,
)
from ansible_collections.headcni.mesh.plugins.module_utils.shared import conflist, podcidr

SYSCTL = {4: "/proc/sys/net/ipv4/ip_forward", 6: "/proc/sys/net/ipv6/conf/all/forwarding"}
FIREWALL_UNITS = {
    "docker.service": "Docker",
    "nftables.service": "nftables.service",
    "netfilter-persistent.service": "netfilter-persistent (iptables)",
}
MOST_NETWORKS = 256  # are told; a router has thousands
OUR_LINKS = ("headcni", "tailscale", "hc")  # by how their names begin


def main() -> None:
    paths = {"type": "list", "elements": "path"}
    module = AnsibleModule(
        argument_spec={
            "config": {"type": "dict", "default": {}},
            "src": {"type": "path"},
            "wheels": {"type": "path"},
            "version": {"type": "str"},
            "checksum": {"type": "str"},
            "plugin_dirs": {**paths, "default": list(node_release.PLUGIN_DIRS)},
            "keep": {"type": "int", "default": 3},
            "native_shim": {"type": "bool", "default": True},
            "conflist": {"type": "dict"},
            "require_pod_cidr": {"type": "bool", "default": False},
            "awaits_pod_cidr": {"type": "bool", "default": False},
            "may_change_pod_cidr": {"type": "bool", "default": False},
            "enable_ipv6": {"type": "bool"},
            "datapath": {"choices": ["bridge", "routed"], "default": "bridge"},
            "bridge": {"default": "headcni0"},
            "cni_bin_dirs": {**paths, "default": ["/opt/cni/bin"]},
            "cni_conf_dir": {"type": "path", "default": conflist.DIRECTORY},
            "bin_dir": {"type": "path", "default": "/usr/local/bin"},
            "ignore_routes": {"type": "list", "elements": "str", "default": []},
            "min_free_mib": {"type": "int", "default": 128},
            "max_clock_skew": {"type": "int", "default": 60},
            "now": {"type": "float"},
            "report_only": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    arrived = time.time()
    node.refuse_other_platforms(module)
    given = module.params
    config = node_config.pruned(given["config"])
    found, wrong = pod_cidrs(config, given)
    own = found.cidrs if found else ()
    interpreter, lacking = python()
    elsewhere, runtime_notes = runtimes(given)
    problems = [
        *wrong,
        *clock(given, arrived),
        *root(),
        *lacking,
        *node_platform.lacks_library(),
        *node_platform.lacks_programs(mode_of(config)),
        *kernel_features(given),
        *forwarding(own),
        *mode(config),
        *services(config),
        *places(given),
        *release(given),
        *names(config, given),
        *(of_ranges(config, own, given) if own else []),
        *elsewhere,
        *other_cnis(given),
    ]
    told = None if given["awaits_pod_cidr"] else found
    current = node_release.current()
    result = {
        "changed": False,
        "problems": problems,
        "notes": [*runtime_notes, *notes(config, own, given), *firewall_notes(config)],
        "pod_cidrs": [str(cidr) for cidr in told.cidrs] if told else [],
        "pod_cidr_source": told.source if told else "",
        "pod_cidr_guessed": bool(told and told.guessed),
        "cluster_cidrs": node_config.cluster_cidrs(config, told.cidrs) if told else [],
        "networks": [
            {"network": str(route.network), "interface": route.interface}
            for route in own_routes(given)[:MOST_NETWORKS]
        ],
        "controller": ssh_client.controller_address(),
        "mode": mode_of(config),
        "current": current.as_dict() if current else None,
        "settled": [] if problems or not told else settled(config, told, given, interpreter),
    }
    if problems and not given["report_only"]:
        count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
        module.fail_json(msg=f"{count} on this node: " + "; ".join(problems), **result)
    module.exit_json(**result)


def pod_cidrs(config: dict, given: dict) -> tuple[podcidr.Resolution | None, list[str]]:
    try:
        found = node_config.resolved(config, os.environ)
    except podcidr.PodCidrError as problem:
        return None, [f"pod CIDR: {problem}"]
    wrong = []
    if found.guessed and given["require_pod_cidr"]:
        wrong.append(
            f"pod CIDR: {podcidr.join(found.cidrs)} is a guess ({found.source}): "
            "set headcni_node_pod_cidr for this node"
        )
    six = any(cidr.version == 6 for cidr in found.cidrs)
    if given["enable_ipv6"] is True and not six:
        wrong.append(
            f"enable_ipv6: true, but {podcidr.join(found.cidrs)} has no IPv6: "
            "give an IPv6 range in headcni_node_pod_cidr or headcni_node_cluster_cidr"
        )
    if given["enable_ipv6"] is False and six:
        wrong.append(
            f"enable_ipv6: false, but {podcidr.join(found.cidrs)} has IPv6: leave it out there"
        )
    return found, wrong


def of_ranges(config: dict, own, given: dict) -> list[str]:
    """What stands in the way of these pod CIDRs on this node."""
    return [
        *former_cidrs(own, given),
        *overlaps(config, own, given),
        *conflists(config, own, given),
        *firewalls(config, own),
    ]


def settled(config: dict, found: podcidr.Resolution, given: dict, interpreter) -> list[str]:
    """The parts that need nothing."""
    parts = []
    wanted = node_release.Wanted(
        bin_dirs=given["cni_bin_dirs"],
        command_dir=given["bin_dir"],
        plugin_dirs=given["plugin_dirs"],
        keep=given["keep"],
        native_shim=given["native_shim"],
    )
    version, checksum = given["version"] or "", given["checksum"] or ""
    if version and node_settled.has_release(version, checksum, wanted, interpreter):
        parts.append("release")
    if node_settled.has_config(config, found):
        parts.append("config")
    ranges = [str(one) for one in found.cidrs], node_config.cluster_cidrs(config, found.cidrs)
    if given["conflist"] and node_settled.has_conflist(given["conflist"], *ranges):
        parts.append("conflist")
    return parts


def conflists(config: dict, own, given: dict, look=node_settled.conflist_mistakes) -> list[str]:
    """What is found in looking at the conflist and its directory."""
    if not given["conflist"]:
        return []
    ranges = [str(one) for one in own], node_config.cluster_cidrs(config, own)
    return look(given["conflist"], *ranges)


def clock(given: dict, arrived: float) -> list[str]:
    if given["now"] is None:
        return []
    skew = arrived - given["now"]
    if abs(skew) <= given["max_clock_skew"]:
        return []
    which = "ahead of" if skew > 0 else "behind"
    return [
        f"clock: {abs(skew):.0f} s {which} the controller's, at most {given['max_clock_skew']} are "
        "allowed: "
        "keys and certificates will be refused; run a time service (chrony, systemd-timesyncd)"
    ]


def root() -> list[str]:
    if os.geteuid() == 0:
        return []
    return [f"user: {os.geteuid()} is not root: set ansible_become to true"]


def python() -> tuple[node_release.Python | None, list[str]]:
    try:
        return node_release.ask_python(), []
    except node_release.ReleaseError as problem:
        return None, [f"python: {problem}"]


def kernel_features(given: dict) -> list[str]:
    kind = node_platform.container()

    def load(name: str) -> str:
        return node_platform.module_fix(name, kind)

    asked = [
        ("TUN devices (/dev/net/tun)", kernel.lacks_tun(), node_platform.tun_fix(kind)),
        ("veth links", kernel.lacks_link("veth"), load("veth")),
        ("nftables", kernel.lacks_nftables(), load("nf_tables")),
        ("policy routing", kernel.lacks_rules(), "use a kernel with IP_MULTIPLE_TABLES"),
    ]
    if given["datapath"] == "bridge":
        asked.append(("bridges", kernel.lacks_link("bridge"), load("bridge")))
    return [f"kernel: no {what}: {why}; {fix}" for what, why, fix in asked if why]


def forwarding(cidrs) -> list[str]:
    wrong = []
    for version in sorted({4, *(cidr.version for cidr in cidrs)}):
        path = SYSCTL[version]
        try:
            with open(path, "r+"):
                pass
        except FileNotFoundError:
            wrong.append(f"forwarding: this kernel has no IPv{version}: leave such ranges out")
        except OSError as problem:
            wrong.append(
                f"forwarding: {path} cannot be written ({problem.strerror}): "
                "the node must be able to forward packets"
            )
    return wrong


def mode(config: dict) -> list[str]:
    """To change it under pods that talk takes more than another configuration."""
    wanted = mode_of(config)
    have = node_config.mode_of(node_config.PATH)
    if have in ("", wanted):
        return []
    return [
        f"mode: this node is in {have} mode, and {wanted} is asked for: switch it with "
        f"playbooks/switch_mode.yml -e headcni_mode={wanted}, which keeps its pods connected"
    ]


def former_cidrs(cidrs, given: dict) -> list[str]:
    """Nor is it enough to give pods' addresses to another node: somebody may have them."""
    if given["may_change_pod_cidr"] or given["awaits_pod_cidr"]:
        return []
    change = node_config.cidr_change(cidrs, node_config.PATH)
    return [f"pod CIDR: {change}"] if change else []


def section(config: dict, name: str) -> dict:
    """Empty if it is none: the configuration's own check says so."""
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def mode_of(config: dict) -> str:
    return section(config, "tailscale").get("mode", "host")


def services(config: dict) -> list[str]:
    """systemd, and the ports that our services want."""
    wrong = []
    if not node.has_systemd():
        wrong.append("systemd: does not run this machine: HeadCNI's services need it")
    monitoring = section(config, "monitoring")
    tailscale = section(config, "tailscale")
    ports = []
    if monitoring.get("enabled", True):
        address = str(monitoring.get("address", "127.0.0.1"))
        ports.append((address, monitoring.get("port", 9001), "tcp", "monitoring_port"))
    if tailscale.get("mode") == "daemon":
        anywhere = "0.0.0.0"  # noqa: S104 – to see who listens, not to listen
        ports.append((anywhere, tailscale.get("port", 41642), "udp", "tailscaled_port"))
    for address, port, protocol, variable in ports:
        if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
            continue  # the configuration's own check says so
        try:
            holder = kernel.port_holder(address, port, protocol)
        except (OSError, OverflowError) as problem:
            wrong.append(f"port: {protocol} {address} port {port} cannot be had: {problem}")
            continue
        # Our own tailscaled is in a namespace of its own, so whoever has its port here is not it.
        if holder and not (protocol == "tcp" and holder.command == "headcni-daemon"):
            wrong.append(
                f"port: {protocol} port {port} is held by {holder}: "
                f"choose another by headcni_node_{variable}"
            )
    return wrong


def places(given: dict) -> list[str]:
    """Room for the release, directories that can be written to, and nobody's files in the way."""
    bin_dirs = given["cni_bin_dirs"]
    wanted = {
        node_release.ROOT: given["min_free_mib"],
        "/etc/headcni": 1,
        "/var/lib/headcni": 8,
        node_release.UNIT_DIR: 1,
        given["cni_conf_dir"]: 1,
        given["bin_dir"]: 1,
        **dict.fromkeys(bin_dirs, 1),
    }
    variables = {
        **dict.fromkeys(bin_dirs, "headcni_node_cni_bin_dirs"),
        given["cni_conf_dir"]: "headcni_node_cni_conf_dir",
        given["bin_dir"]: "headcni_node_bin_dir",
    }
    return [
        *node_places.problems(wanted, variables),
        *node_places.noexec(node_release.ROOT),
        *node_places.in_the_way(
            [*bin_dirs, given["bin_dir"]],
            lambda path: package_owner.package_owner(node.run_bounded, path),
        ),
        *node_places.tailscale(bool(container_runtimes.processes(["tailscaled"]))),
    ]


def release(given: dict) -> list[str]:
    """What stands in the way of one that the controller has not, and of keeping some."""
    wrong = []
    if given["keep"] < node_release.FEWEST:
        wrong.append(
            f"release: keep: {given['keep']}, expected {node_release.FEWEST} or more, "
            "so that one can go back: see headcni_node_release_keep"
        )
    version, there = given["version"] or "", node_release.installed()
    if version and not given["checksum"] and not node_release.find(there, version, ""):
        known = ", ".join(one.name for one in there) or "none"
        wrong.append(
            f"release: version: {version} is not on this node, which has: {known}; "
            "give its tarball by headcni_node_release_src"
        )
    return wrong


def overlaps(config: dict, own, given: dict) -> list[str]:
    wrong = []
    network = section(config, "network")
    for service in cidrs_of(network.get("serviceCIDR")):
        for cidr in own:
            if service.version == cidr.version and service.overlaps(cidr):
                wrong.append(f"pod CIDR: {cidr} overlaps the services' {service}")
    allowed = cidrs_of(given["ignore_routes"])
    cluster = cidrs_of(node_config.cluster_cidrs(config, own))
    for cidr, route in kernel.clashes([*own, *cluster], own_routes(given), allowed):
        if cidr not in own and not route.connected:
            continue
        what = "pod CIDR" if cidr in own else "cluster CIDR"
        text = f"{what}: {cidr} overlaps {route.network}, which this node reaches by "
        if not any(text in said for said in wrong):
            wrong.append(f"{text}{route.interface}{way_out(route)}")
    return wrong


def own_routes(given: dict) -> list[kernel.Route]:
    """The node's, without those of HeadCNI and Tailscale."""
    return kernel.routes(lambda name: name == given["bridge"] or name.startswith(OUR_LINKS))


def way_out(route: kernel.Route) -> str:
    """Whose the network is that a range overlaps, and how to change either side."""
    ours = "choose another range by headcni_node_cluster_cidr or headcni_node_pod_cidr"
    owner = other_networks.owner_of(route.interface)
    if owner is None:
        return f": {ours}, or allow it by headcni_node_ignore_routes: [{route.network}]"
    if owner.name == "flannel's":
        return f", which is {owner.name}: {owner.change}; or {ours}"
    return f", which is {owner.name}: {ours}, or {owner.change}"


def cidrs_of(value) -> list:
    texts = value.split(",") if isinstance(value, str) else value or []
    found = []
    for text in texts:
        try:
            found.append(podcidr.parse_cidr(str(text).strip()))
        except podcidr.PodCidrError:
            continue  # the configuration's own check says so
    return found


def names(config: dict, given: dict) -> list[str]:
    wrong = []
    if given["datapath"] == "bridge" and kernel.is_bridge(given["bridge"]) is False:
        wrong.append(
            f"interface: {given['bridge']} is there and is no bridge: "
            "choose another name by headcni_node_bridge"
        )
    tailscale = section(config, "tailscale")
    mesh = tailscale.get("interfaceName") or "headcni01"
    is_bridge = kernel.is_bridge(mesh)
    if tailscale.get("mode") == "daemon" and is_bridge:
        wrong.append(
            f"interface: {mesh} is there and is a bridge: "
            "choose another name by tailscale.interfaceName in headcni_node_extra_config"
        )
    return wrong


def firewalls(config: dict, own) -> list[str]:
    """Other firewalls that the daemon could not tell to let pods through."""
    if firewall_mode(config) == "none":
        return []
    wrong = []
    if kernel.legacy_filter() and not has_legacy_iptables():
        wrong.append(
            "firewall: rules of iptables-legacy are in force, and the program is not on this node: "
            "install the package iptables"
        )
    if not firewalld_runs():
        return wrong
    for cidr in cidrs_of(node_config.cluster_cidrs(config, own)):
        code, out, _unused = node.run_bounded(["firewall-cmd", f"--get-zone-of-source={cidr}"])
        zone = out.strip()
        if code == 0 and zone not in ("", "trusted"):
            wrong.append(
                f"firewall: firewalld has {cidr}, the pods' addresses, in its zone {zone}: "
                f"firewall-cmd --permanent --zone={zone} --remove-source={cidr}, then "
                "firewall-cmd --reload; or set headcni_node_firewall to none"
            )
    return wrong


def has_legacy_iptables() -> bool:
    if shutil.which("iptables-legacy", path=node_platform.PROGRAMS):
        return True
    plain = shutil.which("iptables", path=node_platform.PROGRAMS)
    if not plain:
        return False
    code, out, _unused = node.run_bounded([plain, "--version"])
    return code == 0 and "nf_tables" not in out


def firewall_mode(config: dict) -> str:
    return section(config, "network").get("firewall") or "auto"


def firewalld_runs() -> bool:
    return node.has_systemd() and node.unit("firewalld.service").active == "active"


def firewall_notes(config: dict) -> list[str]:
    """Which firewalls there are, and what becomes of them."""
    does = "HeadCNI lets pods through it, see docs/firewalls.md"
    if firewall_mode(config) == "none":
        does = "headcni_node_firewall is none, so let pods through it yourself: docs/firewalls.md"
    there = []
    if firewalld_runs():
        there.append("firewalld")
    if "ENABLED=yes" in (node_config.read("/etc/ufw/ufw.conf") or "").split():
        there.append("ufw")
    for unit, name in FIREWALL_UNITS.items():
        if node.has_systemd() and node.unit(unit).active == "active":
            there.append(name)
    return [f"firewall: {name} is active: {does}" for name in there]


def runtimes(given: dict) -> tuple[list[str], list[str]]:
    """What keeps the container runtimes of this node from finding us: problems, and notes."""
    running = container_runtimes.running()
    if not running:
        return [], [
            "container runtime: none runs on this node, so it is not known where it will look for "
            "plugins: once it runs, site.yml --tags preflight compares that"
        ]
    deciding = container_runtimes.of_kubelet(running)
    network = (given["conflist"] or {}).get("name") or "headcni"
    return container_runtimes.compare(
        running, deciding, given["cni_bin_dirs"], given["cni_conf_dir"], network
    )


def other_cnis(given: dict) -> list[str]:
    try:
        return other_networks.rivals(conflist.survey(given["cni_conf_dir"]))
    except OSError:
        return []  # of the directory, which is looked at by itself


def notes(config: dict, own, given: dict) -> list[str]:
    """Nothing that stops us, but that explains what a user may see."""
    return [
        *other_networks.interface_notes(kernel.interfaces()),
        *(conflists(config, own, given, node_settled.conflist_notes) if own else []),
        *node_platform.selinux_notes(),
        *node_platform.cgroup_notes(),
        *node_platform.clock_notes(node_platform.clock_status()),
        *node_platform.program_notes(),
    ]


if __name__ == "__main__":
    main()
