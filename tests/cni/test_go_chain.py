"""The chain with the real plugins: bridge, host-local, tuning, portmap, bandwidth, firewall.

What they do to a host they do to a network namespace that stands in for one, so
neither the machine's links nor its firewall are touched.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import threading
import uuid
from pathlib import Path

import pytest

from headcni import chain, config, errors
from headcni.exec import invoke
from headcni.model import Owner
from headcni.result import read, shape
from headcni.skel import VERSIONS
from headcni.store import Store
from lab.tools import CNI
from tests.unit.cni.test_result import FULL

PORTS = [{"hostPort": 18080, "containerPort": 80, "protocol": "tcp"}]
RATES = {"ingressRate": 8000000, "ingressBurst": 800000, "egressRate": 0, "egressBurst": 0}


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=True)
    return done.stdout


class Pod:
    """Two namespaces, one for the host and one for the pod, and the calls between them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = Store.in_directory(str(directory / "data"))
        mark = uuid.uuid4().hex[:6]
        self.host, self.pod = f"hct-{mark}-host", f"hct-{mark}-pod"
        for name in (self.host, self.pod):
            ip("netns", "add", name)
        ip("-n", self.host, "link", "set", "lo", "up")
        self.container = f"hct-{mark}"
        self.owner = Owner("pods", self.container, "eth0")
        self.env = {
            "CNI_CONTAINERID": self.container,
            "CNI_IFNAME": "eth0",
            "CNI_NETNS": f"/run/netns/{self.pod}",
            "CNI_PATH": str(CNI.bin),
            "PATH": os.environ["PATH"],
        }
        self.version = "1.1.0"
        self.leases = directory / "leases" / "pods"
        self.plugins: list[dict[str, object]] = [
            {
                "type": "bridge",
                "bridge": "br0",
                "ipam": {"type": "host-local", "dataDir": str(self.leases.parent)},
            },
            {
                "type": "tuning",
                "sysctl": {"net.ipv4.conf.eth0.arp_filter": "1"},
                "dataDir": str(directory / "tuning"),
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
            {"type": "bandwidth", "capabilities": {"bandwidth": True}},
        ]

    def close(self) -> None:
        self.store.close()
        for name in (self.host, self.pod):
            subprocess.run(["ip", "netns", "del", name], check=False)

    def network(self, **changes: object):
        conf = {
            "cniVersion": self.version,
            "name": "pods",
            "type": "headcni",
            "pod_cidr": "10.97.3.0/24",
            "mtu": 1380,
            "ip_masq": False,
            "plugins": self.plugins,
            "runtimeConfig": {"portMappings": PORTS, "bandwidth": RATES},
            **changes,
        }
        kept = {key: value for key, value in conf.items() if value is not None}
        return config.parse(json.dumps(kept).encode(), self.env)

    def on_host(self, work):
        """Run it in the stand-in host's namespace; what it starts is there too."""
        outcome: list[object] = []

        def there() -> None:
            with open(f"/run/netns/{self.host}") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0x40000000) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
            try:
                outcome.append(work())
            except BaseException as problem:
                outcome.append(problem)

        thread = threading.Thread(target=there)
        thread.start()
        thread.join()
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    def add(self, **changes: object):
        network = self.network(**changes)
        return self.on_host(lambda: chain.add(network, self.env, self.owner, self.store))

    def delete(self, **changes: object) -> None:
        network = self.network(**changes)
        self.on_host(lambda: chain.delete(network, self.env, self.owner, self.store))

    def check(self, result, **changes: object) -> None:
        network = self.network(prevResult=shape(result, self.version), **changes)
        self.on_host(lambda: chain.check(network, self.env, self.owner, self.store))

    def error(self, verb: str, *args: object, **changes: object) -> errors.CniError:
        with pytest.raises(errors.CniError) as caught:
            getattr(self, verb)(*args, **changes)
        return caught.value

    def links(self, namespace: str) -> set[str]:
        return {link["ifname"] for link in json.loads(ip("-n", namespace, "-j", "link"))}

    def leased(self) -> list[str]:
        names = os.listdir(self.leases) if self.leases.exists() else []
        return sorted(name for name in names if name[0].isdigit())

    def rules(self) -> str:
        shown = subprocess.run(
            ["ip", "netns", "exec", self.host, "iptables-save"],
            capture_output=True,
            text=True,
            check=True,
        )
        return shown.stdout

    def assert_clean(self) -> None:
        assert self.links(self.pod) == {"lo"}
        assert not [name for name in self.links(self.host) if name.startswith(("veth", "bwp"))]
        assert self.leased() == []
        assert "18080" not in self.rules()
        assert self.store.plugin_states(self.owner) == []


@pytest.fixture
def pod(tmp_path):
    made = Pod(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_chain_of_real_plugins_adds_checks_and_removes_a_pod(pod, version):
    pod.version = version
    if version != "0.3.1":  # which the firewall plugin does not speak
        pod.plugins.append({"type": "firewall", "backend": "iptables"})
    result = pod.add()
    assert [item["name"] for item in result["interfaces"]][-1] == "eth0"
    assert [address["address"] for address in result["ips"]] == ["10.97.3.2/24"]
    (eth0,) = json.loads(ip("-n", pod.pod, "-j", "address", "show", "eth0"))
    assert eth0["mtu"] == 1380
    assert "10.97.3.2" in [address["local"] for address in eth0["addr_info"]]
    assert ip("netns", "exec", pod.pod, "cat", "/proc/sys/net/ipv4/conf/eth0/arp_filter") == "1\n"
    assert "18080" in pod.rules()
    assert [name for name in pod.links(pod.host) if name.startswith("veth")]
    assert pod.leased() == ["10.97.3.2"]
    pod.check(result)
    pod.delete()
    pod.assert_clean()
    pod.delete()


def test_check_finds_what_the_plugins_find(pod):
    result = pod.add()
    ip("-n", pod.pod, "address", "del", "10.97.3.2/24", "dev", "eth0")
    ip("netns", "exec", pod.pod, "sh", "-c", "echo 0 > /proc/sys/net/ipv4/conf/eth0/arp_filter")
    problem = pod.error("check", result)
    assert "bridge: " in problem.msg
    assert "tuning: " in problem.msg
    assert "portmap: " not in problem.msg


def test_a_real_failure_in_the_middle_leaves_nothing_behind(pod):
    pod.plugins[1]["sysctl"] = {"net.ipv4.conf.eth0.no_such_thing": "1"}
    problem = pod.error("add")
    assert problem.msg.startswith("tuning: ")
    assert "roll-back" not in problem.details
    pod.assert_clean()


def test_a_pod_whose_namespace_is_gone_can_be_removed(pod):
    pod.add()
    ip("netns", "del", pod.pod)
    pod.delete()
    assert pod.leased() == []
    assert "18080" not in pod.rules()
    assert pod.store.plugin_states(pod.owner) == []


def test_del_takes_the_ports_of_then_even_if_the_runtime_no_longer_names_them(pod):
    pod.add()
    pod.delete(runtimeConfig=None)
    pod.assert_clean()


def test_gc_removes_what_the_runtime_has_forgotten(pod):
    pod.add()
    env = {"CNI_PATH": pod.env["CNI_PATH"], "PATH": pod.env["PATH"]}
    for valid, left in (([(pod.container, "eth0")], 1), ([], 0)):
        listed = [{"containerID": container, "ifname": ifname} for container, ifname in valid]
        network = pod.network(**{"cni.dev/valid-attachments": listed, "runtimeConfig": None})
        pod.on_host(lambda network=network: chain.gc(network, env, pod.store))
        assert len(pod.leased()) == left
    assert pod.store.plugin_states(pod.owner) == []


def test_status_asks_the_real_plugins(pod):
    env = {"CNI_PATH": pod.env["CNI_PATH"], "PATH": pod.env["PATH"]}
    pod.on_host(lambda: chain.status(pod.network(runtimeConfig=None), env))
    pod.plugins[0]["ipam"]["type"] = "dhcp"  # which is not there
    with pytest.raises(errors.CniError) as caught:
        pod.on_host(lambda: chain.status(pod.network(runtimeConfig=None), env))
    assert caught.value.code == errors.NOT_AVAILABLE
    assert "dhcp" in caught.value.msg


def test_a_delegate_alone_gets_its_addresses_from_our_configuration(pod):
    delegate = {**pod.plugins[0], "ipam": None}
    pod.version = "0.4.0"
    ipam = {"type": "host-local", "dataDir": str(pod.leases.parent)}
    keys = {"plugins": None, "runtimeConfig": None, "ipam": ipam}
    result = pod.add(delegate={k: v for k, v in delegate.items() if v}, **keys)
    assert result["ips"][0]["gateway"] == "10.97.3.1"
    assert {"dst": "0.0.0.0/0"}.items() <= result["routes"][0].items()
    pod.delete(delegate={k: v for k, v in delegate.items() if v}, **keys)
    pod.assert_clean()


def test_a_version_that_a_plugin_does_not_speak_keeps_its_code(pod):
    pod.version = "0.3.1"
    pod.plugins.append({"type": "firewall", "backend": "iptables"})
    problem = pod.error("add")
    assert problem.code == errors.INCOMPATIBLE_VERSION
    assert problem.msg == "firewall: incompatible CNI versions"
    assert pod.links(pod.pod) == {"lo"}


@pytest.mark.parametrize("version", VERSIONS)
def test_host_local_gives_and_takes_back_addresses(pod, version):
    pod.version = version
    ipam = {"type": "host-local", "dataDir": str(pod.leases.parent), "routes": [{"dst": "::/0"}]}
    network = pod.network(plugins=None, ipam=ipam, runtimeConfig=None)
    result = chain.ipam_add(network, pod.env)
    assert result == {
        "cniVersion": "1.1.0",
        "ips": [{"address": "10.97.3.2/24", "gateway": "10.97.3.1"}],
        "routes": [{"dst": "::/0"}],
    }
    assert pod.leased() == ["10.97.3.2"]
    chain.ipam_check(network, pod.env)
    chain.ipam_del(network, pod.env)
    assert pod.leased() == []
    if version != "0.3.1":
        with pytest.raises(errors.CniError):
            chain.ipam_check(network, pod.env)


@pytest.mark.parametrize("version", VERSIONS)
def test_libcni_reads_our_shapes_and_writes_the_same(pod, version):
    """tuning with nothing to do decodes prevResult into libcni's types and prints it again."""
    given = shape(FULL, version)
    conf = {"cniVersion": version, "name": "pods", "type": "tuning", "prevResult": given}
    conf["dataDir"] = str(pod.directory / "tuning")
    ip("-n", pod.pod, "link", "add", "eth0", "type", "veth", "peer", "name", "other")
    answer = invoke("tuning", "ADD", pod.env, conf, 20)
    assert answer == given
    assert read(answer, version) == read(given, version)
