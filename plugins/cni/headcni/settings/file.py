"""Reading the configuration file: all its mistakes at once, each with its key and a fix.

YAML is read by ruamel.yaml: PyYAML has no wheel that works on every architecture, and a node need
not have either. It costs the daemon 22 ms and 4.7 MB at start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from typing import Any, Dict, List, Set, Tuple

from ..errors import IO_FAILURE, CniError
from ..problems import Problem, error, render, unknown_keys
from .changes import changes
from .checks import check_together
from .keys import as_dict, fields_of, file_name, shown, walk
from .kinds import WrongValue
from .sections import DaemonConfig

PATH = "/etc/headcni/config.yaml"

_LARGEST_FILE = 1 << 20

# Keys of the Go original that have no effect here. The values false, "" and [] are accepted.
RETIRED: Dict[str, str] = {
    "daemon.logLevel": "no such key: it is logging.level here",
    "daemon.hostNetwork": "no such key: the daemon is a service of the node",
    "headscale.authKey": "no key in this file: name a file with one in headscale.apiKeyFile",
    "tailscale.url": "no such key: it is headscale.url here",
    "tailscale.socket.name": "no such key: the name is part of tailscale.socket.path",
    "tailscale.mtu": "no such key: tailscaled has its own, and pods have network.mtu",
    "tailscale.acceptDNS": "no such key: tailscaled keeps what the node joined with",
    "tailscale.hostname": "no such key: the node joins under its own name",
    "tailscale.user": "no such key: the controller chooses who the node belongs to",
    "tailscale.tags": "no such key: the controller's pre-auth key carries the tags",
    "network.enableIPv6": "no such key: give an IPv6 range in network.podCIDR",
    "ipam.subnets": "no such key: the ranges come from network.podCIDR",
    "dns.custom": "no such key: the dns section of the netconf has fixed servers",
    "logging.output": "no such key: the log goes to stderr, which the journal keeps",
    "logging.file": "no such key: the log goes to stderr, which the journal keeps",
    "security": "no such section: bind monitoring.address to a network that you trust",
    "performance": "no such section: there is nothing to tune",
    "configPath": "no such key: the path is given on the command line",
}
_SECRET = re.compile(r"(?i)(?:key|token|secret|password)\Z")


def load(path: str = PATH, missing_ok: bool = False) -> DaemonConfig:
    """Read the file; one CniError names all its mistakes.

    With ``missing_ok`` a missing file means the defaults.
    """
    try:
        text = _read(path)
    except FileNotFoundError as problem:
        if missing_ok:
            return DaemonConfig()
        raise _unreadable(path, problem) from None
    except OSError as problem:
        raise _unreadable(path, problem) from None
    made, found = parse(text)
    if found:
        raise error(found)
    return made


def parse(text: bytes) -> Tuple[DaemonConfig, List[Problem]]:
    """The configuration and every mistake in it. A wrong value is replaced by its default."""
    found: List[Problem] = []
    made: DaemonConfig = _make(DaemonConfig, decode(text, found), "", found)
    check_together(made, found)
    return made, found


def given(path: str = PATH) -> Set[str]:
    """The keys that the file sets, such as network.mtu. A missing file sets none."""
    try:
        values = decode(_read(path), [])
    except FileNotFoundError:
        return set()
    except OSError as problem:
        raise _unreadable(path, problem) from None
    return {
        key for key, _declared, _default in walk(DaemonConfig(), "") if _at(values, key.split("."))
    }


def _at(values: Any, names: Sequence[str]) -> bool:
    """Whether there is a value. null and "" count as not given."""
    for name in names:
        if not isinstance(values, Mapping):
            return False
        values = values.get(name)
    return values not in (None, "")


def check(path: str = PATH, as_json: bool = False) -> Tuple[int, str]:
    """``--check-config``: an exit code (0 good, 1 mistakes, 3 unreadable) and what to print."""
    try:
        made, found = parse(_read(path))
    except OSError as problem:
        unreadable = _unreadable(path, problem)
        report = {"file": path, "valid": False, "error": str(unreadable)}
        return 3, json.dumps(report, indent=2) if as_json else str(unreadable)
    if as_json:
        report = {"file": path, **json.loads(render(found, as_json=True))}
        return int(bool(found)), json.dumps({**report, "config": as_dict(made)}, indent=2)
    lines = [f"{path}: {render(found)}"]
    if not found:
        differing = changes(DaemonConfig(), made)
        lines += [
            f"  {change.path} = {shown(change.new)}"
            for change in (*differing.applied, *differing.needs_restart)
        ]
    return int(bool(found)), "\n".join(lines)


def _read(path: str) -> bytes:
    with open(path, "rb") as stream:
        return stream.read(_LARGEST_FILE + 1)


def _unreadable(path: str, problem: OSError) -> CniError:
    return CniError(IO_FAILURE, f"{path} cannot be read", problem.strerror or str(problem))


def decode(text: bytes, found: List[Problem]) -> Mapping[str, Any]:
    """YAML as data; what is wrong with it goes into ``found``."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    if len(text) > _LARGEST_FILE:
        found.append(Problem("", f"{len(text)} bytes or more", f"at most {_LARGEST_FILE} bytes"))
        return {}
    try:
        value = YAML(typ="safe", pure=True).load(text.decode("utf-8"))
    except MarkedYAMLError as wrong:
        mark = wrong.problem_mark or wrong.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = " ".join(str(wrong.problem or wrong.context).split())
        if reason.startswith("found duplicate key"):
            name = reason.split('"')[1] if '"' in reason else ""
            found.append(Problem(where, name, "each key to be given once"))
        else:
            # Do not show the line: it may hold a secret.
            found.append(Problem(where, "not YAML", f"valid YAML: {reason}"))
        return {}
    except (YAMLError, ValueError, RecursionError) as wrong:
        reason = " ".join(str(wrong).split())[:120]
        found.append(Problem("", "not YAML", f"valid YAML: {reason}"))
        return {}
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        found.append(Problem("", shown(value), "sections such as network: and logging:"))
        return {}
    return value


def _make(of: Any, values: Mapping[Any, Any], path: str, found: List[Problem]) -> Any:
    """A section from the values in the file. null and "" count as not given."""
    given = {str(key): value for key, value in values.items()}
    made: Dict[str, Any] = {}
    known = {file_name(declared): declared for declared in fields_of(of)}
    unknown: Dict[str, Any] = {}
    for key, value in given.items():
        where = f"{path}.{key}" if path else key
        declared = known.get(key)
        if declared is None:
            if key.startswith(("_", "x-")) or (where in RETIRED and not value):
                continue
            if where in RETIRED:
                found.append(Problem(where, safe(key, value), RETIRED[where]))
            else:
                unknown[key] = safe(key, value)
        elif declared.default_factory is not MISSING:
            inner = declared.default_factory
            if value is not None and not isinstance(value, Mapping):
                some = ", ".join(file_name(f) for f in fields_of(inner)[:3])
                found.append(
                    Problem(where, safe(key, value), f"a section with keys such as {some}")
                )
            elif value is not None:
                made[declared.name] = _make(inner, value, where, found)
        elif value not in (None, ""):
            try:
                made[declared.name] = declared.metadata["kind"].read(value)
            except WrongValue as wrong:
                for at, bad, expected in wrong.items or (("", value, str(wrong)),):
                    found.append(Problem(where + at, safe(key, bad), expected))
    before = len(found)
    unknown_keys(unknown, list(known), path, found)
    found[before:] = [problem._replace(path=problem.path.lstrip(".")) for problem in found[before:]]
    return of(**made)


def safe(key: str, value: Any) -> Any:
    """A value as it may be shown: without secrets, and with types that JSON has."""
    if _SECRET.search(key):
        return "(not shown)"
    if isinstance(value, str):
        return re.sub(r"//[^/@\s]*@", "//(not shown)@", value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (Mapping, Sequence)):
        kind = "a section" if isinstance(value, Mapping) else "a list"
        return f"{kind} of {len(value)}"
    return str(value)
