# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""The results of checks as a JUnit file, which CI systems show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple
from xml.etree import ElementTree

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # in XML 1.0


class Case(NamedTuple):
    """One check of a node, or of a pair. `ok` is None for a check that was not made."""

    subject: str  # the node, or both
    check: str
    ok: bool | None
    detail: str


def document(suite: str, cases: Sequence[Case]) -> str:
    counts = {
        "tests": str(len(cases)),
        "failures": str(sum(case.ok is False for case in cases)),
        "errors": "0",
        "skipped": str(sum(case.ok is None for case in cases)),
    }
    top = ElementTree.Element("testsuites", counts)
    inside = ElementTree.SubElement(top, "testsuite", {"name": suite, **counts})
    for case in cases:
        about = {"classname": _legal(f"{suite}.{case.subject}"), "name": _legal(case.check)}
        entry = ElementTree.SubElement(inside, "testcase", about)
        detail = _legal(case.detail)
        if case.ok is False:
            ElementTree.SubElement(entry, "failure", {"message": detail}).text = detail
        elif case.ok is None:
            ElementTree.SubElement(entry, "skipped", {"message": detail})
        else:
            ElementTree.SubElement(entry, "system-out").text = detail
    text = ElementTree.tostring(top, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _legal(text: str) -> str:
    return _FORBIDDEN.sub("?", text)
