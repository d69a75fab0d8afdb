"""tailscaled's LocalAPI: what is asked of it, and what its answers come to."""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils.shared.localapi import (
    LocalAPI,
    LocalAPIError,
    Status,
    short_version,
)


class _Stub(http.server.BaseHTTPRequestHandler):
    def _answer(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        asked = (self.command, self.path, self.headers["Host"], self.rfile.read(size).decode())
        self.server.asked.append(asked)  # type: ignore[attr-defined]
        code, body = self.server.answer  # type: ignore[attr-defined]
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PATCH = do_POST = do_PUT = do_DELETE = _answer

    def address_string(self) -> str:
        return "stub"

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def saying(folder: Path, code: int, body: bytes) -> Iterator[tuple[LocalAPI, list[Any]]]:
    with socketserver.ThreadingUnixStreamServer(str(folder / "s"), _Stub) as server:
        server.answer, server.asked = (code, body), []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield LocalAPI(str(folder / "s"), timeout=2), server.asked  # type: ignore[attr-defined]
        finally:
            server.shutdown()


def test_prefs_are_changed_by_masked_pairs_and_no_others(tmp_path):
    with saying(tmp_path, 200, b'{"Config": {"PrivateNodeKey": "x"}, "RouteAll": true}') as (
        api,
        to,
    ):
        assert api.edit_prefs({"RouteAll": True, "AdvertiseRoutes": []}) == {"RouteAll": True}
    method, path, host, body = to[0]
    assert (method, path, host) == ("PATCH", "/localapi/v0/prefs", "local-tailscaled.sock")
    assert json.loads(body) == {
        "RouteAll": True,
        "RouteAllSet": True,
        "AdvertiseRoutes": [],
        "AdvertiseRoutesSet": True,
    }


def test_the_key_travels_in_a_body(tmp_path):
    with saying(tmp_path, 204, b"") as (api, to):
        api.start({"WantRunning": True}, "secret")
        api.log_in()
    assert [(one[0], one[1]) for one in to] == [
        ("POST", "/localapi/v0/start"),
        ("POST", "/localapi/v0/login-interactive"),
    ]
    assert json.loads(to[0][3]) == {"UpdatePrefs": {"WantRunning": True}, "AuthKey": "secret"}


def test_profiles_are_stepped_into_and_removed(tmp_path):
    with saying(tmp_path, 200, b'{"ID": "1a/b"}') as (api, to):
        assert api.current_profile() == "1a/b"
        api.new_profile()
        api.switch_profile("1a/b")
        api.delete_profile("1a/b")
    assert [(one[0], one[1].removeprefix("/localapi/v0/")) for one in to] == [
        ("GET", "profiles/current"),
        ("PUT", "profiles/"),
        ("POST", "profiles/1a%2Fb"),
        ("DELETE", "profiles/1a%2Fb"),
    ]


@pytest.mark.parametrize(
    ("code", "body", "kind", "said"),
    [
        (403, b"prefs access denied", "denied", "become root"),
        (404, b"404 page not found", "unknown", "does not know GET status: upgrade it"),
        (400, b'{"Error": "bad route"}', "refused", "bad route (HTTP 400)"),
        (500, b"out of order", "refused", "out of order (HTTP 500)"),
        (200, b"<html>", "refused", "is this tailscaled's socket?"),
        (200, b"[]", "refused", "is not tailscaled's"),
    ],
)
def test_what_tailscaled_refuses_is_said_in_a_sentence(tmp_path, code, body, kind, said):
    with saying(tmp_path, code, body) as (api, _), pytest.raises(LocalAPIError) as caught:
        api.status()
    assert caught.value.kind == kind
    assert said in str(caught.value)


def test_a_socket_that_is_not_there_or_that_nobody_serves_is_told_apart(tmp_path):
    with pytest.raises(LocalAPIError, match="is not there") as caught:
        LocalAPI(str(tmp_path / "none")).status()
    assert caught.value.kind == "no-socket"
    with saying(tmp_path, 200, b"{}"):
        pass
    with pytest.raises(LocalAPIError, match="nobody answers") as caught:
        LocalAPI(str(tmp_path / "s")).status()
    assert caught.value.kind == "no-answer"


def test_one_that_never_answers_is_given_up(tmp_path):
    silent = socketserver.UnixStreamServer(str(tmp_path / "s"), socketserver.BaseRequestHandler)
    with silent, pytest.raises(LocalAPIError, match="did not answer in time"):
        LocalAPI(str(tmp_path / "s"), timeout=0.1).status()


def test_of_the_status_is_kept_what_provisioning_needs():
    found = Status.of(
        {
            "Version": "1.102.5-tabc-gdef",
            "BackendState": "Running",
            "HaveNodeKey": True,
            "AuthURL": "",
            "TailscaleIPs": ["100.64.0.1"],
            "Self": {
                "PublicKey": "nodekey:0a00",
                "DNSName": "node1.mesh.lab.",
                "Tags": ["tag:node"],
                "PrimaryRoutes": ["10.244.1.0/24"],
                "Online": True,
            },
            "Peer": {"a": {"Online": True}, "b": {}},
        }
    )
    assert (found.version, found.state, found.node_key) == ("1.102.5", "Running", "nodekey:0a00")
    assert (found.name, found.tags, found.served) == (
        "node1.mesh.lab",
        ("tag:node",),
        ("10.244.1.0/24",),
    )
    assert (found.peers, found.peers_online, found.online, found.asked) == (2, 1, True, False)


def test_a_node_key_of_zeros_is_none():
    found = Status.of({"Self": {"PublicKey": "nodekey:" + "0" * 64}})
    assert (found.node_key, found.have_node_key, found.state) == ("", False, "NoState")


@pytest.mark.parametrize(
    ("text", "version"),
    [("1.102.5\n", "1.102.5"), ("1.5.0-t0-g1", "1.5.0"), ("unstable", ""), ("", ""), ("1", "")],
)
def test_versions_are_read_without_what_a_build_adds(text, version):
    assert short_version(text) == version


def test_a_ping_names_the_peer_and_returns_which_way_the_answer_came(tmp_path):
    with saying(tmp_path, 200, b'{"Endpoint": "192.168.7.2:41641"}') as (api, to):
        assert api.ping("fd7a:115c:a1e0::1") == {"Endpoint": "192.168.7.2:41641"}
    assert to[0][:2] == ("POST", "/localapi/v0/ping?ip=fd7a%3A115c%3Aa1e0%3A%3A1&type=disco")
