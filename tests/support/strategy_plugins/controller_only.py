"""For tests and benchmarks: what a playbook costs the controller, without any node.

Everything that the controller does is done for real, in one process, so that its cost can be told
by task: variables, conditions, arguments, action plugins, results. Only the modules are not run:
each returns what MODULES says. The hosts are alike, so a host's variables are put together, and its
work is done, for the first CONTROLLER_SAMPLE hosts only, and counted for all; the others get the
same result. Tasks with run_once and facts are always done. At the end the costs are written to
CONTROLLER_COSTS.

With CONTROLLER_COUNT set, the calls of functions are counted, those of Python and those of C. Their
number is the same in every run, whatever else the machine does, but counting doubles the seconds.

What is not in them: starting a process for each task and host, and what modules take.
"""

from __future__ import annotations

import atexit
import cProfile
import gc
import json
import os
import pickle
import resource
import time
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ansible.executor.process.worker import TaskExecutor, _RawTaskResult, _task
from ansible.inventory.host import Host
from ansible.plugins import loader as plugin_loader
from ansible.plugins.action import ActionBase
from ansible.plugins.strategy.linear import StrategyModule as Linear
from ansible.vars.hostvars import HostVars
from ansible.vars.manager import VariableManager
from ansible_collections.headcni.mesh.plugins.plugin_utils import runtime_release

DOCUMENTATION = """
name: controller_only
short_description: linear, in one process and without modules
description: For tests and benchmarks.
author: HeadCNI
"""
FRESH = os.environ.get("CONTROLLER_NODES", "fresh") == "fresh"
SAMPLE = int(os.environ.get("CONTROLLER_SAMPLE", "1000000"))
COUNT = "CONTROLLER_COUNT" in os.environ


def number(host: str) -> int:
    return int(host.removeprefix("node"))


def key(host: str) -> str:
    return f"nodekey:{number(host):064x}"


def pod_cidrs(host: str) -> list[str]:
    return [f"10.{number(host) // 256}.{number(host) % 256}.0/24"]


def preflight(host: str, _arguments: dict[str, Any]) -> dict[str, Any]:
    up_to_date = [] if FRESH else ["release", "config", "conflist"]
    return {**configured(host, {}), "problems": [], "up_to_date": up_to_date, "current": RELEASE}


def configured(host: str, _arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "mode": "host",
        "pod_cidrs": pod_cidrs(host),
        "cluster_cidrs": ["10.0.0.0/8"],
        "pod_cidr_source": "config",
        "needs_restart": False,
        "validated": True,
    }


def standing(host: str, arguments: dict[str, Any]) -> dict[str, Any]:
    shown = {"needs_login": FRESH, "name": host, "login_server": "http://192.0.2.1"}
    anew = "f" if arguments.get("force_reauth") is True else ""
    return {**shown, "node_key": key(host) + anew}


def installable(host: str, _arguments: dict[str, Any]) -> dict[str, Any]:
    shown = {"tarball": "", "joined_elsewhere": "", "version_before": "", "version_after": "1"}
    return {**shown, "differs": FRESH, "node_key": "" if FRESH else key(host)}


def approved(_host: str, arguments: dict[str, Any]) -> dict[str, Any]:
    rows = [{"label": one.get("label"), "after": one["routes"]} for one in arguments["nodes"]]
    return {"problems": {}, "unknown": [], "routes": rows}


def kubernetes(host: str, _arguments: dict[str, Any]) -> dict[str, Any]:
    cluster, token = {"server": "https://192.0.2.1:6443"}, {"needed": True, "reason": "it has none"}
    known = {"joined": True, "problem": "", "name": host, "pod_cidrs": []}
    return {**known, "cluster": cluster, "token": token}


def identity(_host: str, arguments: dict[str, Any]) -> dict[str, Any]:
    nodes = arguments["nodes"]
    return {"tokens": {name: f"token of {name}" for name in nodes}, "renewed": nodes, "old": nodes}


def leaving(host: str, _arguments: dict[str, Any]) -> dict[str, Any]:
    held = {"installed": True, "mode": "host", "known_before": True, "tailscale_ours": True}
    return {**held, "pods": [], "pod_cidrs": pod_cidrs(host)}


def info(host: str, _arguments: dict[str, Any]) -> dict[str, Any]:
    held = {"current": RELEASE, "installed": [RELEASE], "running_version": "1.0.0"}
    return {**held, "mode": "host", "ready": True}


def mode(host: str, _arguments: dict[str, Any]) -> dict[str, Any]:
    held = {"mode": "host", "left_mode": "", "unfinished": False, "keys": {}, "targets": []}
    return {**held, "pod_cidrs": pod_cidrs(host)}


def probed(host: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A pod, and what it reaches, as large as on a real node."""
    good = {"ok": True, "detail": "10.0.0.1, 1.0 ms"}
    checks = dict.fromkeys(("v4", "v6", "mtu4", "mtu6", "port", "route", "dns"), good)
    path = {"kind": "direct", "through": "192.0.2.1:41641", "ms": 1.0}
    pod = {"node": host, "addresses": [f"10.0.0.{n}" for n in (1, 2)], "mtu": 1280}
    pod |= {"host_port": 1, "host_addresses": ["192.0.2.1"], "tailnet_name": f"{host}.example"}
    given = arguments.get("targets")
    targets = given if isinstance(given, list) else []  # a host out of the sample has a template
    return {
        "probe": {**pod, "tailnet_addresses": ["100.64.0.1"], "pod_cidrs": pod_cidrs(host)},
        "reached": {one["node"]: {**checks, "path": path} for one in targets},
        "beyond": {"outside": good},
        "runtime": {"ok": True, "detail": "containerd"},
    }


RELEASE = {"name": "1.0.0", "version": "1.0.0"}
MODULES: dict[str, Callable[[str, dict[str, Any]], dict[str, Any]]] = {
    "tailscale_install": installable,
    "tailscale_join": standing,
    "tailscale_info": lambda host, _: {
        **standing(host, {}),
        "version": "1",
        "running_version": "1",
    },
    "headcni_preflight": preflight,
    "headcni_config": configured,
    "headcni_release": lambda host, _: {"current": RELEASE},
    "headcni_service": lambda host, _: {"conditions": ["ready"]},
    "headcni_leave": leaving,
    "headcni_info": info,
    "headcni_mode": mode,
    "headcni_probe": probed,
    "headcni_kubernetes_info": kubernetes,
    "headcni_kubernetes_identity": identity,
    "headscale_info": lambda host, _: {"version": "0.29.2", "users": [], "nodes": []},
    "headscale_node": lambda host, _: {"problems": {}},
    "headscale_policy_info": lambda host, _: {"pods": {"status": "allowed"}},
    "headscale_preauth_key": lambda host, _: {"key": "hskey-auth-x"},
    "headscale_routes": approved,
    "headcni_cluster_dns": lambda host, _: {},
    "headcni_service_names_info": lambda host, _: {"records": [], "problems": []},
    "headscale_extra_records": lambda host, _: {},
    "headscale_user": lambda host, _: {},
    "headcni_conflist": lambda host, _: {},
    "file": lambda host, _: {},
    "wait_for": lambda host, _: {},
}


def execute_module(
    action: ActionBase,
    module_name: str | None = None,
    module_args: dict[str, Any] | None = None,
    task_vars: dict[str, Any] | None = None,
    **_unused: Any,
) -> dict[str, Any]:
    name = (module_name or action._task.action).rpartition(".")[2]
    arguments = action._task.args if module_args is None else module_args
    made = MODULES[name]((task_vars or {})["inventory_hostname"], arguments)
    return {"changed": False, **made}


class Spent(NamedTuple):
    """The cost of some work."""

    seconds: float  # of CPU time
    reads: float  # reads of a host's variables
    comparisons: float  # comparisons of two hosts
    calls: float  # calls of functions, if they are counted

    def since(self, earlier: Spent) -> Spent:
        return Spent(*(now - then for now, then in zip(self, earlier, strict=True)))


class Calls:
    """The number of function calls. Python's profiler counts them; its clock is not used."""

    def __init__(self) -> None:
        self._sum = 0
        self._profiler = cProfile.Profile()
        self._profiler.enable(subcalls=False, builtins=True)

    def total(self) -> int:
        self._profiler.disable()  # so that it does not count what follows
        self._sum += sum(function.callcount for function in self._profiler.getstats())
        self._profiler.clear()
        self._profiler.enable(subcalls=False, builtins=True)
        return self._sum


class Costs:
    """The cost of each task, by its play and name."""

    def __init__(self) -> None:
        self.tasks: dict[str, dict[str, float]] = {}
        self.collecting = 0.0
        self.reads = self.comparisons = 0
        self._calls = Calls() if COUNT else None
        self._present = ""
        self._began = self.so_far()

    def so_far(self) -> Spent:
        """The cost so far. The seconds do not include garbage collection, because it happens in any
        task that creates the object which triggers it."""
        calls = self._calls.total() if self._calls else 0
        seconds = time.process_time() - self.collecting
        return Spent(seconds, self.reads, self.comparisons, calls)

    def collected(self, phase: str, _about: dict[str, int]) -> None:
        if phase == "start":
            self._collection = time.process_time()
            return
        self.collecting += time.process_time() - self._collection

    def begin(self, play: str, task: Any, run_once: bool) -> None:
        name = f"{play}: {task.get_name()}"
        if name != self._present:
            self.end()
            self._present = name
        row = {**dict.fromkeys(Spent._fields, 0.0), "hosts": 0, "run_once": run_once}
        self.tasks.setdefault(name, row)["hosts"] += 1

    def add(self, spent: Spent) -> None:
        row = self.tasks[self._present]
        for name, value in spent._asdict().items():
            row[name] += value

    def end(self) -> None:
        if self._present:
            self.add(self.so_far().since(self._began))
        self._began, self._present = self.so_far(), ""

    def write(self) -> None:
        self.end()
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        Path(os.environ["CONTROLLER_COSTS"]).write_text(
            json.dumps({"tasks": self.tasks, "kib": kib, "collecting": self.collecting})
        )


COSTS = Costs()
gc.callbacks.append(COSTS.collected)
atexit.register(COSTS.write)
read = HostVars.raw_get
compare = Host.__eq__


def counted_read(hostvars: HostVars, host: str) -> Any:
    COSTS.reads += 1
    return read(hostvars, host)


def counted_comparison(host: Host, other: Any) -> bool:
    COSTS.comparisons += 1
    return compare(host, other)


HostVars.raw_get = counted_read
Host.__eq__ = counted_comparison


def refuse(_action: ActionBase, command: str, **_unused: Any) -> None:
    raise RuntimeError(f"nothing is run on this machine: {command}")


ActionBase._execute_module = execute_module
ActionBase._low_level_execute_command = refuse
copy = plugin_loader.action_loader.get("ansible.builtin.copy", class_only=True)
copy.run = lambda *_unused, **_also: {"changed": False}
# Each process of a real run looks the release up again, at a high and equal cost for each host.
runtime_release.ensure = cache(lambda *_unused: runtime_release.Tarball(Path("/x"), "1.0.0", ""))
runtime_release.check_config = lambda *_unused: []


class Sample:
    """Work that is done for some hosts of a task, and its cost for each of them."""

    def __init__(self) -> None:
        self.last: Any = None
        self._spent: list[Spent] = []
        self._typical = Spent(0, 0, 0, 0)

    def take(self, work: Callable[[], Any], always: bool = False) -> tuple[Any, bool]:
        """The result of the work, and whether the work was done. If not, the median cost of the
        earlier hosts is added. A mean would count the slowest of a few hosts for all of them."""
        if len(self._spent) >= SAMPLE and not always:
            COSTS.add(self._typical)
            return self.last, False
        began = COSTS.so_far()
        self.last = work()
        self._spent.append(COSTS.so_far().since(began))
        if len(self._spent) == SAMPLE:
            self._typical = Spent(*map(median, zip(*self._spent, strict=True)))
        return self.last, True


class NoQueue:
    """Discards what a worker reports while it works, such as the items of a loop. The thread that
    reads the real queue would look for tasks that are already done, and fail."""

    def send_callback(self, *_unused: Any, **_also: Any) -> None:
        pass


class StrategyModule(Linear):
    def __init__(self, tqm: Any) -> None:
        super().__init__(tqm)
        self._work: dict[str, Sample] = defaultdict(Sample)  # by task
        self._vars: dict[str, Sample] = defaultdict(Sample)
        self._get_vars = VariableManager.get_vars.__get__(self._variable_manager)
        self._variable_manager.get_vars = self._sampled_vars

    def _sampled_vars(self, **how: Any) -> Any:
        task = how.get("task")
        if "_hosts" not in how or task is None or self._is_always_done(task):
            return self._get_vars(**how)
        return self._vars[task._uuid].take(lambda: self._get_vars(**how))[0]

    def _is_always_done(self, task: Any) -> bool:
        return bool(task.run_once) or task.action == "ansible.builtin.set_fact"

    def _queue_task(self, host: Any, task: Any, task_vars: Any, play_context: Any) -> None:
        COSTS.begin(task.play.get_name(), task, bool(task.run_once))
        self._queued_task_cache[(host.name, task._uuid)] = {
            "host": host,
            "task": task,
            "task_vars": task_vars,
            "play_context": play_context,
        }
        self._tqm.send_callback("v2_runner_on_start", host, task)
        sent, is_own = self._work[task._uuid].take(
            lambda: self._worked(host, task, task_vars, play_context), self._is_always_done(task)
        )
        received = pickle.loads(sent)
        if is_own:
            result = self._convert_wire_task_result_to_raw(received)
        else:
            data = received.return_data
            module = MODULES.get(task.action.rpartition(".")[2])
            if module and not data.get("skipped") and "results" not in data:
                data.update(module(host.name, task.args))
            result = _RawTaskResult(host, task, data, received.task_fields)
        with self._results_lock:
            self._results.append(result)
        self._pending_results += 1

    def _worked(self, host: Any, task: Any, task_vars: Any, play_context: Any) -> Any:
        """The result that a worker would send."""
        # A real worker is a copy of this process, so its changes of the task end with it.
        own = task.copy(exclude_parent=True, exclude_tasks=True)
        own._parent = task._parent
        with _task.TaskContext(own):
            made = TaskExecutor(
                host,
                own,
                task_vars,
                play_context,
                self._loader,
                plugin_loader.get_plugin_loader_namespace(),
                NoQueue(),
                self._variable_manager,
            ).run()
        result = _RawTaskResult(host, task, made, own.dump_attrs())
        return pickle.dumps(result.as_wire_task_result())
