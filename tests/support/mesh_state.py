"""What a lab's nodes and its Headscale say of the mesh."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

from lab_command import LabCommand
from testinfra.host import Host

from lab.layout import MOST_NODES

SOCKETS = {"host": "/run/tailscale/tailscaled.sock", "daemon": "/run/headcni/tailscaled.sock"}


def pod_ranges(node: str) -> tuple[str, str]:
    """What inventories/lab gives it: virtual machines are numbered behind the nodes."""
    kind, number = re.findall(r"([a-z]+)(\d+)", node)[0]
    number = int(number) + (MOST_NODES if kind == "vm" else 0)
    return f"10.55.{number}.0/24", f"fd55:0:0:{number}::/64"


def server(lab: LabCommand) -> tuple[str, str]:
    """Headscale's address, and a key for it."""
    known = lab.inventory()["lab"]["vars"]
    key = (Path(known["lab_dir"]) / "headscale-api-key").read_text().strip()
    return known["lab_headscale_url"], key


def at_headscale(lab: LabCommand) -> list[dict[str, Any]]:
    url, key = server(lab)
    request = urllib.request.Request(
        f"{url}/api/v1/node", headers={"Authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        nodes: list[dict[str, Any]] = json.load(answer)["nodes"]
    return nodes


def assert_in_mode(lab: LabCommand, node: str, mode: str) -> None:
    """As the node says, and with nothing left of the other mode."""
    assert lab.on(node, "headcnictl mode show").strip() == mode
    lab.wait(node, "headcnictl status >/dev/null", 20)
    conflist = json.loads(lab.on(node, "cat /etc/cni/net.d/10-headcni.conflist"))
    assert conflist["plugins"][0]["mode"] == mode
    assert lab.on(node, "ls /etc/headcni").split() == ["config.yaml"]
    assert "switch.json" not in lab.on(node, "ls /var/lib/headcni")
    assert "headcni_switch" not in lab.on(node, "nft list tables")
    assert ("headcni" in lab.on(node, "ip netns").split()) is (mode == "daemon")
    assert "headcni-probe" not in lab.on(node, "ip netns")
    active = lab.on(node, "systemctl is-active headcni-tailscaled", check=False).strip()
    assert (active == "active") is (mode == "daemon")
    serving = [
        one for one in at_headscale(lab) if pod_ranges(node)[0] in (one.get("approvedRoutes") or [])
    ]
    assert len(serving) == 1
    status = lab.on(node, f"tailscale --socket={SOCKETS[mode]} status --json")
    assert serving[0]["nodeKey"] == json.loads(status)["Self"]["PublicKey"]


def assert_pods_leave_by(interface: str, node: str, host: Host, pods: dict[str, str]) -> None:
    """As our own table has it, as the kernel decides, and as the interface counts."""
    others = [one for one in pods if one != node]
    for which, family in enumerate(("-4", "-6")):
        routes = json.loads(host.check_output(f"ip -j {family} route show table 5200"))
        by = {one["dst"]: one.get("dev") for one in routes}
        for other in others:
            assert by[pod_ranges(other)[which]] == interface, by
        assert pod_ranges(node)[which] not in by, by
        assert "5200:" in host.check_output(f"ip {family} rule")
    decided = json.loads(host.check_output(f"ip -j route get {pods[others[0]]}"))
    assert decided[0]["dev"] == interface
    count = f"cat /sys/class/net/{interface}/statistics/tx_packets"
    before = int(host.check_output(count))
    host.check_output(f"ip netns exec pod ping -c 20 -i 0.05 -W 5 {pods[others[0]]}")
    assert int(host.check_output(count)) - before >= 20


def runs(host: Host) -> dict[str, str]:
    """The versions that the daemon and tailscaled say they are."""
    tailscaled = json.loads(host.check_output("tailscale status --json"))["Version"]
    return {
        "runtime": json.loads(host.check_output("headcnictl status --json"))["version"],
        "tailscale": tailscaled.partition("-")[0],
    }


def owners(host: Host) -> dict[str, Any]:
    """What the owner of the node's own tailscaled sees of it."""
    prefs = json.loads(host.check_output("tailscale debug prefs"))
    return {
        "prefs": {name: value for name, value in prefs.items() if name != "Config"},  # keys
        "process": host.check_output("systemctl show -P MainPID tailscaled"),
        "key": json.loads(host.check_output("tailscale status --json"))["Self"]["PublicKey"],
        "rules": host.check_output("ip rule | grep -E '^52[1-7]0:'"),
    }


def accepted_routes(host: Host) -> list[str]:
    """By the node's own tailscaled."""
    return sorted(host.check_output("ip route show table 52").splitlines())
