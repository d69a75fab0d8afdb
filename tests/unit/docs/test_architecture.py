"""docs/architecture.md: its call paths and its layers are those of the code.

If a test fails after a change of the code, edit the page: the message names its section and line.
"""

from __future__ import annotations

import ast
import os
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from lab_command import CHECKOUT

from tests.unit.cni.test_layers import LAYERS

PAGE = CHECKOUT / "docs/architecture.md"
RUNTIME = CHECKOUT / "plugins/cni"
# An item of a call path: its depth, an arrow if it is not called but handed over to, and its name.
ITEM = re.compile(r"^( *)- (→ )?`([^`]+)`")
FUNCTION = re.compile(r"headcni[\w.]*:[\w.]+\Z")


@dataclass(frozen=True)
class Item:
    section: str
    line: int
    depth: int
    handed_over: bool
    name: str

    def __str__(self) -> str:
        return f"docs/architecture.md, {self.section!r}, line {self.line}"


def items() -> list[Item]:
    found, section = [], ""
    for number, line in enumerate(PAGE.read_text().splitlines(), 1):
        if line.startswith("#"):
            section = line.strip("# ")
        elif section.startswith("Path:") and (match := ITEM.match(line)):
            found.append(Item(section, number, len(match[1]), bool(match[2]), match[3]))
    return found


def edges() -> list[tuple[Item, Item]]:
    """Each item with the one that it is listed under."""
    found: list[tuple[Item, Item]] = []
    above: list[Item] = []
    for item in items():
        above = [one for one in above if one.section == item.section and one.depth < item.depth]
        if above:
            found.append((above[-1], item))
        above.append(item)
    return found


class Name(NamedTuple):
    """What a name means: a module, or something in a module."""

    module: str
    attribute: str = ""


@dataclass
class Module:
    name: str
    tree: ast.Module
    is_package: bool
    imports: dict[str, Name] = field(default_factory=dict)
    definitions: dict[str, ast.AST] = field(default_factory=dict)
    constants: dict[str, ast.AST] = field(default_factory=dict)


@cache
def modules() -> dict[str, Module]:
    found = {}
    folders = os.walk(RUNTIME / "headcni", followlinks=True)
    paths = [Path(folder, name) for folder, _, names in folders for name in names]
    for path in sorted(path for path in paths if path.suffix == ".py"):
        parts = path.relative_to(RUNTIME).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found[name] = Module(name, ast.parse(path.read_text()), is_package)
    for module in found.values():
        _define(module, module.tree, "")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom):
                base = imported_from(module, node)
                for alias in node.names:
                    whole = f"{base}.{alias.name}"
                    meant = Name(whole) if whole in found else Name(base, alias.name)
                    module.imports[alias.asname or alias.name] = meant
        for node in module.tree.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        module.constants[target.id] = node.value
    return found


def _define(module: Module, node: ast.AST, prefix: str) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            module.definitions[prefix + child.name] = child
            _define(module, child, f"{prefix}{child.name}.")


def imported_from(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    up = node.level - (1 if module.is_package else 0)
    parents = parts[: len(parts) - up]
    return ".".join([*parents, *filter(None, [node.module])])


def mentions(module: Module, node: ast.AST, wanted: Name, follow: bool = True) -> bool:
    """Whether a function names another: to call it, or to pass it on, as to a thread."""
    last = wanted.attribute.rpartition(".")[2]
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr == last:
            owner = module.imports.get(part.value.id) if isinstance(part.value, ast.Name) else None
            if owner is None or owner.attribute or owner.module == wanted.module:
                return True
        if isinstance(part, ast.Name):
            meant = module.imports.get(part.id, Name(module.name, part.id))
            if meant.module == wanted.module and meant.attribute in (last, wanted.attribute):
                return True
            table = module.constants.get(part.id)
            if follow and table is not None and mentions(module, table, wanted, follow=False):
                return True
    return False


def test_the_page_has_the_four_call_paths():
    sections = [one.section for one in items()]
    assert {"Path: ADD", "Path: DEL", "Path: one route reconciliation", "Path: site.yml"} <= set(
        sections
    )
    assert all(sections.count(one) > 5 for one in set(sections))


@pytest.mark.parametrize("item", items(), ids=lambda item: f"{item.line}-{item.name}")
def test_what_a_call_path_names_exists(item):
    if FUNCTION.match(item.name):
        module, _, name = item.name.partition(":")
        assert module in modules(), f"{item}: there is no module {module}. Edit that line"
        assert name in modules()[module].definitions, (
            f"{item}: {module} has no {name}. Edit that line"
        )
    elif item.name.startswith("headcni.mesh."):
        path = CHECKOUT / f"plugins/modules/{item.name.rpartition('.')[2]}.py"
        assert path.is_file(), f"{item}: there is no module {item.name}. Edit that line"
    else:
        assert (CHECKOUT / item.name).is_file(), f"{item}: no file {item.name}. Edit that line"


def test_every_function_and_task_file_that_the_page_names_exists():
    text = PAGE.read_text()
    for module, name in re.findall(r"`(headcni[\w.]*):([\w.]+)`", text):
        assert module in modules() and name in modules()[module].definitions, (
            f"docs/architecture.md: there is no {module}:{name}. Edit the page"
        )
    for path in re.findall(r"`((?:roles|playbooks)/[\w/]+\.yml)`", text):
        assert (CHECKOUT / path).is_file(), f"docs/architecture.md: there is no {path}"


@pytest.mark.parametrize(
    ("caller", "called"),
    [edge for edge in edges() if not edge[1].handed_over],
    ids=lambda item: f"{item.line}-{item.name}",
)
def test_each_item_of_a_call_path_is_used_by_the_item_above_it(caller, called):
    wrong = f"{called}: {caller.name} does not use {called.name}. Edit the list, or mark it with →"
    if FUNCTION.match(caller.name):
        assert FUNCTION.match(called.name), wrong
        module, _, name = caller.name.partition(":")
        node = modules()[module].definitions.get(name)
        wanted = Name(*called.name.split(":"))
        assert node is not None and mentions(modules()[module], node, wanted), wrong
    else:
        assert called.name in included(caller.name), wrong


def included(path: str) -> set[str]:
    """The playbooks and task files that a file includes, and the modules that its tasks use."""
    found: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, list):
            for one in node:
                visit(one)
        if not isinstance(node, dict):
            return
        for key, value in node.items():
            action = str(key).removeprefix("ansible.builtin.")
            if action in ("import_playbook", "import_tasks", "include_tasks"):
                file = value if isinstance(value, str) else value["file"]
                found.add(str(Path(path).parent / file))
            elif action in ("import_role", "include_role"):
                role = value["name"].removeprefix("headcni.mesh.")
                found.add(f"roles/{role}/tasks/{value.get('tasks_from', 'main')}.yml")
            elif action.startswith("headcni.mesh."):
                found.add(action)
            else:
                visit(value)

    visit(yaml.safe_load((CHECKOUT / path).read_text()))
    return found


def test_the_page_has_the_layers_that_the_import_rules_have():
    """tests/unit/cni/test_layers.py enforces them; here only what exists already counts."""
    text = PAGE.read_text().partition("## Layers and import rules")[2].partition("\n## ")[0]
    rows = re.findall(r"(?m)^\| (\d) \| [^|]* \| (.*) \|$", text)
    shown = [(int(number), set(re.findall(r"`([\w.]+)`", names))) for number, names in rows]
    enforced = [
        (number, {name for name in names if f"headcni.{name}" in modules()})
        for number, layer in enumerate(LAYERS, 1)
        for names in layer.values()
    ]
    assert shown == [row for row in enforced if row[1]], "edit the table of layers on the page"


def imports_of(module: Module) -> set[str]:
    """The modules of the runtime that it imports, also inside functions."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = imported_from(module, node)
            found |= {
                whole if (whole := f"{base}.{alias.name}") in modules() else base
                for alias in node.names
            }
    return found


def test_the_runtime_does_not_import_ansible_and_module_utils_do_not_import_the_runtime():
    for name, module in modules().items():
        foreign = {one.partition(".")[0] for one in imports_of(module)}
        assert not foreign & {"ansible", "requests", "lab", "tests"}, name
    for folder in ("modules", "module_utils", "filter", "action", "plugin_utils"):
        for path in sorted((CHECKOUT / "plugins" / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [getattr(node, "module", None) or ""]
                names += [
                    alias.name for alias in getattr(node, "names", ()) if hasattr(alias, "asname")
                ]
                assert "headcni" not in {one.partition(".")[0] for one in names}, path
