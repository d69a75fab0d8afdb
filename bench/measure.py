"""Contestants take turns, and what comes out is a ratio with a bar."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

Timings = dict[str, list[float]]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all are not above."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def median(values: Sequence[float]) -> float:
    return percentile(values, 0.5)


@dataclass(frozen=True)
class Row:
    """One line of the table. `bar` is of the ratio; without one the line only informs."""

    part: str
    what: str
    peer: str
    ours: float
    theirs: float
    unit: str
    bar: float | None = None
    at_least: bool = False
    limit: float | None = None  # and ours itself may not be above this
    note: str = ""

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs if self.theirs else math.inf

    @property
    def met(self) -> bool:
        if self.limit is not None and self.ours > self.limit:
            return False
        if self.bar is None:
            return True
        return self.ratio >= self.bar if self.at_least else self.ratio <= self.bar

    def as_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in ("part", "what", "peer", "unit", "note")},
            **{name: getattr(self, name) for name in ("ours", "theirs", "ratio", "bar", "met")},
            "at_least": self.at_least,
            "limit": self.limit,
        }


@dataclass
class Series:
    """For a plot: named lines of points."""

    title: str
    x: str
    y: str
    lines: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    logarithmic: bool = False


@dataclass
class Findings:
    rows: list[Row] = field(default_factory=list)
    plots: dict[str, Series] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)
    breakdown: dict[str, float] = field(default_factory=dict)  # of one ADD, in milliseconds


def median_error(values: Sequence[float]) -> float:
    """One standard error of the median, from the middle half: outliers do not count."""
    quarters = quantiles(values, n=4)
    return 1.2533 * (quarters[2] - quarters[0]) / 1.349 / len(values) ** 0.5


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@contextmanager
def frozen() -> Iterator[None]:
    """As the daemon does at its start: what is old is not looked through for garbage, and this
    process has much more of that."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def in_turns(
    rounds: int, contestants: Mapping[str, Callable[[], Mapping[str, float]]], warm_up: int = 3
) -> dict[str, Timings]:
    """Each contestant once a round, in an order that turns; what each took, by name and step. What
    the first rounds took is kept apart, under `warm-up`."""
    found: dict[str, Timings] = {name: {} for name in contestants}
    names = list(contestants)
    for number in range(-warm_up, rounds):
        for name in names if number % 2 else reversed(names):
            for step, seconds in contestants[name]().items():
                kept = step if number >= 0 else f"{step} warm-up"
                found[name].setdefault(kept, []).append(seconds)
    return found


def distribution(timings: Mapping[str, Sequence[float]], title: str) -> Series:
    """How many of the calls took no longer than so many milliseconds."""
    plot = Series(title, "milliseconds", "share of calls", logarithmic=True)
    for name, values in timings.items():
        ordered = sorted(values)
        plot.lines[name] = [
            (1000 * value, (number + 1) / len(ordered)) for number, value in enumerate(ordered)
        ]
    return plot
