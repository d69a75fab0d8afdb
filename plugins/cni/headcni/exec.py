"""Runs another CNI plugin: finds it on CNI_PATH, limits its time, and checks its answer."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import DELEGATE_FAILED, DELEGATE_MISSING, DELEGATE_TIMEOUT, INVALID_CONFIG, CniError
from .shim import PROGRAM
from .skel import NESTING, steps

if TYPE_CHECKING:
    import subprocess

MAX_NESTING = 4

OUTPUT_LIMIT = 1 << 20
STDERR_KEPT = 1 << 16
TERM_GRACE = 2.0
KILL_GRACE = 1.0
BUSY_RETRY = 5.0  # as long as libcni waits for a plugin that is just being installed
_POLL = 0.05
_ANSWER_EXPECTED = ("ADD", "VERSION")
_SKEL_INTERNAL = 999  # what Go's skel puts on any error that has no code
_OURS = PROGRAM.decode()
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


_LAUNCHER = ("systemd-run", "--quiet", "--collect", "--wait", "--pipe", "--service-type=exec")

_thread = threading.local()
_confined = False


def leave_sandbox() -> None:
    """For a daemon in a sandbox of systemd: the plugins that it starts run in units of their own,
    because the sandbox may lack what they need, such as /tmp, devices or bpf()."""
    global _confined
    _confined = True


class LeftToCaller(BaseException):
    """The call needs another plugin, which this thread must not run. The call is handed back to its
    shim. This is not an error, so handlers of errors must not catch it."""


@contextmanager
def plugins_left_to_caller() -> Iterator[None]:
    """Inside the block, this thread raises `LeftToCaller` and runs no plugins."""
    _thread.runs_none = True
    try:
        yield
    finally:
        _thread.runs_none = False


def ensure_plugins_allowed() -> None:
    if getattr(_thread, "runs_none", False):
        raise LeftToCaller


def invoke(
    plugin_type: str,
    command: str,
    env: Mapping[str, str],
    conf: Mapping[str, Any],
    timeout: float,
) -> dict[str, Any] | None:
    """Run the plugin for one verb. Returns its answer, or None for a verb without an answer.

    ``env`` is the environment of the call, which the plugin also gets.
    """
    ensure_plugins_allowed()
    path = find(plugin_type, env)
    ended = _run(path, json.dumps(conf).encode(), _environment(command, env), timeout)
    _pass_on_stderr(plugin_type, command, ended.stderr)
    if ended.stopped == "time":
        raise CniError(
            DELEGATE_TIMEOUT,
            f"{plugin_type}: {command} did not finish within {timeout:g} s and was ended",
            _details("delegate_timeout in the configuration sets the limit", ended.stderr),
        )
    if ended.stopped == "size":
        raise CniError(
            DELEGATE_FAILED,
            f"{plugin_type}: {command} wrote more than {OUTPUT_LIMIT >> 20} MiB and was ended",
            _details(f"it begins with {_shown(ended.stdout)}", ended.stderr),
        )
    if ended.code != 0:
        raise _failure(plugin_type, command, ended)
    return _answer(plugin_type, command, ended) if command in _ANSWER_EXPECTED else None


def find(plugin_type: str, env: Mapping[str, str]) -> str:
    """The plugin's executable in the first directory of CNI_PATH that has it."""
    if not plugin_type or "/" in plugin_type or "\0" in plugin_type:
        raise CniError(
            INVALID_CONFIG,
            f"{plugin_type!r} is no plugin's type",
            "expected the name of an executable on CNI_PATH, without a slash",
        )
    searched = [directory for directory in env.get("CNI_PATH", "").split(os.pathsep) if directory]
    unusable = []
    for directory in searched:
        path = os.path.join(directory, plugin_type)
        if os.path.isfile(path):
            if os.access(path, os.X_OK):
                return path
            unusable.append(path)
    details = f"searched {', '.join(searched)}" if searched else "CNI_PATH is empty"
    if unusable:
        details += f"; not executable: {', '.join(unusable)}"
    raise CniError(DELEGATE_MISSING, f"{plugin_type}: there is no such plugin on CNI_PATH", details)


def deeper(env: Mapping[str, str], step: str) -> dict[str, str]:
    """The environment for one more step; an error if plugins seem to call each other endlessly."""
    taken = (*steps(env), step)
    if len(taken) > MAX_NESTING:
        raise CniError(
            INVALID_CONFIG,
            f"plugins delegate to each other more than {MAX_NESTING} deep",
            f"{NESTING} is {'.'.join(taken)}; is there a plugin that delegates to itself?",
        )
    return {**env, NESTING: ".".join(taken)}


def _environment(command: str, env: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment, as the specification requires, without our shim's variable."""
    kept = {key: value for key, value in env.items() if key != _OURS}
    path = env.get("PATH") or os.environ.get("PATH") or _DEFAULT_PATH
    return {**kept, "CNI_COMMAND": command, "PATH": path}


class _Ended(NamedTuple):
    code: int
    stdout: bytes
    stderr: bytes
    stopped: str = ""  # why we ended it: "time" or "size"


def _run(path: str, stdin: bytes, env: dict[str, str], limit: float) -> _Ended:
    deadline = time.monotonic() + limit
    process = _start(path, env, deadline)
    try:
        stdout, stderr, stopped = _talk(process, stdin, deadline)
        if not stopped and not _wait(process, deadline):
            stopped = "time"
        if stopped or _has_failed(process):
            _end(process)  # it will be undone, so none of its processes may continue
    except BaseException:
        _end(process)
        raise
    finally:
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream:
                stream.close()
    # A process that hangs in the kernel even after SIGKILL is not waited for.
    code = process.poll()
    return _Ended(-9 if code is None else code, bytes(stdout), bytes(stderr), stopped)


def _start(path: str, env: dict[str, str], deadline: float) -> subprocess.Popen[bytes]:
    import errno
    import subprocess  # takes milliseconds, and most calls run no plugin

    retry_until = min(deadline, time.monotonic() + BUSY_RETRY)
    command = [path]
    if _confined:
        command, env = _outside(path, env, deadline - time.monotonic()), dict(os.environ)
    while True:
        try:
            return subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
                start_new_session=True,
                preexec_fn=_end_with_parent() if threading.active_count() == 1 else None,
            )
        except OSError as problem:
            if problem.errno != errno.ETXTBSY or time.monotonic() > retry_until:
                raise CniError(
                    DELEGATE_FAILED,
                    f"{os.path.basename(path)}: it cannot be run",
                    f"{path}: {problem.strerror}",
                ) from problem
        time.sleep(_POLL)


def _outside(path: str, env: Mapping[str, str], seconds: float) -> list[str]:
    """A command that has systemd start the plugin, and end it after the time limit."""
    limits = (f"RuntimeMaxSec={seconds:.3f}", f"TimeoutStopSec={TERM_GRACE:g}")
    variables = [f"--setenv={name}={value}" for name, value in env.items()]
    return [*_LAUNCHER, *(f"--property={limit}" for limit in limits), *variables, "--", path]


def _end_with_parent() -> Callable[[], None]:
    """For a process with one thread: the kernel kills the plugin if we are killed. A runtime may
    kill us after its time limit and send DEL, and the ADD must not continue during that."""
    from signal import SIGKILL

    from .datapath.netns import set_parent_death_signal

    parent = os.getpid()

    def prepare() -> None:
        set_parent_death_signal(SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def _talk(
    process: subprocess.Popen[bytes], stdin: bytes, deadline: float
) -> tuple[bytearray, bytearray, str]:
    """Write and read until both outputs end, the plugin ends, or a limit is reached."""
    import selectors

    if process.stdin is None or process.stdout is None or process.stderr is None:
        raise AssertionError("it was started without pipes")
    stdout, stderr, unsent = bytearray(), bytearray(), memoryview(stdin)
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdin, selectors.EVENT_WRITE)
        ready.register(process.stdout, selectors.EVENT_READ, stdout)
        ready.register(process.stderr, selectors.EVENT_READ, stderr)
        outputs = 2
        while outputs:
            left = deadline - time.monotonic()
            if left <= 0:
                return stdout, stderr, "time"
            # Check this before reading, so that all of its output is read. After the plugin has
            # ended, its outputs may stay open, because a process that it started has them too.
            exited = _has_exited(process)
            events = ready.select(0 if exited else min(left, _POLL))
            if exited and not events:
                break
            for key, _unused in events:
                if key.fileobj is process.stdin:
                    with suppress(BlockingIOError):
                        unsent = _send(key.fd, unsent)
                    if not unsent:
                        ready.unregister(process.stdin)
                        process.stdin.close()
                elif not _receive(key.fd, key.data):
                    ready.unregister(key.fileobj)
                    outputs -= 1
            if len(stdout) > OUTPUT_LIMIT:
                return stdout, stderr, "size"
            del stderr[:-STDERR_KEPT]
    return stdout, stderr, ""


def _send(fd: int, unsent: memoryview) -> memoryview:
    try:
        return unsent[os.write(fd, unsent) :]
    except BrokenPipeError:  # a plugin need not read its configuration
        return unsent[:0]


def _receive(fd: int, received: bytearray) -> bool:
    data = os.read(fd, 65536)
    received += data
    return bool(data)


def _look(process: subprocess.Popen[bytes]) -> os.waitid_result | None:
    """How it ended, if it has ended. It is not reaped, so that its group id is not used again."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def _has_exited(process: subprocess.Popen[bytes]) -> bool:
    return _look(process) is not None


def _has_failed(process: subprocess.Popen[bytes]) -> bool:
    seen = _look(process)
    return seen is None or seen.si_code != os.CLD_EXITED or seen.si_status != 0


def _wait(process: subprocess.Popen[bytes], until: float) -> bool:
    pause = 0.0005
    while not _has_exited(process):
        if time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _POLL)
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the whole group, with what the plugin has started (its IPAM, commands of a shell)."""
    from signal import SIGKILL, SIGTERM

    for number, grace in ((SIGTERM, TERM_GRACE), (SIGKILL, KILL_GRACE)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        _wait(process, time.monotonic() + grace)
    process.poll()


def _answer(plugin_type: str, command: str, ended: _Ended) -> dict[str, Any]:
    answer = _decoded(ended.stdout)
    if answer is None:
        said = f"answered {_shown(ended.stdout)}" if ended.stdout.strip() else "answered nothing"
        raise CniError(
            DELEGATE_FAILED,
            f"{plugin_type}: {command} {said}",
            _details("expected a CNI result, in JSON", ended.stderr),
        )
    return answer


def _failure(plugin_type: str, command: str, ended: _Ended) -> CniError:
    """The plugin's own error, with its code if the specification has that code."""
    answer = _decoded(ended.stdout)
    if answer is None or not isinstance(answer.get("msg"), str):
        said = f"and said {_shown(ended.stdout)}" if ended.stdout.strip() else "without a word"
        return CniError(
            DELEGATE_FAILED,
            f"{plugin_type}: {command} {_how_it_ended(ended.code)} {said}",
            _details("", ended.stderr),
        )
    code, details = answer.get("code"), str(answer.get("details") or "")
    if isinstance(code, int) and not isinstance(code, bool) and 0 < code < 100:
        return CniError(code, f"{plugin_type}: {answer['msg']}", _details(details, ended.stderr))
    if code not in (None, 0, _SKEL_INTERNAL):
        details = f"{details}; its code is {code}" if details else f"its code is {code}"
    return CniError(
        DELEGATE_FAILED, f"{plugin_type}: {answer['msg']}", _details(details, ended.stderr)
    )


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"failed with exit code {code}"
    from signal import Signals

    with suppress(ValueError):
        return f"was killed by {Signals(-code).name}"
    return f"was killed by signal {-code}"


def _decoded(stdout: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(stdout)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def _shown(stdout: bytes) -> str:
    text = stdout.strip().decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 200 else text[:200] + "…")


def _details(text: str, stderr: bytes) -> str:
    """The text and the last lines of stderr, which often say more than the plugin's error."""
    last = [line.strip() for line in _lines(stderr)[-5:]]
    said = f"stderr: {' | '.join(last)[-1000:]}" if last else ""
    return "; ".join(filter(None, (text, said)))


def _lines(stderr: bytes) -> list[str]:
    return [line for line in stderr.decode("utf-8", "replace").splitlines() if line.strip()]


def _pass_on_stderr(plugin_type: str, command: str, stderr: bytes) -> None:
    """The specification says that a delegate's stderr goes to ours."""
    with suppress(OSError, ValueError, AttributeError):  # closed, or there is none
        for line in _lines(stderr):
            print(
                f"delegate={plugin_type} verb={command} stderr={json.dumps(line)}", file=sys.stderr
            )
