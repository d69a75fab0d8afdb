"""headcnictl logs: one stream of several units, bounded, and harmless on a terminal.

A stub stands for journalctl; tests/lab has a real journal.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from headcni.ctl import journal as ctl_journal
from headcni.ctl import main as ctl

NOW = 1_800_000_000
CNI = Path(ctl.__file__).parents[2]


def entry(second: int, unit: str, message: object, priority: int = 6) -> dict:
    return {
        "__REALTIME_TIMESTAMP": str((NOW + second) * 1_000_000),
        "__CURSOR": f"s={second}",
        "_SYSTEMD_UNIT": f"{unit}.service",
        "PRIORITY": str(priority),
        "MESSAGE": message,
    }


@pytest.fixture
def journal(tmp_path, monkeypatch):
    """A journalctl that prints these entries of the units it is asked for, and notes how."""
    folder = tmp_path / "bin"
    folder.mkdir()
    asked = tmp_path / "asked"

    def write(
        entries: list[dict], to_come: tuple[dict, ...] = (), says: str = "", endless: str = ""
    ) -> None:
        stub = folder / "journalctl"
        stub.write_text(
            f"#!{sys.executable}\n"
            + textwrap.dedent(f"""
            import json, sys, time
            with open({str(asked)!r}, "a") as notes:
                notes.write(" ".join(sys.argv[1:]) + "\\n")
            if {says!r}:
                sys.exit({says!r})
            units = [word.partition("=")[2] for word in sys.argv if word.startswith("--unit=")]
            follow = "--follow" in sys.argv
            entries = {list(to_come)!r} if follow else {entries!r}
            for entry in entries:
                if {{entry["_SYSTEMD_UNIT"], entry.get("UNIT")}} & set(units):
                    print(json.dumps(entry), flush=True)
            if follow or {endless!r} in units:
                time.sleep(60)
            """)
        )
        stub.chmod(0o755)

    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    write.asked = asked
    return write


@pytest.fixture
def run(capsys, tmp_path):
    def run(*words: str) -> tuple[int, str, str]:
        code = ctl.main(["logs", *words, "--config", str(tmp_path / "none.yaml")])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


ENTRIES = [
    entry(3, "headcni-daemon", 'level=WARN part=routes msg="no route" dst=10.0.0.0/24', 4),
    entry(1, "tailscaled", "magicsock: disco: node [abc] now using 192.0.2.1:41641"),
    entry(2, "containerd", 'plugin type="headcni" failed (add): no free address', 3),
    entry(4, "containerd", "cleaning up dead shim"),
    entry(5, "sshd", "level=INFO msg=nothing of ours"),
    entry(6, "headcni-tailscaled", "the other mode's tailscaled"),
]


def test_the_three_sources_are_one_stream_by_time(run, journal):
    journal(ENTRIES)
    code, said, _unused = run()
    assert code == 0
    assert [line[15:] for line in said.splitlines()] == [
        "tailscaled INFO  magicsock: disco: node [abc] now using 192.0.2.1:41641",
        'plugin     ERROR plugin type="headcni" failed (add): no free address',
        'daemon     WARN  part=routes msg="no route" dst=10.0.0.0/24',
    ]
    assert journal.asked.read_text().count("--lines=200") == 3


def test_each_line_is_an_object_in_json(run, journal):
    journal(ENTRIES)
    lines = [json.loads(line) for line in run("--json", "--only", "plugin")[1].splitlines()]
    assert lines == [
        {
            "time": NOW + 2.0,
            "source": "plugin",
            "unit": "containerd.service",
            "level": "ERROR",
            "message": 'plugin type="headcni" failed (add): no free address',
        }
    ]


def test_the_daemons_json_lines_are_as_readable(run, journal):
    message = json.dumps({"level": "INFO", "part": "cni", "msg": "served", "seconds": 0.01})
    journal([entry(1, "headcni-daemon", message)])
    assert run()[1].endswith('INFO  part="cni" msg="served" seconds=0.01\n')


def test_a_message_cannot_steer_the_terminal_or_forge_a_line(run, journal):
    bad = "headcni \x1b[2J\x1b]0;title\x07 \n01-01 00:00:00 daemon forged"
    journal([entry(1, "containerd", bad), entry(2, "headcni-daemon", list(bad.encode()))])
    said = run()[1]
    assert len(said.splitlines()) == 2
    assert not {"\x1b", "\x07"} & set(said)


def test_what_systemd_says_about_a_unit_belongs_to_it(run, journal):
    started = {**entry(1, "init", "Started HeadCNI node daemon."), "UNIT": "headcni-daemon.service"}
    journal([{**started, "_SYSTEMD_UNIT": "init.scope"}, {"_SYSTEMD_UNIT": "tailscaled.service"}])
    assert run()[1].endswith("daemon     INFO  Started HeadCNI node daemon.\n")


def test_a_message_that_journald_leaves_out_is_named(run, journal):
    journal([entry(1, "headcni-daemon", None)])
    assert "(a message of more than 4096 bytes)" in run()[1]


@pytest.mark.parametrize(("given", "ago"), [("30m", 1800), ("2h", 7200), ("3d", 259200)])
def test_since_takes_a_span(run, journal, given, ago):
    journal([])
    assert run("--since", given)[0] == 0
    [asked, *_more] = journal.asked.read_text().splitlines()
    at = int(asked.rpartition("--since=@")[2])
    assert abs(time.time() - ago - at) < 60


def test_other_times_are_journalctls_own_and_never_an_option(run, journal):
    journal([])
    run("--since=--vacuum-size=1")
    assert "--since=--vacuum-size=1" in journal.asked.read_text()
    journal([], says="Failed to parse timestamp: soon")
    with pytest.raises(SystemExit, match="2"):
        run("--since", "soon")


@pytest.mark.parametrize("lines", ["0", "-1", "10001", "many"])
def test_the_number_of_lines_is_bounded(run, journal, lines):
    journal([])
    with pytest.raises(SystemExit, match="2"):
        run("--lines", lines)


def test_a_journal_that_takes_too_long_to_search_costs_no_entries(run, journal, monkeypatch):
    """kubelet's may have gigabytes, in which a healthy plugin is hardly ever mentioned."""
    monkeypatch.setattr(ctl_journal, "READ_SECONDS", 2.0)
    journal(ENTRIES, endless="kubelet.service")
    code, said, problem = run()
    assert code == 0
    assert [line[15:].split()[0] for line in said.splitlines()] == [
        "tailscaled",
        "plugin",
        "daemon",
    ]
    assert "plugin may have more: journalctl did not end within 2 s; --since 1h" in problem


def test_without_a_journal_the_answer_is_not_known(run, journal, monkeypatch):
    journal([], says="No journal files were opened due to insufficient permissions.")
    code, _unused, said = run()
    assert code == 3 and "insufficient permissions" in said
    monkeypatch.setenv("PATH", "/nowhere")
    code, _unused, said = run()
    assert code == 3 and "journalctl cannot be run" in said


def test_follow_goes_on_without_repeating_a_line_until_it_is_interrupted(journal, tmp_path):
    late = int(time.time() - NOW) + 1000
    twice = entry(late, "headcni-daemon", "level=INFO msg=twice")
    new = entry(late + 1, "headcni-daemon", "level=INFO msg=new")
    journal([twice], to_come=(twice, entry(late + 1, "containerd", "not ours"), new))
    code = "import sys; from headcni.ctl.main import main; sys.exit(main(sys.argv[1:]))"
    config = ["--config", str(tmp_path / "none.yaml")]
    follower = subprocess.Popen(
        [sys.executable, "-c", code, "logs", "--follow", *config],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(CNI)},
    )
    try:
        seen = [follower.stdout.readline() for _unused in range(2)]
        assert ["msg=twice" in seen[0], "msg=new" in seen[1]] == [True, True]
        follower.send_signal(signal.SIGINT)
        assert follower.wait(20) == 0
    finally:
        follower.kill()
