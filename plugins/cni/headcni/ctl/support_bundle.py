"""``headcnictl support-bundle``: what others need to help with this node, without its secrets.

Each part is what a command prints, within limits of time and size. A part that fails does not stop
the others: manifest.json says why.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from ..errors import CniError
from ..settings import DaemonConfig
from . import journal, node
from .backup import with_conflist
from .main import OK, CannotTell, read, show
from .new_file import add, new_file
from .redact import Redactor, secrets_in
from .terminal import BAD, GOOD, paint, table

TOTAL_SECONDS = 240.0
LOGS_SECONDS = len(journal.SOURCES) * (journal.READ_SECONDS + 5)  # a large journal is read slowly
TOTAL_BYTES = 64 << 20
MOST_FILES = 50  # conflists
_KB, _MB = 1 << 10, 1 << 20
_SERVICE_TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"  # noqa: S105  # a path
_VERB = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); sys.argv[:] = sys.argv[2:]; "
    "from headcni.ctl.main import main; sys.exit(main())"
)
_SYSCTLS = (
    *("net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding", "net.ipv4.conf.all.rp_filter"),
    *("net.netfilter.nf_conntrack_count", "net.netfilter.nf_conntrack_max"),
)


class Part(NamedTuple):
    """A file of the bundle, and the command that prints it. Codes ``good`` are an answer."""

    name: str
    command: Tuple[str, ...]
    seconds: float = 10.0
    size: int = 2 * _MB
    good: Tuple[int, ...] = (0,)


class Done(NamedTuple):
    part: Part
    code: Optional[int]
    seconds: float
    cut: bool
    problem: str
    content: str


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        default="",
        help="the .tar.gz to create; by default headcni-support-NODE-TIME.tar.gz here",
    )
    parser.add_argument("--since", default="24h", metavar="TIME", help="logs since (%(default)s)")
    with_conflist(parser)
    node.with_config(parser)


def run(args: argparse.Namespace) -> int:
    config, problem = _config(args)
    host = os.uname().nodename
    stem = time.strftime(f"headcni-support-{host}-%Y%m%dT%H%M%SZ", time.gmtime())
    path = args.file or f"{stem}.tar.gz"
    with new_file(path) as file:
        parts = _write(file, stem, args, config, problem)
        size = file.tell()
    if args.json:
        show({"file": path, "bytes": size, "parts": parts}, as_json=True)
    else:
        show(_in_words(path, size, parts), as_json=False)
    return OK


def _config(args: argparse.Namespace) -> Tuple[DaemonConfig, str]:
    """Also of a file with mistakes: it may name the files with secrets."""
    from ..settings import parse

    try:
        return node.load(args), ""
    except CniError as wrong:
        problem = str(wrong)
    try:
        return parse(read(args.config))[0], problem
    except CannotTell:
        return DaemonConfig(), problem


def _write(
    file: Any, stem: str, args: argparse.Namespace, config: DaemonConfig, problem: str
) -> List[Dict[str, Any]]:
    known = (config.headscale.api_key_file, config.daemon.kubeconfig, _SERVICE_TOKEN)
    redacted = Redactor(secrets_in(known))
    began, room = time.monotonic(), TOTAL_BYTES
    manifest: List[Dict[str, Any]] = []
    with (
        gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for part in _parts(args, config):
            left = TOTAL_SECONDS - (time.monotonic() - began)
            done = _done(part, min(part.seconds, left), min(part.size, room))
            content = redacted(done.content).encode()
            room -= len(content)
            if content:
                add(archive, f"{stem}/{part.name}", content)
            manifest.append(
                {
                    "name": part.name,
                    "command": redacted(" ".join(_shown(part.command))),
                    "code": done.code,
                    "seconds": round(done.seconds, 2),
                    "bytes": len(content),
                    "cut": done.cut,
                    "problem": redacted(done.problem),
                }
            )
        about = {"time": time.time(), "config_problem": redacted(problem), "parts": manifest}
        add(archive, f"{stem}/manifest.json", json.dumps(about, indent=2).encode())
    return manifest


def _parts(args: argparse.Namespace, config: DaemonConfig) -> Iterator[Part]:
    def verb(name: str, *words: str, size: int = 2 * _MB, seconds: float = 20.0) -> Part:
        run = (sys.executable, "-IS", "-c", _VERB, json.dumps(sys.path), "headcnictl")
        return Part(name, (*run, *words, "--config", args.config), seconds, size, (0, 1))

    yield verb("status.json", "status", "--json")
    yield verb("diagnose.json", "diagnose", "--json", "--cni-dir", args.cni_dir, seconds=60.0)
    yield verb("routes.json", "routes", "--json", seconds=30.0)
    yield verb("ipam.json", "ipam", "--json", size=8 * _MB)
    yield verb("pods.json", "pods", "--json", size=8 * _MB)
    yield verb("config.json", "config", "show", "--json")
    yield verb("config-validate.json", "config", "validate", "--json")
    yield verb("metrics.txt", "metrics")
    yield verb("events.jsonl", "events", "--json")
    if config.network.enable_network_policy:
        yield verb("policy.json", "policy", "--json", size=8 * _MB)
    logs = ("logs", "--since", args.since, "--lines", "5000")
    yield verb("logs.txt", *logs, size=8 * _MB, seconds=LOGS_SECONDS)
    version = verb("versions/headcni.json", "version", "--json")
    yield version._replace(command=version.command[:-2])  # it knows no --config
    for name, command in _VERSIONS.items():
        yield Part(f"versions/{name}.txt", command, size=64 * _KB)
    yield Part("config.yaml", ("cat", "--", args.config))
    for path in _conflists(args.cni_dir):
        yield Part(f"cni/{os.path.basename(path)}", ("cat", "--", path), size=_MB)
    yield from _network("network", ())
    if config.tailscale.mode == "daemon":
        yield from _network("network-headcni", ("ip", "netns", "exec", "headcni"))


_VERSIONS = {
    "kernel": ("uname", "-a"),
    "system": ("cat", "/etc/os-release"),
    "nft": ("nft", "--version"),
    "ip": ("ip", "-Version"),
    "systemd": ("systemctl", "--version"),
    "tailscale": ("tailscale", "version"),
    "units": (
        *("systemctl", "show", "--property=Id,ActiveState,SubState,NRestarts,MemoryCurrent"),
        *("headcni-daemon", "headcni-tailscaled", "tailscaled", "containerd", "kubelet"),
    ),
}


def _network(folder: str, inside: Tuple[str, ...]) -> Iterator[Part]:
    commands = {
        "addresses": ("ip", "-details", "address"),
        "rules": ("ip", "-4", "rule"),
        "rules6": ("ip", "-6", "rule"),
        "routes": ("ip", "-4", "route", "show", "table", "all"),
        "routes6": ("ip", "-6", "route", "show", "table", "all"),
        "neighbours": ("ip", "neighbour"),
        "nft": ("nft", "list", "ruleset"),
        "sysctls": ("sysctl", "--ignore", *_SYSCTLS),
    }
    for name, command in commands.items():
        yield Part(f"{folder}/{name}.txt", (*inside, *command), size=4 * _MB)


def _conflists(folder: str) -> List[str]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        names = []  # `diagnose` says so
    paths = (os.path.join(folder, name) for name in names)
    return [path for path in paths if os.path.isfile(path)][:MOST_FILES]


def _done(part: Part, seconds: float, size: int) -> Done:
    """Run the command, and end it with all its children when it has taken or said too much."""
    if seconds <= 0 or size <= 0:
        return Done(part, None, 0.0, False, "left out: the bundle has reached its limit", "")
    began = time.monotonic()
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                part.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as problem:
            said = f"{part.command[0]} cannot be run: {problem.strerror}"
            return Done(part, None, 0.0, False, said, "")
        with process:
            content, late = _read(process, began + seconds, size)
            _end(process)
        errors.seek(0)
        complaint = errors.read(4 * _KB).decode(errors="replace").strip()
    took, cut = time.monotonic() - began, len(content) > size
    wrong = ""
    if late:
        wrong = f"not finished within {seconds:.0f} s"
    elif process.returncode not in part.good and not cut:
        wrong = complaint or f"exit code {process.returncode}"
    text = content[:size].decode(errors="replace")
    if cut or late:  # a secret that is cut would not be recognised
        text = text[: text.rfind("\n") + 1]
    return Done(part, process.returncode, took, cut, wrong, text)


def _read(process: subprocess.Popen[bytes], until: float, size: int) -> Tuple[bytes, bool]:
    """What it prints, at most one byte more than asked for, and whether it took too long."""
    import selectors

    found = bytearray()
    if process.stdout is None:
        return b"", False
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdout, selectors.EVENT_READ)
        while len(found) <= size:
            left = until - time.monotonic()
            if left <= 0 or not waiting.select(left):
                return bytes(found), True
            piece = os.read(process.stdout.fileno(), min(64 * _KB, size + 1 - len(found)))
            if not piece:
                break
            found += piece
    try:
        process.wait(max(0.0, until - time.monotonic()) if len(found) <= size else 0)
    except subprocess.TimeoutExpired:
        return bytes(found), len(found) <= size
    return bytes(found), False


def _end(process: subprocess.Popen[bytes]) -> None:
    import signal

    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _shown(command: Tuple[str, ...]) -> Tuple[str, ...]:
    """A verb as an operator would type it."""
    return command[5:] if _VERB in command else command


def _in_words(path: str, size: int, parts: List[Dict[str, Any]]) -> str:
    failed = [part for part in parts if part["problem"]]
    rows = [
        (
            part["name"],
            f"{part['bytes'] / 1000:.1f} kB" + (" (cut)" if part["cut"] else ""),
            paint("incomplete", BAD) if part["problem"] else paint("ok", GOOD),
        )
        for part in parts
    ]
    lines = [table(rows, ("PART", "SIZE", "STATE"))]
    lines += [f"{part['name']}: {part['problem'].splitlines()[0][:200]}" for part in failed]
    lines.append(f"{path}: {size / 1000:.0f} kB, {len(parts)} parts, {len(failed)} incomplete")
    lines.append("Secrets are removed; names and addresses of pods and nodes are in it.")
    return "\n".join(lines)
