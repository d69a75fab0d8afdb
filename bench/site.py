"""site.yml where there is nothing to do, beside a ping of the same hosts by Ansible."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from .fleet import NODES, LabCommand, ansible, playbook
from .measure import Findings, Row, Series, in_turns, median, timed

ROUNDS = 3
SIZES = (3, len(NODES))


def run(lab: LabCommand, findings: Findings) -> None:
    contestants: dict[str, Callable[[], Mapping[str, float]]] = {}
    for size in SIZES:
        some = ",".join(NODES[:size])
        contestants[f"site.yml, {size} hosts"] = partial(_site, lab, some)
        contestants[f"ping, {size} hosts"] = partial(_ping, lab, some)
    found = in_turns(ROUNDS, contestants, warm_up=1)
    findings.raw["site"] = found
    took = {name: median(timings["run"]) for name, timings in found.items()}
    plot = Series("a run with nothing to do", "hosts", "seconds")
    for size in SIZES:
        ours, ping = took[f"site.yml, {size} hosts"], took[f"ping, {size} hosts"]
        for name, value in (("site.yml", ours), ("ansible -m ping", ping)):
            plot.lines.setdefault(name, []).append((size, value))
        what, peer = f"site.yml, nothing to do, {size} hosts", "ansible all -m ping"
        findings.rows.append(Row("site", what, peer, ours, ping, unit="s", bar=6.0))
    findings.plots["site"] = plot
    few, many = (took[f"site.yml, {size} hosts"] for size in SIZES)
    findings.rows.append(
        Row(
            "site",
            f"site.yml, {SIZES[1]} hosts",
            f"itself with {SIZES[0]}, times {SIZES[1]}/{SIZES[0]}",
            many,
            few * SIZES[1] / SIZES[0],
            unit="s",
            bar=1.0,
            note="nodes and controller share the cores",
        )
    )


def _site(lab: LabCommand, some: str) -> Mapping[str, float]:
    said = ""

    def once() -> None:
        nonlocal said
        said = playbook(lab, "site.yml", "--limit", some)

    took = timed(once)
    if said.count("changed=0") != len(some.split(",")):
        raise RuntimeError(f"something was changed:\n{said[-2000:]}")
    return {"run": took}


def _ping(lab: LabCommand, some: str) -> Mapping[str, float]:
    return {"run": timed(lambda: ansible(lab, "ansible", some, "-m", "ansible.builtin.ping"))}
