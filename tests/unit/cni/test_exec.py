"""Running another plugin: what it gets, what is believed of its answer, and how it is ended."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headcni import errors
from headcni import exec as plugin_exec
from headcni.exec import deeper, find, invoke
from headcni.skel import NESTING

CONF = {"cniVersion": "1.1.0", "name": "pods", "type": "fake"}
ANSWER = {"cniVersion": "1.1.0", "ips": [{"address": "10.1.2.3/24"}]}


class Plugin:
    """A plugin called fake that is a few lines of shell."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "fake"

    def says(self, script: str, name: str = "fake") -> None:
        path = self.directory / name
        path.write_text(f'#!/bin/sh\ncd "{self.directory}"\n{script}\n')
        path.chmod(0o755)

    def __call__(self, command="ADD", env=None, conf=CONF, timeout=20.0, name="fake"):
        return invoke(name, command, {**self.env, **(env or {})}, conf, timeout)

    @property
    def env(self):
        return {
            "CNI_PATH": str(self.directory),
            "CNI_CONTAINERID": "c1",
            "PATH": os.environ["PATH"],
        }

    def error(self, *args, **keys) -> errors.CniError:
        with pytest.raises(errors.CniError) as caught:
            self(*args, **keys)
        return caught.value

    def wrote(self, name: str) -> str:
        return (self.directory / name).read_text()

    def pid(self, name: str) -> int:
        """A process that the plugin wrote down, once it has."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            text = (self.directory / name).read_text() if (self.directory / name).exists() else ""
            if text.endswith("\n"):
                return int(text)
            time.sleep(0.01)
        raise AssertionError(f"the plugin never wrote {name}")


@pytest.fixture
def fake(tmp_path) -> Plugin:
    return Plugin(tmp_path)


def answering(answer=ANSWER) -> str:
    return f"printf %s {shlex.quote(json.dumps(answer))}"


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pid: int) -> bool:
    """Whether it is, at the latest in a moment: who is killed needs a turn to die."""
    deadline = time.monotonic() + 3
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive(pid)


def leftovers() -> tuple[set[str], str]:
    """Our open descriptors and our children, dead or alive."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return set(os.listdir("/proc/self/fd")), children


def test_the_plugin_reads_the_configuration_and_its_answer_comes_back(fake):
    fake.says(f"cat > stdin; {answering()}")
    assert fake() == ANSWER
    assert json.loads(fake.wrote("stdin")) == CONF


def test_the_plugin_gets_the_whole_environment_of_the_call_and_no_other(fake, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://of.the.daemon")
    monkeypatch.setenv("CNI_CONTAINERID", "of the daemon")
    fake.says(f"env > environment; {answering()}")
    fake(
        env={
            "CNI_COMMAND": "DEL",
            "CNI_NETNS": "/run/netns/x",
            "HEADCNI_DATA_DIR": "/data",
            "HTTPS_PROXY": "http://of.the.call",
            "HEADCNI_PROGRAM": "headcni",  # our shim's own
        }
    )
    lines = dict(line.split("=", 1) for line in fake.wrote("environment").splitlines())
    given = {
        key: value for key, value in lines.items() if key not in ("PWD", "OLDPWD", "_", "SHLVL")
    }
    assert given == {
        "CNI_COMMAND": "ADD",
        "CNI_CONTAINERID": "c1",
        "CNI_NETNS": "/run/netns/x",
        "CNI_PATH": str(fake.directory),
        "HEADCNI_DATA_DIR": "/data",
        "HTTPS_PROXY": "http://of.the.call",
        "PATH": os.environ["PATH"],
    }


@pytest.mark.parametrize("command", ["DEL", "CHECK", "GC", "STATUS"])
def test_a_verb_without_an_answer_may_say_what_it_likes(fake, command):
    fake.says("echo done")
    assert fake(command) is None


def test_a_plugin_need_not_read_its_configuration(fake):
    fake.says(answering())
    assert fake(conf={**CONF, "filler": "x" * 300_000}) == ANSWER


def test_a_large_configuration_arrives_whole(fake):
    fake.says(f"wc -c > size; {answering()}")
    conf = {**CONF, "filler": "x" * 3_000_000}
    assert fake(conf=conf) == ANSWER
    assert int(fake.wrote("size")) == len(json.dumps(conf))


def test_a_plugin_that_answers_before_it_reads_does_not_lock_up(fake):
    big = {**ANSWER, "filler": "y" * 500_000}
    (fake.directory / "answer").write_text(json.dumps(big))
    fake.says("cat answer; cat > /dev/null")
    assert fake(conf={**CONF, "filler": "x" * 500_000}) == big


def test_the_first_directory_that_has_the_plugin_wins(fake, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    Plugin(tmp_path / "a").says("", name="other")
    Plugin(tmp_path / "b").says("")
    fake.says("")
    path = f"{tmp_path}/none::{tmp_path}/a:{tmp_path}/b:{tmp_path}"
    assert find("fake", {"CNI_PATH": path}) == f"{tmp_path}/b/fake"


def test_a_missing_plugin_is_reported_with_the_directories_searched(fake):
    problem = fake.error(env={"CNI_PATH": f"/opt/none:{fake.directory}"}, name="bridge")
    assert problem.code == errors.DELEGATE_MISSING
    assert problem.msg == "bridge: there is no such plugin on CNI_PATH"
    assert problem.details == f"searched /opt/none, {fake.directory}"


def test_a_file_that_is_not_executable_is_no_plugin_and_is_named(fake):
    fake.says("")
    fake.path.chmod(0o644)
    problem = fake.error()
    assert problem.code == errors.DELEGATE_MISSING
    assert f"not executable: {fake.path}" in problem.details


def test_without_cni_path_the_error_says_so(fake):
    assert "CNI_PATH is empty" in fake.error(env={"CNI_PATH": ""}).details


@pytest.mark.parametrize("name", ["../fake", "/bin/sh", "", "a/b", "x\0"])
def test_a_type_that_is_no_file_name_is_refused(fake, name):
    fake.says(answering())
    problem = fake.error(name=name)
    assert problem.code == errors.INVALID_CONFIG
    assert "without a slash" in problem.details


@pytest.mark.parametrize("code", [1, 3, 4, 7, 8, 11, 50, 51, 99])
def test_the_specifications_codes_are_kept(fake, code):
    fake.says(f"{answering({'code': code, 'msg': 'no room', 'details': 'at all'})}; exit 1")
    problem = fake.error()
    assert (problem.code, problem.msg, problem.details) == (code, "fake: no room", "at all")


@pytest.mark.parametrize(
    ("code", "details"),
    [(0, ""), (100, "its code is 100"), (999, ""), (-1, "its code is -1"), ("x", "its code is x")],
)
def test_any_other_code_becomes_ours_for_a_failed_delegate(fake, code, details):
    fake.says(f"{answering({'code': code, 'msg': 'no room'})}; exit 1")
    problem = fake.error()
    assert (problem.code, problem.msg) == (errors.DELEGATE_FAILED, "fake: no room")
    assert problem.details == details


def test_the_last_lines_of_stderr_are_in_the_details(fake, capfd):
    fake.says(
        f"for i in 1 2 3 4 5 6 7; do echo line $i >&2; done; {answering({'code': 7, 'msg': 'no'})};"
        " exit 1"
    )
    assert fake.error().details == "stderr: line 3 | line 4 | line 5 | line 6 | line 7"


def test_stderr_goes_on_to_ours_a_line_each(fake, capfd):
    fake.says(f"printf 'a warning\\nand \"another\"\\n' >&2; {answering()}")
    fake()
    assert capfd.readouterr().err.splitlines() == [
        'delegate=fake verb=ADD stderr="a warning"',
        'delegate=fake verb=ADD stderr="and \\"another\\""',
    ]


def test_a_flood_on_stderr_is_no_failure_and_is_not_kept(fake, capfd):
    fake.says(f"yes | head -c 3000000 >&2; echo last >&2; {answering()}")
    assert fake() == ANSWER
    said = capfd.readouterr().err
    assert said.endswith('stderr="last"\n')
    assert len(said) < 60 * plugin_exec.STDERR_KEPT


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 3", "fake: ADD failed with exit code 3 without a word"),
        ("echo boom; exit 1", "fake: ADD failed with exit code 1 and said 'boom'"),
        ("echo '{}'; exit 1", "fake: ADD failed with exit code 1 and said '{}'"),
        ("kill -KILL $$", "fake: ADD was killed by SIGKILL without a word"),
        ("echo boom", "fake: ADD answered 'boom'"),
        ("echo '[1]'", "fake: ADD answered '[1]'"),
        ("echo null", "fake: ADD answered 'null'"),
        ("true", "fake: ADD answered nothing"),
        ("printf '\\377\\376'", "fake: ADD answered '\\\\xff\\\\xfe'"),
    ],
)
def test_garbage_and_crashes_are_named_for_what_they_are(fake, script, said):
    fake.says(script)
    problem = fake.error()
    assert problem.code == errors.DELEGATE_FAILED
    assert problem.msg == said


def test_garbage_is_shown_in_part(fake):
    fake.says("yes | head -c 100000 | tr -d '\\n'")
    assert len(fake.error().msg) < 250


def test_a_file_that_the_kernel_cannot_run_is_named(fake):
    fake.path.write_bytes(b"\x7fELF no program")
    fake.path.chmod(0o755)
    problem = fake.error()
    assert problem.code == errors.DELEGATE_FAILED
    assert problem.msg == "fake: it cannot be run"
    assert "Exec format error" in problem.details


def test_a_plugin_that_is_just_being_installed_is_waited_for(fake):
    fake.says(answering())
    with open(fake.path, "r+b") as installing:
        timer = threading.Timer(0.3, installing.close)
        timer.start()
        assert fake() == ANSWER
        timer.join()


def test_a_plugin_that_stays_busy_is_given_up(fake, monkeypatch):
    monkeypatch.setattr(plugin_exec, "BUSY_RETRY", 0.1)
    fake.says(answering())
    with open(fake.path, "r+b"):
        assert "Text file busy" in fake.error().details


def test_a_plugin_that_hangs_is_ended_with_all_that_it_started(fake):
    fake.says("sleep 60 & echo $! > child; echo stuck >&2; sleep 60")
    started = time.monotonic()
    problem = fake.error("DEL", timeout=0.5)
    assert time.monotonic() - started < 5
    assert problem.code == errors.DELEGATE_TIMEOUT
    assert problem.msg == "fake: DEL did not finish within 0.5 s and was ended"
    assert "stderr: stuck" in problem.details
    assert gone(fake.pid("child"))


def test_one_that_does_not_listen_to_sigterm_is_killed(fake, monkeypatch):
    monkeypatch.setattr(plugin_exec, "TERM_GRACE", 0.3)
    fake.says(
        "trap '' TERM; echo $$ > me; (trap '' TERM; echo $(exec sh -c 'echo $PPID') > child;"
        " while :; do sleep 1; done) & while :; do sleep 1; done"
    )
    started = time.monotonic()
    assert fake.error(timeout=0.5).code == errors.DELEGATE_TIMEOUT
    assert 0.7 < time.monotonic() - started < 5
    assert gone(fake.pid("me"))
    assert gone(fake.pid("child"))


def test_sigterm_comes_first_so_that_a_plugin_can_clean_up(fake):
    fake.says("trap 'echo yes > cleaned; exit 1' TERM; sleep 60 & wait")
    fake.error(timeout=0.3)
    assert fake.wrote("cleaned") == "yes\n"


def test_one_that_closes_its_outputs_and_goes_on_is_ended_too(fake):
    fake.says("exec > /dev/null 2> /dev/null; sleep 60")
    assert fake.error(timeout=0.3).code == errors.DELEGATE_TIMEOUT


def test_what_a_plugin_leaves_running_is_neither_waited_for_nor_ended(fake):
    fake.says(f"sleep 60 & echo $! > child; {answering()}")
    started = time.monotonic()
    assert fake() == ANSWER
    assert time.monotonic() - started < 5
    child = fake.pid("child")
    try:
        assert alive(child)
    finally:
        os.kill(child, 9)


def test_what_a_failed_plugin_left_running_is_ended(fake):
    fake.says("sleep 60 & echo $! > child; exit 1")
    fake.error()
    assert gone(fake.pid("child"))


def test_a_plugin_without_end_on_stdout_is_ended(fake):
    fake.says("yes '{'")
    started = time.monotonic()
    problem = fake.error()
    assert time.monotonic() - started < 5
    assert problem.code == errors.DELEGATE_FAILED
    assert problem.msg == "fake: ADD wrote more than 1 MiB and was ended"


def test_the_plugin_has_a_session_of_its_own(fake):
    """A signal to our process group, ^C say, must not end a plugin in the middle of its work."""
    fake.says(f"cut -d' ' -f1,5,6 /proc/$$/stat > ids; {answering()}")
    fake()
    pid, group, session = fake.wrote("ids").split()
    assert pid == group == session


def test_an_interrupt_of_ours_ends_the_plugin(fake, monkeypatch):
    fake.says("echo $$ > me; sleep 60")

    def interrupted(process, stdin, deadline):
        fake.pid("me")
        raise KeyboardInterrupt

    monkeypatch.setattr(plugin_exec, "_talk", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fake()
    assert gone(fake.pid("me"))


def test_no_descriptor_and_no_zombie_stays_behind(fake):
    fake.says(answering())
    fake()
    before = leftovers()
    for _ in range(5):
        fake()
        fake.error(name="missing")
    assert leftovers() == before


def test_nesting_is_counted_and_ends():
    env: dict[str, str] = {"CNI_PATH": "/x"}
    for step in ("0", "1", "ipam", "0"):
        env = deeper(env, step)
    assert env == {"CNI_PATH": "/x", NESTING: "0.1.ipam.0"}
    with pytest.raises(errors.CniError) as caught:
        deeper(env, "0")
    assert caught.value.code == errors.INVALID_CONFIG
    assert "more than 4 deep" in caught.value.msg


def test_importing_it_does_not_import_subprocess():
    root = Path(plugin_exec.__file__).parent.parent
    code = f"""
import sys
sys.path.insert(0, {str(root)!r})
import headcni.chain
sys.exit("subprocess" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-I", "-S", "-c", code], check=False).returncode == 0


# A daemon that systemd confines.

SYSTEMD_RUN = """#!/bin/sh
echo "$@" > "$RECORD"
for word; do
  shift
  case $word in
    --setenv=*) export "${word#--setenv=}" ;;
    --) break ;;
  esac
done
exec "$@"
"""


def test_a_confined_daemon_has_systemd_start_plugins_outside_of_its_sandbox(
    fake, tmp_path, monkeypatch
):
    """The real systemd-run is used by tests/lab/test_daemon.py."""
    stub = tmp_path / "systemd" / "systemd-run"
    stub.parent.mkdir()
    stub.write_text(SYSTEMD_RUN)
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stub.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(tmp_path / "words"))
    monkeypatch.setattr(plugin_exec, "_confined", False)
    fake.says(f"env > seen; cat > given; echo '{json.dumps(ANSWER)}'")
    plugin_exec.leave_sandbox()
    assert fake(env={"CNI_ARGS": "A=b c;D=e"}, timeout=7) == ANSWER
    words = (tmp_path / "words").read_text()
    assert re.search(r"--wait --pipe .* --property=RuntimeMaxSec=[67]\.\d+ ", words)
    assert {"CNI_COMMAND=ADD", "CNI_ARGS=A=b c;D=e", "CNI_CONTAINERID=c1"} <= set(
        fake.wrote("seen").splitlines()
    )
    assert json.loads(fake.wrote("given")) == CONF
