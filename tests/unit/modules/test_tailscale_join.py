"""tailscale_join: what is wrong with its options is told before tailscaled is asked."""

from __future__ import annotations

import pytest
from ansible_module import Failed, run


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"login_server": "headscale"}, "login_server: 'headscale' is no address"),
        ({"login_server": "https://x/y"}, "has more than a scheme, a host and a port"),
        ({"hostname": "a b"}, "hostname: 'a b' is no host name"),
        ({"tags": ["node"]}, "tags: 'node' is no tag: expected tag:NAME"),
        ({"advertise_routes": ["10.244.1.1/24"]}, "host bits set: expected 10.244.1.0/24"),
        ({"advertise_routes": ["::/0"]}, "would make this node an exit node"),
        ({"advertise_routes": ["all"]}, "'all' is no CIDR"),
        ({"routes_state": "present"}, "value of routes_state must be one of"),
        ({"timeout": 0}, "timeout: 0 is too short"),
        ({"auth_key": "file:/etc/key"}, "auth_key: it starts with file:"),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_the_cure(tmp_path, options, said):
    with pytest.raises(Failed) as failed:
        run("tailscale_join", socket=str(tmp_path / "none"), **options)
    assert said in str(failed.value)


def test_a_wrong_key_is_not_shown(tmp_path):
    with pytest.raises(Failed, match="there is a blank in it") as failed:
        run("tailscale_join", socket=str(tmp_path / "none"), auth_key="hskey-auth-a hskey-auth-b")
    assert "hskey" not in str(failed.value.result)


def test_without_tailscaled_it_fails_and_only_a_dry_run_predicts(tmp_path):
    options = {"socket": str(tmp_path / "none"), "hostname": "alpha"}
    with pytest.raises(Failed, match=r"none is not there: start tailscaled"):
        run("tailscale_join", **options)
    predicted = run("tailscale_join", True, **options)
    assert predicted["changed"] is True
    assert predicted["diff"]["after"]["Hostname"] == "alpha"


def test_plain_http_is_warned_of(tmp_path, capsys):
    options = {"socket": str(tmp_path / "none"), "login_server": "http://headscale.example.org"}
    result = run("tailscale_join", True, **options)
    # Where another test has loaded the controller's side of Ansible, that one shows it at once.
    said = str(result.get("warnings", "")) + capsys.readouterr().err
    assert "insist on https" in " ".join(said.split())


def test_a_login_can_be_put_off_until_there_is_a_key(tmp_path):
    options = {"socket": str(tmp_path / "none"), "hostname": "alpha", "login": "later"}
    for check_mode in (False, True):
        result = run("tailscale_join", check_mode, **options)
        assert (result["changed"], result["needs_login"], result["node_key"]) == (False, True, "")
        assert result["diff"] == result["prefs_changed"] == {}
