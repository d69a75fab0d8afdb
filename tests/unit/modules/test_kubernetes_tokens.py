"""A token's way from site.yml to the daemon and back, over TLS, at a server that issues tokens.

tests/kube_api does the same with a real kube-apiserver, which also enforces the permissions.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import kubectl
import pytest
from ansible_collections.headcni.mesh.plugins.module_utils.shared import bearer_token
from ansible_module import run
from kube_server import KubeServer

from headcni.daemon.kubernetes.access import Source
from headcni.daemon.kubernetes.client import KubeClient
from headcni.daemon.kubernetes.errors import DENIED, KubeError
from headcni.daemon.kubernetes.token import TokenKeeper

LIFETIME = 90 * 86400
ACCOUNT = "headcni-node-node1"


class Cluster:
    """An API server, its administrator, and what site.yml writes on node1."""

    def __init__(self, folder: Path) -> None:
        self.server = KubeServer(folder / "server")
        self.admin = self.server.kubeconfig().rename(folder / "admin.kubeconfig")
        self.file = folder / "token"
        self.kubeconfig = self.server.kubeconfig(tokenFile=str(self.file), token="")
        self.client = KubeClient(Source(str(self.kubeconfig)), timeout=5)
        program = folder / "kubectl"
        shutil.copy(kubectl.__file__, program)
        self.how = {"kubectl": [sys.executable, str(program)], "kubeconfig": str(self.admin)}

    def identity(self, **given) -> dict:
        given = {"nodes": ["node1"], "manifest": "kind: manifest", **given}
        return run("headcni_kubernetes_identity", **self.how, **given)

    def give(self, made: dict) -> str:
        token = made["tokens"]["node1"]
        self.file.write_text(token)
        self.file.chmod(0o600)
        return token

    def why_needed(self) -> str:
        """As site.yml asks on the node before it decides whether a new token is needed."""
        found = run(
            "headcni_kubernetes_info",
            name="node1",
            timeout=0,
            daemon_kubeconfig=str(self.kubeconfig),
            token_file=str(self.file),
            **self.how,
        )
        return found["token"]["reason"]

    def keeper(self, ahead: float) -> TokenKeeper:
        """With a clock that is so many seconds ahead."""
        return TokenKeeper(
            self.client,
            Source(str(self.kubeconfig)),
            LIFETIME,
            path=str(self.file),
            clock=lambda: time.time() + ahead,
        )


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path)
    yield made
    made.server.close()


def test_site_yml_gives_a_token_that_the_daemon_uses_and_renews(cluster):
    assert cluster.why_needed() == "the daemon has no token that expires"
    short = cluster.give(cluster.identity(lifetime="10m"))
    assert bearer_token.read(short).account == ACCOUNT
    assert cluster.client.has_node("node1") and cluster.why_needed() == ""
    cluster.keeper(ahead=0).look()
    assert cluster.file.read_text() == short  # a third of its life is not over yet
    cluster.keeper(ahead=250).look()
    fresh = bearer_token.read(cluster.file.read_text())
    assert (fresh.account, fresh.lifetime) == (ACCOUNT, LIFETIME)
    assert cluster.file.stat().st_mode & 0o777 == 0o600
    asked = [one["spec"]["expirationSeconds"] for one in cluster.server.token_requests]
    assert asked == [600, LIFETIME]
    assert cluster.client.has_node("node1") and cluster.why_needed() == ""
    assert not cluster.identity()["changed"]


def test_a_token_that_has_become_invalid_is_reported_and_the_next_run_replaces_it(cluster):
    token = cluster.give(cluster.identity())
    cluster.server.accepts.remove(token)  # as when its account was deleted
    with pytest.raises(KubeError, match=r"HTTP 401.*if site\.yml has made them, run it") as raised:
        cluster.client.has_node("node1")
    assert raised.value.kind == DENIED
    assert cluster.why_needed() == "the API server does not accept the daemon's token"
    cluster.give(cluster.identity(tokens_for=["node1"]))
    assert cluster.client.has_node("node1") and cluster.why_needed() == ""
