"""headcnictl diagnose asks about a pod as the runtime would, in the store that the pod is in."""

from __future__ import annotations

import pytest

from headcni.ctl import mesh_faults
from headcni.ctl.diagnose import differences
from headcni.mesh.paths import Paths
from headcni.model import Owner, PodRef
from headcni.settings import parse
from headcni.store import Attachment, Store

CONF = {
    "cniVersion": "1.1.0",
    "name": "pods",
    "type": "headcni",
    "ipMasq": False,
    "ipam": {"type": "headcni-ipam", "subnet": "10.9.1.0/24"},
}


@pytest.mark.parametrize("network", ["pods", "pods/0"])
def test_a_pod_is_found_wherever_its_store_is_and_within_a_chain(network, tmp_path):
    result = {"cniVersion": "1.1.0", "ips": [{"address": "10.9.1.5/24", "gateway": "10.9.1.1"}]}
    owner = Owner(network, "c1", "eth0")
    gone = "/run/netns/there-is-no-such-one"
    known = Attachment(owner, PodRef(), gone, "hc0123456789a", CONF, result, {}, 1.0)
    with Store.in_directory(str(tmp_path)) as store:
        store.remember(known)
    said = differences(known, str(tmp_path))
    assert "allocation: 10.9.1.5 is not recorded as this pod's" in said
    assert "hc0123456789a is missing" in said


FORWARDING = "Subnet routing is enabled, but IP forwarding is disabled. Check that."
V4, BOTH = "10.9.1.0/24", "10.9.1.0/24, fd09::/64"


@pytest.mark.parametrize(
    ("cidrs", "ipv4", "ipv6", "told"),
    [
        (V4, "1", "0", []),
        (V4, "0", "1", [FORWARDING]),
        (BOTH, "1", "1", []),
        (BOTH, "1", "0", [FORWARDING]),
        (BOTH, "1", None, [FORWARDING]),
    ],
)
def test_tailscaleds_word_on_forwarding_counts_only_if_the_kernel_agrees(
    monkeypatch, cidrs, ipv4, ipv6, told
):
    class Status:
        running, state, health = True, "Running", (FORWARDING, "something else")

    class Api:
        def __init__(self, path: str) -> None:
            pass

        def status(self, peers: bool) -> type[Status]:
            return Status

    now = {"net/ipv4/ip_forward": ipv4, "net/ipv6/conf/all/forwarding": ipv6}
    monkeypatch.setattr(mesh_faults, "LocalApi", Api)
    monkeypatch.setattr(mesh_faults.paths, "read", lambda *_unused: Paths(()))
    monkeypatch.setattr(mesh_faults.netns, "read_sysctl", now.get)
    config, _problems = parse(f"network: {{podCIDR: {{nodeLocal: [{cidrs}]}}}}".encode())
    found = [finding.found for finding in mesh_faults.tailscale(config)]
    assert found == [f"tailscaled says: {line}" for line in (*told, "something else")]
