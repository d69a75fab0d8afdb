"""Both shims in one release, and a daemon that does what a test wants of it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lab_command import CHECKOUT

from headcni import __version__
from headcni.daemon.cni import protocol
from headcni.shim import HEADER, MAGIC

RUNTIME = CHECKOUT / "plugins/cni"
NATIVE = RUNTIME / "native"
PROGRAMS = ("headcni", "headcni-ipam", "loopback")
PATIENCE = 30.0
# The Python shim, but for the verbs: they say what they were given, and leave a mark.
PYTHON_SHIM = """\
#!{python} -IS
import sys
sys.path.insert(0, {runtime!r})
open({mark!r}, "a").close()
from headcni import shim

def run_here(stdin, daemon=None):
    import json, os
    if daemon is not None:
        daemon.settimeout(5)
        daemon.sendall(b"report")
    names = [name for name in os.environ if name.startswith(("CNI_", "HEADCNI_"))]
    said = {{"ran": {program!r}, "stdin": stdin.hex(), "handed_back": daemon is not None,
            "env": {{name: os.fsencode(os.environ[name]).hex() for name in sorted(names)}}}}
    print(json.dumps(said))

shim._run_here = run_here
shim.main({program!r}.encode())
"""
# Starts a program with variables that a dictionary cannot hold.
WITH_VARIABLES = """\
import ctypes, sys
program, *variables = [word.encode("utf-8", "surrogateescape") for word in sys.argv[1:]]
def strings(*words): return (ctypes.c_char_p * (len(words) + 1))(*words, None)
ctypes.CDLL(None).execve(program, strings(program), strings(*variables))
"""


@dataclass(frozen=True)
class Behaviour:
    """What the daemon does with each connection."""

    send: tuple[bytes, ...] = ()  # with a pause between the parts
    reads: bool = True  # the request, first
    stays: bool = False  # connected, until the shim goes


def answering(code: int = 0, output: bytes = b"") -> Behaviour:
    return Behaviour((protocol.answer(code, output),))


@dataclass
class Daemon:
    """A socket with the real protocol behind it."""

    path: Path
    behaviour: Behaviour = field(default_factory=Behaviour)
    requests: list[protocol.Request] = field(default_factory=list)
    netns: list[tuple[int, int]] = field(default_factory=list)  # device and inode of what came
    reports: list[bytes] = field(default_factory=list)

    def __enter__(self) -> Daemon:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(16)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE)
        self._listener.close()
        self.path.unlink()

    def _serve(self) -> None:
        while True:
            try:
                connection, _unused = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(PATIENCE)
                with suppress(OSError, protocol.Malformed):
                    self._talk(connection, self.behaviour)

    def _talk(self, connection: socket.socket, how: Behaviour) -> None:
        if how.reads:
            self.requests.append(protocol.parse(self._whole(connection)))
        for number, part in enumerate(how.send):
            if number:
                threading.Event().wait(0.02)
            connection.sendall(part)
        if how.stays:
            self.reports.append(b"".join(iter(lambda: connection.recv(4096), b"")))

    def _whole(self, connection: socket.socket) -> bytes:
        received = bytearray()
        while protocol.whole(received) != len(received):
            data, fds, _flags, _address = socket.recv_fds(connection, 1 << 16, 4)
            for fd in fds:
                found = os.fstat(fd)
                self.netns.append((found.st_dev, found.st_ino))
                os.close(fd)
            if not data:
                raise protocol.Malformed("it ended")
            received += data
        return bytes(received)


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: bytes
    asked: int  # how often the daemon got a request
    request: protocol.Request | None  # the last of them
    netns: tuple[int, int] | None
    report: bytes | None
    used_python: bool

    @property
    def ran(self) -> dict[str, object]:
        """What the verb was given that was run by the shim itself; empty if it was not."""
        try:
            said = json.loads(self.stdout)
        except ValueError:
            return {}
        return said if isinstance(said, dict) and "ran" in said else {}

    @property
    def same(self) -> tuple[object, ...]:
        """What must not depend on the shim."""
        return self.code, self.stdout, self.asked, self.request, self.netns, self.report


class Release:
    """A release's directory with both shims. `binary` is the native one."""

    def __init__(self, binary: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hct-shim-"))  # a socket's path must be short
        self.mark = self.folder / "python-was-started"
        self.socket = self.folder / "cni.sock"
        for name in ("bin", "python"):
            (self.folder / name).mkdir()
        (self.folder / "VERSION").write_text(f"{__version__}\n")
        for program in PROGRAMS:
            shutil.copy(binary, self.folder / "bin" / program)
            text = PYTHON_SHIM.format(
                python=sys.executable, runtime=str(RUNTIME), mark=str(self.mark), program=program
            )
            (self.folder / "python" / program).write_text(text)
            (self.folder / "python" / program).chmod(0o755)

    def remove(self) -> None:
        shutil.rmtree(self.folder)

    def run(
        self,
        kind: str,
        env: Mapping[bytes, bytes] | Sequence[bytes],
        stdin: bytes = b"{}",
        behaviour: Behaviour | None = None,
        program: str = "headcni",
        prefix: Sequence[str] = (),
    ) -> Outcome:
        """`kind` is "native" or "python"; without a behaviour there is no daemon."""
        self.mark.unlink(missing_ok=True)
        command = [*prefix, str(self.folder / ("bin" if kind == "native" else kind) / program)]
        given: dict[bytes, bytes] = {}
        if isinstance(env, Mapping):
            given = {b"HEADCNI_SOCKET": os.fsencode(self.socket), **env}
        else:
            command = [sys.executable, "-c", WITH_VARIABLES, command[-1], *map(os.fsdecode, env)]
        daemon = Daemon(self.socket, behaviour or Behaviour())
        if behaviour is None:
            done = self._run(command, given, stdin)
        else:
            with daemon:
                done = self._run(command, given, stdin)
        return Outcome(
            done.returncode,
            done.stdout,
            len(daemon.requests),
            daemon.requests[-1] if daemon.requests else None,
            daemon.netns[-1] if daemon.netns else None,
            daemon.reports[-1] if daemon.reports else None,
            self.mark.exists(),
        )

    def _run(
        self, command: list[str], env: Mapping[bytes, bytes], stdin: bytes
    ) -> subprocess.CompletedProcess[bytes]:
        done = subprocess.run(
            command, input=stdin, env=env, capture_output=True, timeout=PATIENCE, check=False
        )
        assert b"Sanitizer" not in done.stderr and b"runtime error" not in done.stderr, done.stderr
        return done


def header(length: int) -> bytes:
    assert len(MAGIC) + 4 == HEADER
    return MAGIC + length.to_bytes(4, "big")
