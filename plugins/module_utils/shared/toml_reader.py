# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Read TOML, the format of container runtimes' configurations: nodes run Python 3.9, whose standard
library has no tomllib.

It reads what TOML 1.0 allows, and is lax where the difference does not matter to us: dates are
returned as their text, and a table may be opened twice.
"""

from __future__ import annotations

import re
from typing import Any

LARGEST = 1 << 20  # characters of a document
_DEEPEST = 50  # arrays and inline tables inside each other
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SKIPPED = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BLANK = re.compile(r"[ \t]*")
_END_OF_LINE = re.compile(r"[ \t]*(?:#[^\n]*)?\r?(?:\n|\Z)")
_WORD = re.compile(r"[A-Za-z0-9_+.:-]+(?: [0-9][0-9:.]+(?:Z|[+-][0-9:]+)?)?")
_DATE = re.compile(r"\d{4}-\d\d-\d\d.*|\d\d:\d\d.*")
_ESCAPE = re.compile(
    r"\\(?:(?P<code>u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8})|(?P<line>[ \t]*\r?\n\s*)|(?P<other>.?))"
)
_ESCAPES = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", '"': '"', "\\": "\\"}


class TomlError(ValueError):
    """The text is not TOML; the message names the line."""


def parse(text: str) -> dict[str, Any]:
    """The document as dictionaries, lists and scalars."""
    if len(text) > LARGEST:
        raise TomlError(f"the document has more than {LARGEST} characters")
    return _Reader(text).document()


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def document(self) -> dict[str, Any]:
        root: dict[str, Any] = {}
        table = root
        self._skip(_SKIPPED)
        while self.at < len(self.text):
            if self._take("[["):
                table = self._table_of_array(root, self._keys("]]"))
            elif self._take("["):
                table = self._table(root, self._keys("]"))
            else:
                self._pair(table, 0)
            if not self._skip(_END_OF_LINE):
                raise self._wrong("expected the end of the line")
            self._skip(_SKIPPED)
        return root

    def _pair(self, table: dict[str, Any], depth: int) -> None:
        *path, last = self._keys("=")
        target = self._table(table, path)
        if last in target:
            raise self._wrong(f"{last} is there twice")
        self._skip(_BLANK)
        target[last] = self._value(depth)

    def _keys(self, end: str) -> list[str]:
        """The parts of a dotted key, up to what ends it."""
        found = []
        while True:
            self._skip(_BLANK)
            if self._looking_at('"') or self._looking_at("'"):
                found.append(self._string(self.text[self.at]))
            else:
                bare = _BARE_KEY.match(self.text, self.at)
                if not bare:
                    raise self._wrong("expected a key")
                self.at = bare.end()
                found.append(bare[0])
            self._skip(_BLANK)
            if self._take(end):
                return found
            if not self._take("."):
                raise self._wrong(f"expected . or {end} after a key")

    def _table(self, root: dict[str, Any], path: list[str]) -> dict[str, Any]:
        for key in path:
            inner = root.setdefault(key, {})
            if isinstance(inner, list) and inner:
                inner = inner[-1]
            if not isinstance(inner, dict):
                raise self._wrong(f"{key} is a value and a table")
            root = inner
        return root

    def _table_of_array(self, root: dict[str, Any], path: list[str]) -> dict[str, Any]:
        array = self._table(root, path[:-1]).setdefault(path[-1], [])
        if not isinstance(array, list):
            raise self._wrong(f"{path[-1]} is a value and an array of tables")
        array.append({})
        added: dict[str, Any] = array[-1]
        return added

    def _value(self, depth: int) -> Any:
        if depth > _DEEPEST:
            raise self._wrong(f"more than {_DEEPEST} values inside each other")
        for quote in ('"""', "'''"):
            if self._looking_at(quote):
                return self._long_string(quote)
        if self._looking_at('"') or self._looking_at("'"):
            return self._string(self.text[self.at])
        if self._take("["):
            return self._array(depth)
        if self._take("{"):
            return self._inline_table(depth)
        word = _WORD.match(self.text, self.at)
        if not word:
            raise self._wrong("expected a value")
        value = _scalar(word[0])
        if value is None:
            raise self._wrong(f"{word[0][:40]!r} is no value")
        self.at = word.end()
        return value

    def _array(self, depth: int) -> list[Any]:
        found: list[Any] = []
        while True:
            self._skip(_SKIPPED)
            if self._take("]"):
                return found
            found.append(self._value(depth + 1))
            self._skip(_SKIPPED)
            if not self._take(",") and not self._looking_at("]"):
                raise self._wrong("expected , or ] in an array")

    def _inline_table(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self._skip(_BLANK)
        while not self._take("}"):
            self._pair(found, depth + 1)
            self._skip(_BLANK)
            if self._take(","):
                self._skip(_BLANK)
            elif not self._looking_at("}"):
                raise self._wrong("expected , or } in an inline table")
        return found

    def _string(self, quote: str) -> str:
        start = self.at
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] not in (quote, "\n"):
            self.at += 2 if quote == '"' and self.text[self.at] == "\\" else 1
        if not self._take(quote):
            raise self._wrong("a string does not end")
        content = self.text[start + 1 : self.at - 1]
        return self._unescaped(content) if quote == '"' else content

    def _long_string(self, quote: str) -> str:
        start = self.at + 3
        end = self.text.find(quote, start)
        while quote == '"""' and end > 0 and _escaped(self.text, start, end):
            end = self.text.find(quote, end + 1)
        if end < 0:
            raise self._wrong("a string does not end")
        while self.text.startswith(quote[0], end + 3):  # a quotation mark right before the end
            end += 1
        self.at = end + 3
        content = re.sub(r"\A\r?\n", "", self.text[start:end])
        return self._unescaped(content) if quote == '"""' else content

    def _unescaped(self, content: str) -> str:
        def replaced(found: re.Match[str]) -> str:
            if found["code"]:
                number = int(found["code"][1:], 16)
                if number < 0x110000 and not 0xD800 <= number < 0xE000:
                    return chr(number)
            elif found["line"]:
                return ""
            elif found["other"] in _ESCAPES:
                return _ESCAPES[found["other"]]
            raise self._wrong(f"{found[0][:10]!r} is no escape")

        return _ESCAPE.sub(replaced, content)

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        found = pattern.match(self.text, self.at)
        if not found:
            return False
        self.at = found.end()
        return True

    def _looking_at(self, token: str) -> bool:
        return self.text.startswith(token, self.at)

    def _take(self, token: str) -> bool:
        if not self._looking_at(token):
            return False
        self.at += len(token)
        return True

    def _wrong(self, what: str) -> TomlError:
        line = self.text.count("\n", 0, min(self.at, len(self.text))) + 1
        return TomlError(f"line {line}: {what}")


def _escaped(text: str, start: int, at: int) -> bool:
    """Whether the character at this place has a backslash before it that counts."""
    before = at
    while before > start and text[before - 1] == "\\":
        before -= 1
    return (at - before) % 2 == 1


def _scalar(word: str) -> Any:
    if word in ("true", "false"):
        return word == "true"
    if _DATE.fullmatch(word):
        return word
    digits = word.replace("_", "")
    for kind in (lambda: int(digits, 0 if digits[:1] == "0" else 10), lambda: float(digits)):
        try:
            return kind()
        except ValueError:
            continue
    return 0 if digits in ("0", "+0", "-0") else None
