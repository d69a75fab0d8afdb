"""A line chart as SVG, by hand: a plotting library would be the heaviest thing in the checkout."""

from __future__ import annotations

import math
from html import escape

from .measure import Series

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 50, 60
COLOURS = ("#1f6f5c", "#c8553d", "#3b6fb6", "#8a6bb1", "#b58900", "#555555")


def svg(plot: Series) -> str:
    points = [point for line in plot.lines.values() for point in line]
    across = _Scale([x for x, _ in points], LEFT, WIDTH - RIGHT, plot.logarithmic)
    up = _Scale([0.0, *(y for _, y in points)], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="15">{escape(plot.title)}</text>',
    ]
    for value in up.ticks():
        y = up(value)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(value)}</text>'
        )
    for value in across.ticks():
        x = across(value)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#eee"/>'
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{_short(value)}'
            "</text>"
        )
    for number, (name, line) in enumerate(plot.lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{LEFT + 10}" y="{TOP + 14 + 16 * number}" fill="{colour}">{escape(name)}'
            "</text>"
        )
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 18}" text-anchor="middle">'
        f"{escape(plot.x)}</text>"
        f'<text x="16" y="{HEIGHT / 2}" text-anchor="middle" '
        f'transform="rotate(-90 16 {HEIGHT / 2})">{escape(plot.y)}</text></svg>'
    )
    return "\n".join(parts) + "\n"


class _Scale:
    """From values to places."""

    def __init__(
        self, values: list[float], first: float, last: float, logarithmic: bool = False
    ) -> None:
        self.logarithmic = logarithmic and min(values) > 0
        self.low, self.high = min(values), max(values)
        if self.low == self.high:
            self.high = self.low + 1
        self.first, self.last = first, last

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.logarithmic:
            low, high, at = math.log(low), math.log(high), math.log(value)
        return self.first + (at - low) / (high - low) * (self.last - self.first)

    def ticks(self) -> list[float]:
        if self.logarithmic:
            found = [
                digit * 10.0**power
                for power in range(-6, 7)
                for digit in (1, 2, 5)
                if self.low <= digit * 10.0**power <= self.high
            ]
            return found or [self.low, self.high]
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / 4))
        for factor in (1, 2, 5, 10):
            if (self.high - self.low) / (step * factor) <= 6:
                step *= factor
                break
        first = math.ceil(self.low / step)
        return [number * step for number in range(first, int(self.high / step) + 1)]


def _short(value: float) -> str:
    return f"{value:g}" if abs(value) < 10000 else f"{value / 1000:g}k"
