"""Pre-auth keys of a real Headscale, and a real node that logs in with one."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from ansible_module import Failed
from headscale_server import VERSION, HeadscaleServer, from_headscale

pytestmark = from_headscale(0, 26)

OF_USER = {} if VERSION >= (0, 28) else {"user": "headcni"}  # before, keys are listed by user


def seconds_left(text: str) -> float:
    when = datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    return (when - datetime.now(timezone.utc)).total_seconds()


def keys(headscale: HeadscaleServer) -> list[dict[str, Any]]:
    query = f"?user={headscale.users['headcni']['id']}" if OF_USER else ""
    found: list[dict[str, Any]] = headscale.ask("GET", f"preauthkey{query}")["preAuthKeys"]
    return found


def kept(headscale: HeadscaleServer, number: str) -> dict[str, Any]:
    return next(key for key in keys(headscale) if key["id"] == number)


def test_a_key_is_minted_each_time_and_is_good_for_the_minutes_asked_for(at, headscale):
    headscale.add_user("headcni")
    made = at("preauth_key", user="headcni", tags=["tag:k8s"], reusable=True, expiration_minutes=7)
    assert made["changed"]
    assert made["key"].startswith("hskey-auth-") or VERSION < (0, 28)
    assert 300 < seconds_left(made["expiration"]) <= 422
    held = kept(headscale, made["id"])
    assert (held["reusable"], held["ephemeral"], held["aclTags"]) == (True, False, ["tag:k8s"])
    assert at("preauth_key", user="headcni")["id"] != made["id"]


def test_check_mode_mints_none_and_the_key_is_in_no_diff(at, headscale):
    headscale.add_user("headcni")
    before = keys(headscale)
    predicted = at("preauth_key", check=True, user="headcni")
    assert (predicted["changed"], predicted["key"], predicted["id"]) == (True, "", "")
    assert keys(headscale) == before
    made = at("preauth_key", user="headcni")
    assert made["key"] not in json.dumps(made["diff"])


def test_in_check_mode_the_user_may_be_about_to_be_made(at, headscale):
    predicted = at("preauth_key", check=True, user="headcni")
    assert predicted["changed"]
    assert "has no user 'headcni' yet" in str(predicted["warnings"])
    with pytest.raises(Failed, match="has no user 'headcni': make it with headscale_user"):
        at("preauth_key", user="headcni")


@from_headscale(0, 28)
def test_tags_can_own_the_nodes_without_a_user(at, headscale):
    assert at("preauth_key", tags=["tag:k8s"])["key"]


@pytest.mark.parametrize("how", ["id", "prefix", "whole key"])
def test_a_key_is_expired_by_its_number_or_its_beginning(at, headscale, how):
    headscale.add_user("headcni")
    made = at("preauth_key", user="headcni")
    at("preauth_key", user="headcni")
    which = {
        "id": {"id": made["id"]},
        "prefix": {"prefix": made["key"][:23]},
        "whole key": {"prefix": made["key"]},
    }[how]
    done = at.twice("preauth_key", state="expired", **which, **OF_USER)
    assert [key["id"] for key in done["keys"]] == [made["id"]]
    when = kept(headscale, made["id"])["expiration"][:19] + "Z"
    assert seconds_left(when) <= 0


@from_headscale(0, 28)
def test_a_key_is_deleted_and_a_second_time_it_is_gone(at, headscale):
    headscale.add_user("headcni")
    made = at("preauth_key", user="headcni")
    at.twice("preauth_key", state="absent", id=made["id"])
    assert made["id"] not in [key["id"] for key in keys(headscale)]


@from_headscale(0, 28)
def test_a_beginning_that_several_keys_have_is_refused(at, headscale):
    headscale.add_user("headcni")
    at("preauth_key", user="headcni")
    at("preauth_key", user="headcni")
    with pytest.raises(Failed, match=r"several keys begin so \(ids \d+, \d+"):
        at("preauth_key", state="expired", prefix="hskey-auth-")


def test_a_node_logs_in_with_a_minted_key_and_has_its_tags(at, headscale, tailscaleds):
    made = at.tagged_key("tag:k8s", expiration_minutes=5)
    key = tailscaleds().join(headscale.url, made, "alpha")
    (node,) = at("info", gather=["nodes"], node_key=key)["nodes"]
    assert (node["name"], node["tags"], node["online"]) == ("alpha", ["tag:k8s"], True)


def test_an_hour_is_an_hour_of_the_servers_clock(at, headscale):
    headscale.add_user("headcni")
    made = at("preauth_key", user="headcni", tags=["tag:k8s"])
    skew = at("info", gather=["version"])["clock_skew"]
    left = timedelta(seconds=seconds_left(made["expiration"]) - skew)
    assert timedelta(minutes=59) < left <= timedelta(minutes=60, seconds=2)
