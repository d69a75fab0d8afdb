"""The lab's wires: a switch in a namespace of its own, a port for each node, a way out.

The host gets one interface and nothing else: no forwarding, no firewall rule. What nodes send
to the outside is translated by slirp4netns, an ordinary process, so they reach what the host
reaches and no more.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import subprocess
import time
from pathlib import Path
from typing import Iterable

from .cgroups import Cgroup
from .layout import Lab, LabError, Plan, is_vm
from .run import run

BRIDGE = "br0"
UPLINK = "uplink"
TAP = "tap0"  # where QEMU plugs a virtual machine in
FORWARDING = ("net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding")
SLIRP_DNS = "10.0.2.3"  # slirp4netns answers there, in the namespace it serves
SLIRP_NETWORK = ipaddress.ip_network("10.0.2.0/24")
SWITCH_RULES = f"""
table inet lab {{
    chain postrouting {{
        type nat hook postrouting priority srcnat
        oifname "{UPLINK}" masquerade
    }}
}}
table bridge lab {{
    set cut {{ type ifname; }}
    chain forward {{
        type filter hook forward priority filter
        iifname @cut drop
        oifname @cut drop
    }}
    chain input {{
        type filter hook input priority filter
        iifname @cut drop
    }}
    chain output {{
        type filter hook output priority filter
        oifname @cut drop
    }}
}}
"""


def _ip(command: str, netns: str = "") -> str:
    where = ("-n", netns) if netns else ()
    return run("ip", *where, *command.split()).stdout


def _ip_batch(commands: str, netns: str = "") -> None:
    where = ("-n", netns) if netns else ()
    run("ip", *where, "-batch", "-", stdin=commands)


def _in_switch(lab: Lab, *argv: str, stdin: str | None = None) -> None:
    run("ip", "netns", "exec", lab.switch, *argv, stdin=stdin)


def _forward(netns: str, on: bool) -> None:
    """A new namespace inherits the host's setting, so it is said either way."""
    write = f"for path; do echo {int(on)} > /proc/sys/$path; done"
    run("ip", "netns", "exec", netns, "sh", "-c", write, "sh", *FORWARDING)


def host_networks() -> list[ipaddress.IPv4Network]:
    """Every network that a route or an address of the host uses, the default route aside."""
    words = _ip("-4 route show table all").split() + _ip("-4 -o addr show").split()
    found = []
    for word in words:
        try:
            network = ipaddress.ip_network(word, strict=False)
        except ValueError:
            continue
        if isinstance(network, ipaddress.IPv4Network) and network.prefixlen > 0:
            found.append(network)
    return found


def choose_underlay(wanted: str = "") -> ipaddress.IPv4Network:
    """A private /24 that no route of the host uses.

    Private by need: tailscaled speaks plain http to a control server only on RFC 1918 addresses.
    """
    taken = [*host_networks(), SLIRP_NETWORK]
    if wanted:
        try:
            network = ipaddress.IPv4Network(wanted)
        except ValueError as problem:
            raise LabError(f"UNDERLAY={wanted} is not a network: {problem}") from None
        private = any(network.subnet_of(ipaddress.IPv4Network(n)) for n in _PRIVATE)
        if network.prefixlen != 24 or not private:
            raise LabError(f"UNDERLAY={wanted}: give a /24 of 10/8, 172.16/12 or 192.168/16")
        if clash := next((t for t in taken if t.overlaps(network)), None):
            raise LabError(
                f"UNDERLAY={wanted} clashes with {clash}, which this host already routes: "
                "choose another /24, or leave UNDERLAY out and the lab finds a free one"
            )
        return network
    for candidate in _candidates():
        if not any(t.overlaps(candidate) for t in taken):
            return candidate
    raise LabError(
        "every private /24 the lab knows is routed by this host: name a free one with UNDERLAY="
    )


_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")


def _candidates() -> Iterable[ipaddress.IPv4Network]:
    # Away from 10.42–10.43 (k3s), 10.96 (kubeadm), 10.244 (pods) and 172.17 (docker).
    for base in ("172.30.0.0/16", "10.213.0.0/16", "192.168.128.0/17"):
        yield from ipaddress.IPv4Network(base).subnets(new_prefix=24)


def underlay6(lab: Lab) -> ipaddress.IPv6Network:
    return ipaddress.IPv6Network(f"fd{lab.id[:2]}:{lab.id[2:]}::/64")


def build_switch(lab: Lab, plan: Plan) -> None:
    _ip(f"netns add {lab.switch}")
    _ip_batch(
        f"""
        link set lo up
        link add {BRIDGE} type bridge
        addr add {plan.gateway}/24 dev {BRIDGE}
        addr add {plan.gateway6}/64 dev {BRIDGE} nodad
        link set {BRIDGE} up
        """,
        netns=lab.switch,
    )
    _ip(f"link add {lab.host_link} type veth peer name host netns {lab.switch}")
    _ip(f"link set host master {BRIDGE} up", netns=lab.switch)
    _ip_batch(
        f"""
        addr add {plan.host}/24 dev {lab.host_link}
        addr add {plan.host6}/64 dev {lab.host_link} nodad
        link set {lab.host_link} up
        """
    )
    _forward(lab.switch, on=True)
    _in_switch(lab, "nft", "-f", "-", stdin=SWITCH_RULES)


def start_uplink(lab: Lab) -> None:
    group = Cgroup(lab.prefix, "uplink")
    group.create()
    log = lab.dir / "uplink.log"
    with log.open("w") as out:
        subprocess.Popen(
            [
                "slirp4netns",
                "--configure",
                "--mtu=1500",
                "--disable-host-loopback",
                "--netns-type=path",
                f"/run/netns/{lab.switch}",
                UPLINK,
            ],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=group.enter,
        )
    deadline = time.monotonic() + 15
    while "default" not in _ip("route", lab.switch):
        if time.monotonic() > deadline:
            raise LabError(f"slirp4netns did not come up: see {log}")
        time.sleep(0.05)


def mac(lab: Lab, machine: str) -> str:
    """The same for each boot, as a real card's: neighbours remember it."""
    digest = hashlib.sha256(lab.netns(machine).encode()).digest()
    return ":".join(f"{byte:02x}" for byte in (0x02, *digest[:5]))


def plug(lab: Lab, plan: Plan, machine: str) -> None:
    """Make the machine's namespace and wire it to the switch; a port is named after its machine.

    A node lives in its namespace. A virtual machine has a card of its own, and in the namespace is
    no more than the way from that to the cable.
    """
    netns = lab.netns(machine)
    address = "" if is_vm(machine) else f"address {mac(lab, machine)}"
    _ip(f"netns add {netns}")
    _forward(netns, on=False)
    _ip(f"link add eth0 {address} type veth peer name {machine} netns {lab.switch}", netns)
    _ip(f"link set {machine} master {BRIDGE} up", lab.switch)
    if is_vm(machine):
        _ip_batch(
            f"""
            link add {BRIDGE} type bridge
            tuntap add {TAP} mode tap
            link set {TAP} master {BRIDGE} up
            link set eth0 master {BRIDGE} up
            link set {BRIDGE} addrgenmode none up
            """,
            netns,
        )
        return
    _ip_batch(
        f"""
        link set lo up
        addr add {plan.address(machine)}/24 dev eth0
        addr add {plan.address6(machine)}/64 dev eth0 nodad
        link set eth0 up
        route add default via {plan.gateway}
        route add default via {plan.gateway6}
        """,
        netns,
    )


def cut(lab: Lab, machine: str, silent: bool) -> None:
    """Pull the cable; or, silently, lose every packet while the link stays up."""
    if silent:
        _in_switch(lab, "nft", f'add element bridge lab cut {{ "{machine}" }}')
    else:
        _ip(f"link set {machine} down", lab.switch)


def heal(lab: Lab, plan: Plan, machine: str) -> None:
    """Undo cut and slow, whichever of them there was."""
    _ip(f"link set {machine} up", lab.switch)
    element = f'element bridge lab cut {{ "{machine}" }}'
    _in_switch(lab, "nft", f"add {element}; delete {element}")
    for netns, link in _cable(lab, machine):
        run("tc", "-n", netns, "qdisc", "del", "dev", link, "root", check=False)
    if is_vm(machine):
        return
    for gateway in (plan.gateway, plan.gateway6):  # a link that went down took them along
        _ip(f"route replace default via {gateway}", lab.netns(machine))


def slow(lab: Lab, machine: str, rate: str) -> None:
    """A token bucket on both ends of the node's cable."""
    bucket = f"tbf rate {rate} burst 32kb latency 400ms".split()
    for netns, link in _cable(lab, machine):
        run("tc", "-n", netns, "qdisc", "replace", "dev", link, "root", *bucket)


def _cable(lab: Lab, machine: str) -> tuple[tuple[str, str], ...]:
    return ((lab.switch, machine), (lab.netns(machine), "eth0"))


def netns_in_use(lab: Lab) -> list[str]:
    """Every namespace that carries this lab's name."""
    try:
        return sorted(n for n in os.listdir("/run/netns") if n.startswith(lab.prefix + "-"))
    except FileNotFoundError:
        return []


def unplug(lab: Lab, machine: str) -> None:
    """The cable first: the kernel takes its time to clear a namespace that is gone."""
    run("ip", "-n", lab.switch, "link", "del", machine, check=False)
    _remove_namespace(lab.netns(machine))


def _remove_namespace(name: str) -> None:
    if (path := Path("/run/netns", name)).exists():
        run("ip", "netns", "del", name, check=False)
        path.unlink(missing_ok=True)  # there still if a kill fell between the file and its mount


def remove(lab: Lab) -> None:
    for name in netns_in_use(lab):
        _remove_namespace(name)
    if Path("/sys/class/net", lab.host_link).exists():  # its other end never got its namespace
        run("ip", "link", "del", lab.host_link, check=False)
