"""Run the parts, show the table, keep the figures, and fail if a bar is missed."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from . import cni, ipam, plots, routes, stage
from .measure import Findings, Row

PARTS = ("cni", "ipam", "memory", "routes")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--output", type=Path, default=Path("dist/bench"), help="(%(default)s)")
    args = parser.parse_args()
    wanted = args.parts or list(PARTS)
    unknown = sorted(set(wanted) - set(PARTS))
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}: expected {', '.join(PARTS)}")
    findings, about = Findings(), stage.versions()
    with stage.entered() as node:
        work = {
            "cni": lambda: cni.run(node, findings),
            "ipam": lambda: ipam.run(node, findings),
            "memory": lambda: cni.memory(node, findings),
            "routes": lambda: routes.run(node, findings),
        }
        for part in wanted:
            began = time.monotonic()
            print(f"  … {part}", file=sys.stderr, flush=True)
            work[part]()
            print(f"  ✓ {part}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(table(findings.rows, about))
    keep(args.output, findings, about)
    missed = [row for row in findings.rows if not row.met]
    if missed:
        print(f"{len(missed)} of {len(findings.rows)} bars were missed", file=sys.stderr)
    return 1 if missed else 0


def table(rows: list[Row], about: dict[str, str]) -> str:
    lines = [
        "; ".join(f"{name} {value}" for name, value in about.items()),
        "",
        "| what | peer | ours | peer's | ratio | bar | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        sign = "≥" if row.at_least else "≤"
        bar = f"{sign} {row.bar:g}" if row.bar is not None else ""
        if row.limit is not None:
            bar += f", ≤ {row.limit:g} {row.unit}"
        note = f" ({row.note})" if row.note else ""
        lines.append(
            f"| {row.what}{note} | {row.peer} | {row.ours:.3g} {row.unit} | "
            f"{row.theirs:.3g} {row.unit} | {row.ratio:.2f} | {bar} | {'✓' if row.met else '✗'} |"
        )
    return "\n".join(lines)


def keep(folder: Path, findings: Findings, about: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    whole = {
        "about": about,
        "rows": [row.as_dict() for row in findings.rows],
        "raw": findings.raw,
    }
    (folder / "bench.json").write_text(json.dumps(whole, indent=1) + "\n")
    (folder / "bench.md").write_text(table(findings.rows, about) + "\n")
    for name, plot in findings.plots.items():
        (folder / f"{name}.svg").write_text(plots.svg(plot))
    print(f"\nkept in {folder}: bench.json, bench.md, {len(findings.plots)} plots")


if __name__ == "__main__":
    sys.exit(main())
