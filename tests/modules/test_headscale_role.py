"""The role on a real Headscale, run by ansible-playbook as a user would."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml
from headscale_proxy import headscale_proxy
from headscale_server import from_headscale
from lab_command import CHECKOUT

ROLE = "headcni.mesh.headscale_routes"


class Playbook:
    """A play of alpha, beta and gamma, which are this machine; nothing is done on them."""

    def __init__(self, home: Path, server: Any) -> None:
        self.home, self.server = home, server
        self.hosts: dict[str, dict[str, Any]] = {"alpha": {}, "beta": {}, "gamma": {}}
        self.vars: dict[str, Any] = {
            "headcni_headscale_url": server.url,
            "headcni_headscale_api_key": server.key,
        }

    def run(self, *entries: str, options: tuple[str, ...] = (), **how: Any) -> Any:
        tasks: list[dict[str, Any]] = [
            {"ansible.builtin.include_role": {"name": ROLE, "tasks_from": entry}}
            for entry in entries
        ]
        tasks += how.pop("then", [])
        play = {"hosts": "all", "gather_facts": False, "vars": self.vars, "tasks": tasks, **how}
        # No connection could be made to these: all must be done on the controller.
        inventory = {"all": {"hosts": self.hosts, "vars": {"ansible_connection": "ssh"}}}
        for name, content in (("play.yml", [play]), ("hosts.yml", inventory)):
            (self.home / name).write_text(yaml.safe_dump(content))
        return subprocess.run(
            [
                CHECKOUT / ".venv/bin/ansible-playbook",
                *("-i", self.home / "hosts.yml", self.home / "play.yml", *options),
            ],
            env={
                **os.environ,
                "ANSIBLE_COLLECTIONS_PATH": str(CHECKOUT / "collections"),
                "ANSIBLE_CACHE_PLUGIN": "jsonfile",
                "ANSIBLE_CACHE_PLUGIN_CONNECTION": str(self.home / "facts"),
                "ANSIBLE_LOG_PATH": str(self.home / "log"),
                "ANSIBLE_LOCALHOST_WARNING": "false",
                "ANSIBLE_FORCE_COLOR": "0",
                "ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.default",
            },
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def ok(self, *entries: str, **how: Any) -> str:
        done = self.run(*entries, **how)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def fails(self, *entries: str, **how: Any) -> str:
        done = self.run(*entries, **how)
        assert done.returncode != 0, done.stdout
        return " ".join((done.stdout + done.stderr).split())


@pytest.fixture
def playbook(headscale, tmp_path) -> Playbook:
    return Playbook(tmp_path, headscale)


@pytest.fixture
def joined(playbook, headscale) -> Playbook:
    """Its hosts have joined, and have pod ranges."""
    for number, host in enumerate(playbook.hosts, 1):
        made = headscale.add_node(host)
        playbook.hosts[host] = {
            "tailscale_standing": {"node_key": made["nodeKey"], "needs_login": False},
            "headcni_node_preflight": {
                "pod_cidrs": [f"10.244.{number}.0/24", f"fd44:0:0:{number}::/64"]
            },
        }
    return playbook


def changes(said: str) -> int:
    return sum(
        int(line.split("changed=")[1].split()[0])
        for line in said.splitlines()
        if "changed=" in line
    )


def test_preflight_passes_and_changes_nothing(playbook):
    assert changes(playbook.ok("preflight")) == 0


def test_preflight_stops_every_host_with_the_reason(playbook):
    playbook.vars["headcni_headscale_api_key"] = "hskey-api-000000000000-wrong"
    assert "api_key: Headscale at" in playbook.fails("preflight")
    playbook.vars["headcni_headscale_url"] = "http://127.0.0.1:9"
    said = playbook.fails("preflight")
    assert "cannot be reached: Connection refused" in said
    assert "PLAY RECAP" in said and "unreachable=0" in said


@pytest.mark.parametrize(
    "given, said",
    [
        ({"tags": ["tag:ok", "tag:No Good"]}, "headscale_routes_tags: 'tag:No Good', expected tag"),
        ({"key_expiration_minutes": 0}, "headscale_routes_key_expiration_minutes: 0, expected 1"),
        ({"user": "", "tags": []}, "headscale_routes_user: empty, and headscale_routes_tags is"),
    ],
)
def test_preflight_names_what_no_key_can_be_made_of(playbook, given, said):
    playbook.vars.update({f"headscale_routes_{name}": value for name, value in given.items()})
    assert said in playbook.fails("preflight")


def test_why_there_is_no_key_is_told_though_the_key_is_not(joined):
    joined.hosts["alpha"]["tailscale_standing"]["needs_login"] = True
    joined.vars["headscale_routes_key_expiration_minutes"] = 10**9
    assert "expiration_minutes: 1000000000, expected a number from 1" in joined.fails("key")


def test_what_is_missing_is_named_before_anything_is_asked(playbook):
    del playbook.vars["headcni_headscale_url"]
    said = playbook.fails("approve")
    assert "headcni_headscale_url" in said


def test_a_key_is_minted_only_if_a_host_must_log_in(joined, headscale):
    before = len(headscale.ask("GET", "preauthkey")["preAuthKeys"])
    shown = [{"debug": {"msg": "the key is <{{ headscale_routes_key.key | default('') }}>"}}]
    assert "the key is <>" in joined.ok("key", then=shown)
    assert len(headscale.ask("GET", "preauthkey")["preAuthKeys"]) == before
    for host in ("alpha", "gamma"):
        joined.hosts[host]["tailscale_standing"]["needs_login"] = True
    measured = [
        {"debug": {"msg": "{{ inventory_hostname }} has {{ headscale_routes_key.key[:11] }}"}}
    ]
    said = joined.ok("key", then=measured)
    assert all(f"{host} has hskey-auth-" in said for host in joined.hosts)
    assert changes(said) == 1  # the user is there, the key is one for all
    made = headscale.ask("GET", "preauthkey")["preAuthKeys"][-1]
    assert (made["reusable"], made["aclTags"]) == (True, ["tag:headcni"])
    joined.hosts["alpha"]["tailscale_standing"]["needs_login"] = False
    joined.ok("key")
    assert headscale.ask("GET", "preauthkey")["preAuthKeys"][-1]["reusable"] is False


@from_headscale(0, 29)
def test_a_node_with_tags_that_must_log_in_does_not_keep_its_expiry(joined, headscale):
    """Seen with Headscale 0.29: it takes the key, and the node is as expired as before."""
    headscale.ask("PUT", "policy", {"policy": '{"tagOwners": {"tag:headcni": ["headcni@"]}}'})
    for host in joined.hosts:
        node = headscale.nodes[host]
        headscale.ask("POST", f"node/{node['id']}/tags", {"tags": ["tag:headcni"]})
        headscale.approve(node, joined.hosts[host]["headcni_node_preflight"]["pod_cidrs"][0])
        headscale.ask("POST", f"node/{node['id']}/expire")
    logged_out, expired, other = (joined.hosts[host]["tailscale_standing"] for host in joined.hosts)
    logged_out.update(needs_login=True, node_key="")
    expired.update(needs_login=True)
    assert other["needs_login"] is False
    assert changes(joined.ok("key")) == 2, "the nodes, and the key"
    assert [headscale.nodes[host]["expiry"] is None for host in joined.hosts] == [
        *(True, True, False)
    ]


@pytest.mark.parametrize("failing", [[], ["alpha"], ["alpha", "beta", "gamma"]])
def test_the_key_of_a_run_is_worth_nothing_afterwards_whoever_fails(joined, headscale, failing):
    for host in ("alpha", "gamma"):
        joined.hosts[host]["tailscale_standing"]["needs_login"] = True

    def role(entry: str) -> dict[str, Any]:
        return {"ansible.builtin.include_role": {"name": ROLE, "tasks_from": entry}}

    fails = {"ansible.builtin.fail": {}, "when": f"inventory_hostname in {failing}"}
    used = {"ansible.builtin.debug": {"msg": "{{ inventory_hostname }} logs in"}}
    block = {"block": [role("key"), fails, used], "always": [role("expire_key")]}
    said = joined.run(then=[block]).stdout
    (made,) = (key for key in headscale.ask("GET", "preauthkey")["preAuthKeys"][-1:])
    assert made["reusable"] is True
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
    assert made["expiration"][:19] <= now
    # Nobody who logs in finds it expired already.
    after = said.rpartition("Expire the pre-auth key")[2]
    assert "logs in" not in after and said.count("logs in") == len(joined.hosts) - len(failing)


def test_check_mode_on_a_fresh_server_predicts_the_user_and_the_key(playbook, headscale):
    playbook.hosts["alpha"] = {"tailscale_standing": {"needs_login": True}}
    said = playbook.ok("preflight", "key", options=("--check", "--diff"))
    assert (changes(said), headscale.users) == (2, {})
    assert changes(playbook.ok("preflight", "key")) == 2


def test_all_routes_are_approved_by_one_task_with_one_listing(joined, headscale):
    assert changes(joined.ok("approve", options=("--check",))) == 1
    said = joined.ok("approve", options=("--diff",))
    assert changes(said) == 1
    assert headscale.approved("beta") == {"10.244.2.0/24", "fd44:0:0:2::/64"}
    assert "+" in said and "10.244.3.0/24" in said
    assert changes(joined.ok("approve")) == 0


def test_in_check_mode_a_host_may_be_about_to_join(joined, headscale):
    joined.hosts["gamma"] = {"headcni_node_configured": {"pod_cidrs": ["10.244.9.0/24"]}}
    headscale.ask("DELETE", f"node/{headscale.nodes['gamma']['id']}")
    assert changes(joined.ok("approve", options=("--check",))) == 1
    assert "nodes[2] (gamma): give one of node_key, id and name" in joined.fails("approve")


def test_a_host_that_is_not_in_the_batch_is_left_for_its_own(joined, headscale):
    said = joined.ok("approve", serial=1)
    assert changes(said) == 3
    joined.ok("approve", options=("--limit", "alpha"))


def test_two_hosts_with_one_range_are_refused(joined, headscale):
    joined.hosts["gamma"]["headcni_node_configured"] = {"pod_cidrs": ["10.244.1.0/24"]}
    said = joined.fails("approve")
    assert "overlaps 10.244.1.0/24 of" in said
    assert headscale.approved("alpha") == set()


def test_a_host_that_is_refused_is_left_out_with_its_own_reason_and_the_others_go_on(
    joined, headscale
):
    stale = headscale.add_node("stale")
    headscale.approve(stale, "10.244.1.0/24")
    headscale.ask("DELETE", f"node/{headscale.nodes['gamma']['id']}")
    then = [{"debug": {"msg": "the daemon of {{ inventory_hostname }} starts"}}]
    for options in (("--check",), ()):
        done = joined.run("approve", then=then, options=options)
        said = " ".join((done.stdout + done.stderr).split())
        assert done.returncode == 2
        assert (
            f"10.244.1.0/24 for alpha overlaps 10.244.1.0/24 of node stale (id {stale['id']})"
            in said
        )
        assert "the daemon of beta starts" in said and "the daemon of alpha starts" not in said
        recap = {line.split()[0]: line for line in done.stdout.splitlines() if "failed=" in line}
        assert "failed=1" in recap["alpha"] and "failed=0" in recap["beta"]
        # In check mode it may be about to join.
        assert ("failed=1" in recap["gamma"]) == (not options)
    assert "Headscale does not know gamma (node_key nodekey:" in said
    assert headscale.approved("alpha") == set()
    assert headscale.approved("beta") == {"10.244.2.0/24", "fd44:0:0:2::/64"}
    headscale.ask("DELETE", f"node/{stale['id']}")
    assert "the daemon of alpha starts" in joined.run("approve", then=then).stdout
    assert headscale.approved("alpha") == {"10.244.1.0/24", "fd44:0:0:1::/64"}


def test_the_policy_is_set_if_it_is_asked_for(playbook, headscale):
    assert changes(playbook.ok("policy")) == 0
    playbook.vars["headscale_routes_auto_approve"] = {"10.77.0.0/16": ["tag:headcni"]}
    assert changes(playbook.ok("policy")) == 1
    assert changes(playbook.ok("policy")) == 0
    assert "10.77.0.0/16" in headscale.policy


OFFICE = """\
{
  // Only the office.
  "acls": [
    {"action": "accept", "src": ["192.168.0.0/16"], "dst": ["192.168.0.0/16:*"]}, // and no pods
  ],
}
"""
NOTES = [{"debug": {"msg": "noted <{{ headscale_routes_notes | default('nothing at all') }}>"}}]


@pytest.fixture
def clustered(joined, headscale) -> Iterator[Playbook]:
    """Its preflight has found the cluster's ranges, too."""
    for host in joined.hosts.values():
        host["headcni_node_preflight"]["cluster_cidrs"] = ["10.244.0.0/16", "fd44::/48"]
    yield joined
    headscale.ask("PUT", "policy", {"policy": ALL_ALLOWED})


ALL_ALLOWED = '{"acls": [{"action": "accept", "src": ["*"], "dst": ["*:*"]}]}'


def test_preflight_stops_every_host_if_the_policy_cuts_pods_off_and_names_the_rule(
    clustered, headscale
):
    headscale.ask("PUT", "policy", {"policy": OFFICE})
    done = clustered.run("preflight", then=NOTES)
    said = " ".join((done.stdout + done.stderr).split())
    for host in clustered.hosts:
        assert f"fatal: [{host}]: FAILED!" in said
    assert "headscale_routes_policy: check, and Headscale's policy cuts pods off: no rule" in said
    assert "no rule lets 10.244.0.0/16 reach 10.244.0.0/16; no rule lets fd44::/48" in said
    assert "Say headscale_routes_policy: merge, or add to" in said
    recap = [line for line in done.stdout.splitlines() if "failed=" in line]
    assert len(recap) == 3 and all("failed=1" in line for line in recap)
    assert "noted" not in said
    assert headscale.policy == OFFICE


def test_preflight_passes_a_policy_that_lets_pods_through_and_has_nothing_to_note(
    clustered, headscale
):
    headscale.ask("PUT", "policy", {"policy": ALL_ALLOWED})
    said = clustered.ok("preflight", then=NOTES)
    assert said.count("noted <[]>") == 3 and changes(said) == 0


def test_preflight_asks_once_for_the_policy_of_all_hosts(clustered, headscale):
    headscale.ask("PUT", "policy", {"policy": ALL_ALLOWED})
    said = clustered.ok("preflight", options=("-v",))
    assert said.count('"in_file": false') == 1


def test_the_policy_is_not_looked_at_if_that_is_asked_for(clustered, headscale):
    headscale.ask("PUT", "policy", {"policy": OFFICE})
    clustered.vars["headscale_routes_policy"] = "ignore"
    assert "noted <nothing at all>" in clustered.ok("preflight", "policy", then=NOTES)
    assert headscale.policy == OFFICE


def test_a_policy_that_could_not_be_judged_is_noted_and_stops_nobody(clustered, headscale):
    steered = """{
      "tagOwners": {"tag:router": []},
      "grants": [
        {"src": ["*"], "dst": ["*"], "ip": ["*"]},
        {"src": ["*"], "dst": ["10.244.0.0/16"], "ip": ["*"], "via": ["tag:router"]},
      ],
    }"""
    headscale.ask("PUT", "policy", {"policy": steered})
    said = " ".join(clustered.ok("preflight", then=NOTES).split())
    assert "policy could not be judged for pods (grants[1] could not be judged: it sends" in said
    assert "If pods do not reach those of other nodes, add to" in said


def test_merge_adds_the_rule_once_with_a_diff_and_keeps_the_comments(clustered, headscale):
    headscale.ask("PUT", "policy", {"policy": OFFICE})
    clustered.vars["headscale_routes_policy"] = "merge"
    predicted = clustered.ok("preflight", "policy", options=("--check", "--diff"))
    assert (changes(predicted), headscale.policy) == (1, OFFICE)
    done = clustered.ok("preflight", "policy", options=("--diff",))
    assert changes(done) == 1
    for said in (predicted, done):
        assert '+      "src": ["tag:headcni", "10.244.0.0/16", "fd44::/48"]' in said
    assert set(OFFICE.splitlines()) < set(headscale.policy.splitlines())
    again = clustered.ok("preflight", "policy", then=NOTES)
    assert changes(again) == 0 and "noted <[]>" in again
    clustered.vars["headscale_routes_policy"] = "check"
    clustered.ok("preflight")


PROPOSE = {"ansible.builtin.import_tasks": str(CHECKOUT / "playbooks/tasks/propose_policy.yml")}


def test_a_proposal_shows_the_missing_rule_and_writes_nothing(clustered, headscale):
    """The tasks of playbooks/policy.yml, without --check and without --diff."""
    headscale.ask("PUT", "policy", {"policy": OFFICE})
    said = clustered.ok(then=[PROPOSE])
    assert '+      "src": ["tag:headcni", "10.244.0.0/16", "fd44::/48"]' in said
    assert headscale.policy == OFFICE
    headscale.ask("PUT", "policy", {"policy": ALL_ALLOWED})
    said = clustered.ok(then=[PROPOSE])
    assert changes(said) == 0 and "+ " not in said


def test_nodes_without_tags_are_let_through_as_their_users(clustered, headscale):
    headscale.ask("PUT", "policy", {"policy": OFFICE})
    clustered.vars.update(headscale_routes_policy="merge", headscale_routes_tags=[])
    clustered.ok("preflight", "policy")
    assert '"headcni@:*"' in headscale.policy


def test_without_pod_ranges_there_is_nothing_to_judge(playbook, headscale):
    headscale.ask("PUT", "policy", {"policy": OFFICE})
    for mode in ("check", "merge"):
        playbook.vars["headscale_routes_policy"] = mode
        assert changes(playbook.ok("preflight", "policy")) == 0
    headscale.ask("PUT", "policy", {"policy": ALL_ALLOWED})


def test_a_word_that_is_no_choice_is_refused(playbook):
    playbook.vars["headscale_routes_policy"] = "mrege"
    assert "value of headscale_routes_policy must be one of: check, merge, ignore" in (
        playbook.fails("preflight")
    )


def test_become_and_the_nodes_own_python_do_not_reach_the_controller(joined):
    for host in joined.hosts.values():
        host["ansible_python_interpreter"] = "/nowhere/python"
    joined.ok("preflight", "approve", become=True, become_user="nobody", become_method="su")


def test_no_key_is_printed_logged_or_cached(joined, headscale, tmp_path):
    for host in joined.hosts.values():
        host["tailscale_standing"]["needs_login"] = True
    kept = tmp_path / "minted"
    copied = {
        "ansible.builtin.copy": {"content": "{{ headscale_routes_key.key }}", "dest": str(kept)},
        "delegate_to": "localhost",
        "run_once": True,
        "no_log": True,
    }
    said = joined.ok("preflight", "key", "approve", then=[copied], options=("-vvvv", "--diff"))
    minted = kept.read_text()
    assert minted.startswith("hskey-auth-")
    everything = said + "".join(
        path.read_text()
        for path in tmp_path.rglob("*")
        if path.is_file() and path != kept and path.name != "play.yml"
    )
    assert (tmp_path / "log").stat().st_size > 1000
    for secret in (minted, minted.rsplit("-", 1)[1], headscale.key):
        assert secret not in everything
    assert json.dumps(headscale.key) not in everything


def test_alone_the_role_does_what_there_is_to_do(joined, headscale):
    joined.hosts["alpha"]["tailscale_standing"]["needs_login"] = True
    joined.vars["headscale_routes_auto_approve"] = {"10.88.0.0/16": ["tag:headcni"]}
    assert changes(joined.ok("main")) == 3
    assert headscale.approved("gamma") == {"10.244.3.0/24", "fd44:0:0:3::/64"}
    joined.hosts["alpha"]["tailscale_standing"]["needs_login"] = False
    assert changes(joined.ok("main")) == 0


def test_alone_it_takes_nodes_that_are_no_hosts_of_the_play(playbook, headscale):
    headscale.add_node("elsewhere")
    playbook.vars["headscale_routes_nodes"] = [{"name": "elsewhere", "routes": ["10.66.0.0/24"]}]
    assert changes(playbook.ok("main")) == 1
    assert headscale.approved("elsewhere") == {"10.66.0.0/24"}
    assert changes(playbook.ok("main")) == 0
    playbook.vars["headscale_routes_nodes"].append({"name": "nobody", "routes": ["10.67.0.0/24"]})
    assert "Headscale does not know nobody; see that it has joined" in playbook.fails("main")


def leaving(joined, **keeps: bool) -> None:
    """What a playbook says of its hosts: each as it knows it itself."""
    for host, keep in keeps.items():
        known = joined.hosts[host]
        known["leaves"] = [
            {
                "host": host,
                "node_key": known["tailscale_standing"]["node_key"],
                "routes": known["headcni_node_preflight"]["pod_cidrs"],
                "keep_identity": keep,
            }
        ]
    joined.vars["_headscale_routes_leaving"] = (
        "{{ ansible_play_batch | map('extract', hostvars, 'leaves') | flatten }}"
    )


def test_identities_are_withdrawn_with_one_listing_for_all_hosts(joined, headscale):
    joined.ok("approve")
    leaving(joined, alpha=True, beta=False, gamma=False)
    assert changes(joined.ok("withdraw_nodes", options=("--check",))) == 2
    assert set(headscale.nodes) == {"alpha", "beta", "gamma"}
    with headscale_proxy(headscale.url) as proxy:
        joined.vars["headcni_headscale_url"] = proxy.url
        assert changes(joined.ok("withdraw_nodes")) == 2
        # One for the routes, one for the identities.
        assert len(proxy.asked("GET", "/api/v1/node")) == 2
    assert (set(headscale.nodes), headscale.approved("alpha")) == ({"alpha"}, set())
    joined.vars["headcni_headscale_url"] = headscale.url
    assert changes(joined.ok("withdraw_nodes")) == 0


def test_a_host_that_headscale_cannot_be_told_about_fails_alone(joined, headscale):
    joined.ok("approve")
    leaving(joined, alpha=True, beta=True, gamma=False)
    joined.hosts["alpha"]["leaves"][0]["node_key"] = "no key at all"
    then = [{"debug": {"msg": "{{ inventory_hostname }} goes on"}}]
    done = joined.run("withdraw_nodes", then=then)
    assert done.returncode == 2
    assert "expected nodekey: and 64 digits" in done.stdout
    assert "beta goes on" in done.stdout and "gamma goes on" in done.stdout
    assert "alpha goes on" not in done.stdout
    assert headscale.approved("beta") == set() and "gamma" not in headscale.nodes
