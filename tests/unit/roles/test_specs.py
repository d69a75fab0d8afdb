"""Each role says the same thing in its specs, its defaults, its tasks and its README."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import role_readme
import yaml

ROLES = role_readme.roles()
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
    assert set(known) - set(specs) == set()
    said = {name: spec["default"] for name, spec in specs.items() if "default" in spec}
    assert said == {name: known.get(name) for name in said}


@each_role
def test_every_variable_carries_the_roles_name(role):
    assert [name for name in options(role) if not name.startswith(f"{role.name}_")] == []


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
        ("tailscale", "joined", "tailscale_join", "join", {"auth_key", "login"}),
    ],
)
def test_preflight_compares_just_what_would_be_done(role, file, module, name, other):
    folder = next(one for one in ROLES if one.name == role)
    tasks = yaml.safe_load((folder / f"tasks/{file}.yml").read_text())
    options = next(
        task[f"headcni.mesh.{module}"] for task in tasks if f"headcni.mesh.{module}" in task
    )
    compared = yaml.safe_load((folder / "vars/main.yml").read_text())[f"_{role}_{name}_options"]
    assert compared == {
        name: value.replace("omit", "none") for name, value in options.items() if name not in other
    }
