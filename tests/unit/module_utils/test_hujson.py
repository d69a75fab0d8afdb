"""HuJSON: what is read, and what an edit leaves alone."""

from __future__ import annotations

import json

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils.hujson import (
    Document,
    HujsonError,
    read,
)
from hypothesis import given
from hypothesis import strategies as st

POLICY = """\
// Who may do what.
{
  "groups": { "group:ops": ["ann@", "bob@"], }, // two of us
  /* all that
     can be reached */
  "acls": [
    // everybody, for now
    {"action": "accept", "src": ["*"], "dst": ["*:*"]},
  ],
  "tagOwners": {
    "tag:web": ["group:ops"], // the web servers
    "tag:db": ["ann@"] // and no comma
  }
}
"""


def test_comments_and_trailing_commas_are_no_part_of_the_meaning():
    assert read(POLICY).data == {
        "groups": {"group:ops": ["ann@", "bob@"]},
        "acls": [{"action": "accept", "src": ["*"], "dst": ["*:*"]}],
        "tagOwners": {"tag:web": ["group:ops"], "tag:db": ["ann@"]},
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1, column 1: the end, expected a value"),
        ("{", "the end, expected a key in quotes"),
        ("{a: 1}", r"column 2: 'a: 1}', expected a key in quotes"),
        ('{"a" 1}', "expected a colon"),
        ('{"a": 1 "b": 2}', "expected a comma or }"),
        ('{"a": 1}}', "expected nothing more"),
        ('{"a": 1,, }', "expected a key in quotes"),
        ("[1 2]", "expected a comma or ]"),
        ("[,]", "expected a value"),
        ('{"a": 01}', "expected a value"),
        ("{\n/* open", "line 2, column 1"),
        ('{"a": "\n"}', "expected a value"),
        ('{"\\q": 1}', "expected a value"),
        ('{"a": 1, "a": 2}', "expected each key once"),
        ("[" * 200 + "]" * 200, "expected less depth"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_place(text, said):
    with pytest.raises(HujsonError, match=said):
        read(text)


def lines(text: str) -> set[str]:
    return set(text.splitlines())


def test_a_member_is_added_to_an_object_whose_last_one_has_a_comment_and_no_comma():
    document = Document(POLICY)
    document.put(["tagOwners", "tag:k8s"], [])
    assert '    "tag:db": ["ann@"], // and no comma\n    "tag:k8s": []\n  }\n' in document.text
    assert lines(POLICY) - lines(document.text) == {'    "tag:db": ["ann@"] // and no comma'}


def test_objects_on_the_way_are_made_in_the_documents_own_layout():
    document = Document(POLICY)
    document.put(["autoApprovers", "routes", "10.244.0.0/16"], ["tag:k8s"])
    assert document.text.endswith(
        '  },\n  "autoApprovers": {\n    "routes": {\n      "10.244.0.0/16": ["tag:k8s"]\n'
        "    }\n  }\n}\n"
    )
    tabs = Document('{\n\t"a": {\n\t\t"b": 1,\n\t},\n}')
    tabs.put(["c", "d"], 1)
    tabs.put(["a", "e"], 2)
    assert tabs.text == (
        '{\n\t"a": {\n\t\t"b": 1,\n\t\t"e": 2,\n\t},\n\t"c": {\n\t\t"d": 1\n\t},\n}'
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", '{\n  "a": [1]\n}\n'),
        ("{}", '{\n  "a": [1]\n}'),
        ("{ }", '{\n  "a": [1]\n}'),
        ("{ // none yet\n}", '{ // none yet\n  "a": [1]\n}'),
        ('{"b": 2}', '{"b": 2, "a": [1]}'),
        ('{"b": 2 /* two */}', '{"b": 2, "a": [1] /* two */}'),
        ('{"b": 2,}', '{"b": 2, "a": [1],}'),
        ('{"b": 2\n}', '{"b": 2,\n  "a": [1]\n}'),
        ('{\r\n  "b": 2\r\n}\r\n', '{\r\n  "b": 2,\n  "a": [1]\r\n}\r\n'),
    ],
)
def test_a_member_finds_its_place_in_any_layout(before, after):
    document = Document(before)
    document.put(["a"], [1])
    assert document.text == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"a": []}', '{"a": [9]}'),
        ('{"a": [1]}', '{"a": [1, 9]}'),
        ('{"a": [1, ]}', '{"a": [1, 9, ]}'),
        ('{"a": [\n  1,\n  2, // two\n]}', '{"a": [\n  1,\n  2, // two\n  9,\n]}'),
        ('{"a": [\n  1 // one\n]}', '{"a": [\n  1, // one\n  9\n]}'),
        ('{"a": null}', '{"a": [9]}'),
    ],
)
def test_an_item_is_added_to_a_list_in_any_layout(before, after):
    document = Document(before)
    document.append(["a"], 9)
    assert document.text == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"a": 1}', "{}"),
        ('{"a": 1, "b": 2}', '{"b": 2}'),
        ('{"b": 2, "a": 1}', '{"b": 2}'),
        ('{"b": 2, "a": 1,}', '{"b": 2, }'),
        ('{\n  "a": 1, // one\n  "b": 2\n}', '{\n  "b": 2\n}'),
        ('{\n  "b": 2, // two\n  // and\n  "a": 1 // one\n}', '{\n  "b": 2 // two\n  // and\n}'),
        ('{\n  "b": 2,\n  "a": {\n    "c": 3\n  },\n}', '{\n  "b": 2,\n}'),
    ],
)
def test_a_member_goes_with_the_remark_behind_it_and_nothing_else(before, after):
    document = Document(before)
    document.drop(["a"])
    assert document.text == after


def test_an_item_goes_from_a_list():
    document = Document('{"a": ["x", "y", "z"], "b": ["z"]}')
    document.drop(["a"], "z")
    document.drop(["a"], "x")
    assert document.data == {"a": ["y"], "b": ["z"]}
    with pytest.raises(HujsonError, match="is not there"):
        document.drop(["a"], "z")


def test_what_has_no_place_is_refused_and_leaves_the_text_alone():
    document = Document('{"a": 1, "b": [2]}')
    for wrong in (
        lambda: document.put(["a", "c"], 1),
        lambda: document.put(["b"], 1),
        lambda: document.append(["a"], 1),
        lambda: document.append(["z"], 1),
        lambda: document.drop(["z"]),
    ):
        with pytest.raises(HujsonError):
            wrong()
    assert document.text == '{"a": 1, "b": [2]}'
    with pytest.raises(HujsonError, match="no object"):
        Document("[]")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@st.composite
def written(draw: st.DrawFn, value: object, depth: int = 0) -> str:
    """A value with space, comments and trailing commas wherever they may be."""

    def gap() -> str:
        pieces = ["", " ", "\n", "\t", '// }, ] "\n', "/* , { */", "\r\n"]
        return "".join(draw(st.lists(st.sampled_from(pieces), max_size=2)))

    if not isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=draw(st.booleans()))
    parts = []
    for item in value.items() if isinstance(value, dict) else value:
        key = ""
        if isinstance(value, dict):
            name, item = item
            key = f"{json.dumps(name)}{gap()}:{gap()}"
        parts.append(f"{gap()}{key}{draw(written(item, depth + 1))}{gap()}")
    inner = ",".join(parts) + ("," if parts and draw(st.booleans()) else "") + gap()
    return f"{{{inner}}}" if isinstance(value, dict) else f"[{inner}]"


objects = st.dictionaries(st.text(max_size=5), values, max_size=4)


@given(st.data(), objects, st.text(max_size=5), values)
def test_any_document_takes_a_member_and_gives_it_back(data, held, key, value):
    text = data.draw(written(held))
    document = Document(text)
    assert document.data == held
    if key in held:
        return
    document.put([key], value)
    assert document.data == {**held, key: value}
    document.drop([key])
    assert document.data == held


@given(st.data(), st.lists(values.filter(lambda v: v is not None), max_size=4))
def test_any_list_takes_an_item_and_gives_it_back(data, held):
    text = data.draw(written({"a": held}))
    document = Document(text)
    document.append(["a"], "a new one")
    assert document.data == {"a": [*held, "a new one"]}
    if "a new one" not in held:
        document.drop(["a"], "a new one")
        assert document.data == {"a": held}
