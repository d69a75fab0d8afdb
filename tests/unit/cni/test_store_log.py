"""SQLite's log on a node without the daemon, where each call is a process of its own."""

from __future__ import annotations

import os

from headcni.plugins.headcni import node


def test_the_log_does_not_grow_for_ever_without_the_daemon(tmp_path, monkeypatch):
    """STATUS proves that it can write, and ends without closing the store."""
    monkeypatch.setattr(node, "LONGEST_LOG", 100_000)
    longest = 0
    for _ in range(200):
        child = os.fork()
        if child == 0:
            with node.opened_until_exit(str(tmp_path)) as handles:
                handles.store.is_unverified()
                handles.store.prove_writable()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        log = tmp_path / "headcni.db-wal"
        longest = max(longest, log.stat().st_size if log.exists() else 0)
    assert 4096 < longest < 200_000
