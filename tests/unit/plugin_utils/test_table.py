"""The table that plays end with."""

from __future__ import annotations

from ansible_collections.headcni.mesh.plugins.plugin_utils.table import table


def test_columns_are_as_wide_as_their_widest_text():
    assert table([["node", "mode"], ["alpha-one", "host"], ["b", "daemon"]]) == [
        "node       mode",
        "alpha-one  host",
        "b          daemon",
    ]


def test_no_line_ends_in_blanks():
    assert table([["node", "mode", "state"], ["a", "", ""]]) == ["node  mode  state", "a"]


def test_a_head_alone_is_a_table():
    assert table([["node", "state"]]) == ["node  state"]
