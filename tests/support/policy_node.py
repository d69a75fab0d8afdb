"""A node of tests/cni whose daemon enforces network policies: the real server and enforcer, told of
the world by the test instead of by an API server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cni_node import Answer, CniNode, Namespace

# The daemon's parts that pods' rules depend on. Each line of its stdin is a question in JSON.
SERVE = """
import json, sys, time, threading
from headcni.daemon.cni.server import CniServer
from headcni.policy.enforcer import Enforcer
from headcni.policy.objects import Namespace, Pod, Policy, World
from headcni.store import Store

data, path, interval = sys.argv[1], sys.argv[2], float(sys.argv[3])
store = Store.in_directory(data)
enforcer = Enforcer(lambda: store, interval=interval, node="here")
enforcer.start()
server = CniServer(path, data)
server.start()
kinds = {"pods": Pod, "namespaces": Namespace, "policies": Policy}
change = {
    "pod": (enforcer.pod_changed, Pod),
    "namespace": (enforcer.namespace_changed, Namespace),
    "policy": (enforcer.policy_changed, Policy),
}

everything = {}


def answer(question):
    what, given = question["ask"], question.get("given")
    began = time.monotonic()
    if what == "world":
        made = {
            kind: [of.from_object(one) for one in given.get(kind, ())]
            for kind, of in kinds.items()
        }
        enforcer.set_world(World.of(**made))
    elif what in change:
        tell, of = change[what]
        key = given["key"] if what == "namespace" else tuple(given["key"])
        found = given.get("object")
        tell(key, of.from_object(found) if found else None)
    elif what == "without policies":  # the same world; given: whether to have them again
        kept = enforcer.world()
        if not given:
            everything.update(kept.policies)
        policies = dict(everything) if given else {}
        enforcer.set_world(World(kept.pods, kept.namespaces, policies))
    elif what == "configure":
        enforcer.configure(*given)
    elif what == "disown":  # as on a kernel that knows no owners
        with enforcer._lock:
            enforcer._table._flags, enforcer._in_force = 0, False
            enforcer._write()
    elif what == "repair":
        return list(enforcer.repair())
    elif what == "report":
        report = enforcer.report()
        return {**report._asdict(), "pods": [
            {"pod": one.pod, "known": one.known, "ingress": one.ingress, "egress": one.egress}
            for one in report.pods
        ]}
    elif what == "denied":
        return [[*one.policy, one.direction, one.packets] for one in enforcer.denied()]
    return time.monotonic() - began


print("ready", flush=True)
for line in sys.stdin:
    try:
        print(json.dumps({"ok": answer(json.loads(line))}), flush=True)
    except Exception as problem:
        print(json.dumps({"problem": f"{type(problem).__name__}: {problem}"}), flush=True)
enforcer.stop()
server.stop()
"""


class PolicyDaemon:
    """The process with the server and the enforcer."""

    def __init__(self, node: CniNode, interval: float = 30.0, prelude: str = "") -> None:
        """`prelude` is a program that runs before."""
        self.node = node
        self.socket = str(node.tmp / "cni.sock")
        home = (node.plugins / "headcni").resolve().parent.parent
        program = [node.python, "-S", "-c", prelude + SERVE, str(node.tmp / "data"), self.socket]
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", node.netns.name, *program, str(interval)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": f"{home}:{home}/vendor"},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def ask(self, what: str, given: Any = None) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"ask": what, "given": given}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert "problem" not in answer, answer["problem"]
        return answer["ok"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        with suppress(BrokenPipeError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        self.process.wait(20)

    def __enter__(self) -> PolicyDaemon:
        return self

    def __exit__(self, *_unused: object) -> None:
        if self.process.poll() is None:
            self.kill()


def pod_object(
    namespace: str,
    name: str,
    labels: dict[str, str] | None = None,
    ports: list[tuple[str, int, str]] | None = None,
    addresses: list[str] | None = None,
    phase: str = "Running",
    node: str = "",
) -> dict[str, Any]:
    listed = [{"name": n, "containerPort": number, "protocol": p} for n, number, p in ports or ()]
    return {
        "metadata": {"namespace": namespace, "name": name, "labels": labels or {}},
        "spec": {"containers": [{"ports": listed}], "nodeName": node},
        "status": {"phase": phase, "podIPs": [{"ip": one} for one in addresses or ()]},
    }


def namespace_object(name: str, **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": labels}}


def policy_object(namespace: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"namespace": namespace, "name": name}, "spec": spec}


def pod_args(namespace: str, name: str) -> str:
    return f"IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name}"


def add(
    node: CniNode,
    conf: dict[str, Any],
    name: str,
    namespace: str = "shop",
    daemon: PolicyDaemon | None = None,
    pod: Namespace | None = None,
) -> tuple[Namespace, Answer]:
    """A pod, by the daemon or by a process of its own."""
    pod = pod or node.pod()
    where = daemon.socket if daemon is not None else str(node.tmp / "none.sock")
    answer = node.add(conf, pod, args=pod_args(namespace, name), HEADCNI_SOCKET=where)
    return pod, answer


@contextmanager
def daemon_of(node: CniNode, interval: float = 30.0) -> Iterator[PolicyDaemon]:
    with PolicyDaemon(node, interval) as daemon:
        yield daemon


AGENT = Path(__file__).with_name("agent.py")
PORTS = (80, 81, 90, 100, 8080)


class Station:
    """A pod, or another host, with an agent that answers and asks (agent.py)."""

    def __init__(self, netns: Namespace, addresses: list[str]) -> None:
        self.netns, self.addresses = netns, addresses
        command = ["ip", "netns", "exec", netns.name, sys.executable, str(AGENT)]
        self._agent = subprocess.Popen(
            [*command, *map(str, PORTS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._agent.stdout is not None
        assert self._agent.stdout.readline() == "ready\n"

    def address(self, version: int) -> str:
        return next(one for one in self.addresses if (":" in one) == (version == 6))

    def tries(self, attempts: list[tuple[str, str, int, float]]) -> list[bool]:
        """Attempts as (protocol, address, port, seconds), all at once."""
        assert self._agent.stdin is not None and self._agent.stdout is not None
        self._agent.stdin.write(json.dumps(attempts) + "\n")
        self._agent.stdin.flush()
        found = json.loads(self._agent.stdout.readline())
        return [bool(one) for one in found]

    def end(self) -> None:
        self._agent.kill()
        self._agent.wait()
