"""Where the controller is, by the environment of the processes that lead to ours."""

from __future__ import annotations

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils.ssh_client import controller_address


def process(proc, pid: int, parent: int, **env: str) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "stat").write_text(f"{pid} (odd) name) S {parent} 1 1 0")
    (folder / "environ").write_bytes(b"\0".join(f"{k}={v}".encode() for k, v in env.items()))


@pytest.mark.parametrize(
    ("connection", "expected"),
    [
        ("192.168.7.2 50000 192.168.7.10 22", "192.168.7.2"),
        ("2001:db8::2 50000 2001:db8::10 22", "2001:db8::2"),
        ("::ffff:192.168.7.2 50000 ::ffff:192.168.7.10 22", "192.168.7.2"),
        ("192.168.7.2 50000 100.64.0.5 22", ""),  # it comes through the tailnet
        ("fe80::1%eth0 50000 fe80::2%eth0 22", ""),
        ("127.0.0.1 50000 127.0.0.1 22", ""),
        ("nonsense", ""),
        ("a b c d", ""),
    ],
)
def test_it_is_found_behind_sudo(tmp_path, connection, expected):
    process(tmp_path, 7, 1)
    process(tmp_path, 8, 7, SSH_CONNECTION=connection, HOME="/root")
    process(tmp_path, 9, 8, HOME="/root")  # sudo has removed it
    assert controller_address(9, str(tmp_path)) == expected


def test_without_ssh_there_is_none(tmp_path):
    process(tmp_path, 7, 1)
    assert controller_address(7, str(tmp_path)) == ""
    assert controller_address(99, str(tmp_path)) == ""


def test_processes_that_lead_in_a_circle_are_left(tmp_path):
    process(tmp_path, 7, 8)
    process(tmp_path, 8, 7)
    assert controller_address(7, str(tmp_path)) == ""
