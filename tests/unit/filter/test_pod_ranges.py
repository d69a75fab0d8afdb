"""Which ranges the cluster's pods have, by what is known of its hosts."""

from __future__ import annotations

from typing import Any

from ansible_collections.headcni.mesh.plugins.filter.pod_ranges import FilterModule

CLUSTER = ["10.244.0.0/16", "fd44::/48"]


def ranges(**hosts: Any) -> Any:
    return FilterModule().filters()["pod_ranges"](list(hosts), hosts)


def found(*pod_cidrs: str, cluster: list[str] | None = None) -> dict[str, Any]:
    known = {"pod_cidrs": list(pod_cidrs), "cluster_cidrs": cluster or []}
    return {"headcni_node_preflight": known}


def test_the_clusters_ranges_and_those_of_its_nodes_are_found_with_neighbours_joined():
    assert ranges(
        a=found("10.244.2.0/24", "fd44:0:0:1::/64", cluster=CLUSTER),
        b=found("10.244.3.0/24", "fd44:0:0:9::/64", cluster=CLUSTER),
    ) == {
        "ranges": CLUSTER,
        "nodes": ["10.244.2.0/23", "fd44:0:0:1::/64", "fd44:0:0:9::/64"],
    }


def test_a_nodes_range_outside_the_clusters_is_one_too():
    assert ranges(a=found("10.9.0.0/24", cluster=CLUSTER))["ranges"] == [
        "10.9.0.0/24",
        *CLUSTER,
    ]


def test_what_was_configured_counts_more_than_what_preflight_found():
    host = {**found("10.1.0.0/24"), "headcni_node_configured": {"pod_cidrs": ["10.2.0.0/24"]}}
    assert ranges(a=host)["nodes"] == ["10.2.0.0/24"]


def test_nodes_are_not_listed_if_one_of_them_is_unknown():
    known = found("10.244.1.0/24", cluster=CLUSTER)
    assert ranges(a=known, b={}) == {"ranges": CLUSTER, "nodes": []}
    told = {"headcni_node_pod_cidr": "10.244.7.0/24"}
    assert ranges(a=known, b=told)["nodes"] == ["10.244.1.0/24", "10.244.7.0/24"]
    assert ranges(a=known, b={"headcni_node_pod_cidr": "nonsense"})["nodes"] == []


def test_without_anything_found_out_there_is_nothing():
    nothing: dict[str, list[str]] = {"ranges": [], "nodes": []}
    assert ranges(a={}, b={"headcni_node_preflight": {"failed": True}}) == nothing
    # The inventory alone does not say what other playbooks are about to do.
    assert ranges(a={"headcni_node_pod_cidr": "10.244.7.0/24"}) == nothing
