"""``headcnictl connect-test``: what pods of this node reach.

Two pods are created by calling the plugins of the conflist in use, as a container runtime does.
They are removed at the end, also after a failure or an interruption. If this process is killed,
systemd removes them after some minutes, and the next connect-test does so first.

Pods of other nodes are tested only if their addresses are given: this node knows which ranges its
peers serve, but not which pods they have. `bin/headcnictl connect-test` on the controller tests all
nodes.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from ipaddress import ip_address
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

from ..datapath import netns
from ..errors import IO_FAILURE, CniError
from ..mesh import paths
from ..mesh.claims import hear
from ..mesh.localapi import LocalApi
from ..settings import DaemonConfig
from ..shared import conflist, junit, probe, probe_checks, probe_conflist, probe_pod
from ..shared.localapi import LocalAPI, LocalAPIError
from ..shared.paths import NONE
from . import node
from .main import NO, OK, CannotTell, show
from .routes import claim_rules
from .terminal import BAD, DOUBTFUL, GOOD, paint, table, wrapped

INTERRUPTED = 130
HOMES = ("/run/headcni-connect-1", "/run/headcni-connect-2")
LIFETIME = 600  # seconds, if this process is killed
HOST_PORT = 18474
PINGS = 20
SEND_SECONDS = 2.0
MOST_TARGETS = 64
BIN_DIRS = "/opt/cni/bin"


class Pod(NamedTuple):
    addresses: Tuple[str, ...]
    netns: str
    nameservers: Tuple[str, ...]

    def do(self, work: Callable[[], Any]) -> Any:
        """Do some work in the pod's network namespace."""
        with netns.opened(self.netns) as fd, netns.entered(fd):
            return work()


class Mesh(NamedTuple):
    """This node, as its tailscaled describes it."""

    name: str
    socket: str
    tailnet_name: str
    addresses: Tuple[str, ...]


def arguments(parser: argparse.ArgumentParser) -> None:
    node.with_config(parser)
    add = parser.add_argument
    add("--junit", metavar="FILE", help="also write the results as a JUnit file")
    add("--perf", action="store_true", help="measure the throughput, too")
    about = "also test this pod of another node, by its address (repeat for more)"
    add("--to", action="append", default=[], metavar="ADDRESS", help=about)
    about = "ADDRESS, ADDRESS:PORT or URL outside of the cluster (the Headscale server)"
    add("--outside", action="append", default=[], metavar="PLACE", help=about)
    add("--host-port", type=int, default=HOST_PORT, metavar="PORT", help="(%(default)s; 0: none)")
    add("--timeout", type=int, default=10, metavar="SECONDS", help="(%(default)s)")
    add("--conf-dir", default=conflist.DIRECTORY, help="of the conflist (%(default)s)")
    add("--bin-dir", default=BIN_DIRS, help="of the plugins (%(default)s)")


def run(args: argparse.Namespace) -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        for address in args.to:
            ip_address(address)
        config = node.load(args)
        found = _tested(args, config)
    except ValueError as problem:
        raise CannotTell(f"--to: {problem}") from None
    except (probe_pod.ProbeError, LocalAPIError) as problem:
        raise CniError(IO_FAILURE, "connect-test", str(problem)) from None
    except OSError as problem:
        raise CannotTell(f"{problem.filename or 'connect-test'}: {problem.strerror}") from None
    except KeyboardInterrupt:
        said = "interrupted; the pods are removed"
        show({"error": said} if args.json else said, args.json)
        return INTERRUPTED
    if args.junit:
        cases = [_junit_case(case) for case in found["cases"]]
        with open(args.junit, "w", encoding="utf-8") as stream:
            stream.write(junit.document("headcni", cases))
    show(found if args.json else _in_words(found), args.json)
    return NO if found["failed"] else OK


def _interrupt(*_unused: object) -> None:
    raise KeyboardInterrupt


def _tested(args: argparse.Namespace, config: DaemonConfig) -> Dict[str, Any]:
    conf = probe_conflist.in_use(args.conf_dir)
    mesh = _mesh(config)
    outside = args.outside or [probe.HEADSCALE]
    places = probe_checks.places_outside(outside, mesh.socket, "--outside")
    mapped = any(one.get("capabilities", {}).get("portMappings") for one in conf["plugins"])
    port = args.host_port if mapped else 0
    with _removed_at_the_end():
        first = _start(HOMES[0], conf, args.bin_dir, 0)
        second = _start(HOMES[1], conf, args.bin_dir, port)
        mtu = probe_conflist.mtu_of(conf)
        pairs = {mesh.name: _reached(first, mesh.name, second.addresses, mtu, args)}
        pairs[mesh.name]["port"] = (
            first.do(partial(probe.port, mesh.addresses, port, args.timeout))
            if port
            else probe.outcome(None, "the conflist does not ask for portMappings")
        )
        for address in args.to[:MOST_TARGETS]:
            pairs[address] = _reached(first, address, (address,), mtu, args)
        own = _own_checks(first, mesh, conf, places, args)
    pairs.update(_peers(config, mesh))
    return _answer(mesh.name, own, pairs)


@contextmanager
def _removed_at_the_end() -> Iterator[None]:
    """Remove what an earlier run has left, and at the end what this one has started. An
    interruption does not interrupt that."""
    try:
        for home in HOMES:
            probe_pod.stop(home)
        yield
    finally:
        before = [
            (number, signal.signal(number, signal.SIG_IGN))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        ]
        try:
            problems = list(filter(None, map(_stopped, HOMES)))
        finally:
            for number, handler in before:
                signal.signal(number, handler)
        if problems:
            raise probe_pod.ProbeError("; ".join(problems))


def _stopped(home: str) -> str:
    try:
        probe_pod.stop(home)
    except probe_pod.ProbeError as problem:
        return str(problem)
    return ""


def _start(home: str, conf: Dict[str, Any], bin_dir: str, host_port: int) -> Pod:
    os.makedirs(home, mode=0o700)
    state = {"conf": conf, "bin_dirs": [bin_dir], "host_port": host_port}
    probe_pod.write_state(state, home)
    probe_pod.serve_in_a_unit(os.path.abspath(probe_pod.__file__), home, LIFETIME)
    found = probe_pod.by_plugins(state, home)
    servers = (found["dns"] or {}).get("nameservers") or ()
    return Pod(tuple(found["addresses"]), found["netns"], tuple(servers))


def _mesh(config: DaemonConfig) -> Mesh:
    socket = config.tailscale.socket_path
    me = LocalAPI(socket).raw_status(False).get("Self") or {}
    name = str(me.get("DNSName") or "").rstrip(".")
    return Mesh(
        name.partition(".")[0] or os.uname().nodename,
        socket,
        name,
        tuple(probe.own_addresses()),
    )


def _reached(
    pod: Pod, target: str, addresses: Sequence[str], mtu: int, args: argparse.Namespace
) -> Dict[str, Any]:
    """The same checks as verify.yml makes of a pair."""
    pings = list(probe.echoes(target, addresses, mtu))
    answers = pod.do(partial(probe.ping, pings, args.timeout))
    found = {"mtu": mtu, **{one.check: answer for one, answer in zip(pings, answers)}}
    good = [one for one, answer in zip(pings, answers) if answer["ok"] and not one.size]
    if good:
        found["loss"] = pod.do(partial(probe.quality, good[:1], PINGS))[0]
    if good and args.perf:
        address = good[0].address
        found["throughput"] = pod.do(
            partial(probe.throughput, address, probe_pod.DATA_PORT, SEND_SECONDS)
        )
        if target == address and not found["throughput"]["ok"]:
            no_test_pod = f"no pod of connect-test or verify.yml answers at {address}"
            found["throughput"] = {**probe.outcome(None, no_test_pod), "mbit": None}
    return found


def _own_checks(
    pod: Pod,
    mesh: Mesh,
    conf: Dict[str, Any],
    places: Sequence[probe_checks.Outside],
    args: argparse.Namespace,
) -> Dict[str, Any]:
    versions: set[int] = {ip_address(address).version for address in pod.addresses}
    name = {"tailnet_name": mesh.tailnet_name}
    cluster = {"cluster_dns": [], "timeout": args.timeout}
    return {
        "outside": probe_checks.outside(places, versions, args.timeout, pod.do, "--outside"),
        "dns": pod.do(partial(probe_checks.names, name, pod.nameservers, args.timeout)),
        **probe_checks.cluster(cluster, conf, pod.do),
    }


def _peers(config: DaemonConfig, mesh: Mesh) -> Dict[str, Any]:
    """The path to each peer that serves pods, by tailscaled's own ping."""
    api = LocalApi(mesh.socket)
    serving = hear(api.status(), claim_rules(config), {}).claims
    found = {}
    for peer in paths.pinged(api, paths.read(api, serving).peers):
        path = {"kind": peer.path.kind, "through": peer.path.in_words, "ms": peer.path.latency_ms}
        if not peer.online:
            check = probe.outcome(None, "the node is offline")
        else:
            answers = peer.path.kind != NONE
            check = probe.outcome(answers, peer.path.in_words if answers else "no answer to a ping")
        found[peer.name] = {"path": path, "ping by tailscaled": check}
    return found


def _answer(name: str, own: Dict[str, Any], pairs: Dict[str, Any]) -> Dict[str, Any]:
    """As verify.yml writes it."""
    cases = [_case(name, "", check, result) for check, result in own.items()]
    for target, checks in pairs.items():
        cases += [
            _case(name, target, check, result)
            for check, result in checks.items()
            if check not in ("mtu", "path")
        ]
    return {
        "version": 1,
        "failed": sum(case["ok"] is False for case in cases),
        "cases": cases,
        "pairs": [_measured(name, target, checks) for target, checks in pairs.items()],
    }


def _case(name: str, target: str, check: str, result: Dict[str, Any]) -> Dict[str, Any]:
    said = {"ok": result["ok"], "detail": result["detail"]}
    return {"from": name, "to": target, "check": check, **said}


def _measured(name: str, target: str, checks: Dict[str, Any]) -> Dict[str, Any]:
    path, loss = checks.get("path") or {}, checks.get("loss") or {}
    full = any((checks.get(check) or {}).get("ok") for check in ("mtu4", "mtu6"))
    return {
        "from": name,
        "to": target,
        "path": path.get("kind", "local" if target == name else ""),
        "through": path.get("through", ""),
        "latency_ms": loss.get("ms", path.get("ms")),
        "loss_percent": loss.get("percent"),
        "mtu": checks.get("mtu") if full else None,
        "throughput_mbit": (checks.get("throughput") or {}).get("mbit"),
    }


def _junit_case(case: Dict[str, Any]) -> junit.Case:
    return junit.Case(_subject(case), case["check"], case["ok"], case["detail"])


def _subject(case: Dict[str, Any]) -> str:
    return f"{case['from']} -> {case['to']}" if case["to"] else str(case["from"])


def _in_words(found: Dict[str, Any]) -> str:
    head = ("TO", "PATH", "LATENCY", "LOSS", "MTU", "THROUGHPUT", "THROUGH")
    rows = [
        (
            one["to"],
            one["path"] or "-",
            _with_unit(one["latency_ms"], ".1f", " ms"),
            _with_unit(one["loss_percent"], ".0f", " %"),
            _with_unit(one["mtu"], "d", ""),
            _with_unit(one["throughput_mbit"], ".0f", " Mbit/s"),
            one["through"] or "-",
        )
        for one in found["pairs"]
    ]
    lines = [table(rows, head)]
    fine: List[str] = []
    for case in found["cases"]:
        what = f"{_subject(case)}: {case['check']}"
        if case["ok"]:
            fine.append(case["check"])
        elif case["ok"] is None:
            said = paint("not checked", DOUBTFUL)
            lines.append(wrapped(f"{said}: {what}: {case['detail']}", "", "  "))
        else:
            lines.append(wrapped(f"{paint('FAIL', BAD)}: {what}: {case['detail']}", "", "  "))
    if fine:
        checks = ", ".join(dict.fromkeys(fine))
        lines.append(wrapped(f"{paint('ok', GOOD)}: {checks}", "", "    "))
    return "\n".join(lines)


def _with_unit(value: Any, form: str, unit: str) -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
