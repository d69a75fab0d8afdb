# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""The folder of reports: the latest page, and the data of each report."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from ansible_collections.headcni.mesh.plugins.plugin_utils.report.record import (
    MOST_BYTES,
    Report,
    ReportError,
    read,
    written,
)

PAGE = "report.html"
_DATA = re.compile(r"report-\d{8}T\d{6}Z\.json\Z")


def data_name(report: Report) -> str:
    return time.strftime("report-%Y%m%dT%H%M%SZ.json", time.gmtime(report.made_at))


def earlier(folder: Path, report: Report) -> tuple[Report | None, str]:
    """The latest report before this one, or why there is none."""
    names = [name for name in _names(folder) if name < data_name(report)]
    if not names:
        return None, ""
    path = folder / names[-1]
    try:
        with path.open("rb") as stream:
            return read(stream.read(MOST_BYTES + 1)), ""
    except OSError as problem:
        return None, f"{path} cannot be read: {problem.strerror}"
    except ReportError as problem:
        return None, f"{path} cannot be used: {problem}"


def save(folder: Path, report: Report, page: str, keep: int) -> None:
    """Only the owner may read the files. Of older data, `keep` files stay."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(folder / data_name(report), written(report))
    _write(folder / PAGE, page)
    for name in _names(folder)[:-keep]:
        (folder / name).unlink(missing_ok=True)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if _DATA.match(path.name))
    except FileNotFoundError:
        return []


def _write(path: Path, content: str) -> None:
    """Readers see the old file or the new one, never a part of it."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
            stream.write(content)
        fresh.rename(path)
    finally:
        fresh.unlink(missing_ok=True)
