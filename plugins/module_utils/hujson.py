# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""HuJSON: JSON with comments and trailing commas, as Headscale's policies are written.

A document is its text. An edit changes the few characters it must and reads the result again, so
that what people wrote around it stays as they wrote it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

_SPACE = re.compile(r"(?:[ \t\r\n]+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_WORD = re.compile(r"-?[0-9][0-9.eE+-]*|true|false|null")
_DEEPEST = 100


class HujsonError(ValueError):
    """The text cannot be read, or does not have the shape that an edit needs."""


@dataclass
class Value:
    """A value and where it stands. A member of an object begins with its key."""

    begin: int
    start: int
    end: int
    data: Any
    key: str = ""
    children: list[Value] = field(default_factory=list)
    trailing_comma: bool = False


class Document:
    """A text of HuJSON with one object at its top."""

    def __init__(self, text: str) -> None:
        self.text = text if text.strip() else "{}\n"
        self.top = read(self.text)
        if not isinstance(self.top.data, dict):
            raise HujsonError("it is no object")

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = self.top.data
        return found

    def find(self, path: Sequence[str]) -> Optional[Value]:
        value = self.top
        for key in path:
            if not isinstance(value.data, dict):
                return None
            named = [child for child in value.children if child.key == key]
            if not named:
                return None
            value = named[-1]
        return value

    def put(self, path: Sequence[str], data: Any) -> None:
        """Add a member; objects on the way that are not there are made."""
        parent = self.find(path[:-1])
        if parent is None:
            self.put(path[:-1], {path[-1]: data})
            return
        if parent.data is None:
            self._replace(parent, json.dumps({path[-1]: data}, ensure_ascii=False))
            return
        if not isinstance(parent.data, dict) or path[-1] in parent.data:
            raise HujsonError(f"{'.'.join(path)} cannot be added")
        self._insert(parent, data, json.dumps(path[-1], ensure_ascii=False) + ": ")

    def append(self, path: Sequence[str], data: Any) -> None:
        """Add an item to the array there."""
        array = self.find(path)
        if array is not None and array.data is None:
            self._replace(array, json.dumps([data], ensure_ascii=False))
            return
        if array is None or not isinstance(array.data, list):
            raise HujsonError(f"{'.'.join(path)} is no list")
        self._insert(array, data)

    def drop(self, path: Sequence[str], item: Any = None) -> None:
        """Take away a member, or an item of the array there."""
        parent = self.find(path if item is not None else path[:-1])
        if parent is not None:
            for child in parent.children:
                if (child.data == item) if item is not None else (child.key == path[-1]):
                    self._cut(parent, child)
                    return
        raise HujsonError(f"{'.'.join(path)} is not there")

    def _replace(self, value: Value, text: str) -> None:
        self._become(self.text[: value.start] + text + self.text[value.end :])

    def _become(self, text: str) -> None:
        self.top = read(text)
        self.text = text

    def _insert(self, parent: Value, data: Any, before: str = "") -> None:
        text, close = self.text, parent.end - 1
        content = len(text[:close].rstrip())  # its end, comments included
        if "\n" in text[content:close]:
            indent = self._indent_within(parent)
            comma = "," if parent.trailing_comma else ""
            new = f"\n{indent}{before}{self._written(data, indent)}{comma}"
            text = text[:content] + new + text[content:]
            if parent.children and not parent.trailing_comma:
                at = parent.children[-1].end
                text = f"{text[:at]},{text[at:]}"
        elif parent.children:
            # All on one line: right behind the last one, whatever comments follow.
            at = parent.children[-1].end
            text = f"{text[:at]}, {before}{json.dumps(data, ensure_ascii=False)}{text[at:]}"
        elif not before:
            text = text[:close] + json.dumps(data, ensure_ascii=False) + text[close:]
        else:
            indent = self._indent_within(parent)
            new = f"\n{indent}{before}{self._written(data, indent)}\n"
            text = text[:content] + new + self._indent_of_line(parent.start) + text[close:]
        self._become(text)

    def _cut(self, parent: Value, child: Value) -> None:
        text, start, end = self.text, child.begin, child.end
        at = parent.children.index(child)
        follows = _skip(text, end)
        if text[follows] == ",":
            end = follows + 1
        elif at:
            # The last one, with no comma of its own: that of the one before it is one too many.
            comma = _skip(text, parent.children[at - 1].end)
            text = text[:comma] + text[comma + 1 :]
            start, end = start - 1, end - 1
            if not text[comma:start].strip(" \t"):
                start = comma
        line = text.rfind("\n", 0, start) + 1
        rest = re.compile(r"[ \t]*(//[^\n]*|/\*[^\n]*?\*/[ \t]*)?\r?\n").match(text, end)
        if not text[line:start].strip() and rest:
            start, end = line, rest.end()  # the whole line, with the remark behind it
        elif text[end : end + 1] == " ":
            end += 1
        text = text[:start] + text[end:]
        self._become(text)

    def _written(self, data: Any, indent: str) -> str:
        if isinstance(data, dict) and data:
            inner = indent + self._step()
            members = (
                f"\n{inner}{json.dumps(key, ensure_ascii=False)}: {self._written(value, inner)}"
                for key, value in data.items()
            )
            return "{" + ",".join(members) + f"\n{indent}}}"
        if isinstance(data, list) and any(isinstance(item, dict) for item in data):
            inner = indent + self._step()
            items = (f"\n{inner}{self._written(item, inner)}" for item in data)
            return "[" + ",".join(items) + f"\n{indent}]"
        return json.dumps(data, ensure_ascii=False)

    def _indent_within(self, parent: Value) -> str:
        if parent.children:
            indent = self._indent_of_line(parent.children[-1].begin)
            begins = self.text.rfind("\n", 0, parent.children[-1].begin) + 1 + len(indent)
            if begins == parent.children[-1].begin:
                return indent
        return self._indent_of_line(parent.start) + self._step()

    def _indent_of_line(self, at: int) -> str:
        line = self.text.rfind("\n", 0, at) + 1
        found = re.compile(r"[ \t]*").match(self.text, line)
        return found[0] if found else ""

    def _step(self) -> str:
        """One step of indentation, as the first member of the top has it."""
        if self.top.children:
            return self._indent_of_line(self.top.children[0].begin) or "  "
        return "  "


def read(text: str) -> Value:
    """The value that the text is, with the place of everything in it."""
    value = _value(text, _skip(text, 0), 0)
    end = _skip(text, value.end)
    if end != len(text):
        raise _wrong(text, end, "nothing more")
    return value


def _value(text: str, at: int, depth: int) -> Value:
    if depth > _DEEPEST:
        raise _wrong(text, at, "less depth")
    opening = text[at : at + 1]
    if opening and opening in "{[":
        return _container(text, at, depth, opening)
    found = (_STRING if opening == '"' else _WORD).match(text, at)
    if not found:
        raise _wrong(text, at, "a value")
    try:
        data = json.loads(found[0])
    except ValueError:
        raise _wrong(text, at, "a value") from None
    return Value(at, at, found.end(), data)


def _container(text: str, start: int, depth: int, opening: str) -> Value:
    closing = "}" if opening == "{" else "]"
    children: list[Value] = []
    at, comma = _skip(text, start + 1), False
    while text[at : at + 1] != closing:
        if children and not comma:
            raise _wrong(text, at, f"a comma or {closing}")
        begin, key = at, ""
        if opening == "{":
            found = _STRING.match(text, at)
            if not found:
                raise _wrong(text, at, "a key in quotes")
            key = _value(text, at, depth).data
            at = _skip(text, found.end())
            if text[at : at + 1] != ":":
                raise _wrong(text, at, "a colon")
            at = _skip(text, at + 1)
        child = _value(text, at, depth + 1)
        child.begin, child.key = begin, key
        children.append(child)
        at = _skip(text, child.end)
        comma = text[at : at + 1] == ","
        if comma:
            at = _skip(text, at + 1)
    data: Any = [child.data for child in children]
    if opening == "{":
        data = {child.key: child.data for child in children}
        if len(data) != len(children):
            raise _wrong(text, start, "each key once in this object")
    return Value(start, start, at + 1, data, "", children, comma)


def _skip(text: str, at: int) -> int:
    """Behind space and comments."""
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _wrong(text: str, at: int, expected: str) -> HujsonError:
    line = text.count("\n", 0, at) + 1
    column = at - text.rfind("\n", 0, at)
    shown = repr(text[at : at + 20]) if at < len(text) else "the end"
    return HujsonError(f"line {line}, column {column}: {shown}, expected {expected}")
