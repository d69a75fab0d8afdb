"""Problems of a configuration: collected while it is read, and shown to people and programs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from ipaddress import ip_network

from . import light_json as json
from .errors import INVALID_CONFIG, CniError, shortened
from .model import Network
from .record import TYPE_CHECKING, NamedTuple
from .shared.cidr import PodCidrError, parse_cidr

if TYPE_CHECKING:
    from typing import Any

LONGEST_VALUE = 120  # characters of a value in a message
MISTAKES_NAMED = 16

_SENT_BY_LIBCNI = (".Name", ".name")  # its Go structs have no JSON names for them


class Problem(NamedTuple):
    """A mistake: the path in the configuration, the value, and what was expected."""

    path: str
    value: object
    expected: str

    def __str__(self) -> str:
        path = shortened(self.path, LONGEST_VALUE)
        value = shortened(repr(self.value), LONGEST_VALUE)
        return f"{path} is {value}: expected {self.expected}"


class UnknownKey(Problem):
    """A key that nobody reads. host-local ignores such keys, so a call only warns of it."""


def tolerated(problems: list[Problem]) -> list[Problem]:
    """The mistakes without unknown keys, which are written to the log as warnings."""
    for problem in problems:
        if isinstance(problem, UnknownKey) and not problem.path.endswith(_SENT_BY_LIBCNI):
            path = shortened(problem.path, LONGEST_VALUE)
            warn(f"{path} is ignored: expected {problem.expected}")
    return [problem for problem in problems if not isinstance(problem, UnknownKey)]


@lru_cache(maxsize=256)
def warn(text: str) -> None:
    """On stderr, once in a process: the daemon must not repeat it for each pod."""
    with suppress(OSError, ValueError, AttributeError):  # stderr may be closed or missing
        print(f"level=warning msg={json.dumps(text)}", file=sys.stderr, flush=True)


def in_words(problem: Problem) -> str:
    shown = "missing" if problem.value is None else json.dumps(problem.value, default=str)
    path = shortened(problem.path, LONGEST_VALUE) or "the configuration"
    return f"{path} is {shortened(shown, LONGEST_VALUE)}: expected {problem.expected}"


def error(problems: Sequence[Problem], in_words: Callable[[Problem], str] = in_words) -> CniError:
    """One error for all mistakes. It names the first ones and counts the others."""
    details = "; ".join(named_mistakes(problems, in_words))
    return CniError(INVALID_CONFIG, f"the configuration has {_count(problems)}", details)


def named_mistakes(problems: Sequence[Problem], in_words: Callable[[Problem], str]) -> list[str]:
    """The first of them, and how many more there are."""
    named = [in_words(problem) for problem in problems[:MISTAKES_NAMED]]
    more = len(problems) - len(named)
    return [*named, f"and {more} more"] if more else named


def render(problems: Sequence[Problem], as_json: bool = False) -> str:
    """All mistakes: one line each for people, or JSON for programs."""
    if as_json:
        import json

        listed = [{"path": p.path, "value": p.value, "expected": p.expected} for p in problems]
        return json.dumps({"valid": not problems, "problems": listed}, indent=2, default=str)
    if not problems:
        return "no mistakes"
    return "\n".join([_count(problems), *(f"  {in_words(problem)}" for problem in problems)])


def _count(problems: Sequence[Problem]) -> str:
    return "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"


def unknown_keys(
    section: Mapping[str, Any], known: Sequence[str], path: str, problems: list[Problem]
) -> None:
    """Add each unknown key to the problems, with the known key that was probably meant."""
    for key in section:
        if key not in known:
            expected = f"a known key: {_hint(nearest(key, known), known)}"
            problems.append(UnknownKey(f"{path}.{key}", section[key], expected))


def nearest(key: str, known: Sequence[str], likeness: float = 0.6) -> str:
    """The known key that is similar, or ""."""
    import difflib  # takes 4 ms, and only mistakes need it

    plain = {_plain(name): name for name in known}
    near = difflib.get_close_matches(_plain(key), plain, 1, likeness)
    return plain[near[0]] if near else ""


def _plain(key: str) -> str:
    return key.replace("_", "").replace("-", "").lower()


def _hint(near: str, known: Sequence[str]) -> str:
    return f"{near}?" if near else f"one of {', '.join(known)}"


class Section:
    """One object of the configuration: reads its keys, and notes what is wrong with them.

    A reader returns the default for a value that is not given or wrong.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        path: str,
        found: list[Problem],
        spelled: Mapping[str, str] | None = None,
    ) -> None:
        self.values = values
        self.path = path
        self.found = found
        self.spelled = spelled or {}

    def at(self, key: str) -> str:
        key = self.spelled.get(key, key)
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str) -> Any:
        return self.values.get(self.spelled.get(key, key))

    def wrong(self, key: str, value: Any, expected: str) -> None:
        self.found.append(Problem(self.at(key), value, expected))

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.wrong(key, value, "true or false")
        return default

    def number(self, key: str, default: int, low: int, high: int) -> int:
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        self.wrong(key, value, f"a number from {low} to {high}")
        return default

    def text(
        self, key: str, default: str | None, valid: Callable[[str], bool], expected: str
    ) -> str:
        """A string, where an empty one is not given; one without a default must be."""
        value = self.get(key)
        if value in (None, "") and default is not None:
            return default
        if isinstance(value, str) and valid(value):
            return value
        self.wrong(key, value, expected)
        return default or ""

    def choice(self, key: str, *options: str) -> str:
        return self.text(key, options[0], lambda v: v in options, " or ".join(options))

    def path_name(self, key: str, default: str) -> str:
        return self.text(key, default, lambda v: v.startswith("/"), "an absolute path")

    def items(self, key: str, expected: str) -> Iterator[tuple[str, Any]]:
        """The items of a list, each with its path."""
        value = self.get(key)
        if value is None:
            return
        if not isinstance(value, list):
            self.wrong(key, value, expected)
            return
        for index, item in enumerate(value):
            yield f"{key}[{index}]", item

    def texts(self, key: str, valid: Callable[[str], bool], expected: str) -> tuple[str, ...]:
        found = []
        for path, item in self.items(key, f"a list, of {expected} each"):
            if isinstance(item, str) and valid(item):
                found.append(item)
            else:
                self.wrong(path, item, expected)
        return tuple(found)

    def networks(self, key: str) -> tuple[Network, ...]:
        """A CIDR, a comma list or a list; none of them twice or within another."""
        value = self.get(key)
        items: Iterable[tuple[str, Any]]
        if isinstance(value, str):
            items = [(key, item.strip()) for item in value.split(",")] if value else []
        else:
            items = self.items(key, "a CIDR or a list of CIDRs")
        networks: list[Network] = []
        for path, item in items:
            network = parsed_cidr(item)
            if network is None:
                self.wrong(path, item, _expected_cidr(item))
                continue
            clash = overlapping(network, networks)
            if clash is not None:
                self.wrong(path, item, f"a CIDR apart from {clash}")
            else:
                networks.append(network)
        return tuple(networks)

    def section(self, key: str) -> Section:
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            self.wrong(key, value, "an object")
        return Section(value if isinstance(value, Mapping) else {}, self.at(key), self.found)

    def only(self, known: Sequence[str], similar_only: bool = False) -> None:
        """Add each unknown key to the problems, with the known key that was probably meant."""
        for key in self.values:
            if key in known or key.startswith("_") or "." in key or "/" in key:
                continue
            near = nearest(key, known, 0.75 if similar_only else 0.6)
            if near or not similar_only:
                self.wrong(key, self.values[key], f"a known key: {_hint(near, known)}")


def parsed_cidr(value: Any) -> Network | None:
    try:
        return parse_cidr(value) if isinstance(value, str) else None
    except PodCidrError:
        return None


def _expected_cidr(value: Any) -> str:
    try:
        if isinstance(value, str) and "/" in value:
            return f"the network itself: {ip_network(value, strict=False)}"
    except ValueError:
        pass
    return "a CIDR such as 10.244.1.0/24"


def overlapping(network: Network, others: Iterable[Network]) -> Network | None:
    for other in others:
        if other.version == network.version and other.overlaps(network):
            return other
    return None
