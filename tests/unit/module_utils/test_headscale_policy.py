"""What goes into a policy and out of it, and what stays."""

from __future__ import annotations

import json
from ipaddress import ip_network

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import headscale_policy
from ansible_collections.headcni.mesh.plugins.module_utils.headscale import HeadscaleError
from ansible_collections.headcni.mesh.plugins.module_utils.headscale_access import (
    Mesh,
    judge,
    rule_for,
)
from ansible_collections.headcni.mesh.plugins.module_utils.headscale_policy import (
    Merged,
    merge,
    parse,
    tags_of,
    withdraw,
)
from ansible_collections.headcni.mesh.plugins.module_utils.hujson import (
    Document,
    HujsonError,
    read,
)

ROUTES = {"10.244.0.0/16": ["tag:k8s"], "fd44::/48": ["tag:k8s"]}
POLICY = """\
{
  // Ours since 2019: ask before you touch it.
  "tagOwners": {
    "tag:web": ["ann@"], // and nobody else
  },
  "autoApprovers": {
    "routes": {
      "192.168.0.0/16": ["ann@"], // the office
    },
    "exitNode": ["tag:web"],
  },
  "acls": [{"action": "accept", "src": ["*"], "dst": ["tag:web:443"]}],
}
"""


def test_entries_are_added_and_every_line_that_was_there_stays():
    merged = merge(POLICY, ROUTES, {"tag:k8s": ["ann@"]})
    assert (merged.changed, merged.comments_lost) == (True, False)
    assert set(POLICY.splitlines()) < set(merged.text.splitlines())
    assert read(merged.text).data["autoApprovers"]["routes"] == {
        "192.168.0.0/16": ["ann@"],
        **ROUTES,
    }
    assert read(merged.text).data["tagOwners"] == {"tag:web": ["ann@"], "tag:k8s": ["ann@"]}


def test_a_second_merge_changes_nothing():
    once = merge(POLICY, ROUTES, {})
    again = merge(once.text, ROUTES, {})
    assert (again.changed, again.text) == (False, once.text)


def test_what_was_added_goes_again_and_the_text_is_as_before():
    owners = {"tag:k8s": []}
    assert withdraw(merge(POLICY, ROUTES, owners).text, ROUTES, owners).text == POLICY


PODS = Mesh((ip_network("10.244.0.0/16"), ip_network("fd44::/48")), ("tag:k8s",))


def with_pods(text: str) -> Merged:
    return merge(text, {}, {}, pods=judge(text, (0, 29), PODS))


def test_the_rule_for_pods_is_added_once_and_every_line_that_was_there_stays():
    merged = with_pods(POLICY)
    assert (merged.changed, merged.comments_lost) == (True, False)
    kept = set(POLICY.splitlines()) - {POLICY.splitlines()[-2]}  # its list is on one line
    assert kept < set(merged.text.splitlines())
    data = read(merged.text).data
    assert data["acls"] == [read(POLICY).data["acls"][0], rule_for(PODS, "acls")]
    assert data["tagOwners"] == {"tag:web": ["ann@"], "tag:k8s": []}
    assert not with_pods(merged.text).changed


@pytest.mark.parametrize(
    "text",
    [
        '{"acls": []}',
        '{\n  "Acls": [\n    // none so far\n  ],\n}\n',
        '{"grants": [{"src": ["ann@"], "dst": ["*"], "ip": ["*"]}]}',
        POLICY,
    ],
)
def test_the_rule_for_pods_goes_again_and_the_text_is_as_before(text):
    merged = with_pods(text)
    assert judge(merged.text, (0, 29), PODS).status == "allowed"
    gone = withdraw(merged.text, {}, {"tag:k8s": []}, PODS)
    assert not gone.comments_lost
    expected = {"tagOwners": {}, **read(text).data}
    assert {"tagOwners": {}, **read(gone.text).data} == expected
    assert not withdraw(gone.text, {}, {}, PODS).changed


def test_the_last_rule_leaves_an_empty_list_because_without_it_all_would_be_allowed():
    merged = with_pods('{"acls": []}')
    assert read(withdraw(merged.text, {}, {}, PODS).text).data["acls"] == []


def test_a_policy_that_lets_pods_through_gets_no_rule():
    for text in ("", "{}", '{"acls": [{"action": "accept", "src": ["*"], "dst": ["*:*"]}]}'):
        assert not with_pods(text).changed


def test_a_new_list_of_rules_is_written_one_rule_below_the_other():
    verdict = judge("{}", (0, 26), PODS)
    text = merge('{\n  "tagOwners": {"tag:k8s": []},\n}\n', {}, {}, pods=verdict).text
    assert '  "acls": [\n    {\n      "action": "accept",\n' in text


def test_a_tag_that_an_approver_needs_is_added_with_no_owners():
    assert read(merge("", ROUTES, {}).text).data["tagOwners"] == {"tag:k8s": []}
    owners = read(merge("", {}, {"tag:a": ["tag:b"]}).text).data["tagOwners"]
    assert owners == {"tag:a": ["tag:b"], "tag:b": []}


def test_approvers_join_those_who_are_there_however_the_range_is_spelled():
    text = '{"autoApprovers": {"routes": {"FD44:0::/48": ["ann@"]}}, "tagOwners": {"tag:k8s": []}}'
    merged = merge(text, {"fd44::/48": ["tag:k8s"]}, {})
    assert merged.text == text.replace('["ann@"]', '["ann@", "tag:k8s"]')
    assert withdraw(merged.text, {"fd44::/48": ["tag:k8s"]}, {}).text == text


def test_keys_are_found_in_any_case_as_headscale_finds_them():
    text = '{"TagOwners": {"tag:k8s": []}, "autoapprovers": {"Routes": {}}}'
    assert set(read(merge(text, ROUTES, {}).text).data) == {"TagOwners", "autoapprovers"}
    assert tags_of(text) == {"tag:k8s"}


def test_nobody_elses_entry_is_ever_removed():
    assert not withdraw(POLICY, {"192.168.0.0/16": ["bob@"]}, {"tag:web": ["bob@"]}).changed
    assert not withdraw(POLICY, ROUTES, {"tag:k8s": []}).changed


@pytest.mark.parametrize("text", [POLICY, POLICY.replace("tag:web:443", "*:*")])
def test_a_tag_stays_while_another_part_of_the_policy_has_it(text):
    without = withdraw(text, {}, {"tag:web": ["ann@"]})
    assert read(without.text).data["tagOwners"] == {"tag:web": []}
    alone = '{"tagOwners": {"tag:web": ["ann@"], "tag:web-2": []}}'
    assert withdraw(alone, {}, {"tag:web": ["ann@"]}).text == '{"tagOwners": {"tag:web-2": []}}'


def test_a_policy_made_anew_keeps_everything_allowed_where_that_has_to_be_said():
    assert "acls" not in read(merge("", ROUTES, {}).text).data
    acls = read(merge("", ROUTES, {}, allow_all=True).text).data["acls"]
    assert acls == [{"action": "accept", "src": ["*"], "dst": ["*:*"]}]
    assert read(merge(POLICY, ROUTES, {}, allow_all=True).text).data["acls"] != acls


def test_null_is_as_good_as_nothing():
    text = '{"autoApprovers": null, "tagOwners": {"tag:k8s": null}}'
    merged = merge(text, {"10.0.0.0/8": ["tag:k8s"]}, {"tag:k8s": ["ann@"]})
    assert not merged.comments_lost
    assert read(merged.text).data == {
        "autoApprovers": {"routes": {"10.0.0.0/8": ["tag:k8s"]}},
        "tagOwners": {"tag:k8s": ["ann@"]},
    }


def test_what_has_no_place_in_the_text_is_written_anew_and_said(monkeypatch):
    def no_place(*what: object) -> None:
        raise HujsonError("no place")

    monkeypatch.setattr(Document, "put", no_place)
    merged = merge(POLICY, ROUTES, {})
    assert merged.comments_lost
    assert json.loads(merged.text)["autoApprovers"]["routes"].keys() == {
        "192.168.0.0/16",
        *ROUTES,
    }


def test_an_edit_that_would_mean_something_else_is_never_written(monkeypatch):
    monkeypatch.setattr(headscale_policy.Document, "put", lambda *what: None)
    merged = merge(POLICY, ROUTES, {})
    assert merged.comments_lost
    assert json.loads(merged.text)["autoApprovers"]["routes"].keys() > ROUTES.keys()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read: line 1, column 2"),
        ('{"tagOwners": []}', "no object at tagOwners"),
        ('{"autoApprovers": {"routes": {"10.0.0.0/8": "ann@"}}}', r"no list at autoApprovers.r"),
    ],
)
def test_a_policy_of_another_shape_is_refused(text, said):
    with pytest.raises(HeadscaleError, match=said):
        merge(text, ROUTES, {})


@pytest.mark.parametrize(
    ("routes", "owners", "said"),
    [
        ({"10.244.0.1/16": ["tag:k8s"]}, {}, "'10.244.0.1/16', expected a CIDR .*host bits set"),
        ({"pods": ["tag:k8s"]}, {}, "'pods', expected a CIDR"),
        ({"10.0.0.0/8": []}, {}, r"routes\[10.0.0.0/8\]: empty, expected approvers"),
        ({"10.0.0.0/8": {"a": 1}}, {}, "expected a list of names"),
        ({"10.0.0.0/8": ["tag:K8S"]}, {}, "routes: 'tag:K8S', expected tag:"),
        ({}, {"k8s": ["ann@"]}, "tag_owners: 'k8s', expected tag:"),
        ({}, {"tag:k8s": [1]}, "expected a list of names"),
    ],
)
def test_bad_input_is_named(routes, owners, said):
    with pytest.raises(HeadscaleError, match=said):
        parse(routes, owners)


def test_one_name_may_stand_for_a_list():
    assert parse({"10.0.0.0/8": "tag:k8s"}, {"tag:k8s": "ann@"}) == (
        {"10.0.0.0/8": ["tag:k8s"]},
        {"tag:k8s": ["ann@"]},
    )
