"""What a roll-out over three nodes costs the pods of every pair: pings, and a long transfer."""

from __future__ import annotations

import pytest
from traffic import INTERVAL

pytestmark = pytest.mark.timeout(1200)
NODES = ("node1", "node2", "node3")


@pytest.mark.parametrize(
    ("playbook", "to"),
    [
        ("switch_mode", {"headcni_mode": "daemon"}),
        ("upgrade", {"headcni_upgrade": "runtime"}),
        ("rollback", {}),
        ("switch_mode", {"headcni_mode": "host"}),
    ],
    ids=["to daemon mode", "upgrade", "rollback", "to host mode"],
)
def test_no_connection_ends_and_nobody_misses_a_second(cluster, releases, capsys, playbook, to):
    given = (
        {**to, "headcni_node_release_src": str(releases["0.2.0"])} if playbook == "upgrade" else to
    )
    with cluster.traffic.flowing() as costs:
        cluster.run(playbook, timeout=900, **given)
    cluster.told(capsys, f"{playbook} {to.get('headcni_mode', '')}".strip())
    assert len(costs) == 6
    for pair, cost in costs.items():
        # A machine with much to do makes gaps of its own, of about a second, but loses nothing.
        assert cost.transfer and cost.lost * INTERVAL < 1 and cost.gap < 3, f"{pair}: {cost}"
