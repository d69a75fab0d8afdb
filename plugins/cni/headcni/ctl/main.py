"""The command: finds the verb, runs it, and turns the outcome into an exit code.

A verb is a module beside this one, with ``arguments(parser)`` and ``run(args) -> int``, and a line
in VERBS. Only the verb that is asked for is imported.

Exit codes, for all verbs:

    0    yes: it is valid, was found, was done
    1    no: there are mistakes, or it is not available; the reason is printed
    2    the command line is wrong
    3    unknown: a file cannot be read, or the daemon does not answer
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from typing import Any, Dict, Optional, Tuple

from ..errors import CniError, id_of

OK, NO, USAGE, UNKNOWN = 0, 1, 2, 3

VERBS = {
    "status": "is the node well, and if not, what is the matter",
    "pods": "list the pod interfaces of this node",
    "routes": "compare the routes to the other nodes' pods with what they should be",
    "policy": "list the network policies of pods, or explain who reaches whom by them",
    "ipam": "show the pools of addresses, and who has which address",
    "trace": "check every hop of a packet from a pod, and name the first that is broken",
    "events": "show pods' networks as they come and go",
    "logs": "show the journal of the daemon, tailscaled and the plugin in one stream",
    "metrics": "show what the daemon measures, what it means and which values are normal",
    "diagnose": "compare everything with how it should be, and name each difference",
    "support-bundle": "collect what others need to help with this node, without its secrets",
    "connect-test": "test from pods of this node what they reach, and remove them again",
    "ping": "ask whether a pod reaches an address, and in packets how large",
    "capture": "show a pod's packets, by tcpdump",
    "validate": "find every mistake in a netconf, a conflist or the daemon's config.yaml",
    "config": "show the daemon's settings with their origin, check them, or explain one",
    "pod-cidr": "explain which pod CIDR this node has, and why",
    "conflist": "show which conflist is in charge, or put back what was there before",
    "own-networks": "reach the node's own networks directly, whatever peers advertise",
    "mode": "go from host to daemon mode or back, with pods running",
    "backup": "copy the store, the settings and the conflist of this node into a file",
    "restore": "put back what a backup has, if no running pod contradicts it",
    "leave": "take this node's routes out of the mesh, before HeadCNI is removed",
    "convert": "translate the configuration of the Go HeadCNI",
    "explain": "say why an error occurs and what to do about it, by its ID",
    "completion": "print what completes headcnictl's words in bash, zsh or fish",
    "version": "print the versions of HeadCNI, CNI and Python, and the active shim",
}


class CannotTell(Exception):
    """The question could not be answered: exit code 3."""


def parser_with(asked: Collection[str]) -> Tuple[argparse.ArgumentParser, Dict[str, Any]]:
    """The parser with all verbs, of which these have their arguments, and the modules of these."""
    parser = argparse.ArgumentParser(
        prog="headcnictl",
        description="Look at HeadCNI on this node.",
        epilog="exit codes: 0 yes, 1 no, 2 wrong usage, 3 could not be found out",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    modules = {}
    for name, about in VERBS.items():
        verb = verbs.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        if name in asked:
            modules[name] = import_module(f"{__package__}.{name.replace('-', '_')}")
            verb.add_argument("--json", action="store_true", help="answer in JSON")
            modules[name].arguments(verb)
    return parser, modules


def main(argv: Optional[Sequence[str]] = None) -> int:
    asked = next((word for word in (sys.argv[1:] if argv is None else argv) if word in VERBS), "")
    parser, modules = parser_with((asked,))
    args = parser.parse_args(argv)
    try:
        code: int = modules[args.verb].run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has closed the pipe; without this Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except CannotTell as problem:
        return _complain(args, str(problem), UNKNOWN)
    except CniError as problem:
        return _complain(args, str(problem), NO, id_of(problem.code))
    except OSError as problem:  # such as a full disk, or a daemon that hangs: no answer, not a no
        where = f"{problem.filename}: " if problem.filename else ""
        return _complain(args, f"{where}{problem.strerror or problem}", UNKNOWN)


def _complain(args: argparse.Namespace, message: str, code: int, error: str = "") -> int:
    if args.json:
        show({"error": message, **({"id": error} if error else {})}, as_json=True)
    print(f"headcnictl: {message}", file=sys.stderr)
    if error:
        print(f"(what to do: headcnictl explain {error})", file=sys.stderr)
    return code


def show(answer: Any, as_json: bool) -> None:
    print(json.dumps(answer, indent=2, ensure_ascii=False) if as_json else answer)


def read(path: str) -> bytes:
    """A file, or stdin for ``-``."""
    try:
        if path == "-":
            return sys.stdin.buffer.read()
        with open(path, "rb") as stream:
            return stream.read()
    except OSError as problem:
        raise CannotTell(f"{path} cannot be read: {problem.strerror}") from None
