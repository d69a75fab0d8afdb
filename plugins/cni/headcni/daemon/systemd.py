"""What the daemon tells systemd, and the signals that it waits for."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess

from ..log import Log

log = Log("daemon")


class Notifier:
    """Sends READY, RELOADING, WATCHDOG and STOPPING, if systemd has asked for them."""

    def __init__(self) -> None:
        self._path = os.environ.pop("NOTIFY_SOCKET", "")
        self.watchdog = int(os.environ.pop("WATCHDOG_USEC", "0")) / 1e6

    def tell(self, *lines: str) -> None:
        if not self._path:
            return
        path = "\0" + self._path[1:] if self._path.startswith("@") else self._path
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.connect(path)
                sender.send("\n".join(lines).encode())
        except OSError as problem:
            log.warn("systemd cannot be told", problem=problem)


class Signals:
    """The signals that the daemon waits for, by a socket: the kernel may deliver a signal to any
    thread, and a main thread that sleeps elsewhere would not wake up for its handler."""

    def __init__(self, *numbers: int) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno())
        for number in numbers:
            signal.signal(number, lambda *_unused: None)

    def wait(self, seconds: float) -> set[int]:
        """The signals that have arrived, if any arrived in time."""
        ready, _unused, _unused = select.select([self._reader], [], [], seconds)
        return set(self._reader.recv(64)) if ready else set()


def restart_if_running(unit: str) -> None:
    """Restart a unit whose network namespace is gone."""
    log.warn("restarting what ran in the old namespace", unit=unit)
    command = ["systemctl", "--no-block", "try-restart", unit]
    try:
        subprocess.run(command, timeout=10, check=True, capture_output=True)
    except (OSError, subprocess.SubprocessError) as problem:
        log.error("not restarted", unit=unit, problem=problem)
