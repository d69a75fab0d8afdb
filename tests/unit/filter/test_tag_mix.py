"""Nodes with and without the mesh's tag in one run."""

from __future__ import annotations

import pytest
from ansible_collections.headcni.mesh.plugins.filter.tag_mix import tag_mix

TAGS = ["tag:headcni", "tag:edge"]
WITH, WITHOUT = {"joined_tags": ["tag:edge"]}, {"joined_tags": ["tag:other"]}
TO_COME = {"joined_tags": None}


def mix(tags=TAGS, key="", **found):
    known = {
        host: {"tailscale_preflight": one, "tailscale_auth_key": key} for host, one in found.items()
    }
    return tag_mix([*found, "unheard-of"], known, tags)


def test_nodes_that_the_others_would_refuse_are_named_with_the_way_out():
    said = mix(alpha=WITH, beta=WITHOUT, gamma=WITHOUT)
    assert said.startswith("beta, gamma: joined without tag:headcni or tag:edge, unlike alpha: ")
    assert "headcni_node_peer_tags: []" in said


def test_a_new_node_has_the_tag_and_would_refuse_those_that_have_not():
    assert mix(alpha=WITHOUT, beta=TO_COME).startswith("alpha: joined without")


@pytest.mark.parametrize(
    "found",
    [
        {"alpha": WITH, "beta": WITH, "gamma": TO_COME},
        {"alpha": WITHOUT, "beta": WITHOUT},
        {"alpha": WITHOUT, "beta": {}},  # its preflight has failed, and says why
        {"alpha": {}},
    ],
)
def test_nodes_of_one_kind_are_no_mix(found):
    assert mix(**found) == ""


def test_a_key_of_the_operators_may_carry_no_tag():
    assert mix(alpha=WITHOUT, beta=TO_COME, key="hskey") == ""


def test_without_a_tag_to_ask_for_there_is_no_mix():
    assert mix(tags=[], alpha=WITH, beta=WITHOUT) == ""


def test_of_many_nodes_a_few_are_named():
    said = mix(alpha=WITH, **{f"node{number}": WITHOUT for number in range(1000)})
    assert "node7 and 992 more: joined without" in said
    assert len(said) < 400
