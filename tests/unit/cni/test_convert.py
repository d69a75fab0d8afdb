"""headcnictl convert: it drops no key of a Go configuration in silence, and its result is valid."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from lab_command import CHECKOUT
from ruamel.yaml import YAML

from headcni import settings, validation
from headcni.ctl import convert, main

NETCONF: dict[str, Any] = {
    "cniVersion": "1.0.0",
    "name": "tailscale-cni",
    "type": "headcni",
    "headscale_url": "https://headscale.example.org",
    "tailscale_socket": "/var/run/tailscale/tailscaled.sock",
    "pod_cidr": "10.244.0.0/24",
    "service_cidr": "10.96.0.0/16",
    "ipam": {
        "type": "host-local",
        "subnet": "10.244.0.0/24",
        "rangeStart": "10.244.0.10",
        "rangeEnd": "10.244.0.254",
        "gateway": "10.244.0.1",
    },
    "magic_dns": {
        "enable": True,
        "base_domain": "cluster.local",
        "nameservers": ["10.2.0.1"],
        "search_domains": ["c.example.org"],
    },
    "mtu": 1300,
    "enable_ipv6": False,
    "enable_network_policy": False,
}
DAEMON = """
daemon: {logLevel: debug}
headscale: {authKey: a-secret-key, timeout: 30s}
tailscale:
  mode: daemon
  url: https://headscale.example.org
  socket: {path: /var/run/headcni, name: go.sock}
  tags: [a, b]
network:
  podCIDR: {nodeLocal: 10.244.0.0/24, base: 10.244.0.0/16, perNode: /24}
monitoring: {port: 8080}
security: {tls: {enabled: true}}
performance: {}
odd: 1
"""


def converted(capsys, tmp_path: Path, *given: Any) -> tuple[int, dict[str, Any]]:
    paths = []
    for number, one in enumerate(given):
        paths.append(str(tmp_path / f"{number}.conf"))
        Path(paths[-1]).write_text(one if isinstance(one, str) else json.dumps(one))
    code = main.main(["convert", "--json", *paths])
    said = capsys.readouterr()
    assert "a-secret-key" not in said.out + said.err
    return code, json.loads(said.out)


def without(*keys: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (NETCONF | changes).items() if key not in keys}


def lost(answer: dict[str, Any]) -> dict[str, str]:
    return {one["key"]: one["reason"] for one in answer["lost"]}


def test_the_netconf_of_the_go_original_has_an_equivalent_for_every_key(capsys, tmp_path):
    code, answer = converted(capsys, tmp_path, NETCONF)
    assert (code, answer["lost"]) == (main.OK, [])
    assert answer["config"] == {
        "headscale": {"url": "https://headscale.example.org"},
        "tailscale": {"socket": {"path": "/run/tailscale/tailscaled.sock"}},
        "network": {
            "podCIDR": {"nodeLocal": ["10.244.0.0/24"]},
            "serviceCIDR": ["10.96.0.0/16"],
            "mtu": 1300,
        },
        "ipam": {"type": "host-local"},
        "dns": {
            "magicDNS": {
                "enabled": True,
                "baseDomain": "cluster.local",
                "nameservers": ["10.2.0.1"],
                "searchDomains": ["c.example.org"],
            }
        },
    }
    [plugin] = answer["conflist"]["plugins"]
    assert answer["conflist"]["name"] == "tailscale-cni"
    assert plugin["ipam"] == NETCONF["ipam"]
    assert plugin["magic_dns"] == NETCONF["magic_dns"]


@pytest.mark.parametrize("given", [(NETCONF,), (DAEMON,), (NETCONF, DAEMON), (DAEMON, NETCONF)])
def test_what_comes_out_is_valid(capsys, tmp_path, given):
    _code, answer = converted(capsys, tmp_path, *given)
    assert settings.parse(json.dumps(answer["config"]).encode())[1] == []
    assert validation.conflist_problems(json.dumps(answer["conflist"]).encode(), {}) == []


def test_the_file_of_the_go_daemon_is_read_and_what_has_no_equivalent_is_named(capsys, tmp_path):
    code, answer = converted(capsys, tmp_path, DAEMON)
    assert code == main.NO
    assert answer["config"] == {
        "headscale": {"url": "https://headscale.example.org", "timeout": 30},
        "tailscale": {"mode": "daemon", "socket": {"path": "/run/headcni/go.sock"}},
        "network": {
            "podCIDR": {
                "nodeLocal": ["10.244.0.0/24"],
                "base": ["10.244.0.0/16"],
                "perNode": "/24",
            }
        },
        "monitoring": {"port": 8080},
        "logging": {"level": "DEBUG"},
    }
    assert set(lost(answer)) == {"headscale.authKey", "tailscale.tags", "security", "odd"}
    assert "headscale.apiKeyFile" in lost(answer)["headscale.authKey"]


def test_the_values_of_the_helm_chart_are_read(capsys, tmp_path):
    code, answer = converted(capsys, tmp_path, {"config": {"network": {"mtu": 1200}}})
    assert (code, answer["config"]) == (main.OK, {"network": {"mtu": 1200}})


def test_without_a_range_of_the_node_there_is_no_conflist_and_none_is_guessed(capsys, tmp_path):
    _code, answer = converted(capsys, tmp_path, "network: {mtu: 1200}")
    assert answer["conflist"] is None
    assert "headcnictl conflist write" in answer["notes"][0]


def test_a_conflist_with_the_bridge_plugin_is_read(capsys, tmp_path):
    bridge = {
        "type": "bridge",
        "bridge": "headcni0",
        "isGateway": True,
        "ipMasq": True,
        "mtu": 1280,
        "ipam": {"type": "host-local", "subnet": "10.244.3.0/24", "routes": [{"dst": "0.0.0.0/0"}]},
    }
    chain = [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}, {"type": "sbr"}]
    conf = {"cniVersion": "1.0.0", "name": "headcni", "plugins": chain}
    code, answer = converted(capsys, tmp_path, conf)
    assert (code, answer["lost"]) == (main.OK, [])
    assert answer["config"]["network"]["podCIDR"] == {"nodeLocal": ["10.244.3.0/24"]}
    first, second = answer["conflist"]["plugins"]
    assert first["type"] == "headcni" and first["ipMasq"] and first["isGateway"]
    assert first["ipam"]["routes"] == [{"dst": "0.0.0.0/0"}]
    assert second == {"type": "sbr"}
    assert "portmap is built in" in answer["notes"][0]
    assert answer["inventory"]["headcni_node_chained_plugins"] == [{"type": "sbr"}]


def test_unknown_keys_of_a_netconf_are_named_and_left_out(capsys, tmp_path):
    odd = without(turbo=True, ipam=NETCONF["ipam"] | {"colour": "red"})
    code, answer = converted(capsys, tmp_path, odd)
    assert code == main.NO
    assert set(lost(answer)) == {"turbo", "ipam.colour"}
    assert "turbo" not in json.dumps(answer["conflist"])


def test_ipv6_without_a_range_is_named(capsys, tmp_path):
    _code, answer = converted(capsys, tmp_path, without(enable_ipv6=True))
    assert "IPv6 range" in lost(answer)["enable_ipv6"]
    both = ["10.244.0.0/24", "fd44:0:0:1::/64"]
    dual = without("ipam", enable_ipv6=True, pod_cidr=both)
    code, answer = converted(capsys, tmp_path, dual)
    assert (code, answer["config"]["network"]["podCIDR"]["nodeLocal"]) == (main.OK, both)


def test_files_that_contradict_each_other_are_named(capsys, tmp_path):
    code, answer = converted(capsys, tmp_path, NETCONF, "network: {mtu: 1200}")
    assert code == main.NO
    assert lost(answer) == {"network.mtu": "another value is used: 1300"}
    assert answer["config"]["network"]["mtu"] == 1300


def test_output_writes_both_files_and_overwrites_nothing(capsys, tmp_path):
    source, target = tmp_path / "go.conf", tmp_path / "new"
    source.write_text(json.dumps(NETCONF))
    assert main.main(["convert", str(source), "--output", str(target)]) == main.OK
    said = capsys.readouterr().out
    assert "headcni_node_pod_cidr" in said and "every key has an equivalent" in said
    assert sorted(path.name for path in target.iterdir()) == ["10-headcni.conflist", "config.yaml"]
    assert settings.parse((target / "config.yaml").read_bytes())[1] == []
    before = (target / "config.yaml").read_text()
    assert main.main(["convert", str(source), "--output", str(target)]) == main.NO
    assert "config.yaml cannot be written: File exists" in capsys.readouterr().err
    assert (target / "config.yaml").read_text() == before


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1, 2]", "expected an object with keys"),
        ("{a: 1", "valid YAML"),
        ('{"plugins": [{"type": "calico"}]}', "no plugin headcni or bridge"),
    ],
)
def test_a_file_that_is_something_else_is_refused(capsys, tmp_path, text, reason):
    path = tmp_path / "file"
    path.write_text(text)
    assert main.main(["convert", str(path)]) == main.NO
    assert reason in capsys.readouterr().err


def test_the_inventory_sets_the_same_configuration(capsys, tmp_path):
    """Each variable is the one of which the role says that it sets the key."""
    readme = (CHECKOUT / "roles/headcni_node/README.md").read_text()
    sections = re.split(r"(?m)^### `", readme)[1:]
    keys = {
        key: section.partition("`")[0]
        for section in sections
        for key in re.findall(r"The daemon's key `([\w.]+)`", section)
    }
    assert {key: name for key, name in convert.VARIABLES.items() if key != "tailscale.mode"} == keys
    _code, answer = converted(capsys, tmp_path, DAEMON)
    assert answer["inventory"] == {
        "headcni_mode": "daemon",
        "headcni_headscale_url": "https://headscale.example.org",
        "headcni_node_pod_cidr": ["10.244.0.0/24"],
        "headcni_node_cluster_cidr": ["10.244.0.0/16"],
        "headcni_node_per_node": "/24",
        "headcni_node_monitoring_port": 8080,
        "headcni_node_log_level": "DEBUG",
        "headcni_node_extra_config": {
            "headscale": {"timeout": 30},
            "tailscale": {"socket": {"path": "/run/headcni/go.sock"}},
        },
    }


def test_what_is_printed_for_people_is_yaml_and_json(capsys, tmp_path):
    path = tmp_path / "go.yaml"
    path.write_text(DAEMON)
    assert main.main(["convert", str(path)]) == main.NO
    said = capsys.readouterr().out
    config = said.partition("# config.yaml\n")[2].partition("\n# 10-headcni.conflist")[0]
    assert YAML(typ="safe", pure=True).load(config)["monitoring"] == {"port": 8080}
    assert "no equivalent: security ('a section of 1'): no such section" in said
