"""The metrics' page, the alerts, the runbook and the dashboard belong together.

What Prometheus itself says about the rules and the panels is in tests/lab/test_monitoring.py.
"""

from __future__ import annotations

import json
import re

import metrics_table
import pytest
import yaml
from generated_pages import CHECKOUT, PAGES, filled
from metrics_table import Row, table

METRICS = (CHECKOUT / "docs/metrics.md").read_text()
RUNBOOK = (CHECKOUT / "docs/runbook.md").read_text()
ALERTS = [
    rule
    for group in yaml.safe_load((CHECKOUT / "monitoring/alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
CASES = yaml.safe_load((CHECKOUT / "monitoring/alerts_test.yml").read_text())["tests"]
DASHBOARD = json.loads((CHECKOUT / "monitoring/dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SERIES = {
    series
    for row in metrics_table.rows()
    for series in (
        [f"{row.name}_{end}" for end in ("bucket", "count", "sum")]
        if row.type == "histogram"
        else [row.name]
    )
}


def used(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:headcni|process)_[a-z_]+\b", expression))


@pytest.mark.parametrize("page", PAGES)
def test_the_generated_parts_of_a_page_are_what_the_code_says(page):
    text = (CHECKOUT / page).read_text()
    assert text == filled(text, PAGES[page]), f"{page} is out of date: run make reference"


@pytest.mark.parametrize("row", metrics_table.rows(), ids=lambda row: row.name)
def test_every_metric_says_what_it_means_and_what_is_normal(row: Row):
    assert len(row.meaning) > 15 and row.normal, (
        f'{row.name}: end its help with "Normal: …", or add it to OF_THE_CLIENT in metrics.py'
    )


def test_the_labels_of_all_metrics_are_explained():
    section = METRICS.partition("\n## Labels\n")[2].partition("\n## ")[0]
    explained = {
        name
        for line in section.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split(" | ")[0])
    }
    labels = {label for row in metrics_table.rows() for label in row.labels}
    assert labels - {"generation"} == explained  # of Python's garbage collector


def test_a_gauge_whose_help_is_not_a_literal_stops_the_generator(tmp_path, monkeypatch):
    (tmp_path / "odd.py").write_text("metrics.gauge(name, 'Peers. Normal: 2.', read)\n")
    monkeypatch.setattr(metrics_table, "RUNTIME", tmp_path)
    with pytest.raises(SystemExit, match=r"odd.py:1: give gauge\(\) its name"):
        table(ours=True)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_uses_metrics_that_exist_and_links_to_its_section_of_the_runbook(rule):
    assert used(rule["expr"]) <= SERIES
    assert 'job="headcni"' in rule["expr"]
    assert rule["labels"]["severity"] in ("critical", "warning")
    page, _, section = rule["annotations"]["runbook_url"].rpartition("#")
    assert page.endswith("/docs/runbook.md") and section == rule["alert"].lower()
    assert f"\n## {rule['alert']}\n" in RUNBOOK


def test_the_runbook_has_no_section_without_an_alert():
    assert re.findall(r"(?m)^## (.*)$", RUNBOOK) == [rule["alert"] for rule in ALERTS]


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_fires_in_a_test_and_is_quiet_on_a_node_that_is_well(rule):
    name = rule["alert"]
    quiet, cases = CASES[0], [case for case in CASES[1:] if name in case["name"].split()]
    assert [one for one in quiet["alert_rule_test"] if one["alertname"] == name]
    assert any(one["exp_alerts"] for case in cases for one in case["alert_rule_test"])
    assert any(not one["exp_alerts"] for case in cases for one in case["alert_rule_test"])


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_shows_metrics_that_exist_and_says_what_they_mean(panel):
    assert panel["description"]
    for target in panel["targets"]:
        found = used(target["expr"])
        assert found <= SERIES and (found or "up{" in target["expr"])
        assert 'job="headcni", instance=~"$instance"' in target["expr"]


def test_every_metric_of_ours_is_on_the_dashboard():
    shown = {
        name for panel in PANELS for target in panel["targets"] for name in used(target["expr"])
    }
    bare = {re.sub(r"_(bucket|count|sum)$", "", name) for name in shown}
    ours = {row.name for row in metrics_table.rows() if row.name.startswith("headcni_")}
    assert ours - bare == set(HIDDEN)


# Metrics without a panel, and why.
HIDDEN = {
    "headcni_dns_setup_duration_seconds": "the panel of the steps of ADD shows its time",
    "headcni_interface_creations_total": "a failed creation is in the panel of errors",
    "headcni_scrape_errors_total": "an alert; a panel would be empty",
}
