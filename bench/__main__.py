"""Run the parts, show the table, keep the figures, and fail if a bar is missed."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lab import tools

from . import (
    cni,
    controller,
    fleet,
    headscale,
    hostile,
    ipam,
    k8s,
    plots,
    policy,
    routes,
    site,
    spoofing,
    stage,
    traffic,
)
from .measure import Findings, Row

ON_A_STAGE = {
    "cni": cni.run,
    "hostile": hostile.run,
    "ipam": ipam.run,
    "memory": cni.memory,
    "policy": policy.run,
    "routes": routes.run,
    "spoofing": spoofing.run,
}
ON_THE_FLEET = {"site": site.run, "traffic": traffic.run}
BY_ITSELF = {"controller": controller.run, "headscale": headscale.run, "k8s": k8s.run}
PARTS = (*ON_A_STAGE, *BY_ITSELF, *ON_THE_FLEET)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--output", type=Path, default=Path("dist/bench"), help="(%(default)s)")
    args = parser.parse_args()
    wanted = args.parts or [part for part in PARTS if part != "k8s" or cluster_is_built()]
    unknown = sorted(set(wanted) - set(PARTS))
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}: expected {', '.join(PARTS)}")
    if "k8s" in wanted and not cluster_is_built():
        parser.error("k8s: k3s is not built: `python3 -m lab tools k3s coredns`, some 15 minutes")
    findings, about = Findings(), stage.versions()
    # What was made is taken away by who is told to end, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    def told(part: str, work: Callable[[Findings], None]) -> None:
        """What a part took and found is shown and kept as it goes."""
        began, before = time.monotonic(), len(findings.rows)
        print(f"  … {part}", file=sys.stderr, flush=True)
        work(findings)
        print(f"  ✓ {part}: {time.monotonic() - began:.0f} s", file=sys.stderr)
        for row in findings.rows[before:]:
            print(f"    {line(row)}", file=sys.stderr)
        keep(args.output, findings, about)

    if staged := [part for part in ON_A_STAGE if part in wanted]:
        with stage.entered() as node:
            for part in staged:
                told(part, partial(ON_A_STAGE[part], node))
    for part in BY_ITSELF:
        if part in wanted:
            told(part, BY_ITSELF[part])
    if together := [part for part in ON_THE_FLEET if part in wanted]:
        print(f"  … booting {len(fleet.NODES)} nodes", file=sys.stderr, flush=True)
        with fleet.standing() as nodes:
            for part in together:
                told(part, partial(ON_THE_FLEET[part], nodes))
    print(report(findings, about))
    print(f"\nkept in {args.output}: bench.json, bench.md, {len(findings.plots)} plots")
    missed = [row for row in findings.rows if not row.met]
    if missed:
        print(f"{len(missed)} of {len(findings.rows)} bars were missed", file=sys.stderr)
    return 1 if missed else 0


def cluster_is_built() -> bool:
    return not tools.missing(tools.CLUSTERS["k3s"])


def report(findings: Findings, about: dict[str, str]) -> str:
    lines = [table(findings.rows, about)]
    if findings.breakdown:
        lines += ["", "| of one ADD | ms |", "| --- | --- |"]
        lines += [f"| {what} | {took:.2f} |" for what, took in findings.breakdown.items()]
    return "\n".join(lines)


def table(rows: list[Row], about: dict[str, str]) -> str:
    lines = [
        "; ".join(f"{name} {value}" for name, value in about.items()),
        "",
        "| what | peer | ours | peer's | ratio | bar | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*lines, *map(line, rows)])


def line(row: Row) -> str:
    sign = "≥" if row.at_least else "≤"
    bar = f"{sign} {row.bar:g}" if row.bar is not None else ""
    if row.limit is not None:
        bar += f", ≤ {row.limit:g} {row.unit}"
    note = f" ({row.note})" if row.note else ""
    return (
        f"| {row.what}{note} | {row.peer} | {figure(row.ours)} {row.unit} | "
        f"{figure(row.theirs)} {row.unit} | {row.ratio:.2f} | {bar} | {'✓' if row.met else '✗'} |"
    )


def figure(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def keep(folder: Path, findings: Findings, about: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    whole = {
        "about": about,
        "rows": [row.as_dict() for row in findings.rows],
        "raw": findings.raw,
    }
    (folder / "bench.json").write_text(json.dumps(whole, indent=1) + "\n")
    (folder / "bench.md").write_text(report(findings, about) + "\n")
    for name, plot in findings.plots.items():
        (folder / f"{name}.svg").write_text(plots.svg(plot))


if __name__ == "__main__":
    sys.exit(main())
