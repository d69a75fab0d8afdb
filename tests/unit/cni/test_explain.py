"""Every error has an ID, a cause and a next step, and its message names the ID."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest
from lab_command import CHECKOUT

from headcni import errors
from headcni.ctl import explain, main
from headcni.ctl.explanations import ALL, CODES, CONDITIONS, FAULTS, REFUSED_RANGES, find
from headcni.errors import CniError
from headcni.mesh import claims

RUNTIME = CHECKOUT / "plugins/cni"


def test_every_code_is_explained_under_its_name():
    codes = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, int) and value in errors.CODES
    }
    assert {each.name: each.number for each in CODES} == codes


def test_every_reason_to_refuse_a_range_is_explained():
    assert {each.name for each in REFUSED_RANGES} == {
        *claims.REASONS,
        claims.UNCHECKED,
        claims.MORE,
    }


def test_every_condition_of_the_runtime_is_explained():
    """Their names are literals: Condition("…", …) and conditions.fixed["…"]."""
    found = set()
    for path in (RUNTIME / "headcni").rglob("*.py"):
        found |= names_of_conditions(path.read_text())
    assert found == {each.name for each in CONDITIONS}


def test_every_finding_is_explained():
    """Their ids are literals: Finding("…", …). Those that are made of other names are listed."""
    found = {"forwarding-off-ipv4", "forwarding-off-ipv6", "duplicate-own-cidr"}
    found.add("duplicate-overlap")
    for path in (RUNTIME / "headcni/ctl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding":
                found |= {
                    str(one.value)
                    for one in ast.walk(node.args[0])
                    if isinstance(one, ast.Constant) and not isinstance(node.args[0], ast.JoinedStr)
                }
    found -= {"NeedsLogin"}  # a comparison in such an argument
    assert found == {each.name for each in FAULTS}


def names_of_conditions(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        literals: list[ast.expr | None] = []
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Condition":
            literals = list(node.args[:1])
        elif isinstance(node, ast.Subscript) and getattr(node.value, "attr", "") == "fixed":
            literals = [node.slice]
        elif isinstance(node, ast.AnnAssign) and getattr(node.target, "attr", "") == "fixed":
            literals = list(node.value.keys) if isinstance(node.value, ast.Dict) else []
        found |= {str(one.value) for one in literals if isinstance(one, ast.Constant)}
    return found


@pytest.mark.parametrize("each", ALL, ids=lambda each: each.name)
def test_an_explanation_is_found_by_id_number_and_name_and_says_what_to_do(each):
    for word in (each.id, each.id.lower(), str(each.number), each.name, f"[{each.id}]"):
        assert find(word) == each
    assert each.cause.endswith(".") and each.next_step.endswith(".")
    assert len(each.next_step) > 20


def test_ids_and_names_are_unique():
    assert len({each.number for each in ALL}) == len(ALL)
    assert len({each.name for each in ALL}) == len(ALL)
    assert find("Tailscale") == find("TAILSCALE") == find("HC203")


@pytest.mark.parametrize("each", CODES, ids=lambda each: each.name)
def test_the_answer_to_the_runtime_names_the_id(each):
    answer = CniError(each.number, "it failed", "because").as_dict("1.1.0")
    assert answer["details"] == f"because [headcnictl explain {each.id}]"
    assert CniError(each.number, "it failed").as_dict("1.1.0")["details"] == (
        f"[headcnictl explain {each.id}]"
    )


def test_a_code_that_is_not_ours_is_not_explained():
    assert "details" not in CniError(999, "of another plugin").as_dict("1.1.0")


def test_explain_prints_the_cause_the_next_step_and_a_link_within_80_columns(capsys):
    assert main.main(["explain", "tailscale"]) == main.OK
    said = capsys.readouterr().out
    assert said.startswith("HC203 tailscale\n\ncause:     tailscaled does not answer")
    assert "\nnext step: Start it: systemctl start tailscaled" in said
    assert said.endswith("docs/errors.md#hc203\n")
    assert max(map(len, said.splitlines())) <= explain.WIDTH


def test_explain_without_an_id_lists_all(capsys):
    assert main.main(["explain"]) == main.OK
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(ALL) and max(map(len, lines)) <= explain.WIDTH
    assert main.main(["explain", "--json"]) == main.OK
    assert len(json.loads(capsys.readouterr().out)) == len(ALL)


def test_an_unknown_id_is_named_and_the_exit_code_says_so(capsys):
    assert main.main(["explain", "HC998"]) == main.UNKNOWN
    assert "'HC998' is no known error" in capsys.readouterr().err


def test_headcnictl_names_the_id_of_an_error(capsys, monkeypatch):
    def fails(args):
        raise CniError(errors.STORE, "the disk is full")

    monkeypatch.setattr(explain, "run", fails)
    assert main.main(["explain", "--json"]) == main.NO
    said = capsys.readouterr()
    assert json.loads(said.out) == {"error": "the disk is full", "id": "HC104"}
    assert "(what to do: headcnictl explain HC104)" in said.err


def test_nothing_that_serves_a_call_imports_the_explanations():
    served = "headcni.shim, headcni.plugins.headcni.plugin, headcni.plugins.headcni_ipam"
    program = f"import sys, {served}, headcni.daemon.daemon;"
    check = "print([name for name in sys.modules if name.startswith('headcni.ctl')])"
    done = subprocess.run(
        [sys.executable, "-c", program + check],
        env={"PYTHONPATH": str(RUNTIME)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "[]\n", done.stderr
