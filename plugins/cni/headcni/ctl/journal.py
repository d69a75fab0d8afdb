"""The node's journal: what the daemon, tailscaled and the plugin have written to it.

The plugin has no unit: its messages are what container runtimes and kubelet say about HeadCNI.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from ..settings import DaemonConfig
from .main import CannotTell

DAEMON, TAILSCALED, PLUGIN = "daemon", "tailscaled", "plugin"
SOURCES = (DAEMON, TAILSCALED, PLUGIN)
LONGEST_LINE = 64 << 10  # of journalctl's JSON
READ_SECONDS = 20.0
_NAME = "headcni"
_DAEMON_UNIT = "headcni-daemon.service"
_TAILSCALED_UNITS = {"host": "tailscaled.service", "daemon": "headcni-tailscaled.service"}
_RUNTIMES = ("containerd", "crio", "docker", "kubelet", "k3s", "k3s-agent", "rke2-server")
_RUNTIME_UNITS = tuple(f"{name}.service" for name in (*_RUNTIMES, "rke2-agent"))
_LEVELS = {0: "ERROR", 1: "ERROR", 2: "ERROR", 3: "ERROR", 4: "WARN", 7: "DEBUG"}
_LEVEL = re.compile(r"level=\w+ ")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")


class Entry(NamedTuple):
    time: float
    source: str
    unit: str
    level: str
    message: str
    cursor: str


class WrongTime(Exception):
    """journalctl does not understand a time."""


def units(config: DaemonConfig, sources: Sequence[str]) -> Dict[str, Tuple[str, ...]]:
    """The units of each source."""
    all_ = {
        DAEMON: (_DAEMON_UNIT,),
        TAILSCALED: (_TAILSCALED_UNITS[config.tailscale.mode],),
        PLUGIN: _RUNTIME_UNITS,
    }
    return {source: all_[source] for source in sources}


def latest(
    of: Dict[str, Tuple[str, ...]], lines: int, since: str = ""
) -> Tuple[List[Entry], List[str]]:
    """The last entries of each source, by time, and the sources that may have more. In a large
    journal, journalctl may search for the plugin's entries for minutes; it finds the latest ones
    first."""
    found: List[Entry] = []
    cut: List[str] = []
    for source, names in of.items():
        options = [f"--lines={lines}", *([f"--grep={_NAME}"] if source == PLUGIN else [])]
        entries, ended = _read(_command(names, since, *options), of)
        found += entries
        cut += [] if ended else [source]
    return sorted(found), cut


@contextmanager
def following(of: Dict[str, Tuple[str, ...]], since: float) -> Iterator[Iterator[Entry]]:
    """Every entry from a time on, and those to come."""
    names = [name for several in of.values() for name in several]
    command = _command(names, f"@{since:.6f}", "--follow", "--no-tail")
    with _started(command) as process:
        try:
            yield (one for line in _lines(process) if (one := _entry(line, of)) is not None)
        finally:
            process.kill()


def _command(names: Sequence[str], since: str, *options: str) -> List[str]:
    limits = ["--quiet", "--no-pager", "--output=json", *options]
    chosen = [f"--unit={name}" for name in names]
    return ["journalctl", *limits, *chosen, *([f"--since={since}"] if since else [])]


@contextmanager
def _started(command: List[str]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as problem:
        raise CannotTell(f"journalctl cannot be run: {problem.strerror}") from None
    with process:
        yield process


def _read(command: List[str], of: Dict[str, Tuple[str, ...]]) -> Tuple[List[Entry], bool]:
    """The entries, and whether journalctl has ended by itself."""
    ended = True
    with _started(command) as process:
        try:
            out, err = process.communicate(timeout=READ_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            ended = False
            out, err = process.communicate()
    said = err.decode(errors="replace").strip()
    if process.returncode and "parse timestamp" in said:
        raise WrongTime(said)
    if process.returncode and said:  # without a message nothing was found
        raise CannotTell(f"journalctl: {said[:500]}")
    return [one for line in out.splitlines() if (one := _entry(line, of)) is not None], ended


def _lines(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    if process.stdout is None:
        return
    while line := process.stdout.readline(LONGEST_LINE):
        yield line


def _entry(line: bytes, of: Dict[str, Tuple[str, ...]]) -> Optional[Entry]:
    """None for a line that is of no source, or cut."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        known = json.loads(line)
        unit, source = _origin(known, of)
        message = _text(known.get("MESSAGE"))
        if source == PLUGIN and _NAME not in message.lower():
            return None
        level = _LEVELS.get(int(known.get("PRIORITY", 6)), "INFO")
        seconds = int(known["__REALTIME_TIMESTAMP"]) / 1e6
        return Entry(seconds, source, unit, level, message, str(known["__CURSOR"]))
    return None


def _origin(known: Dict[str, Any], of: Dict[str, Tuple[str, ...]]) -> Tuple[str, str]:
    """The unit and its source. UNIT is what systemd itself writes about; KeyError if it is none."""
    for unit in (known.get("UNIT"), known.get("_SYSTEMD_UNIT")):
        for source, names in of.items():
            if unit in names:
                return str(unit), source
    raise KeyError("_SYSTEMD_UNIT")


def _text(value: Any) -> str:
    """A message on one line, without what a terminal would act on. The level is known already."""
    if value is None:
        return "(a message of more than 4096 bytes)"
    text = bytes(value).decode(errors="replace") if isinstance(value, list) else str(value)
    if text.startswith("{"):
        with suppress(ValueError, AttributeError):  # the daemon's, with logging.format: json
            known = json.loads(text)
            known.pop("level", None)
            text = " ".join(f"{key}={json.dumps(each)}" for key, each in known.items())
    return _CONTROL.sub(" ", _LEVEL.sub("", text, count=1) if text.startswith("level=") else text)
