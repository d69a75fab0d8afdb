"""The commands in the documentation: what can be checked without running them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from documented_commands import steps

from headcni.ctl.explanations import find
from headcni.ctl.main import VERBS

CHECKOUT = Path(__file__).resolve().parents[3]
PAGES = ("README.md", "docs/quick-start.md")
ALL_PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]
EXAMPLES = sorted((CHECKOUT / "inventories").glob("[!lm]*/hosts.yml"))
WAITS_FOR_INPUT = re.compile(r"\b(ssh|read|getpass)\b|--prompt|--ask")


def lines(text: str) -> list[str]:
    """Commands, each on one line."""
    return re.sub(r"(\\|(\|))\n#?", r"\2", text).splitlines()


@pytest.mark.parametrize("page", PAGES)
def test_what_waits_for_input_is_the_last_command_of_its_block(page):
    for step in steps(CHECKOUT / page):
        for command in lines(step.commands)[:-1]:
            assert not WAITS_FOR_INPUT.search(command), f"{page}:{step.line}: {command}"


@pytest.mark.parametrize("page", PAGES)
def test_every_step_of_a_nodes_life_is_there(page):
    commands = "\n".join(step.commands for step in steps(CHECKOUT / page))
    for word in ("pip install", "cat > ", "headcni_headscale_api_key", "--check --diff"):
        assert word in commands
    for playbook in ("site", "verify", "uninstall"):
        assert any(step.runs(playbook) for step in steps(CHECKOUT / page)), playbook
    assert "headcnictl status" in commands


def test_both_pages_have_the_same_inventory_of_eight_lines():
    inventories = [
        re.findall(r"(?s)hosts\.yml <<'END'\n(.*?)END\n", "".join(s.commands for s in steps(page)))
        for page in (CHECKOUT / one for one in PAGES)
    ]
    assert inventories[0] == inventories[1]
    assert len(inventories[0]) == 1 and len(inventories[0][0].splitlines()) == 8


def test_there_are_example_inventories():
    assert [one.parent.name for one in EXAMPLES] == ["bare_metal", "k3s", "kubeadm"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: one.parent.name)
def test_the_commands_of_an_example_inventory_are_those_of_the_readme(example):
    """Only what is copied differs; the README's are run on real nodes."""
    run = [line for step in steps(CHECKOUT / "README.md") for line in lines(step.commands)]
    header = re.sub(r"(?m)^# ? ?", "", example.read_text().partition("\nheadcni:")[0])
    commands = [one.strip() for one in lines(header) if re.match(r" +(test|python3|ansible)", one)]
    assert len(commands) == 5
    for command in commands:
        assert re.sub(r" +", " ", command) in [re.sub(r" +", " ", one) for one in run]
    assert f"cp -r inventories/{example.parent.name} inventories/mine" in header


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_a_command_on_ones_own_inventory_gives_the_vaults_password(page):
    text = page.read_text().replace("\\\n", "")
    for command in re.findall(r"ansible(?:-playbook)? -i inventories/mine[^`\n]*", text):
        assert "--vault-pass-file ~/.headcni-vault" in command


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_every_verb_and_playbook_that_a_page_names_exists(page):
    text = page.read_text()
    verbs = set(re.findall(r"headcnictl ([a-z][a-z-]+)", "".join(code(text))))
    assert verbs <= set(VERBS), verbs - set(VERBS)
    for name in re.findall(r"\bplaybooks/([a-z_]+\.yml)", text):
        assert (CHECKOUT / "playbooks" / name).is_file(), name


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_every_error_that_a_page_names_can_be_explained(page):
    text = page.read_text()
    named = re.findall(r"headcnictl explain ([\w-]+)", text) + re.findall(r"\bHC\d{3}\b", text)
    assert [word for word in named if word != "ID" and find(word) is None] == []


def code(text: str) -> list[str]:
    """What is printed as code: between backticks, fenced or indented."""
    return re.findall(r"`[^`\n]+`|(?m:^    .*$)", text)


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_every_variable_of_a_role_that_a_page_names_exists(page):
    named = set(
        re.findall(r"\b(?:headcni_node|headscale_routes|tailscale)_[a-z_]+\b", page.read_text())
    )
    assert named - known_names() == set()


def known_names() -> set[str]:
    """Options of the roles, what their tasks register, and modules."""
    found = {path.stem for path in CHECKOUT.glob("plugins/modules/*.py")}
    for path in CHECKOUT.glob("roles/*/tasks/*.yml"):
        found |= set(re.findall(r"(?m)^ *register: (\w+)", path.read_text()))
    for specs in CHECKOUT.glob("roles/*/meta/argument_specs.yml"):
        for point in yaml.safe_load(specs.read_text())["argument_specs"].values():
            found |= set(point.get("options") or {})
    return found
