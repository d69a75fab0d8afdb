"""The import rules of the runtime: dependencies point one way, and only the daemon knows itself.

    ctl, daemon → plugins, mesh → policy → chain, ipam, datapath → config, errors

A module may import from its own layer or a lower one. Parts that stand side by side in a layer
(ctl and daemon; mesh and the plugins) do not import each other. Imports inside functions count;
imports for type checkers do not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import headcni

RUNTIME = Path(headcni.__file__).parent

# From top to bottom, each with its parts. A part is one or more modules or packages.
LAYERS: tuple[Mapping[str, tuple[str, ...]], ...] = (
    {"ctl": ("ctl",), "daemon": ("daemon",)},
    {
        "plugins": (
            *("plugins", "comparison", "repair", "recover"),
            *("deferred", "unrecorded"),
        ),
        "mesh": ("mesh",),
    },
    {"policy": ("policy",)},
    {
        "state": (
            *("address_sources", "chain", "exec", "ipam", "datapath"),
            *("database", "schema", "store"),
        ),
    },
    {
        "config": (
            *("config", "delegates", "settings", "skel", "result", "subnet_env"),
            *("runtime_config", "ipam.config", "ipam.pool", "tailnet_access"),
            *("port_ranges", "problems", "range_checks", "shim", "validation"),
            "pod_labels",
        ),
    },
    {
        "base": (
            *("", "errors", "model", "record", "light_json", "sha", "shared"),
            *("log", "exchange", "condition", "periodic"),
        ),
    },
)

# Reasons to look up, each with the function that needs it.
EXCEPTIONS = {
    ("shim", "plugins.headcni.plugin"): "the program loads its plugin if there is no daemon",
    ("shim", "plugins.headcni_ipam"): "as above",
    ("shim", "plugins.loopback"): "as above",
    ("ipam.allocate", "recover"): "a store that was lost is rebuilt before it gives an address",
}


def places() -> dict[str, tuple[int, str]]:
    """The layer and the part of each listed module or package."""
    return {
        module: (number, part)
        for number, layer in enumerate(LAYERS)
        for part, modules in layer.items()
        for module in modules
    }


def place_of(module: str) -> tuple[int, str]:
    """By the longest listed name that the module is in."""
    known = places()
    name = module
    while name not in known:
        if "." not in name:
            raise AssertionError(f"headcni.{module} is in no layer: add it to LAYERS")
        name = name.rpartition(".")[0]
    return known[name]


def module_name(path: Path, runtime: Path) -> str:
    parts = path.relative_to(runtime).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(runtime: Path) -> list[Path]:
    return sorted({*runtime.rglob("*.py"), *(runtime / "shared").glob("*.py")})


def imports(path: Path, text: str, runtime: Path) -> Iterator[str]:
    """The modules of the runtime that a file with this text imports, without the package's name."""
    tree = ast.parse(text)
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    package = path.relative_to(runtime).parts[:-1]
    for node in ast.walk(tree):
        if id(node) in for_types or not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names if name.name.startswith("headcni")]
            yield from (name.partition(".")[2] for name in names)
            continue
        if node.level == 0:
            if str(node.module).partition(".")[0] != "headcni":
                continue
            base = tuple(str(node.module).split(".")[1:])
        else:
            base = package[: len(package) - node.level + 1]
            base += tuple(node.module.split(".")) if node.module else ()
        for name in node.names:
            inner = runtime.joinpath(*base, name.name)
            is_module = inner.with_suffix(".py").exists() or inner.is_dir()
            yield ".".join((*base, name.name) if is_module else base)


def violations(path: Path, text: str, runtime: Path = RUNTIME) -> list[str]:
    found = []
    module = module_name(path, runtime)
    layer, part = place_of(module)
    for imported in sorted(set(imports(path, text, runtime))):
        other_layer, other_part = place_of(imported)
        if (module, imported) in EXCEPTIONS:
            continue
        if other_layer < layer:
            found.append(f"{module} imports {imported}, which is in a higher layer")
        elif other_layer == layer and other_part != part:
            found.append(f"{module} imports {imported}: {part} and {other_part} are apart")
    return found


def test_dependencies_point_one_way():
    assert [
        violation for path in sources(RUNTIME) for violation in violations(path, path.read_text())
    ] == []


def test_every_exception_is_still_needed():
    found = {
        (module_name(path, RUNTIME), imported)
        for path in sources(RUNTIME)
        for imported in imports(path, path.read_text(), RUNTIME)
    }
    assert set(EXCEPTIONS) <= found


@pytest.mark.parametrize(
    ("path", "line", "told"),
    [
        ("mesh/routes.py", "from ..daemon import main", "a higher layer"),
        ("mesh/routes.py", "from ..daemon.observe.metrics import Metrics", "a higher layer"),
        ("mesh/claims.py", "from .. import repair", "mesh and plugins are apart"),
        ("ctl/status.py", "from ..daemon.main import run", "ctl and daemon are apart"),
        ("daemon/main.py", "import headcni.ctl.status", "daemon and ctl are apart"),
        ("datapath/link.py", "def later():\n    from .. import plugins", "a higher layer"),
        ("datapath/link.py", "from ..mesh.prefix import Prefix", "a higher layer"),
        ("errors.py", "from . import config", "a higher layer"),
        ("shared/modes.py", "from headcni.store import Store", "a higher layer"),
    ],
)
def test_a_broken_rule_is_found(path, line, told):
    """With one import too many in a file of the runtime."""
    text = (RUNTIME / path).read_text()
    [found] = violations(RUNTIME / path, f"{text}\n{line}\n")
    assert found.startswith(path.removesuffix(".py").replace("/", ".")) and told in found


def test_an_import_for_type_checkers_breaks_no_rule():
    guarded = "if TYPE_CHECKING:\n    from .daemon import main\n"
    path = RUNTIME / "errors.py"
    assert violations(path, f"from typing import TYPE_CHECKING\n{guarded}") == []
    assert violations(path, guarded.replace("TYPE_CHECKING", "True")) != []


def test_a_module_in_no_layer_is_told():
    with pytest.raises(AssertionError, match="new_module is in no layer"):
        violations(RUNTIME / "new_module.py", "")
