"""headcni_config: checked before it is written, and the same again changes nothing."""

from __future__ import annotations

import os
import sysconfig

import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import node, node_config
from ansible_module import Failed, run
from lab_command import CHECKOUT

CONFIG = {
    "tailscale": {"mode": "host"},
    "network": {"podCIDR": {"nodeLocal": "10.1.2.0/24", "base": "10.1.0.0/16"}},
}


@pytest.fixture
def where(tmp_path):
    release = tmp_path / "release"
    release.mkdir()
    (release / "headcni").symlink_to(CHECKOUT / "plugins/cni/headcni")
    (release / "vendor").symlink_to(sysconfig.get_path("purelib"))
    return {"path": str(tmp_path / "etc/config.yaml"), "release": str(release)}


def configure(where, config=CONFIG, check=False, **more):
    return run("headcni_config", check, config=config, **where, **more)


def test_check_mode_foretells_it_then_it_is_done_and_then_nothing_is_left(where, tmp_path):
    foretold = configure(where, check=True)
    assert not (tmp_path / "etc").exists()
    done = configure(where)
    again = configure(where)
    assert (foretold["changed"], done["changed"], again["changed"]) == (True, True, False)
    assert foretold["diff"] == done["diff"]
    assert again["diff"]["before"] == again["diff"]["after"]
    assert done["pod_cidrs"] == ["10.1.2.0/24"]
    assert (done["pod_cidr_source"], done["pod_cidr_guessed"]) == ("config", False)
    assert done["cluster_cidrs"] == ["10.1.0.0/16"]
    assert done["validated"] is True


def test_it_tells_a_reload_from_a_restart(where):
    configure(where)
    changed = configure(where, {**CONFIG, "logging": {"level": "DEBUG"}})
    assert (changed["needs_reload"], changed["needs_restart"]) == (True, False)
    assert changed["changed_keys"] == ["logging.level"]
    changed = configure(where, {**CONFIG, "tailscale": {"mode": "daemon"}})
    assert (changed["needs_reload"], changed["needs_restart"]) == (True, True)
    assert changed["mode"] == "daemon"


@pytest.mark.parametrize(("read_it", "restart"), [(True, False), (False, True)])
def test_a_restart_that_a_former_run_owes_is_not_made_a_reload(
    where, monkeypatch, read_it, restart
):
    """As if it had been cut off between the file and the restart."""
    configure(where)
    configure(where, {**CONFIG, "tailscale": {"mode": "daemon"}})
    written = os.stat(where["path"]).st_mtime
    daemon = node.Unit(
        "", "loaded", "active", "enabled", 1, written + (9 if read_it else -9), False
    )
    monkeypatch.setattr(node, "has_systemd", lambda: True)
    monkeypatch.setattr(node, "unit", lambda _: daemon)
    monkeypatch.setattr(node_config, "PATH", where["path"])
    config = {**CONFIG, "tailscale": {"mode": "daemon"}, "logging": {"level": "DEBUG"}}
    done = configure(where, config)
    assert (done["needs_reload"], done["needs_restart"]) == (True, restart)


def test_a_mistake_leaves_the_file_as_it_was(where):
    configure(where)
    with open(where["path"]) as file:
        before = file.read()
    with pytest.raises(Failed, match=r"2 mistakes in the configuration: .*mode.*mtu"):
        network = {**CONFIG["network"], "mtu": 1}
        configure(where, {**CONFIG, "tailscale": {"mode": "x"}, "network": network})
    with open(where["path"]) as file:
        assert file.read() == before


@pytest.mark.parametrize(
    ("cidr", "said"),
    [
        ("10.1.2.1/24", "has host bits set; the network is 10.1.2.0/24"),
        ("10.1.2.0/31", "is too small"),
        ("100.64.0.0/24", "which Tailscale gives to its own devices"),
        ("10.1.2.0", "is not a CIDR"),
        ("10.1.2.0/24,10.1.3.0/24", "are both IPv4"),
        ("127.0.0.0/24", "ordinary unicast"),
    ],
)
def test_a_pod_cidr_that_cannot_be_is_refused(where, cidr, said):
    with pytest.raises(Failed) as caught:
        configure(where, {"network": {"podCIDR": {"nodeLocal": cidr}}})
    assert said in str(caught.value)
    assert "nodeLocal" in str(caught.value)


OTHER = {"network": {"podCIDR": {"nodeLocal": "10.1.9.0/24", "base": "10.1.0.0/16"}}}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("more", [{}, {"only_pod_cidr": True}])
def test_a_node_keeps_its_pod_cidr(where, check, more):
    """Whichever playbook writes the configuration: its pods have addresses of it."""
    configure(where)
    with open(where["path"]) as file:
        before = file.read()
    with pytest.raises(Failed, match=r"has 10.1.2.0/24, and 10.1.9.0/24 .*change_pod_cidr.yml"):
        configure(where, OTHER, check, **more)
    with open(where["path"]) as file:
        assert file.read() == before
    assert configure(where, OTHER, check, may_change_pod_cidr=True)["changed"]


def test_nor_does_a_staged_configuration_bring_another(where):
    staged = {**where, "path": f"{where['path']}.next"}
    assert configure(staged, OTHER)["changed"]  # on a node that has none
    configure(where)
    with pytest.raises(Failed, match=r"has 10.1.2.0/24"):
        configure(staged, OTHER)
    assert configure(staged)["changed"]  # what was staged before is in nobody's way


def test_a_second_family_comes_along_and_none_goes(where):
    both = {"network": {"podCIDR": {"nodeLocal": ["10.1.2.0/24", "fd00:1::/64"]}}}
    configure(where)
    assert configure(where, both)["pod_cidrs"] == ["10.1.2.0/24", "fd00:1::/64"]
    with pytest.raises(Failed, match="has fd00:1::/64"):
        configure(where)


def test_the_pod_cidr_can_be_seen_to_alone(where, tmp_path):
    """As before an upgrade: what the release to come makes of the rest is not known yet."""
    seen = configure(where, {**CONFIG, "tailscale": {"mode": "x"}}, only_pod_cidr=True)
    assert (seen["changed"], seen["pod_cidrs"]) == (False, ["10.1.2.0/24"])
    assert not (tmp_path / "etc").exists()


def test_a_guess_is_a_warning_or_a_failure(where, monkeypatch):
    said = []
    monkeypatch.setattr(AnsibleModule, "warn", lambda _, text: said.append(text))
    guessing = {"network": {"podCIDR": {"base": "10.1.0.0/16"}}}
    found = configure(where, guessing)
    assert found["pod_cidr_guessed"] is True
    assert "is a guess" in said[0]
    with pytest.raises(Failed, match="set headcni_node_pod_cidr"):
        configure(where, guessing, require_pod_cidr=True)


def test_the_variable_of_the_environment_is_written_down(where, monkeypatch):
    monkeypatch.setenv("NODE_POD_CIDR", "10.1.9.0/24")
    assert configure(where, {})["pod_cidr_source"] == "env"
    monkeypatch.delenv("NODE_POD_CIDR")
    with open(where["path"]) as file:
        assert "10.1.9.0/24" in file.read()


def test_no_release_is_told_and_check_mode_goes_on_without(where, tmp_path):
    where = {**where, "release": str(tmp_path / "none")}
    assert configure(where, check=True)["validated"] is False
    with pytest.raises(Failed, match="install it first"):
        configure(where)


def test_a_directory_that_cannot_be_made_is_told(where, tmp_path):
    (tmp_path / "etc").write_text("a file")
    with pytest.raises(Failed, match=r"etc.* cannot be written"):
        configure(where)


def test_a_secret_in_the_old_file_is_not_shown(where, tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/config.yaml").write_text("headscale:\n  authKey: hskey-auth-abc\n")
    assert "hskey" not in str(configure(where, check=True))
