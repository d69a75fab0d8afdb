"""The probe's own ICMP and DNS, and what a conflist's plugins are handed."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import probe, probe_pod


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a raw socket")
def test_loopback_answers_and_a_silent_address_is_told():
    wanted = [probe.Echo("a", "v4", "127.0.0.1"), probe.Echo("a", "mtu4", "127.0.0.1", 1280)]
    assert [one["ok"] for one in probe.ping(wanted, 2)] == [True, True]
    too_large = probe.ping([probe.Echo("a", "mtu4", "127.0.0.1", 65536)], 0.3)[0]
    assert too_large["ok"] is False
    assert "65536 bytes unfragmented" in too_large["detail"]


def test_each_address_is_asked_small_and_full_sized():
    asked = list(probe.echoes("node2", ["10.1.2.3", "fd00::3"], 1280))
    assert [(one.check, one.size) for one in asked] == [
        ("v4", 0),
        ("mtu4", 1280),
        ("v6", 0),
        ("mtu6", 1280),
    ]


def test_the_checksum_of_what_carries_its_own_is_zero():
    data = struct.pack(">BBHHH", 8, 0, 0, 77, 5) + b"odd"
    summed = struct.pack(">BBHHH", 8, 0, probe._checksum(data), 77, 5) + b"odd"
    assert probe._checksum(summed) == 0


class Resolver(threading.Thread):
    """Answers every question with one A record, behind a CNAME."""

    def __init__(self, code=0, records=2):
        super().__init__(daemon=True)
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.code, self.records = code, records

    def run(self):
        question, client = self.socket.recvfrom(512)
        head = question[:2] + struct.pack(">HHHHH", 0x8180 | self.code, 1, self.records, 0, 0)
        alias = b"\xc0\x0c" + struct.pack(">HHIH", 5, 1, 60, 4) + b"\x01b\xc0\x0e"
        address = b"\x01b\xc0\x0e" + struct.pack(">HHIH", 1, 1, 60, 4) + bytes([100, 64, 0, 7])
        answers = (alias + address) if self.records else b""
        self.socket.sendto(head + question[12:] + answers, client)


def ask(monkeypatch, **how):
    resolver = Resolver(**how)
    resolver.start()
    real = socket.socket.sendto
    there = resolver.socket.getsockname()

    class Redirected(socket.socket):
        def sendto(self, data, address):
            return real(self, data, there)

    monkeypatch.setattr(probe.socket, "socket", Redirected)
    return probe.resolve("node2.mesh.example", ["127.0.0.1"], 0.5)


def test_an_address_behind_an_alias_is_found(monkeypatch):
    assert ask(monkeypatch) == {"ok": True, "detail": "node2.mesh.example is 100.64.0.7"}


def test_a_name_that_nobody_knows_is_told(monkeypatch):
    found = ask(monkeypatch, code=3, records=0)
    assert found["ok"] is False


PEERS = [
    {"TailscaleIPs": ["100.64.0.1"], "AllowedIPs": ["100.64.0.1/32", "10.1.1.0/24"]},
    {"TailscaleIPs": ["100.64.0.2"], "AllowedIPs": ["100.64.0.2/32"]},
    {"TailscaleIPs": ["100.64.0.3"], "AllowedIPs": None},
]


@pytest.mark.parametrize(
    ("address", "cidr", "ok", "said"),
    [
        ("100.64.0.1", "10.1.1.0/24", True, "10.1.1.0/24"),
        ("100.64.0.2", "10.1.2.0/24", False, "not approved: 10.1.2.0/24"),
        ("100.64.0.3", "10.1.3.0/24", False, "not approved: 10.1.3.0/24"),
        ("100.64.0.9", "10.1.1.0/24", False, "it is not a peer of this node"),
    ],
)
def test_a_route_is_approved_if_its_peer_serves_it(address, cidr, ok, said):
    assert probe.route([cidr], [address], PEERS) == {"ok": ok, "detail": said}


def test_a_host_port_that_is_closed_is_told():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        number = unused.getsockname()[1]
    found = probe.port(["127.0.0.1"], number, 0.2)
    assert found["ok"] is False and "refused" in found["detail"]
    assert probe.port([], 1, 0.1)["ok"] is False


CONF = {
    "cniVersion": "1.0.0",
    "name": "headcni",
    "plugins": [
        {"type": "headcni", "mtu": 1280, "capabilities": {"portMappings": True}},
        {"type": "tuning"},
    ],
}


def test_a_plugin_is_handed_what_a_runtime_hands_it():
    first, second = CONF["plugins"]
    made = probe_pod.netconf(CONF, first, None, 18473)
    assert made["name"] == "headcni" and made["cniVersion"] == "1.0.0"
    assert made["runtimeConfig"]["portMappings"][0]["hostPort"] == 18473
    assert "capabilities" not in made and "prevResult" not in made
    chained = probe_pod.netconf(CONF, second, {"ips": []}, 18473)
    assert chained["prevResult"] == {"ips": []} and "runtimeConfig" not in chained


def test_a_plugin_that_fails_is_told_in_its_own_words(tmp_path):
    program = tmp_path / "headcni"
    program.write_text('#!/bin/sh\necho \'{"code": 7, "msg": "bad", "details": "mtu"}\'; exit 1\n')
    program.chmod(0o755)
    with pytest.raises(probe_pod.ProbeError, match="ADD: bad mtu"):
        probe_pod.call("ADD", {"type": "headcni"}, [str(tmp_path)])
    with pytest.raises(probe_pod.ProbeError, match="there is no bridge in"):
        probe_pod.call("ADD", {"type": "bridge"}, [str(tmp_path)])


def test_a_pod_that_no_plugin_takes_away_is_told_once_and_in_nobodys_way(tmp_path, monkeypatch):
    monkeypatch.setattr(probe_pod, "netns_path", lambda: str(tmp_path / "none"))
    home = tmp_path / "home"
    home.mkdir()
    state = {"conf": CONF, "bin_dirs": [str(tmp_path)], "host_port": 0}
    (home / "probe.json").write_text(json.dumps(state))
    with pytest.raises(probe_pod.ProbeError, match="there is no tuning in"):
        probe_pod.clean(str(home))
    assert not home.exists()
    assert probe_pod.clean(str(home)) == []
