"""Extra records at a real Headscale, and the device that gets them."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from ansible_module import run
from headscale_server import HeadscaleServer, Tailscaled, from_headscale
from patience import until

pytestmark = from_headscale(0, 26)
ZONE = "svc.test.invalid"
WEB = {"name": f"web.shop.{ZONE}", "type": "A", "value": "10.96.7.7"}
NAS = '[{"name": "nas.test.invalid", "type": "A", "value": "192.0.2.7"}]'


@pytest.fixture
def device():
    """A tailscaled at a Headscale that reads the file."""
    home = Path(tempfile.mkdtemp(prefix="hct-"))
    server, device = HeadscaleServer(home), Tailscaled(home / "ts")
    records = home / "records.json"
    records.write_text(NAS)
    config = server.config().replace("dns:\n", f"dns:\n  extra_records_path: {records}\n")
    (home / "config.yaml").write_text(config)
    try:
        server.start()
        server.key = server.make_key()
        device.start()
        server.add_user("ann")
        key = run("headscale_preauth_key", url=server.url, api_key=server.key, user="ann")["key"]
        device.join(server.url, key, "device")
        yield device, records
    finally:
        device.stop()
        server.stop()
        shutil.rmtree(home)


def resolved(device: Tailscaled, name: str) -> str:
    return device.tailscale("dns", "query", name)


def test_a_device_resolves_what_was_written_and_not_what_was_removed(device):
    """Headscale sees each replacement of the file, not only the first."""
    device, path = device
    how = {"path": str(path), "zone": ZONE}
    until(lambda: "192.0.2.7" in resolved(device, "nas.test.invalid"), 30, "the first file")
    for address in ("10.96.7.7", "10.96.8.8"):
        assert run("headscale_extra_records", **how, records=[{**WEB, "value": address}])["changed"]
        until(lambda: address in resolved(device, WEB["name"]), 30, address)  # noqa: B023
    run("headscale_extra_records", **how)
    until(lambda: "10.96.8.8" not in resolved(device, WEB["name"]), 30, "the record is gone")
    assert "192.0.2.7" in resolved(device, "nas.test.invalid")
