"""Records are dataclasses and NamedTuples that are cheap to import."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
import typing
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


@pytest.mark.parametrize("calls", [1, 100])
def test_a_constructor_that_was_compiled_does_the_same(calls):
    """Often enough used, constructors are compiled."""
    Name, Thing, Open, Same = classes = declared(record.dataclass, record.field)
    before = Name.__init__
    for number in range(calls):
        Name("a"), Thing(Name("b")), Open(number), Same(number)
    assert (Name.__init__ is before) == (calls == 1)
    assert list(uses(classes)) == list(uses(THEIRS))


def tuples(NamedTuple):
    class Pair(NamedTuple):
        """Two."""

        first: int
        second: Tuple[str, ...] = ()

        @property
        def both(self):
            return self.first, *self.second

        def __str__(self):
            return f"{self.first}!"

    class Single(NamedTuple):
        value: object

    class Special(Pair):
        pass

    return Pair, Single, Special


def uses_of_tuples(classes):
    Pair, Single, Special = classes
    for _unused in range(40):  # the constructors are compiled on the way
        pair = Pair(1, ("a",))
        yield pair, repr(pair), str(pair), pair.first, pair.second, pair.both, pair == (1, ("a",))
        yield Pair(1), Pair(second=(), first=2), Pair(1, second=("b",)), Single(value=None)
        yield repr(Special(1)), isinstance(Special(1), Pair), Special(first=3).both
    yield pair._asdict(), pair._replace(first=5), Pair._make([1, 2]), Pair._fields
    yield Pair._field_defaults, Pair.__match_args__, Pair.__doc__, Pair.__name__
    yield copy.copy(pair), copy.deepcopy(pair), hash(pair) == hash((1, ("a",))), len({pair, pair})
    yield sorted([Pair(2), Pair(1)]), [*pair], pair[1], json.dumps(pair)
    wrong_calls = (
        *(
            lambda: Pair(),
            lambda: Pair(1, 2, 3),
            lambda: Pair(1, third=3),
            lambda: Pair(1, first=1),
        ),
        *(lambda: Pair._make([1]), lambda: Single(), lambda: Single(1, value=1)),
    )
    for wrong in wrong_calls:
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises((ValueError, TypeError)):  # TypeError since Python 3.13
        pair._replace(third=3)
    for name in ("first", "third"):
        with pytest.raises(AttributeError):
            setattr(pair, name, 1)
    yield not hasattr(pair, "__dict__"), type(Pair(1).__class__("x")) is Pair


def test_named_tuples_behave_as_those_of_typing_do():
    theirs = list(uses_of_tuples(tuples(typing.NamedTuple)))
    assert list(uses_of_tuples(tuples(record.NamedTuple))) == theirs


def test_replace_changes_what_is_named():
    Name, Thing, _unused, _unused = OURS
    changed = record.replace(Thing(Name("a"), 3), size=4)
    assert (changed.size, changed.name) == (4, Name("a"))
    with pytest.raises(TypeError):
        record.replace(changed, colour="red")


def test_a_process_without_the_daemon_imports_no_slow_module():
    code = (
        "import sys; from headcni.plugins.headcni import add, delete, plugin; print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(CHECKOUT / "plugins/cni")},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    slow = {
        *("dataclasses", "inspect", "socket", "hashlib", "asyncio", "subprocess", "pathlib"),
        *("typing", "json", "re", "enum", "sqlite3", "datetime", "threading", "ctypes"),
    }
    assert slow & set(done.stdout.split()) == set()
