"""Bad input, one line of a table each: one clear error, and nothing written."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from ansible_module import Failed
from headscale_server import free_port
from stub_server import says, stub_server

from tests.modules.conftest import At

ROUTE = [{"name": "node1", "routes": ["10.244.1.0/24"]}]
TAKEN = "10.99.0.0/16"
CLIENT = "ansible_collections.headcni.mesh.plugins.module_utils.headscale"


@pytest.fixture(scope="module")
def places(headscale_session) -> Iterator[dict[str, str]]:
    """Addresses where something else is than a Headscale that takes the key."""
    headscale_session.forget()
    expired = headscale_session.make_key("1s")
    good_until = time.monotonic() + 1.5
    headscale_session.add_node("node1")
    headscale_session.add_node("twin")
    headscale_session.add_node("twin")
    headscale_session.approve(headscale_session.add_node("node2"), TAKEN)
    time.sleep(max(0.0, good_until - time.monotonic()))
    with (
        stub_server() as page,
        stub_server() as away,
        stub_server() as ours,
        stub_server() as next_version,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        page.answers = [says(200, "<html><title>Log in</title></html>", "text/html")]
        away.answers = [says(301, "", "text/html", Location="https://headscale.example.org/")]
        ours.answers = [says(502, "<html>Bad Gateway</html>", "text/html")]
        locked = {"title": "Internal Server Error", "status": 500, "detail": "listing nodes"}
        locked["errors"] = [{"message": "database is locked"}]
        next_version.answers = [says(500, locked, "application/problem+json")]
        yield {
            "closed": f"http://127.0.0.1:{free_port()}",
            "silent": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "page": page.url,
            "away": away.url,
            "gateway": ours.url,
            "next_version": next_version.url,
            "tls": headscale_session.url.replace("http", "https"),
            "expired": expired,
        }


# The module, its options ({name} stands for what is above), and what the one error says.
TABLE: list[tuple[str, dict[str, Any], str]] = [
    # the server and the key
    ("info", {"url": "headscale.example.org"}, "url: 'headscale.example.org', expected http://"),
    ("info", {"url": "ssh://headscale.example.org"}, "url: 'ssh:.*, expected http:// or https://"),
    ("info", {"url": "http://h/api/v1"}, "url: 'http://h/api/v1', expected the server's own addr"),
    ("info", {"url": "http://a:b@h"}, "url: 'http://…@h', expected no user or password"),
    ("info", {"url": "{closed}"}, "url: .* cannot be reached: Connection refused; see that"),
    ("info", {"url": "http://nowhere.invalid"}, r"url: http://nowhere\.invalid cannot be reached"),
    ("info", {"url": "{silent}", "timeout": 0.3}, r"url: .* did not answer in 0\.3 s; see that"),
    ("info", {"url": "{page}"}, "url: the answer of .* is not Headscale's: a web page; give the"),
    ("info", {"url": "{away}"}, r"url: .* sends us to https://headscale\.example\.org/ \(HTTP 301"),
    ("info", {"url": "{gateway}"}, r"said: a web page \(GET /api/v1/node, HTTP 502\)"),
    ("info", {"url": "{next_version}"}, r"listing nodes: database is locked \(GET .* 500\); c"),
    ("info", {"url": "{tls}"}, r"url: .* does not speak TLS as it should: is it http\?"),
    ("info", {"api_key": "hskey-api-000000000000-wrong"}, r"api_key: .* not accept it \(HTTP 401"),
    ("info", {"api_key": "{expired}"}, r"api_key: .* does not accept it .* may be expired"),
    ("info", {"api_key": "two words"}, "api_key: not one word of plain characters, expected what"),
    ("info", {"api_key": ""}, "api_key: empty, expected what `headscale apikeys create` printed"),
    ("info", {"timeout": -1}, "timeout: -1, expected seconds above 0"),
    ("info", {"url": "https://h", "ca_file": "/nowhere.pem"}, "ca_file: '/nowhere.pem', expected"),
    ("info", {"ca_file": "/etc/hosts"}, "ca_file: given, and url is .*: expected https://"),
    ("info", {"gather": ["everything"]}, "value of gather must be one or more of"),
    # users
    ("user", {"name": "x"}, "name: 'x', expected at least 2 characters"),
    ("user", {"name": "1st"}, "name: '1st', expected .* a letter"),
    ("user", {"name": "a/b"}, "name: 'a/b', expected"),
    ("user", {"name": "headcni", "state": "absent"}, "name: user 'headcni' owns 4 nodes"),
    ("user", {"name": "twin", "renamed_from": "headcni", "state": "gone"}, "value of state must"),
    # keys
    ("preauth_key", {"user": "nobody"}, "user: Headscale has no user 'nobody': make it with"),
    ("preauth_key", {}, "user: missing, expected a user or tags"),
    ("preauth_key", {"user": "headcni", "tags": ["k8s"]}, "tags: 'k8s', expected tag: and then"),
    (
        "preauth_key",
        {"user": "headcni", "expiration_minutes": 0},
        "expiration_minutes: 0, expected",
    ),
    ("preauth_key", {"state": "expired"}, "state is expired but any of the following are missing"),
    ("preauth_key", {"state": "expired", "prefix": "hs"}, "prefix: 'hs', expected at least 8"),
    # nodes
    ("node", {"new_name": "a"}, "one of the following is required: id, node_key, name"),
    ("node", {"name": "nobody", "tags": []}, "name: Headscale has no node 'nobody'; see that"),
    ("node", {"name": "twin"}, r"name: 'twin' is ambiguous: id \d+ .*, id \d+ .*; give the id"),
    ("node", {"name": "node1", "new_name": "A_b"}, "new_name: 'A_b', expected a DNS label"),
    ("node", {"name": "node1", "new_name": "node2"}, "new_name: 'node2' is the name of node node2"),
    ("node", {"name": "node1", "tags": ["tag:Big"]}, "tags: 'tag:Big', expected tag: and then"),
    # routes
    (
        "routes",
        {"nodes": [{"name": "node1", "routes": ["10.1.2.3/24"]}]},
        "did you mean 10.1.2.0/2",
    ),
    (
        "routes",
        {"nodes": [{"name": "node1", "routes": ["10.1.0.0/40"]}]},
        "expected a CIDR such as",
    ),
    ("routes", {"nodes": [{"name": "node1", "routes": ["::/0"]}]}, "exit node, which is not done"),
    ("routes", {"nodes": [{"routes": []}]}, r"nodes\[0\] .*: give one of node_key, id and name"),
    ("routes", {"nodes": [{"name": "ghost", "routes": []}]}, "Headscale does not know ghost; see"),
    ("routes", {"nodes": [{"name": "twin", "routes": []}]}, "name: 'twin' is ambiguous"),
    (
        "routes",
        {"nodes": [{"name": "node1", "routes": ["10.99.3.0/24"]}]},
        r"10\.99\.3\.0/24 for node1 overlaps 10\.99\.0\.0/16 of node node2 \(id \d+\), offline",
    ),
    (
        "routes",
        {"nodes": [*ROUTE, {"name": "node2", "routes": ["10.244.0.0/16"]}]},
        r"10\.244\.1\.0/24 for node1 overlaps 10\.244\.0\.0/16 of node2|for node2 overlaps",
    ),
    ("routes", {"nodes": ROUTE, "purge": True, "state": "absent"}, "purge: true, and state is abs"),
    ("routes", {"nodes": ROUTE, "wait_served": -1}, "wait_served: -1, expected seconds from 0"),
    # policy
    (
        "policy",
        {"routes": {"10.244.0.1/16": ["tag:k8s"]}},
        "routes: '10.244.0.1/16', expected a CI",
    ),
    ("policy", {"routes": {"10.244.0.0/16": []}}, r"routes\[10\.244\.0\.0/16\]: empty, expected"),
    ("policy", {"tag_owners": {"k8s": []}}, "tag_owners: 'k8s', expected tag: and then"),
    ("policy", {"routes": {"10.0.0.0/8": ["group:none"]}}, "said: .*group:none"),
]


@pytest.mark.parametrize(
    ("module", "given", "said"), TABLE, ids=[f"{n:02} {row[0]}" for n, row in enumerate(TABLE)]
)
def test_bad_input_is_one_clear_error(places, headscale_session, module, given, said, monkeypatch):
    monkeypatch.setattr(f"{CLIENT}.PAUSES", ())
    filled = {
        key: value.format(**places) if isinstance(value, str) else value
        for key, value in given.items()
    }
    with pytest.raises(Failed, match=said) as failed:
        At(headscale_session)(module, **filled)
    result = failed.value.result
    assert "\n" not in result["msg"] and len(result["msg"]) < 700
    assert not result.get("changed")
    assert "exception" not in result
    for secret in (headscale_session.key, places["expired"]):
        assert secret not in json.dumps(result)


def test_nothing_was_written_by_any_of_them(places, headscale_session):
    names = {node["givenName"]: node for node in headscale_session.nodes.values()}
    assert len(names) == 4
    assert {n: node["approvedRoutes"] for n, node in names.items() if node["approvedRoutes"]} == {
        "node2": [TAKEN]
    }
    assert list(headscale_session.users) == ["headcni"]


def test_a_server_that_goes_away_in_the_middle_is_not_asked_for_each_node(at, headscale):
    """The first write gets no answer: the others are not tried, and all are named."""
    for number in (1, 2, 3):
        headscale.add_node(f"node{number}")
    nodes = [{"name": f"node{n}", "routes": [f"10.244.{n}.0/24"]} for n in (1, 2, 3)]
    listing = headscale.ask("GET", "node")
    with stub_server() as stub:
        stub.paths["GET /api/v1/node"] = says(200, listing)
        hang = threading.Event()
        stub.answers = [lambda request: hang.wait(3)]
        with pytest.raises(
            Failed,
            match=r"3 could not be written, 0 were: node1: url: .* did not answer in 0\.5 s.*; "
            r"node2: not tried any more; node3: not tried any more",
        ):
            at("routes", url=stub.url, timeout=0.5, nodes=nodes)
        hang.set()
        assert [line for line in stub.requests if line.startswith("POST")] == [
            f"POST /api/v1/node/{headscale.nodes['node1']['id']}/approve_routes"
        ]
