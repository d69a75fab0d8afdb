"""Whole CNI calls, from exec to exit, beside the Go plugins as libcni runs them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lab import tools

from .measure import Findings, Row, Series, distribution, in_turns, median, percentile, timed
from .stage import PEER_SUBNET, SUBNET, Namespace, Stage, netns

ROUNDS = 40
STORM = 100
AT_A_TIME = 16
CHAIN = "bridge(ipMasq)+host-local, portmap idle"


def ours(stage: Stage, **changes: Any) -> dict[str, Any]:
    return {
        "cniVersion": "1.0.0",
        "name": "ours",
        "type": "headcni",
        "pod_cidr": SUBNET,
        "cluster_cidr": SUBNET,
        "data_dir": str(stage.data),
        "ipam": {"type": "headcni-ipam", "subnet": SUBNET},
        **changes,
    }


def bridge(stage: Stage, masquerade: bool) -> dict[str, Any]:
    return {
        "cniVersion": "1.0.0",
        "name": f"peer{masquerade:d}",
        "type": "bridge",
        "bridge": f"peer{masquerade:d}",
        "isGateway": True,
        "ipMasq": masquerade,
        "hairpinMode": True,
        "mtu": 1280,
        "ipam": {
            "type": "host-local",
            "dataDir": str(stage.folder / "host-local"),
            "ranges": [[{"subnet": PEER_SUBNET if masquerade else "10.77.0.0/16"}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }


def portmap(name: str, ports: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "cniVersion": "1.0.0",
        "name": name,
        "type": "portmap",
        "runtimeConfig": {"portMappings": ports},
    }


class Calls:
    """ADD and DEL of one configuration, ours or a chain."""

    def __init__(self, stage: Stage, *confs: dict[str, Any], **env: str) -> None:
        self.stage, self.confs, self.env = stage, confs, env

    def add(self, pod: Namespace) -> None:
        previous: dict[str, Any] = {}
        env = self.stage.environment("ADD", pod, **self.env)
        for conf in self.confs:
            given = {**conf, "prevResult": previous} if previous else conf
            previous = self.stage.run(self._program(conf), given, env)

    def delete(self, pod: Namespace) -> None:
        env = self.stage.environment("DEL", pod, **self.env)
        for conf in reversed(self.confs):
            self.stage.run(self._program(conf), conf, env)

    def once(self) -> Mapping[str, float]:
        pod = self.stage.pod()
        took = {"ADD": timed(lambda: self.add(pod)), "DEL": timed(lambda: self.delete(pod))}
        self.stage.settle()
        return took

    def _program(self, conf: dict[str, Any]) -> Any:
        folder = self.stage.bin if conf["type"] == "headcni" else tools.CNI.bin
        return folder / conf["type"]


def run(stage: Stage, findings: Findings) -> None:
    _one_at_a_time(stage, findings)
    _storm(stage, findings)
    _overhead(stage, findings)
    _status(stage, findings)


def _one_at_a_time(stage: Stage, findings: Findings) -> None:
    port = [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]
    with_port = {"runtimeConfig": {"portMappings": port}, "capabilities": {"portMappings": True}}
    chain, lean = bridge(stage, True), bridge(stage, False)
    contestants = {
        "headcni": Calls(stage, ours(stage)),
        "headcni, a host port": Calls(stage, ours(stage, **with_port)),
        "headcni without its daemon": Calls(
            stage, ours(stage), HEADCNI_SOCKET=str(stage.folder / "none.sock")
        ),
        "Go chain": Calls(stage, chain, portmap(chain["name"], [])),
        "Go chain, a host port": Calls(stage, chain, portmap(chain["name"], port)),
        "Go bridge alone": Calls(stage, lean),
    }
    found = in_turns(ROUNDS, {name: one.once for name, one in contestants.items()})
    findings.raw["one at a time"] = found
    for verb in ("ADD", "DEL"):
        findings.plots[f"{verb.lower()}-latency"] = distribution(
            {name: timings[verb] for name, timings in found.items()},
            f"{verb}, one at a time: how many took no longer",
        )

    def row(what: str, verb: str, mine: str, peer: str, theirs: str, bar: float) -> Row:
        mean = (1000 * median(found[one][verb]) for one in (mine, theirs))
        return Row("cni", what, peer, *mean, unit="ms", bar=bar)

    findings.rows += [
        row("ADD p50", "ADD", "headcni", CHAIN, "Go chain", 0.15),
        row("DEL p50", "DEL", "headcni", CHAIN, "Go chain", 0.05),
        row(
            "ADD p50, one host port",
            "ADD",
            "headcni, a host port",
            "the chain, portmap active",
            "Go chain, a host port",
            0.09,
        ),
        row("ADD p50", "ADD", "headcni", "bridge+host-local alone", "Go bridge alone", 0.40),
        row(
            "ADD p50 without the daemon",
            "ADD",
            "headcni without its daemon",
            CHAIN,
            "Go chain",
            1.3,
        ),
    ]


def _storm(stage: Stage, findings: Findings) -> None:
    """Many ADDs at once; each contestant twice, in turns."""
    chain = bridge(stage, True)
    contestants = {
        "headcni": Calls(stage, ours(stage)),
        "Go chain": Calls(stage, chain, portmap(chain["name"], [])),
    }
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    waits: dict[str, list[float]] = {name: [] for name in contestants}
    for names in (list(contestants), list(reversed(contestants))):
        for name in names:
            rate, latencies = _burst(stage, contestants[name], AT_A_TIME)
            rates[name].append(rate)
            waits[name] += latencies
    findings.raw["storm"] = {"pods a second": rates, "seconds": waits}
    findings.plots["storm-latency"] = distribution(
        waits, f"{STORM} ADDs, {AT_A_TIME} at a time: how many took no longer"
    )
    plot = Series("ADDs a second over how many at a time", "at a time", "pods a second")
    for at_a_time in (1, 2, 4, 8, 16, 32):
        for name, calls in contestants.items():
            rate, _ = _burst(stage, calls, at_a_time)
            plot.lines.setdefault(name, []).append((at_a_time, rate))
    findings.plots["throughput"] = plot
    findings.rows += [
        Row(
            "cni",
            f"{STORM} ADDs, {AT_A_TIME} at a time",
            CHAIN,
            median(rates["headcni"]),
            median(rates["Go chain"]),
            unit="pods/s",
            bar=7.0,
            at_least=True,
        ),
        Row(
            "cni",
            "the same, p99",
            CHAIN,
            1000 * percentile(waits["headcni"], 0.99),
            1000 * percentile(waits["Go chain"], 0.99),
            unit="ms",
            bar=0.15,
        ),
    ]


def _burst(stage: Stage, calls: Calls, at_a_time: int) -> tuple[float, list[float]]:
    pods = [stage.pod() for _ in range(STORM)]
    stage.rest()
    with _workers(stage, at_a_time) as (workers, inside):
        began = time.perf_counter()
        latencies = list(
            workers.map(lambda pod: inside(lambda: timed(lambda: calls.add(pod))), pods)
        )
        rate = len(pods) / (time.perf_counter() - began)
        list(workers.map(lambda pod: inside(lambda: calls.delete(pod)), pods))
    stage.settle()
    return rate, latencies


class _workers:
    """Threads that start programs in the node's namespace."""

    def __init__(self, stage: Stage, count: int) -> None:
        self._path = stage.node.netns.path
        self._pool = ThreadPoolExecutor(count)

    def __enter__(self) -> tuple[ThreadPoolExecutor, Callable[[Callable[[], Any]], Any]]:
        return self._pool, self._inside

    def _inside(self, work: Callable[[], Any]) -> Any:
        with netns.opened(self._path) as fd, netns.entered(fd):
            return work()

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


def _overhead(stage: Stage, findings: Findings) -> None:
    """A whole ADD less what the daemon spends on it, beside an interpreter that does nothing, which
    the Python shim would start; and where the time of one ADD goes, from exec to exit."""
    calls = Calls(stage, ours(stage))
    nothing = ["/usr/bin/python3", "-I", "-S", "-c", "pass"]

    def spent() -> dict[str, float]:
        phases = stage.measured("headcni_phase_duration_seconds_sum")
        inside = stage.measured("headcni_daemon_response_duration_seconds_sum")
        return {**phases, "daemon": sum(inside.values())}

    def whole() -> Mapping[str, float]:
        pod = stage.pod()
        before = spent()
        took = timed(lambda: calls.add(pod))
        steps = {step: value - before.get(step, 0.0) for step, value in spent().items()}
        calls.delete(pod)
        stage.settle()
        return {"whole": took, "shim": took - steps["daemon"], **steps}

    found = in_turns(
        ROUNDS,
        {
            "headcni": whole,
            "python": lambda: {
                "whole": timed(lambda: subprocess.run(nothing, check=True, capture_output=True))
            },
        },
    )
    findings.raw["overhead"] = found
    middle = {
        step: 1000 * median(took)
        for step, took in found["headcni"].items()
        if not step.endswith("warm-up")
    }
    python = 1000 * median(found["python"]["whole"])
    note = f"{middle['daemon']:.1f} ms in the daemon"
    what, peer = "shim: ADD less the daemon's time", "python3 -I -S -c pass"
    findings.rows.append(
        Row("cni", what, peer, middle["shim"], python, unit="ms", bar=0.3, note=note)
    )
    phases = {step: took for step, took in middle.items() if step.startswith("{")}
    findings.breakdown = {
        "the native shim: its start, the request, the answer, its end": middle["shim"],
        **{f"the daemon: {_label(step)}": took for step, took in phases.items()},
        "the daemon: all the rest": middle["daemon"] - sum(phases.values()),
        "one ADD": middle["whole"],
    }


def _label(written: str) -> str:
    """phase="link" of a metric's labels: link."""
    return written.split('"')[1]


def _status(stage: Stage, findings: Findings) -> None:
    def asked(conf: dict[str, Any], folder: Any) -> Callable[[], Mapping[str, float]]:
        env = stage.environment("STATUS", None)
        program = folder / conf["type"]
        return lambda: {"STATUS": timed(lambda: stage.run(program, conf, env))}

    mine = ours(stage, cniVersion="1.1.0")
    theirs = {**bridge(stage, True), "cniVersion": "1.1.0"}
    found = in_turns(
        ROUNDS,
        {"headcni": asked(mine, stage.bin), "bridge": asked(theirs, tools.CNI.bin)},
    )
    findings.raw["status"] = found
    findings.rows.append(
        Row(
            "cni",
            "STATUS p50",
            "bridge's STATUS",
            1000 * median(found["headcni"]["STATUS"]),
            1000 * median(found["bridge"]["STATUS"]),
            unit="ms",
            bar=0.35,
        )
    )


def memory(stage: Stage, findings: Findings) -> None:
    """The daemon after 100 and after 1,000 pods that came and went."""
    calls = Calls(stage, ours(stage))
    seen = {}
    for number in range(1, 1001):
        calls.once()
        if number in (100, 1000):
            time.sleep(2)
            seen[number] = stage.rss()
    findings.raw["rss"] = seen
    findings.rows.append(
        Row(
            "memory",
            "daemon RSS after 1,000 ADD/DEL",
            "itself after 100",
            seen[1000],
            seen[100],
            unit="MiB",
            bar=1.05,
            limit=60.0,
        )
    )
    began, before = time.monotonic(), stage.cpu()
    time.sleep(30)
    share = 100 * (stage.cpu() - before) / (time.monotonic() - began)
    findings.rows.append(
        Row("memory", "daemon CPU at rest", "one core", share, 100.0, unit="%", bar=0.005)
    )
