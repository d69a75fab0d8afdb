"""site.yml and verify.yml, from fresh nodes on: what `make up` runs.

The tests of this module follow each other on one lab, as an operator would go on with it.
"""

from __future__ import annotations

import json
import re
from urllib.parse import urlsplit

import pytest
from forced_relay import only_relayed
from headscale_proxy import headscale_proxy
from lab_command import LabCommand
from leftovers import assert_nothing_left
from patience import until
from site_run import Run, Site

from lab import tools

NODES = ("node1", "node2")
ALL_MODULES = 6  # at most, on a node where nothing is to be done, or for all of them at Headscale


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Every run with one release, whatever becomes of the sources meanwhile."""
    folder = tmp_path_factory.mktemp("dist")
    command = LabCommand("site-yml")
    command("down")
    before = command.listing()
    command.run(".venv/bin/python", "plugins/cni/release.py", "--output", str(folder))
    command("up", "--nodes", "2")
    yield Site(command, {"headcni_node_release_src": str(next(folder.iterdir()))})
    command("down")
    assert_nothing_left(before, command.listing())


@pytest.fixture(scope="module")
def foretold(site) -> Run:
    return site("--check", "--diff")


@pytest.fixture(scope="module")
def first(site, foretold) -> Run:
    """The run that makes fresh machines nodes."""
    return site("--diff")


def test_check_mode_on_fresh_nodes_foretells_the_first_run(foretold, first):
    assert set(foretold.counted("failed").values()) == {0}
    assert foretold.changed == first.changed


def test_the_first_run_ends_in_a_line_for_each_node(first):
    for number, node in enumerate(NODES, 1):
        shown = rf"{node} +host +10\.55\.{number}\.0/24, fd55:0:0:{number}::/64 +config .* ready"
        assert re.search(shown, first.output)


def test_the_labs_own_table_shows_the_mode_that_the_daemon_runs_in(site, first):
    row = next(line for line in site.lab("status").stdout.splitlines() if "node1 " in line)
    assert " host " in row and " yes " in row


def test_every_node_joins_the_tailnet_and_reaches_its_neighbour_directly(site, first):
    status = json.loads(site.lab.on("node1", "tailscale status --json"))
    assert status["BackendState"] == "Running"
    assert [peer["HostName"] for peer in status["Peer"].values()] == ["node2"]
    assert "pong from node2" in site.lab.on("node1", "tailscale ping --until-direct node2")


def test_the_pre_auth_key_is_neither_shown_nor_left_on_a_node(site, first):
    assert "hskey-auth" not in first.output
    places = "/run /etc /root /tmp /var/log /var/tmp /opt"
    for node in NODES:
        assert site.lab.on(node, f"grep -rl hskey- {places}", check=False) == ""


def test_a_second_run_changes_nothing_in_few_tasks_and_asks_headscale_for_all_at_once(site, first):
    url = site.lab.inventory()["lab"]["vars"]["lab_headscale_url"]
    with headscale_proxy(url) as headscale:
        again = site(headcni_headscale_url=headscale.url, tailscale_login_server=url)
    assert again.counted("changed") == dict.fromkeys(NODES, 0)
    for node in NODES:
        assert 0 < len(again.modules(node)) <= ALL_MODULES, again.modules(node)
    # Before the first change, to compare routes with the nodes' networks, and to approve routes.
    assert len(headscale.asked("GET", "/api/v1/node")) == 2


def test_check_mode_on_nodes_that_are_right_shows_no_change_and_no_difference(site, first):
    again = site("--check", "--diff", "-e", "headcni_serial=1")
    assert again.changed == set()
    assert "+++" not in again.output


def test_what_somebody_changed_is_put_right(site, first):
    """What one look finds to be right is passed over: it must see whatever is not."""
    parts = {
        "Install the runtime's release": "rm /opt/cni/bin/headcni",
        "Write the daemon's configuration": "echo '# mine' >> /etc/headcni/config.yaml",
        "Join the tailnet": "tailscale set --accept-dns=true",
        "Put HeadCNI in charge of pods": "sed -i s/1280/1290/ /etc/cni/net.d/10-headcni.conflist",
    }
    site.lab.on("node1", "; ".join(parts.values()))
    foretold, done = site("--check", "--diff"), site()
    assert {host for host, _ in done.changed} == {"node1"}
    assert set(parts) <= {name.rpartition(" : ")[2] for _, name in done.changed}
    assert foretold.changed == done.changed
    assert site().changed == set()


def test_pods_reach_each_other_on_every_pair_and_nothing_stays_behind(site, first):
    """By both families (k3s#11572), unfragmented (tailscale#16820), and nodes by their names
    (tailscale#10499, #6651)."""
    found = site.verify()
    assert re.search(r"node1 +- +ok [\d.]+ ms direct", found.output)
    assert (
        "checked from each pod: v4, v6, mtu4, mtu6, port, route, dns, loss, outside" in found.output
    )
    assert re.search(r"node1 -> node2 +direct +[\d.]+ ms +\d+ % +1280 +\S+:41641", found.output)
    said = "not checked: runtime: no container runtime runs on this node (all 2 nodes)"
    assert said in " ".join(found.output.split())
    assert "every pod reaches every other" in found.output
    for node in NODES:
        assert is_clean(site, node)


def is_clean(site: Site, node: str) -> bool:
    """The daemon deletes a link after it has answered the DEL."""
    return until(lambda: not leftovers(site, node), 30, lambda: leftovers(site, node), every=0.3)


def leftovers(site: Site, node: str) -> str:
    return site.lab.on(
        node,
        "ip netns list; ls -d /run/headcni-probe; ls /sys/class/net | grep ^hc"
        " | grep -v headcni; systemctl --no-legend list-units --all 'headcni-probe*';"
        " nft list ruleset | grep 18473",
        check=False,
    )


def test_a_pod_that_a_cut_off_verification_left_is_removed_by_the_next(site, first, tmp_path):
    playbook = tmp_path / "leave.yml"
    playbook.write_text(
        "- hosts: headcni\n  gather_facts: false\n  tasks:\n"
        "    - headcni.mesh.headcni_probe: {state: present, lifetime: 300}\n"
    )
    site(playbook=str(playbook))
    assert "headcni-probe" in leftovers(site, "node1")
    assert "every pod reaches every other" in site.verify().output
    assert is_clean(site, "node1")


def test_a_pod_that_nobody_takes_away_ends_by_itself(site, first, tmp_path):
    playbook = tmp_path / "leave.yml"
    playbook.write_text(
        "- hosts: node1\n  gather_facts: false\n  tasks:\n"
        "    - headcni.mesh.headcni_probe: {state: present, lifetime: 2}\n"
    )
    site(playbook=str(playbook))
    site.lab.wait("node1", "! test -e /run/netns/headcni-probe && ! test -e /run/headcni-probe")
    assert is_clean(site, "node1")


def test_verification_shows_a_relayed_path_and_what_relays_it(site, first):
    with only_relayed(site.lab, "node2"):
        found = site.verify()
    for pair in ("node1 -> node2", "node2 -> node1"):
        assert re.search(
            rf"{pair} +relayed +[\d.]+ ms +\d+ % +1280 +DERP region \w+ \(999\)", found.output
        )
    assert "a relayed path is slower: let UDP through" in " ".join(found.output.split())
    for node, other in (NODES, NODES[::-1]):
        site.lab.wait(node, f"tailscale ping --until-direct -c 20 {other} >/dev/null")
    assert re.search(r"node1 -> node2 +direct", site.verify().output)


def test_verification_is_red_where_pods_are_cut_off(site, first):
    port = urlsplit(site.lab.inventory()["lab"]["vars"]["lab_headscale_url"]).port
    rules = f" meta l4proto icmp drop\n tcp dport {port} drop"
    chain = f"chain f {{\n type filter hook forward priority 0;\n{rules}\n}}"
    site.lab.write("node2", "/run/cut.nft", f"table inet cut {{\n{chain}\n}}\n".encode())
    site.lab.on("node2", "nft -f /run/cut.nft")
    try:
        found = site.verify(check=False, headcni_verify_timeout=2)
    finally:
        site.lab.on("node2", "nft delete table inet cut")
    assert found.code != 0
    assert re.search(r"node1 +- +FAIL v4 mtu4", found.output)
    assert "node1 -> node2: v4: 10.55.2." in found.output
    said = " ".join(found.output.split())
    assert "node2: outside: the pod does not reach http" in said and "the node itself does" in said
    assert "next, for v4: headcnictl diagnose on both nodes" in said
    assert "next, for outside: headcnictl diagnose on the node" in said
    assert is_clean(site, "node1") and is_clean(site, "node2")


def test_two_nodes_with_one_cidr_are_refused_by_name_before_anything_is_changed(site, first):
    found = site("--diff", check=False, headcni_node_pod_cidr="10.55.9.0/24")
    assert found.changed == set()
    said = found.failures("node1")
    assert "10.55.9.0/24 of node1 overlaps 10.55.9.0/24 of node2" in said


def test_a_node_keeps_the_cidr_that_it_has(site, first):
    found = site("--limit", "node1", check=False, headcni_node_pod_cidr="10.55.9.0/24")
    assert found.changed == set()
    assert "change it with playbooks/change_pod_cidr.yml" in found.failures("node1")


def test_a_node_is_not_taken_out_of_another_tailnet(site, first):
    """It may be its owner's, and how the owner reaches it."""
    other = "https://headscale.example.org"
    found = site("--limit", "node1", check=False, tailscale_login_server=other)
    assert found.changed == set()
    said = found.failures("node1")
    assert "is joined to http" in said and "headcni_take_over=true" in said


def test_a_node_outside_of_the_limit_is_compared_too(site, first, tmp_path):
    hosts = tmp_path / "hosts.yml"
    hosts.write_text("headcni: {hosts: {node1: {headcni_node_pod_cidr: 10.55.2.128/25}}}\n")
    found = site("-i", str(hosts), "--limit", "node1", check=False)
    assert found.changed == set()
    assert "10.55.2.128/25 of node1 overlaps 10.55.2.0/24 of node2" in found.failures("node1")


def test_a_limited_run_touches_only_its_node(site, first):
    found = site("--limit", "node2")
    assert {one["host"] for one in found.tasks} == {"node2"}
    assert found.counted("changed") == {"node2": 0}


def test_tags_do_a_part_and_always_check_first(site, first):
    found = site("--tags", "preflight")
    actions = {one["action"].rpartition(".")[2] for one in found.tasks}
    assert "headcni_preflight" in actions and "headcni_release" not in actions
    found = site("--tags", "routes")
    actions = {one["action"].rpartition(".")[2] for one in found.tasks}
    assert {"headcni_preflight", "headscale_routes"} <= actions and "headcni_release" not in actions
    assert found.changed == set()


def test_headscale_is_made_to_approve_routes_by_itself_if_that_is_asked_for(site, first):
    given = {"headscale_routes_auto_approve": {"10.55.0.0/16": ["tag:headcni"]}}
    foretold, done = site("--check", **given), site(**given)
    assert foretold.changed == done.changed
    assert {name.rpartition(" : ")[2] for _, name in done.changed} == {
        "Let Headscale approve routes by itself"
    }
    assert site(**given).changed == set()


WRONG = [
    ({"headcni_mode": "sideways"}, "sideways"),
    ({"headcni_node_pod_cidr": "10.55.1.1/24"}, "host bits"),
    ({"headcni_node_pod_cidr": "10.55.1.0/31"}, "too small"),
    ({"headcni_node_pod_cidr": "100.64.9.0/24"}, "Tailscale gives to its own devices"),
    ({"headcni_node_pod_cidr": "10.99.1.0/24"}, "within network.podCIDR.base"),
    ({"headcni_node_service_cidr": "10.55.0.0/20"}, "apart from network.serviceCIDR"),
    ({"headcni_node_mtu": 100}, "network.mtu"),
    ({"headcni_node_release_version": "9.9.9"}, "expected 9.9.9"),
    ({"headcni_node_enable_ipv6": False}, "enable_ipv6: false"),
    ({"headcni_node_monitoring_port": 22}, "port 22 is held by sshd"),
    ({"headcni_node_extra_config": {"loging": {"level": "INFO"}}}, "loging"),
    ({"headcni_node_release_src": "/nowhere.tar.gz"}, "release: src"),
    ({"headcni_node_cni_conf_dir": "/proc/net.d"}, "/proc/net.d"),
    ({"headcni_node_bridge": "eth0"}, "eth0 is there and is no bridge"),
    ({"headcni_node_conflist_file": "headcni.yaml"}, "'headcni.yaml' is not a file name"),
    ({"headcni_node_release_keep": 1}, "keep: 1, expected 2 or more"),
    ({"tailscale_hostname": "node_1"}, "hostname: 'node_1' is no host name"),
    ({"headcni_headscale_api_key": "wrong"}, "api_key"),
]


def test_everything_that_is_wrong_is_told_at_once_and_nothing_is_changed(site, first):
    """Several in one run: they must not hide each other."""
    for batch in (*([one] for one in WRONG[:4]), WRONG[4:8], WRONG[8:]):
        given = {name: value for options, _ in batch for name, value in options.items()}
        found = site("--limit", "node1", check=False, **given)
        assert found.code != 0 and found.changed == set()
        for options, said in batch:
            assert said in found.failures("node1"), (options, found.failures("node1"))


def test_a_run_that_was_cut_off_is_finished_by_the_next(site, first):
    """Killed between the daemon's new configuration and its restart."""
    started = "systemctl show -p ActiveEnterTimestampMonotonic --value headcni-daemon"
    before = site.lab.on("node1", started)
    site.cut_off_after("Write the daemon's configuration", headcni_node_mtu=1300)
    assert site.lab.on("node1", started) == before
    found = site(headcni_node_mtu=1300)
    assert ("node1", "headcni.mesh.headcni_node : Write the daemon's configuration") not in (
        found.changed
    )
    assert site.lab.on("node1", started) != before
    assert '"mtu": 1300' in site.lab.on("node1", "cat /etc/cni/net.d/10-headcni.conflist")
    assert site().counted("failed") == dict.fromkeys(NODES, 0)


def test_a_node_that_cannot_be_reached_does_not_hold_up_the_others(site, first):
    site.lab.on("node1", "rm /etc/cni/net.d/10-headcni.conflist")
    site.lab("cut", "node2")
    try:
        found = site(check=False, ansible_ssh_timeout=5)
    finally:
        site.lab("heal", "node2")
    assert found.code != 0
    assert found.recap["node2"]["unreachable"] == 1
    assert found.recap["node1"]["failed"] == 0
    assert "node2 " in found.output and "NOT FINISHED" in found.output
    assert "10-headcni.conflist" in site.lab.on("node1", "ls /etc/cni/net.d")


def test_a_node_that_is_lost_in_the_midst_of_a_run_does_not_hold_up_the_others(site, first):
    """The next run finishes it, too."""
    found = site.after(
        "Write the daemon's configuration",
        lambda: site.lab("cut", "node2"),
        headcni_node_mtu=1320,
        ansible_ssh_timeout=5,
    )
    site.lab("heal", "node2")
    assert found.code != 0
    assert (found.recap["node1"]["failed"], found.recap["node2"]["unreachable"]) == (0, 1)
    assert "NOT FINISHED" in found.output
    conflist = "cat /etc/cni/net.d/10-headcni.conflist"
    assert '"mtu": 1320' in site.lab.on("node1", conflist)
    assert '"mtu": 1320' not in site.lab.on("node2", conflist)
    assert site(headcni_node_mtu=1320).counted("failed") == dict.fromkeys(NODES, 0)
    assert '"mtu": 1320' in site.lab.on("node2", conflist)
    assert site().counted("failed") == dict.fromkeys(NODES, 0)


def test_a_node_more_joins_without_any_way_out_and_the_others_stay_as_they_are(site, first):
    """All that it needs comes from the controller."""
    site.lab("up", "--nodes", "3")
    site.lab.on("node3", "ip route del default; ip -6 route del default")
    files = str(tools.TAILSCALE.home / "mirror" / "stable")
    nowhere = "http://192.0.2.1/stable"
    found = site(
        tailscale_method="files", tailscale_files_dir=files, tailscale_download_url=nowhere
    )
    by_the_controller = {"Create a pre-auth key for this run", "Approve the nodes' routes"}
    others = {task.rpartition(" : ")[2] for host, task in found.changed if host != "node3"}
    assert others == by_the_controller
    assert "every pod reaches every other" in site.verify().output
    shown = site.lab("up", "--nodes", "3")
    assert "the lab is up: 3 nodes" in shown.stderr
    assert re.search(r"node3 .* running +100\.64\.0\.\d+", shown.stdout)
    refused = site.lab("up", "--nodes", "2", check=False)
    assert refused.returncode == 1
    assert refused.stderr == "lab: the lab has 3 nodes: `make down` before NODES=2\n"
