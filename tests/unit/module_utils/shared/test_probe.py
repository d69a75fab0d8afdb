"""The probe's own ICMP and DNS, and what a conflist's plugins are handed."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils.shared import probe, probe_pod
from ansible_collections.headcni.mesh.plugins.module_utils.shared.localapi import LocalAPIError


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
    shown = "node2.mesh.example is 100.64.0.7"
    assert ask(monkeypatch) == {"ok": True, "detail": shown, "addresses": ["100.64.0.7"]}


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
    monkeypatch.setattr(probe_pod, "netns_path", lambda _home: str(tmp_path / "none"))
    home = tmp_path / "home"
    home.mkdir()
    state = {"conf": CONF, "bin_dirs": [str(tmp_path)], "host_port": 0, "by_plugins": True}
    (home / "probe.json").write_text(json.dumps(state))
    with pytest.raises(probe_pod.ProbeError, match="there is no tuning in"):
        probe_pod.clean(str(home))
    assert not home.exists()
    assert probe_pod.clean(str(home)) == []


def test_the_state_of_a_probe_by_plugins_and_by_a_runtime_is_cleaned_each_in_its_way(tmp_path):
    """crictl is a stub here: it shows one pod until that is removed."""
    home = tmp_path / "home"
    home.mkdir()
    pods = tmp_path / "pods"
    pods.write_text("abc\n")
    crictl = tmp_path / "crictl"
    crictl.write_text(f"#!/bin/sh\ncase $1 in pods) cat {pods};; rmp) : > {pods};; esac\n")
    crictl.chmod(0o755)
    probe_pod.write_state({"crictl": [str(crictl)], "netns": "/x"}, str(home))
    assert probe_pod.clean(str(home)) == ["a pod"]
    assert pods.read_text() == "" and not home.exists()


def test_a_pod_that_a_runtime_does_not_remove_is_asked_for_again(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    crictl = tmp_path / "crictl"
    crictl.write_text("#!/bin/sh\n[ $1 = pods ] && echo abc && exit\necho busy >&2; exit 1\n")
    crictl.chmod(0o755)
    probe_pod.write_state({"crictl": [str(crictl)], "netns": "/x"}, str(home))
    for _time in range(2):
        with pytest.raises(probe_pod.ProbeError, match=r"busy.*crictl rmp -f abc"):
            probe_pod.clean(str(home))


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("192.0.2.1", "192.0.2.1", 0),
        ("192.0.2.1:443", "192.0.2.1", 443),
        ("fd00::1", "fd00::1", 0),
        ("[fd00::1]:53", "fd00::1", 53),
        ("host.example:8080", "host.example", 8080),
        ("https://host.example/path", "host.example", 443),
        ("http://host.example:8080", "host.example", 8080),
    ],
)
def test_a_place_outside_is_an_address_a_name_or_a_url(text, host, port):
    assert probe.place(text) == (text, host, port)


@pytest.mark.parametrize(
    "text", ["", ":443", "ftp://host", "host:99999", "host:x", "a b", "fd00::1:x", "x" * 300]
)
def test_what_is_no_place_is_told_with_what_is_expected(text):
    with pytest.raises(ValueError, match="expected an address or a name"):
        probe.place(text)


def test_a_port_outside_is_reached_or_not():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        number = server.getsockname()[1]
        refused = probe.reach(["127.0.0.1"], number, 0.1)
        assert refused["ok"] is False and "refused" in refused["detail"]
        server.listen()
        found = probe.reach(["127.0.0.1"], number, 1)
    assert found["ok"] is True and f"port {number}" in found["detail"]
    assert probe.reach([], 80, 0)["ok"] is False
    assert probe.is_own("127.0.0.1") and not probe.is_own("192.0.2.1")


def answers(*given):
    left = list(given)

    def ask():
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


DERP = {"LatencySeconds": 0.012, "DERPRegionID": 999, "DERPRegionCode": "lab"}
ENDPOINT = {"LatencySeconds": 0.0008, "Endpoint": "192.168.7.2:41641"}
PEER_RELAY = {"LatencySeconds": 0.003, "PeerRelay": "192.168.7.9:40000:vni:3"}


def path_of(*given, seconds=0.0):
    found = probe.path(answers(*given), time.monotonic() + seconds)
    return found["kind"], found["through"], found["ms"]


def test_a_path_that_becomes_direct_in_time_is_direct():
    assert path_of(DERP, ENDPOINT, seconds=5) == ("direct", "192.168.7.2:41641", 0.8)


def test_a_path_that_stays_relayed_names_what_relays_it():
    assert path_of(DERP) == ("relayed", "DERP region lab (999)", 12.0)
    assert path_of(PEER_RELAY) == ("relayed", "peer relay 192.168.7.9:40000:vni:3", 3.0)


def test_a_path_that_tailscaled_does_not_know_is_neither():
    assert path_of({"Err": "no matching peer"}) == ("unknown", "no matching peer", None)
    error = LocalAPIError("no-answer", "tailscaled did not answer")
    assert path_of(error)[0] == "unknown"
    assert path_of(DERP, error, seconds=0.2)[0] == "relayed"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a raw socket")
def test_lost_pings_are_counted_by_target(monkeypatch):
    monkeypatch.setattr(probe, "LATE_SECONDS", 0.2)
    wanted = [probe.Echo("a", "v4", "127.0.0.1"), probe.Echo("b", "v4", "127.255.255.255")]
    answered, silent = probe.quality(wanted, 5)
    assert answered["ok"] and answered["percent"] == 0 and 0 < answered["ms"] < 200
    assert silent == {
        "ok": False,
        "detail": "5 of 5 pings were lost",
        "percent": 100.0,
        "ms": None,
    }


def test_a_connections_throughput_is_what_the_other_side_has_counted():
    data = probe_pod.listening(0)
    threading.Thread(target=probe_pod.count, args=[data], daemon=True).start()
    found = probe.throughput("127.0.0.1", data.getsockname()[1], 0.2)
    assert found["ok"] and found["mbit"] > 1 and found["detail"].endswith(" Mbit/s")


def test_without_a_probe_there_is_no_throughput():
    with probe_pod.listening(0) as data:
        port = data.getsockname()[1]
    found = probe.throughput("127.0.0.1", port, 0.2)
    assert found["ok"] is False and found["mbit"] is None and "refused" in found["detail"]
