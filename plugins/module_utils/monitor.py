# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Read the daemon's own report from its monitor."""

from __future__ import annotations

import http.client
import json
import re
from typing import Any, NamedTuple

ANSWER_SECONDS = 5.0
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 – to be asked, not listened on


class Readiness(NamedTuple):
    ready: bool
    conditions: list[dict[str, Any]]  # name, ok, reason
    problems: list[str]


def ready(address: str, port: int) -> Readiness:
    """Every condition by name. A daemon that does not answer is not ready."""
    try:
        said = json.loads(_get(address, port, "/ready?format=json"))
        conditions = [
            {"name": str(one["name"]), "ok": bool(one["ok"]), "reason": str(one["reason"])}
            for one in said["conditions"]
        ]
    except (OSError, http.client.HTTPException) as problem:
        told = f"the monitor at {address} port {port} does not answer: {problem}"
        return Readiness(False, [], [told])
    except (ValueError, KeyError, TypeError):
        told = f"what answers at {address} port {port} is not HeadCNI's daemon"
        return Readiness(False, [], [told])
    wrong = [f"{one['name']}: {one['reason']}" for one in conditions if not one["ok"]]
    return Readiness(bool(said.get("ready")), conditions, wrong)


def version(address: str, port: int, path: str = "/metrics") -> str:
    """The version of the running daemon, which may differ from the installed one."""
    try:
        text = _get(address, port, path).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return ""
    found = re.search(r'^headcni_build_info\{[^}]*version="([^"]*)"', text, re.MULTILINE)
    return found[1] if found else ""


def _get(address: str, port: int, path: str) -> bytes:
    host = _ANYWHERE.get(address, address)
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", path)
        return connection.getresponse().read(4 << 20)
    finally:
        connection.close()
