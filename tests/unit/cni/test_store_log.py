"""SQLite's log on a node without the daemon, where each call is a process of its own."""

from __future__ import annotations

import os

from headcni import verbs


def test_the_log_does_not_grow_for_ever_without_the_daemon(tmp_path, monkeypatch):
    """STATUS proves that it can write, and ends without closing the store."""
    monkeypatch.setattr(verbs, "LONGEST_LOG", 100_000)
    longest = 0
    for _ in range(200):
        child = os.fork()
        if child == 0:
            with verbs.opened_until_exit(str(tmp_path)) as node:
                node.store.is_unverified()
                node.store.prove_writable()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        log = tmp_path / "headcni.db-wal"
        longest = max(longest, log.stat().st_size if log.exists() else 0)
    assert 4096 < longest < 200_000
