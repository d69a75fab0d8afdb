"""What a role passes over because its preflight found it to be right, and what it does not."""

from __future__ import annotations

from typing import Any

import pytest
import role_readme
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

RIGHT = {
    "groups": {},
    "_tailscale_trust_preflight": True,
    "tailscale_preflight": {"differs": False, "tarball": "", "node_key": "nodekey:01"},
    "_headcni_node_trust_preflight": True,
    "headcni_node_preflight": {"up_to_date": ["release", "config", "conflist"]},
}


def value(role: str, name: str, **given: Any) -> Any:
    """A variable of a role, as its tasks have it."""
    folder = next(one for one in role_readme.roles() if one.name == role)
    loader = DataLoader()
    variables: dict[str, Any] = {}
    for part in ("defaults", "vars"):
        path = str(folder / part / "main.yml")
        variables.update(loader.load_from_file(path, trusted_as_template=True))
    variables.update(RIGHT | given)
    return Templar(loader=loader, variables=variables).template(variables[name])


def test_a_node_that_is_right_is_passed_over():
    assert value("tailscale", "_tailscale_preflight_usable") is True
    assert value("tailscale", "_tailscale_already_joined") is True
    assert value("headcni_node", "_headcni_node_nothing_to_install") is True


@pytest.mark.parametrize(
    "given",
    [
        {"_tailscale_trust_preflight": False},
        {"tailscale_preflight": {"failed": True}},
        # What a repository has by now, a node that may not refresh its lists cannot know.
        {"tailscale_method": "package", "tailscale_version": "latest"},
    ],
)
def test_tailscale_is_looked_after_where_preflight_could_not_tell(given):
    assert value("tailscale", "_tailscale_preflight_usable", **given) is False
    assert value("tailscale", "_tailscale_already_joined", **given) is False


@pytest.mark.parametrize(
    "given",
    [
        {"_headcni_node_trust_preflight": False},
        {"headcni_node_preflight": {"up_to_date": ["release", "conflist"]}},
        {"headcni_node_preflight": {"up_to_date": ["config", "conflist"]}},
        # What these two take beside, preflight does not look at.
        {"_headcni_node_mode": "daemon"},
        {"headcni_node_kubernetes_server": "server1"},
    ],
)
def test_the_runtime_is_looked_after_where_preflight_could_not_tell(given):
    assert value("headcni_node", "_headcni_node_nothing_to_install", **given) is False
