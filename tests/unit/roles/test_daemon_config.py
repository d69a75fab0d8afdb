"""What the role writes into the daemon's configuration: tags of peers, what pods may reach."""

from __future__ import annotations

from typing import Any

import pytest
import role_readme
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar


def value_of(expression: str, **given: Any) -> Any:
    """Of an expression in the role's own variables."""
    folder = next(one for one in role_readme.roles() if one.name == "headcni_node")
    loader = DataLoader()
    variables: dict[str, Any] = {}
    for part in ("defaults", "vars"):
        path = str(folder / part / "main.yml")
        variables.update(loader.load_from_file(path, trusted_as_template=True))
    variables.update(given)
    written: Any = variables
    for name in expression.split("."):
        written = written[name]
    return Templar(loader=loader, variables=variables).template(written)


def written_as(section: str, key: str, **given: Any) -> Any:
    """As it goes to config.yaml, where an empty value is left out."""
    return value_of(f"_headcni_node_config_of_variables.{section}.{key}", **given)


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({}, ""),
        ({"headscale_routes_tags": ["tag:headcni"]}, ""),
        ({"headscale_routes_tags": ["tag:k8s"]}, ["tag:k8s"]),
        ({"headscale_routes_tags": []}, "any"),
        ({"tailscale_tags": [], "headscale_routes_tags": ["tag:k8s"]}, ["tag:k8s"]),
        ({"tailscale_tags": ["tag:own"], "headscale_routes_tags": ["tag:k8s"]}, ["tag:own"]),
        ({"headcni_node_peer_tags": []}, "any"),
        ({"headcni_node_peer_tags": ["tag:a", "tag:b"], "tailscale_tags": ["tag:c"]}, None),
    ],
)
def test_the_tag_is_the_one_that_nodes_join_with_and_the_default_is_left_out(given, written):
    expected = ["tag:a", "tag:b"] if written is None else written
    assert written_as("tailscale", "peerTags", **given) == expected


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("all", ""),
        ("pods", "pods"),
        (["100.64.0.7:443", "100.64.0.8"], ["100.64.0.7:443", "100.64.0.8"]),
        ([], "pods"),
        ("", "pods"),
    ],
)
def test_an_empty_list_of_what_pods_reach_opens_nothing(given, written):
    assert written_as("network", "tailnetAccess", headcni_node_tailnet_access=given) == written


def test_the_same_goes_for_namespaces():
    given = {"shop": [], "bank": ["100.64.0.7"], "lab": "all"}
    assert written_as(
        "network", "tailnetAccessNamespaces", headcni_node_tailnet_access_namespaces=given
    ) == {"shop": "pods", "bank": ["100.64.0.7"], "lab": "all"}
    assert written_as("network", "tailnetAccessNamespaces") == {}


CONFLIST = "_headcni_node_conflist_options.network_policy"


@pytest.mark.parametrize(
    ("given", "enabled"),
    [
        ({}, False),
        ({"headcni_node_network_policy": True}, True),
        ({"headcni_node_extra_config": {"network": {"enableNetworkPolicy": True}}}, True),
        (
            {
                "headcni_node_network_policy": True,
                "headcni_node_extra_config": {"network": {"enableNetworkPolicy": False}},
            },
            False,
        ),
    ],
)
def test_the_plugin_enforces_policies_exactly_if_the_daemon_and_its_account_do(given, enabled):
    given = {"groups": {}, "_headcni_node_moved_socket": "", **given}
    network = value_of("_headcni_node_config", **given)["network"]
    assert bool(network["enableNetworkPolicy"]) is enabled
    assert value_of(CONFLIST, **given) is enabled
    joined = {"joined": True, "name": "node-a"}
    batch = {
        **given,
        "ansible_play_batch": ["a", "b"],
        "hostvars": {
            "a": {**given, "_headcni_node_kubernetes": joined},
            "b": {
                "headcni_node_network_policy": False,
                "_headcni_node_kubernetes": {**joined, "name": "node-b"},
            },
        },
    }
    assert value_of("_headcni_node_with_policies", **batch) == (["node-a"] if enabled else [])


def test_settings_of_policies_are_left_out_unless_they_are_given():
    assert written_as("network", "enableNetworkPolicy") == ""
    assert written_as("network", "unknownPolicy") == ""
    assert written_as("network", "logDenied") == ""
    assert written_as("network", "logDenied", headcni_node_network_policy_log=5) == 5
    assert (
        written_as("network", "unknownPolicy", headcni_node_network_policy_unknown="allow")
        == "allow"
    )
