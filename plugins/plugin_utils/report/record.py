# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a report is made of: everything that was gathered, checked and bounded.

It is written as JSON beside the page, and read again to find what has changed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Optional, TypeVar, Union, cast, get_args, get_origin, get_type_hints

FORMAT = 1  # of the JSON; a report of another format is not compared
MOST_NODES = 2000
MOST_ITEMS = 200_000  # of a list; the pairs of all nodes are the longest
MOST_TEXT = 600  # characters
MOST_BYTES = 64 << 20  # of a file

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Condition:
    name: str
    ok: bool
    reason: str


@dataclass(frozen=True)
class Finding:
    """As `headcnictl diagnose` reports it: docs/headcnictl.md."""

    id: str
    found: str
    means: str
    run: str
    where: str
    sure: bool


@dataclass(frozen=True)
class Pool:
    network: str
    subnet: str
    total: int
    free: int
    leaked: int

    @property
    def used(self) -> int:
        return self.total - self.free

    @property
    def percent(self) -> int:
        return 100 * self.used // self.total if self.total else 100


@dataclass(frozen=True)
class Firewall:
    name: str
    ok: bool
    summary: str


@dataclass(frozen=True)
class Route:
    """A route to pods that is not as it should be."""

    dst: str
    node: str
    state: str


@dataclass(frozen=True)
class Approval:
    """A pod CIDR of the node, as Headscale has it."""

    cidr: str
    advertised: bool
    approved: bool
    served: bool

    @property
    def in_words(self) -> str:
        if self.approved:
            return "approved" if self.served else "approved, not served"
        return "not approved" if self.advertised else "not advertised"

    @property
    def ok(self) -> bool:
        return self.approved and self.served


@dataclass(frozen=True)
class Node:
    """`problem` says why the node did not answer; all that it would have told is empty."""

    name: str
    site: str
    problem: str = ""
    ready: bool = False
    mode: str = ""
    version: str = ""
    tailscaled: str = ""
    kernel: str = ""
    distribution: str = ""
    python: str = ""
    pods: int = 0
    pod_cidrs: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    tailnet_name: str = ""
    key_expires: float = 0.0
    repaired: int = 0
    conditions: tuple[Condition, ...] = ()
    firewalls: tuple[Firewall, ...] = ()
    pools: tuple[Pool, ...] = ()
    findings: tuple[Finding, ...] = ()
    warnings: tuple[str, ...] = ()
    wrong_routes: tuple[Route, ...] = ()
    approvals: tuple[Approval, ...] = ()
    headscale_online: Optional[bool] = None
    unanswered: tuple[str, ...] = ()  # the parts that could not be read, with the reason


@dataclass(frozen=True)
class Path:
    """The measured path from a node to another one, both named as in the inventory."""

    source: str
    target: str
    kind: str
    through: str
    sent: int
    lost: int
    latency_ms: Optional[float]


@dataclass(frozen=True)
class Report:
    made_at: float
    nodes: tuple[Node, ...]
    paths: tuple[Path, ...]
    headscale: str = ""  # its version
    headscale_problem: str = ""  # why approvals are not known
    strangers: tuple[str, ...] = ()  # measured peers that are not in the inventory
    format: int = FORMAT


class ReportError(Exception):
    """The data of a report cannot be used. The message says which part, and why."""


def text(value: object, most: int = MOST_TEXT) -> str:
    """Printable and short."""
    shown = "" if value is None else str(value)[: 2 * most]
    shown = "".join(c if c.isprintable() else " " for c in shown).strip()
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def written(report: Report) -> str:
    return json.dumps(asdict(report), ensure_ascii=False, separators=(",", ":")) + "\n"


def read(content: bytes) -> Report:
    if len(content) > MOST_BYTES:
        raise ReportError(f"it has {len(content)} bytes, expected at most {MOST_BYTES}")
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError):
        raise ReportError("it is not JSON") from None
    if not isinstance(raw, Mapping) or raw.get("format") != FORMAT:
        raise ReportError(f"it is not of format {FORMAT}, which this version of the report reads")
    return _of(Report, raw, "report")


def _of(kind: Callable[..., Kind], raw: object, where: str) -> Kind:
    if not isinstance(raw, Mapping):
        raise ReportError(f"{where}: expected an object")
    known = _hints(kind)
    given = {
        name: _value(known[name], raw[name], f"{where}.{name}") for name in known if name in raw
    }
    try:
        return kind(**given)
    except TypeError:
        raise ReportError(
            f"{where}: {', '.join(sorted(set(known) - set(given)))} missing"
        ) from None


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _value(kind: Any, raw: object, where: str) -> Any:
    if get_origin(kind) is Union:  # Optional
        return None if raw is None else _value(get_args(kind)[0], raw, where)
    if get_origin(kind) is tuple:
        if not isinstance(raw, list) or len(raw) > MOST_ITEMS:
            raise ReportError(f"{where}: expected a list of at most {MOST_ITEMS} items")
        return tuple(_value(get_args(kind)[0], item, where) for item in raw)
    if is_dataclass(kind):
        return _of(cast(Callable[..., Any], kind), raw, where)
    if kind is float and isinstance(raw, (int, float)) and not isinstance(raw, bool):
        if math.isfinite(raw):
            return float(raw)
    elif kind is str and isinstance(raw, str):
        return text(raw)
    elif (kind is int and isinstance(raw, int) and not isinstance(raw, bool)) or (
        kind is bool and isinstance(raw, bool)
    ):
        return raw
    raise ReportError(f"{where}: expected {kind.__name__}, not {text(raw, 40)!r}")
