"""The whole daemon on a node without Kubernetes, with network policies from files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headcni.ctl.daemon_client import asked

DAEMON = "import sys; from headcni.daemon.main import main; sys.exit(main(sys.argv[1:]))"
DENY = """
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: deny, namespace: shop}
spec: {podSelector: {}, policyTypes: [Ingress]}
"""
ALLOW = """
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: allow, namespace: shop}
spec:
  podSelector: {matchLabels: {app: db}}
  ingress: [{from: [{podSelector: {matchLabels: {app: web}}}]}]
"""


class Policies:
    def __init__(self, node: Any) -> None:
        self.node = node
        self.folder = node.tmp / "etc"
        (self.folder / "policies").mkdir(parents=True)

    def start(self, enabled: bool = True) -> Any:
        node = self.node
        config = {
            "daemon": {"socket": str(node.socket), "dataDir": str(node.tmp / "data")},
            "tailscale": {"socket": {"path": str(node.tmp / "no.sock")}},
            "network": {
                "podCIDR": {"nodeLocal": "10.55.1.0/24"},
                "firewall": "none",
                "enableNetworkPolicy": enabled,
            },
            "monitoring": {"enabled": False},
        }
        (self.folder / "config.yaml").write_text(json.dumps(config))
        argv, env = node.python_command("-c", DAEMON, "--config", str(self.folder / "config.yaml"))
        return node.start_command(argv, env, "msg=ready")

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def add(self, name: str, labels: str = "", **changes: Any) -> tuple[Any, str]:
        args = f"K8S_POD_NAMESPACE=shop;K8S_POD_NAME={name}"
        args += f";HEADCNI_POD_LABELS={labels}" if labels else ""
        pod = self.node.pod()
        conf = self.node.conf(enable_network_policy=True, **changes)
        return pod, self.node.add(conf, pod, args=args).address

    def ask(self, question: str = "policy") -> dict[str, Any]:
        with asked(question, str(self.node.socket.with_name("daemon.sock")), 10) as answers:
            return next(answers)

    def has(self, count: int) -> bool:
        shown = self.ask()
        return bool(shown["since"]) and shown["policies"] == count


@pytest.fixture
def policies(node):
    return Policies(node)


def test_policies_in_files_are_enforced_and_a_wrong_file_changes_nothing(policies, datapath):
    node = policies.node
    policies.write("policies/deny.yaml", DENY)
    policies.write("pod-labels.yaml", "shop/web-mapped: {app: web}")
    policies.start()
    node.wait_for(lambda: policies.has(1))
    db, address = policies.add("db", "app=db", datapath=datapath)
    web, _address = policies.add("web", "app=web", datapath=datapath)
    mapped, _address = policies.add("web-mapped", datapath=datapath)
    annotation = {"io.kubernetes.cri.pod-annotations": {"headcni.dev/labels": "app=web"}}
    noted, _address = policies.add("noted", datapath=datapath, runtimeConfig=annotation)
    other, _address = policies.add("other", "app=other", datapath=datapath)
    with db.serving(80):
        for pod in (web, mapped, noted, other):
            assert not pod.asks(address, 80)
        policies.write("policies/allow.yaml", ALLOW)
        node.wait_for(lambda: policies.has(2))
        for pod in (web, mapped, noted):
            node.wait_for(lambda pod=pod: pod.asks(address, 80))
        assert not other.asks(address, 80)

        policies.write("policies/allow.yaml", ALLOW.replace("podSelector", "podSelektor"))
        node.wait_for(lambda: policies.ask()["problems"])
        problem = policies.ask()["problems"][0]
        assert "allow.yaml" in problem and "podSelector?" in problem
        assert web.asks(address, 80) and not other.asks(address, 80)
        assert any("allow.yaml" in one["message"] for one in policies.ask("status")["warnings"])

        (policies.folder / "policies/deny.yaml").unlink()
        (policies.folder / "policies/allow.yaml").unlink()
        node.wait_for(lambda: policies.has(0))
        node.wait_for(lambda: other.asks(address, 80))
    assert policies.ask()["problems"] == []


def test_a_label_with_a_mistake_is_refused_by_add(policies):
    policies.start()
    args = "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web;HEADCNI_POD_LABELS=app web"
    error = policies.node.add(policies.node.conf(enable_network_policy=True), args=args).error
    assert "HEADCNI_POD_LABELS in CNI_ARGS is 'app web'" in error["msg"]
    assert policies.node.is_empty()


def test_pods_from_before_are_named_until_they_are_restarted(policies):
    before = policies.node.pod()
    policies.node.add(policies.node.conf(), before, args="K8S_POD_NAMESPACE=shop;K8S_POD_NAME=old")
    policies.write("policies/deny.yaml", DENY)
    policies.start()
    policies.node.wait_for(lambda: policies.has(1))
    assert "1 pod interfaces have no network policies" in policies.ask()["problems"][0]
    policies.node.delete(policies.node.conf(), before)
    policies.node.wait_for(lambda: policies.ask()["problems"] == [])


def test_when_policies_are_turned_off_nobody_is_limited_any_more(policies):
    node = policies.node
    policies.write("policies/deny.yaml", DENY)
    daemon = policies.start()
    node.wait_for(lambda: policies.has(1))
    db, address = policies.add("db")
    web, _address = policies.add("web")
    with db.serving(80):
        assert not web.asks(address, 80)
        node.end(daemon)
        assert not web.asks(address, 80), "a daemon that ends opens nothing"
        policies.start(enabled=False)
        node.wait_for(lambda: web.asks(address, 80))
    assert not policies.ask("status")["warnings"]
    new, address = policies.add("new")  # by a conflist that still promises policies
    with new.serving(80):
        node.wait_for(lambda: web.asks(address, 80))
    (warning,) = policies.ask("status")["warnings"]
    assert "1 pod interfaces were added with enable_network_policy" in warning["message"]
