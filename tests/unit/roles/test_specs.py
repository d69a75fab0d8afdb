"""Each role says the same thing in its specs, its defaults, its tasks and its README."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import role_readme
import yaml
from ansible_collections.headcni.mesh.plugins.plugin_utils.former_names import FORMER

ROLES = role_readme.roles()
SHARED = ("headcni_mode", "headcni_headscale_url", "headcni_headscale_api_key")
each_role = pytest.mark.parametrize("role", ROLES, ids=[role.name for role in ROLES])


def options(role: Path) -> dict[str, Any]:
    return {
        name: spec
        for point in role_readme.entry_points(role).values()
        for name, spec in (point.get("options") or {}).items()
    }


@each_role
def test_the_readme_is_made_from_the_specs_as_they_are(role):
    assert (role / "README.md").read_text() == role_readme.readme(role), (
        "out of date: run python3 tests/support/role_readme.py"
    )


@each_role
def test_every_default_has_a_spec_with_the_same_default(role):
    specs, known = options(role), role_readme.defaults(role)
    assert {name for name in known if not name.startswith("_")} - set(specs) == set()
    said = {name: spec["default"] for name, spec in specs.items() if "default" in spec}
    assert said == {name: known.get(name) for name in said}


@each_role
def test_every_variable_carries_the_roles_name(role):
    prefixes = (f"{role.name}_", *SHARED)
    assert [name for name in options(role) if not name.startswith(prefixes)] == []


@each_role
def test_former_and_internal_names_are_no_options(role):
    assert [name for name in options(role) if name.startswith("_") or name in FORMER] == []


def test_every_former_name_still_works_in_one_place():
    places = [path for role in ROLES for path in role.glob("*/main.yml")]
    places.append(role_readme.CHECKOUT / "plugins" / "filter" / "mesh_socket.py")
    texts = [path.read_text() for path in places]
    for name in FORMER:
        used = sum(bool(re.search(rf"(?<![\w]){name}\b", text)) for text in texts)
        assert used == 1, name


def test_every_former_name_leads_to_one_that_exists():
    known = {name for role in ROLES for name in options(role)} | {
        *("headcni_release", "headcni_with_pods", "headcni_keep_sysctls"),
        "an option",
    }
    for name, now in FORMER.items():
        assert now.startswith(tuple(known)), name


@each_role
def test_a_variable_means_the_same_at_every_entry_point(role):
    seen: dict[str, Any] = {}
    for point in role_readme.entry_points(role).values():
        for name, spec in (point.get("options") or {}).items():
            assert seen.setdefault(name, spec) == spec, name


@each_role
def test_every_entry_point_has_tasks_and_every_variable_a_description(role):
    for name in role_readme.entry_points(role):
        assert (role / "tasks" / f"{name}.yml").exists()
    assert [name for name, spec in options(role).items() if not spec.get("description")] == []


@pytest.mark.parametrize(
    ("role", "file", "module", "name", "other"),
    [
        # The CIDRs are for preflight to find out.
        ("headcni_node", "run", "headcni_conflist", "conflist", {"pod_cidrs", "cluster_cidrs"}),
        ("tailscale", "join_tailnet", "tailscale_join", "join", {"auth_key", "login"}),
    ],
)
def test_preflight_compares_just_what_would_be_done(role, file, module, name, other):
    folder = next(one for one in ROLES if one.name == role)
    tasks = yaml.safe_load((folder / f"tasks/{file}.yml").read_text())
    task = next(task for task in tasks if f"headcni.mesh.{module}" in task)
    assert set(task[f"headcni.mesh.{module}"]) == other
    preflight = yaml.safe_load((folder / "tasks/preflight.yml").read_text())
    compared = next(
        arguments[name]
        for one in preflight
        for module, arguments in one.items()
        if module.startswith("headcni.mesh.")
    )
    assert task["module_defaults"] == {f"headcni.mesh.{module}": compared}
    options = yaml.safe_load((folder / "vars/main.yml").read_text())[f"_{role}_{name}_options"]
    assert compared == f"{{{{ _{role}_{name}_options }}}}"
    assert options and not other & set(options)


SECRET = re.compile(r"(api|auth)_key$|token(?!_lifetime$)|secret|password")


@each_role
def test_no_secret_is_shown_by_the_check_of_arguments(role):
    secrets = {
        (point, name): spec.get("no_log")
        for point, spec_of_point in role_readme.entry_points(role).items()
        for name, spec in (spec_of_point.get("options") or {}).items()
        if SECRET.search(name)
    }
    assert [where for where, hidden in secrets.items() if hidden is not True] == []
    if role.name != "headcni_node":
        assert secrets


def blocks(tasks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each task list and block, with what it always does at its end."""
    yield {"block": tasks}
    for task in tasks:
        if "block" in task:
            yield task
        for section in ("block", "rescue", "always"):
            yield from list(blocks(task.get(section) or []))[1:]


def entry_points_of(tasks: list[dict[str, Any]]) -> list[str]:
    used = [
        task.get("ansible.builtin.import_role") or task.get("ansible.builtin.include_role") or {}
        for task in tasks
    ]
    return [
        role.get("tasks_from", "main")
        for role in used
        if role.get("name") == "headcni.mesh.headscale_routes"
    ]


def test_every_playbook_expires_the_key_that_it_has_minted_whatever_happens():
    checkout = ROLES[0].parent.parent
    minting = []
    for file in sorted(checkout.glob("playbooks/**/*.yml")):
        content = yaml.safe_load(file.read_text()) or []
        lists = (
            [play.get("tasks") or [] for play in content]
            if "tasks/" not in str(file)
            else [content]
        )
        for block in (block for tasks in lists for block in blocks(tasks)):
            if "key" in entry_points_of(block["block"]):
                minting.append(file.name)
                assert entry_points_of(block.get("always") or []) == ["expire_key"], file
    assert minting == ["rotate_keys.yml", "site.yml", "site.yml", "move_to_new_mode.yml"]


WORLD_WRITABLE = re.compile(r"(/var)?/tmp\b|/dev/shm\b|/run/lock\b")


def test_no_task_uses_a_name_in_a_directory_that_everybody_may_write_to():
    """Another user may have made the file already. Only the tempfile module may work there."""
    checkout = ROLES[0].parent.parent
    tasks = [*checkout.glob("roles/*/*/*.yml"), *checkout.glob("playbooks/**/*.yml")]
    assert len(tasks) > 40
    found = [
        f"{file.relative_to(checkout)}: {line.strip()}"
        for file in tasks
        for line in file.read_text().splitlines()
        if WORLD_WRITABLE.search(line)
    ]
    assert found == ["roles/tailscale/tasks/install_from_files.yml: path: /var/tmp"]
    (private,) = (
        task
        for block in yaml.safe_load(
            (checkout / "roles/tailscale/tasks/install_from_files.yml").read_text()
        )
        for task in block["block"]
        if "/var/tmp" in str(task)
    )
    assert private["ansible.builtin.tempfile"]["state"] == "directory"
