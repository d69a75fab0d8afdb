"""The API server's client, over real TLS: whom it trusts, what it believes, when it gives up."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from kube_server import NODE, TOKEN, Authority, KubeServer, pod

from headcni.daemon.kubernetes import access
from headcni.daemon.kubernetes import client as kube
from headcni.daemon.kubernetes.access import Access, Source, in_cluster, read_kubeconfig
from headcni.daemon.kubernetes.client import KubeClient, Selector
from headcni.daemon.kubernetes.errors import (
    CONFIG,
    DENIED,
    GONE,
    NO_ANSWER,
    REFUSED,
    STOPPED,
    KubeError,
)

HERE = Selector(NODE)


@pytest.fixture
def server(tmp_path):
    made = KubeServer(tmp_path / "server")
    yield made
    made.close()


def client(server: KubeServer, **options) -> KubeClient:
    return KubeClient(Source(str(server.kubeconfig())), **options)


def refused(action) -> KubeError:
    with pytest.raises(KubeError) as raised:
        action()
    assert TOKEN not in str(raised.value)
    return raised.value


def test_a_list_is_of_this_node_and_these_labels_and_asks_for_what_is_stored(server):
    server.put(pod("web", labels={"app": "web"}))
    server.put(pod("db", labels={"app": "db"}))
    server.put(pod("elsewhere", node="node2"))
    found = client(server).pods(Selector(NODE, "app=web"))
    assert [one.name for one in found.pods] == ["web"]
    assert found.version == str(server.version)
    assert [one.name for one in client(server).pods(HERE).pods] == ["web", "db"]
    assert "resourceVersion" not in server.asked[0]


def test_a_long_list_is_read_page_by_page(server):
    for number in range(7):
        server.put(pod(f"pod{number}"))
    server.page = 3
    assert [one.name for one in client(server).pods(HERE).pods] == [f"pod{n}" for n in range(7)]
    assert len(server.asked) == 3


def test_of_a_pod_is_kept_what_concerns_its_network(server):
    static = {"kubernetes.io/config.hash": "abc", "kubernetes.io/config.mirror": "abc"}
    server.put(pod("static", "uid-1", host_network=True, annotations=static, terminating=True))
    server.put(pod("young", "uid-2", phase="Pending", ip=""))
    first, second = client(server).pods(HERE).pods
    assert str(first.ref) == "default/static" and first.runs_as == ("uid-1", "abc", "abc")
    assert first.host_network and first.terminating and first.node == NODE
    assert first.phase == "Running" and first.ips == ("10.55.1.7",)
    assert second.ips == () and not second.host_network and second.phase == "Pending"


def test_one_pod_is_there_or_is_not_and_only_the_api_server_may_say_so(server):
    server.put(pod("web"))
    asked = client(server)
    assert asked.pod("default", "web").uid == "uid-web"
    assert asked.pod("default", "gone") is None
    status = {"kind": "Status", "reason": "NotFound", "code": 404, "message": "no"}
    for body in (
        b"<html>no such page</html>",
        b"{}",
        json.dumps({**status, "details": {"kind": "namespaces", "name": "default"}}).encode(),
        json.dumps({**status, "details": {"kind": "pods", "name": "other"}}).encode(),
        json.dumps(status).encode(),
    ):
        server.answer_with = (404, {}, body)
        assert refused(lambda: asked.pod("default", "gone")).kind == REFUSED
    server.answer_with = (410, {}, json.dumps({**status, "code": 410}).encode())
    assert refused(lambda: asked.pod("default", "gone")).kind == GONE


def test_a_nodes_own_credentials_can_ask_for_one_pod_too(server):
    server.put(pod("web"))
    server.put(pod("web", "uid-2", namespace="other"))
    server.as_node = True
    asked = client(server)
    assert refused(lambda: asked.pod("default", "gone")).kind == DENIED
    assert asked.pod_of_node(NODE, "default", "gone") is None
    assert asked.pod_of_node(NODE, "other", "web").uid == "uid-2"
    server.answer_with = (200, {}, b"{}")
    assert refused(lambda: asked.pod_of_node(NODE, "default", "gone")).kind == REFUSED


def test_a_node_is_known_or_not(server):
    assert client(server).has_node(NODE)
    assert not client(server).has_node("node9")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"nonsense",
        b'{"kind":"PodList"}',
        b'{"kind":"PodList","metadata":{},"items":[]}',
        b'{"kind":"PodList","metadata":{"resourceVersion":""},"items":[]}',
        b'{"kind":"NodeList","metadata":{"resourceVersion":"1"},"items":[]}',
        b'{"kind":"PodList","metadata":{"resourceVersion":"1"},"items":{}}',
        b'{"kind":"PodList","metadata":{"resourceVersion":"1"},"items":[{}]}',
        b'{"kind":"PodList","metadata":{"resourceVersion":"1"},"items":[null]}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_list_of_pods_is_not_taken_for_an_empty_one(server, body):
    server.answer_with = (200, {}, body)
    assert refused(lambda: client(server).pods(HERE)).kind == REFUSED


def test_a_list_that_go_writes_as_null_is_empty(server):
    body = b'{"kind":"PodList","metadata":{"resourceVersion":"7"},"items":null}'
    server.answer_with = (200, {}, body)
    assert client(server).pods(HERE) == ((), "7")


def test_an_answer_that_has_no_end_is_cut_off(server, monkeypatch):
    monkeypatch.setattr(kube, "LARGEST_ANSWER", 1000)
    server.answer_with = (200, {}, b" " * 2000)
    assert "more than" in str(refused(lambda: client(server).pods(HERE)))


@pytest.mark.parametrize(
    ("status", "kind", "word"),
    [
        (401, DENIED, "credentials"),
        (403, DENIED, "list, watch and get on pods"),
        (302, REFUSED, "HTTP 302"),
        (500, REFUSED, "HTTP 500"),
    ],
)
def test_a_refusal_says_what_to_do(server, status, kind, word):
    server.answer_with = (status, {"Location": "https://elsewhere.invalid/"}, b"{}")
    problem = refused(lambda: client(server).pods(HERE))
    assert problem.kind == kind and word in str(problem)
    assert len(server.asked) == 1


def test_a_busy_server_is_asked_again_when_it_likes_and_within_reason(server):
    for text, seconds in (("7", 7.0), ("900", 60.0), ("soon", 0.0)):
        server.answer_with = (429, {"Retry-After": text}, b"{}")
        assert refused(lambda: client(server).pods(HERE)).retry_after == seconds


def test_a_server_that_does_not_answer_is_given_up_on(server):
    server.delay = 30
    began = time.monotonic()
    problem = refused(lambda: client(server, timeout=0.3).pods(HERE))
    assert problem.kind == NO_ANSWER and "0.3 s" in str(problem)
    assert time.monotonic() - began < 5


def test_a_server_that_drips_is_given_up_on(server):
    """Each byte begins a socket's own time-out anew."""
    with client(server, timeout=0.5, watch_seconds=0.5).watch(HERE, "100") as changes:
        dripping = threading.Event()

        def drip() -> None:
            while not dripping.wait(0.05):
                server.send(b" ")

        worker = threading.Thread(target=drip, daemon=True)
        worker.start()
        began = time.monotonic()
        assert list(changes) == []
        assert 0.5 < time.monotonic() - began < 5
        dripping.set()
        worker.join(5)


def test_a_server_that_is_not_there_is_named(server):
    path = server.kubeconfig()
    server.close()
    problem = refused(lambda: KubeClient(Source(str(path))).pods(HERE))
    assert problem.kind == NO_ANSWER and server.url in str(problem)


def test_a_watch_tells_changes_and_bookmarks_in_their_order(server):
    server.put(pod("old"))
    with client(server).watch(HERE, str(server.version)) as changes:
        wait_for_stream(server)
        server.put(pod("new"))
        server.put(pod("new", phase="Succeeded"))
        server.bookmark()
        server.delete("new")
        server.cut()
        seen = [(one.type, one.version, one.pod and one.pod.phase) for one in changes]
    assert seen == [
        ("ADDED", "102", "Running"),
        ("MODIFIED", "103", "Succeeded"),
        ("BOOKMARK", "104", None),
        ("DELETED", "105", "Succeeded"),
    ]
    assert "allowWatchBookmarks=true" in server.asked[0]
    assert "fieldSelector=spec.nodeName%3Dnode1" in server.asked[0]


def test_half_a_line_is_not_believed(server):
    with client(server).watch(HERE, "100") as changes:
        wait_for_stream(server)
        server.put(pod("whole"))
        server.send(b'{"type":"DELETED","object":{"metadata":{"resourceVersion":"200"}}}')
        server.cut()
        assert [one.type for one in changes] == ["ADDED"]


def test_events_that_come_in_pieces_are_put_together(server):
    event = json.dumps({"type": "ADDED", "object": _versioned(pod("slow"))}).encode() + b"\n"
    with client(server).watch(HERE, "100") as changes:
        wait_for_stream(server)
        for at in range(0, len(event), 7):
            server.send(event[at : at + 7])
        server.cut()
        assert [one.pod.name for one in changes] == ["slow"]


@pytest.mark.parametrize("by_event", [False, True])
def test_a_watch_from_too_long_ago_is_gone(server, by_event):
    server.oldest, server.gone_by_event = 105, by_event

    def watch() -> None:
        with client(server).watch(HERE, "101") as changes:
            list(changes)

    assert refused(watch).kind == GONE


def test_an_error_that_is_not_gone_is_an_error(server):
    status = {"kind": "Status", "code": 500, "message": "etcd is away"}
    with client(server).watch(HERE, "100") as changes:
        wait_for_stream(server)
        server.send(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
        problem = refused(lambda: list(changes))
    assert problem.kind == REFUSED and "etcd is away" in str(problem)


@pytest.mark.parametrize(
    "line",
    [b"nonsense", b"[]", b'{"type":"ADDED"}', b'{"type":"ADDED","object":{}}', b'{"type":"NEW"}'],
)
def test_an_event_that_is_none_is_an_error(server, line):
    with client(server).watch(HERE, "100") as changes:
        wait_for_stream(server)
        server.send(line + b"\n")
        assert refused(lambda: list(changes)).kind == REFUSED


def test_a_line_without_an_end_does_not_fill_the_memory(server, monkeypatch):
    monkeypatch.setattr(kube, "LARGEST_EVENT", 10_000)
    with client(server).watch(HERE, "100") as changes:
        wait_for_stream(server)
        for _ in range(20):
            server.send(b"x" * 1000)
        assert "more than" in str(refused(lambda: list(changes)))


def test_silence_ends_a_watch_and_is_no_error(server):
    began = time.monotonic()
    with client(server, silence=0.3).watch(HERE, "100") as changes:
        assert list(changes) == []
    assert 0.2 < time.monotonic() - began < 5


def test_cancel_ends_a_watch_at_once(server):
    asked = client(server)
    with asked.watch(HERE, "100") as changes:
        wait_for_stream(server)
        threading.Timer(0.2, asked.cancel).start()
        began = time.monotonic()
        assert refused(lambda: list(changes)).kind == STOPPED
        assert time.monotonic() - began < 5
    server.put(pod("later"))
    assert len(asked.pods(HERE).pods) == 1


def test_nobody_but_the_clusters_own_ca_is_trusted(server, tmp_path):
    other = Authority(tmp_path / "other", "other").pem
    path = server.kubeconfig(**{"cluster_certificate-authority-data": _data(other)})
    problem = refused(lambda: KubeClient(Source(str(path))).pods(HERE))
    assert problem.kind == NO_ANSWER and "not trusted" in str(problem)
    assert not server.asked


def test_a_certificate_for_another_name_is_not_trusted_unless_that_name_is_meant(server):
    for name, trusted in (("127.0.0.1", True), ("other.invalid", False)):
        asked = KubeClient(Source(str(server.kubeconfig(cluster_tls_server_name=name))))
        if trusted:
            assert asked.pods(HERE).pods == ()
        else:
            assert "not trusted" in str(refused(lambda: asked.pods(HERE)))  # noqa: B023


@pytest.mark.parametrize("inline", [True, False])
def test_a_client_certificate_logs_in_as_data_or_as_files(server, inline):
    certificate, key = server.authority.issue("headcni")
    if inline:
        given = {
            "client-certificate-data": _data(certificate.read_bytes()),
            "client-key-data": _data(key.read_bytes()),
        }
    else:  # relative to the kubeconfig
        given = {"client-certificate": certificate.name, "client-key": key.name}
    path = server.kubeconfig(token="", **given)
    before = set(os.listdir(server.folder))
    assert KubeClient(Source(str(path))).pods(HERE).pods == ()
    assert server.client_names == ["headcni"]
    assert set(os.listdir(server.folder)) == before
    assert "PRIVATE" not in repr(read_kubeconfig(str(path)))


def test_a_token_file_is_read_for_each_question(server, tmp_path):
    token = tmp_path / "token"
    token.write_text("old\n")
    asked = KubeClient(Source(str(server.kubeconfig(token="", tokenFile=str(token)))))
    assert refused(lambda: asked.pods(HERE)).kind == DENIED
    token.write_text(TOKEN + "\n")
    assert asked.pods(HERE).pods == ()


def test_a_new_kubeconfig_counts_at_once(server):
    path = server.kubeconfig(token="old")
    asked = KubeClient(Source(str(path)))
    assert refused(lambda: asked.pods(HERE)).kind == DENIED
    server.kubeconfig()
    assert asked.pods(HERE).pods == ()


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_kubeconfig_that_others_may_change_is_refused(server, mode):
    path = server.kubeconfig()
    path.chmod(mode)
    problem = refused(lambda: KubeClient(Source(str(path))).pods(HERE))
    assert problem.kind == CONFIG and f"its mode {mode:04o}: give it to root" in str(problem)


def test_a_kubeconfig_of_another_user_is_refused(server, monkeypatch):
    path = server.kubeconfig()
    found = os.stat(path)
    theirs = os.stat_result((*found[:4], 4711, *found[5:10]))
    with pytest.raises(KubeError, match="its owner is 4711"):
        access.refuse_others(str(path), theirs)


def test_a_kubeconfig_that_others_may_read_is_warned_about_and_counts(server, monkeypatch):
    said = []
    monkeypatch.setattr(access.log, "warn", lambda text, **more: said.append((text, more["mode"])))
    path = server.kubeconfig()
    path.chmod(0o644)
    asked = KubeClient(Source(str(path)))
    assert [asked.pods(HERE).pods, asked.pods(HERE).pods] == [(), ()]
    assert said == [("others may read the kubeconfig: give it mode 0600", "0644")]
    path.chmod(0o646)
    assert refused(lambda: asked.pods(HERE)).kind == CONFIG


def test_the_service_account_of_a_pod(server, tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "ca.crt").write_bytes(server.authority.pem)
    env = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.port)}
    assert KubeClient(lambda: in_cluster(env, str(tmp_path))).pods(HERE).pods == ()
    assert in_cluster({"KUBERNETES_SERVICE_HOST": "fd00::1"}).server == "https://[fd00::1]:443"
    assert not Source("", {}).given and Source("", env).given
    assert refused(lambda: Source("", {})()).kind == CONFIG


def test_an_address_of_the_service_that_is_none_is_named():
    env = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "https"}
    problem = refused(lambda: in_cluster(env))
    assert problem.kind == CONFIG and "KUBERNETES_SERVICE_PORT" in str(problem)


def test_a_cluster_behind_a_path_is_asked_there(server):
    path = server.kubeconfig(cluster_server=f"{server.url}/k8s/clusters/c-1/")
    with pytest.raises(KubeError):
        KubeClient(Source(str(path))).pods(HERE)
    assert server.asked[0].startswith("/k8s/clusters/c-1/api/v1/pods?")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cluster_server": "http://127.0.0.1:1"}, "clusters[].cluster.server is 'http://"),
        ({"cluster_server": "nonsense"}, "an https:// URL"),
        ({"cluster_server": "https://127.0.0.1:99999"}, "an https:// URL"),
        ({"cluster_server": "https://[fd00::1"}, "an https:// URL"),
        ({"cluster_insecure-skip-tls-verify": True}, "insecure-skip-tls-verify"),
        ({"cluster_proxy-url": "http://proxy.invalid"}, "proxy-url"),
        ({"exec": {"command": "login"}}, "users[].user.exec"),
        ({"auth-provider": {"name": "oidc"}}, "auth-provider"),
        ({"username": "me", "password": "hidden-word"}, "users[].user.username"),
        ({"token": ""}, "a client certificate, a token or a tokenFile"),
        ({"token": 7}, "token"),
        ({"client-certificate": "/x.crt"}, "together with its key"),
        ({"client-certificate": "/x.crt", "client-key-data": "LS0tLS1CRUdJTiBY"}, "both as data"),
        ({"cluster_certificate-authority-data": "?"}, "PEM in base64"),
    ],
)
def test_a_kubeconfig_that_is_wrong_is_told_by_its_field(server, changes, words):
    path = server.kubeconfig(**changes)
    problem = refused(lambda: read_kubeconfig(str(path)))
    assert problem.kind == CONFIG and words in str(problem) and str(path) in str(problem)
    assert "hidden-word" not in str(problem)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "current-context"),
        ("- a\n- b\n", "current-context"),
        ("current-context: lost\ncontexts: []\n", "'lost'; expected a name that is under contexts"),
        ("a: [", "not valid YAML"),
        ("\x00", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_kubeconfig_is_refused(tmp_path, text, words):
    path = tmp_path / "config"
    path.write_text(text)
    assert words in str(refused(lambda: read_kubeconfig(str(path)))).replace(":", ";")


def test_a_kubeconfig_that_cannot_be_read_is_named(tmp_path):
    problem = refused(Source(str(tmp_path / "none")))
    assert problem.kind == CONFIG and "daemon.kubeconfig" in str(problem)


@pytest.mark.parametrize("broken", ["certificate", "ca", "token"])
def test_certificates_and_tokens_that_are_none_are_a_matter_of_configuration(tmp_path, broken):
    (tmp_path / "bad").write_text("nonsense\nmore")
    given = {
        "certificate": {"certificate_file": str(tmp_path / "bad"), "token": "t"},
        "ca": {"ca_file": str(tmp_path / "missing"), "token": "t"},
        "token": {"token_file": str(tmp_path / "bad")},
    }[broken]
    access = Access("https://127.0.0.1:1", **given)
    assert refused(lambda: KubeClient(lambda: access).pods(HERE)).kind == CONFIG


def test_importing_it_costs_little_beside_what_the_daemon_has():
    """The daemon has http.client, ssl and json anyway; YAML waits until a kubeconfig is read."""
    code = (
        "import sys; import headcni.mesh.approvals, headcni.daemon.kubernetes;"
        " before = set(sys.modules);"
        "import headcni.daemon.kubernetes.client; print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(kube.__file__).parents[3])},
    )
    found = json.loads(done.stdout.replace("'", '"'))
    ours = ("access", "client", "errors", "objects")
    assert found == [
        *(f"headcni.daemon.kubernetes.{name}" for name in ours),
        "headcni.shared.bearer_token",
    ]


def wait_for_stream(server: KubeServer, count: int = 1) -> None:
    until = time.monotonic() + 10
    while len(server.streams) < count:
        assert time.monotonic() < until
        time.sleep(0.01)


def _versioned(made: dict) -> dict:
    made["metadata"]["resourceVersion"] = "150"
    return made


def _data(content: bytes) -> str:
    return base64.b64encode(content).decode()
