"""One line an event, whatever is in it."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headcni
from headcni import log
from headcni.log import LEVELS, Log

RUNTIME = Path(headcni.__file__).parent.parent


@pytest.fixture(autouse=True)
def logging_as_it_was():
    root = logging.getLogger()
    before, level, raising = list(root.handlers), root.level, logging.raiseExceptions
    yield
    root.handlers, logging.raiseExceptions = before, raising
    root.setLevel(level)


def written(level: str = "DEBUG", style: str = "logfmt") -> io.StringIO:
    stream = io.StringIO()
    log.set_up(level, style, stream)
    return stream


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def without_time(line: str) -> str:
    stamp, _, rest = line.partition(" ")
    assert stamp.startswith("time=20")
    return rest


def test_a_line_has_time_level_part_message_and_fields():
    stream = written()
    Log("routes").info("reconciled", added=3, via="tailscale0", names=["a", "b"], gone=None)
    [line] = lines(stream)
    expected = "level=INFO part=routes msg=reconciled added=3 via=tailscale0 names=a,b gone=null"
    assert without_time(line) == expected


def test_json_has_the_same():
    stream = written(style="json")
    Log("routes").warn("two claim it", cidr="10.1.0.0/24", nodes=["a", "b"], share=0.5)
    answer = json.loads(stream.getvalue())
    assert answer.pop("time").endswith("Z")
    assert answer == {
        "level": "WARN",
        "part": "routes",
        "msg": "two claim it",
        "cidr": "10.1.0.0/24",
        "nodes": ["a", "b"],
        "share": 0.5,
    }


@pytest.mark.parametrize("least", list(LEVELS))
def test_only_what_is_at_least_as_grave_is_written(least):
    stream = written(least)
    one = Log("x")
    for level in LEVELS:
        getattr(one, level.lower())("hello")
    names = [line.split("level=")[1].split()[0] for line in lines(stream)]
    assert names == list(LEVELS)[list(LEVELS).index(least) :]
    assert one.enabled("DEBUG") is (least == "DEBUG")


@given(st.text(), st.text())
def test_an_event_is_one_line_whatever_it_says(message, value):
    for style in ("logfmt", "json"):
        stream = written(style=style)
        Log("x").error(message, value=value)
        assert stream.getvalue().count("\n") == 1
        assert stream.getvalue().endswith("\n")
        if style == "json":
            answer = json.loads(stream.getvalue())
            assert (answer["msg"], answer["value"]) == (message, value)


def test_an_exception_is_told_in_a_line_and_its_trace_at_debug():
    for level, traced in (("INFO", False), ("DEBUG", True)):
        stream = written(level)
        try:
            raise ValueError("no such\nthing")
        except ValueError as problem:
            Log("x").error("failed", problem=problem)
        [line] = lines(stream)
        assert r'problem="ValueError: no such\nthing"' in line
        assert ("trace=" in line) is traced


def test_a_field_cannot_pass_for_the_level():
    stream = written()
    Log("x").info("hello", level="FATAL", msg="other")
    assert without_time(lines(stream)[0]) == ("level=INFO part=x msg=hello level_=FATAL msg_=other")


def test_what_libraries_log_comes_out_the_same_way():
    stream = written("INFO")
    logging.getLogger("pyroute2.netlink").warning("overflow of %s", "buffer")
    logging.getLogger("pyroute2.netlink").log(25, "between")
    assert [without_time(line) for line in lines(stream)] == [
        'level=WARN part=pyroute2.netlink msg="overflow of buffer"',
        "level=INFO part=pyroute2.netlink msg=between",
    ]


def test_setting_up_again_changes_level_and_style_and_doubles_nothing():
    stream = written("INFO")
    log.set_up("ERROR", "json", stream)
    Log("x").info("no")
    Log("x").error("yes")
    [line] = lines(stream)
    assert json.loads(line)["msg"] == "yes"


def test_a_stream_that_is_gone_stops_nobody():
    stream = written()
    stream.close()
    Log("x").error("nobody hears this")


def test_the_journal_gets_the_level_in_front_and_no_time(tmp_path, monkeypatch):
    with (tmp_path / "journal").open("w+") as stream:
        seen = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{seen.st_dev}:{seen.st_ino}")
        log.set_up("INFO", "logfmt", stream)
        Log("x").error("down")
        log.set_up("INFO", "json", stream)
        Log("x").fatal("out")
        stream.seek(0)
        assert stream.read().splitlines() == [
            "<3>level=ERROR part=x msg=down",
            '<2>{"level":"FATAL","part":"x","msg":"out"}',
        ]
    with (tmp_path / "other").open("w+") as stream:
        assert not log.is_journal(stream)


def test_the_plugin_does_not_pay_for_it():
    """What a pod waits for imports neither logging nor anything of the daemon's monitor."""
    code = "import sys; from headcni.plugins.headcni import add, plugin; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-IS", "-c", f"import sys; sys.path[:0] = [{str(RUNTIME)!r}]; {code}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    modules = done.stdout.split()
    assert "headcni.plugins.headcni.add" in modules
    for dear in ("logging", "http", "http.server", "prometheus_client", "ruamel.yaml", "argparse"):
        assert dear not in modules
