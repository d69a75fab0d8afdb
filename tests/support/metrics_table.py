"""Every metric of the daemon, as a table for docs/metrics.md.

Most counters and histograms are those of a new ``Metrics``. Gauges, and counters that somebody else
counts, are registered all over the daemon, some of them only if there is an API server. Their calls
are read from the source code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import headcni
from headcni.daemon.observe.metrics import Metrics, explained

RUNTIME = Path(headcni.__file__).parent
# The methods of Metrics that register a metric, each with the type and the suffix of its name.
REGISTERING = {"gauge": ("gauge", ""), "counted": ("counter", "_total")}


@dataclass(frozen=True, order=True)
class Row:
    """A metric as Prometheus stores it: a counter with its suffix _total."""

    name: str
    type: str
    labels: tuple[str, ...]
    meaning: str
    normal: str


def rows() -> list[Row]:
    metrics = Metrics()
    found = [*_registered()]
    for collector in list(metrics.registry._collector_to_names):
        for family in collector.collect():
            of_samples = {label: 0 for sample in family.samples for label in sample.labels}
            labels = tuple(getattr(collector, "_labelnames", of_samples))
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found.append(_row(name, family.type, labels, family.documentation))
    return sorted(found)


def _row(name: str, kind: str, labels: tuple[str, ...], about: str) -> Row:
    return Row(name, kind, labels, *explained(name, about))


def _registered() -> Iterator[Row]:
    for path in sorted(RUNTIME.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and _called(node.func) in REGISTERING:
                yield _of_call(path, node)


def _called(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _of_call(path: Path, call: ast.Call) -> Row:
    """gauge(name, about, read, labels): only `read` may be something other than a literal."""
    kind, suffix = REGISTERING[_called(call.func)]
    given = dict(zip(("name", "about", "read", "labels"), call.args))
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    try:
        name, about = (ast.literal_eval(given[key]) for key in ("name", "about"))
        labels = ast.literal_eval(given["labels"]) if "labels" in given else ()
    except (KeyError, ValueError):
        where = f"{path.relative_to(RUNTIME)}:{call.lineno}"
        raise SystemExit(
            f"{where}: give {_called(call.func)}() its name, help and labels as literals, because"
            " docs/metrics.md is generated from them"
        ) from None
    return _row(f"headcni_{name}{suffix}", kind, tuple(labels), about)


def table(ours: bool) -> str:
    lines = ["| metric | type | labels | meaning | normal |", "| --- | --- | --- | --- | --- |"]
    for row in rows():
        if row.name.startswith("headcni_") is ours:
            labels = ", ".join(f"`{label}`" for label in row.labels)
            cells = (f"`{row.name}`", row.type, labels, row.meaning, row.normal)
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
