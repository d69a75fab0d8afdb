"""``headcnictl metrics``: what the daemon measures, what it means, and which values are normal."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple

from ..errors import CniError
from ..settings import control_path
from . import node
from .daemon_client import asked
from .main import NO, OK, CannotTell, show
from .normal import RULES, Series, anything, duration
from .terminal import BAD, GOOD, paint, wrapped

PREFIX = "headcni_"
MOST_METRICS = 1000
SHOWN_SERIES = 5  # of a metric, in the list of all


class Measure(NamedTuple):
    """A metric. ``outside`` has the series that are not normal, each with the reason."""

    name: str
    type: str
    meaning: str
    normal: str
    series: List[Series]
    outside: List[Tuple[Series, str]]
    more: int  # series that the daemon has left out


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        default="",
        help="only metrics with this in their name, and all their series",
    )
    node.with_config(parser)


def run(args: argparse.Namespace) -> int:
    found = [one for one in measures(args) if args.name.lower() in one.name]
    if not found:
        raise CannotTell(f"no metric has {args.name[:80]!r} in its name: see headcnictl metrics")
    if args.json:
        show({"metrics": [_as_dict(one) for one in found]}, as_json=True)
    else:
        show(_in_words(found, len(found) if args.name else 0), as_json=False)
    return NO if any(one.outside for one in found) else OK


def measures(args: argparse.Namespace) -> List[Measure]:
    """All metrics, those outside of what is normal first."""
    try:
        with asked("metrics", control_path(node.load(args))) as answers:
            found = [_measure(answer) for answer in islice(answers, MOST_METRICS)]
    except CniError as problem:
        raise CannotTell(str(problem)) from None
    return sorted(
        found, key=lambda one: (not one.outside, not one.name.startswith(PREFIX), one.name)
    )


def _measure(answer: Mapping[str, Any]) -> Measure:
    name, samples = answer["name"], answer["samples"]
    series = _histograms(name, samples) if answer["type"] == "histogram" else _plain(samples)
    outside = RULES.get(name, anything)(series)
    known = (answer["meaning"], answer["normal"], series, outside, answer["more"])
    return Measure(name, answer["type"], *known)


def _plain(samples: Sequence[Any]) -> List[Series]:
    return [Series(labels, value) for _name, labels, value in samples]


def _histograms(name: str, samples: Sequence[Any]) -> List[Series]:
    """From the buckets, the count and the sum of each combination of labels."""
    parts: Dict[Tuple[Tuple[str, str], ...], Dict[str, Any]] = {}
    for sample, labels, value in samples:
        key = tuple(sorted((label, text) for label, text in labels.items() if label != "le"))
        known = parts.setdefault(key, {"buckets": []})
        if sample == f"{name}_bucket":
            known["buckets"].append((float(labels["le"]), value))
        else:
            known[sample[len(name) + 1 :]] = value
    found = []
    for key, known in parts.items():
        count = known.get("count", 0.0)
        mean = known.get("sum", 0.0) / count if count else None
        reached = (upper for upper, below in known["buckets"] if below >= 0.99 * count)
        p99 = next(reached, float("inf")) if count else None
        found.append(Series(dict(key), count, mean, p99 if p99 != float("inf") else None))
    return found


def _in_words(found: List[Measure], all_series: int) -> str:
    outside = [one for one in found if one.outside]
    lines: List[str] = []
    for one in found:
        title = paint(one.name, BAD) if one.outside else one.name
        mark = paint("!", BAD) if one.outside else " "
        lines.append(f"{mark} {title}")
        lines.append(wrapped(one.meaning, "    ", "    "))
        lines.append(wrapped(f"normal: {one.normal}", "    ", "    "))
        lines += _values(one, 0 if all_series else SHOWN_SERIES)
    said = f"{len(outside)} of {len(found)} metrics are outside of what is normal"
    lines.append(paint(said, BAD if outside else GOOD))
    return "\n".join(lines)


def _values(one: Measure, most: int) -> Iterator[str]:
    """The series that are not normal, and then the others, the largest first."""
    reasons = {id(series): reason for series, reason in one.outside}
    ranked = sorted(one.series, key=lambda series: (id(series) not in reasons, -series.value))
    if not ranked:
        yield "    now: nothing of this kind since the daemon started"
    for series in ranked[: most or None]:
        labels = ", ".join(f"{label}={text}" for label, text in series.labels.items())
        said = f"now: {labels + ': ' if labels else ''}{_value(one, series)}"
        reason = reasons.get(id(series), "")
        line = wrapped(f"{said} ({reason})" if reason else said, "    ", "      ")
        yield paint(line, BAD) if reason else line
    left = max(0, len(ranked) - most) if most else 0
    if left or one.more:
        yield f"    and {left + one.more} more: headcnictl metrics {one.name}"


def _value(one: Measure, series: Series) -> str:
    if one.type != "histogram":
        return f"{series.value:.15g}" if one.name.endswith("_bytes") else f"{series.value:.10g}"
    if series.mean is None:
        return "0 times"
    within = f", 99 % within {duration(series.p99)}" if series.p99 is not None else ""
    return f"{series.value:.0f} times, {duration(series.mean)} on average{within}"


def _as_dict(one: Measure) -> Dict[str, Any]:
    listed = []
    reasons = {id(series): reason for series, reason in one.outside}
    for series in one.series:
        known: Dict[str, Any] = {"labels": series.labels}
        if one.type == "histogram":
            known.update(count=series.value, mean=series.mean, p99=series.p99)
        else:
            known["value"] = series.value
        listed.append({**known, "outside": reasons.get(id(series), "")})
    return {
        "name": one.name,
        "type": one.type,
        "meaning": one.meaning,
        "normal": one.normal,
        "outside": bool(one.outside),
        "series": listed,
        "more": one.more,
    }
