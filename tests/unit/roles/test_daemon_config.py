"""What the role writes into the daemon's configuration: tags of peers, what pods may reach."""

from __future__ import annotations

from typing import Any

import pytest
import role_readme
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar


def written_as(section: str, key: str, **given: Any) -> Any:
    """As it goes to config.yaml, where an empty value is left out."""
    folder = next(one for one in role_readme.roles() if one.name == "headcni_node")
    loader = DataLoader()
    variables: dict[str, Any] = {}
    for part in ("defaults", "vars"):
        path = str(folder / part / "main.yml")
        variables.update(loader.load_from_file(path, trusted_as_template=True))
    variables.update(given)
    written = variables["_headcni_node_config_of_variables"][section][key]
    return Templar(loader=loader, variables=variables).template(written)


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
