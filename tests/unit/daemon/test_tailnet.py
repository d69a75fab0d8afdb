"""Who decides what pods reach of the tailnet, and how the daemon hears of annotations."""

from __future__ import annotations

import json

import pytest
from kube_server import KubeServer
from patience import until

from headcni import settings as config
from headcni.ctl.status import _in_words as in_words
from headcni.daemon.daemon import Daemon
from headcni.daemon.kubernetes.access import Source
from headcni.daemon.kubernetes.annotations import AnnotationWatcher
from headcni.daemon.kubernetes.client import KubeClient
from headcni.daemon.tailnet import TailnetAccess
from headcni.datapath import tailnet as rules
from headcni.store import Store
from headcni.tailnet_access import ALL, ANNOTATION, FORGOTTEN, OPEN, PODS, Policy


@pytest.fixture(autouse=True)
def _the_machines_own_rules_stay(monkeypatch):
    """tests/cni has the tests of what comes of this in the kernel of a node."""
    monkeypatch.setattr("headcni.datapath.nft.table_comment", lambda _table: None)
    monkeypatch.setattr("headcni.datapath.ruleset.is_needed", lambda _db: False)


@pytest.fixture
def store(tmp_path):
    with Store.in_directory(str(tmp_path)) as made:
        made.recovered()
        made.is_unverified()
        yield made


def configured(access: object = "all", namespaces: object = None, **more: object):
    section = {"tailnetAccess": access, "tailnetAccessNamespaces": namespaces or {}}
    made, problems = config.parse(json.dumps({"network": section, **more}).encode())
    assert problems == []
    return made


def access_of(store: Store, made: config.DaemonConfig, watched: bool = True) -> TailnetAccess:
    return TailnetAccess(lambda: store, lambda: made, watched)


def kept(store: Store) -> Policy:
    return store.read(rules.policy_of)


@pytest.mark.parametrize(
    ("namespaces", "more"),
    [({}, {}), ({}, {"tailscale": {"interfaceName": "ts0"}}), ({"ci": "all"}, {})],
)
def test_what_limits_nobody_changes_nothing(store, namespaces, more):
    access = access_of(store, configured("all", namespaces, **more), watched=False)
    assert [access.ensure() for _ in range(3)] == [False] * 3


def test_after_a_lost_store_pods_stay_limited_until_annotations_are_known(store):
    store.atomically(lambda db: rules.record(db, FORGOTTEN))
    access = access_of(store, configured("all"))
    access.ensure()
    assert kept(store).of("shop") == kept(store).of("") == PODS
    access.annotated({"shop": "pods"})
    assert (kept(store).of("shop"), kept(store).of("bank")) == (PODS, ALL)


def test_a_namespace_that_is_no_longer_configured_is_forgotten_without_an_api_server(store):
    access_of(store, configured("pods", {"ci": "all"})).ensure()
    assert kept(store).of("ci") == ALL
    access_of(store, configured("pods")).ensure()
    assert kept(store).of("ci") == PODS


def test_an_annotation_is_remembered_without_an_api_server(store):
    access_of(store, configured("pods")).annotated({"ci": "all"})
    access_of(store, configured("pods")).ensure()
    assert kept(store).of("ci") == ALL


def test_the_configuration_comes_before_the_annotation_and_that_before_the_node(store):
    access = access_of(store, configured("pods", {"both": "pods"}))
    access.annotated({"both": "all", "annotated": "100.64.0.7:443, 100.64.0.8"})
    policy = kept(store)
    assert policy.of("both") == PODS
    assert policy.of("annotated") == "100.64.0.7:443,100.64.0.8"
    assert policy.of("other") == PODS
    assert access.status() == {
        "node": "pods",
        "namespaces": {"annotated": "100.64.0.7:443,100.64.0.8"},
        "more": 0,
    }
    access.annotated({f"n{number}": "all" for number in range(60)})
    assert access.status()["more"] == 10


def test_by_default_nothing_is_kept(store):
    access = access_of(store, configured(), watched=False)
    assert access.ensure() is False
    assert kept(store) == OPEN
    count = store.read(lambda db: db.execute("SELECT count(*) FROM meta").fetchone()[0])
    access_of(store, configured("pods"), watched=False).ensure()
    assert access.ensure() is True
    assert store.read(lambda db: db.execute("SELECT count(*) FROM meta").fetchone()[0]) == count


def test_a_daemon_that_starts_without_the_api_server_keeps_what_annotations_said(store):
    first = access_of(store, configured("all"))
    first.annotated({"shop": "pods"})
    again = access_of(store, configured("100.64.0.7"))
    assert again.ensure() is True  # the node's value is another
    assert (kept(store).node, kept(store).of("shop")) == ("100.64.0.7", PODS)
    again.annotated({})
    assert kept(store).of("shop") == "100.64.0.7"


def test_without_kubernetes_annotations_of_before_are_forgotten(store):
    access_of(store, configured()).annotated({"shop": "pods"})
    assert access_of(store, configured(), watched=False).ensure() is True
    assert kept(store) == OPEN


@pytest.mark.parametrize("text", ["", "none", "100.64.0.7:", "100.64.0.7," * 500, "all,pods"])
def test_a_mistake_in_an_annotation_limits_the_namespace_and_is_told_in_short(store, text):
    access = access_of(store, configured())
    access.annotated({"shop": text})
    assert kept(store).of("shop") == PODS
    assert ANNOTATION in access.mistakes["shop"] and "expected" in access.mistakes["shop"]
    assert len(access.mistakes["shop"]) < 500
    access.annotated({"shop": "all"})
    assert access.mistakes == {} and kept(store) == OPEN


def test_an_interface_of_another_name_counts_too(store):
    made = configured("pods", tailscale={"interfaceName": "ts7"})
    access_of(store, made, watched=False).ensure()
    assert '"ts7"' in rules.chains(kept(store))


def test_a_store_that_must_be_reconstructed_first_is_left_alone(tmp_path):
    with Store.in_directory(str(tmp_path)) as new:
        assert new.is_unverified()
        assert access_of(new, configured("pods"), watched=False).ensure() is False
        assert kept(new) == OPEN


class Heard:
    def __init__(self, server: KubeServer) -> None:
        self.server = server
        self.said: list[dict[str, str]] = []
        client = KubeClient(Source(str(server.kubeconfig())))
        self.watcher = AnnotationWatcher(
            client, lambda found: self.said.append(dict(found)), (0.05, 0.2)
        )


@pytest.fixture
def heard(tmp_path):
    server = KubeServer(tmp_path / "server")
    made = Heard(server)
    yield made
    server.close()
    made.watcher.stop()
    assert not made.watcher.is_alive()


def annotated(text: str) -> dict[str, str]:
    return {ANNOTATION: text, "other": "x"}


def test_annotations_are_heard_of_when_they_come_change_and_go(heard):
    heard.server.put_namespace("shop", annotated("pods"))
    heard.server.put_namespace("plain", {})
    heard.watcher.start()
    until(lambda: heard.server.namespace_streams)
    assert heard.said == [{"shop": "pods"}]
    for change in (annotated("all"), {}, annotated("pods"), None):
        heard.server.put_namespace("shop", change)
    heard.server.put_namespace("plain", {"other": "y"})
    heard.server.put_namespace("new", annotated("100.64.0.7"))
    until(lambda: len(heard.said) == 6)
    assert heard.said[1:] == [{"shop": "all"}, {}, {"shop": "pods"}, {}, {"new": "100.64.0.7"}]
    assert heard.watcher.problem == ""


def test_a_watch_that_ends_goes_on_and_one_that_is_too_old_lists_anew(heard):
    heard.watcher.start()
    until(lambda: heard.server.namespace_streams)
    heard.server.oldest = heard.server.version + 1
    heard.server.put_namespace("shop", annotated("pods"))
    until(lambda: heard.said[-1] == {"shop": "pods"})
    heard.server.oldest = heard.server.version + 5
    heard.server.cut()
    until(lambda: heard.server.count("namespaces?limit") == 2)
    assert heard.said[-1] == {"shop": "pods"}


def test_a_long_list_is_read_page_by_page_and_no_long_annotation_is_kept(heard):
    for number in range(5):
        heard.server.put_namespace(f"n{number}", annotated("x" * 200_000))
    heard.server.page = 2
    heard.watcher.start()
    until(lambda: heard.said)
    assert len(heard.said[0]) == 5
    assert max(map(len, heard.said[0].values())) < 5000


def test_who_may_not_read_namespaces_is_told_what_is_needed(heard):
    status = {"kind": "Status", "message": "namespaces is forbidden", "code": 403}
    heard.server.answer_with = (403, {}, json.dumps(status).encode())
    heard.watcher.start()
    until(lambda: "forbidden" in heard.watcher.problem)
    assert "list and watch on namespaces" in heard.watcher.problem
    assert heard.said == []


def test_pods_that_may_not_ask_their_nameserver_are_a_mistake():
    text = {
        "dns": {"magicDNS": {"enabled": True, "nameservers": ["100.100.100.100", "9.9.9.9"]}},
        "network": {"tailnetAccess": "pods"},
    }
    _unused, found = config.parse(json.dumps(text).encode())
    assert [one.path for one in found] == ["network.tailnetAccess"]
    assert "100.100.100.100:53" in found[0].expected
    text["network"] = {"tailnetAccess": ["100.100.100.100:53"]}
    assert config.parse(json.dumps(text).encode())[1] == []


@pytest.mark.parametrize(
    ("section", "path", "value", "expected"),
    [
        ({"tailnetAccess": ["100.64.0.0/24", "x"]}, "tailnetAccess[1]", "x", "an address"),
        ({"tailnetAccess": "x"}, "tailnetAccess", "x", "an address"),
        ({"tailnetAccess": 7}, "tailnetAccess", 7, "all, pods, or a list"),
        ({"tailnetAccessNamespaces": {"shop": ["x"]}}, "[shop][0]", "x", "an address"),
        ({"tailnetAccessNamespaces": {"a/b": "pods"}}, "[a/b]", "a/b", "the name of a namespace"),
        ({"tailnetAccessNamespaces": ["shop"]}, "Namespaces", "a list of 1", "namespaces, each"),
        (
            {"tailnetAccessNamespaces": {f"n{number}": "pods" for number in range(1001)}},
            "Namespaces",
            "a section of 1001",
            "at most 1000",
        ),
    ],
)
def test_a_mistake_in_the_configuration_is_named_with_value_and_fix(section, path, value, expected):
    made, found = config.parse(json.dumps({"network": section}).encode())
    assert len(found) == 1
    assert found[0].path.endswith(path) and found[0].value == value
    assert expected in found[0].expected
    assert made.network.tailnet_access == ALL


def status_in_words(tmp_path, section: dict, annotations: dict[str, str]) -> list[str]:
    place = {"socket": f"{tmp_path}/cni.sock", "dataDir": f"{tmp_path}/data"}
    whole = {"daemon": place, "network": {"podCIDR": {"nodeLocal": "10.9.1.0/24"}, **section}}
    made, problems = config.parse(json.dumps(whole).encode())
    assert problems == []
    (tmp_path / "data").mkdir()
    daemon = Daemon(made, str(tmp_path / "config.yaml"))
    daemon.store.recovered()
    daemon.tailnet.annotated(annotations)
    return in_words(daemon.status()).splitlines()


def test_the_status_shows_the_node_and_the_namespaces_that_differ(tmp_path):
    section = {"tailnetAccess": "pods", "tailnetAccessNamespaces": {"bank": "100.64.0.7:443"}}
    lines = status_in_words(tmp_path, section, {"shop": "nonsense", "lab": "all"})
    at = lines.index("tailnet access: pods")
    assert lines[at + 1 : at + 3] == ["  namespace bank: 100.64.0.7:443", "  namespace lab: all"]
    assert lines[-1].startswith("WARNING: namespace shop: headcni.dev/tailnet-access is 'nonsense'")


def test_the_status_says_what_the_default_means(tmp_path):
    lines = status_in_words(tmp_path, {}, {})
    assert "tailnet access: all (pods have the node's rights)" in lines
