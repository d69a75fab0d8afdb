"""What a role's variables are: by today's names, by former ones, and with k3s-ansible's groups."""

from __future__ import annotations

from typing import Any

import pytest
import role_readme
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from ansible_collections.headcni.mesh.plugins.filter.mesh_socket import mesh_socket

SITE = {"groups": {"all": ["a"]}, "inventory_hostname": "a", "hostvars": {"a": {}}}
K3S_ANSIBLE = {"all": ["s", "n"], "k3s_cluster": ["s", "n"], "server": ["s"], "agent": ["n"]}


def value(role: str, name: str, **given: Any) -> Any:
    folder = next(one for one in role_readme.roles() if one.name == role)
    loader = DataLoader()
    variables: dict[str, Any] = {}
    for part in ("defaults", "vars"):
        path = str(folder / part / "main.yml")
        variables.update(loader.load_from_file(path, trusted_as_template=True))
    variables.update(SITE | given)
    templar = Templar(loader=loader, variables=variables)
    templar.environment.filters["headcni.mesh.mesh_socket"] = mesh_socket
    return templar.template(variables[name])


def test_headscale_is_named_once_for_all_roles():
    given = {"headcni_headscale_url": "https://h", "headcni_headscale_api_key": "k"}
    assert value("headscale_routes", "_headscale_routes_url", **given) == "https://h"
    assert value("headscale_routes", "_headscale_routes_api_key", **given) == "k"
    assert value("tailscale", "tailscale_login_server", **given) == "https://h"
    assert daemon(**given)["headscale"]["url"] == "https://h"


def test_the_former_names_of_headscale_still_work():
    given = {"headscale_routes_url": "https://h", "headscale_routes_api_key": "k"}
    assert value("headscale_routes", "_headscale_routes_url", **given) == "https://h"
    assert value("headscale_routes", "_headscale_routes_api_key", **given) == "k"


def test_what_is_missing_is_named_with_an_example():
    first, second = value("headscale_routes", "_headscale_routes_wrong")
    assert first.startswith("headcni_headscale_url: not set, expected the address")
    assert second.startswith("headcni_headscale_api_key: not set, expected a key")


def test_nodes_may_reach_headscale_by_another_address():
    given = {"headcni_headscale_url": "https://h", "tailscale_login_server": "https://inside"}
    assert value("headscale_routes", "_headscale_routes_url", **given) == "https://h"
    assert daemon(**given)["headscale"]["url"] == "https://inside"


def daemon(**given: Any) -> Any:
    return value("headcni_node", "_headcni_node_config", **given)


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ({}, "host"),
        ({"headcni_mode": "daemon"}, "daemon"),
        ({"headcni_node_mode": "daemon"}, "daemon"),
        ({"headcni_mode": "host", "_headcni_node_mode": "daemon"}, "daemon"),  # a playbook switches
    ],
)
def test_the_mode_has_one_name_and_its_former_one_works(given, mode):
    assert daemon(**given)["tailscale"]["mode"] == mode


@pytest.mark.parametrize(
    "given",
    [
        {"headcni_node_magic_dns": {"base_domain": "m", "nameservers": ["1"], "options": ["o"]}},
        {
            "headcni_node_magic_dns": True,
            "headcni_node_magic_dns_domain": "m",
            "headcni_node_magic_dns_nameservers": ["1"],
            "headcni_node_magic_dns_options": ["o"],
        },
    ],
    ids=["now", "before"],
)
def test_names_of_the_tailnet_are_one_dictionary(given):
    assert daemon(**given)["dns"]["magicDNS"] == {
        "enabled": True,
        "baseDomain": "m",
        "nameservers": ["1"],
        "searchDomains": [],
        "options": ["o"],
    }
    assert daemon(headcni_node_magic_dns={})["dns"]["magicDNS"]["enabled"] is False


def test_a_key_of_the_daemon_is_set_by_its_own_name_or_its_former_one():
    rare = {"headcni_node_extra_config": {"monitoring": {"enabled": False, "path": "/m"}}}
    former = {"headcni_node_monitoring": False, "headcni_node_monitoring_path": "/m"}
    for given in (rare, former):
        found = daemon(**given)["monitoring"]
        assert (found["enabled"], found["path"], found["port"]) == (False, "/m", 9001)


def test_a_moved_socket_reaches_the_daemon_in_host_mode_only():
    moved = {"hostvars": {"a": {"tailscale_socket": "/srv/ts.sock"}}}
    assert daemon(**moved)["tailscale"]["socket"]["path"] == "/srv/ts.sock"
    assert daemon(**moved, headcni_mode="daemon")["tailscale"]["socket"]["path"] == ""
    assert daemon()["tailscale"]["socket"]["path"] == ""


def test_an_inventory_of_k3s_ansible_needs_no_more_than_headscale():
    found = {
        name: value("headcni_node", f"headcni_node_{name}", groups=K3S_ANSIBLE)
        for name in ("kubernetes_server", "cluster_cidr", "service_cidr", "kubeconfig")
    }
    assert found == {
        "kubernetes_server": "s",
        "cluster_cidr": ["10.42.0.0/16"],
        "service_cidr": ["10.43.0.0/16"],
        "kubeconfig": "/etc/headcni/kubeconfig",
    }
    assert value("headcni_node", "headcni_node_kubernetes_server") == ""


@pytest.mark.parametrize(
    ("given", "written"),
    [(True, True), (False, False), ([], False), ([22, "6443/tcp"], [22, "6443/tcp"])],
)
def test_a_node_that_is_to_answer_on_no_port_does_not_answer_on_all(given, written):
    """A key with an empty list would be left out of config.yaml."""
    made = daemon(headcni_node_answer_for_node=given)["tailscale"]["answerForNode"]
    assert made == written
