"""Asking the daemon over its control socket: a line with a question, answers as lines of JSON."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Dict

from ..errors import IO_FAILURE, CniError

CONTROL = "/run/headcni/daemon.sock"  # unless the configuration has another daemon.socket
STATUS_SECONDS = 30.0


def daemon_status(path: str) -> Dict[str, Any]:
    try:
        with asked("status", path, STATUS_SECONDS) as answers:
            status = next(answers, None)
    except socket.timeout:
        raise CniError(
            IO_FAILURE,
            f"headcni-daemon hangs: it has not answered for {STATUS_SECONDS:.0f} s",
            "systemctl restart headcni-daemon",
        ) from None
    if status is None:
        raise CniError(IO_FAILURE, "headcni-daemon ended while it was asked")
    return status


@contextmanager
def asked(question: str, path: str, silence: float = 30.0) -> Iterator[Iterator[Dict[str, Any]]]:
    """The daemon's answers to a question; CniError if no daemon answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as caller:
        caller.settimeout(silence)
        try:
            caller.connect(path)
            caller.sendall(question.encode() + b"\n")
        except (FileNotFoundError, ConnectionError):
            raise CniError(
                IO_FAILURE, "headcni-daemon does not answer", "systemctl status headcni-daemon"
            ) from None
        except OSError as problem:
            raise CniError(IO_FAILURE, f"{path} cannot be used", problem.strerror or "") from None
        yield _answers(caller)


def _answers(caller: socket.socket) -> Iterator[Dict[str, Any]]:
    with caller.makefile("rb") as lines, suppress(ConnectionError):
        for line in lines:
            if not line.endswith(b"\n"):
                return  # the daemon ended while it answered
            answer = json.loads(line)
            if "error" in answer:
                raise CniError(IO_FAILURE, "headcni-daemon refused", str(answer["error"]))
            if answer:
                yield answer
