"""Network policies of a real API server, on a node whose daemon watches and enforces them.

The API server and the node are in the same network namespace. There is no kubelet: the test creates
the pods' objects, adds the pods by CNI, and writes their addresses into their status.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from ansible_module import run
from api_server import ApiServer, serving
from cni_node import Namespace
from lab_command import CHECKOUT
from patience import until

from headcni.ctl.daemon_client import asked
from headcni.errors import CniError
from lab import tools
from tests.cni.conftest import plugins as plugins
from tests.cni.conftest import release as release
from tests.daemon.conftest import ServedNode

pytestmark = pytest.mark.timeout(300)
MANIFEST = (CHECKOUT / "plugins/cni/kubernetes/headcni-node.yaml").read_text()
DAEMON = "import sys; from headcni.daemon.main import main; sys.exit(main(sys.argv[1:]))"
PATIENCE = 60.0
NODE = "node1"


class Node:
    """A node with its daemon, and the cluster that it is of."""

    def __init__(self, served: ServedNode, server: ApiServer) -> None:
        self.served, self.server = served, server
        self.token = served.tmp / "token"
        self.pods: dict[tuple[str, str], Namespace] = {}

    def identity(self, *with_policies: str) -> None:
        """As site.yml makes it."""
        made = run(
            "headcni_kubernetes_identity",
            kubectl=[*self.server.within, self.server.kubectl_program],
            kubeconfig=str(self.server.admin),
            nodes=[NODE],
            tokens_for=[NODE],
            policies_for=list(with_policies),
            manifest=MANIFEST,
        )
        self.token.write_text(made["tokens"][NODE])
        self.token.chmod(0o600)

    def start(self, unknown: str = "deny") -> subprocess.Popen[bytes]:
        node = self.served
        config = node.tmp / "config.yaml"
        kubeconfig = self.server.kubeconfig("node.kubeconfig", tokenFile=str(self.token))
        network = {
            "podCIDR": {"nodeLocal": "10.55.1.0/24", "base": "10.55.0.0/16"},
            "firewall": "none",
            "enableNetworkPolicy": True,
            "unknownPolicy": unknown,
        }
        daemon = {
            "socket": str(node.socket),
            "dataDir": str(node.tmp / "data"),
            "kubeconfig": str(kubeconfig),
            "nodeName": NODE,
        }
        tailscale = {"socket": {"path": str(node.tmp / "no.sock")}}
        monitoring = {"enabled": True, "port": 9001}
        made = {
            "daemon": daemon,
            "network": network,
            "tailscale": tailscale,
            "monitoring": monitoring,
        }
        config.write_text(json.dumps(made))
        argv, env = node.python_command("-c", DAEMON, "--config", str(config))
        return node.start_command(argv, env, "msg=ready")

    def conf(self) -> dict[str, Any]:
        return self.served.conf(enable_network_policy=True)

    def create(self, *objects: dict[str, Any]) -> None:
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.server.kubectl("apply", "-f", "-", given=listed)

    def namespace(self, name: str, **labels: str) -> None:
        meta = {"name": name, "labels": labels}
        account = {"metadata": {"name": "default", "namespace": name}, "kind": "ServiceAccount"}
        self.create({"apiVersion": "v1", "kind": "Namespace", "metadata": meta})
        self.create({**account, "apiVersion": "v1", "automountServiceAccountToken": False})

    def pod(self, namespace: str, name: str, **labels: str) -> str:
        """Its object, its network, and its address in its status, as a kubelet does it."""
        meta = {"name": name, "namespace": namespace, "labels": labels}
        ports = [{"name": "sql", "containerPort": 5432}]
        spec = {"nodeName": NODE, "containers": [{"name": "c", "image": "i", "ports": ports}]}
        self.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
        address = self.add(namespace, name)
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
        self.patch("pod", namespace, name, {"status": status}, "--subresource=status")
        return address

    def add(self, namespace: str, name: str) -> str:
        made = self.served.pod()
        args = f"K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name}"
        self.pods[namespace, name] = made
        return self.served.add(self.conf(), made, args=args).address

    def patch(self, kind: str, namespace: str, name: str, change: Any, *words: str) -> None:
        given = json.dumps(change)
        self.server.kubectl("patch", kind, name, "-n", namespace, "-p", given, *words)

    def policy(self, namespace: str, name: str, **spec: Any) -> None:
        kind = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
        self.create({**kind, "metadata": {"name": name, "namespace": namespace}, "spec": spec})

    def reaches(self, source: tuple[str, str], address: str, port: int) -> bool:
        return bool(self.pods[source].asks(address, port))

    def ask(self, question: str) -> dict[str, Any]:
        path = str(self.served.socket.with_name("daemon.sock"))
        with asked(question, path, silence=10) as answers:
            return next(answers)

    def soon(self, condition: Any, what: str) -> Any:
        return until(condition, PATIENCE, lambda: f"{what}\n{self.log()}", every=0.1)

    def log(self) -> str:
        return self.served.log.read_text()[-4000:]

    def is_known(self) -> bool:
        try:
            return bool(self.ask("policy")["since"])
        except (CniError, KeyError):
            return False


@pytest.fixture
def node(tmp_path, plugins) -> Iterator[Node]:
    assert not tools.missing([tools.KUBERNETES]), "run `make test-kube-api`, which builds it"
    served = ServedNode.create(tmp_path, plugins)
    try:
        with serving(tmp_path / "api", served.netns.name) as server:
            made = Node(served, server)
            made.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})
            yield made
            for daemon in served.servers:  # a server that is watched takes long to end
                daemon.kill()
                daemon.wait(10)
    finally:
        served.remove()


WEB = {"podSelector": {"matchLabels": {"app": "web"}}}


def test_policies_of_the_api_server_decide_who_reaches_whom(node):
    node.identity(NODE)
    node.namespace("shop", team="a")
    node.namespace("bank", team="b")
    node.policy("shop", "deny", podSelector={}, policyTypes=["Ingress"])
    node.policy(
        "shop",
        "allow-web",
        podSelector={"matchLabels": {"app": "db"}},
        ingress=[{"from": [WEB], "ports": [{"port": "sql"}]}],
    )
    daemon = node.start()
    node.soon(node.is_known, "the policies are in force")
    db = node.pod("shop", "db", app="db")
    node.pod("shop", "web", app="web")
    node.pod("bank", "web", app="web")
    server = node.pods["shop", "db"]
    with server.serving(5432), server.serving(80):
        node.soon(lambda: node.reaches(("shop", "web"), db, 5432), "web reaches db")
        assert not node.reaches(("shop", "web"), db, 80), "another port"
        assert not node.reaches(("bank", "web"), db, 5432), "another namespace"

        # A policy, a label of a pod and a label of a namespace that change.
        others = {"namespaceSelector": {"matchLabels": {"team": "c"}}}
        node.policy(
            "shop",
            "allow-team-c",
            podSelector={"matchLabels": {"app": "db"}},
            ingress=[{"from": [others], "ports": [{"port": 5432}]}],
        )
        node.patch("namespace", "bank", "bank", {"metadata": {"labels": {"team": "c"}}})
        node.soon(lambda: node.reaches(("bank", "web"), db, 5432), "team c reaches db")
        node.patch("pod", "shop", "web", {"metadata": {"labels": {"app": "old"}}})
        node.soon(lambda: not node.reaches(("shop", "web"), db, 5432), "web has another label")

        shown = node.ask("policy")
        assert (shown["source"], shown["policies"], shown["problems"]) == ("kubernetes", 3, [])
        ingress = {one["pod"]: one["ingress"] for one in shown["pods"]}
        assert sorted(ingress["db"]) == ["shop/allow-team-c", "shop/allow-web", "shop/deny"]
        assert all(one["known"] for one in shown["pods"])
        denied = {(one["policy"], one["direction"]) for one in shown["denied"] if one["packets"]}
        assert ("deny", "Ingress") in denied

        # The rules outlive the API server, and the daemon.
        for process in node.server.processes.values():
            process.kill()
            process.wait(10)
        assert node.reaches(("bank", "web"), db, 5432)
        assert not node.reaches(("shop", "web"), db, 5432)
        node.soon(lambda: node.ask("policy")["problems"], "it is said that nobody answers")
        assert node.served.end(daemon, signal.SIGKILL) == -signal.SIGKILL
        assert node.reaches(("bank", "web"), db, 5432)
        assert not node.reaches(("shop", "web"), db, 5432)

        # A daemon that starts without the API server keeps them, and lets no new pod be reached.
        node.start()
        assert "not known yet" in str(node.ask("status")["conditions"])
        assert node.reaches(("bank", "web"), db, 5432)
        assert not node.reaches(("shop", "web"), db, 5432)
        new = node.add("shop", "new")
        with node.pods["shop", "new"].serving(80):
            assert not node.reaches(("shop", "web"), new, 80)


def test_what_is_deleted_at_the_api_server_is_open_again(node):
    node.identity(NODE)
    node.namespace("shop")
    node.policy("shop", "deny", podSelector={}, policyTypes=["Ingress", "Egress"])
    node.start()
    node.soon(node.is_known, "the policies are in force")
    db = node.pod("shop", "db")
    node.pod("shop", "web")
    with node.pods["shop", "db"].serving(80):
        assert not node.reaches(("shop", "web"), db, 80)
        node.server.kubectl("delete", "networkpolicy", "deny", "-n", "shop")
        node.soon(lambda: node.reaches(("shop", "web"), db, 80), "nothing is denied any more")
    assert node.ask("policy")["policies"] == 0


def test_an_account_without_the_permission_is_named_and_gets_it_from_site_yml(node):
    node.identity()  # as on a node without policies
    node.namespace("shop")
    node.start()
    said = node.soon(
        lambda: [one for one in node.ask("policy")["problems"] if "networkpolicies" in one],
        "the missing permission is named",
    )
    assert "set headcni_node_network_policy and run site.yml" in said[0]
    conditions = {one["name"]: one["ok"] for one in node.ask("status")["conditions"]}
    assert conditions["policy-source"] is False
    node.identity(NODE)
    node.soon(node.is_known, "the policies are in force")
