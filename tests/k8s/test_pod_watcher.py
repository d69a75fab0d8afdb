"""The daemon's pod watcher against the real API server: it sees pods, loses the server and finds it
again, and puts right what no CNI call will."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import pytest
from k8s_cluster import Cluster, until

NODE = "node2"  # the agent; the API server is on node1
LOG = "/run/pod-watcher.log"
KUBELET = "/var/lib/rancher/k3s/agent/kubelet.kubeconfig"
ACCOUNT = "/root/account.kubeconfig"


@dataclass
class Watcher:
    """The watcher on the agent, and all that it has told."""

    cluster: Cluster

    def start(self, kubeconfig: str = KUBELET, *options: str) -> None:
        cidr = self.cluster.get("node", NODE)["spec"]["podCIDR"]
        home = "/opt/headcni/current"
        command = (
            f"python3 -S /root/pod_watcher.py --kubeconfig {kubeconfig} --node {NODE}"
            f" --cidr {cidr} {' '.join(options)} > {LOG} 2> {LOG}.err"
        )
        self.cluster.on(
            NODE,
            f"rm -f {LOG}; systemd-run --quiet --collect --unit=pod-watcher"
            f" --setenv=PYTHONPATH={home}:{home}/vendor sh -c 'exec {command}'",
        )

    def stop(self) -> None:
        self.cluster.on(NODE, "systemctl stop pod-watcher", check=False)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(one) for one in self.cluster.on(NODE, f"cat {LOG}").splitlines()]

    @property
    def now(self) -> dict[str, Any]:
        return next((one for one in reversed(self.lines()) if "pods" in one), {})

    def events(self, name: str) -> list[dict[str, Any]]:
        return [one for one in self.lines() if one.get("pod") == f"default/{name}"]

    def sees(self, name: str) -> bool:
        return name in self.now.get("names", ())

    def await_passes(self, count: int = 3) -> None:
        """Until it has made so many more passes. Three take longer than the grace period."""
        wanted = self.now["passes"] + count
        until(lambda: self.now["passes"] >= wanted)

    def cpu(self) -> float:
        """Seconds since its start."""
        usage = self.cluster.on(
            NODE, "cat /proc/$(systemctl show -P MainPID pod-watcher)/stat"
        ).split()
        return (int(usage[13]) + int(usage[14])) / 100


@pytest.fixture(scope="module", autouse=True)
def alone(cluster):
    """The daemon has a watcher too, and would be the first to mend things."""
    cluster.on(NODE, "systemctl stop headcni-daemon")
    yield
    cluster.on(NODE, "systemctl start headcni-daemon")


@pytest.fixture(scope="session")
def account(cluster):
    """The service account, past the agent's load balancer: that goes when k3s-agent does."""
    known = json.loads(cluster.on(NODE, "cat /etc/headcni/kubeconfig"))
    admin = json.loads(cluster.kubectl("config", "view", "-o", "json"))
    known["clusters"][0]["cluster"]["server"] = admin["clusters"][0]["cluster"]["server"]
    cluster.write(NODE, ACCOUNT, json.dumps(known).encode())
    return ACCOUNT


@pytest.fixture
def watcher(cluster):
    made = Watcher(cluster)
    yield made
    made.stop()


@pytest.fixture(params=["kubelet's own", "service account"])
def credentials(request, account):
    return KUBELET if request.param == "kubelet's own" else account


def test_it_sees_pods_come_and_go(cluster, watcher, credentials):
    watcher.start(credentials)
    until(lambda: watcher.now.get("connected"))
    cluster.run_pod("comes", NODE)
    until(lambda: watcher.sees("comes"))
    cluster.run_pod("elsewhere", "node1")
    cluster.delete_pod("comes")
    until(lambda: not watcher.sees("comes"))
    assert not watcher.sees("elsewhere")
    cluster.delete_pod("elsewhere")
    assert watcher.now["condition"] == ["pods", True, ""]
    assert watcher.events("comes") == []


def test_the_account_may_look_and_no_more(cluster, account):
    def may(*words: str) -> bool:
        user = "--as=system:serviceaccount:kube-system:headcni-node"
        return cluster.kubectl("auth", "can-i", *words, user, check=False).strip() == "yes"

    assert all(may(verb, "pods", "-A") for verb in ("get", "list", "watch"))
    assert may("get", "nodes")
    assert may("list", "namespaces") and may("watch", "namespaces")
    for words in (
        ("patch", "namespaces"),
        ("delete", "pods"),
        ("patch", "nodes"),
        ("get", "secrets", "-A"),
        ("create", "pods/exec"),
        ("list", "nodes"),
    ):
        assert not may(*words), words


def test_labels_choose_which_pods_are_watched(cluster, watcher):
    cluster.run_pod("chosen", NODE)
    cluster.run_pod("other", NODE)
    watcher.start(KUBELET, "--labels", "app=chosen")
    until(lambda: watcher.sees("chosen"))
    watcher.await_passes()
    assert watcher.now["names"] == ["chosen"]
    assert {"chosen", "other"} <= set(cluster.attachments(NODE))
    for name in ("chosen", "other"):
        cluster.delete_pod(name)


def test_a_version_that_the_server_has_forgotten_leads_to_a_new_list(cluster, watcher):
    """The first version ever: the API server answers 410 Gone."""
    cluster.run_pod("there", NODE)
    watcher.start(KUBELET, "--version", "1")
    until(lambda: watcher.sees("there") and watcher.now["connected"])
    told = cluster.on(NODE, f"cat {LOG}.err")
    assert "listed anew" in told and "too old resource version" in told
    assert watcher.now["lists"] == 1
    cluster.delete_pod("there")


def test_an_api_server_that_restarts_is_found_again_and_nothing_is_lost(cluster, watcher):
    cluster.run_pod("before", NODE)
    watcher.start()
    until(lambda: watcher.sees("before"))
    cluster.on("node1", "systemctl restart k3s")
    until(lambda: watcher.now["watches"] >= 2 and watcher.now["connected"], 120)
    cluster.run_pod("after", NODE)
    until(lambda: watcher.sees("after"))
    assert watcher.now["condition"] == ["pods", True, ""]
    assert watcher.events("before") == [] and "before" in cluster.attachments(NODE)
    for name in ("before", "after"):
        cluster.delete_pod(name)


def test_a_link_that_was_deleted_under_a_running_pod_is_made_anew(cluster, watcher):
    pod = cluster.run_pod("cut", NODE)
    address = pod["status"]["podIP"]
    watcher.start()
    until(lambda: watcher.sees("cut"))
    link = cluster.attachments(NODE)["cut"]
    ping = f"ping -c 1 -W 1 {address} >/dev/null"
    cluster.on(NODE, f"{ping} && ip link del {link}")
    began = time.monotonic()
    until(lambda: watcher.events("cut"))
    (event,) = watcher.events("cut")
    assert event["event"] == "pod-repaired" and "is missing" in event["message"]
    cluster.on(NODE, ping)
    assert cluster.get("pod", "cut")["status"]["podIP"] == address
    assert cluster.get("pod", "cut")["status"]["containerStatuses"][0]["restartCount"] == 0
    print(f"mended {time.monotonic() - began:.1f} s after it was cut")
    cluster.delete_pod("cut")
    until(lambda: "cut" not in cluster.attachments(NODE))
    list_links = "ls /sys/class/net | grep ^hc"
    until(  # CoreDNS may be here
        lambda: (
            sorted(cluster.on(NODE, list_links, check=False).split())
            == sorted(cluster.attachments(NODE).values())
        )
    )


def test_a_host_network_pod_is_left_alone(cluster, watcher):
    cluster.run_pod("host", NODE, hostNetwork=True)
    watcher.start()
    until(lambda: watcher.sees("host"))
    watcher.await_passes()
    assert watcher.events("host") == [] and "host" not in cluster.attachments(NODE)
    cluster.delete_pod("host")


@pytest.fixture
def leak(cluster):
    """A network whose DEL will never come: containerd has lost all it knew, as with a broken disk,
    and the sandbox is dead. Afterwards the agent is well again."""
    cluster.run_pod("leak", NODE)
    cluster.on(
        NODE,
        "systemctl stop k3s-agent; systemctl kill --kill-who=all --signal=KILL k3s-agent;"
        " kill -9 $(find /sys/fs/cgroup/pids/kubepods -name cgroup.procs -exec cat {} +); sleep 1;"
        " for n in /run/netns/cni-*; do umount $n; rm -f $n; done;"
        " rm -rf /var/lib/rancher/k3s/agent/containerd /run/k3s/containerd",
        check=False,
    )
    assert "leak" in cluster.attachments(NODE)
    yield
    cluster.on("node1", "systemctl start k3s")
    cluster.on(NODE, "systemctl start k3s-agent")
    until(lambda: cluster.is_ready(NODE), 120)
    cluster.run_pod("next", NODE)
    cluster.delete_pod("next")


def force_delete(cluster) -> None:
    cluster.kubectl("delete", "pod", "leak", "--force", "--grace-period=0")


def test_a_leaked_network_is_released_but_not_while_the_server_is_away(
    cluster, watcher, account, leak
):
    watcher.start(account)
    until(lambda: watcher.now.get("connected"))
    cluster.on("node1", "systemctl stop k3s")
    until(lambda: not watcher.now["connected"], 60)
    watcher.await_passes()
    assert "leak" in cluster.attachments(NODE)  # without the server nobody knows its pods
    cluster.on("node1", "systemctl start k3s")
    until(lambda: watcher.now["connected"], 120)
    watcher.await_passes()
    assert "leak" in cluster.attachments(NODE)  # its pod is still known
    force_delete(cluster)
    until(lambda: "leak" not in cluster.attachments(NODE), 60)
    told = [one["event"] for one in watcher.events("leak")]
    assert told == ["pod-missing", "pod-leaked"], watcher.events("leak")


def test_a_nodes_own_credentials_are_enough_to_release_a_leaked_network(cluster, watcher, leak):
    force_delete(cluster)
    cluster.on(NODE, "systemctl start k3s-agent")
    watcher.start(KUBELET)
    until(lambda: "leak" not in cluster.attachments(NODE), 60)
    assert [one["event"] for one in watcher.events("leak")] == ["pod-leaked"]


def test_at_rest_it_takes_next_to_no_time(cluster, watcher):
    """With the interval that the daemon has."""
    for name in ("one", "two", "three"):
        cluster.run_pod(name, NODE)
    watcher.start(KUBELET, "--interval", "45", "--grace", "60")
    until(lambda: watcher.now.get("connected"))
    time.sleep(5)
    before = watcher.cpu()
    time.sleep(60)
    used = watcher.cpu() - before
    print(f"{used:.2f} s of CPU in a minute")
    assert used / 60 < 0.005
    for name in ("one", "two", "three"):
        cluster.delete_pod(name)
