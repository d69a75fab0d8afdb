# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""headcnictl for all nodes of an inventory: runs the playbooks of the collection, which ask the
nodes in parallel, and shows their answers.

    bin/headcnictl -i INVENTORY [options] VERB [arguments]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NoReturn

from ansible_collections.headcni.mesh.plugins.module_utils.shared import node_status
from ansible_collections.headcni.mesh.plugins.plugin_utils.table import table

OK, NO, USAGE, UNKNOWN = 0, 1, 2, 3  # as on a node
INTERRUPTED = 130
COLUMNS = 80
FORKS = 32
MOST_SAID = 4000  # characters of Ansible's output, after a failure
END_SECONDS = 30.0  # for ansible-playbook to end after an interruption
ASK_SECONDS, REPORT_SECONDS, CONNECT_SECONDS, REMOVE_SECONDS = 1800.0, 1800.0, 7200.0, 300.0
VERBS = {
    "status": "one line per node, problems first",
    "routes": "the routes of each node to the other nodes' pods",
    "ipam": "the pools of addresses of each node",
    "trace": "every hop of a packet, from the nodes of its two ends",
    "diagnose": "what is wrong with each node, and the command that repairs it",
    "connect-test": "test from a pod on each node, and remove the pods",
    "report": "write a report of the mesh as an HTML page",
    "pods": "the pod interfaces of each node",
    "policy": "the network policies of each node's pods",
    "metrics": "what the daemons measure",
    "events": "pods' networks as they came and went on each node",
    "logs": "the journal of the parts of HeadCNI on each node",
    "config": "the daemons' settings, with show, validate or explain KEY",
    "ping": "whether a pod reaches an address",
    "pod-cidr": "which pod CIDR each node has, and why",
    "explain": "why an error occurs, by its ID",
    "version": "the versions on each node",
}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
Answers = Mapping[str, Mapping[str, Any]]


class NoAnswerError(Exception):
    """The playbook did not run. The message says why."""


def main(argv: Sequence[str], home: str, collections: str) -> int:
    args = _parser().parse_args(argv)
    words = [word for word in args.words if word != "--all"]
    run = Playbooks(args, home, collections)
    for one in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, _interrupt)
    try:
        if args.verb == "connect-test":
            return connect_test(run, words)
        if args.verb == "report":
            argparse.ArgumentParser(prog="headcnictl -i INVENTORY report").parse_args(words)
            done = run("report.yml", {}, REPORT_SECONDS)
            sys.stdout.write(done.stdout)
            return UNKNOWN if done.returncode else OK
        with tempfile.TemporaryDirectory(prefix="headcnictl-") as folder:
            return asked(run, args.verb, words, Path(folder) / "answers.json")
    except NoAnswerError as problem:
        print(f"headcnictl: {problem}", file=sys.stderr)
        return UNKNOWN
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _interrupt(*_unused: object) -> NoReturn:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headcnictl",
        description="Look at HeadCNI on all nodes of an inventory.",
        epilog="\n".join(
            [
                "verbs:",
                *(f"  {name:14}{about}" for name, about in VERBS.items()),
                "",
                "arguments after the verb are those of headcnictl on a node, and --json",
                "exit codes: 0 yes, 1 no, 2 wrong usage, 3 could not be found out",
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-i", "--inventory", action="append", default=[], metavar="FILE", help="as for Ansible")
    add("-l", "--limit", default="", metavar="NODES", help="only these nodes")
    add("-f", "--forks", type=int, default=FORKS, metavar="N", help="nodes at once (%(default)s)")
    add("-e", "--extra-vars", action="append", default=[], metavar="VARS", help="as for Ansible")
    add("--vault-pass-file", "--vault-password-file", default="", metavar="FILE")
    add("-J", "--ask-vault-pass", action="store_true")
    add("-K", "--ask-become-pass", action="store_true")
    add("verb", metavar="VERB", choices=VERBS, help="see below")
    add("words", nargs=argparse.REMAINDER, metavar="…", help="arguments of the verb")
    return parser


class Playbooks:
    """Runs a playbook of the collection with the options of the command line."""

    def __init__(self, args: argparse.Namespace, home: str, collections: str) -> None:
        beside = [f"{home}/.venv/bin", str(Path(sys.executable).parent)]
        path = os.pathsep.join([os.environ.get("PATH", os.defpath), *beside])
        self.program = shutil.which("ansible-playbook", path=path)
        self.home = home
        known = os.environ.get("ANSIBLE_COLLECTIONS_PATH")
        places = os.pathsep.join(filter(None, (collections, known)))
        self.env = {**os.environ, "ANSIBLE_COLLECTIONS_PATH": places, "HEADCNI_PROGRESS": "0"}
        self.options = [f"--forks={args.forks}"]
        self.options += [f"--inventory={one}" for one in args.inventory]
        self.options += [f"--limit={args.limit}"] if args.limit else []
        self.options += [f"--extra-vars={one}" for one in args.extra_vars]
        if args.vault_pass_file:
            self.options.append(f"--vault-password-file={args.vault_pass_file}")
        self.options += ["--ask-vault-pass"] if args.ask_vault_pass else []
        self.options += ["--ask-become-pass"] if args.ask_become_pass else []

    def __call__(
        self, name: str, given: Mapping[str, Any], seconds: float
    ) -> subprocess.CompletedProcess[str]:
        if not self.program:
            raise NoAnswerError("there is no ansible-playbook on the PATH: activate its venv")
        command = [self.program, *self.options, "--extra-vars", json.dumps(_literal(given))]
        command.append(f"{self.home}/playbooks/{name}")
        with (
            tempfile.TemporaryFile("w+") as output,
            subprocess.Popen(
                command, env=self.env, stdout=output, stderr=subprocess.STDOUT
            ) as worker,
        ):
            try:
                worker.wait(seconds)
            except subprocess.TimeoutExpired:
                _end(worker)
                raise NoAnswerError(f"{name} did not end in {seconds:.0f} s") from None
            except KeyboardInterrupt:
                _end(worker)
                raise
            output.seek(0)
            return subprocess.CompletedProcess(command, worker.returncode, output.read())


def _literal(value: Any) -> Any:
    """The value with texts that Ansible does not take for templates, which could run anything on
    the controller. Some words are what a node has answered."""
    if isinstance(value, Mapping):
        return {key: _literal(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_literal(each) for each in value]
    return {"__ansible_unsafe": value} if isinstance(value, str) else value


def _end(worker: subprocess.Popen[Any]) -> None:
    """A terminal has sent the signal to ansible-playbook, too; others have not."""
    with suppress(subprocess.TimeoutExpired):
        worker.wait(1)
        return
    worker.send_signal(signal.SIGINT)
    try:
        worker.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        worker.kill()


def _read(path: Path, done: subprocess.CompletedProcess[str]) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise NoAnswerError(f"the playbook failed:\n{done.stdout[-MOST_SAID:]}") from None


def asked(run: Playbooks, verb: str, words: Sequence[str], file: Path) -> int:
    as_json = "--json" in words
    others = [word for word in words if word != "--json"]
    in_json = as_json or verb == "status"
    if verb == "trace":
        others = _by_address(run, others, file)
    answers = _ask(run, [verb, *(["--json"] if in_json else []), *others], file)
    if verb == "trace":
        answers = dict(sorted(_of_the_ends(answers).items(), key=_knows_no_cause))
    if as_json:
        shown = {node: _in_json(one) for node, one in answers.items()}
        print(json.dumps({"nodes": shown}, indent=2, ensure_ascii=False))
    elif verb == "status" and not any(one["code"] == USAGE for one in answers.values()):
        print(_printable("\n".join(_status(answers))))
    else:
        print(_printable("\n".join(_texts(answers))))
    return _worst(answers)


def _ask(run: Playbooks, question: Sequence[str], file: Path) -> Answers:
    given = {"headcni_ask": list(question), "headcni_ask_file": str(file)}
    done = run("ask.yml", given, ASK_SECONDS)
    return {node: _answer(one) for node, one in _read(file, done).items()}


def _by_address(run: Playbooks, words: Sequence[str], file: Path) -> list[str]:
    """The arguments of trace with an address in place of each pod's name, which only the pod's own
    node knows."""
    parser = argparse.ArgumentParser(prog="headcnictl -i INVENTORY trace")
    parser.add_argument("source", metavar="SRC", help="namespace/name or address of a pod")
    parser.add_argument("target", metavar="DST", help="the same, or another address")
    args, options = parser.parse_known_args(words)
    ends = [args.source, args.target]
    if all(map(_version, ends)):
        return [*ends, *options]
    pods: dict[str, list[str]] = {}
    for one in _ask(run, ["pods", "--json"], file).values():
        for name, addresses in _pods_in(_in_json(one).get("answer")):
            pods.setdefault(name, addresses)
    unknown = [end for end in ends if not _version(end) and end not in pods]
    if unknown:
        raise NoAnswerError(f"no node has a pod {unknown[0]!r}: expected namespace/name")
    family = next(filter(None, map(_version, ends)), 0)
    return [*(end if _version(end) else _one_of(pods[end], family) for end in ends), *options]


def _pods_in(answer: Any) -> Iterator[tuple[str, list[str]]]:
    """Name and addresses of each pod, without those that a node of another release, or a hostile
    one, describes in another way."""
    for pod in answer if isinstance(answer, list) else ():
        with suppress(KeyError, TypeError):
            addresses = [one for one in pod["addresses"] if isinstance(one, str) and _version(one)]
            if addresses:
                yield f"{pod['namespace']}/{pod['pod']}", addresses


def _one_of(addresses: Sequence[str], family: int) -> str:
    """Of the other end's family, if that is known."""
    return next((one for one in addresses if _version(one) == family), addresses[0])


def _version(text: str) -> int:
    """4 or 6; 0 for what is no address."""
    with suppress(ValueError):
        return ip_address(text).version
    return 0


def _answer(result: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(code := result.get("code"), int):
        return {"code": code, **{key: str(result.get(key, "")) for key in ("output", "said")}}
    said = str(result.get("msg") or "it cannot be reached")
    return {"code": UNKNOWN, "output": "", "said": said}


def _of_the_ends(answers: Answers) -> Answers:
    """Without the nodes of neither end of a packet, unless no node knows either."""
    ends = {node: one for node, one in answers.items() if one["code"] in (OK, NO)}
    return ends or answers


def _knows_no_cause(item: tuple[str, Mapping[str, Any]]) -> bool:
    """A node that only sees that nobody answers comes after the one that has the broken hop."""
    return not re.search(r"(?m)^(?!packet)\S+ +BROKEN", str(item[1]["output"]))


def _worst(answers: Answers) -> int:
    """Wrong usage is the same for all nodes. A no is more than an unknown."""
    codes = {int(one["code"]) for one in answers.values()}
    return next((code for code in (USAGE, NO) if code in codes), UNKNOWN if codes - {OK} else OK)


def _in_json(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return {"code": answer["code"], "answer": json.loads(answer["output"])}
    except ValueError:
        return {"code": answer["code"], "error": _reason(answer)}


def _reason(answer: Mapping[str, Any]) -> str:
    return str(answer["said"]).strip().removeprefix("headcnictl: ")


def _status(answers: Answers) -> list[str]:
    found: dict[str, Any] = {}
    for node, one in answers.items():
        known = _in_json(one).get("answer")
        found[node] = known if _is_status(known) else _reason(one) or "its answer is no status"
    rows, said = node_status.lines(found)
    ready = sum(row[1] == "yes" for row in rows)
    shown = table([list(node_status.HEAD), *rows])
    return [*shown, f"{ready} of {len(rows)} nodes are ready", *map(_wrapped, said)]


def _is_status(answer: Any) -> bool:
    """Whether it can be shown. A node of another release must not hide the others."""
    if not isinstance(answer, dict) or "ready" not in answer:
        return False
    try:
        node_status.lines({"": answer})
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return False
    return True


def _printable(text: str) -> str:
    """Without what a terminal would act on."""
    return _CONTROL.sub("", text)


def _texts(answers: Answers) -> list[str]:
    """Each answer once, with the nodes that gave it; what is wrong comes first."""
    nodes: dict[tuple[bool, str], list[str]] = {}
    for node, one in answers.items():
        text = "\n".join(filter(None, (str(one["output"]).strip("\n"), str(one["said"]).strip())))
        nodes.setdefault((one["code"] == OK, text), []).append(node)
    lines: list[str] = []
    for (_well, text), names in sorted(nodes.items(), key=lambda item: item[0][0]):
        lines += [""] if lines else []
        lines += [_wrapped(f"{', '.join(names)}:"), text]
    return lines


def _wrapped(line: str) -> str:
    if len(line) <= COLUMNS:
        return line
    return textwrap.fill(
        line, COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def connect_test(run: Playbooks, words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="headcnictl -i INVENTORY connect-test")
    parser.add_argument("--json", action="store_true", help="answer in JSON")
    parser.add_argument("--junit", metavar="FILE", help="also write a JUnit file")
    parser.add_argument("--perf", action="store_true", help="measure the throughput, too")
    parser.add_argument("--every-pair", action="store_true", help="also above 20 nodes")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="headcnictl-") as folder:
        file = Path(folder) / "results.json"
        given = {"headcni_verify_json": str(file), "headcni_verify_perf": args.perf}
        given |= {"headcni_verify_junit": str(Path(args.junit).resolve())} if args.junit else {}
        given |= {"headcni_verify_all": True} if args.every_pair else {}
        try:
            found = _read(file, run("verify.yml", given, CONNECT_SECONDS))
        except KeyboardInterrupt:
            return _remove_pods(run)
    print(json.dumps(found, indent=2, ensure_ascii=False) if args.json else _in_words(found))
    return NO if found["failed"] else OK


def _in_words(found: Mapping[str, Any]) -> str:
    return _printable("\n".join(map(_wrapped, found["lines"])).strip("\n"))


def _remove_pods(run: Playbooks) -> int:
    """After an interruption. A second one stops this, too."""
    later = "the pods end by themselves after some minutes, and the next connect-test removes them"
    print("headcnictl: interrupted; removing the pods …", file=sys.stderr, flush=True)
    try:
        done = run("verify.yml", {"headcni_verify_remove": True}, REMOVE_SECONDS)
    except (KeyboardInterrupt, NoAnswerError):
        print(f"headcnictl: not removed: {later}", file=sys.stderr)
        return INTERRUPTED
    if done.returncode:
        print(f"{done.stdout[-MOST_SAID:]}\nheadcnictl: {later}", file=sys.stderr)
    else:
        print("headcnictl: the pods are removed", file=sys.stderr)
    return INTERRUPTED
