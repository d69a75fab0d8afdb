"""tailscale_info: it has an answer for every node."""

from __future__ import annotations

import pytest
from ansible_module import Failed, run


@pytest.mark.parametrize("check", [False, True])
def test_it_answers_where_nothing_is_installed(tmp_path, check):
    found = run("tailscale_info", check, socket=str(tmp_path / "none"), login_server="https://x")
    assert (found["changed"], found["needs_login"], found["running_version"]) == (False, True, "")
    assert found["login_reason"].endswith("say where its socket is (socket)")
    assert (found["node_key"], found["tailnet_ips"], found["prefs"], found["peers"]) == (
        "",
        [],
        {},
        0,
    )


def test_a_wrong_address_is_refused(tmp_path):
    with pytest.raises(Failed, match="login_server: 'x' is no address"):
        run("tailscale_info", socket=str(tmp_path / "none"), login_server="x")
