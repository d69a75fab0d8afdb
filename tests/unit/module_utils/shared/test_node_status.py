"""A node's status in one line, and the nodes with problems first."""

from __future__ import annotations

from typing import Any

from ansible_collections.headcni.mesh.plugins.module_utils.shared import node_status

NOW = 1_800_000_000.0
DAY = 86400.0


def status(**changes: Any) -> dict[str, Any]:
    return {
        "ready": True,
        "mode": "host",
        "version": "0.4.0",
        "attachments": 12,
        "conditions": [{"name": "store", "ok": True, "reason": ""}],
        "pools": [{"subnets": ["10.9.1.0/24"], "total": 253, "free": 241}],
        "peers": {"direct": 2, "peer-relay": 0, "derp": 0, "idle": 0, "none": 0},
        "key_expires": 0.0,
        "firewalls": [],
        "drift": {"repaired": {}, "last": 0.0},
        "alarms": [],
        **changes,
    }


def cells(**changes: Any) -> dict[str, str]:
    return dict(zip(node_status.HEAD, node_status.row("node1", status(**changes), NOW)))


def test_a_node_that_works_has_a_line_of_80_columns():
    row = node_status.row("node1", status(), NOW)
    assert row == ["node1", "yes", "host", "0.4.0", "12", "4%", "2 direct", "never", "-", "0"]
    widths = [max(map(len, column)) for column in zip(row, node_status.HEAD)]
    assert sum(widths) + 2 * (len(widths) - 1) <= 80


def test_each_kind_of_path_is_counted():
    peers = {"direct": 1, "peer-relay": 1, "derp": 2, "idle": 3, "none": 4}
    assert cells(peers=peers)["PEERS"] == "1 direct 1 relay 2 derp 3 idle 4 none"
    assert cells(peers=dict.fromkeys(peers, 0))["PEERS"] == "0"
    assert cells(peers=None)["PEERS"] == "?"


def test_the_rest_of_a_keys_life_is_shown_and_a_warning_before_it_ends():
    assert cells(key_expires=NOW + 30.5 * DAY)["KEY"] == "30d"
    assert node_status.warnings(status(key_expires=NOW + 30 * DAY), NOW) == []
    [soon] = node_status.warnings(status(key_expires=NOW + 7100), NOW)
    assert "expires in 1h: playbooks/rotate_keys.yml renews it" in soon
    assert cells(key_expires=NOW - 1)["KEY"] == "EXPIRED"
    assert "has expired" in node_status.warnings(status(key_expires=NOW - 1), NOW)[0]


def test_the_fullest_pool_counts_and_a_full_one_is_a_warning():
    pools = [
        {"subnets": ["10.9.1.0/24"], "total": 253, "free": 253},
        {"subnets": ["10.8.1.0/29"], "total": 5, "free": 0},
    ]
    assert cells(pools=pools)["POOL"] == "100%"
    [full] = node_status.warnings(status(pools=pools), NOW)
    assert full == "0 of 5 addresses of 10.8.1.0/29 are free: headcnictl ipam shows who has them"
    assert cells(pools=[])["POOL"] == "0%"


def test_relayed_and_missing_paths_are_named():
    troubled = [
        {"name": "node2", "path": "derp", "through": "DERP region lab"},
        {"name": "node3", "path": "none", "through": ""},
    ]
    assert node_status.warnings(status(troubled_peers=troubled), NOW) == [
        "relayed: node2 (DERP region lab)",
        "without a path: node3",
    ]


def test_a_daemon_of_an_earlier_release_leaves_cells_open():
    earlier = status()
    for key in ("pools", "peers", "key_expires", "drift"):
        del earlier[key]
    row = dict(zip(node_status.HEAD, node_status.row("node1", earlier, NOW)))
    assert [row[name] for name in ("POOL", "PEERS", "KEY", "DRIFT")] == ["?"] * 4


def test_nodes_with_problems_come_first_each_with_its_reason():
    held = [{"name": "interface", "ok": False, "reason": "there is no interface tailscale0"}]
    found = {
        "a-well": status(),
        "b-warned": status(key_expires=NOW + DAY),
        "c-unready": status(ready=False, conditions=held),
        "d-silent": "it cannot be reached",
    }
    rows, said = node_status.lines(found, NOW)
    assert [row[0] for row in rows] == ["d-silent", "c-unready", "b-warned", "a-well"]
    assert [row[1] for row in rows] == ["NO", "NO", "yes", "yes"]
    assert said[:2] == [
        "d-silent: it cannot be reached",
        "c-unready: interface: there is no interface tailscale0",
    ]
    assert said[2].startswith("b-warned: the node's key")
    assert len(said) == 3


def test_a_firewall_that_could_not_be_told_is_marked():
    found = [{"name": "ufw", "ok": True}, {"name": "Docker", "ok": False}]
    assert cells(firewalls=found)["FIREWALL"] == "ufw,Docker!"


def fault(id_: str, where: str = "node") -> dict[str, object]:
    return {"id": id_, "found": f"it is {id_}", "run": "mend it", "where": where, "sure": True}


def test_a_fault_is_in_the_row_and_below_it_with_its_command():
    assert cells(faults=[])["READY"] == "yes"
    assert cells(faults=[fault("logged-out", "controller")])["READY"] == "FAULT"
    assert cells(ready=False, faults=[fault("logged-out")])["READY"] == "NO"
    said = [fault("forwarding-off-ipv4"), fault("logged-out", "controller")]
    assert node_status.warnings(status(faults=said), NOW) == [
        "FAULT: it is forwarding-off-ipv4: mend it",
        "FAULT: it is logged-out: headcnictl diagnose has the command",
    ]


def test_a_finding_that_cuts_nothing_off_is_only_a_warning():
    mild = [fault("tailscaled-health"), fault("key-expires")]
    assert cells(faults=mild)["READY"] == "yes"
    assert node_status.warnings(status(faults=mild), NOW) == [
        "WARNING: it is tailscaled-health: mend it"
    ]


def test_what_could_not_be_found_out_is_no_fault():
    """The store may be busy, or tailscaled may restart, when the daemon looks."""
    not_known = [fault("pool-unknown")]
    assert cells(faults=not_known)["READY"] == "yes"
    assert node_status.warnings(status(faults=not_known), NOW) == [
        "WARNING: it is pool-unknown: mend it"
    ]
