"""What containerd starts for each call: hand it to the daemon, or else do it here. So do
headcni-ipam, which other plugins start, and loopback.

Its start is most of what a pod waits for, so it imports next to nothing: no os, no json, no socket.
One request, one answer, on a connection of their own:

    request  MAGIC, length (4 bytes), then: release NUL network namespace NUL
             each variable as NAME=VALUE NUL, NUL, the netconf from stdin
             with it, by SCM_RIGHTS, the pod's network namespace, where it can be opened
    answer   MAGIC, length (4 bytes), then: exit code (1 byte), what belongs on stdout
    or       the same with HANDED_BACK for an exit code: run it, and keep the connection until then
    report   after that: MAGIC, length (4 bytes), then JSON: code, phases, and output if it failed

Other plugins, as a delegate or for addresses, are the caller's to run: with its environment, its
limits, its umask, and outside of the daemon's sandbox. So the daemon hands such a call back. The
open connection keeps other calls for the same container waiting, and the report is for metrics and
events: a shim that sends none has done nothing wrong.

A daemon that will not take the call (another release, another network namespace, not root) or
cannot (it is stopping, or was killed) closes the connection without an answer. The call is then run
in this process: every verb may be run again after half of it was done. Only a daemon that is silent
gets no second runner beside it: it may still be at work.

native/shim.c does the same without an interpreter, as far as the daemon answers. It executes this
program for everything else, and says by arguments what it has learnt from the daemon already:

    refused           there is no daemon that takes the call
    silent            the daemon has the call, and has not answered in time
    handed-back FD    run the call; FD is the connection to the daemon
"""

import _socket
import posix
import sys

from . import __version__

SOCKET = b"/run/headcni/cni.sock"
MAGIC = b"headcni\x01"  # the last byte is the protocol's version
HEADER = len(MAGIC) + 4
LIMIT = 1 << 20  # of either message; a longer one is refused, and its call run here
STDIN_LIMIT = 16 << 20  # a longer netconf is an error
HAND_OVER_SECONDS = 5.0
ANSWER_SECONDS = 120.0  # kubelet gives a sandbox four minutes
HANDED_BACK = 2
NETNS = "/proc/self/ns/net"

PROGRAM, IPAM, LOOPBACK = b"HEADCNI_PROGRAM", b"headcni-ipam", b"loopback"
_SOCKET_VARIABLE, _SECONDS_VARIABLE = b"HEADCNI_SOCKET", b"HEADCNI_DAEMON_TIMEOUT"


class DaemonSilent(Exception):
    """The daemon has the call, and has not answered in time."""


class TooLong(Exception):
    """The netconf."""


def main(program: bytes = b"headcni") -> None:
    stdin = _read_all(0)
    posix.environ[PROGRAM] = program
    daemon = None
    try:
        answer, daemon = _learnt(sys.argv[1:]) or _ask_daemon(posix.environ, stdin)
    except DaemonSilent:
        answer = _complaint(stdin)
    except TooLong:
        answer = _too_long()
    if answer is None or answer[0] == HANDED_BACK:
        _run_here(stdin, daemon)
    else:
        output = memoryview(answer)[1:]
        while output:
            output = output[posix.write(1, output) :]
        posix._exit(answer[0])  # nothing is left to tidy up, and tidying takes a millisecond


def _learnt(arguments: "list[str]") -> "tuple[None, _socket.socket | None] | None":
    """What the native shim has learnt from the daemon; None if we are to ask it."""
    if arguments[:1] == ["silent"]:
        raise DaemonSilent
    if arguments[:1] == ["refused"]:
        return None, None
    if arguments[:1] != ["handed-back"]:
        return None
    fd = int(arguments[1])
    posix.set_inheritable(fd, False)  # other plugins must not keep the connection open
    return None, _socket.socket(fileno=fd)


def request(env: "dict[bytes, bytes]", netns: bytes, stdin: bytes) -> bytes:
    """The whole message. Of the environment goes what a verb reads."""
    parts = [__version__.encode(), netns]
    for name, value in env.items():
        if name.startswith((b"CNI_", b"HEADCNI_")) or name == b"PATH":
            parts.append(name + b"=" + value)
    body = b"\0".join(parts) + b"\0\0" + stdin
    return MAGIC + len(body).to_bytes(4, "big") + body


def _ask_daemon(
    env: "dict[bytes, bytes]", stdin: bytes
) -> "tuple[bytes | None, _socket.socket | None]":
    """The body of its answer, and the connection; None if the call is not for it."""
    if len(stdin) > STDIN_LIMIT:
        raise TooLong
    path = env.get(_SOCKET_VARIABLE, SOCKET)
    if not path or env.get(b"CNI_COMMAND") == b"VERSION" or _has_relative_paths(env):
        return None, None
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        server.settimeout(HAND_OVER_SECONDS)
        server.connect(path)
        if _uid_of(server) != posix.geteuid():
            return None, None  # somebody else's socket at our path
        message = request(env, posix.readlink(NETNS).encode(), stdin)
        _send(server, message, _open(env.get(b"CNI_NETNS", b"")))
    except OSError:
        return None, None  # not all of it was sent, so nothing was begun
    try:
        server.settimeout(_seconds(env))
        head = _receive(server, HEADER)
        length = int.from_bytes(head[len(MAGIC) :], "big")
        if not head.startswith(MAGIC) or not 0 < length <= LIMIT:
            return None, None
        return _receive(server, length), server
    except _socket.timeout:
        raise DaemonSilent from None
    except OSError:
        return None, None


def _has_relative_paths(env: "dict[bytes, bytes]") -> bool:
    """Whether they mean something only in our own working directory."""
    paths = [*env.get(b"CNI_PATH", b"").split(b":"), env.get(b"CNI_NETNS", b"")]
    return any(path and not path.startswith(b"/") for path in paths)


def _uid_of(server: "_socket.socket") -> int:
    credentials = server.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], sys.byteorder)  # pid, uid, gid


def _open(netns: bytes) -> "int | None":
    try:
        return posix.open(netns, posix.O_RDONLY | posix.O_CLOEXEC | posix.O_NONBLOCK)
    except OSError:
        return None  # the verb will say what is wrong with it, if it needs it


def _send(server: "_socket.socket", message: bytes, netns_fd: "int | None") -> None:
    passed = []
    if netns_fd is not None:
        fds = netns_fd.to_bytes(4, sys.byteorder)
        passed.append((_socket.SOL_SOCKET, _socket.SCM_RIGHTS, fds))
    sent = server.sendmsg([message], passed)
    if sent < len(message):  # or it may have been answered, and the connection closed
        server.sendall(memoryview(message)[sent:])


def _receive(server: "_socket.socket", length: int) -> bytes:
    received = b""
    while len(received) < length:
        more = server.recv(length - len(received))
        if not more:
            raise OSError  # ended before it had answered
        received += more
    return received


def _seconds(env: "dict[bytes, bytes]") -> float:
    try:
        return max(1.0, float(env[_SECONDS_VARIABLE]))
    except (KeyError, ValueError):
        return ANSWER_SECONDS


def _read_all(fd: int) -> bytes:
    parts: list[bytes] = []
    length = 0
    while length <= STDIN_LIMIT:
        part = posix.read(fd, 1 << 16)
        if not part:
            break
        parts.append(part)
        length += len(part)
    return b"".join(parts)


def _run_here(stdin: bytes, daemon: "_socket.socket | None" = None) -> None:
    """Load the runtime, and run the verb in this process."""
    import gc

    gc.disable()  # the process ends before garbage matters, and a pod waits for it
    sys.path.append(sys.path[-1] + "/vendor")
    program = posix.environ.get(PROGRAM)
    if program == IPAM:
        from .plugins.headcni_ipam import main

        code = main(stdin)
    elif program == LOOPBACK:
        from .plugins.loopback import main

        code = main(stdin)
    else:
        from .plugins.headcni.plugin import main as run_verb

        code = run_verb(stdin, daemon)
    sys.stderr.flush()
    posix._exit(code)  # unloading the runtime takes milliseconds


def _too_long() -> bytes:
    from .errors import UNDECODABLE

    return _failed(
        UNDECODABLE,
        "the configuration on stdin is too long",
        f"it has more than {STDIN_LIMIT >> 20} MiB",
    )


def _complaint(stdin: bytes) -> bytes:
    from .errors import TRY_AGAIN

    path = posix.environ.get(_SOCKET_VARIABLE, SOCKET).decode(errors="replace")
    return _failed(
        TRY_AGAIN,
        f"headcni-daemon did not answer within {_seconds(posix.environ):g} s",
        f"it listens on {path} and may still be at work on this call; "
        "see: systemctl status headcni-daemon",
        stdin,
    )


def _failed(code: int, message: str, details: str, stdin: bytes = b"") -> bytes:
    """As the daemon would answer."""
    import os

    from .errors import CniError
    from .plugins.headcni.plugin import plugin
    from .skel import Outcome, fail

    outcome = Outcome()
    fail(outcome, plugin(), CniError(code, message, details), os.environ, stdin)
    return b"\x01" + outcome.output
