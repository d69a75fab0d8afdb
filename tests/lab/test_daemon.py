"""The node daemon in host mode, as systemd runs it: warm calls, routes of our own, and no harm."""

from __future__ import annotations

import json
import re

import pytest

NODES = ("node1", "node2")
READY = "curl -fsS http://127.0.0.1:9001/ready"


@pytest.fixture(scope="module")
def daemons(approved):
    for number, node in enumerate(NODES, 1):
        own = f"[10.55.{number}.0/24, 'fd55:0:0:{number}::/64']"
        text = (
            f"network:\n  podCIDR:\n    nodeLocal: {own}\n    base: [10.55.0.0/16, 'fd55::/48']\n"
        )
        approved.write(node, "/etc/headcni/config.yaml", text.encode())
        plugin = {
            "type": "headcni",
            "pod_cidr": f"10.55.{number}.0/24",
            "cluster_cidr": "10.55.0.0/16",
            "ipam": {"type": "headcni-ipam", "subnet": f"10.55.{number}.0/24"},
        }
        conflist = {"cniVersion": "1.0.0", "name": "warm", "plugins": [plugin]}
        approved.write(node, "/etc/cni/net.d/10-warm.conflist", json.dumps(conflist).encode())
        approved.on(
            node,
            "cp /opt/headcni/current/units/headcni-daemon.service /etc/systemd/system/"
            " && systemctl daemon-reload && systemctl start headcni-daemon",
        )
    for node in NODES:
        approved.wait(node, f"{READY} >/dev/null 2>&1", seconds=90)
    yield approved
    for node in NODES:
        approved.on(
            node,
            "systemctl stop headcni-daemon; ip link del headcni0;"
            " rm -f /etc/cni/net.d/10-warm.conflist /etc/systemd/system/headcni-*",
            check=False,
        )


def cnitool(lab, verb: str, node: str, netns: str) -> str:
    return lab.on(
        node,
        f"CNI_PATH=/opt/cni/bin NETCONFPATH=/etc/cni/net.d "
        f"/opt/lab/cni/cnitool {verb} warm /run/netns/{netns}",
    )


@pytest.fixture(scope="module")
def pods(daemons):
    """A pod on each node, and their addresses."""
    found = {}
    for node in NODES:
        daemons.on(node, "ip netns add warm")
        result = json.loads(cnitool(daemons, "add", node, "warm"))
        found[node] = result["ips"][0]["address"].partition("/")[0]
    yield found
    for node in NODES:
        cnitool(daemons, "del", node, "warm")
        daemons.on(node, "ip netns del warm")


def measured(lab, node: str, name: str) -> float:
    text = lab.on(node, "curl -fsS http://127.0.0.1:9001/metrics")
    return sum(float(n) for n in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def lost(report: str) -> int:
    sent, received = map(
        int, re.search(r"(\d+) packets transmitted, (\d+) received", report).groups()
    )
    return sent - received


def test_the_daemon_is_confined_and_has_what_it_needs(daemons):
    said = daemons.on("node1", "systemd-analyze security --no-pager headcni-daemon.service")
    exposure = float(said.rpartition("headcni-daemon.service: ")[2].split()[0])
    assert exposure <= 3.6
    pid = daemons.on("node1", "systemctl show -P MainPID headcni-daemon").strip()
    inside = f"nsenter --target {pid} --mount"
    assert "Read-only file system" in daemons.on("node1", f"{inside} touch /usr/x 2>&1; true")
    assert "tun" not in daemons.on("node1", f"{inside} ls -R /dev")
    # The store takes pods of another boot for dead: all who open it must agree which boot this is.
    boot = "cat /proc/sys/kernel/random/boot_id"
    assert daemons.on("node1", f"{inside} {boot}") == daemons.on("node1", boot)


# A plugin that notes whether it has what the daemon's sandbox lacks.
DELEGATE = """#!/bin/sh
cat >/dev/null
{ grep NoNewPrivs: /proc/self/status
  test -c /dev/net/tun && echo device
  test -e /tmp/of-the-host && echo tmp
  touch /usr/lib/of-a-plugin && rm /usr/lib/of-a-plugin && echo usr
  mkdir -p /var/lib/delegate && touch /var/lib/delegate/state && echo state
  echo "$CNI_COMMAND $CNI_CONTAINERID"
} > /run/delegate-saw 2>&1
"""
LEAVE = (
    "from headcni import exec as e; e.leave_sandbox();"
    " e.invoke('confined', 'DEL', {'CNI_PATH': '/root/delegate', 'CNI_CONTAINERID': 'c1'},"
    " {'cniVersion': '1.0.0', 'name': 'x', 'type': 'confined'}, 20)"
)


def confined(lab, code: str, check: bool = True) -> str:
    """Run Python on node1 as headcni-daemon.service confines the daemon."""
    unit = lab.on("node1", "cat /etc/systemd/system/headcni-daemon.service")
    section = unit.partition("CapabilityBoundingSet=")[2].partition("[Install]")[0]
    lines = [f"CapabilityBoundingSet={section.partition(chr(10))[0]}", *section.splitlines()[1:]]
    limits = " ".join(f"-p '{line}'" for line in lines if "=" in line and line[0] != "#")
    return lab.on(
        "node1",
        f"systemd-run --quiet --wait --pipe --collect {limits} -p ProtectHome=no"
        " -E PYTHONPATH=/opt/headcni/current:/opt/headcni/current/vendor"
        f' /usr/bin/python3 -S -c "{code}" 2>&1',
        check=check,
    )


def test_a_delegate_that_the_daemon_starts_itself_is_outside_of_its_sandbox(daemons):
    daemons.write("node1", "/root/delegate/confined", DELEGATE.encode())
    daemons.on("node1", "chmod +x /root/delegate/confined; touch /tmp/of-the-host")
    try:
        confined(daemons, LEAVE)
        saw = daemons.on("node1", "cat /run/delegate-saw").split("\n")
    finally:
        daemons.on("node1", "rm -rf /root/delegate /tmp/of-the-host /var/lib/delegate /run/dele*")
    assert {"device", "tmp", "usr", "state", "DEL c1", "NoNewPrivs:\t0"} <= set(saw)


def test_the_daemon_can_neither_mount_nor_enter_the_hosts_mounts(daemons):
    """headcni-tailscaled makes the mesh's namespace, not the daemon."""
    code = "from headcni.mesh.namespace import named as n; n.{}"
    assert "PermissionError" in confined(
        daemons, code.format("create('/run/netns/confined')"), check=False
    )
    assert "PermissionError" in confined(
        daemons, code.format("_mount('/run', '/mnt', n._MS_BIND)"), check=False
    )
    assert "confined" not in daemons.on("node1", "ls /run/netns 2>/dev/null; mount")


# It keeps a file for each container below /var/lib, as many plugins do.
STATEFUL = """#!/bin/sh
conf=$(cat)
file=/var/lib/stateful/$CNI_CONTAINERID
case $CNI_COMMAND in
ADD) mkdir -p /var/lib/stateful && touch "$file" || exit 1
     echo "$conf" | python3 -c 'if True:
         import json, sys
         print(json.dumps(json.load(sys.stdin)["prevResult"]))';;
DEL) rm -f "$file";;
VERSION) echo '{"cniVersion": "1.0.0", "supportedVersions": ["0.4.0", "1.0.0"]}';;
esac
"""
CHAIN = {
    "cniVersion": "1.0.0",
    "name": "chained",
    "plugins": [
        {
            "type": "headcni",
            "pod_cidr": "10.57.0.0/24",
            "capabilities": {"portMappings": True},
            "plugins": [
                {"type": "bridge", "bridge": "chained0", "isGateway": True, "ipMasq": True},
                {"type": "portmap", "capabilities": {"portMappings": True}},
                {"type": "stateful"},
            ],
        }
    ],
}
PORT = 18057
PORTS = {"portMappings": [{"hostPort": PORT, "containerPort": 80, "protocol": "tcp"}]}
CHAINED = f"export CNI_PATH=/opt/cni/bin NETCONFPATH=/etc/cni/net.d CAP_ARGS='{json.dumps(PORTS)}';"
# What is there of a pod of the chain: its port of the bridge, its rules, and its file.
OF_THE_CHAIN = (
    f"ip -o link show master chained0 2>/dev/null; iptables-save | grep {PORT};"
    f" nft list ruleset | grep {PORT}; ls /var/lib/stateful 2>/dev/null; true"
)


@pytest.fixture
def chain(daemons):
    """A chain of Go's bridge, Go's portmap and a plugin with state, and a namespace for a pod."""
    daemons.write("node1", "/etc/cni/net.d/30-chained.conflist", json.dumps(CHAIN).encode())
    daemons.write("node1", "/opt/cni/bin/stateful", STATEFUL.encode())
    daemons.on("node1", "chmod +x /opt/cni/bin/stateful; ip netns add chained")
    yield daemons
    daemons.on(
        "node1",
        f"{CHAINED} /opt/lab/cni/cnitool del chained /run/netns/chained; ip netns del chained;"
        " ip link del chained0;"
        " rm -rf /opt/cni/bin/stateful /etc/cni/net.d/30-chained.conflist /var/lib/stateful",
        check=False,
    )


def test_go_plugins_and_one_with_state_below_var_lib_work_under_the_daemon(chain):
    before = measured(chain, "node1", "headcni_daemon_response_duration_seconds_count")
    added = chain.on("node1", f"{CHAINED} /opt/lab/cni/cnitool add chained /run/netns/chained")
    assert json.loads(added)["ips"][0]["address"].startswith("10.57.0.")
    found = chain.on("node1", OF_THE_CHAIN)
    assert "veth" in found and str(PORT) in found and "cnitool" in found, found
    serve = "ip netns exec chained timeout 20 nc -l -p 80 -q 1"
    own = chain.on("node1", "hostname -I").split()[0]
    said = chain.on("node1", f"(echo chained | {serve}) & sleep 1; nc -w 3 {own} {PORT} </dev/null")
    assert said.strip() == "chained"
    chain.on("node1", f"{CHAINED} /opt/lab/cni/cnitool del chained /run/netns/chained")
    assert chain.on("node1", OF_THE_CHAIN) == ""
    after = measured(chain, "node1", "headcni_daemon_response_duration_seconds_count")
    assert after == before + 2  # they were calls of the daemon's


def test_the_daemon_itself_releases_a_leaked_pod_of_such_a_chain(chain):
    """No runtime's process is there to run the plugins: systemd starts them, out of the sandbox."""
    chain.on("node1", f"{CHAINED} /opt/lab/cni/cnitool add chained /run/netns/chained")
    assert str(PORT) in chain.on("node1", OF_THE_CHAIN)
    older = (
        "import sqlite3; db = sqlite3.connect('/var/lib/cni/headcni/headcni.db');"
        " db.execute('update attachment set created = created - 3600'); db.commit()"
    )
    chain.on("node1", f'ip netns del chained; python3 -c "{older}"')
    config = chain.on("node1", "cat /etc/headcni/config.yaml")
    sooner = f"{config}ipam:\n  gcInterval: 10s\n"
    chain.write("node1", "/etc/headcni/config.yaml", sooner.encode())
    try:
        chain.on("node1", "systemctl reload headcni-daemon")
        chain.wait("node1", f'test -z "$({OF_THE_CHAIN})"', seconds=45)
    finally:
        chain.write("node1", "/etc/headcni/config.yaml", config.encode())
        chain.on("node1", "systemctl reload headcni-daemon")


def test_ready_names_every_condition(daemons):
    for node in NODES:
        shown = daemons.on(node, READY)
        for name in ("cni-socket", "store", "tailscale", "prefs", "interface", "routes"):
            assert f"{name}: ok" in shown


def test_the_neighbours_pods_are_in_a_table_of_our_own_before_tailscales(daemons):
    assert "10.55.2.0/24 dev tailscale0" in daemons.on("node1", "ip route show table 5200")
    assert "fd55:0:0:2::/64 dev tailscale0" in daemons.on("node1", "ip -6 route show table 5200")
    assert "10.55.1.0/24" not in daemons.on("node1", "ip route show table 5200")
    assert "5200:\tfrom all to 10.55.0.0/16 lookup 5200" in daemons.on("node1", "ip rule")


def test_pods_talk_across_nodes_by_it(daemons, pods):
    assert lost(daemons.on("node1", f"ip netns exec warm ping -c 5 -i 0.2 {pods['node2']}")) == 0


def test_a_call_is_the_daemons_and_is_counted(daemons, pods):
    before = measured(daemons, "node1", "headcni_ip_allocations_total")
    daemons.on("node1", "ip netns add counted")
    cnitool(daemons, "add", "node1", "counted")
    assert measured(daemons, "node1", "headcni_ip_allocations_total") == before + 1
    cnitool(daemons, "del", "node1", "counted")
    daemons.on("node1", "ip netns del counted")


@pytest.mark.parametrize("how", ["systemctl restart", "systemctl kill -s KILL"])
def test_pods_do_not_notice_that_the_daemon_goes_and_returns(daemons, pods, how):
    ping = f"ip netns exec warm ping -c 60 -i 0.1 {pods['node2']}"
    report = daemons.on(
        "node1",
        f"({ping}) & sleep 1; {how} headcni-daemon; sleep 2; {how} headcni-daemon; wait",
        check=False,
    )
    assert lost(report) == 0
    daemons.wait("node1", f"{READY} >/dev/null 2>&1")


def ctl(lab, node: str, words: str, check: bool = True) -> str:
    return lab.on(node, f"/opt/headcni/current/bin/headcnictl {words}", check=check)


def test_an_operator_sees_the_node_by_headcnictl(daemons, pods):
    status = json.loads(ctl(daemons, "node1", "status --json"))
    assert status["ready"] and status["mode"] == "host" and status["attachments"] >= 1
    assert "10.55.2.0/24" in ctl(daemons, "node1", "routes")
    assert pods["node1"] in ctl(daemons, "node1", "pods")
    assert " 0% packet loss" in ctl(daemons, "node1", f"ping {pods['node1']} {pods['node2']}")
    assert ctl(daemons, "node1", f"ping --mtu 1280 {pods['node1']} {pods['node2']}")
    shown = ctl(
        daemons,
        "node1",
        f"capture {pods['node1']} -c 1 icmp & sleep 1;"
        f" ip netns exec warm ping -c 2 {pods['node2']} >/dev/null; wait",
    )
    assert "ICMP echo request" in shown


def test_diagnose_names_what_was_broken_by_hand(daemons, pods):
    before = json.loads(ctl(daemons, "node1", "diagnose --json", check=False))["problems"]
    assert before["pods"] == [] and before["daemon"] == []
    daemons.on("node1", "ip netns exec warm ip route del default")
    try:
        after = json.loads(ctl(daemons, "node1", "diagnose --json", check=False))["problems"]
        assert "no route 0.0.0.0/0" in after["pods"][0]
    finally:
        daemons.on("node1", "ip netns exec warm ip route add default via 10.55.1.1")


def test_pods_that_come_and_go_are_told_to_whoever_follows(daemons):
    follow = "timeout 6 /opt/headcni/current/bin/headcnictl events --follow --json"
    said = daemons.on(
        "node1",
        f"({follow} > /run/followed) & sleep 1; ip netns add told;"
        " export CNI_PATH=/opt/cni/bin NETCONFPATH=/etc/cni/net.d;"
        " /opt/lab/cni/cnitool add warm /run/netns/told >/dev/null;"
        " /opt/lab/cni/cnitool del warm /run/netns/told; ip netns del told; wait;"
        " cat /run/followed",
        check=False,
    )
    added, deleted = [json.loads(line) for line in said.splitlines()][-2:]
    assert (added["type"], deleted["type"]) == ("pod-added", "pod-deleted")
    for one in (added, deleted):
        assert one["pod_ip"][0].startswith("10.55.1.")
        assert (one["gateway"], one["interface"]) == (["10.55.1.1"], "eth0")
    journal = daemons.on("node1", "journalctl -u headcni-daemon -n 50 --no-pager")
    assert "pod-added" in journal and "pod-deleted" in journal


def test_without_the_daemon_pods_still_come_and_go(daemons, pods):
    daemons.on("node1", "systemctl stop headcni-daemon; ip netns add alone")
    try:
        cnitool(daemons, "add", "node1", "alone")
        assert (
            lost(daemons.on("node1", f"ip netns exec alone ping -c 3 -i 0.2 {pods['node2']}")) == 0
        )
        cnitool(daemons, "del", "node1", "alone")
    finally:
        daemons.on("node1", "ip netns del alone; systemctl start headcni-daemon")
    daemons.wait("node1", f"{READY} >/dev/null 2>&1")


def test_routes_and_rules_that_somebody_deleted_come_back(daemons):
    daemons.on("node1", "ip rule del priority 5200; ip route flush table 5200")
    daemons.wait(
        "node1",
        "ip route show table 5200 | grep -q 10.55.2.0/24 && ip rule | grep -q '^5200:'",
        seconds=10,
    )


def test_a_reload_changes_what_can_be_changed_and_names_what_cannot(daemons):
    daemons.on(
        "node1",
        "printf 'logging:\\n  level: DEBUG\\ntailscale:\\n  port: 4242\\n'"
        " >> /etc/headcni/config.yaml; systemctl reload headcni-daemon; sleep 1",
    )
    said = daemons.on("node1", "journalctl -u headcni-daemon -n 30 --no-pager")
    assert "logging.level" in said and "changed" in said
    assert "unchanged until the daemon is restarted" in said and "tailscale.port" in said


def test_a_configuration_with_mistakes_is_refused_in_one_go_and_the_old_one_stays(daemons):
    wrong = "/tmp/wrong.yaml"
    daemons.on("node1", f"printf 'loging: 1\\nnetwork:\\n  mtu: 3\\n' > {wrong}")
    said = daemons.on(
        "node1",
        f"/opt/headcni/current/bin/headcni-daemon --check-config --config {wrong}",
        check=False,
    )
    assert "loging" in said and "logging" in said and "network.mtu" in said


@pytest.fixture
def approving(daemons):
    """The daemon of node2 with a key of its own."""
    known = daemons.inventory()["lab"]["vars"]
    with open(f"{known['lab_dir']}/headscale-api-key", "rb") as file:
        daemons.write("node2", "/etc/headcni/api-key", file.read())
    before = daemons.on("node2", "cat /etc/headcni/config.yaml")
    section = (
        f"headscale:\n  url: {known['lab_headscale_url']}\n  apiKeyFile: /etc/headcni/api-key\n"
    )
    daemons.write("node2", "/etc/headcni/config.yaml", (before + section).encode())
    daemons.on("node2", "chmod 600 /etc/headcni/api-key; systemctl reload headcni-daemon")
    yield daemons
    daemons.write("node2", "/etc/headcni/config.yaml", before.encode())
    daemons.on("node2", "rm /etc/headcni/api-key; systemctl reload headcni-daemon")


def test_with_a_key_of_its_own_the_daemon_keeps_its_routes_approved(approving):
    approving.wait("node2", f"{READY} | grep -q 'headscale: ok'")
    assert measured(approving, "node2", "headcni_headscale_request_duration_seconds_count") > 0


def test_every_measure_moves(approving, pods):
    """Of what the daemon exports, whatever the names are: nothing is there for show."""
    small = {
        "cniVersion": "1.0.0",
        "name": "small",
        "plugins": [
            {
                "type": "headcni",
                "bridge": "small0",
                "pod_cidr": "10.56.0.0/30",
                "ipam": {"type": "headcni-ipam", "subnet": "10.56.0.0/30"},
            }
        ],
    }
    approving.write("node2", "/etc/cni/net.d/20-small.conflist", json.dumps(small).encode())
    approving.on(
        "node2",
        "export CNI_PATH=/opt/cni/bin NETCONFPATH=/etc/cni/net.d;"
        "ip netns add one; ip netns add two; ip rule del priority 5200;"
        "/opt/lab/cni/cnitool add small /run/netns/one;"
        "/opt/lab/cni/cnitool add small /run/netns/two;"  # there is no second address
        "for i in one two; do /opt/lab/cni/cnitool del small /run/netns/$i; ip netns del $i; done;"
        "rm /etc/cni/net.d/20-small.conflist; ip link del small0; sleep 2",
        check=False,
    )
    text = approving.on("node2", "curl -fsS http://127.0.0.1:9001/metrics")
    names = set(re.findall(r"^# TYPE (headcni_\w+|process_\w+) \w+$", text, re.MULTILINE))
    assert len(names) > 20
    still = {
        name
        for name in names
        if not any(
            float(value)
            for value in re.findall(
                rf"^{name}(?:_total|_count|_sum)?(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE
            )
        )
    }
    # These count what must not happen, are about this very moment, or need an API server, which
    # tests/k8s has.
    assert still <= {
        "headcni_scrape_errors_total",
        "headcni_scrape_errors",
        "headcni_cni_calls",
        "headcni_links_to_delete",
        "headcni_refused_claims",  # tests/daemon/test_claims.py has some
        "headcni_kubernetes_request_duration_seconds",
        "headcni_policy_apply_duration_seconds",  # tests/lab/test_monitoring.py has policies
    }
