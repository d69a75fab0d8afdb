"""A node's journal for headcnictl logs: runs as PID 1 of its own namespaces, and ends with them.

    journal_node.py PYTHON

Only PID 1 may say something about a unit. What headcnictl answers is printed as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

CODE = "import sys; from headcni.ctl.main import main; sys.exit(main(sys.argv[1:]))"
SOCKET = "/run/systemd/journal/socket"


def main(python: str) -> None:
    for folder in ("/run", "/var/log"):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    os.makedirs("/run/systemd/journal")
    subprocess.Popen(["/lib/systemd/systemd-journald"], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 30
    while not os.path.exists(SOCKET) and time.monotonic() < until:
        time.sleep(0.05)
    journal = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    journal.connect(SOCKET)

    def say(unit: str, message: str, priority: int = 6) -> None:
        text = f"UNIT={unit}.service\nPRIORITY={priority}\nMESSAGE={message}\n"
        journal.send(text.encode())
        subprocess.run(["journalctl", "--sync"], check=False)

    def logs(*words: str) -> list[str]:
        return [python, "-c", CODE, "logs", *words, "--config", "/no/such/file"]

    say("tailscaled", "magicsock: home is now derp-1")
    say("headcni-daemon", "level=INFO part=daemon msg=ready")
    say("kubelet", 'plugin type="headcni" failed: a test', 3)
    say("kubelet", "something else")
    for number in range(3):
        say("containerd", f"headcni number {number}")
    answers = {}
    for words in ("", "--only plugin --lines 2", "--since 1h --only daemon", "--since 2030-01-01"):
        done = subprocess.run(logs(*words.split()), capture_output=True, text=True, check=False)
        answers[words] = [done.returncode, done.stdout.splitlines(), done.stderr]
    wrong = subprocess.run(logs("--since", "soon"), capture_output=True, text=True, check=False)
    answers["wrong"] = [wrong.returncode, [], wrong.stderr]
    follower = subprocess.Popen(
        logs("--follow", "--only", "daemon"), stdout=subprocess.PIPE, text=True
    )
    assert follower.stdout is not None
    lines = [follower.stdout.readline()]
    say("headcni-daemon", "level=WARN part=routes msg=later", 4)
    lines.append(follower.stdout.readline())
    follower.send_signal(signal.SIGINT)
    rest, _unused = follower.communicate(timeout=30)
    answers["follow"] = [follower.returncode, [*lines, *rest.splitlines()], ""]
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
