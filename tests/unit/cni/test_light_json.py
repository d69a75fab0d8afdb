"""light_json gives the results and the errors of json."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headcni import light_json

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.text(), st.integers(), st.booleans()), inner, max_size=4),
    ),
    max_leaves=12,
)
# Characters of JSON, so that many texts are nearly JSON.
NEARLY = st.text(alphabet='{}[]",:\\u0159eE+-.truefalsnN \t\n\r\x00\xa0é\ud800\ufeff', max_size=40)


def outcome(function, *args, **named):
    """The result, or all of the error."""
    try:
        return repr(function(*args, **named))
    except Exception as problem:
        place = [getattr(problem, name, None) for name in ("msg", "doc", "pos")]
        return type(problem), str(problem), place


def both(name, *args, **named):
    found = outcome(getattr(light_json, name), *args, **named)
    assert found == outcome(getattr(json, name), *args, **named)
    return found


@given(VALUES, st.sampled_from([(", ", ": "), (",", ":")]), st.booleans())
def test_values_are_written_as_json_writes_them(value, separators, sort_keys):
    both("dumps", value, separators=separators, sort_keys=sort_keys)


@given(VALUES)
def test_what_json_wrote_is_read_as_json_reads_it(value):
    for text in (json.dumps(value), json.dumps(value, indent=2, ensure_ascii=False)):
        both("loads", text)
        both("loads", text.encode("utf-8", "surrogatepass"))


@given(NEARLY)
def test_a_text_that_is_nearly_json_has_the_same_value_or_error(text):
    both("loads", text)
    both("loads", text, object_pairs_hook=tuple)


@given(st.binary(max_size=20))
def test_bytes_have_the_same_value_or_error(data):
    both("loads", data)


PARTICULAR = [
    *(
        "",
        " ",
        "{",
        "nul",
        "[1,]",
        '{"a":1,}',
        '{"a" 1}',
        "{} x",
        "1 2",
        '"',
        '"\n"',
        '"\\x"',
        '"\\u12"',
    ),
    *(
        "\ufeff{}",
        "[" * 9999,
        '{"a": 1, "a": 2}',
        "NaN",
        "-Infinity",
        "1e999",
        "0" * 5000,
        "9" * 5000,
    ),
    '"\\ud800"',
]
# Runs where nobody has imported json before.
ALONE = """
import sys
sys.path.insert(0, sys.argv[1])
from headcni.light_json import loads
assert "json" not in sys.modules
try:
    loads(sys.stdin.read())
except Exception as problem:
    print(type(problem).__module__, type(problem).__name__, problem)
"""


@pytest.mark.parametrize("text", PARTICULAR, ids=lambda text: text[:12])
def test_particular_texts_have_the_same_value_or_error(text):
    both("loads", text)
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "utf-32-be"):
        both("loads", text.encode(encoding, "surrogatepass"))


@pytest.mark.parametrize(
    "text", [one for one in PARTICULAR if one.isascii()], ids=lambda one: one[:12]
)
def test_a_process_that_has_not_imported_json_gets_the_same_error(text):
    """The parts in C look for json's own exception among the imported modules."""
    try:
        json.loads(text)
        said = ""
    except Exception as problem:
        said = f"{type(problem).__module__} {type(problem).__name__} {problem}\n"
    runtime = Path(light_json.__file__).parents[1]
    command = [sys.executable, "-IS", "-c", ALONE, runtime]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (said, "")


def test_what_json_cannot_write_has_the_same_error():
    endless: list[object] = []
    endless.append(endless)
    for value in (object(), {"a": {1, 2}}, {(1, 2): 3}, b"bytes", endless, {1: 1, "a": 2}):
        both("dumps", value, sort_keys=True)
    assert both("dumps", [b"bytes"], default=str) == repr("[\"b'bytes'\"]")


def test_a_hook_gets_the_pairs_of_each_object():
    text = '{"a": {"b": 1, "b": 2}, "c": [{}]}'
    assert light_json.loads(text, object_pairs_hook=list) == [
        ("a", [("b", 1), ("b", 2)]),
        ("c", [[]]),
    ]
    both("loads", text, object_pairs_hook=list)
