"""The log: a line for each event, in logfmt or JSON, on stderr, which the journal keeps.

    log = Log("routes")
    log.info("reconciled", added=3, removed=0)
    → level=INFO part=routes msg=reconciled added=3 removed=0

It is built on the standard library's logging, so messages of pyroute2 or http.server look the same.
The plugins do not import this: a call without a daemon has no milliseconds to spare for it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import traceback
from itertools import islice
from typing import Any, Dict, List, Optional, TextIO, Tuple

from .errors import shortened

NAME = "headcni"
LEVELS: Dict[str, int] = {
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}
_NAMES = {number: name for name, number in LEVELS.items()}
# syslog's numbers, which systemd reads at the start of a line.
_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARN": 4, "ERROR": 3, "FATAL": 2}
_PLAIN = re.compile(r"[^\s\"'=\\\x00-\x1f\x7f]+\Z")
_OURS = ("time", "level", "part", "msg", "trace")
# Limits on the length of a line: values may come from pods, peers or servers.
LONGEST_VALUE = 4096
LONGEST_TRACE = 16384
MOST_ITEMS = 64


class Log:
    """The log of a part of the daemon. Writing to it never raises."""

    def __init__(self, part: str) -> None:
        self._logger = logging.getLogger(f"{NAME}.{part}")

    def debug(self, message: str, **fields: Any) -> None:
        self._write(logging.DEBUG, message, fields)

    def info(self, message: str, **fields: Any) -> None:
        self._write(logging.INFO, message, fields)

    def warn(self, message: str, **fields: Any) -> None:
        self._write(logging.WARNING, message, fields)

    def error(self, message: str, **fields: Any) -> None:
        """``problem=exception`` logs its message, and at level DEBUG also its traceback."""
        self._write(logging.ERROR, message, fields)

    def fatal(self, message: str, **fields: Any) -> None:
        """The last line of a daemon that cannot continue. The caller ends the process."""
        self._write(logging.CRITICAL, message, fields)

    def enabled(self, level: str) -> bool:
        """Whether a level is logged, before work is done to find out what to log."""
        return self._logger.isEnabledFor(LEVELS[level])

    def _write(self, level: int, message: str, fields: Dict[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", message, extra={"headcni_fields": fields})


def set_up(level: str = "INFO", style: str = "logfmt", stream: Optional[TextIO] = None) -> None:
    """Start logging, or change level and style. May be called again, as on SIGHUP."""
    target = sys.stderr if stream is None else stream
    root = logging.getLogger()
    root.handlers = [handler for handler in root.handlers if not isinstance(handler, _Handler)]
    handler = _Handler(target)
    handler.setFormatter(_Formatter(style == "json", is_journal(target)))
    root.addHandler(handler)
    root.setLevel(LEVELS[level])
    logging.raiseExceptions = False  # a log that cannot be written must not stop anything


def is_journal(stream: TextIO) -> bool:
    """Whether systemd reads the stream: it adds the time itself, and wants the level first."""
    device, _unused, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        seen = os.fstat(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return (device, inode) == (str(seen.st_dev), str(seen.st_ino))


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]  # Python 3.9 has no [TextIO]
    """A class of our own, to tell our handler from those of a test runner."""


class _Formatter(logging.Formatter):
    def __init__(self, as_json: bool, for_journal: bool) -> None:
        super().__init__()
        self.as_json = as_json
        self.for_journal = for_journal

    def format(self, record: logging.LogRecord) -> str:
        pairs = self._pairs(record)
        line = _json(pairs) if self.as_json else _logfmt(pairs)
        return f"<{_PRIORITIES[_level(record)]}>{line}" if self.for_journal else line

    def _pairs(self, record: logging.LogRecord) -> List[Tuple[str, Any]]:
        pairs: List[Tuple[str, Any]] = []
        if not self.for_journal:
            pairs.append(("time", _time(record.created)))
        part = record.name[len(NAME) + 1 :] if record.name.startswith(f"{NAME}.") else record.name
        pairs += [("level", _level(record)), ("part", part), ("msg", _value(record.getMessage()))]
        fields: Dict[str, Any] = getattr(record, "headcni_fields", {})
        for key, value in fields.items():
            pairs.append((f"{key}_" if key in _OURS else key, _value(value)))
        raised = [value for value in fields.values() if isinstance(value, BaseException)]
        if record.exc_info and record.exc_info[1] is not None:
            raised.append(record.exc_info[1])
            pairs.append(("problem", _value(record.exc_info[1])))
        if raised and logging.getLogger().isEnabledFor(logging.DEBUG):
            kind, value, trace = type(raised[0]), raised[0], raised[0].__traceback__
            text = "".join(traceback.format_exception(kind, value, trace))
            pairs.append(("trace", shortened(text, LONGEST_TRACE)))
        return pairs


def _level(record: logging.LogRecord) -> str:
    """The name of our nearest lower level: other loggers may use numbers in between."""
    below = [number for number in _NAMES if number <= record.levelno]
    return _NAMES[max(below)] if below else "DEBUG"


def _time(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def _value(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, BaseException):
        return shortened(f"{type(value).__name__}: {value}", LONGEST_VALUE)
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [_value(item) for item in islice(value, MOST_ITEMS)]
        more = len(value) - len(items)
        return [*items, f"and {more} more"] if more else items
    return shortened(str(value), LONGEST_VALUE)


def _json(pairs: List[Tuple[str, Any]]) -> str:
    return json.dumps(dict(pairs), ensure_ascii=False, separators=(",", ":"))


def _logfmt(pairs: List[Tuple[str, Any]]) -> str:
    return " ".join(f"{key}={_word(value)}" for key, value in pairs)


def _word(value: Any) -> str:
    """A value as a single word on a single line."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = str(value)
    if isinstance(value, list):
        text = shortened(",".join(map(str, value)), LONGEST_VALUE)
    return text if _PLAIN.match(text) else json.dumps(text, ensure_ascii=False)
