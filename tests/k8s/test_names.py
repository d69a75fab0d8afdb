"""Names in both directions: pods resolve the tailnet by CoreDNS, and a device of the tailnet, which
is no node of the cluster, resolves and reaches services."""

from __future__ import annotations

import json
import re

import pytest
from k8s_cluster import NODES, deployment, get, is_ready, service, serving, until

from lab import tools

pytestmark = pytest.mark.timeout(900)
DNS_ON = {"headcni_node_cluster_dns": True}
TASK = "headcni.mesh.headcni_node : Let pods resolve names of the tailnet, or stop that"
RELOADED = 240  # seconds until kubelet has written the ConfigMap and CoreDNS has read it
NAMES = "playbooks/names.yml"
WEB = "web.default.svc.mesh.lab"
SOCKET = "/root/device/sock"
DEVICE = (
    "mkdir -p /root/device; TS_DEBUG_USE_DERP_HTTP=true nohup /root/device/tailscaled "
    "--tun=userspace-networking --socks5-server=127.0.0.1:1055 --statedir=/root/device "
    f"--socket={SOCKET} --port=0 --no-logs-no-support > /root/device/log 2>&1 < /dev/null & "
    "echo $! > /root/device/pid"
)


def config(cluster) -> dict[str, dict[str, str]]:
    """CoreDNS' own ConfigMap, and the one for others."""
    found = {}
    for name in ("coredns", "coredns-custom"):
        made = cluster.get("configmap", name, "-n", "kube-system")
        found[name] = (made or {}).get("data") or {}
    return found


def servers(cluster) -> list[str]:
    """The addresses of CoreDNS' pods."""
    pods = cluster.all("pods", "-n", "kube-system", "-l", "k8s-app=kube-dns")
    assert pods and all(map(is_ready, pods))
    return [one["status"]["podIP"] for one in pods]


def ask(cluster, node: str, name: str, server: str = "") -> str:
    return cluster.exec(f"asker-{node}", f"nslookup {name} {server} 2>&1", check=False)


def names_of_nodes(cluster) -> dict[str, str]:
    listed = cluster.on("control", "/opt/lab/headscale/headscale nodes list -o json 2>/dev/null")
    online = [one for one in json.loads(listed) if one.get("online")]
    return {f"{one['given_name']}.mesh.lab": one["ip_addresses"][0] for one in online}


@pytest.fixture(scope="module")
def askers(cluster):
    before = config(cluster)
    until(lambda: len(servers(cluster)) > 0, what="CoreDNS")
    for node in NODES:
        cluster.run_pod(f"asker-{node}", node)
    yield before
    cluster.site()(headcni_node_cluster_dns=False)
    for node in NODES:
        cluster.delete_pod(f"asker-{node}")


@pytest.fixture(scope="module")
def resolving(cluster, askers):
    """CoreDNS has the block."""
    predicted = cluster.site()("--check", **DNS_ON)
    assert config(cluster) == askers
    done = cluster.site()(**DNS_ON)
    assert {task for _host, task in done.changed} == {TASK}
    assert {task for _host, task in predicted.changed} == {TASK}
    assert cluster.site()(**DNS_ON).changed == set()
    return askers


def everything_resolves(cluster) -> None:
    """Each CoreDNS, asked from each node, over the mesh where it is on the other."""
    names = names_of_nodes(cluster)
    assert len(names) >= len(NODES)
    for server in servers(cluster):
        for node in NODES:
            for name, address in names.items():
                until(
                    lambda: address in ask(cluster, node, name, server),  # noqa: B023
                    RELOADED,
                    f"{name} at {server} from {node}",
                )
                said = ask(cluster, node, address, server)
                assert name in said, (node, said)
            said = ask(cluster, node, "kubernetes.default.svc.cluster.local", server)
            assert "10.96.0.1" in said or "10.43.0.1" in said, said


def test_pods_on_both_nodes_resolve_devices_by_name_and_by_address(cluster, resolving):
    everything_resolves(cluster)


def test_by_the_pods_own_resolv_conf_too(cluster, resolving):
    for node in NODES:
        for name, address in names_of_nodes(cluster).items():
            said = cluster.exec(f"asker-{node}", f"nslookup {name} 2>&1", check=False)
            assert address in said, said


def test_a_name_that_no_device_has_is_an_error_and_not_an_answer(cluster, resolving):
    said = ask(cluster, "node1", "nobody.mesh.lab")
    assert "NXDOMAIN" in said or "SERVFAIL" in said, said


def test_a_limit_that_keeps_coredns_away_is_refused_and_one_that_does_not_works(cluster, resolving):
    refused = cluster.site()(check=False, headcni_node_tailnet_access="pods", **DNS_ON)
    assert "CoreDNS may not reach tailscaled's resolver" in refused.output
    allowed = {"kube-system": ["100.100.100.100:53"]}
    cluster.site()(
        headcni_node_tailnet_access="pods",
        headcni_node_tailnet_access_namespaces=allowed,
        **DNS_ON,
    )
    try:
        everything_resolves(cluster)
    finally:
        cluster.site()(**DNS_ON)


@pytest.fixture(scope="module")
def web(cluster, resolving):
    """A service with a server on each node."""
    made = service("web")
    made["metadata"]["annotations"] = {"headcni.dev/tailnet-name": "true"}
    cluster.apply(deployment("web", 2, container=serving()), made)
    pods = cluster.until_pods("web", 2)
    yield {one["metadata"]["name"] for one in pods}
    cluster.kubectl("delete", "deployment/web", "service/web")


@pytest.fixture(scope="module")
def device(cluster):
    """A tailscaled on control, which is no node of the mesh. It needs no TUN."""
    for name in ("tailscale", "tailscaled"):
        cluster.copy(tools.TAILSCALE.bin / name, "control", f"/root/device/{name}")
    cluster.on("control", f"chmod +x /root/device/tailscale*; {DEVICE}")
    cluster.wait("control", f"test -S {SOCKET}")
    headscale = "/opt/lab/headscale/headscale"
    cluster.on("control", f"{headscale} users create ann >/dev/null 2>&1; true")
    made = cluster.on("control", f"{headscale} users list -o json 2>/dev/null")
    (user,) = [one["id"] for one in json.loads(made) if one["name"] == "ann"]
    key = cluster.on("control", f"{headscale} preauthkeys create --user {user} 2>/dev/null")
    url = cluster.inventory()["lab"]["vars"]["lab_headscale_url"]
    cluster.on(
        "control",
        f"/root/device/tailscale --socket={SOCKET} up --login-server={url} --hostname=laptop "
        f"--auth-key={key.split()[-1]} --accept-routes --timeout=60s",
    )
    yield
    cluster.on("control", "kill $(cat /root/device/pid); rm -rf /root/device")


def asked_by_device(cluster, name: str) -> str:
    return cluster.on(
        "control", f"/root/device/tailscale --socket={SOCKET} dns query {name}", False
    )


def fetched_by_device(cluster, name: str) -> str:
    """The proxy of a tailscaled without a TUN does not ask its own resolver, so this does."""
    found = re.search(r"TypeA +([0-9.]+)", asked_by_device(cluster, name))
    assert found, f"{name} has no address at the device"
    curl = f"curl -sS -m 8 --socks5 127.0.0.1:1055 http://{found[1]}/"
    return cluster.on("control", f"{curl} 2>&1", check=False).strip()


def test_a_device_of_the_tailnet_resolves_an_annotated_service(cluster, web, device):
    address = cluster.get("service", "web")["spec"]["clusterIP"]
    predicted = cluster.site()("--check", playbook=NAMES)
    assert address not in asked_by_device(cluster, WEB)
    done = cluster.site()(playbook=NAMES)
    assert {task for _host, task in done.changed} == {"Write the names into Headscale's file"}
    assert {task for _host, task in predicted.changed} == {task for _host, task in done.changed}
    assert cluster.site()(playbook=NAMES).changed == set()
    until(lambda: address in asked_by_device(cluster, WEB), 60, "the name at the device")
    # The tailnet has no route there yet: that is for the operator to decide.
    assert not fetched_by_device(cluster, WEB).startswith("web-")


def reached(cluster, web) -> None:
    seen = set()

    def all_seen() -> bool:
        seen.add(fetched_by_device(cluster, WEB))
        return web <= seen

    until(all_seen, 60, lambda: f"{web} by the device, of {seen}")


def test_with_a_route_it_reaches_pods_on_both_nodes_by_that_name(cluster, web, device):
    routed = {"headcni_names_service_routes": ["node1"]}
    predicted = cluster.site()("--check", playbook=NAMES, **routed)
    done = cluster.site()(playbook=NAMES, **routed)
    assert predicted.changed and done.changed
    assert cluster.site()(playbook=NAMES, **routed).changed == set()
    reached(cluster, web)
    # The other node accepts routes, and reaches services as before.
    address = cluster.get("service", "web")["spec"]["clusterIP"]
    for node in NODES:
        for _ in range(6):
            assert cluster.on(node, f"curl -sS -m 5 http://{address}/").strip() in web
            said = cluster.exec(f"asker-{node}", get(address, 80)).split()
            assert web & set(said)
    assert cluster.site()(**DNS_ON).changed == set()


def test_pods_resolve_the_service_by_its_name_in_the_tailnet_too(cluster, web, device):
    address = cluster.get("service", "web")["spec"]["clusterIP"]
    until(lambda: address in ask(cluster, "node2", WEB), 60, "the name in a pod")


def test_names_and_routes_work_in_daemon_mode_too(cluster, web, device):
    cluster.site()(playbook=NAMES, headcni_names_service_routes=[])
    cluster.site()(playbook="playbooks/switch_mode.yml", headcni_mode="daemon", **DNS_ON)
    try:
        assert cluster.site()(headcni_mode="daemon", **DNS_ON).changed == set()
        everything_resolves(cluster)
        address = cluster.get("service", "web")["spec"]["clusterIP"]
        assert address in asked_by_device(cluster, WEB)
        assert not fetched_by_device(cluster, WEB).startswith("web-")
        routed = {"headcni_mode": "daemon", "headcni_names_service_routes": ["node1"]}
        assert cluster.site()(playbook=NAMES, **routed).changed
        assert cluster.site()(playbook=NAMES, **routed).changed == set()
        reached(cluster, web)
        assert cluster.site()(headcni_mode="daemon", **DNS_ON).changed == set()
        cluster.site()(playbook=NAMES, headcni_mode="daemon", headcni_names_remove=True)
    finally:
        cluster.site()(playbook="playbooks/switch_mode.yml", headcni_mode="host", **DNS_ON)


def test_names_and_routes_can_be_removed(cluster, web, device):
    cluster.site()(playbook=NAMES, headcni_names_service_routes=["node1"])
    cluster.site()(playbook=NAMES, headcni_names_remove=True)
    assert json.loads(cluster.on("control", "cat /var/lib/headscale/extra-records.json")) == []
    address = cluster.get("service", "web")["spec"]["clusterIP"]
    until(lambda: address not in asked_by_device(cluster, WEB), 60, "the name is gone")
    listed = cluster.on("control", "/opt/lab/headscale/headscale nodes list-routes -o json")
    assert "10.96.0.0" not in listed and "10.43.0.0" not in listed
    assert cluster.site()(playbook=NAMES, headcni_names_remove=True).changed == set()


def test_without_the_block_corednss_configuration_is_as_before(cluster, resolving):
    assert cluster.site()("--check").changed and config(cluster) != resolving
    done = cluster.site()()
    assert {task for _host, task in done.changed} == {TASK}
    assert config(cluster) == resolving
    assert cluster.site()().changed == set()
