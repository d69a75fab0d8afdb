"""Pods of a node without Kubernetes: what the store and the files say of them together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from patience import until

from headcni.daemon.policies.feed import Feed
from headcni.daemon.policies.from_files import FromFiles
from headcni.model import Owner, PodRef
from headcni.policy.objects import World
from headcni.store import Attachment, Store

POLICY = """
kind: NetworkPolicy
metadata: {name: deny, namespace: shop}
spec: {podSelector: {}}
"""
POD = """
kind: Pod
metadata: {name: %s, namespace: shop, labels: {app: db, tier: back}}
spec: {containers: [{name: c, ports: [{name: sql, containerPort: 5432}]}]}
status: {podIP: 10.244.2.7}
"""


class Enforcer:
    """Keeps what it is told, as the real one does."""

    def __init__(self) -> None:
        self.world: World | None = None

    def set_world(self, world: World) -> None:
        self.world = world

    def _change(self, objects: dict[Any, Any], key: Any, value: Any) -> None:
        objects.pop(key, None)
        if value is not None:
            objects[key] = value

    def pod_changed(self, key, pod) -> None:
        assert self.world is not None
        self._change(self.world.pods, key, pod)

    def namespace_changed(self, name, namespace) -> None:
        assert self.world is not None
        self._change(self.world.namespaces, name, namespace)

    def policy_changed(self, key, policy) -> None:
        assert self.world is not None
        self._change(self.world.policies, key, policy)


class Node:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store.in_directory(str(folder / "data"))
        (folder / "policies").mkdir()
        self.enforcer = Enforcer()
        self.feed = Feed(self.enforcer)
        self.source = FromFiles(
            lambda: self.store,
            str(folder / "data"),
            "node1",
            self.feed,
            str(folder),
            interval=0.05,
        )

    def start(self) -> None:
        self.feed.start()
        self.source.start()

    def attach(self, ref: PodRef, *addresses: str, ifname: str = "eth0", **labels: str) -> Owner:
        owner = Owner("pods", f"container-of-{ref.name}", ifname)
        result = {"ips": [{"address": f"{one}/24"} for one in addresses]}
        state = {"labels": labels} if labels else {}
        self.store.remember(
            Attachment(owner, ref, "/none", "hc1", {"enable_network_policy": True}, result, state)
        )
        self.source.pods_changed()
        return owner

    def pod(self, name: str, namespace: str = "shop") -> Any:
        world = self.enforcer.world
        return world.pods.get((namespace, name)) if world is not None else None


@pytest.fixture
def node(tmp_path):
    (tmp_path / "data").mkdir()
    made = Node(tmp_path)
    yield made
    made.source.stop()
    made.feed.stop()
    made.store.close()


def soon(condition) -> Any:
    return until(condition, 10, "the enforcer knows", every=0.02)


def test_a_pods_labels_come_from_its_call_and_the_files_which_win(node):
    (node.folder / "policies/policy.yaml").write_text(POLICY)
    (node.folder / "pod-labels.yaml").write_text("shop/web-*: {app: web, tier: front}\n")
    node.start()
    node.attach(PodRef("shop", "web-1", "uid"), "10.244.1.5", "fd44::5", app="other", team="a")
    pod = soon(lambda: node.pod("web-1"))
    assert pod.labels == {"app": "web", "tier": "front", "team": "a"}
    assert [str(one) for one in pod.addresses] == ["10.244.1.5", "fd44::5"]
    assert (pod.node, pod.uid, pod.counts) == ("node1", "uid", True)
    assert ("shop", "deny") in node.enforcer.world.policies


def test_files_describe_pods_of_other_nodes_and_ports_of_own_ones(node):
    (node.folder / "policies/db.yaml").write_text(POD % "db-0" + "---\n" + POD % "db-1")
    node.start()
    node.attach(PodRef("shop", "db-1"), "10.244.1.6")
    own = soon(lambda: node.pod("db-1") and node.pod("db-1").node and node.pod("db-1"))
    assert [str(one) for one in own.addresses] == ["10.244.1.6"]
    assert own.labels == {"app": "db", "tier": "back"} and own.ports[0].name == "sql"
    assert [str(one) for one in node.pod("db-0").addresses] == ["10.244.2.7"]


def test_a_pod_of_two_networks_has_the_addresses_of_both(node):
    node.start()
    node.attach(PodRef("shop", "web"), "10.244.1.5")
    node.attach(PodRef("shop", "web"), "10.99.1.5", ifname="net1")
    soon(lambda: node.pod("web") and len(node.pod("web").addresses) == 2)


def test_a_deleted_pod_is_gone(node):
    owner = node.attach(PodRef("shop", "web"), "10.244.1.5")
    node.start()
    soon(lambda: node.pod("web"))
    node.store.forget(owner)
    soon(lambda: node.pod("web") is None)


def test_a_container_that_is_no_pod_is_known_by_its_own_id(node):
    node.start()
    owner = node.attach(PodRef(), "10.244.1.5")
    assert soon(lambda: node.pod(owner.container_id, "default"))


def test_with_a_wrong_file_pods_still_come_and_go(node):
    node.start()
    node.attach(PodRef("shop", "web"), "10.244.1.5")
    soon(lambda: node.pod("web"))
    (node.folder / "policies/wrong.yaml").write_text("kind: Nonsense")
    soon(lambda: node.source.problems())
    node.attach(PodRef("shop", "db"), "10.244.1.6")
    soon(lambda: node.pod("db"))
    assert "Nonsense" in node.source.problems()[0]


def test_nothing_is_enforced_while_the_first_files_are_wrong(node):
    (node.folder / "policies/wrong.yaml").write_text("kind: Nonsense")
    node.start()
    soon(lambda: node.source.problems())
    assert node.enforcer.world is None and not node.feed.is_complete()


class Away:
    def attachments(self):
        raise OSError("the disk is away")


def test_files_that_were_read_while_the_store_was_away_count_when_it_is_back(node):
    (node.folder / "policies" / "a.yaml").write_text(POLICY)
    store, node.store = node.store, Away()
    node.start()
    until(lambda: any("not known" in one for one in node.source.problems()))
    node.store = store
    until(lambda: node.enforcer.world is not None)
    assert set(node.enforcer.world.policies) == {("shop", "deny")}
