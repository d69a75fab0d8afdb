# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""/etc/headcni/config.yaml, as a controller writes it and the runtime reads it.

The runtime alone knows what may stand in the file and what a change of it asks for, so its own code
is asked: that of the release on the node. A node need not have a YAML library for that.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from .shared import podcidr

PATH = "/etc/headcni/config.yaml"
MODE = 0o600
RELEASE = "/opt/headcni/current"
PYTHON = "/usr/bin/python3"
HEADER = "# Written by Ansible (headcni.mesh.headcni_node): what you change here is lost.\n"
SOURCE_KEY = "x-pod-cidr-source"  # keys that start with x- are not the daemon's

_SECRET = re.compile(
    r"""(?im)^(\s*(?:-\s+)?["']?[\w.-]*(?:key|token|secret|password)["']?\s*:\s*)(\S.*)$"""
)
_USERINFO = re.compile(r"//[^/@\s]*@")
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*\Z")
_WORDS = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")

_ASK = """
import json, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/vendor"]
from headcni.daemon import config
old, new = json.load(sys.stdin)
made, found = config.parse(new.encode())
before = config.parse(old.encode())[0] if old is not None else None
changes = config.changes(before, made) if before is not None else None
print(json.dumps({
    "problems": [[one.path, one.value, one.expected] for one in found],
    "reload": [one.path for one in changes.applied] if changes else [],
    "restart": [one.path for one in changes.needs_restart] if changes else [],
}, default=str))
"""


_LOAD = """
import json, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/vendor"]
from headcni.daemon import config
made, found = config.parse(sys.stdin.buffer.read())
print(json.dumps({"config": config.as_dict(made), "mistakes": len(found)}))
"""


class ConfigError(Exception):
    """The configuration is wrong, or cannot be checked; the message names every mistake."""


class Answer(NamedTuple):
    """What the runtime says of a new configuration, beside an old one."""

    problems: tuple[str, ...]
    reload: tuple[str, ...]  # keys that SIGHUP is enough for
    restart: tuple[str, ...]  # and those that it is not


def mode_of(path: str = PATH) -> str:
    """Of a configuration as we write it; "" where there is none, or somebody wrote another."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError:
        return ""
    found = re.search(r"^tailscale:\n(?:[ ]+.*\n)*?[ ]+mode: (host|daemon)$", text, re.MULTILINE)
    return found[1] if found else ""


def pod_cidrs_of(path: str = PATH) -> list[str]:
    """Of a configuration as we write it, and nothing as above."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError:
        return []
    found = re.search(
        r"^network:\n(?:[ ]+.*\n)*?[ ]+nodeLocal:\n((?:[ ]+- .*\n)+)", text, re.MULTILINE
    )
    listed = found[1].splitlines() if found else []
    return [line.strip(' -"') for line in listed]


def cidr_change(cidrs: Sequence[podcidr.Network], path: str = PATH) -> str:
    """What is wrong with these as the node's pod CIDRs, if it has others; "" if it has not. Pods
    keep their addresses, at which nobody would reach them, and Headscale the former route."""
    own = {str(one) for one in cidrs}
    gone = [one for one in pod_cidrs_of(path) if one not in own]
    if not gone:
        return ""
    return (
        f"this node has {', '.join(gone)}, and {podcidr.join(cidrs)} is asked for: "
        "change it with playbooks/change_pod_cidr.yml, which says what that means for its pods; "
        "or keep it by headcni_node_pod_cidr"
    )


def ask(new: str, old: str | None, release: str = RELEASE, python: str = PYTHON) -> Answer:
    """Let the release's own code read both."""
    said = _asked(_ASK, json.dumps([old, new]), release, python)
    problems = tuple(
        f"{where or 'config'}: {json.dumps(value)}, expected {expected}"
        for where, value, expected in said["problems"]
    )
    return Answer(problems, tuple(said["reload"]), tuple(said["restart"]))


def effective(text: str, release: str = RELEASE, python: str = PYTHON) -> dict[str, Any]:
    """The whole configuration that a text stands for, its defaults included."""
    found: dict[str, Any] = _asked(_LOAD, text, release, python)["config"]
    return found


def _asked(code: str, stdin: str, release: str, python: str) -> dict[str, Any]:
    path = os.path.realpath(release)
    done = subprocess.run(
        [python, "-IS", "-c", code, path],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
        raise ConfigError(f"{path} cannot read the configuration: {last[:300]}")
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def source_of(text: str) -> str:
    """Who said what the pod CIDR is, as it was written down beside it."""
    found = re.search(rf"(?m)^{SOURCE_KEY}: (\w+)$", text)
    return found[1] if found else "config"


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Empty if it is not a mapping: the check of the configuration reports that."""
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def pruned(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is not given: null, "", and sections with nothing in them."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        kept = pruned(value) if isinstance(value, Mapping) else value
        if kept is not None and kept != "" and kept != {} and kept != []:
            found[key] = kept
    return found


def resolved(config: Mapping[str, Any], env: Mapping[str, str]) -> podcidr.Resolution:
    """This node's pod CIDRs, as the daemon itself would find them."""
    daemon = config.get("daemon")
    name = daemon.get("nodeName") if isinstance(daemon, Mapping) else ""
    return podcidr.resolve(config, env, node_name=name if isinstance(name, str) else "")


def pinned(config: Mapping[str, Any], found: podcidr.Resolution) -> dict[str, Any]:
    """With the answer written down. The controller approves just this CIDR and the conflist has it,
    so the daemon must not find another one by itself when a file appears or the host's name
    changes."""
    network = dict(config.get("network") or {})
    pod = dict(network.get("podCIDR") or {})
    pod["nodeLocal"] = [str(cidr) for cidr in found.cidrs]
    network["podCIDR"] = pod
    return {SOURCE_KEY: found.source, **config, "network": network}


def cluster_cidrs(config: Mapping[str, Any], own: Sequence[podcidr.Network]) -> list[str]:
    """The cluster's CIDRs as given, or as the daemon assumes them to be."""
    given = ((config.get("network") or {}).get("podCIDR") or {}).get("base")
    if given:
        listed = given.split(",") if isinstance(given, str) else given
        return [str(cidr).strip() for cidr in listed]
    return [str(cidr) for cidr in podcidr.cluster_around(own)]


def render(config: Mapping[str, Any]) -> str:
    return HEADER + "".join(_lines(config, ""))


def _lines(value: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield f"{indent}{_scalar(str(key))}:\n"
            yield from _lines(inner, indent + "  ")
        elif isinstance(inner, (list, tuple)):
            yield f"{indent}{_scalar(str(key))}:\n"
            for one in inner:
                yield f"{indent}  - {_scalar(one)}\n"
        else:
            yield f"{indent}{_scalar(str(key))}: {_scalar(inner)}\n"


def _scalar(value: Any) -> str:
    """As YAML 1.2 and 1.1 both read it. JSON is YAML, so what is not plain is JSON."""
    if isinstance(value, str) and _PLAIN.match(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)


def redacted(text: str) -> str:
    """For a diff: with no secret, whoever wrote one into the file."""
    return _USERINFO.sub("//(not shown)@", _SECRET.sub(r"\1(not shown)", text))


def redacted_env(text: str) -> str:
    """The same for NAME="value" lines."""
    return re.sub(
        r"(?im)^([A-Z0-9_]*(?:KEY|TOKEN|SECRET|PASSWORD)=).*$",
        r"\1(not shown)",
        _USERINFO.sub("//(not shown)@", text),
    )


def read(path: str = PATH) -> str | None:
    with suppress(FileNotFoundError), open(path, encoding="utf-8", errors="replace") as stream:
        return stream.read()
    return None


def needs_writing(path: str, text: str) -> bool:
    try:
        mode = os.stat(path).st_mode & 0o7777
    except FileNotFoundError:
        return True
    return read(path) != text or mode != MODE


def write(path: str, text: str) -> None:
    """In one rename, and closed to others from the first byte on."""
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o755, exist_ok=True)
    fresh = os.path.join(folder, f".{os.path.basename(path)}.headcni-new")
    with suppress(FileNotFoundError):
        os.unlink(fresh)
    target = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
    with open(target, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fchmod(target, MODE)
        os.fsync(target)
    os.replace(fresh, path)
