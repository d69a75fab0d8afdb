"""Nodes change their mode while a peer serves their own network in the tailnet: none is lost."""

from __future__ import annotations

import pytest
from advertised_lan import advertise, await_route, way
from lab_command import LabCommand
from site_run import Site

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def site():
    command = LabCommand("own-networks-day2")
    command("up", "--nodes", "2")
    made = Site(command)
    made()
    advertise(made)
    await_route(made, "node1")
    yield made
    command("down")


@pytest.mark.parametrize("mode", ["daemon", "host"])
def test_a_node_keeps_its_own_network_while_its_mode_is_switched(site, mode):
    words = ("--limit", "node1")
    switch = "playbooks/switch_mode.yml"
    assert (
        site(*words, playbook=switch, headcni_mode=mode, timeout=600).recap["node1"]["failed"] == 0
    )
    if mode == "host":
        await_route(site, "node1")
    assert ("5205:" in site.lab.on("node1", "ip rule")) == (mode == "host")
    assert way(site, "node1") == "eth0"
    assert "every pod reaches every other" in site.verify().output
