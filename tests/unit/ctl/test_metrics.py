"""headcnictl metrics: what is outside of what is normal comes first, with the reason."""

from __future__ import annotations

import json
import tempfile

import metrics_table
import pytest

from headcni.ctl import main as ctl
from headcni.ctl.normal import RULES, at_most
from headcni.daemon.observe import metrics as daemon_metrics
from headcni.daemon.observe.control import Control
from headcni.daemon.observe.events import Events
from headcni.daemon.observe.metrics import Metrics
from headcni.model import PodRef


@pytest.fixture
def metrics():
    return Metrics("1.2.3")


@pytest.fixture
def run(metrics, capsys, tmp_path, monkeypatch):
    """headcnictl, and a daemon that has measured this. Its process is the one of all tests."""
    monkeypatch.setitem(RULES, "process_resident_memory_bytes", at_most(1 << 40, "too much"))
    with tempfile.TemporaryDirectory(prefix="hct-") as folder:
        file = tmp_path / "config.yaml"
        file.write_text(f"daemon: {{socket: {folder}/cni.sock}}\n")
        answers = {"metrics": metrics.families}
        control = Control(f"{folder}/daemon.sock", dict, Events(), lambda _unused: {}, answers)
        control.start()

        def run(*words: str) -> tuple[int, str]:
            code = ctl.main(["metrics", *words, "--config", str(file)])
            said = capsys.readouterr()
            return code, said.out or said.err

        yield run
        control.stop()


def test_there_is_a_rule_for_every_metric_and_no_other():
    assert set(RULES) == {row.name for row in metrics_table.rows()}


def test_on_a_quiet_node_all_is_normal(run, metrics):
    metrics.call("ADD", None, PodRef("shop", "web", "1"), 0.008, 0, {"link": 0.004})
    code, said = run()
    assert code == 0
    assert "0 of" in said.splitlines()[-1]
    assert "Time to set up a pod's network" in said
    assert "now: namespace=shop: 1 times, 8 ms on average, 99 % within 10 ms" in said
    assert max(map(len, said.splitlines())) <= 80


def test_what_is_not_normal_comes_first_with_the_reason(run, metrics):
    metrics.conditions(lambda: [("store", True), ("tailscale", False)])
    metrics.failed("store")
    code, said = run()
    assert code == 1
    assert [line for line in said.splitlines() if line.startswith("!")] == [
        "! headcni_condition",
        "! headcni_network_errors_total",
    ]
    assert said.startswith("! ")
    assert "now: condition=tailscale: 0 (the condition does not hold" in said
    assert said.splitlines()[-1].startswith("2 of")


def test_a_name_limits_the_list_and_shows_every_series(run, metrics):
    metrics.gauge("peers", "Peers. Normal: direct.", lambda: {("direct",): 3.0}, ("path",))
    metrics.conditions(lambda: [(f"c{number}", True) for number in range(9)])
    assert run("peers")[1].count("headcni_") == 1
    assert run("condition")[1].count("now:") == 9
    assert run()[1].count("now: condition=") == 5
    code, said = run("zzz")
    assert code == 3
    assert "no metric has 'zzz'" in said


@pytest.mark.parametrize(
    ("name", "labels", "reading", "outside"),
    [
        ("peers", ("path",), {("direct",): 2.0, ("derp",): 0.0}, False),
        ("peers", ("path",), {("direct",): 2.0, ("derp",): 1.0}, True),
        ("ip_pool_addresses", ("network", "state"), {("n", "free"): 9, ("n", "leased"): 91}, True),
        ("ip_pool_addresses", ("network", "state"), {("n", "free"): 50, ("n", "leased"): 5}, False),
        ("kubernetes_token_expiry_timestamp_seconds", (), 0.0, False),
        ("kubernetes_token_expiry_timestamp_seconds", (), 1000.0, True),
        ("kubernetes_token_expiry_timestamp_seconds", (), 1e12, False),
        ("refused_claims", ("reason",), {("overlap",): 1.0}, True),
    ],
)
def test_gauges_are_judged(run, metrics, name, labels, reading, outside):
    metrics.gauge(name, "A gauge. Normal: as it should be.", lambda: reading, labels)
    code, said = run(f"headcni_{name}", "--json")
    [one] = json.loads(said)["metrics"]
    assert (code, one["outside"]) == (int(outside), outside)
    assert any(series["outside"] for series in one["series"]) is outside


def test_slow_and_failed_requests_are_judged_but_not_those_that_wait(run, metrics):
    metrics._kubernetes.labels("watch", "ok").observe(300)
    assert run("kubernetes_request")[0] == 0
    metrics._kubernetes.labels("list", "ok").observe(3)
    assert "(3 s on average, and 1 s is normal)" in " ".join(run("kubernetes_request")[1].split())
    code, said = run("kubernetes_request")
    assert code == 1 and "operation=list, outcome=ok" in said
    metrics._tailscale.labels("status", "error").observe(0.001)
    code, said = run("tailscale_request")
    assert code == 1 and "(outcome error)" in said


def test_a_metric_with_a_great_many_series_is_cut_and_says_so(run, metrics, monkeypatch):
    monkeypatch.setattr(daemon_metrics, "MOST_SERIES", 20)
    metrics.conditions(lambda: [(f"c{number}", True) for number in range(30)])
    assert json.loads(run("condition", "--json")[1])["metrics"][0]["more"] == 10
    assert "and 10 more" in run("condition")[1]
