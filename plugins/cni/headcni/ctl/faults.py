"""The faults of this node itself that ``headcnictl diagnose`` looks for: each a function that
yields what it has found. Those of the mesh are in mesh_faults.py."""

from __future__ import annotations

import http.client
import json
import math
import os
import shlex
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from typing import Any, Dict, Optional, Tuple
from urllib.parse import urlsplit

from .. import settings as configuration
from ..datapath import firewall, host_firewall, netns
from ..errors import CniError
from ..ipam.allocate import Ipam
from ..mesh import pod_traffic
from ..mesh.localapi import LocalApi
from ..settings import DaemonConfig
from ..shared import conflist, container_runtimes
from ..shared.node_status import span
from ..shared.podcidr import PodCidrError
from ..store import Attachment, Store
from . import drops, node
from .daemon_client import daemon_status
from .finding import CONTROLLER, SITE, Finding

FORWARDING = {4: "net.ipv4.ip_forward", 6: "net.ipv6.conf.all.forwarding"}
CLOCK_SECONDS = 60.0
TIMESYNCD = "/usr/lib/systemd/systemd-timesyncd"
HTTP_SECONDS = 3.0
DNS_SECONDS = 3.0
TAILNET_RESOLVERS = ("100.100.100.100", "fd7a:115c:a1e0::53")
MOST_RESOLVERS = 4
LEAK_SECONDS = 61.0  # a second more than the daemon's GRACE_SECONDS


def daemon(config: DaemonConfig) -> Iterator[Finding]:
    """Only whether it answers; what it reports comes last, because other faults cause it."""
    try:
        daemon_status(configuration.control_path(config))
    except CniError as problem:
        yield Finding(
            "daemon-down",
            str(problem),
            "pods keep their network, but nothing repairs routes, rules and firewalls, and new "
            "pods start more slowly",
            "systemctl restart headcni-daemon",
        )


def conditions(config: DaemonConfig) -> Iterator[Finding]:
    try:
        status = daemon_status(configuration.control_path(config))
    except CniError:
        return  # this is a finding of its own
    for condition in status["conditions"]:
        if not condition["ok"]:
            yield Finding(
                f"condition-{condition['name']}",
                f"{condition['name']}: {condition['reason']}",
                "the daemon does not call the node ready",
            )


def forwarding(config: DaemonConfig) -> Iterator[Finding]:
    for version, name in FORWARDING.items():
        path = name.replace(".", "/")
        if version in versions(config) and netns.read_sysctl(path) == "0":
            yield Finding(
                f"forwarding-off-ipv{version}",
                f"{name} is 0",
                "the kernel drops every packet between pods and other machines",
                f"sysctl -w {name}=1",
            )


def clock(config: DaemonConfig) -> Iterator[Finding]:
    """By what Headscale's server says the time is."""
    url = config.headscale.url
    if not url:
        with suppress(CniError):  # which is a finding of its own
            url = str(LocalApi(config.tailscale.socket_path).prefs().get("ControlURL") or "")
    theirs = time_of(url)
    if theirs is None:
        return
    ahead = time.time() - theirs
    if abs(ahead) >= CLOCK_SECONDS:
        way = "ahead of" if ahead > 0 else "behind"
        yield Finding(
            "clock-wrong",
            f"the clock is {span(abs(ahead))} {way} the one of {url}",
            "certificates, keys and tokens count as expired or not yet valid"
            + (
                "" if _time_service() else ". No time service is installed: install chrony, for one"
            ),
            _time_service() or f"date -s @{theirs:.0f}",
        )


def _time_service() -> str:
    """The command that has this node's time service set the clock; empty if it has none."""
    if shutil.which("chronyc"):
        return "systemctl restart chronyd && chronyc waitsync 10 && chronyc makestep"
    if os.path.exists(TIMESYNCD):
        return "timedatectl set-ntp true && systemctl restart systemd-timesyncd"
    return ""


def time_of(url: str) -> Optional[float]:
    """The time that a web server sends with its answers; None if it cannot be asked."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    made: http.client.HTTPConnection
    if parts.scheme == "http":
        made = http.client.HTTPConnection(parts.hostname, parts.port, timeout=HTTP_SECONDS)
    else:
        import ssl

        # A wrong clock makes every certificate invalid, and nothing is sent but this question.
        unchecked = ssl._create_unverified_context()  # noqa: S323
        made = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=HTTP_SECONDS, context=unchecked
        )
    with closing(made):
        try:
            made.request("HEAD", "/health")
            said = made.getresponse().getheader("Date") or ""
            return parsedate_to_datetime(said).timestamp()
        except (OSError, http.client.HTTPException, ValueError, TypeError):
            return None


def pod_cidr(config: DaemonConfig) -> Iterator[Finding]:
    try:
        resolution = configuration.pod_cidrs(config)
    except PodCidrError as problem:
        yield Finding(
            "no-pod-cidr", str(problem), "no pod can start on this node", SITE, CONTROLLER
        )
        return
    if resolution.guessed:
        shown = ", ".join(map(str, resolution.cidrs))
        yield Finding(
            "pod-cidr-guessed",
            f"{shown} is a guess ({resolution.source}): set network.podCIDR.nodeLocal",
            "another node may have guessed the same",
        )


def conflist_directory(root: str = "/") -> str:
    """Where this node's conflists are: the running container runtime's directory if our conflist is
    there, or else the usual one."""
    for runtime in container_runtimes.of_kubelet(container_runtimes.running(root), root):
        if os.path.exists(os.path.join(root, runtime.conf_dir.lstrip("/"), conflist.NAME)):
            return runtime.conf_dir
    return conflist.DIRECTORY


def conflists(config: DaemonConfig, directory: str) -> Iterator[Finding]:
    seen = conflist.survey(directory)
    picked = seen.picked()
    if not picked:
        yield Finding(
            "no-conflist",
            f"there is no conflist in {directory}",
            "the container runtime can start no pod",
            f"headcnictl conflist write --directory {shlex.quote(directory)}",
        )
        return
    if picked != conflist.NAME:
        path = shlex.quote(os.path.join(directory, picked))
        yield Finding(
            "other-conflist",
            f"{picked} is in charge of {directory}, not {conflist.NAME}",
            "new pods get another network",
            f"mv {path} {path}{conflist.SUFFIX}"
            if conflist.NAME in seen.files
            else f"headcnictl conflist write --directory {shlex.quote(directory)}",
        )
        return
    wrong = stale(seen.files[picked], config)
    if wrong:
        yield Finding(
            "stale-conflist",
            f"{picked} is out of date: {wrong}",
            "new pods get an address or a path that this node does not have",
            SITE,
            CONTROLLER,
        )


def runtimes(config: DaemonConfig, directory: str, root: str = "/") -> Iterator[Finding]:
    """Container runtimes that look for plugins or conflists where HeadCNI's are not."""
    del config
    for runtime in container_runtimes.of_kubelet(container_runtimes.running(root), root):
        if not runtime.certain:
            continue
        places = [os.path.join(root, folder.lstrip("/")) for folder in runtime.bin_dirs]
        if not any(os.access(os.path.join(place, "headcni"), os.X_OK) for place in places):
            wanted = json.dumps([*container_runtimes.BIN_DIRS, runtime.bin_dirs[0].rstrip("/")])
            given = shlex.quote(f'{{"headcni_node_cni_bin_dirs": {wanted}}}')
            yield Finding(
                "runtime-elsewhere",
                f"{runtime.name} looks for plugins in {', '.join(runtime.bin_dirs)} "
                f"({runtime.source or 'its default'}), where there is no headcni",
                "no new pod can start. Keep the variable of the command in your inventory",
                f"{SITE} -e {given}",
                CONTROLLER,
            )
        if os.path.realpath(runtime.conf_dir) != os.path.realpath(directory):
            yield Finding(
                "runtime-elsewhere",
                f"{runtime.name} looks for networks in {runtime.conf_dir} "
                f"({runtime.source or 'its default'}), and HeadCNI's conflist is in {directory}",
                "new pods do not get this network. Keep the variable of the command in your "
                "inventory",
                f"{SITE} -e headcni_node_cni_conf_dir={shlex.quote(runtime.conf_dir)}",
                CONTROLLER,
            )


def stale(content: bytes, config: DaemonConfig) -> str:
    """What our conflist says otherwise than the daemon's configuration; empty if nothing."""
    try:
        plugin = json.loads(content)["plugins"][0]
        have = plugin.get("pod_cidr") or []
    except (ValueError, LookupError, AttributeError, TypeError):
        return "it is not a valid conflist"
    if plugin.get("type") != "headcni":
        return ""
    have = [have] if isinstance(have, str) else have
    try:
        want = [str(cidr) for cidr in configuration.pod_cidrs(config).cidrs]
    except PodCidrError:
        return ""
    for name, said, wanted in (
        ("pod_cidr", sorted(map(str, have)), sorted(want)),
        ("mode", plugin.get("mode", "host"), config.tailscale.mode),
        ("mtu", plugin.get("mtu", config.network.mtu), config.network.mtu),
    ):
        if said != wanted:
            return f"{name} is {_shown(said)}, and the daemon has {_shown(wanted)}"
    return ""


def _shown(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)


def pool(config: DaemonConfig) -> Iterator[Finding]:
    with Store.in_directory(config.daemon.data_dir) as store:
        ipam = Ipam(store)
        usages = [usage for network in store.attachment_counts() for usage in ipam.usage(network)]
        dead = [one for one in store.attachments() if is_gone(one.netns)]
    for usage in usages:
        if usage.free > 0:
            continue
        yield Finding(
            "pool-full",
            f"network {usage.network} has no free address in {', '.join(usage.subnets)}",
            "no new pod can start on this node. "
            + (
                f"{len(dead)} addresses are of pods that are gone; the command releases them"
                if dead
                else "headcnictl ipam --list shows who has them; delete pods, or give the node a "
                "larger range with playbooks/change_pod_cidr.yml"
            ),
            release(dead) if dead else "headcnictl ipam --list",
        )


def is_gone(path: str) -> bool:
    """Whether a pod's network namespace is gone."""
    return bool(path) and not os.path.exists(path)


def release(gone: Sequence[Attachment]) -> str:
    """The command for networks of pods that are gone. The daemon spares those that are younger than
    its grace, because their ADD may not have ended."""
    young = math.ceil(max(one.created for one in gone) + LEAK_SECONDS - time.time())
    return (f"sleep {young} && " if young > 0 else "") + "systemctl restart headcni-daemon"


def filters(config: DaemonConfig) -> Iterator[Finding]:
    with Store.in_directory(config.daemon.data_dir) as store:
        if store.attachments() and not firewall.is_whole(store):
            yield Finding(
                "nft-table",
                "the nft table is not as the store has it; the daemon repairs it",
                "pods' addresses are not masqueraded, and host ports do not work",
                "systemctl restart headcni-daemon",
            )
    for other in firewalls(config):
        if other.missing or other.problem:
            yield blocking(other, config)


def blocking(other: host_firewall.Found, config: DaemonConfig) -> Finding:
    told = config.network.firewall == "auto"
    what = "tailnet peers" if other.blocks_node else "pods"
    fix = "the daemon tells it" if told else f"network.firewall is none: allow {what} there"
    means = (
        "this node does not answer tailnet peers"
        if other.blocks_node
        else ("packets of pods are dropped")
    )
    return Finding(
        "firewall-blocks",
        f"{other.in_words()}; {fix}, see docs/firewalls.md",
        means,
        "systemctl restart headcni-daemon" if told else _allow(other, config),
    )


def _allow(other: host_firewall.Found, config: DaemonConfig) -> str:
    """The rules for an operator who keeps the firewall, as docs/firewalls.md has them."""
    bridge = config.network.bridge
    hooks = {chain.hook for chain in other.blocks}
    if other.problem or other.blocks_node or "forward" not in hooks:
        return ""
    if other.name.startswith("ufw"):
        return (
            f"ufw route allow in on {bridge} && ufw route allow out on {bridge} && "
            f"ufw allow in on {bridge}"
        )
    if other.name.startswith(("iptables", "ip6tables", "Docker")):
        program = "ip6tables" if other.name.startswith("ip6tables") else "iptables"
        return (
            f"{program} -I FORWARD -i {bridge} -j ACCEPT && "
            f"{program} -I FORWARD -o {bridge} -j ACCEPT"
        )
    chain = next((chain for chain in other.blocks if chain.hook == "forward"), None)
    if chain is None or other.name == "firewalld":
        return ""
    where = f"{chain.family} {chain.table} {chain.name}"
    return (
        f"nft insert rule {where} iifname {bridge} accept && "
        f"nft insert rule {where} oifname {bridge} accept"
    )


def firewalls(config: DaemonConfig) -> Tuple[host_firewall.Found, ...]:
    return host_firewall.look(pod_traffic.now(config, node.attachments(config)))


def dns(config: DaemonConfig) -> Iterator[Finding]:
    """Whether a pod's resolvers answer, asked from the pod's own network namespace."""
    pods = [one for one in node.attachments(config) if one.netns and os.path.exists(one.netns)]
    asked: Dict[str, Attachment] = {}
    for pod in pods:
        for server in (pod.result.get("dns") or {}).get("nameservers") or ():
            asked.setdefault(str(server), pod)
    for server, source in list(asked.items())[:MOST_RESOLVERS]:
        name = _own_name(config) if server in TAILNET_RESOLVERS else "localhost"
        problem = resolver_problem(server, source.netns, name)
        if not problem:
            continue
        culprit = _dropping(server, source, name)
        found = f"the resolver {server} does not answer pods: {problem}"
        yield Finding(
            "resolver-silent",
            f"{found}: {culprit} drops the packets" if culprit else found,
            "pods cannot resolve names"
            + (". If the rule is not meant to do that, the command removes it" if culprit else ""),
            culprit.command
            if culprit and culprit.command
            else f"headcnictl trace {str(source.pod) or node.addresses(source)[0]} {server}",
        )


def _dropping(server: str, source: Attachment, name: str) -> Optional[drops.Dropped]:
    """The rule of this node that drops questions to a resolver, or its answers."""
    with suppress(CniError, OSError, ValueError):
        there = ip_address(server)
        every = [ip_address(text) for text in node.addresses(source)]
        own = next((one for one in every if one.version == there.version), None)
        if own is not None:
            with drops.watched(own, there) as first:
                resolver_problem(server, source.netns, name, tries=1)
                return first()
    return None


def _own_name(config: DaemonConfig) -> str:
    """This node's name in the tailnet, which tailscaled resolves without asking anybody."""
    found = LocalApi(config.tailscale.socket_path).read("status", "status?peers=false")
    return str((found.get("Self") or {}).get("DNSName") or "localhost")


def resolver_problem(server: str, path: str, name: str, tries: int = 2) -> str:
    """Why a resolver is of no use; empty if it answers. The tailnet's must know this node's name;
    from others any answer will do, even that there is no such name."""
    labels = [label.encode("ascii", "replace")[:63] for label in name.strip(".").split(".")]
    question = b"\x48\x43\x01\x00\x00\x01" + bytes(6)  # a question, to be answered recursively
    question += b"".join(bytes([len(label)]) + label for label in labels) + b"\0\0\1\0\1"
    try:
        family = socket.AF_INET6 if ip_address(server).version == 6 else socket.AF_INET
        with netns.opened(path) as fd, netns.entered(fd):
            caller = socket.socket(family, socket.SOCK_DGRAM)
        with closing(caller):
            caller.settimeout(DNS_SECONDS)
            caller.connect((server, 53))
            for _unused in range(tries):
                caller.send(question)
                try:
                    answer = caller.recv(512)
                except socket.timeout:
                    continue
                if answer[:2] == question[:2] and len(answer) > 3:
                    refused = server in TAILNET_RESOLVERS and answer[3] & 15
                    return f"it answers with the error {answer[3] & 15}" if refused else ""
        return f"no answer within {tries * DNS_SECONDS:.0f} s"
    except (OSError, ValueError, CniError) as problem:
        return str(problem)


def versions(config: DaemonConfig) -> set[int]:
    try:
        return {cidr.version for cidr in configuration.pod_cidrs(config).cidrs}
    except PodCidrError:
        return set()
