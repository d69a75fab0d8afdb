#!/usr/bin/env python3
"""Write each role's README.md from its argument_specs, so that the two cannot disagree.

python3 tests/support/role_readme.py            writes those of all roles
python3 tests/support/role_readme.py --check    says which are out of date
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import yaml

CHECKOUT = Path(__file__).resolve().parents[2]
ROLES = CHECKOUT / "roles"
NOTE = "<!-- Generated from meta/argument_specs.yml by tests/support/role_readme.py: edit that. -->"


def roles() -> list[Path]:
    return sorted(path.parent.parent for path in ROLES.glob("*/meta/argument_specs.yml"))


def entry_points(role: Path) -> dict[str, dict[str, Any]]:
    found = _yaml(role / "meta" / "argument_specs.yml")["argument_specs"]
    assert isinstance(found, dict)
    return found


def defaults(role: Path) -> dict[str, Any]:
    path = role / "defaults" / "main.yml"
    return (_yaml(path) or {}) if path.exists() else {}


def readme(role: Path) -> str:
    about = _yaml(role / "meta" / "main.yml")["galaxy_info"]
    points = entry_points(role)
    variables: dict[str, dict[str, Any]] = {}
    for point in points.values():
        for name, spec in (point.get("options") or {}).items():
            variables.setdefault(name, spec)
    lines = [f"# headcni.mesh.{role.name}", "", NOTE, "", f"{about['description']}.", ""]
    lines += _usage(role.name, points)
    if len(points) > 1:
        lines += ["## Entry points", ""]
        for name, point in points.items():
            lines.append(f"- `{name}`: {markdown(point['short_description'])}.")
            lines += [f"  {text}" for text in _texts(point.get("description"))]
        lines.append("")
    else:
        lines += [*_texts(points["main"].get("description")), ""]
    lines += ["## Variables", ""]
    known = defaults(role)
    for name, spec in variables.items():
        lines += _variable(name, spec, known, _users(name, points))
    return "\n".join(lines).rstrip("\n") + "\n"


def _usage(role: str, points: dict[str, dict[str, Any]]) -> list[str]:
    main = points.get("main") or next(iter(points.values()))
    needed = [n for n, spec in (main.get("options") or {}).items() if spec.get("required")]
    lines = ["```yaml", "- hosts: headcni", "  roles:", f"    - role: headcni.mesh.{role}"]
    if needed:
        lines.append("      vars:")
        lines += [f"        {name}: …" for name in needed]
    others = [name for name in points if name != "main"]
    if others:
        lines += [
            "",
            "# or one part of it",
            "- hosts: headcni",
            "  tasks:",
            "    - ansible.builtin.include_role:",
            f"        name: headcni.mesh.{role}",
            f"        tasks_from: {others[0]}",
        ]
    return [*lines, "```", ""]


def _users(name: str, points: dict[str, dict[str, Any]]) -> list[str]:
    """The entry points that take the variable, if not all of them do."""
    users = [point for point, spec in points.items() if name in (spec.get("options") or {})]
    return users if len(users) < len(points) else []


def _variable(
    name: str, spec: dict[str, Any], known: dict[str, Any], users: list[str]
) -> list[str]:
    kind = spec.get("type", "str")
    if spec.get("elements"):
        kind = f"{kind} of {spec['elements']}"
    facts = [kind]
    if spec.get("choices"):
        facts.append("one of " + ", ".join(f"`{choice}`" for choice in spec["choices"]))
    if spec.get("required"):
        facts.append("**required**")
    elif "default" in spec:
        facts.append(f"default `{_shown(spec['default'])}`")
    elif name in known:
        facts.append("default: see below")
    if users:
        facts.append("for " + ", ".join(f"`{user}`" for user in users))
    lines = [f"### `{name}`", "", "; ".join(facts), "", *_texts(spec.get("description")), ""]
    if spec.get("options"):
        for inner, inner_spec in spec["options"].items():
            told = " ".join(_texts(inner_spec.get("description")))
            lines.append(f"- `{inner}` ({inner_spec.get('type', 'str')}): {told}")
        lines.append("")
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value or '""'
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).strip()
    return text.removesuffix("\n...").removesuffix("...").strip()


def _texts(given: Any) -> list[str]:
    return [markdown(one) for one in ([given] if isinstance(given, str) else given or [])]


def markdown(text: str) -> str:
    """Ansible's markup as Markdown."""
    text = " ".join(str(text).split())
    text = re.sub(r"\b(?:C|V|O|RV|E|M)\(([^)]*)\)", r"`\1`", text)
    text = re.sub(r"\bP\(([^)#]*)#\w+\)", r"`\1`", text)
    text = re.sub(r"\bL\(([^,]*),\s*([^)]*)\)", r"[\1](\2)", text)
    text = re.sub(r"\bU\(([^)]*)\)", r"<\1>", text)
    text = re.sub(r"\bB\(([^)]*)\)", r"**\1**", text)
    return re.sub(r"\bI\(([^)]*)\)", r"*\1*", text)


def _yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def main(arguments: list[str]) -> int:
    stale = []
    for role in roles():
        path, text = role / "README.md", readme(role)
        if path.exists() and path.read_text() == text:
            continue
        stale.append(path.relative_to(CHECKOUT))
        if "--check" not in arguments:
            path.write_text(text)
    for path in stale:
        print(f"{path} {'is out of date' if '--check' in arguments else 'written'}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
