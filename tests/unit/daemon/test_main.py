"""What the daemon does by itself, between the calls."""

from __future__ import annotations

import re
import shutil
import threading
import time
from dataclasses import replace
from ipaddress import ip_address

import kube_server
import pytest
from patience import until

from headcni.condition import Condition
from headcni.ctl import status
from headcni.daemon import daemon as parts
from headcni.daemon import leaks
from headcni.daemon.daemon import Daemon
from headcni.daemon.observe.monitor import ask
from headcni.daemon.readiness import Conditions
from headcni.daemon.status import warnings_of
from headcni.ipam.allocate import Ipam
from headcni.mesh.claims import Alarm, Refusal
from headcni.mesh.prefix import Prefix
from headcni.mesh.routes import Report
from headcni.mesh.settings import cluster_cidrs, mesh_of, prefs_file
from headcni.model import LeasedAddress, Owner, PodRef
from headcni.recover import RECOVERED
from headcni.settings import control_path, parse
from headcni.shared.node_status import alarms
from headcni.store import Attachment, PluginState

CONFIG = """
daemon: {{socket: {tmp}/cni.sock, dataDir: {tmp}/data}}
network: {{podCIDR: {{nodeLocal: 10.9.1.0/24}}}}
{more}
"""


def configured(tmp_path, more: str = ""):
    config, problems = parse(CONFIG.format(tmp=tmp_path, more=more).encode())
    assert problems == []
    return config


@pytest.fixture
def daemon(tmp_path):
    (tmp_path / "data").mkdir()
    return Daemon(configured(tmp_path), str(tmp_path / "config.yaml"))


def attach(daemon: Daemon, name: str, netns: str, created: float) -> Owner:
    owner = Owner("pods", name, "eth0")
    conf = {
        "cniVersion": "1.0.0",
        "name": "pods",
        "type": "headcni",
        "pod_cidr": "10.9.1.0/24",
        "ipam": {"type": "headcni-ipam", "subnet": "10.9.1.0/24"},
        "data_dir": daemon.config.daemon.data_dir,
    }
    result = {"ips": [{"address": "10.9.1.5/24"}]}
    daemon.store.remember(Attachment(owner, PodRef(), netns, "", conf, result, {}, created))
    return owner


def test_an_address_kept_for_a_link_that_is_gone_is_released(daemon):
    """Recovery keeps it. Runtimes without GC never ask for it to be released."""
    kept, alive = Owner("", "hc0123456789a", ""), attach(daemon, "alive", "/proc/self/ns/net", 1.0)
    for number, owner in enumerate((kept, alive)):
        leased = LeasedAddress(ip_address(f"10.9.1.{7 + number}"), 32, None)
        daemon.store.adopt(owner, RECOVERED, [leased])
    assert daemon.leaks.sweep() == ["hc0123456789a"]
    assert Ipam(daemon.store).lease(kept) is None
    assert Ipam(daemon.store).lease(alive) is not None  # it has an attachment, and lives
    assert daemon.leaks.sweep() == []


def test_a_network_whose_namespace_is_gone_is_released_and_told(daemon, tmp_path):
    lost = attach(daemon, "lost", str(tmp_path / "gone"), time.time() - 3600)
    assert daemon.leaks.sweep() == ["lost eth0"]
    assert daemon.store.attachment(lost) is None
    [event] = daemon.events.kept()
    assert (event["type"], event["pod_ip"]) == ("pod-leaked", ["10.9.1.5"])
    assert daemon.leaks.sweep() == []


def test_a_network_that_cannot_be_released_keeps_no_other_from_it(daemon, tmp_path):
    stuck = attach(daemon, "stuck", str(tmp_path / "gone"), time.time() - 7200)
    conf = {"cniVersion": "1.0.0", "name": "pods", "type": "nowhere"}
    daemon.store.save_plugin_state(stuck, PluginState(0, "nowhere", conf, {}))
    attach(daemon, "lost", str(tmp_path / "gone"), time.time() - 3600)
    assert daemon.leaks.sweep() == ["lost eth0"]
    assert [one.owner for one in daemon.store.attachments()] == [stuck]


def test_a_network_is_released_in_the_store_that_it_was_found_in(daemon, tmp_path):
    lost = attach(daemon, "lost", str(tmp_path / "gone"), time.time() - 3600)
    known = daemon.store.attachment(lost)
    elsewhere = {**known.config, "data_dir": str(tmp_path / "elsewhere")}
    daemon.store.remember(replace(known, config=elsewhere))
    assert daemon.leaks.sweep() == ["lost eth0"]
    assert daemon.store.attachments() == []


def test_what_is_young_or_alive_or_on_nobodys_record_stays(daemon, tmp_path):
    long_ago = time.time() - 3600
    attach(daemon, "young", str(tmp_path / "gone"), time.time())
    attach(daemon, "alive", "/proc/self/ns/net", long_ago)
    attach(daemon, "unknown", "", long_ago)
    assert daemon.leaks.sweep() == []
    assert len(daemon.store.attachments()) == 3


def test_a_pod_that_a_reconstructed_store_took_for_alive_is_released_soon(
    daemon, tmp_path, monkeypatch
):
    """Its DEL was at work when the store was lost, and the runtime's cache still had it."""
    monkeypatch.setattr(leaks, "GRACE_SECONDS", 0.2)
    daemon._sweep_when_due()
    time.sleep(0.3)
    daemon._sweep_when_due()
    shutil.rmtree(daemon.config.daemon.data_dir)
    attach(daemon, "deleted", str(tmp_path / "gone"), time.time())
    daemon._sweep_when_due()
    assert len(daemon.store.attachments()) == 1, "what is young stays"
    time.sleep(0.3)
    daemon._sweep_when_due()
    assert daemon.store.attachments() == []


def test_routes_that_cannot_be_kept_just_now_are_begun_at_a_later_pass(daemon, monkeypatch):
    class Refused:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def start(self) -> None:
            raise OSError(24, "Too many open files")

    monkeypatch.setattr(parts, "RouteReconciler", Refused)
    monkeypatch.setattr(parts, "_turn_forwarding_on", lambda cidrs: None)  # of this machine
    daemon._pass("routes", daemon._start_routes)
    assert daemon.routes is None
    monkeypatch.setattr(Refused, "start", lambda _: None)
    daemon._pass("routes", daemon._start_routes)
    assert isinstance(daemon.routes, Refused)


class Paced:
    """A part that has passes."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.every = self.seconds.append


def test_what_a_reload_can_change_is_changed_in_every_part(daemon, tmp_path):
    daemon.routes, daemon.pods = Paced(), Paced()
    config = daemon.path
    with open(config, "w", encoding="utf-8") as file:
        file.write("daemon: {reconcileInterval: 5m}\nipam: {gcInterval: 10s}\n")
    daemon.leaks.due_at = time.monotonic() + 3600
    daemon.reload()
    assert (daemon.routes.seconds, daemon.pods.seconds) == ([300.0], [300.0])
    assert daemon.leaks.due_at <= time.monotonic() + 10
    assert daemon._upkeep.is_woken, "who keeps house waits for as long as was right before"
    daemon.reload()
    assert daemon.routes.seconds == [300.0]
    with open(config, "w", encoding="utf-8") as file:
        file.write("daemon: {reconcileInterval: 1s}\n")
    daemon.reload()
    assert (daemon.routes.seconds, daemon.pods.seconds) == ([300.0, 1.0], [300.0, 10.0])


def test_the_clusters_range_is_the_configured_one_or_one_around_our_own(tmp_path):
    config = configured(tmp_path)
    own = config.network.pod_cidr.node_local
    assert [str(one) for one in cluster_cidrs(config, own)] == ["10.9.0.0/16"]


def test_each_modes_tailscaled_has_notes_of_its_own(tmp_path):
    host, ours = configured(tmp_path), configured(tmp_path, "tailscale: {mode: daemon}")
    assert prefs_file(host) != prefs_file(ours)
    assert control_path(host) == f"{tmp_path}/daemon.sock"


def test_a_first_pass_that_ends_while_somebody_asks_makes_nothing_look_ready():
    conditions = Conditions(None, lambda: None)

    def passes() -> str:
        found = Condition("tailscale", False, "nobody there"), Condition("routes", True, "")
        conditions.report = Report(conditions=found)
        return ""

    conditions.fixed = {"store": passes}
    assert not all(one.ok for one in ask(conditions)), "the pass was not over when asked"
    assert [one.name for one in ask(conditions) if not one.ok] == ["tailscale"]


REFUSED = Refusal(Prefix.parse("10.9.128.0/17"), "laptop", "untagged")
ALARM = Alarm("own-cidr", "10.9.1.0/24", ("this node", "node2"), "node2 serves 10.9.1.0/24")
WARNING = Alarm("untagged", "10.9.128.0/17", ("laptop",), "laptop has no tag")


def test_a_claim_of_a_foreign_device_is_told_and_counted_but_leaves_the_node_ready(daemon, caplog):
    routes = Condition("routes", True, "")
    daemon._measure()
    for _ in range(3):
        daemon._reported(
            Report(conditions=(routes,), alarms=(ALARM,), warnings=(WARNING,), refusals=(REFUSED,))
        )
    names = [one.name for one in ask(daemon.conditions) if one.name.startswith("alarm")]
    assert names == []
    assert caplog.messages.count("laptop has no tag") == 1
    assert caplog.messages.count("node2 serves 10.9.1.0/24") == 1
    shown = daemon.metrics.render()[1].decode()
    assert 'headcni_refused_claims{reason="untagged"} 1.0' in shown
    assert 'headcni_refused_claims{reason="prefix-length"} 0.0' in shown
    status = daemon.status()
    assert [one["message"] for one in status["warnings"]] == ["laptop has no tag"]
    lines = alarms(status)
    assert lines == ["ALARM: node2 serves 10.9.1.0/24", "WARNING: laptop has no tag"]


def test_a_node_of_the_mesh_that_has_this_nodes_range_makes_it_unready(daemon):
    held_back = ALARM._replace(holds_back=True)
    daemon._reported(Report(conditions=(Condition("routes", True, ""),), alarms=(held_back,)))
    failed = {one.name: one.message for one in ask(daemon.conditions) if not one.ok}
    assert failed["alarm-own-cidr-10.9.1.0/24"] == "node2 serves 10.9.1.0/24"
    assert alarms(daemon.status()) == [], "it is among the conditions"


def test_the_mesh_takes_its_rules_for_claims_from_the_configuration(tmp_path):
    more = "tailscale: {peerTags: [tag:k8s]}"
    config = configured(tmp_path, more)
    own = config.network.pod_cidr.node_local
    mesh = mesh_of(config, own, cluster_cidrs(config, own), None)
    rules = mesh.claim_rules()
    assert (rules.tags, rules.lengths[2], rules.lengths[10]) == (("tag:k8s",), (24,), (64,))


@pytest.mark.parametrize(
    "part", ["server", "_upkeep", "firewalls", "faults", "routes", "keeper", "pods"]
)
def test_a_part_whose_thread_has_ended_is_told_to_the_watchdog(daemon, part):
    daemon.server = daemon._upkeep = threading.current_thread()
    daemon.firewalls = daemon.faults = threading.current_thread()
    assert daemon.is_healthy(), "the other parts are not there, nor need they be"
    ended = threading.Thread()
    ended.start()
    ended.join()
    setattr(daemon, part, ended)
    assert not daemon.is_healthy()


def test_a_token_that_is_not_renewed_is_warned_about_and_measured(tmp_path, monkeypatch):
    """It keeps no node from serving pods."""
    (tmp_path / "data").mkdir()
    token = tmp_path / "token"
    # Of a day: the next attempt comes after a minute.
    token.write_text(kube_server.jwt(time.time() - 86400, time.time() - 10))
    server = kube_server.KubeServer(tmp_path / "server", accepts=set())
    kubeconfig = server.kubeconfig(tokenFile=str(token), token="")
    monkeypatch.setattr("headcni.shared.bearer_token.FILE", str(token))
    more = f"kubeconfig: {kubeconfig}"
    config, problems = parse(
        CONFIG.format(tmp=tmp_path, more="").replace("}", f", {more}}}", 1).encode()
    )
    assert problems == []
    daemon = Daemon(config, str(tmp_path / "config.yaml"))
    daemon._start_pods()
    try:
        until(lambda: any(one.kind == "kubernetes-token" for one in warnings_of(daemon)))
        [line] = [one for one in alarms(daemon.status()) if "token for Kubernetes" in one]
        assert re.match(r"WARNING: the token for Kubernetes expired on .*: run site\.yml", line)
        assert "token for Kubernetes: until" in status._in_words(daemon.status())
        until(lambda: b'{error_type="kubernetes-token"}' in daemon.metrics.render()[1])
        text = daemon.metrics.render()[1].decode()
        expiry = int(time.time() - 10)
        found = re.search(r"^headcni_kubernetes_token_expiry_timestamp_seconds (\S+)$", text, re.M)
        assert abs(float(found[1]) - expiry) < 30
        assert 'headcni_network_errors_total{error_type="kubernetes-token"} 1.0' in text
        assert daemon.token.is_alive()
    finally:
        daemon.token.stop()
        daemon.pods.stop()
        daemon.annotations.stop()
        server.close()


@pytest.mark.parametrize(
    ("chosen", "shown"),
    [
        ("mode: host", ""),
        ("mode: daemon", "all"),
        ("mode: daemon, answerForNode: false", "none"),
        ("mode: daemon, answerForNode: [22, 6443/tcp]", "22, 6443/tcp"),
    ],
)
def test_the_status_says_on_which_ports_tailnet_peers_are_answered(tmp_path, chosen, shown):
    (tmp_path / "data").mkdir()
    daemon = Daemon(configured(tmp_path, f"tailscale: {{{chosen}}}"), str(tmp_path / "c.yaml"))
    told = status._in_words(daemon.status())
    assert ("ports of this node that tailnet peers reach" in told) is bool(shown)
    assert f"ports of this node that tailnet peers reach: {shown}\n" in told or not shown
