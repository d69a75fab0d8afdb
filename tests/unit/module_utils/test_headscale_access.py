"""Whether a policy lets pods reach pods, and what is said if it does not."""

from __future__ import annotations

import json
import time
from ipaddress import ip_network
from typing import Any

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import headscale_access
from ansible_collections.headcni.mesh.plugins.module_utils.headscale_access import (
    ALLOWED,
    MISSING,
    UNKNOWN,
    Mesh,
    judge,
    rule_for,
)
from pod_policies import ALL, ANY, POLICIES, RANGES, TAG, V4, V6, acl, grant, policy

CURRENT = (0, 29)
MESH = Mesh(tuple(map(ip_network, RANGES)), (TAG,))
TODAY = tuple(
    ip_network(f"{head}{number}{tail}")
    for number in (1, 2)
    for head, tail in (("10.244.", ".0/24"), ("fd44:0:0:", "::/64"))
)
UNTAGGED = Mesh(MESH.ranges, (), "headcni")


def of_family(family: int) -> Mesh:
    return Mesh(
        tuple(one for one in MESH.ranges if one.version == family),
        (TAG,),
        pods=tuple(one for one in TODAY if one.version == family),
    )


@pytest.mark.parametrize("text, families", [p[1:] for p in POLICIES], ids=[p[0] for p in POLICIES])
def test_each_policy_of_the_table_is_judged_as_headscale_does(text, families):
    for family in (4, 6):
        verdict = judge(text, CURRENT, of_family(family))
        assert verdict.status == (ALLOWED if family in families else MISSING), verdict


@pytest.mark.parametrize("version", [(0, 25), (0, 26), (0, 27), (0, 28), (0, 29), (0, 31)])
def test_without_a_policy_everything_is_allowed(version):
    for text in ("", " \n"):
        assert judge(text, version, MESH).status == ALLOWED


@pytest.mark.parametrize(
    "text, allowed_since",
    [
        ("{}", (0, 27)),
        (policy(), (0, 27)),
        (policy([]), (9, 0)),
        (policy(None, [grant(["*"], ["*"], ["*"])]), (0, 27)),  # 0.27 and 0.28 refuse to have it
        (policy([], [grant(["*"], ["*"], ["*"])]), (0, 29)),
    ],
)
def test_a_policy_without_acls_depends_on_the_version(text, allowed_since):
    for version in ((0, 26), (0, 27), (0, 28), (0, 29)):
        expected = ALLOWED if version >= allowed_since else MISSING
        assert judge(text, version, MESH).status == expected, version


@pytest.mark.parametrize(
    "rules, allowed_since",
    [
        ([acl(["*"], ["*:*"])], (0, 26)),
        ([acl(ALL, ANY)], (0, 26)),
        ([acl([V4, V6], [f"{V4}:*", f"{V6}:*"])], (0, 29)),
        ([acl([V4, V6], [f"{V4}:*", f"{V6}:*", f"{TAG}:*"])], (0, 29)),  # nodes see no peers
        ([acl([V4, V6], ANY), acl([TAG], [f"{TAG}:22"])], (0, 27)),  # and learn by the way back
        ([acl([V4, V6], ANY), acl([TAG], [f"{V4}:22", f"{V6}:22"])], (0, 26)),
        ([acl([V4, V6, "100.64.0.0/10"], ANY)], (0, 26)),
    ],
)
def test_before_029_nodes_must_be_told_of_each_others_ranges(rules, allowed_since):
    for version in ((0, 26), (0, 27), (0, 28), (0, 29)):
        verdict = judge(policy(rules), version, MESH)
        assert verdict.status == (ALLOWED if version >= allowed_since else MISSING), version
        if verdict.missing:
            assert "tells nodes only of ranges that they may reach themselves" in verdict.missing[0]
            assert f"no rule lets {TAG} reach 10.244.0.0/16" in verdict.missing[0]


@pytest.mark.parametrize("version", [(0, 26), (0, 27), (0, 28), (0, 29)])
@pytest.mark.parametrize("mesh", [MESH, UNTAGGED, Mesh(MESH.ranges, (), "ann@example.org")])
@pytest.mark.parametrize("form", ["acls", "grants"])
def test_the_rule_that_is_offered_is_enough(version, mesh, form):
    if form == "grants" and version < (0, 29):
        return
    assert judge(json.dumps({form: [rule_for(mesh, form)]}), version, mesh).status == ALLOWED


def test_what_is_missing_is_said_in_words_with_the_rule_to_add():
    verdict = judge(policy([acl(ALL, ANY, proto="tcp")]), CURRENT, MESH)
    assert verdict.missing == (
        "no rule lets 10.244.0.0/16 reach 10.244.0.0/16 by udp",
        "no rule lets fd44::/48 reach fd44::/48 by udp",
    )
    assert verdict.remedy == (
        'add to "acls" of the policy: {"action": "accept", '
        '"src": ["tag:headcni", "10.244.0.0/16", "fd44::/48"], '
        '"dst": ["tag:headcni:*", "10.244.0.0/16:*", "fd44::/48:*"]}'
    )


def test_ports_and_parts_of_ranges_are_named():
    text = policy([acl(["10.244.0.0/17"], [f"{V4}:*"]), acl([V4], [f"{V4}:1-1000"])])
    assert judge(text, CURRENT, Mesh(MESH.ranges[:1], (TAG,))).missing == (
        "no rule lets 10.244.128.0/17 reach 10.244.0.0/16 by tcp and udp on ports 1001 to 65535",
    )


def test_the_rule_has_the_form_that_the_policy_uses_and_the_tag_gets_an_owner():
    verdict = judge('{"grants": [{"src": ["ann@"], "dst": ["*"], "ip": ["*"]}]}', CURRENT, MESH)
    assert (verdict.form, verdict.tag_owners) == ("grants", (TAG,))
    assert verdict.remedy == (
        'add to "grants" of the policy: {"src": ["tag:headcni", "10.244.0.0/16", "fd44::/48"], '
        '"dst": ["tag:headcni", "10.244.0.0/16", "fd44::/48"], "ip": ["*"]} '
        'and to "tagOwners": "tag:headcni": []'
    )
    for text in (policy([]), policy([acl([], [])], [grant([], [], ["*"])])):
        verdict = judge(text, CURRENT, MESH)
        assert (verdict.form, verdict.tag_owners) == ("acls", ())


def test_ranges_of_todays_nodes_are_enough_but_a_note_says_what_comes_of_it():
    text = {name: text for name, text, _families in POLICIES}["the ranges of today's nodes"]
    verdict = judge(text, CURRENT, Mesh(MESH.ranges, (TAG,), pods=TODAY))
    assert (verdict.status, verdict.missing) == (ALLOWED, ())
    assert "a node that is added later is cut off" in verdict.notes[0]
    assert judge(text, CURRENT, MESH).status == MISSING


@pytest.mark.parametrize(
    "text, why",
    [
        (policy([{**acl(["*"], ["*:*"]), "srcPosture": ["x"]}]), "it has srcposture"),
        (policy([acl(["ipset:pods"], ["*:*"])]), "'ipset:pods' is unknown here"),
        (policy([acl(["autogroup:admin"], ["*:*"])]), "'autogroup:admin' is unknown here"),
        (policy([acl(["pods"], ["*:*"])]), "host 'pods' has no address in the policy"),
        (policy([acl(["*"], ["*"])]), "destination '*' has no ports"),
        (policy([acl(["*"], ["*:http"])]), "ports 'http'"),
        (policy([acl(["*"], ["*:*"], proto="quic")]), "protocol 'quic'"),
        (policy([{"action": "deny", "src": ["*"], "dst": ["*:*"]}]), "action 'deny'"),
        (policy([acl("*", ["*:*"])]), "'*' is no list of names"),  # type: ignore[arg-type]
        (policy(["everything"]), "it is no object"),
        (policy([acl([V4], [f"{V4}:*"])]) + "]", "expected nothing more"),
        ('{"acls": {}}', "acls is no list"),
    ],
)
def test_what_is_not_understood_is_never_called_allowed(text, why):
    verdict = judge(text, CURRENT, MESH)
    assert verdict.status == UNKNOWN
    assert why in verdict.unjudged[0]


def test_a_rule_that_is_not_understood_does_no_harm_beside_one_that_is_enough():
    text = policy([acl(["ipset:x"], ["*:*"]), acl(["*"], ["*:*"])])
    assert judge(text, CURRENT, MESH).status == ALLOWED


def test_a_grant_that_steers_pod_traffic_is_not_judged_even_if_all_is_allowed():
    everything = grant(["*"], ["*"], ["*"])
    steered = grant([TAG], [V4], ["*"], via=["tag:other"])
    verdict = judge(policy(None, [everything, steered]), CURRENT, MESH)
    assert (verdict.status, verdict.missing) == (UNKNOWN, ())
    assert "grants[1] could not be judged: it sends traffic" in verdict.unjudged[0]
    elsewhere = grant(["*"], ["192.168.0.0/16"], ["*"], via=["tag:other"])
    assert judge(policy(None, [everything, elsewhere]), CURRENT, MESH).status == ALLOWED


def test_policies_of_headscale_025_are_not_judged():
    verdict = judge(policy([acl(["*"], ["*:*"])]), (0, 25), MESH)
    assert verdict.status == UNKNOWN
    assert "Headscale 0.25 judges policies in another way" in verdict.unjudged


def test_the_internet_is_judged_only_if_the_pod_ranges_are_private():
    public = Mesh((ip_network("8.0.0.0/16"),), (TAG,))
    text = policy([acl(["*"], ["autogroup:internet:*"])])
    assert judge(text, CURRENT, public).status == UNKNOWN


@pytest.mark.parametrize(
    "source, status",
    [
        ("headcni@", ALLOWED),
        ("group:mesh", ALLOWED),
        ("autogroup:member", ALLOWED),
        ("autogroup:tagged", MISSING),
        ("ann@", MISSING),
        ("ann@example.org", UNKNOWN),  # may be the e-mail address of the owner
        ("100.64.0.7", UNKNOWN),  # may be a node
    ],
)
def test_nodes_without_tags_are_known_by_their_owner(source, status):
    pods = acl([V4, V6], [f"{V4}:*", f"{V6}:*"])
    told = acl([source], [f"{V4}:22", f"{V6}:22"])
    text = policy([pods, told], groups={"group:mesh": ["bob@", "headcni@"]})
    assert judge(text, (0, 28), UNTAGGED).status == status


def test_a_thousand_nodes_and_a_thousand_rules_are_judged_within_seconds():
    pods = tuple(ip_network(f"10.{number >> 7}.{number % 128 * 2}.0/24") for number in range(1000))
    mesh = Mesh((ip_network("10.0.0.0/8"),), (TAG,), pods=pods)
    rules: list[Any] = [acl([str(one)], ["10.0.0.0/9:*"]) for one in pods]
    started = time.process_time()
    assert judge(policy(rules), CURRENT, mesh).status == ALLOWED
    assert time.process_time() - started < 10


def test_more_rules_than_can_be_looked_at_are_not_called_missing():
    rules = [acl(["10.1.0.0/16"], [f"{V4}:*"])] * (headscale_access.MOST_RULES + 1)
    mesh = Mesh((ip_network("10.0.0.0/8"),), (TAG,))
    verdict = judge(policy(rules), CURRENT, mesh)
    assert verdict.status == UNKNOWN
    assert verdict.unjudged == (f"more than {headscale_access.MOST_RULES} rules concern pods",)


def test_a_long_list_of_gaps_is_cut_short():
    rules = [acl([f"10.244.{number}.0/24"], ["*:*"]) for number in range(0, 20, 2)]
    verdict = judge(policy(rules), CURRENT, of_family(4))
    assert len(verdict.missing) == 4 and verdict.missing[-1].startswith("and ")
