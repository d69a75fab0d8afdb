"""The native shim and the Python shim do the same with every call, whatever the daemon does."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import node_shim
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shims import NATIVE, PROGRAMS, Behaviour, Release, answering, header

from headcni.daemon.cni import protocol
from headcni.shim import HANDED_BACK, LIMIT, MAGIC, STDIN_LIMIT

ADD = {b"CNI_COMMAND": b"ADD", b"CNI_CONTAINERID": b"one", b"CNI_NETNS": b"/proc/self/ns/net"}
RESULT = b'{"cniVersion":"1.1.0"}\n'
SANITIZED = ["gcc", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
EXAMPLES = int(os.environ.get("HEADCNI_SHIM_EXAMPLES", "60"))


@pytest.fixture(scope="module", params=["as released", "with sanitizers"])
def release(request, tmp_path_factory):
    """With the binary of this machine, or one that notices each step beyond a buffer."""
    if request.param == "as released":
        binary = NATIVE / node_shim.BINARIES.get(platform.machine(), "none")
        if not binary.exists():
            pytest.skip(f"there is no native shim for {platform.machine()}")
    else:
        binary = tmp_path_factory.mktemp("sanitizers") / "shim"
        if shutil.which("gcc") is None:
            pytest.skip("there is no gcc, whose sanitizers are needed")
        subprocess.run([*SANITIZED, "-o", binary, NATIVE / "shim.c"], check=True, timeout=120)
    made = Release(binary)
    yield made
    made.remove()


# Name, variables beside those of an ADD, stdin, what the daemon does, what becomes of it, and
# whether the native shim manages without Python.
CASES = [
    ("an answer", {}, b"{}", answering(0, RESULT), "answer", True),
    ("an error", {}, b"{}", answering(1, b'{"code": 7}'), "answer", True),
    ("an empty answer", {}, b"{}", answering(0), "answer", True),
    ("another exit code", {}, b"{}", answering(255, b"x"), "answer", True),
    ("the longest answer", {}, b"{}", answering(0, b"x" * (LIMIT - 1)), "answer", True),
    ("an answer that is too long", {}, b"{}", answering(0, b"x" * LIMIT), "run", False),
    (
        "an answer in parts",
        {},
        b"{}",
        Behaviour((MAGIC[:3], MAGIC[3:] + b"\0\0", b"\0\3\0", b"ab")),
        "answer",
        True,
    ),
    ("no stdin", {}, b"", answering(0, RESULT), "answer", True),
    ("stdin with zeros", {}, b"\0\0{}\0", answering(0, RESULT), "answer", True),
    ("a long stdin", {}, b"x" * 900_000, answering(0, RESULT), "answer", True),
    ("a stdin that is too long for a message", {}, b"x" * LIMIT, answering(), "run", False),
    ("a stdin that is longer", {}, b"x" * (5 << 20), answering(), "run", False),
    ("the longest stdin", {}, b"x" * STDIN_LIMIT, answering(), "run", False),
    ("a stdin that is too long", {}, b"x" * (STDIN_LIMIT + 1), answering(), "refused", False),
    ("handed back", {}, b"{1}", Behaviour((protocol.answer(2, b""),), stays=True), "back", False),
    ("no daemon", {}, b"{2}", None, "run", False),
    ("a daemon that hangs up", {}, b"{3}", Behaviour(reads=False), "run", False),
    ("a daemon that does not want it", {}, b"{4}", Behaviour(), "run", False),
    ("half a header", {}, b"{}", Behaviour((MAGIC[:5],)), "run", False),
    ("half an answer", {}, b"{}", Behaviour((header(9) + b"\0abc",)), "run", False),
    ("another protocol", {}, b"{}", Behaviour((b"headcni\2\0\0\0\1\0",)), "run", False),
    ("an answer without a code", {}, b"{}", Behaviour((header(0),)), "run", False),
    ("a length beyond reason", {}, b"{}", Behaviour((header(0xFFFFFFFF),)), "run", False),
    ("more than was announced", {}, b"{}", Behaviour((header(2) + b"\0abcdef",)), "answer", True),
    (
        "a silent daemon",
        {b"HEADCNI_DAEMON_TIMEOUT": b"1"},
        b'{"cniVersion": "1.1.0"}',
        Behaviour(stays=True),
        "silent",
        False,
    ),
    (
        "a daemon that falls silent",
        {b"HEADCNI_DAEMON_TIMEOUT": b"0"},
        b"{}",
        Behaviour((header(9) + b"\0",), stays=True),
        "silent",
        False,
    ),
    ("VERSION", {b"CNI_COMMAND": b"VERSION"}, b"{}", answering(0, RESULT), "run", False),
    ("no socket", {b"HEADCNI_SOCKET": b""}, b"{}", answering(0, RESULT), "run", False),
    ("a long socket", {b"HEADCNI_SOCKET": b"/" * 108}, b"{}", answering(0, RESULT), "run", False),
    ("a relative path", {b"CNI_PATH": b"/a:b"}, b"{}", answering(0, RESULT), "run", False),
    ("a relative first path", {b"CNI_PATH": b"a:/b"}, b"{}", answering(0, RESULT), "run", False),
    ("empty paths", {b"CNI_PATH": b"/a::/b:"}, b"{}", answering(0, RESULT), "answer", True),
    ("an empty first path", {b"CNI_PATH": b":/a:"}, b"{}", answering(0, RESULT), "answer", False),
    ("a colon as a namespace", {b"CNI_NETNS": b":"}, b"{}", answering(0, RESULT), "run", False),
    ("a relative namespace", {b"CNI_NETNS": b"ns"}, b"{}", answering(0, RESULT), "run", False),
    ("no namespace", {b"CNI_NETNS": b""}, b"{}", answering(0, RESULT), "answer", True),
    (
        "a namespace that is gone",
        {b"CNI_NETNS": b"/no"},
        b"{}",
        answering(0, RESULT),
        "answer",
        True,
    ),
    ("other bytes", {b"CNI_ARGS": b"\xff=\n;"}, b"{}", answering(0, RESULT), "answer", True),
    ("our own variable", {b"HEADCNI_PROGRAM": b"x"}, b"{}", answering(0, RESULT), "answer", True),
    ("other variables", {b"HOME": b"/", b"XCNI_A": b"b"}, b"{}", answering(0), "answer", True),
    ("PATH", {b"PATH": b"/bin", b"PATHS": b"/x"}, b"{}", answering(0), "answer", True),
    ("no seconds", {b"HEADCNI_DAEMON_TIMEOUT": b""}, b"{}", answering(0), "answer", False),
    ("1e2 seconds", {b"HEADCNI_DAEMON_TIMEOUT": b"1e2"}, b"{}", answering(0), "answer", False),
    (" +5 seconds", {b"HEADCNI_DAEMON_TIMEOUT": b" +5"}, b"{}", answering(0), "answer", True),
    ("-1 seconds", {b"HEADCNI_DAEMON_TIMEOUT": b"-1"}, b"{}", answering(0), "answer", False),
    (
        "9999999 seconds",
        {b"HEADCNI_DAEMON_TIMEOUT": b"9" * 7},
        b"{}",
        answering(0),
        "answer",
        False,
    ),
    (
        "990 variables",
        {b"CNI_%d" % n: b"" for n in range(990)},
        b"{}",
        answering(0),
        "answer",
        True,
    ),
    (
        "1010 variables",
        {b"CNI_%d" % n: b"" for n in range(1010)},
        b"{}",
        answering(0),
        "answer",
        False,
    ),
    (
        "variables beyond a message",
        {b"CNI_%d" % n: b"x" * 120_000 for n in range(10)},
        b"{5}",
        answering(0),
        "run",
        False,
    ),
    ("large variables", {b"CNI_ARGS": b"x" * 120_000}, b"{}", answering(0), "answer", True),
]


@pytest.mark.parametrize(
    ("variables", "stdin", "behaviour", "what", "natively"),
    [pytest.param(*case[1:], id=case[0]) for case in CASES],
)
def test_both_shims_do_the_same(release, variables, stdin, behaviour, what, natively):
    env = {**ADD, **variables}
    expected = release.run("python", env, stdin, behaviour)
    found = release.run("native", env, stdin, behaviour)
    assert found.same == expected.same
    assert found.used_python is not natively
    if what == "answer":
        assert not found.ran and found.request.stdin == stdin
    elif what in ("run", "back"):
        assert bytes.fromhex(found.ran["stdin"]) == stdin
        assert found.ran["handed_back"] is (what == "back")
        assert found.report == (b"report" if what == "back" else None)
    else:
        assert found.code == 1
        assert (b"did not answer within 1 s" if what == "silent" else b"too long") in found.stdout


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_name_of_the_file_selects_the_plugin(release, program, tmp_path):
    link = tmp_path / "any-name"
    link.symlink_to(release.folder / "bin" / program)
    for behaviour in (answering(0, RESULT), None):
        native, python = (
            release.run(kind, ADD, b"{}", behaviour, program) for kind in ("native", "python")
        )
        assert native.same == python.same
        if behaviour:
            assert native.request.program == program
        else:
            assert native.ran["ran"] == program
    said = subprocess.run([link], env={}, input=b"", capture_output=True, timeout=30).stdout
    assert program.encode() in said  # by its own file, not by the link


def test_the_namespace_of_the_pod_is_sent_open(release):
    found = release.run("native", ADD, b"{}", answering())
    here = os.stat("/proc/self/ns/net")
    assert found.netns == (here.st_dev, here.st_ino)
    assert found.request.netns == os.readlink("/proc/self/ns/net")


@pytest.mark.parametrize(
    "variables",
    [
        [b"CNI_COMMAND=ADD", b"CNI_ARGS=a", b"CNI_ARGS=b"],
        [b"CNI_COMMAND=ADD", b"CNI_COMMAND=VERSION"],
        [b"CNI_COMMAND", b"CNI_COMMAND=ADD", b"=CNI_A=b", b"", b"CNI_"],
        [b"HEADCNI_PROGRAM=a", b"HEADCNI_PROGRAM=b", b"PATH=a", b"PATH=b"],
        [],
    ],
)
def test_variables_that_are_there_twice_or_are_none_mean_the_same(release, variables):
    env = [b"HEADCNI_SOCKET=" + os.fsencode(release.socket), *variables]
    found = release.run("native", env, b"{}", answering(0, RESULT))
    assert found.same == release.run("python", env, b"{}", answering(0, RESULT)).same


@pytest.mark.parametrize("version", [None, "", "\n", "0.0.1", "x" * 64, "x" * 63 + "\n"])
def test_a_release_without_a_plain_version_is_left_to_python(release, version):
    file = release.folder / "VERSION"
    before = file.read_text()
    try:
        if version is None:
            file.unlink()
        else:
            file.write_text(version)
        found = release.run("native", ADD, b"{}", answering(0, RESULT))
        assert (found.code, found.stdout, found.used_python) == (
            0,
            RESULT,
            version != "x" * 63 + "\n",
        )
    finally:
        file.write_text(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can listen as somebody else")
@pytest.mark.parametrize("kind", ["native", "python"])
def test_a_socket_of_somebody_else_is_not_talked_to(release, kind):
    """It answers, and is not asked."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(release.socket))
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        listener.listen(4)
        while True:
            connection, _unused = listener.accept()
            with suppress(OSError):  # the shim may have gone; the child must not return to pytest
                connection.sendall(protocol.answer(0, b"evil"))
    try:
        while (
            subprocess.run(["ss", "-xlH", "src", str(release.socket)], capture_output=True).stdout
            == b""
        ):
            pass
        found = release.run(kind, ADD, b"{}", None)
        assert found.ran["stdin"] == b"{}".hex()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        listener.close()
        release.socket.unlink()


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_without_a_standard_stream_nothing_else_takes_its_place(release, closed):
    """A socket that became file 1 would get the answer back."""
    script = f"import os, sys; os.close({closed}); os.execv(sys.argv[1], sys.argv[1:])"
    prefix = (sys.executable, "-c", script)
    found = release.run("native", ADD, b"{}", answering(0, RESULT), prefix=prefix)
    assert found.used_python


def test_a_runtime_that_has_gone_is_no_crash(release):
    reading, writing = os.pipe()
    os.close(reading)
    from shims import Daemon

    with Daemon(release.socket, answering(0, RESULT)):
        env = {**ADD, b"HEADCNI_SOCKET": os.fsencode(release.socket)}
        program = [release.folder / "bin" / "headcni"]
        done = subprocess.run(program, env=env, input=b"{}", stdout=writing, timeout=30)
    os.close(writing)
    assert done.returncode == 1


def test_a_release_without_the_python_shim_is_an_error_that_names_it(release):
    path = release.folder / "python" / "headcni"
    path.rename(path.with_name("away"))
    try:
        found = release.run("native", ADD, b"{}", None)
        assert found.code == 1
        assert b'"code": 5' in found.stdout and os.fsencode(release.folder) in found.stdout
    finally:
        path.with_name("away").rename(path)


def test_a_file_that_was_replaced_meanwhile_still_finds_its_release(release):
    program = release.folder / "bin" / "headcni"
    shutil.copy(program, program.with_name("new"))
    script = (
        "import os, sys\n"
        "program = sys.argv[1]\n"
        "old = os.open(program, os.O_RDONLY)\n"
        "os.rename(f'{os.path.dirname(program)}/new', program)\n"
        "os.execve(old, [program], os.environb)\n"
    )
    prefix = (sys.executable, "-c", script)
    assert release.run("native", ADD, b"{}", answering(0, RESULT), prefix=prefix).stdout == RESULT
    shutil.copy(program, program.with_name("new"))
    found = release.run("native", {b"CNI_COMMAND": b"ADD"}, b"{}", None, prefix=prefix)
    assert found.ran["ran"] == "headcni"


NAMES = st.sampled_from(
    b"CNI_COMMAND CNI_PATH CNI_NETNS CNI_ARGS CNI_ HEADCNI_CHAIN HEADCNI_PROGRAM HEADCNI_"
    b" HEADCNI_DAEMON_TIMEOUT PATH CNI OTHER".split()
)
TEXTS = st.one_of(
    st.binary(max_size=60),
    st.text("/:ab.", max_size=12).map(str.encode),
    st.integers(2, 10**8).map(lambda number: str(number).encode()),
    st.sampled_from([b"VERSION", b"ADD", b"/proc/self/ns/net", b"/", b"x" * 70_000]),
)
VARIABLES = st.dictionaries(NAMES, TEXTS.map(lambda text: text.replace(b"\0", b"")), max_size=8)
STDIN = st.one_of(st.binary(max_size=200), st.integers(0, LIMIT + 100).map(lambda n: b"x" * n))
ANSWERS = st.one_of(
    st.binary(max_size=40).map(lambda sent: Behaviour((sent,))),
    st.builds(
        lambda n, body: Behaviour((header(n) + body,)), st.integers(0, 40), st.binary(max_size=40)
    ),
    st.builds(answering, st.integers(0, 255).filter(lambda code: code != HANDED_BACK), st.binary()),
    st.builds(
        lambda *sent: Behaviour(sent),
        st.just(header(6)),
        st.binary(max_size=3),
        st.binary(max_size=9),
    ),
    st.just(Behaviour((protocol.answer(HANDED_BACK, b""),), stays=True)),
    st.none(),
)


@pytest.mark.timeout(240 + EXAMPLES)
@settings(
    deadline=None,
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(variables=VARIABLES, stdin=STDIN, behaviour=ANSWERS, program=st.sampled_from(PROGRAMS))
def test_both_shims_do_the_same_with_anything(release, variables, stdin, behaviour, program):
    expected = release.run("python", variables, stdin, behaviour, program)
    assert release.run("native", variables, stdin, behaviour, program).same == expected.same
