"""Records are dataclasses that are cheap to import."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any, Mapping, Optional, Tuple

import pytest
from lab_command import CHECKOUT

from headcni import record


def declared(dataclass, field):
    @dataclass(frozen=True, order=True)
    class Name:
        first: str
        last: str = "none"

    @dataclass(frozen=True)
    class Thing:
        name: Name
        size: Optional[int] = None
        raw: Mapping[str, Any] = field(default_factory=dict)
        parts: Tuple[str, ...] = ()
        seen: Mapping[str, Any] = field(default_factory=dict, compare=False)

        def __str__(self) -> str:
            return f"a {self.name.first}"

    @dataclass
    class Open:
        count: int
        seen: list = field(default_factory=list)

    @dataclass(frozen=True, eq=False)
    class Same:
        value: int

    return Name, Thing, Open, Same


OURS = declared(record.dataclass, record.field)
THEIRS = declared(dataclasses.dataclass, dataclasses.field)


def uses(classes):
    """What is done with records, and what comes of it."""
    Name, Thing, Open, Same = classes
    a, b = Name("a"), Name("b", last="c")
    yield (
        repr(a).rpartition(".")[2],
        a == Name("a"),
        a == b,
        a == ("a", "none"),
        sorted([b, a])[0] is a,
    )
    yield hash(a) == hash(Name("a")), {a: 1}[Name(first="a")]
    thing = Thing(a, 3, parts=("x",))
    yield str(thing), thing.raw, thing.size, thing == Thing(a, 3, {}, ("x",))
    yield thing == Thing(a, 3, {}, ("x",), {"y": 1}), Thing(a, 3, {}, ("y",)) == thing
    yield Thing(a).raw is Thing(a).raw, Thing.size, hasattr(Thing, "raw")
    for wrong in (lambda: Name(), lambda: Name("a", "b", "c"), lambda: Name("a", middle="b")):
        with pytest.raises(TypeError):
            wrong()
    for change in (lambda: setattr(a, "first", "x"), lambda: delattr(a, "first")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()
    counter = Open(1)
    counter.count += 1
    counter.seen.append(a)
    yield counter.count, Open(2).seen, counter == Open(2, [a]), Open.__hash__
    yield Same(1) == Same(1), len({Same(1), Same(1)})
    yield dataclasses.asdict(b), [one.name for one in dataclasses.fields(Thing)]
    yield str(dataclasses.replace(thing, name=b)), dataclasses.is_dataclass(thing)


def test_they_behave_as_dataclasses_do():
    assert list(uses(OURS)) == list(uses(THEIRS))


def test_replace_changes_what_is_named():
    Name, Thing, _unused, _unused = OURS
    changed = record.replace(Thing(Name("a"), 3), size=4)
    assert (changed.size, changed.name) == (4, Name("a"))
    with pytest.raises(TypeError):
        record.replace(changed, colour="red")


def test_a_process_without_the_daemon_imports_neither_dataclasses_nor_openssl():
    code = "import sys; from headcni.plugins.headcni import add, plugin; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(CHECKOUT / "plugins/cni")},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    slow = {"dataclasses", "inspect", "socket", "hashlib", "asyncio", "subprocess", "pathlib"}
    assert slow & set(done.stdout.split()) == set()
