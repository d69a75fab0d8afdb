"""Colour only where somebody sees it."""

from __future__ import annotations

import sys

import pytest

from headcni.ctl import terminal


@pytest.mark.parametrize(
    ("is_terminal", "environment", "coloured"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_colour_is_for_terminals_that_want_it(monkeypatch, is_terminal, environment, coloured):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert (terminal.paint("text", terminal.BAD) != "text") is coloured


def test_colours_take_no_room_in_a_table(monkeypatch):
    monkeypatch.setattr(terminal, "coloured", lambda: True)
    rows = [(terminal.paint("ok", terminal.GOOD), "x"), ("longer", "y")]
    plain = [
        terminal._COLOUR.sub("", line) for line in terminal.table(rows, ("A", "B")).split("\n")
    ]
    assert plain == ["A       B", "ok      x", "longer  y"]


def test_a_paragraph_is_wrapped_as_if_it_had_no_colours(monkeypatch):
    monkeypatch.setattr(terminal, "coloured", lambda: True)
    first = f"{terminal.paint('part', terminal.BAD)}: "
    plain = terminal.wrapped("word " * 40, "part: ", "  ")
    coloured = terminal.wrapped("word " * 40, first, "  ")
    assert max(map(len, plain.splitlines())) <= 80 and len(plain.splitlines()) == 3
    assert coloured == plain.replace("part: ", first)
