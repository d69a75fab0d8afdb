"""headcnictl on the controller: what it asks the playbooks for, what it shows, and its exit code.

An ansible-playbook that answers for two nodes takes the place of the real one; tests/lab has that.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible_collections.headcni.mesh.plugins.plugin_utils import mesh_command
from lab_command import CHECKOUT
from patience import until

STUB = """#!{python}
import json, os, sys, time
given = {{}}
as_text = lambda one: one.get("__ansible_unsafe", one)
for at, word in enumerate(sys.argv):
    if word == "--extra-vars":
        given = json.loads(sys.argv[at + 1], object_hook=as_text)
with open({log!r}, "a") as log:
    log.write(json.dumps({{"argv": sys.argv[1:], "given": given}}) + "\\n")
plan = json.load(open({plan!r}))
if "headcni_verify_remove" not in given:
    time.sleep(plan.get("seconds", 0))
print("what Ansible says")
for name in ("headcni_ask_file", "headcni_verify_json"):
    if name in given and "answers" in plan:
        json.dump(plan["answers"], open(given[name], "w"))
sys.exit(plan.get("code", 0))
"""


class Controller:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan = folder / "plan.json"
        self.log = folder / "log"
        program = folder / "ansible-playbook"
        program.write_text(
            STUB.format(python=sys.executable, log=str(self.log), plan=str(self.plan))
        )
        program.chmod(0o755)

    def begin(self, *words: str, **plan: object) -> subprocess.Popen[str]:
        self.plan.write_text(json.dumps(plan))
        return subprocess.Popen(
            [CHECKOUT / "bin/headcnictl", *words],
            env={**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __call__(self, *words: str, **plan: object) -> subprocess.CompletedProcess[str]:
        worker = self.begin(*words, **plan)
        output, errors = worker.communicate(timeout=60)
        return subprocess.CompletedProcess(words, worker.returncode, output, errors)

    @property
    def runs(self) -> list[dict]:
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def controller(tmp_path):
    return Controller(tmp_path)


def said(output: str = "", code: int = 0, errors: str = "") -> dict:
    return {"code": code, "output": output, "said": errors}


STATUS = {
    "ready": True,
    "mode": "host",
    "version": "0.2.0",
    "attachments": 3,
    "firewalls": [],
    "conditions": [],
    "alarms": [],
}
UNREACHABLE = {"unreachable": True, "msg": "no route to host"}


def test_the_options_are_passed_to_ansible_and_the_arguments_to_the_nodes(controller):
    words = ("-i", "hosts.yml", "-l", "node1", "-f", "7", "--vault-pass-file", "v")
    done = controller(*words, "routes", "--no-ping", answers={"node1": said("fine\n")})
    assert (done.returncode, done.stdout) == (0, "node1:\nfine\n")
    (run,) = controller.runs
    assert run["argv"][:4] == [
        "--forks=7",
        "--inventory=hosts.yml",
        "--limit=node1",
        "--vault-password-file=v",
    ]
    assert run["given"]["headcni_ask"] == ["routes", "--no-ping"]
    assert run["argv"][-1] == f"{CHECKOUT}/playbooks/ask.yml"


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (2, 3), (4, 3)])
def test_a_report_that_was_not_written_is_no_success(controller, code, expected):
    done = controller("report", code=code)
    assert (done.returncode, done.stdout) == (expected, "what Ansible says\n")


def test_report_has_no_arguments(controller):
    assert controller("report", "--nonsense").returncode == 2
    assert controller.runs == []


def test_status_is_one_line_per_node_with_problems_first(controller):
    bad = {**STATUS, "ready": False}
    bad["conditions"] = [{"name": "routes", "ok": False, "reason": "2 are missing"}]
    answers = {"a": said(json.dumps(STATUS)), "b": said(json.dumps(bad), 1), "c": UNREACHABLE}
    done = controller("status", "--all", answers=answers)
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["c", "NO"], ["b", "NO"], ["a", "yes"]]
    assert "1 of 3 nodes are ready" in lines
    assert any("2 are missing" in line for line in lines)
    assert any("no route to host" in line for line in lines)
    assert done.returncode == 1
    assert controller.runs[0]["given"]["headcni_ask"] == ["status", "--json"]


@pytest.mark.parametrize(
    "answer",
    ["7", "[]", '"ready"', '["ready"]', '{"ready": true}', '{"ready": true, "conditions": 7}', ""],
)
def test_a_status_that_is_none_concerns_its_node_only(controller, answer):
    bad = {**STATUS, "ready": False}
    answers = {"a": said(json.dumps(bad)), "b": said(answer), "c": {"code": "x"}}
    done = controller("status", "--all", answers=answers)
    assert "Traceback" not in done.stderr
    lines = [line.split()[:2] for line in done.stdout.splitlines()]
    assert ["a", "NO"] in lines and ["b", "NO"] in lines and ["c", "NO"] in lines
    assert done.returncode != 0


def test_a_node_does_not_control_the_terminal(controller):
    answers = {"a": said("red \x1b[31m\x9b2J\r\x07end\n\tindented\n", 1, "\x1b]0;title\x07")}
    done = controller("diagnose", "--all", answers=answers)
    assert not set("\x1b\x9b\r\x07") & set(done.stdout + done.stderr)
    assert "\n\tindented" in done.stdout


def test_equal_answers_are_shown_once_and_those_that_say_no_first(controller):
    answers = {"a": said("well\n"), "b": said("broken\n", 1), "c": said("well\n")}
    done = controller("diagnose", "--all", answers=answers)
    assert done.stdout == "b:\nbroken\n\na, c:\nwell\n"
    assert done.returncode == 1


def test_json_has_the_answer_and_the_exit_code_of_each_node(controller):
    answers = {
        "a": said('{"leaked": 0}'),
        "b": said("", 3, "headcnictl: no store\n"),
        "c": UNREACHABLE,
    }
    done = controller("ipam", "--json", answers=answers)
    assert json.loads(done.stdout) == {
        "nodes": {
            "a": {"code": 0, "answer": {"leaked": 0}},
            "b": {"code": 3, "error": "no store"},
            "c": {"code": 3, "error": "no route to host"},
        }
    }
    assert done.returncode == 3
    assert controller.runs[0]["given"]["headcni_ask"] == ["ipam", "--json"]


def test_trace_shows_the_nodes_of_the_two_ends_only(controller):
    unknown = said("", 3, "headcnictl: neither is a pod of this node")
    answers = {"a": said("from here\n"), "b": said("to there\n", 1), "c": unknown}
    done = controller("trace", "10.1.0.2", "10.2.0.2", answers=answers)
    assert done.stdout == "b:\nto there\n\na:\nfrom here\n" and done.returncode == 1
    done = controller("trace", "10.1.0.9", "10.2.0.9", answers={"a": unknown, "c": unknown})
    assert done.stdout == "a, c:\nheadcnictl: neither is a pod of this node\n"
    assert done.returncode == 3


def test_the_node_that_knows_the_broken_hop_of_a_trace_comes_first(controller):
    silent = said("packet        BROKEN   no answer\n", 1)
    answers = {"a": silent, "b": said("forwarding    BROKEN   is 0\n", 1)}
    done = controller("trace", "10.1.0.2", "10.2.0.2", answers=answers)
    assert done.stdout.startswith("b:\nforwarding") and "\na:\npacket" in done.stdout


def test_trace_finds_pods_by_name_on_whatever_node_they_are(controller):
    def pods(name, *addresses):
        return said(json.dumps([{"namespace": "shop", "pod": name, "addresses": addresses}]))

    answers = {"a": pods("web-1", "10.1.0.2", "fd00::2"), "b": pods("web-2", "10.2.0.2", "fd00::3")}
    controller("trace", "shop/web-1", "shop/web-2", "--port", "80", answers=answers)
    assert [run["given"]["headcni_ask"] for run in controller.runs] == [
        ["pods", "--json"],
        ["trace", "10.1.0.2", "10.2.0.2", "--port", "80"],
    ]
    controller("trace", "fd00::9", "shop/web-2", answers=answers)
    assert controller.runs[-1]["given"]["headcni_ask"] == ["trace", "fd00::9", "fd00::3"]
    done = controller("trace", "shop/web-3", "10.1.0.2", answers=answers)
    assert done.returncode == 3 and "no node has a pod 'shop/web-3'" in done.stderr


@pytest.mark.parametrize(
    "answer",
    [
        [{"namespace": "a", "pod": "one", "addresses": ["{{ lookup('pipe', 'id') }}"]}],
        [{"namespace": "a", "pod": "one", "addresses": ["--config=/etc/shadow"]}],
        [{"namespace": "a", "pod": "one", "addresses": []}],
        [{"namespace": "a"}],
        {"pods": 1},
        [7],
    ],
)
def test_a_node_that_lies_about_its_pods_decides_nothing(controller, answer):
    answers = {"bad": said(json.dumps(answer)), "none": said("7")}
    done = controller("trace", "a/one", "10.0.0.2", answers=answers)
    assert (done.returncode, done.stdout) == (3, "")
    assert "no node has a pod 'a/one'" in done.stderr
    assert len(controller.runs) == 1


def test_ansible_takes_words_as_they_are_and_runs_nothing_in_them(tmp_path):
    (tmp_path / "playbooks").mkdir()
    (tmp_path / "playbooks/show.yml").write_text(
        "[{hosts: localhost, gather_facts: false, tasks: [{debug: {msg: '{{ words }}'}}]}]"
    )
    args = mesh_command._parser().parse_args(["-i", "localhost,", "routes"])
    word = "{{ lookup('pipe', 'expr 40 + 2') }}"
    done = mesh_command.Playbooks(args, str(tmp_path), "")("show.yml", {"words": [word]}, 60)
    assert done.returncode == 0, done.stdout
    assert "expr 40 + 2" in done.stdout
    assert "42" not in done.stdout


def test_wrong_usage_is_told_once(controller):
    wrong = said("", 2, "usage: headcnictl routes")
    done = controller("routes", "--nonsense", answers={"a": wrong, "b": wrong})
    assert done.stdout == "a, b:\nusage: headcnictl routes\n" and done.returncode == 2
    assert controller("leave").returncode == 2
    assert len(controller.runs) == 1


def test_a_playbook_that_does_not_run_shows_what_ansible_says(controller):
    done = controller("routes", code=4)
    assert done.returncode == 3
    assert done.stderr == "headcnictl: the playbook failed:\nwhat Ansible says\n\n"


RESULTS = {"failed": 0, "lines": ["", "from \\ to  a", "not checked: " + "word " * 30]}


def test_connect_test_runs_verify_and_shows_its_tables_in_80_columns(controller, tmp_path):
    junit = str(tmp_path / "it.xml")
    done = controller("connect-test", "--perf", "--junit", junit, answers=RESULTS)
    assert done.returncode == 0 and done.stdout.startswith("from \\ to  a\nnot checked: word")
    assert max(map(len, done.stdout.splitlines())) <= 80
    given = controller.runs[0]["given"]
    assert given["headcni_verify_perf"] is True and given["headcni_verify_junit"] == junit
    assert controller("connect-test", answers={**RESULTS, "failed": 2}, code=2).returncode == 1
    done = controller("connect-test", "--json", answers=RESULTS)
    assert json.loads(done.stdout) == RESULTS


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_connect_test_removes_the_pods(controller, how):
    worker = controller.begin("connect-test", seconds=60)
    until(lambda: controller.runs, 20, "ansible-playbook has started")
    began = time.monotonic()
    if how == signal.SIGINT:
        os.killpg(worker.pid, how)  # as a terminal does
    else:
        worker.send_signal(how)
    _unused, errors = worker.communicate(timeout=30)
    assert time.monotonic() - began < 15
    assert worker.returncode == 130
    assert "interrupted; removing the pods" in errors and "the pods are removed" in errors
    assert controller.runs[1]["given"] == {"headcni_verify_remove": True}
    assert controller.runs[1]["argv"][-1].endswith("/verify.yml")


def test_without_ansible_it_says_what_is_missing(tmp_path):
    home = tmp_path / "home"
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from ansible_collections.headcni.mesh.plugins.plugin_utils import mesh_command\n"
        "sys.executable = '/nowhere/python'\n"
        "sys.exit(mesh_command.main(['status'], sys.argv[2], sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, CHECKOUT / "collections", home],
        env={"PATH": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 3
    assert "there is no ansible-playbook" in done.stderr
