"""The policy of a real Headscale: merged into, judged by it, and left with its comments."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_module import Failed
from headscale_server import VERSION, HeadscaleServer, from_headscale
from patience import until

from tests.modules.conftest import At

pytestmark = from_headscale(0, 26)

ROUTES = {"10.244.0.0/16": ["tag:k8s"], "fd44::/48": ["tag:k8s"]}
POLICY = """\
{
  // The house rules.
  "tagOwners": {
    "tag:web": ["group:ops"], // web
  },
  "groups": {"group:ops": ["ann@"]},
  /* what may be reached */
  "acls": [
    {"action": "accept", "src": ["*"], "dst": ["*:*"]},
  ],
}
"""


@pytest.fixture
def fresh() -> Iterator[HeadscaleServer]:
    """One that never had a policy."""
    home = Path(tempfile.mkdtemp(prefix="hct-"))
    server = HeadscaleServer(home)
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(home)


def started(server: HeadscaleServer) -> At:
    server.start()
    server.key = server.make_key()
    return At(server)


def test_a_server_without_a_policy_gets_one_that_still_allows_everything(fresh, tailscaleds):
    at = started(fresh)
    done = at.twice("policy", routes=ROUTES)
    assert done["diff"]["before"] == ""
    assert ("acls" in fresh.policy) is (VERSION < (0, 27))  # there, no rule means no traffic
    key = at.tagged_key("tag:k8s")
    tailscaleds().join(fresh.url, key, "alpha", "10.244.9.0/24")
    until(lambda: fresh.nodes["alpha"]["subnetRoutes"] == ["10.244.9.0/24"])


def test_headscale_2068_a_part_of_an_auto_approved_range_is_approved_and_nothing_else(
    fresh, tailscaleds
):
    at = started(fresh)
    at("policy", routes=ROUTES)
    key = at.tagged_key("tag:k8s")
    part, other = "10.244.9.0/24", "10.245.9.0/24"
    tailscaleds().join(fresh.url, key, "alpha", part, other)
    until(lambda: set(fresh.nodes["alpha"]["availableRoutes"]) == {part, other})
    until(lambda: fresh.nodes["alpha"]["subnetRoutes"] == [part])


def test_entries_are_merged_into_what_is_there_and_go_again(at, headscale):
    headscale.add_user("ann")
    headscale.ask("PUT", "policy", {"policy": POLICY})
    owners = {"tag:k8s": ["ann@"]}
    done = at.twice("policy", routes=ROUTES, tag_owners=owners)
    assert not done["comments_lost"]
    assert set(POLICY.splitlines()) < set(headscale.policy.splitlines())
    assert (done["diff"]["before"], done["diff"]["after"]) == (POLICY, headscale.policy)
    at.twice("policy", routes=ROUTES, tag_owners=owners, state="absent")
    assert '"tag:k8s"' not in headscale.policy
    assert set(POLICY.splitlines()) <= set(headscale.policy.splitlines())


def test_check_mode_writes_nothing_and_asks_the_server_what_it_thinks(at, headscale):
    headscale.add_user("ann")
    headscale.ask("PUT", "policy", {"policy": POLICY})
    assert at("policy", check=True, routes=ROUTES)["changed"]
    assert headscale.policy == POLICY
    for check in (True, False) if VERSION >= (0, 29) else (False,):  # others check what they keep
        with pytest.raises(Failed, match=r"said: .*group:nobody"):
            at("policy", check=check, routes={"10.0.0.0/8": ["group:nobody"]})
    assert headscale.policy == POLICY


def test_a_policy_in_a_file_is_not_changed_and_the_error_says_what_to_put_there(fresh):
    fresh.policy_file = '{\n  // ours\n  "tagOwners": {"tag:web": []}\n}\n'
    at = started(fresh)
    for check in (True, False):
        with pytest.raises(Failed, match=r"policy.mode: file") as failed:
            at("policy", check=check, routes=ROUTES)
    told = str(failed.value).split("reload Headscale:\n")[1]
    assert "// ours" in told
    fresh.stop()
    fresh.policy_file = told
    fresh.start()
    assert not at("policy", routes=ROUTES)["changed"]
