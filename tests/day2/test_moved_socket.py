"""A node whose own tailscaled answers at another socket: every playbook asks it there."""

from __future__ import annotations

import pytest
from lab_command import LabCommand
from leftovers import assert_nothing_left
from site_run import Run, Site

pytestmark = pytest.mark.timeout(1200)
SOCKET = "/srv/tailscale/ts.sock"
UNIT = f"""
[Service]
Environment=TS_DEBUG_USE_DERP_HTTP=true TS_NO_LOGS_NO_SUPPORT=true
ExecStart=/usr/sbin/tailscaled --socket={SOCKET} --statedir=/var/lib/tailscale --port=41641
[Install]
WantedBy=multi-user.target
"""


class Moved:
    """A lab whose node1 has its tailscaled elsewhere, and the inventory that says so."""

    def __init__(self, site: Site, inventory: str) -> None:
        self.site, self.inventory = site, inventory

    def run(self, playbook: str, **given: str | bool) -> Run:
        path = f"playbooks/{playbook}.yml"
        return self.site("-i", self.inventory, playbook=path, timeout=600, **given)


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    lab = LabCommand("d2m")
    lab("down")
    before = lab.listing()
    lab("up", "--nodes", "2")
    site = Site(lab)
    site("--tags", "tailscale")
    lab.write("node1", "/etc/systemd/system/owners.service", UNIT.encode())
    lab.on("node1", "mkdir -p /srv/tailscale && systemctl disable --now tailscaled")
    lab.on("node1", "systemctl enable --now owners")
    lab.wait("node1", f"tailscale --socket={SOCKET} status")
    inventory = tmp_path_factory.mktemp("moved") / "hosts.yml"
    node = f"{{tailscale_socket: {SOCKET}, tailscale_service: none}}"
    inventory.write_text(f"headcni: {{hosts: {{node1: {node}}}}}\n")
    yield Moved(site, str(inventory))
    lab("down")
    assert_nothing_left(before, lab.listing())


def served_by(moved: Moved) -> str:
    return moved.site.lab.on("node1", f"tailscale --socket={SOCKET} debug prefs").strip()


def test_site_and_verify_find_it(moved):
    moved.run("site")
    assert "10.55.1.0/24" in served_by(moved)
    assert "every pod reaches every other" in moved.run("verify").output
    assert moved.run("site").changed == set()


def test_the_mode_is_switched_there_and_back(moved):
    moved.run("switch_mode", headcni_mode="daemon")
    assert "10.55.1.0/24" not in served_by(moved)
    assert "every pod reaches every other" in moved.run("verify", headcni_mode="daemon").output
    moved.run("switch_mode", headcni_mode="host")
    assert "10.55.1.0/24" in served_by(moved)
    assert "every pod reaches every other" in moved.run("verify").output


def test_the_key_is_rotated_and_the_runtime_upgraded(moved):
    moved.run("rotate_keys")
    moved.run("upgrade", headcni_upgrade="runtime")
    assert "every pod reaches every other" in moved.run("verify").output


def test_uninstall_takes_its_routes_back(moved):
    moved.run("uninstall")
    assert "10.55.1.0/24" not in served_by(moved)
    assert moved.site.lab.on("node1", "systemctl is-active owners").strip() == "active"
