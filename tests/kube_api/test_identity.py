"""The daemon's identity at a real API server: what it may do, how it is renewed, how it ends.

tests/unit/modules/test_kubernetes_tokens.py does the same without permissions, in `make test`.
"""

from __future__ import annotations

import time

import pytest
from ansible_module import run
from api_server import ApiServer, serving
from lab_command import CHECKOUT
from patience import until

from headcni.daemon.kubernetes.access import Source
from headcni.daemon.kubernetes.client import KubeClient, Selector
from headcni.daemon.kubernetes.errors import DENIED, KubeError
from headcni.daemon.kubernetes.token import TokenKeeper
from headcni.shared import bearer_token
from lab import tools

pytestmark = pytest.mark.timeout(300)
MANIFEST = (CHECKOUT / "plugins/cni/kubernetes/headcni-node.yaml").read_text()
LIFETIME = 90 * 86400
KINDS = "serviceaccounts,secrets,roles,rolebindings,clusterroles,clusterrolebindings"
IN_CACHE_SECONDS = 30  # an API server remembers for a while which tokens are good


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    assert not tools.missing([tools.KUBERNETES]), "run `make test-kube-api`, which builds it"
    with serving(tmp_path_factory.mktemp("api")) as made:
        yield made


class Cluster:
    """The modules as site.yml runs them, and the files of two nodes."""

    def __init__(self, server: ApiServer, folder) -> None:
        self.server, self.folder = server, folder

    def identity(self, check: bool = False, **given):
        given = {"nodes": ["node1", "node2"], "manifest": MANIFEST, **given}
        return run("headcni_kubernetes_identity", check, **self._how, **given)

    @property
    def _how(self):
        return {"kubectl": [self.server.kubectl_program], "kubeconfig": str(self.server.admin)}

    def kubeconfig(self, node: str):
        return self.server.kubeconfig(f"{node}.kubeconfig", tokenFile=str(self.file(node)))

    def file(self, node: str):
        return self.folder / f"{node}-token"

    def give(self, node: str, token: str) -> None:
        self.file(node).write_text(token)

    def source(self, node: str) -> Source:
        return Source(str(self.kubeconfig(node)))

    def why_needed(self, node: str) -> str:
        """As the node's kubelet asks; here the administrator stands in for it."""
        return run(
            "headcni_kubernetes_info",
            name=node,
            timeout=0,
            daemon_kubeconfig=str(self.kubeconfig(node)),
            token_file=str(self.file(node)),
            **self._how,
        )["token"]["reason"]

    def ours(self) -> set[str]:
        found = self.server.kubectl("get", KINDS, "-A", "-o", "name").split()
        return {one for one in found if "headcni" in one}


@pytest.fixture
def cluster(server, tmp_path):
    made = Cluster(server, tmp_path)
    for node in ("node1", "node2"):
        spec = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}}
        server.kubectl("apply", "-f", "-", given=spec)
    yield made
    made.identity(state="absent")
    assert made.ours() == set()


def is_refused(client: KubeClient) -> bool:
    try:
        return not client.has_node("node1")
    except KubeError:
        return True


def refused(work) -> KubeError:
    with pytest.raises(KubeError) as raised:
        work()
    assert raised.value.kind == DENIED
    return raised.value


def test_each_node_gets_an_account_and_a_token_and_a_second_run_changes_nothing(cluster):
    predicted = cluster.identity(check=True)
    assert cluster.ours() == set() and predicted["renewed"] == ["node1", "node2"]
    made = cluster.identity()
    assert made["changed"] and predicted["changed"]
    assert not [one for one in cluster.ours() if one.startswith("secret")]
    for node, token in made["tokens"].items():
        known = bearer_token.read(token)
        assert (known.account, known.lifetime) == (f"headcni-node-{node}", LIFETIME)
        cluster.give(node, token)
        assert cluster.why_needed(node) == ""
    again = cluster.identity()
    assert (again["changed"], again["tokens"], again["old"]) == (False, {}, [])
    assert not cluster.identity(check=True)["changed"]


def test_the_daemon_renews_its_own_token_and_can_make_no_other(cluster):
    short = cluster.identity(lifetime="10m")["tokens"]
    cluster.give("node1", short["node1"])
    source = cluster.source("node1")
    client = KubeClient(source)
    assert client.pods(Selector("node1")).pods == () and client.has_node("node1")
    said = refused(lambda: client.new_token("kube-system", "headcni-node-node2", 600))
    assert "serviceaccounts/token" in str(said)

    keeper = TokenKeeper(client, source, LIFETIME, path=str(cluster.file("node1")))
    keeper.look()
    assert cluster.file("node1").read_text() == short["node1"]  # it is not due yet
    late = TokenKeeper(
        client,
        source,
        LIFETIME,
        path=str(cluster.file("node1")),
        clock=lambda: time.time() + 250,
    )
    late.look()
    assert late.trouble() == ""
    fresh = bearer_token.read(cluster.file("node1").read_text())
    assert (fresh.account, fresh.lifetime) == ("headcni-node-node1", LIFETIME)
    assert cluster.file("node1").stat().st_mode & 0o777 == 0o600
    assert client.has_node("node1")
    assert cluster.why_needed("node1") == ""


def test_a_tokens_end_is_the_end_of_its_account_and_the_next_run_makes_another(cluster):
    cluster.give("node1", cluster.identity()["tokens"]["node1"])
    client = KubeClient(cluster.source("node1"))
    assert client.has_node("node1")
    cluster.server.kubectl("delete", "serviceaccount", "headcni-node-node1", "-n", "kube-system")
    until(lambda: is_refused(client), IN_CACHE_SECONDS, "the token is refused", every=0.5)
    said = str(refused(lambda: client.has_node("node1")))
    assert "HTTP 401" in said and "if site.yml has made them, run it again" in said
    assert "does not accept the daemon's token" in cluster.why_needed("node1")
    made = cluster.identity(tokens_for=["node1"])
    assert set(made["tokens"]) == {"node1"}
    cluster.give("node1", made["tokens"]["node1"])
    assert client.has_node("node1") and cluster.why_needed("node1") == ""


def test_what_an_earlier_version_made_is_deleted_once_all_have_switched(cluster):
    label = {"app.kubernetes.io/managed-by": "headcni"}
    of = {"kubernetes.io/service-account.name": "headcni-node"}
    here = {"namespace": "kube-system"}
    rbac = "rbac.authorization.k8s.io"
    account = {"kind": "ServiceAccount", "name": "headcni-node", **here}
    role = {"apiGroup": rbac, "kind": "ClusterRole", "name": "headcni-node"}
    shared = [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": "headcni-node", **here},
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "headcni-node"},
            "roleRef": role,
            "subjects": [account],
        },
    ]
    secrets = [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "kubernetes.io/service-account-token",
            "metadata": {
                **here,
                "name": f"headcni-node-{node}",
                "labels": label,
                "annotations": of,
            },
        }
        for node in ("node1", "node2")
    ]
    listed = {"apiVersion": "v1", "kind": "List", "items": [*shared, *secrets]}
    cluster.server.kubectl("apply", "-f", "-", given=listed)
    assert cluster.identity()["old"] == ["node1", "node2"]
    assert cluster.identity(state="switched", nodes=["node1"])["changed"]
    assert {"secret/headcni-node-node2", "serviceaccount/headcni-node"} <= cluster.ours()
    assert cluster.identity(state="switched", nodes=["node2"])["changed"]
    left = cluster.ours()
    assert not [one for one in left if one.startswith("secret/")]
    assert "serviceaccount/headcni-node" not in left
    assert f"clusterrolebinding.{rbac}/headcni-node" not in left
    assert not cluster.identity()["changed"]
