"""The faults that diagnose looks for, where no node is needed to have them."""

from __future__ import annotations

import json
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from tailscaled_stub import Tailscaled, go_time, peer

from headcni.ctl import diagnose, faults, mesh_faults, node
from headcni.ctl.daemon_client import CONTROL
from headcni.ctl.finding import Finding
from headcni.datapath.host_firewall import Found
from headcni.datapath.host_firewall.chains import Chain
from headcni.settings import PATH, DaemonConfig, control_path, parse
from headcni.shared import conflist


def config(**more: object):
    network = {"podCIDR": {"nodeLocal": "10.9.1.0/24", "base": "10.9.0.0/16"}}
    made, problems = parse(json.dumps({"network": network, **more}).encode())
    assert problems == []
    return made


@pytest.fixture
def tailscaled(tmp_path):
    server = Tailscaled(str(tmp_path / "sock"))
    yield server
    server.end()


@pytest.fixture
def here(tailscaled):
    return config(
        tailscale={"socket": {"path": tailscaled.server_address}},
        daemon={"socket": "/run/there-is-no-such/cni.sock"},
    )


def test_the_constants_that_spare_status_the_settings_are_those_of_the_settings():
    assert control_path(DaemonConfig()) == CONTROL
    assert node.CONFIG == PATH


class _Clock(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response_only(200)
        self.send_header("Date", formatdate(time.time() - self.server.behind, usegmt=True))
        self.end_headers()

    def log_message(self, *_unused: object) -> None:
        pass


@pytest.mark.parametrize(
    ("behind", "told"),
    [
        (0, None),
        (30, None),
        (7500, "2h ahead of"),
        (-630, "10m behind"),
        (-86400.0 * 9 - 60, "9d beh"),
    ],
)
def test_a_clock_that_differs_from_headscales_is_found(behind, told, monkeypatch):
    monkeypatch.setattr(faults.shutil, "which", lambda _unused: None)
    monkeypatch.setattr(faults, "TIMESYNCD", __file__)
    server = HTTPServer(("127.0.0.1", 0), _Clock)
    server.behind = behind
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        found = list(faults.clock(config(headscale={"url": url})))
    finally:
        server.shutdown()
        server.server_close()
    assert [told in one.found for one in found] == ([True] if told else [])
    run = "timedatectl set-ntp true && systemctl restart systemd-timesyncd"
    assert [one.run for one in found] == ([run] if told else [])


def test_the_clock_is_set_by_the_time_service_that_the_node_has(monkeypatch):
    monkeypatch.setattr(faults, "time_of", lambda _unused: 1_800_000_000.0)
    monkeypatch.setattr(faults.shutil, "which", lambda _unused: None)
    monkeypatch.setattr(faults, "TIMESYNCD", "/nowhere")
    mine = config(headscale={"url": "http://127.0.0.1:1"})
    [found] = faults.clock(mine)
    assert found.run == "date -s @1800000000" and "install chrony" in found.means
    monkeypatch.setattr(faults.shutil, "which", lambda name: f"/usr/bin/{name}")
    [found] = faults.clock(mine)
    assert found.run.startswith("systemctl restart chronyd") and "install" not in found.means


def test_a_server_that_cannot_be_asked_is_no_wrong_clock():
    assert list(faults.clock(config(headscale={"url": "http://127.0.0.1:1"}))) == []
    assert faults.time_of("ftp://127.0.0.1") is None and faults.time_of("") is None


def test_a_key_that_expires_soon_is_found(tailscaled, here):
    assert list(mesh_faults.tailscale(here)) == []
    tailscaled.self_known = {"KeyExpiry": go_time(-3700)}
    [found] = mesh_faults.tailscale(here)
    assert (found.id, found.where) == ("key-expires", "controller")
    assert found.run == "ansible-playbook -i INVENTORY playbooks/rotate_keys.yml"
    tailscaled.self_known = {"KeyExpiry": go_time(-86400 * 30)}
    assert list(mesh_faults.tailscale(here)) == []


@pytest.mark.parametrize(
    ("state", "id_", "run"),
    [
        ("NeedsLogin", "logged-out", "ansible-playbook -i INVENTORY site.yml"),
        ("Stopped", "tailscale-stopped", "tailscale up"),
        ("NoState", "tailscale-not-running", "ansible-playbook -i INVENTORY site.yml"),
    ],
)
def test_a_tailscaled_without_a_tailnet_is_found(tailscaled, here, state, id_, run):
    tailscaled.known["BackendState"] = state
    [found] = mesh_faults.tailscale(here)
    assert (found.id, found.run) == (id_, run)


@pytest.mark.parametrize(
    ("mode", "unit"), [("host", "tailscaled"), ("daemon", "headcni-tailscaled")]
)
def test_a_tailscaled_that_does_not_answer_is_found(tmp_path, mode, unit):
    there = config(tailscale={"mode": mode, "socket": {"path": str(tmp_path / "none")}})
    [found] = mesh_faults.tailscale(there)
    assert (found.id, found.run) == ("tailscaled-down", f"systemctl restart {unit}")


def test_a_node_that_takes_our_range_is_found_and_keeps_its_other_routes(tailscaled, here):
    routes = ["10.9.1.0/24", "10.9.2.0/24", "192.168.0.0/24"]
    tailscaled.peers = [
        peer(2, Tags=["tag:headcni"], AllowedIPs=routes, PrimaryRoutes=routes),
    ]
    tailscaled.self_known = {"Tags": ["tag:headcni"]}
    [found] = mesh_faults.claims(here)
    assert (found.id, found.where) == ("duplicate-own-cidr", "headscale")
    assert found.run == (
        "headscale nodes approve-routes --identifier 2 --routes 10.9.2.0/24,192.168.0.0/24"
    )


NODES_ONLY = {
    "IPProto": [6],
    "Srcs": ["100.64.0.0/10"],
    "Dsts": [{"Net": "100.64.0.1/32", "Ports": {"First": 0, "Last": 65535}}],
}


def test_a_policy_that_hides_pods_is_found_although_headscale_names_no_peer(tailscaled, here):
    """Seen with Headscale 0.29: it then withholds the peers' routes as well."""
    tailscaled.peers = [peer(2, Tags=["tag:headcni"], AllowedIPs=["100.64.0.2/32"])]
    tailscaled.self_known = {"Tags": ["tag:headcni"], "PrimaryRoutes": ["10.9.1.0/24"]}
    tailscaled.filter = [NODES_ONLY]
    [found] = mesh_faults.policy(here)
    assert found.id == "policy-denies"
    assert "anybody in to the pods of this node (10.9.1.0/24)" in found.found
    [note] = [one for one in mesh_faults.peers(here) if one.id == "not-served"]
    assert note.found == "n2 serves no range of pods, as far as this node knows" and not note.sure
    pods = {"Net": "10.9.0.0/16", "Ports": {"First": 0, "Last": 65535}}
    tailscaled.filter = [{**NODES_ONLY, "Dsts": [pods]}]
    assert list(mesh_faults.policy(here)) == []


def test_the_rules_of_a_range_that_is_not_approved_say_nothing(tailscaled, here):
    tailscaled.filter = [NODES_ONLY]
    assert list(mesh_faults.policy(here)) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ""),
        (
            {"pod_cidr": ["10.77.1.0/24"]},
            "pod_cidr is 10.77.1.0/24, and the daemon has 10.9.1.0/24",
        ),
        ({"mode": "daemon"}, "mode is daemon, and the daemon has host"),
        ({"mtu": 1500}, "mtu is 1500, and the daemon has 1280"),
    ],
)
def test_a_conflist_of_an_earlier_configuration_is_stale(changes, told):
    made = conflist.build(conflist.Options(["10.9.1.0/24"]))
    made["plugins"][0].update(changes)
    assert faults.stale(json.dumps(made).encode(), config()) == told


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"plugins": [3]}'])
def test_a_conflist_that_is_none_is_stale(content):
    assert faults.stale(content, config()) == "it is not a valid conflist"


def test_a_file_that_comes_first_is_set_aside_by_the_advice(tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    [none] = faults.conflists(config(), str(folder))
    assert none.id == "no-conflist"
    conflist.write(conflist.build(conflist.Options(["10.9.1.0/24"])), str(folder))
    assert list(faults.conflists(config(), str(folder))) == []
    (folder / "05-other.conflist").write_text("{}")
    [found] = faults.conflists(config(), str(folder))
    assert found.id == "other-conflist"
    import subprocess

    subprocess.run(["sh", "-c", found.run], check=True)
    assert list(faults.conflists(config(), str(folder))) == []


def test_a_runtime_that_looks_elsewhere_is_found(monkeypatch, tmp_path):
    plugins = tmp_path / "bin"
    plugins.mkdir()
    made = faults.container_runtimes.Runtime("containerd", "config.toml", (str(plugins),))
    monkeypatch.setattr(faults.container_runtimes, "running", lambda _root: [made])
    monkeypatch.setattr(faults.container_runtimes, "of_kubelet", lambda found, _root: found)
    [found] = faults.runtimes(config(), "/etc/cni/net.d")
    assert found.id == "runtime-elsewhere"
    assert json.dumps(["/opt/cni/bin", str(plugins)]) in found.run
    (plugins / "headcni").touch(mode=0o755)
    assert list(faults.runtimes(config(), "/etc/cni/net.d")) == []
    [found] = faults.runtimes(config(), str(tmp_path))
    assert found.run.endswith("site.yml -e headcni_node_cni_conf_dir=/etc/cni/net.d")


FORWARD = Chain("inet", "other", "f", "forward", True)


@pytest.mark.parametrize(
    ("name", "chain", "run"),
    [
        ("iptables", FORWARD, "iptables -I FORWARD -i headcni0 -j ACCEPT && "),
        ("Docker (IPv6)", FORWARD, "iptables -I FORWARD"),
        ("ufw", FORWARD, "ufw route allow in on headcni0 && ufw route allow out on headcni0 && "),
        ("nftables table inet other", FORWARD, "nft insert rule inet other f iifname headcni0 acc"),
        ("firewalld", FORWARD, ""),
        ("iptables", FORWARD._replace(hook="input"), ""),
    ],
)
def test_the_owner_of_a_firewall_is_told_the_rules(name, chain, run):
    mine = config(network={"podCIDR": {"nodeLocal": "10.9.1.0/24"}, "firewall": "none"})
    found = faults.blocking(Found(name, (chain,), ("a chain",)), mine)
    assert found.run.startswith(run) and bool(found.run) == bool(run)
    told = faults.blocking(Found(name, (chain,), ("a chain",)), config())
    assert told.run == "systemctl restart headcni-daemon"


def test_the_same_problem_is_told_once(tmp_path, capsys):
    """Many parts need tailscaled; only the first says that it is away."""
    file = tmp_path / "config.yaml"
    file.write_text(
        json.dumps(
            {
                "network": {"podCIDR": {"nodeLocal": "10.9.1.0/24"}},
                "daemon": {"dataDir": str(tmp_path), "socket": str(tmp_path / "no" / "cni.sock")},
                "tailscale": {"socket": {"path": str(tmp_path / "none")}},
            }
        )
    )
    from headcni.ctl.main import main

    assert main(["diagnose", "--json", "--config", str(file), "--cni-dir", str(tmp_path)]) == 1
    answer = json.loads(capsys.readouterr().out)
    texts = [one["found"] for one in answer["findings"]]
    assert len(texts) == len(set(texts))
    assert sum("none is not there" in text for text in texts) == 1
    assert answer["findings"][0]["id"] == "daemon-down"
    assert answer["well"] is False


def test_findings_are_shown_in_80_columns_without_colour_for_a_file(capsys):
    long = Finding("x", "short", "a long meaning " * 12, "a command")
    said = long.in_words("part")
    assert said.splitlines()[0] == "part: short"
    assert max(map(len, said.splitlines())) <= 80
    assert said.splitlines()[-1] == "  run:   a command"
    assert "\x1b" not in said
    away = long._replace(where="controller").in_words("part").splitlines()
    assert away[-1].strip() == "a command", "alone on its line, so that it can be copied"


def test_parts_are_in_the_order_of_cause_and_effect():
    names = [name for name, _look in diagnose._parts(config(), "/nowhere")]
    assert names.index("daemon") == 0
    for cause, effect in (
        ("forwarding", "tailscale"),
        ("tailscale", "approval"),
        ("duplicates", "approval"),
        ("pool", "pods"),
        ("firewall", "dns"),
        ("pods", "conditions"),
    ):
        assert names.index(cause) < names.index(effect)
