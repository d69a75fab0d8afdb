"""headcnictl tells an answer that says no from none."""

from __future__ import annotations

import json
import socket
from threading import Thread

import pytest

from headcni.ctl import daemon_client
from headcni.ctl.main import main


@pytest.fixture
def node(tmp_path, monkeypatch, capsys):
    """headcnictl on a node whose daemon answers each question with these bytes, and goes on
    silently or ends."""
    monkeypatch.setattr(daemon_client, "STATUS_SECONDS", 0.5)
    config, path = tmp_path / "config.yaml", tmp_path / "daemon.sock"
    config.write_text(json.dumps({"daemon": {"socket": str(tmp_path / "cni.sock")}}))
    monkeypatch.setattr("headcni.ctl.status.CONTROL", str(path))
    monkeypatch.setattr("headcni.settings.control_path", lambda _unused: str(path))
    kept: list[socket.socket] = []

    def ask(answer: bytes, hangs: bool, *words: str) -> tuple[int, str]:
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        kept.append(listener)

        def serve() -> None:
            while True:
                try:
                    client, _unused = listener.accept()
                except OSError:
                    return
                client.recv(1000)
                client.sendall(answer)
                kept.append(client) if hangs else client.close()

        Thread(target=serve, daemon=True).start()
        code = main([*words, "--config", str(config)])
        said = capsys.readouterr()
        return code, said.out + said.err

    yield ask
    for one in kept:
        one.close()


def test_a_daemon_that_hangs_is_no_answer(node):
    code, said = node(b"", True, "status")
    assert code == 3
    assert "headcni-daemon hangs: it has not answered for 0 s" in said
    assert "systemctl restart headcni-daemon" in said


def test_a_daemon_that_ends_while_it_answers_is_no_answer(node):
    code, said = node(b'{"ready": true, "cond', False, "status")
    assert code == 3
    assert "headcni-daemon ended while it was asked" in said


@pytest.mark.parametrize(
    ("ready", "faults", "code"),
    [
        (True, [], 0),
        (True, ["key-expires"], 0),
        (True, ["key-expires", "forwarding-off-ipv4"], 1),
        (False, [], 1),
    ],
)
def test_status_says_no_if_a_fault_cuts_pods_off(node, ready, faults, code):
    status = {"ready": ready, "faults": [{"id": one} for one in faults]}
    assert node(json.dumps(status).encode() + b"\n", False, "status", "--json")[0] == code


def test_a_file_that_cannot_be_written_is_no_answer(tmp_path, monkeypatch, capsys):
    def full(_unused: object) -> int:
        raise OSError(28, "No space left on device", str(tmp_path / "junit.xml"))

    monkeypatch.setattr("headcni.ctl.version.run", full)
    assert main(["version"]) == 3
    assert f"{tmp_path}/junit.xml: No space left on device" in capsys.readouterr().err
