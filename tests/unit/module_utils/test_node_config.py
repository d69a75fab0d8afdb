"""config.yaml as it is written, read back by the runtime itself."""

from __future__ import annotations

import os
import stat
import sysconfig

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import node_config
from ansible_collections.headcni.mesh.plugins.module_utils.shared import podcidr
from lab_command import CHECKOUT

from headcni import settings as runtime


@pytest.fixture(scope="session")
def release(tmp_path_factory):
    """The sources, as a release has them."""
    made = tmp_path_factory.mktemp("release")
    (made / "headcni").symlink_to(CHECKOUT / "plugins/cni/headcni")
    (made / "vendor").symlink_to(sysconfig.get_path("purelib"))
    return str(made)


WHOLE = {
    "daemon": {"nodeName": "node-1", "reconcileInterval": "30s", "kubeconfig": "/etc/k.yaml"},
    "headscale": {"url": "https://headscale.example.org", "retries": 5},
    "tailscale": {"mode": "daemon", "port": 4000, "answerForNode": False},
    "network": {
        "podCIDR": {"nodeLocal": ["10.1.2.0/24", "fd00:1::/64"], "base": "10.1.0.0/16"},
        "mtu": 1400,
    },
    "dns": {"magicDNS": {"enabled": True, "baseDomain": "on", "nameservers": ["100.100.100.100"]}},
    "logging": {"level": "WARN"},
}


def test_what_is_written_is_what_the_runtime_reads():
    made, found = runtime.parse(node_config.render(WHOLE).encode())
    assert found == []
    plain = runtime.as_dict(made)
    for section, keys in WHOLE.items():
        for key, value in keys.items():
            if not isinstance(value, dict) and value != "30s":
                assert plain[section][key] == value, key
    assert plain["network"]["podCIDR"]["nodeLocal"] == ["10.1.2.0/24", "fd00:1::/64"]
    assert plain["dns"]["magicDNS"]["baseDomain"] == "on"


@pytest.mark.parametrize(
    "value", ["yes", "NO", "null", "1.0", "0x10", "a: b", "- a", "# a", "ä\n", "'", '"', "~", "12"]
)
def test_a_string_stays_a_string(value):
    from ruamel.yaml import YAML

    text = node_config.render({"key": value, "list": [value]})
    assert YAML(typ="safe", pure=True).load(text) == {"key": value, "list": [value]}


def test_what_is_not_given_is_left_out():
    given = {"a": {"b": "", "c": None, "d": []}, "e": {"f": 0, "g": False}, "h": {}}
    assert node_config.pruned(given) == {"e": {"f": 0, "g": False}}


def test_the_answer_is_written_down_with_its_source():
    given = {"network": {"podCIDR": {"base": "10.9.0.0/16"}, "mtu": 1300}}
    found = podcidr.resolve(given, {}, "/nowhere", "alpha")
    pinned = node_config.pinned(given, found)
    assert pinned["network"]["podCIDR"]["nodeLocal"] == [str(found.cidrs[0])]
    assert node_config.source_of(node_config.render(pinned)) == "hash"
    assert runtime.parse(node_config.render(pinned).encode())[1] == []
    assert "nodeLocal" not in given["network"]["podCIDR"]


def test_without_a_base_the_cluster_is_what_the_daemon_takes_it_to_be():
    own = podcidr.parse_pod_cidrs("10.244.7.0/24,fd00:244:0:7::/64")
    assert node_config.cluster_cidrs({}, own) == ["10.244.0.0/16", "fd00:244::/48"]
    given = {"network": {"podCIDR": {"base": "10.0.0.0/8, fd00::/40"}}}
    assert node_config.cluster_cidrs(given, own) == ["10.0.0.0/8", "fd00::/40"]


def test_the_runtime_says_what_a_change_asks_for(release):
    old = node_config.render({"network": {"mtu": 1280}})
    new = node_config.render({"network": {"mtu": 1400}, "logging": {"level": "DEBUG"}})
    answer = node_config.ask(new, old, release)
    assert answer == ((), ("logging.level",), ("network.mtu",))


def test_the_runtime_names_every_mistake(release):
    wrong = {"tailscale": {"mode": "sideways"}, "network": {"mtu": 1}, "loging": {}}
    answer = node_config.ask(node_config.render(wrong), None, release)
    assert [line.partition(":")[0] for line in answer.problems] == [
        "tailscale.mode",
        "network.mtu",
        "loging",
    ]


def test_a_release_that_cannot_be_asked_is_told(tmp_path):
    with pytest.raises(node_config.ConfigError, match="cannot read the configuration"):
        node_config.ask("", None, str(tmp_path))


def test_the_whole_configuration_has_its_defaults(release):
    whole = node_config.effective(node_config.render({"tailscale": {"mode": "daemon"}}), release)
    assert whole["tailscale"]["mode"] == "daemon"
    assert whole["monitoring"]["port"] == 9001


@pytest.mark.parametrize(
    "line",
    [
        "authKey: hskey-auth-abc",
        "  api_key: hskey-abc",
        'password: "abc"',
        "- token: abc",
        "url: https://abc@headscale.example.org",
    ],
)
def test_no_secret_is_shown(line):
    shown = node_config.redacted(f"a: 1\n{line}\nb: 2\n")
    assert "abc" not in shown
    assert shown.startswith("a: 1\n") and shown.endswith("b: 2\n")


def test_the_path_of_a_key_is_no_secret():
    assert node_config.redacted("apiKeyFile: /etc/key\n") == "apiKeyFile: /etc/key\n"


def test_the_file_is_closed_to_others_and_replaced_whole(tmp_path):
    path = str(tmp_path / "headcni" / "config.yaml")
    assert node_config.needs_writing(path, "a: 1\n")
    node_config.write(path, "a: 1\n")
    assert not node_config.needs_writing(path, "a: 1\n")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    os.chmod(path, 0o644)
    assert node_config.needs_writing(path, "a: 1\n")
    assert os.listdir(tmp_path / "headcni") == ["config.yaml"]


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("# Ours\ntailscale:\n  mode: daemon\n  port: 41642\nnetwork:\n  mtu: 1280\n", "daemon"),
        ("tailscale:\n  port: 41642\n  mode: host\n", "host"),
        ("network:\n  mode: daemon\n", ""),
        ("tailscale:\n  port: 1\nlogging:\n  mode: daemon\n", ""),
        ("tailscale: {mode: daemon}\n", ""),
    ],
)
def test_the_mode_is_read_from_what_we_write_and_from_nothing_else(tmp_path, text, mode):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert node_config.mode_of(str(file)) == mode


def test_a_node_without_a_configuration_has_no_mode(tmp_path):
    assert node_config.mode_of(str(tmp_path / "none")) == ""
