"""Pods under a policy: what we say of it, beside what real nodes are told by a real Headscale; and
what the modules and docs/headscale-policy.md make of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils.headscale_access import (
    ALLOWED,
    MISSING,
    Mesh,
    judge,
)
from ansible_collections.headcni.mesh.plugins.module_utils.headscale_policy import with_tests
from ansible_module import Failed
from headscale_server import (
    VERSION,
    HeadscaleServer,
    Refused,
    Tailscaled,
    from_headscale,
)
from lab_command import CHECKOUT
from netmap import netmap, reaches
from patience import until
from pod_policies import PODS, POLICIES, RANGES, TAG, V4, acl, grant, policy

from tests.modules.conftest import At

pytestmark = from_headscale(0, 26)

MARK = "192.0.2.7/32"


class TwoNodes:
    """Two real nodes at a real Headscale, with approved routes to their pods."""

    def __init__(self, home: Path) -> None:
        self.server = HeadscaleServer(home)
        self.nodes: list[Tailscaled] = []

    def start(self) -> None:
        self.server.start()
        self.server.key = self.server.make_key()
        self.server.add_user("ann")
        key = At(self.server).tagged_key(TAG, reusable=True)
        for number, pods in enumerate(PODS, 1):
            node = Tailscaled(self.server.home / f"node{number}")
            self.nodes.append(node)
            node.start()
            node.join(self.server.url, key, f"node{number}", *pods)
            self.server.approve(self.server.nodes[f"node{number}"], *pods)

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()
        self.server.stop()

    def obey(self, text: str) -> None:
        """Returns once both nodes have heard of it."""
        self.server.ask("PUT", "policy", {"policy": policy([acl([MARK], [f"{TAG}:7"])])})
        until(lambda: all(self._marked(node) for node in self.nodes))
        self.server.ask("PUT", "policy", {"policy": text})
        if VERSION < (0, 29):
            self._restart()
        until(lambda: not any(self._marked(node) for node in self.nodes))

    def _restart(self) -> None:
        """Before 0.29 nodes are not told to forget peers that they no longer have."""
        for node in self.nodes:
            node.stop()
            node.start()
        until(lambda: all(map(self._is_told, self.nodes)))
        until(lambda: all(one["subnetRoutes"] for one in self.server.nodes.values()))
        time.sleep(2)  # then the others hear of it, if they may

    def _is_told(self, node: Tailscaled) -> bool:
        try:
            return bool(netmap(node))
        except subprocess.CalledProcessError:
            return False

    def _marked(self, node: Tailscaled) -> bool:
        return any(MARK in match["Srcs"] for match in netmap(node)["PacketFilter"] or ())

    def talk(self, family: int) -> bool:
        """Whether pods of each node reach those of the other, by all that the nodes were told."""
        at = 0 if family == 4 else 1
        return all(
            reaches(netmap(node), PODS[1 - number][at], PODS[number][at])
            for number, node in enumerate(self.nodes)
        )


@pytest.fixture(scope="module")
def mesh() -> Iterator[TwoNodes]:
    home = Path(tempfile.mkdtemp(prefix="hct-"))
    two = TwoNodes(home)
    try:
        two.start()
        yield two
    finally:
        two.stop()
        shutil.rmtree(home)


def of_family(family: int) -> Mesh:
    networks = [ip_network(cidr) for pair in PODS for cidr in pair]
    return Mesh(
        tuple(one for one in map(ip_network, RANGES) if one.version == family),
        (TAG,),
        pods=tuple(one for one in networks if one.version == family),
    )


def test_without_a_policy_pods_reach_each_other(mesh):
    until(lambda: mesh.talk(4) and mesh.talk(6))
    assert judge("", VERSION[:2], of_family(4)).status == ALLOWED


@pytest.mark.parametrize("text, families", [p[1:] for p in POLICIES], ids=[p[0] for p in POLICIES])
def test_our_verdict_is_what_real_nodes_are_told(mesh, text, families):
    try:
        mesh.obey(text)
    except Refused:
        assert VERSION < (0, 29)
        pytest.skip("this Headscale refuses the policy")
    for family in (4, 6):
        talk = mesh.talk(family)
        assert talk == (family in families) or VERSION < (0, 29)
        assert judge(text, VERSION[:2], of_family(family)).status == (ALLOWED if talk else MISSING)


# The document

DOCUMENT = (CHECKOUT / "docs" / "headscale-policy.md").read_text()
DOCUMENTED = re.findall(r"```json\n(.*?)```", DOCUMENT, re.DOTALL)
BEFORE_029 = [text for text in DOCUMENTED if "grants" not in text]
BEFORE_027 = [text for text in BEFORE_029 if "autogroup:" not in text]
TAKEN = BEFORE_027 if VERSION < (0, 27) else BEFORE_029 if VERSION < (0, 29) else DOCUMENTED


def whole() -> Mesh:
    return Mesh(tuple(map(ip_network, RANGES)), (TAG,))


def test_the_document_has_the_policy_in_both_forms():
    assert any('"acls"' in text for text in DOCUMENTED)
    assert any('"grants"' in text for text in DOCUMENTED)


@pytest.mark.parametrize("text", TAKEN)
def test_each_policy_of_the_document_is_taken_by_headscale_and_lets_pods_talk(mesh, text):
    mesh.obey(text)
    assert mesh.server.policy == text
    assert mesh.talk(4) and mesh.talk(6)
    verdict = judge(text, VERSION[:2], whole())
    assert (verdict.status, verdict.missing, verdict.notes) == (ALLOWED, (), ())


@pytest.mark.parametrize("text", BEFORE_029)
@pytest.mark.parametrize("version", [(0, 26), (0, 27), (0, 28)])
def test_the_acls_of_the_document_are_enough_for_older_ones(text, version):
    assert judge(text, version, whole()).status == ALLOWED


# The modules

PODS_GIVEN = {"pod_ranges": list(RANGES)}
OFFICE = """\
{
  // Only the office.
  "acls": [
    {"action": "accept", "src": ["192.168.0.0/16"], "dst": ["192.168.0.0/16:*"]}, // and no pods
  ],
}
"""


def test_what_is_missing_is_merged_and_then_real_pods_talk(mesh):
    at = At(mesh.server)
    mesh.obey(OFFICE)
    assert not mesh.talk(4)
    assert at("policy_info", **PODS_GIVEN)["pods"]["status"] == MISSING
    done = at.twice("policy", **PODS_GIVEN)
    assert (done["changed"], done["pods"]["status"], done["comments_lost"]) == (
        True,
        ALLOWED,
        False,
    )
    assert set(OFFICE.splitlines()) < set(mesh.server.policy.splitlines())
    assert mesh.server.policy == done["policy"]
    assert at("policy_info", **PODS_GIVEN)["pods"]["status"] == ALLOWED
    until(lambda: mesh.talk(4) and mesh.talk(6))
    gone = at.twice("policy", state="absent", tag_owners={TAG: []}, **PODS_GIVEN)
    assert gone["policy"].replace('\n  "tagOwners": {\n  },', "") == OFFICE


@pytest.mark.parametrize(
    "text, form",
    [
        pytest.param('{"grants": []}', "acls", marks=from_headscale(0, 29)),
        pytest.param(
            policy(None, [grant(["ann@"], ["*"], ["*"])]), "grants", marks=from_headscale(0, 29)
        ),
        (policy([acl(["ann@"], ["*:*"])]), "acls"),
        (policy([]), "acls"),
    ],
)
def test_the_rule_has_the_form_of_the_others(mesh, text, form):
    mesh.obey(text)
    done = At(mesh.server).twice("policy", **PODS_GIVEN)
    assert (done["pods"]["status"], done["pods"]["form"]) == (ALLOWED, form)
    until(lambda: mesh.talk(4) and mesh.talk(6))


def test_a_policy_that_is_enough_is_left_alone(mesh):
    without_rules = ["{}"] if VERSION >= (0, 27) else []
    for text in (*without_rules, policy([acl(["*"], ["*:*"])])):
        mesh.server.ask("PUT", "policy", {"policy": text})
        assert not At(mesh.server)("policy", **PODS_GIVEN)["changed"]
        assert mesh.server.policy == text


@from_headscale(0, 29)
@pytest.mark.parametrize("check", [True, False])
def test_headscales_own_tests_are_run_before_anything_is_written(mesh, check):
    """Here the operator has said that the pods' range must stay closed."""
    closed = [{"src": "10.244.9.9", "deny": ["10.244.8.8:22"]}]
    text = policy([acl(["ann@"], ["*:*"])], tests=closed)
    mesh.server.ask("PUT", "policy", {"policy": text})
    with pytest.raises(Failed, match=r"10.244.9.9 -> 10.244.8.8:22: expected DENIED, got ALLOWED"):
        At(mesh.server)("policy", check=check, **PODS_GIVEN)
    assert mesh.server.policy == text


@from_headscale(0, 29)
def test_the_server_is_asked_to_check_before_it_is_told(mesh, counted):
    mesh.server.ask("PUT", "policy", {"policy": OFFICE})
    At(mesh.server)("policy", **PODS_GIVEN)
    asked = [one for one in counted if "policy" in one]
    check = "POST /api/v1/policy/check"
    get, put = "GET /api/v1/policy", "PUT /api/v1/policy"
    assert asked == [get, check, check, put, get]


@from_headscale(0, 29)
def test_our_tests_fail_at_headscale_if_pods_are_cut_off(mesh):
    checked = {"policy": with_tests(OFFICE, whole())}
    with pytest.raises(AssertionError, match=r"10.244.0.1 -> 10.244.255.254:443 \(tcp\)"):
        mesh.server.ask("POST", "policy/check", checked)
    mesh.server.ask("POST", "policy/check", {"policy": with_tests(DOCUMENTED[0], whole())})


@pytest.mark.parametrize(
    "given, said",
    [
        ({"pod_ranges": ["10.244.0.1/16"]}, "pod_ranges: '10.244.0.1/16', expected a CIDR"),
        ({"pod_ranges": [V4], "node_pod_ranges": ["x"]}, "node_pod_ranges: 'x', expected a CIDR"),
        ({"pod_ranges": [V4], "nodes": []}, r"nodes: \[\], expected the nodes' tags, or one user"),
        ({"pod_ranges": [V4], "nodes": ["tag:x", "ann"]}, "expected the nodes' tags, or one user"),
        ({"pod_ranges": [V4], "nodes": ["tag:X"]}, "nodes: 'tag:X', expected tag: and then"),
    ],
)
def test_wrong_options_are_named(mesh, given, said):
    for module in ("policy", "policy_info"):
        with pytest.raises(Failed, match=said):
            At(mesh.server)(module, **given)


# A policy that is in a file


@pytest.fixture
def in_file() -> Iterator[HeadscaleServer]:
    home = Path(tempfile.mkdtemp(prefix="hct-"))
    server = HeadscaleServer(home, policy_file=OFFICE)
    try:
        server.start()
        server.key = server.make_key()
        yield server
    finally:
        server.stop()
        shutil.rmtree(home)


def test_a_policy_in_a_file_is_judged_and_one_that_cannot_be_read_is_not(in_file):
    at = At(in_file)
    found = at("policy_info", **PODS_GIVEN)
    assert (found["in_file"], found["policy"], found["pods"]["status"]) == (True, OFFICE, MISSING)
    with pytest.raises(Failed, match=r"policy.mode: file"):
        at("policy", **PODS_GIVEN)
    (in_file.home / "policy.hujson").unlink()
    found = at("policy_info", **PODS_GIVEN)
    assert (found["in_file"], found["pods"]["status"]) == (True, "unknown")
    assert "the policy cannot be read: " in found["pods"]["unjudged"][0]
    assert 'add to "acls" of the policy: {"action"' in found["pods"]["remedy"]


def test_headscale_as_it_is_installed_has_no_policy_and_allows_everything(in_file):
    """policy.mode is file and policy.path is empty there; the API then fails to read it."""
    in_file.stop()
    config = in_file.home / "config.yaml"
    path = f"  path: {in_file.home}/policy.hujson"
    assert path in config.read_text()
    config.write_text(config.read_text().replace(path, '  path: ""'))
    in_file.start()
    found = At(in_file)("policy_info", **PODS_GIVEN)
    assert (found["in_file"], found["pods"]["status"]) == (True, ALLOWED)
    assert not At(in_file)("policy", **PODS_GIVEN)["changed"]
