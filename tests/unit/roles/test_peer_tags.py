"""Which tag the daemon asks its peers for, as the role has it."""

from __future__ import annotations

from typing import Any

import pytest
import role_readme
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar


def peer_tags(**given: Any) -> Any:
    """As it goes to config.yaml, where an empty value is left out."""
    folder = next(one for one in role_readme.roles() if one.name == "headcni_node")
    loader = DataLoader()
    variables: dict[str, Any] = {}
    for part in ("defaults", "vars"):
        path = str(folder / part / "main.yml")
        variables.update(loader.load_from_file(path, trusted_as_template=True))
    variables.update(given)
    written = variables["_headcni_node_config_of_variables"]["tailscale"]["peerTags"]
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
    assert peer_tags(**given) == (["tag:a", "tag:b"] if written is None else written)
