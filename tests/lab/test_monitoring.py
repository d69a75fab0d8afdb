"""A real Prometheus reads the rules, scrapes two daemons, and has an answer for every panel."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import prometheus
import pytest
import yaml
from kube_server import KubeServer, pod
from lab_command import CHECKOUT, LabCommand
from patience import until

MONITORING = CHECKOUT / "monitoring"
NODES = ("node1", "node2")
HOME = "/root/monitoring"
PROMETHEUS = "http://127.0.0.1:9090"
POLICED = "node2"  # has no API server, and network policies from a file
DENY = """apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: deny, namespace: shop}
spec: {podSelector: {}, policyTypes: [Ingress, Egress]}
"""
API_PORT = 16443  # of the Kubernetes API, on node1
PANELS = [
    (panel["title"], target["expr"])
    for panel in json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    for target in panel.get("targets", ())
]


def promtool(*words: str) -> str:
    done = subprocess.run(
        [prometheus.programs() / "promtool", *words],
        cwd=MONITORING,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_the_rules_and_the_example_of_a_configuration():
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
    assert f"SUCCESS: {len(rules)} rules found" in promtool("check", "rules", "alerts.yml")
    promtool("check", "config", "scrape.yml")


def test_every_alert_fires_and_is_quiet_when_its_unit_tests_say_so():
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml")


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory, approved) -> Iterator[str]:
    """An API server with one pod of node1, which node1 reaches on its own loopback."""
    server = KubeServer(tmp_path_factory.mktemp("kubernetes"))
    server.put(pod("web"))
    tunnel = subprocess.Popen(
        [
            *("ssh", "-N", "-o", "ExitOnForwardFailure=yes"),
            *approved._ssh("node1", "")[1:-2],
            *("-R", f"127.0.0.1:{API_PORT}:127.0.0.1:{server.port}", "node1"),
        ],
        cwd=CHECKOUT,
        env=approved.env,
    )
    try:
        config = json.loads(server.kubeconfig().read_text())
        config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{API_PORT}"
        yield json.dumps(config)
    finally:
        tunnel.terminate()
        tunnel.wait(10)
        server.close()


@pytest.fixture(scope="module")
def scraped(approved, kubernetes) -> Iterator[LabCommand]:
    """Daemons on both nodes, pods that come, go and fail, and a Prometheus on node1."""
    lab = approved
    known = lab.inventory()["lab"]["vars"]
    key = Path(known["lab_dir"], "headscale-api-key").read_bytes()
    hosts = lab.inventory()["_meta"]["hostvars"]
    addresses = {node: hosts[node]["ansible_host"] for node in NODES}
    for number, node in enumerate(NODES, 1):
        lab.write(node, "/etc/headcni/api-key", key)
        lab.write(node, "/etc/headcni/kubeconfig", kubernetes.encode())
        lab.on(node, "chmod 600 /etc/headcni/api-key /etc/headcni/kubeconfig")
        config: dict[str, Any] = {
            "daemon": {"reconcileInterval": "2s"},
            "network": {"podCIDR": {"nodeLocal": f"10.55.{number}.0/24", "base": "10.55.0.0/16"}},
            "headscale": {"url": known["lab_headscale_url"], "apiKeyFile": "/etc/headcni/api-key"},
            "monitoring": {"address": "0.0.0.0"},
        }
        if node == POLICED:
            config["network"]["enableNetworkPolicy"] = True
            lab.write(node, "/etc/headcni/policies/deny.yaml", DENY.encode())
        else:
            config["daemon"] |= {"kubeconfig": "/etc/headcni/kubeconfig", "nodeName": "node1"}
        lab.write(node, "/etc/headcni/config.yaml", yaml.safe_dump(config).encode())
        plugin = {
            "type": "headcni",
            "pod_cidr": f"10.55.{number}.0/24",
            "cluster_cidr": "10.55.0.0/16",
            "ipam": {"type": "headcni-ipam", "subnet": f"10.55.{number}.0/24"},
            "enable_network_policy": node == POLICED,
        }
        conflist = {"cniVersion": "1.0.0", "name": "watched", "plugins": [plugin]}
        lab.write(node, "/etc/cni/net.d/10-watched.conflist", json.dumps(conflist).encode())
        lab.on(
            node,
            "cp /opt/headcni/current/units/headcni-daemon.service /etc/systemd/system/"
            " && systemctl daemon-reload && systemctl restart headcni-daemon",
        )
        lab.wait(node, "curl -fsS http://127.0.0.1:9001/healthz >/dev/null 2>&1", seconds=90)
    scrape = yaml.safe_load((MONITORING / "scrape.yml").read_text())
    scrape["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    scrape["scrape_configs"][0]["static_configs"] = [
        {"targets": [f"{address}:9001"], "labels": {"instance": node}}
        for node, address in addresses.items()
    ]
    lab.write("node1", f"{HOME}/prometheus.yml", yaml.safe_dump(scrape).encode())
    lab.copy(MONITORING / "alerts.yml", "node1", f"{HOME}/alerts.yml")
    lab.copy(prometheus.programs() / "prometheus", "node1", f"{HOME}/prometheus")
    lab.on(
        "node1",
        f"chmod +x {HOME}/prometheus; systemd-run --quiet --unit watching-prometheus"
        f" {HOME}/prometheus --config.file {HOME}/prometheus.yml --storage.tsdb.path {HOME}/data"
        " --web.listen-address 127.0.0.1:9090",
    )
    lab.wait("node1", f"curl -fsS {PROMETHEUS}/-/ready >/dev/null 2>&1", seconds=60)
    try:
        yield lab
    finally:
        lab.on("node1", "systemctl stop watching-prometheus", check=False)
        for node in NODES:
            lab.on(
                node,
                "systemctl stop headcni-daemon; ip link del headcni0;"
                f" rm -rf {HOME} /etc/headcni/policies;"
                " cd /etc/headcni && rm -f config.yaml api-key kubeconfig;"
                " rm -f /etc/cni/net.d/10-watched.conflist"
                " /etc/systemd/system/headcni-*; systemctl daemon-reload",
                check=False,
            )


# Pods that come and go as long as the tests run, and pods that ask for an address that is taken.
PODS = """#!/bin/sh
export CNI_PATH=/opt/cni/bin NETCONFPATH=/etc/cni/net.d
cnitool() { /opt/lab/cni/cnitool "$1" watched "/run/netns/$2"; }
while sleep 0.5; do
  ip netns add watched
  cnitool add watched; cnitool check watched; cnitool del watched
  CNI_ARGS='IgnoreUnknown=1;IP=10.55.1.2' cnitool add watched
  ip netns del watched
done
"""
# A pod that may send nothing and tries to, while a policy comes and goes.
POLICED_POD = """#!/bin/sh
export CNI_PATH=/opt/cni/bin NETCONFPATH=/etc/cni/net.d
export CNI_ARGS='IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web'
cd /etc/headcni/policies
ip netns add policed
/opt/lab/cni/cnitool add watched /run/netns/policed
while sleep 1; do
  sed 's/name: deny/name: other/' deny.yaml >other.yaml
  ip netns exec policed ping -c 3 -i 0.2 -W 1 10.55.1.2
  rm other.yaml
done
"""
CNITOOL = "CNI_PATH=/opt/cni/bin NETCONFPATH=/etc/cni/net.d /opt/lab/cni/cnitool"


@pytest.fixture(scope="module")
def busy(scraped) -> Iterator[LabCommand]:
    scraped.on(
        "node1",
        f"ip netns add watched-stays && {CNITOOL} add watched /run/netns/watched-stays"
        " | grep -q 10.55.1.2/24",
    )
    scraped.write("node1", f"{HOME}/pods", PODS.encode())
    scraped.on("node1", f"systemd-run --quiet --unit watched-pods sh {HOME}/pods")
    scraped.write(POLICED, f"{HOME}/policed", POLICED_POD.encode())
    scraped.on(POLICED, f"systemd-run --quiet --unit policed-pod sh {HOME}/policed")
    # Something for the daemon to repair, so that there are corrections.
    scraped.on("node1", "ip route flush table 5200", check=False)
    try:
        yield scraped
    finally:
        scraped.on(
            "node1",
            "systemctl stop watched-pods; for pod in watched watched-stays; do"
            f" {CNITOOL} del watched /run/netns/$pod; ip netns del $pod; done",
            check=False,
        )
        scraped.on(
            POLICED,
            f"systemctl stop policed-pod; {CNITOOL} del watched /run/netns/policed;"
            " ip netns del policed",
            check=False,
        )


def asked(lab: LabCommand, expression: str) -> list[dict[str, Any]]:
    answer = json.loads(
        lab.on("node1", f"curl -sS '{PROMETHEUS}/api/v1/query?query={quote(expression)}'")
    )
    assert answer["status"] == "success", answer
    return list(answer["data"]["result"])


@pytest.mark.parametrize(
    ("title", "expression"), PANELS, ids=[f"{title}-{n}" for n, (title, _) in enumerate(PANELS)]
)
def test_every_query_of_a_panel_returns_data(busy, title, expression):
    filled = expression.replace("$instance", ".*").replace("$__rate_interval", "2m")

    def has_data() -> bool:
        return any(series["value"][1] != "NaN" for series in asked(busy, filled))

    until(has_data, 60, f"{title} has data: {filled}", every=2)


def test_prometheus_scrapes_both_daemons_and_evaluates_every_alert(busy):
    up = asked(busy, 'up{job="headcni"}')
    assert {series["metric"]["instance"]: series["value"][1] for series in up} == dict.fromkeys(
        NODES, "1"
    )
    rules = json.loads(busy.on("node1", f"curl -sS {PROMETHEUS}/api/v1/rules"))["data"]["groups"]
    assert {rule["health"] for group in rules for rule in group["rules"]} == {"ok"}
