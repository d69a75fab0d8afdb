"""Where time and memory go, in the format that ``go tool pprof`` opens.

    go tool pprof -top http://127.0.0.1:9001/debug/pprof/profile?seconds=10

A profile samples the stack of every thread a hundred times a second, and asks the kernel how long
each thread has run since the last sample. So ``cpu`` is processor time, and ``wall`` includes
waiting. A heap profile traces allocations for some seconds and shows which of them are still there.
The threads' names are labels: ``pprof -tags``.

The format is profile.proto of github.com/google/pprof. It is encoded here by hand, because it has
only six messages of numbers and strings, and the protobuf package is not pure Python.
"""

from __future__ import annotations

import gzip
import sys
import threading
import time
import traceback
import tracemalloc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

from ...errors import INVALID_CONFIG, TRY_AGAIN, CniError

LONGEST = 60.0
PERIOD = 0.01
_DEEPEST = 128
_alone = threading.Lock()

# Innermost frame first: function, file, first line of the function, current line.
Place = Tuple[str, str, int, int]
Stack = Tuple[Place, ...]


class Sample(NamedTuple):
    stack: Stack
    values: Tuple[int, ...]
    thread: str = ""


def profile(seconds: float, cancelled: Callable[[], bool] = lambda: False) -> bytes:
    """What the threads of this process do during the next seconds."""
    _check(seconds)
    with _one_at_a_time():
        began, samples = time.time_ns(), _watch(seconds, cancelled)
        types = (("samples", "count"), ("cpu", "nanoseconds"), ("wall", "nanoseconds"))
        return encode(types, samples, "cpu", began, ("wall", "nanoseconds", int(PERIOD * 1e9)))


def heap(seconds: float, cancelled: Callable[[], bool] = lambda: False) -> bytes:
    """What is allocated during the next seconds and still there afterwards.

    If tracing is on already (PYTHONTRACEMALLOC): everything that it has seen, at once.
    """
    _check(seconds)
    with _one_at_a_time():
        began, ours = time.time_ns(), not tracemalloc.is_tracing()
        if ours:
            tracemalloc.start(24)
        try:
            if ours:
                _wait(seconds, cancelled)
            taken = tracemalloc.take_snapshot()
        finally:
            if ours:
                tracemalloc.stop()
    found = [
        Sample(
            tuple(_line(frame) for frame in reversed(group.traceback)), (group.count, group.size)
        )
        for group in taken.statistics("traceback")
        if group.traceback[-1].filename not in (tracemalloc.__file__, __file__)
    ]
    types = (("inuse_objects", "count"), ("inuse_space", "bytes"))
    return encode(types, found, "inuse_space", began, ("space", "bytes", 1))


def threads() -> str:
    """Every thread's name and stack, as text."""
    frames = sys._current_frames()
    shown = []
    for thread in sorted(threading.enumerate(), key=lambda thread: thread.name):
        frame = frames.get(thread.ident or 0)
        kind = " (daemon)" if thread.daemon else ""
        stack = "".join(traceback.format_stack(frame)) if frame else "  not running\n"
        shown.append(f"{thread.name}{kind}, native id {thread.native_id}\n{stack}")
    return f"{len(shown)} threads\n\n" + "\n".join(shown)


def _check(seconds: float) -> None:
    if not 0 < seconds <= LONGEST:
        raise CniError(
            INVALID_CONFIG, f"seconds is {seconds:g}", f"expected more than 0, up to {LONGEST:g}"
        )


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    if not _alone.acquire(blocking=False):
        raise CniError(TRY_AGAIN, "another profile is being taken", "try again when it is done")
    try:
        yield
    finally:
        _alone.release()


def _wait(seconds: float, cancelled: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while not cancelled():
        left = end - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, 0.1))


def _watch(seconds: float, cancelled: Callable[[], bool]) -> List[Sample]:
    seen: Dict[Tuple[str, Tuple[Tuple[CodeType, int], ...]], List[int]] = {}
    spent: Dict[int, int] = {}
    own = threading.get_ident()
    last = time.monotonic()
    end = last + seconds
    while not cancelled():
        now = time.monotonic()
        if now >= end:
            break
        time.sleep(min(PERIOD, end - now))
        now = time.monotonic()
        passed, last = int((now - last) * 1e9), now
        known = {thread.ident: thread for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            thread = known.get(ident)
            if ident == own or thread is None or thread.native_id is None:
                continue
            ran = _time_of(thread.native_id)
            cpu = ran - spent.get(thread.native_id, ran)
            spent[thread.native_id] = ran
            values = seen.setdefault((thread.name, _codes(frame)), [0, 0, 0])
            values[0] += 1
            values[1] += cpu
            values[2] += passed
    return [
        Sample(tuple(_place(code, line) for code, line in codes), (v[0], v[1], v[2]), thread)
        for (thread, codes), v in seen.items()
    ]


def _codes(frame: Optional[FrameType]) -> Tuple[Tuple[CodeType, int], ...]:
    """A stack without names: those are looked up once, at the end."""
    found: List[Tuple[CodeType, int]] = []
    while frame is not None and len(found) < _DEEPEST:
        found.append((frame.f_code, frame.f_lineno or frame.f_code.co_firstlineno))
        frame = frame.f_back
    return tuple(found)


def _place(code: CodeType, line: int) -> Place:
    name = getattr(code, "co_qualname", code.co_name)  # qualified from Python 3.11 on
    return name, code.co_filename, code.co_firstlineno, line


def _line(frame: tracemalloc.Frame) -> Place:
    """tracemalloc records lines, not functions, so the line serves as the name."""
    name = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
    return name, frame.filename, frame.lineno, frame.lineno


def _time_of(native_id: int) -> int:
    """Nanoseconds that a thread of this process has run so far."""
    try:
        with open(f"/proc/self/task/{native_id}/schedstat", "rb", buffering=0) as stream:
            return int(stream.read(64).split()[0])
    except (OSError, ValueError, IndexError):
        return (
            0  # the thread has just ended, or the kernel does not count; wall time is still right
        )


def encode(
    types: Sequence[Tuple[str, str]],
    samples: Iterable[Sample],
    default: str,
    began: int,
    period: Tuple[str, str, int],
) -> bytes:
    """A profile.proto message, gzipped. ``types`` name and measure each sample's values."""
    strings: Dict[str, int] = {"": 0}
    functions: Dict[Tuple[str, str, int], int] = {}
    locations: Dict[Place, int] = {}

    def text(value: str) -> int:
        return strings.setdefault(value, len(strings))

    def location(place: Place) -> int:
        functions.setdefault(place[:3], len(functions) + 1)
        return locations.setdefault(place, len(locations) + 1)

    body = b"".join(_message(1, _pair(text(name), text(unit))) for name, unit in types)
    for sample in samples:
        message = _packed(1, [location(place) for place in sample.stack])
        message += _packed(2, sample.values)
        if sample.thread:
            message += _message(3, _number(1, text("thread")) + _number(2, text(sample.thread)))
        body += _message(2, message)
    # A mapping that says that all symbols are known; otherwise pprof looks for a binary.
    mapping = _number(1, 1) + _number(5, text("headcni-daemon"))
    body += _message(3, mapping + b"".join(_number(flag, 1) for flag in (7, 8, 9)))
    for place, number in locations.items():
        line = _number(1, functions[place[:3]]) + _number(2, place[3])
        body += _message(4, _number(1, number) + _number(2, 1) + _message(4, line))
    for (name, file, start), number in functions.items():
        called = _number(2, text(name)) + _number(3, text(name))
        body += _message(
            5, _number(1, number) + called + _number(4, text(file)) + _number(5, start)
        )
    ended = [_number(9, began), _number(10, time.time_ns() - began)]
    ended += [_message(11, _pair(text(period[0]), text(period[1]))), _number(12, period[2])]
    ended += [_number(14, text(default))]
    body += b"".join(_message(6, string.encode("utf-8", "replace")) for string in strings)
    return gzip.compress(body + b"".join(ended), 6)


def _pair(first: int, second: int) -> bytes:
    return _number(1, first) + _number(2, second)


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1  # protobuf's encoding of negative numbers
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value) if value else b""


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _packed(field: int, values: Iterable[int]) -> bytes:
    return _message(field, b"".join(map(_varint, values)))
