"""site.yml on a Debian 11 and a Debian 13: the oldest and the newest Python and libnftables."""

from __future__ import annotations

import pytest
from lab_command import LabCommand
from leftovers import assert_nothing_left
from site_run import Run, Site

NODES = {"node1": "11", "node2": "13"}


@pytest.fixture(scope="module")
def site():
    command = LabCommand("distributions")
    command("down")
    before = command.listing()
    command("up", "--nodes", "2", "--suites", "bullseye,trixie")
    yield Site(command)
    command("down")
    assert_nothing_left(before, command.listing())


@pytest.fixture(scope="module")
def first(site) -> Run:
    return site()


def test_pods_of_both_reach_each_other(site, first):
    for node, version in NODES.items():
        assert f'VERSION_ID="{version}"' in site.lab.on(node, "cat /etc/os-release")
    assert set(first.counted("failed").values()) == {0}
    assert "every pod reaches every other" in site.verify().output


def test_the_daemon_has_tried_the_rules_on_each(site, first):
    for node in NODES:
        assert "nft-rules: ok" in site.lab.on(node, "headcnictl status")


def test_a_node_that_does_not_take_the_rules_stops_the_run_with_a_sentence(site, first):
    """As if its libnftables were missing: the release must be installed anew to be tried."""
    library = "$(ldconfig -p | sed -n 's,.*libnftables.so.1 .*=> ,,p')"
    site.lab.on("node1", f"mount --bind /dev/null {library} && rm -r /opt/headcni/releases")
    try:
        failed = site("--limit", "node1", check=False)
    finally:
        site.lab.on("node1", f"umount {library}")
    assert failed.code != 0
    said = failed.failures("node1")
    assert "pods of the release could not be networked on this node" in said
    assert "install the package nftables" in said
    assert site().counted("failed") == dict.fromkeys(NODES, 0)
