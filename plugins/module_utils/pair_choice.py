# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which pairs of nodes to test, so that the number does not grow with the square of the nodes."""

from __future__ import annotations

from collections.abc import Sequence

ALL_UP_TO = 20  # nodes; with more, only a sample of the pairs is tested
ALL_MEASURED_UP_TO = 8  # nodes; throughput is measured one pair after the other
DISTANCES = 6


def chosen(names: Sequence[str], every: bool = False) -> dict[str, list[str]]:
    """The others that each node tests: all of them, or twelve at distances in the list that are the
    same for all nodes. So each chosen pair is tested in both directions."""
    total = len(names)
    steps = range(1, total) if every or total <= ALL_UP_TO else _steps(total)
    return {name: [names[(at + step) % total] for step in steps] for at, name in enumerate(names)}


def _steps(total: int) -> list[int]:
    """A few near distances and a few far ones, in both directions."""
    farthest = (total - 1) // 2
    ahead = {round(farthest ** (number / (DISTANCES - 1))) for number in range(DISTANCES)}
    return sorted({*ahead, *(total - step for step in ahead)})
