"""The kinds of values in the configuration file: how each is read, and its JSON Schema."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any, Callable, NamedTuple, Tuple

from .. import port_ranges
from ..model import Network, PortRange
from ..shared.podcidr import PodCidrError, parse_cidr, parse_sizes
from ..tailnet_access import MOST_ENTRIES, MOST_NAMESPACES, NAMESPACE, WrongAccess
from ..tailnet_access import parse as parse_access

_TAG = r"tag:[A-Za-z][A-Za-z0-9-]{0,62}"
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class WrongValue(Exception):
    """Says what was expected instead of a value, or of its items as (place, value, expected)."""

    def __init__(self, expected: str = "", items: Sequence[Tuple[str, Any, str]] = ()) -> None:
        super().__init__(expected)
        self.items = items


class Kind(NamedTuple):
    """The kind of a key's value: how to read it, and its JSON Schema."""

    read: Callable[[Any], Any]
    schema: Mapping[str, Any]

    @property
    def expected(self) -> str:
        """Which values are valid, in the words that a mistake gets."""
        try:
            self.read(object())
        except WrongValue as wrong:
            return str(wrong)
        return ""


def flag() -> Kind:
    def read(value: Any) -> bool:
        if isinstance(value, bool):
            return value
        raise WrongValue("true or false")

    return Kind(read, {"type": "boolean"})


def number(low: int, high: int) -> Kind:
    def read(value: Any) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        raise WrongValue(f"a number from {low} to {high}")

    return Kind(read, {"type": "integer", "minimum": low, "maximum": high})


def seconds(low: float, high: float) -> Kind:
    """A number of seconds, or 500ms, 30s, 5m, 1h."""

    def read(value: Any) -> float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            seconds = float(value)
        else:
            match = re.match(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h)\Z", str(value))
            seconds = float(match[1]) * _UNITS[match[2]] if match else -1.0
        if low <= seconds <= high:
            return seconds
        raise WrongValue(f"a time such as 30s or 5m, from {_time(low)} to {_time(high)}")

    number = {"type": "number", "minimum": low, "maximum": high}
    text = {"type": "string", "pattern": r"^\d{1,9}(\.\d{1,9})?(ms|s|m|h)$"}
    return Kind(read, {"anyOf": [number, text]})


def _time(seconds: float) -> str:
    for unit in ("h", "m", "s"):
        if seconds >= _UNITS[unit] and seconds % _UNITS[unit] == 0:
            return f"{seconds / _UNITS[unit]:g}{unit}"
    return f"{seconds * 1000:g}ms"


def choice(*options: str, any_case: bool = False) -> Kind:
    def read(value: Any) -> str:
        for option in options:
            same = isinstance(value, str) and (
                value.upper() == option.upper() if any_case else value == option
            )
            if same:
                return option
        raise WrongValue(" or ".join(options))

    spelled = [*options, *(o.lower() for o in options)] if any_case else options
    return Kind(read, {"enum": list(spelled)})


def text(valid: Callable[[str], Any], expected: str, pattern: str = "") -> Kind:
    def read(value: Any) -> str:
        if isinstance(value, str) and valid(value):
            return value
        raise WrongValue(expected)

    return Kind(read, {"type": "string", **({"pattern": pattern} if pattern else {})})


def pattern(pattern: str, expected: str) -> Kind:
    return text(lambda text: re.match(f"(?:{pattern})\\Z", text), expected, f"^(?:{pattern})?$")


def path() -> Kind:
    return pattern(r"/.*", "an absolute path")


def is_address(text: str) -> bool:
    try:
        return bool(ip_address(text))
    except ValueError:
        return False


def several(item: Kind, expected: str) -> Kind:
    def read(value: Any) -> Tuple[Any, ...]:
        if not isinstance(value, list):
            raise WrongValue(f"a list, of {expected} each")
        good, bad = [], []
        for at, entry in enumerate(value):
            try:
                good.append(item.read(entry))
            except WrongValue as wrong:
                bad.append((f"[{at}]", entry, str(wrong)))
        if bad:
            raise WrongValue(items=bad)
        return tuple(good)

    return Kind(read, {"type": "array", "items": item.schema})


_CIDR_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 2}]
}


def cidrs(parse: Callable[[Any], Tuple[Network, ...]]) -> Kind:
    """One CIDR, or one of each family: a string, a comma list or a list."""

    def read(value: Any) -> Tuple[Network, ...]:
        if not isinstance(value, (str, list)) or not all(isinstance(item, str) for item in value):
            raise WrongValue("a CIDR such as 10.244.1.0/24, or one of each family")
        try:
            return parse(value)
        except PodCidrError as problem:
            raise WrongValue(f"a CIDR such as 10.244.1.0/24: {problem}") from None

    return Kind(read, _CIDR_SCHEMA)


def any_cidrs(value: Any) -> Tuple[Network, ...]:
    texts = value.split(",") if isinstance(value, str) else value
    found = tuple(parse_cidr(text.strip()) for text in texts if text.strip())
    if len({cidr.version for cidr in found}) < len(found):
        raise PodCidrError("two of one family")
    return found


def sizes() -> Kind:
    """Prefix lengths as the resolver reads them: 24, "24" and ["/24"] all mean /24."""

    def read(value: Any) -> str:
        try:
            return ",".join(f"/{size}" for size in parse_sizes(value).values())
        except (PodCidrError, TypeError, AttributeError):
            raise WrongValue("the prefix length of a node's share: /24, or /24,/64") from None

    return Kind(read, {"anyOf": [{"type": "integer"}, {"type": "string"}]})


def answered() -> Kind:
    """true, false, or a list of ports; an empty list is false."""
    most = port_ranges.MOST_ANSWERED

    def read(value: Any) -> port_ranges.Answered:
        if isinstance(value, bool):
            return value
        if not isinstance(value, list) or len(value) > most:
            raise WrongValue(f"true, false or a list of up to {most} ports such as [22, 6443/tcp]")
        return ports.read(value) or False

    ports = several(answered_port(), "a port")
    return Kind(read, {"anyOf": [{"type": "boolean"}, {**ports.schema, "maxItems": most}]})


def answered_port() -> Kind:
    def read(value: Any) -> PortRange:
        try:
            return port_ranges.parse(value, port_ranges.ANSWERED_PROTOCOLS)
        except ValueError as problem:
            raise WrongValue(str(problem)) from None

    text = {"type": "string", "pattern": f"^{port_ranges.PATTERN}(/(tcp|udp))?$"}
    return Kind(read, {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 65535}, text]})


def tags() -> Kind:
    """A list of tags, a single tag, or `any` to accept every peer."""

    def read(value: Any) -> Tuple[str, ...]:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list):
            raise WrongValue("a list of tags such as tag:headcni, or any")
        if texts == ["any"]:
            return ()
        bad = [
            (f"[{at}]", text, "a tag such as tag:headcni; any stands alone")
            for at, text in enumerate(texts)
            if not isinstance(text, str) or not re.match(f"(?:{_TAG})\\Z", text)
        ]
        if bad:
            raise WrongValue(items=bad)
        return tuple(texts)

    single = {"type": "string", "pattern": f"^(any|{_TAG})?$"}
    several = {"type": "array", "items": {"type": "string", "pattern": f"^{_TAG}$"}}
    return Kind(read, {"anyOf": [single, several]})


class Accesses(Tuple[Tuple[str, str], ...]):
    """What namespaces may reach of the tailnet: an immutable mapping."""


_ONE_ACCESS = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {"type": "string"},
            "maxItems": MOST_ENTRIES,
        },
    ]
}


def access() -> Kind:
    """all, pods, or a list of addresses and ports."""

    def read(value: Any) -> str:
        try:
            return parse_access(value)
        except WrongAccess as wrong:
            if isinstance(value, list) and wrong.at >= 0:
                items = [(f"[{wrong.at}]", value[wrong.at], str(wrong))]
                raise WrongValue(items=items) from None
            raise WrongValue(str(wrong)) from None

    return Kind(read, _ONE_ACCESS)


def accesses() -> Kind:
    """A value as above for each namespace."""
    most, value_of = MOST_NAMESPACES, access()

    def read(value: Any) -> Accesses:
        if not isinstance(value, Mapping):
            raise WrongValue("namespaces, each with all, pods or a list")
        if len(value) > most:
            raise WrongValue(f"at most {most} namespaces")
        good, bad = {}, []
        for name, access in value.items():
            if not isinstance(name, str) or not re.match(f"{NAMESPACE}\\Z", name):
                bad.append((f"[{name}]", name, "the name of a namespace"))
                continue
            try:
                good[name] = value_of.read(access)
            except WrongValue as wrong:
                items = wrong.items or (("", access, str(wrong)),)
                bad += [(f"[{name}]{at}", found, expected) for at, found, expected in items]
        if bad:
            raise WrongValue(items=bad)
        return Accesses(sorted(good.items()))

    schema = {"type": "object", "additionalProperties": _ONE_ACCESS, "maxProperties": most}
    return Kind(read, schema)
