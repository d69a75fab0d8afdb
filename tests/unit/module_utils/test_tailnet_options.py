"""A node is joined just as it is asked for only if tailscale_join has nothing to do, nor to say."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import tailnet_options
from ansible_collections.headcni.mesh.plugins.module_utils.shared.localapi import Status
from ansible_collections.headcni.mesh.plugins.module_utils.tailnet import Standing

SERVER = "https://headscale.example.org"
RUNNING = {
    "Version": "1.102.5",
    "BackendState": "Running",
    "HaveNodeKey": True,
    "Self": {"PublicKey": "nodekey:01", "Online": True},
}


@pytest.fixture
def key(monkeypatch):
    """What is told of a node that stands so."""

    def asked(changes: dict[str, Any], **options: Any) -> str:
        prefs = {"ControlURL": SERVER, "WantRunning": True, "RouteAll": True}
        now = Standing(Status.of({**RUNNING, **changes}), prefs)
        monkeypatch.setattr(tailnet_options, "read", lambda *_, **__: now)
        return tailnet_options.joined_key({"login_server": SERVER, **options})

    return asked


def test_its_key_is_told(key):
    assert key({}) == "nodekey:01"
    assert key({}, accept_routes="yes", timeout="60", hostname=None, tags=None) == "nodekey:01"


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"BackendState": "Stopped"}, {}),
        ({"BackendState": "NeedsLogin", "HaveNodeKey": False}, {}),
        # It remembers its network, and may have been forgotten at the server.
        ({"Self": {"PublicKey": "nodekey:01", "Online": False}}, {}),
        ({}, {"accept_routes": False}),
        ({}, {"hostname": "other"}),
        ({}, {"force_reauth": True}),
        ({}, {"login_server": "https://other.example.org"}),
        # What its module refuses, or warns of.
        ({}, {"login_server": "headscale"}),
        ({}, {"login_server": "http://headscale.example.org"}),
        ({}, {"timeout": 0}),
        ({}, {"timeout": "soon"}),
        ({}, {"advertise_routes": ["all"]}),
        ({}, {"no_such_option": True}),
    ],
)
def test_nothing_is_told_of_one_for_which_there_is_something_to_do(key, changes, options):
    assert key(changes, **options) == ""


@pytest.mark.parametrize(
    ("have_key", "here", "asked", "said"),
    [
        (True, SERVER, SERVER, ""),
        (True, f"{SERVER}:443/", SERVER, ""),
        (False, "https://other.example.org", SERVER, ""),  # it is nobody's yet
        (True, "https://other.example.org", SERVER, "https://other.example.org"),
        (True, "", SERVER, "https://controlplane.tailscale.com"),
        (True, "https://other.example.org", "", ""),
    ],
)
def test_a_node_in_another_tailnet_is_told_with_its_server(
    monkeypatch, have_key, here, asked, said
):
    now = Standing(Status.of({**RUNNING, "HaveNodeKey": have_key}), {"ControlURL": here})
    monkeypatch.setattr(tailnet_options, "read", lambda *_, **__: now)
    assert tailnet_options.joined_elsewhere({"login_server": asked}) == said


def test_nor_of_one_whose_tailscaled_does_not_run(tmp_path):
    given = {"socket": str(tmp_path / "none"), "login_server": SERVER}
    assert tailnet_options.joined_key(given) == tailnet_options.joined_elsewhere(given) == ""


@pytest.mark.parametrize(
    ("changes", "here", "tags"),
    [
        ({"Tags": ["tag:a", "tag:b"]}, SERVER, ["tag:a", "tag:b"]),
        ({}, SERVER, []),
        ({"Tags": ["tag:a"]}, "https://other.example.org", None),
    ],
)
def test_the_tags_of_a_joined_node_are_told(monkeypatch, changes, here, tags):
    found = {**RUNNING, "Self": {**RUNNING["Self"], **changes}}
    now = Standing(Status.of(found), {"ControlURL": here})
    monkeypatch.setattr(tailnet_options, "read", lambda *_, **__: now)
    assert tailnet_options.joined_tags({"login_server": SERVER}) == {"joined_tags": tags}


@pytest.mark.parametrize(
    ("state", "have_key", "told"),
    [
        ("Stopped", True, {}),
        ("Starting", True, {}),
        ("NeedsLogin", False, {"joined_tags": None}),
    ],
)
def test_the_tags_of_a_joined_node_are_not_known_while_it_is_not_running(
    monkeypatch, state, have_key, told
):
    found = {**RUNNING, "BackendState": state, "HaveNodeKey": have_key}
    now = Standing(Status.of(found), {"ControlURL": SERVER})
    monkeypatch.setattr(tailnet_options, "read", lambda *_, **__: now)
    assert tailnet_options.joined_tags({"login_server": SERVER}) == told


def test_a_node_without_a_tailscaled_has_yet_to_log_in(tmp_path):
    given = {"socket": str(tmp_path / "none"), "login_server": SERVER}
    assert tailnet_options.joined_tags(given) == {"joined_tags": None}
