"""daemon mode's namespace: made, repaired and removed on a bare node, and at work on the lab."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cni_node import ECHO, sh
from lab_command import LabCommand
from leftovers import assert_nothing_left
from mesh_node import CNI, bare_node

from headcni.errors import CniError
from headcni.mesh.namespace.settings import MeshConfig

# On a bare node: a network namespace with an underlay.


@pytest.fixture
def bare(tmp_path):
    with bare_node(tmp_path) as node:
        yield node


def test_what_was_made_is_right_and_a_second_ensure_changes_nothing(bare):
    assert bare.ensure()
    assert bare.check() == []
    assert bare.ensure() == []


def test_the_command_says_what_it_repaired_and_check_by_its_exit_code_what_is_wrong(bare):
    assert bare.run("check").returncode == 1
    made = bare.run("ensure")
    assert (made.returncode, made.stdout) == (0, "")
    assert 'msg="repaired" difference="headcni01: missing"' in made.stderr
    right = bare.run("check")
    assert (right.returncode, right.stdout) == (0, "no differences\n")
    bare.changes = {"port": "41642"}
    wrong = bare.run("ensure")
    assert wrong.returncode == 2
    assert 'port is "41642": expected a number from 1 to 65535' in wrong.stderr


def test_the_cable_has_the_underlays_mtu_and_private_addresses(bare):
    bare.ensure()
    assert {one["mtu"] for one in bare.netns.ip_json("link show headcni01")} == {1400}
    assert {one["mtu"] for one in bare.inside.ip_json("link show eth0")} == {1400}
    ours = bare.netns.addresses("headcni01")
    assert {"192.168.255.253/30", "fd68:6561:6463:6e69::1/126"} <= ours


@pytest.mark.parametrize("address", ["192.0.2.2", "2001:db8::2"])
def test_the_namespace_reaches_the_underlay_as_the_node(bare, address):
    bare.ensure()
    with bare.outside.serving(7000, address=address):
        assert bare.inside.asks(address, 7000) == address.removesuffix("2") + "1"


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1"])
@pytest.mark.parametrize("asker", ["outside", "netns"])
def test_tailscaleds_port_leads_into_the_namespace_from_outside_and_from_the_node(
    bare, address, asker
):
    bare.ensure()
    anywhere = "::" if ":" in address else "0.0.0.0"
    with bare.inside.serving(41642, "udp", anywhere):
        assert getattr(bare, asker).asks(address, 41642, "udp")


@pytest.mark.parametrize(
    "harm",
    [
        "host: ip rule del priority 5190",
        "host: ip -6 rule del priority 5193",
        "host: ip -6 rule del priority 5191",
        "host: ip rule add priority 5191 to 203.0.113.0/24 lookup main protocol 72",
        "host: ip route del 100.64.0.0/10 table 5201",
        "host: ip rule del priority 5204",
        "host: ip rule del priority 5188",
        "host: ip rule del iif headcni01 table 5200",
        "host: ip -6 rule del priority 5189 to fd7a:115c:a1e0::/48",
        "host: ip -6 route del default table 5201",
        "host: nft flush chain inet headcni_mesh aside",
        "host: sysctl -q net.ipv4.conf.headcni01.rp_filter=1",
        "inside: nft flush chain inet headcni_mesh forward",
        "host: ip -6 route add 2001:db8:9::/48 dev headcni01 table 5201",
        "host: ip link set headcni01 down",
        "host: ip link set headcni01 mtu 1280",
        "host: ip addr del 192.168.255.253/30 dev headcni01",
        "host: ip addr add 10.9.9.9/24 dev headcni01",
        "host: ip link del headcni01",
        "host: nft delete table inet headcni_mesh",
        "host: nft flush chain inet headcni_mesh postrouting",
        "host: sysctl -q net.ipv4.ip_forward=0",
        "inside: ip route del default",
        "inside: ip -6 route del default",
        "inside: ip link set eth0 down",
        "inside: ip link set eth0 name other0",
        "inside: ip rule del priority 5191",
        "inside: nft flush table inet headcni_mesh",
        "host: nft flush chain inet headcni_mesh output; add rule inet headcni_mesh output accept;"
        " add rule inet headcni_mesh output accept",
        "inside: sysctl -q net.ipv6.conf.all.forwarding=0",
        "inside: ip link set lo down",
    ],
)
def test_harm_is_seen_and_repaired(bare, harm):
    bare.ensure()
    where, _, command = harm.partition(": ")
    space = bare.netns if where == "host" else bare.inside
    sh("nsenter", f"--net={space.path}", *command.split())
    assert bare.check()
    assert bare.ensure()
    assert bare.check() == []


def test_a_deleted_namespace_is_made_again(bare):
    bare.ensure()
    bare.inside.remove()
    assert bare.check() == [f"network namespace {bare.name}: missing"]
    assert bare.ensure()[0] == f"network namespace {bare.name}: missing"
    assert bare.check() == []


def test_a_change_of_the_configuration_is_carried_out(bare):
    bare.ensure()
    bare.changes = {"link4": "10.77.0.0/30", "port": 5000, "pod_cidrs": ["10.42.1.0/24"]}
    assert bare.ensure()
    assert bare.check() == []
    assert "10.77.0.1/30" in bare.netns.addresses("headcni01")
    assert "192.168.255.253/30" not in bare.netns.addresses("headcni01")
    assert "from 10.42.1.0/24 to 100.64.0.0/10 lookup 5201" in bare.netns.ip("rule")


def test_the_links_addresses_are_in_no_route_of_the_node(bare):
    bare.netns.ip("route add 192.168.0.0/16 via 192.0.2.2 table 52")
    bare.netns.ip("route add 172.31.255.0/24 via 192.0.2.2")
    bare.netns.ip("-6 route add fd68:6561:6463:6e69::/127 via 2001:db8::2")
    bare.ensure()
    ours = bare.netns.addresses("headcni01")
    assert {"10.255.255.253/30", "fd68:6561:6463:6e69::5/126"} <= ours


def test_a_node_that_routes_every_private_range_still_gets_a_link(bare):
    for cidr in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"):
        bare.netns.ip(f"route add blackhole {cidr}")
    bare.ensure()
    assert "192.168.255.253/30" in bare.netns.addresses("headcni01")
    with bare.inside.serving(7000):
        assert bare.netns.asks("192.168.255.254", 7000) == "192.168.255.253"


def test_remove_leaves_the_node_as_it_was_and_may_be_repeated(bare):
    before = bare.listing()
    bare.ensure()
    assert bare.listing() != before
    for _ in range(2):
        assert bare.run("remove").returncode == 0
        assert bare.listing() == before


def test_remove_refuses_while_something_runs_inside_and_says_what(bare):
    bare.ensure()
    with subprocess.Popen(["nsenter", f"--net={bare.inside.path}", "sleep", "60"]) as sleeper:
        try:
            time.sleep(0.3)
            refused = bare.run("remove")
        finally:
            sleeper.kill()
    assert refused.returncode == 2
    assert f"in use by sleep ({sleeper.pid})" in refused.stderr
    assert bare.check() == []


def test_a_link_of_somebody_elses_is_not_taken(bare):
    bare.netns.ip("link add headcni01 type bridge")
    refused = bare.run("ensure")
    assert refused.returncode == 2
    assert "headcni01 is a bridge that HeadCNI did not make" in refused.stderr
    bare.run("remove")
    assert "headcni01" in bare.netns.links()


def test_a_node_without_ipv6_gets_ipv4_alone(bare):
    bare.netns.run("sysctl", "-q", "net.ipv6.conf.default.disable_ipv6=1")
    bare.ensure()
    assert bare.check() == []
    assert bare.netns.addresses("headcni01") == {"192.168.255.253/30"}


def test_two_at_once_do_not_get_in_each_others_way(bare):
    import threading

    done: list[list[str]] = []
    several = [threading.Thread(target=lambda: done.append(bare.ensure())) for _ in range(3)]
    for one in several:
        one.start()
    for one in several:
        one.join(60)
    assert sorted(map(bool, done)) == [False, False, True]
    assert bare.check() == []


def test_every_mistake_in_the_configuration_is_named():
    wrong = {
        "port": 0,
        "link4": "169.254.1.0/30",
        "tailnet": "100.64.0.0/10",
        "prot": 1,
        "answer_for_node": [22, "80/icmp"],
    }
    with pytest.raises(CniError) as caught:
        MeshConfig.of(wrong)
    for key in wrong:
        assert key in caught.value.details


def test_routes_into_the_mesh_are_what_a_route_manager_needs(bare):
    bare.ensure()
    with bare.mesh() as mesh:
        gateways = {version: str(one) for version, one in mesh.gateways.items()}
    assert gateways == {4: "192.168.255.254", 6: "fd68:6561:6463:6e69::2"}
    assert mesh.interface == "headcni01"


# On the lab: two nodes in daemon mode, each with a tailscaled of its own beside it.

NODES = ("node1", "node2")
TS = "tailscale --socket=/run/headcni/tailscaled.sock"
PYTHON = "PYTHONPATH=/opt/headcni/current:/opt/headcni/current/vendor python3 -S"
NAMESPACE = f"{PYTHON} -m headcni.mesh.namespace"
TELL_FIREWALLS = (
    f'{PYTHON} -c "from headcni.mesh.namespace.__main__ import tell_firewalls as tell\n'
    "tell('/etc/headcni/config.yaml')\""
)
RUNNING = "tailscale status --json --peers=false | grep -q Running"


@dataclass
class Mesh:
    lab: LabCommand
    before: dict[str, dict[str, Any]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)

    def on(self, node: str, command: str, check: bool = True) -> str:
        return self.lab.on(node, command, check=check)

    def headscale(self, path: str, body: Any = None) -> Any:
        shared = self.lab.inventory()["lab"]["vars"]
        key = Path(shared["lab_dir"], "headscale-api-key").read_text().strip()
        request = urllib.request.Request(
            f"{shared['lab_headscale_url']}/api/v1/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {key}",
                "Content-Type": "application/json",
            },
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def key(self, user: str) -> str:
        if user not in self.keys:
            users = {one["name"]: one["id"] for one in self.headscale("user")["users"]}
            if user not in users:
                users[user] = self.headscale("user", {"name": user})["user"]["id"]
            expiration = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
            wanted = {"user": users[user], "reusable": True, "expiration": expiration}
            self.keys[user] = self.headscale("preauthkey", wanted)["preAuthKey"]["key"]
        return self.keys[user]

    def approve(self, hostname: str, routes: list[str]) -> None:
        nodes = {one["givenName"]: one["id"] for one in self.headscale("node")["nodes"]}
        self.headscale(f"node/{nodes[hostname]}/approve_routes", {"routes": routes})

    def join(self, node: str, program: str, user: str, *flags: str) -> None:
        login = self.lab.inventory()["lab"]["vars"]["lab_headscale_url"]
        self.lab.write(node, "/run/join.key", self.key(user).encode())
        self.on(
            node,
            f"{program} up --login-server={login} --auth-key=file:/run/join.key --accept-routes "
            f"--snat-subnet-routes=false --accept-dns=false --timeout=60s {' '.join(flags)}; "
            "done=$?; rm /run/join.key; exit $done",
        )

    def address(self, node: str, version: int = 4) -> str:
        """The node's in the mesh."""
        return self.on(node, f"{TS} ip -{version}").strip()

    def underlay(self, node: str) -> str:
        return str(self.lab.inventory()["_meta"]["hostvars"][node]["ansible_host"])

    def wait(self, node: str, command: str, seconds: int = 40) -> None:
        loop = f"for i in $(seq {seconds * 2}); do {command} && exit 0; sleep 0.5; done; exit 1"
        self.on(node, loop)

    def configure(self, node: str, **tailscale: Any) -> None:
        number = node[-1]
        own = [f"10.42.{number}.0/24", f"fd42:0:0:{number}::/64"]
        values = {
            "daemon": {"reconcileInterval": "5s"},  # a test waits for a regular pass
            "tailscale": {"mode": "daemon", **tailscale},
            "network": {"podCIDR": {"nodeLocal": own}},
        }
        self.lab.write(node, "/etc/headcni/config.yaml", json.dumps(values).encode())

    def ssh_banner(self, node: str, address: str) -> str:
        return self.on(node, f"timeout 4 nc -w3 {address} 22 </dev/null", check=False).strip()

    @contextmanager
    def pinging(self, node: str, pod: str, name: str = "ping") -> Iterator[list[int]]:
        """Pings from the node's pod, ten a second; [sent, received] once it is over."""
        counted: list[int] = []
        self.on(
            node,
            f"systemd-run --quiet --unit=test-{name} "
            f"--property=StandardOutput=file:/run/{name}.log "
            f"ip netns exec pod ping -i 0.1 -W 1 {pod}",
        )
        time.sleep(0.5)
        try:
            yield counted
        finally:
            self.on(node, f"systemctl kill -s INT test-{name}; sleep 1.2", check=False)
            log = self.on(node, f"cat /run/{name}.log")
            sent, received = re.findall(r"(\d+) packets transmitted, (\d+) received", log)[0]
            counted += [int(sent), int(received)]

    def listing(self, node: str) -> dict[str, Any]:
        """All but what the node's own tailscaled keeps changing: table 52 and its counters."""
        routes = self.on(node, "ip route show table all; ip -6 route show table all")
        return {
            "links": set(re.findall(r"^\d+: ([^:@]+)", self.on(node, "ip -o link"), re.M)),
            "rules": self.on(node, "ip rule; ip -6 rule"),
            "routes": {
                re.sub(r" (expires|pref|metric) \S+", "", line).strip()
                for line in routes.splitlines()
                if not re.search("tailscale0|table 52|^anycast", line)
            },
            "tables": self.on(node, "nft list tables"),
            "namespaces": self.on(node, "ls /run/netns", check=False),
            "files": self.on(node, "ls -d /etc/netns /run/headcni 2>/dev/null", check=False),
            "resolv.conf": self.on(node, "cat /etc/resolv.conf"),
        }


def add_pods(mesh: Mesh, node: str) -> None:
    """A bridge and a pod, by hand."""
    here = node[-1]
    mesh.on(
        node,
        f"""set -e
        ip link add pods0 type bridge; ip link set pods0 up mtu 1280
        ip addr add 10.42.{here}.1/24 dev pods0; ip addr add fd42:0:0:{here}::1/64 dev pods0 nodad
        ip netns add pod
        ip link add pod0 mtu 1280 type veth peer name eth0 mtu 1280 netns pod
        ip link set pod0 master pods0 up
        ip -n pod link set lo up; ip -n pod link set eth0 up
        ip -n pod addr add 10.42.{here}.5/24 dev eth0
        ip -n pod addr add fd42:0:0:{here}::5/64 dev eth0 nodad
        ip -n pod route add default via 10.42.{here}.1
        ip -n pod -6 route add default via fd42:0:0:{here}::1
        ip rule add priority 5200 to 10.42.0.0/16 lookup 5200
        ip -6 rule add priority 5200 to fd42::/32 lookup 5200
        """,
    )
    add_routes(mesh, node)


def add_routes(mesh: Mesh, node: str) -> None:
    """As the route manager puts them, by what the namespace says of itself."""
    here = node[-1]
    there = {"1": "2", "2": "1"}[here]
    mesh.on(
        node,
        f"""set -e
        gateways=$({PYTHON} -c "from headcni.mesh.namespace.mesh_namespace import MeshNamespace as M
print(*M().gateways.values())")
        set -- $gateways
        ip route add 10.42.{there}.0/24 via $1 dev headcni01 src 10.42.{here}.1 table 5200
        ip -6 route add fd42:0:0:{there}::/64 via $2 dev headcni01 src fd42:0:0:{here}::1 table 5200
        """,
    )


def remove_pods(mesh: Mesh, node: str) -> None:
    mesh.on(
        node,
        "ip netns del pod; ip link del pods0; ip rule del priority 5200; "
        "ip -6 rule del priority 5200; ip route flush table 5200; ip -6 route flush table 5200",
        check=False,
    )


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    lab = LabCommand("namespace")
    lab("down")
    before = lab.listing()
    lab("up", "--nodes", "2", "--playbook", "tests/support/joined.yml")
    try:
        made = Mesh(lab)
        dist = tmp_path_factory.mktemp("dist")
        sh(sys.executable, CNI / "release.py", "--output", dist, timeout=120)
        (tarball,) = dist.glob("*.tar.gz")
        with tarfile.open(tarball) as archive:
            release = archive.getnames()[0].partition("/")[0]
        for node in NODES:
            made.before[node] = made.listing(node)
            lab.copy(tarball, node, "/opt/headcni/releases/runtime.tar.gz")
            lab.copy(ECHO, node, "/opt/echo.py")
            unit = "headcni-tailscaled.service"
            lab.copy(CNI / "units" / unit, node, f"/etc/systemd/system/{unit}")
            lab.write(node, "/etc/default/headcni-tailscaled", b"TS_DEBUG_USE_DERP_HTTP=true\n")
            made.configure(node)
            made.on(
                node,
                "tar -xzf /opt/headcni/releases/runtime.tar.gz -C /opt/headcni/releases && "
                f"ln -sfn releases/{release} /opt/headcni/current && "
                "systemctl daemon-reload && systemctl start headcni-tailscaled",
            )
            routes = [f"10.42.{node[-1]}.0/24", f"fd42:0:0:{node[-1]}::/64"]
            advertised = f"--advertise-routes={','.join(routes)}"
            made.join(node, TS, "headcni", f"--hostname={node}-mesh", advertised)
            made.approve(f"{node}-mesh", routes)
            add_pods(made, node)
        for node, other in (NODES, NODES[::-1]):
            made.wait(node, f"ip netns exec pod ping -c1 -W1 10.42.{other[-1]}.5 >/dev/null")
        yield made
    finally:
        lab("down")
    assert_nothing_left(before, lab.listing())


@contextmanager
def serving(mesh: Mesh, node: str, address: str, within: str = "") -> Iterator[None]:
    mesh.on(
        node,
        f"systemd-run --quiet --unit=test-echo {within} "
        f"python3 /opt/echo.py serve tcp {address} 7000; sleep 0.5",
    )
    try:
        yield
    finally:
        mesh.on(node, "systemctl stop test-echo")


@pytest.mark.parametrize("version", [4, 6])
def test_pods_of_two_nodes_see_each_others_own_addresses(mesh, version):
    pod = {4: "10.42.{}.5", 6: "fd42:0:0:{}::5"}[version]
    with serving(mesh, "node2", pod.format(2), "ip netns exec pod"):
        asked = f"ip netns exec pod python3 /opt/echo.py ask tcp {pod.format(2)} 7000"
        assert mesh.on("node1", asked).strip() == pod.format(1)


def test_the_path_is_direct_over_the_underlay(mesh):
    said = mesh.on("node1", f"{TS} ping --until-direct --c 20 node2-mesh")
    assert re.search(r"via \S+:41642 in", said), said
    assert "DERP" not in said.splitlines()[-1]
    own = json.loads(mesh.on("node1", f"{TS} status --json"))["Self"]["Addrs"]
    assert f"{mesh.underlay('node1')}:41642" in own


def start_tailscaled(mesh: Mesh, node: str) -> None:
    """And tell its chain ts-input about callers of the node, as the daemon would at once."""
    mesh.on(node, "systemctl start tailscaled")
    mesh.wait(node, RUNNING)
    mesh.on(node, TELL_FIREWALLS)


@pytest.fixture(scope="module", params=["is stopped", "runs"])
def own_tailscaled(mesh, request):
    """The nodes' own tailscaled beside ours, stopped once for all tests that want it so."""
    for node in NODES:
        if request.param == "is stopped":
            mesh.on(node, "systemctl stop tailscaled")
        else:
            start_tailscaled(mesh, node)
    yield request.param
    for node in NODES:
        start_tailscaled(mesh, node)


@pytest.mark.parametrize("version", [4, 6])
def test_the_tailnet_address_answers_for_the_node(mesh, own_tailscaled, version):
    address = mesh.address("node1", version)
    assert mesh.ssh_banner("node2", address).startswith("SSH-2.0-OpenSSH")
    from_pod = f"ip netns exec pod timeout 4 nc -w3 {address} 22 </dev/null"
    if version == 4:  # as pods are masqueraded by the CNI's own table, which is not here
        mesh.on(
            "node2",
            "nft add table ip test; nft add chain ip test p '{ type nat hook "
            "postrouting priority 100; }'; nft add rule ip test p ip saddr 10.42.2.0/24 "
            "ip daddr != 10.42.0.0/16 masquerade",
        )
        try:
            assert mesh.on("node2", from_pod).startswith("SSH-2.0-OpenSSH")
        finally:
            mesh.on("node2", "nft delete table ip test")


@pytest.mark.parametrize(("version", "bound"), [(4, "0.0.0.0"), (4, "::"), (6, "::")])
def test_a_server_on_the_node_sees_the_peers_tailnet_address(mesh, own_tailscaled, version, bound):
    """The other node has a tailscaled of its own, a peer like any, which goes first while it runs.
    The first node's own tailscaled has a route to it, and drops what comes by other links."""
    if own_tailscaled == "is stopped":
        caller = mesh.address("node2", version)
    else:
        caller = mesh.on("node2", f"tailscale ip -{version}").strip()
    with serving(mesh, "node1", bound):
        asked = f"python3 /opt/echo.py ask tcp {mesh.address('node1', version)} 7000"
        assert mesh.on("node2", asked).strip().removeprefix("::ffff:") == caller


@pytest.mark.parametrize("version", [4, 6])
def test_a_node_port_may_lead_to_a_pod_of_another_node(mesh, own_tailscaled, version):
    """As kube-proxy redirects and masquerades it, and with the caller on the pod's node."""
    family, pod = {4: ("ip", "10.42.2.5"), 6: ("ip6", "fd42:0:0:2::5")}[version]
    to = f"{pod}:7000" if version == 4 else f"[{pod}]:7000"
    mesh.on(
        "node1",
        f"nft 'table {family} proxy {{ chain in {{ type nat hook prerouting priority -100; "
        f"fib daddr type local tcp dport 30080 dnat to {to}; }}; chain out {{ type nat hook "
        "postrouting priority 100; ct status dnat masquerade; }; }'",
    )
    try:
        with serving(mesh, "node2", pod, "ip netns exec pod"):
            address = mesh.address("node1", version)
            asked = f"python3 /opt/echo.py ask tcp {address} 30080"
            assert mesh.on("node2", asked).strip() == address
    finally:
        mesh.on("node1", f"nft delete table {family} proxy")


def test_with_a_list_only_its_ports_are_answered(mesh):
    address = mesh.address("node1")
    mesh.configure("node1", answerForNode=["22/tcp", "7100-7200"])
    try:
        mesh.on("node1", f"{NAMESPACE} ensure")
        assert mesh.on("node1", f"{NAMESPACE} check").strip() == "no differences"
        with serving(mesh, "node1", "0.0.0.0"):
            assert mesh.ssh_banner("node2", address).startswith("SSH-2.0-OpenSSH")
            asked = f"python3 /opt/echo.py ask tcp {address} 7000 2>&1"
            assert "no answer" in mesh.on("node2", asked, check=False)
    finally:
        mesh.configure("node1")
        mesh.on("node1", f"{NAMESPACE} ensure")


def test_what_the_node_sends_to_the_tailnet_leaves_with_its_tailnet_address(mesh):
    peer = mesh.on("node1", "tailscale ip -4").strip()
    mesh.on("node2", "systemctl stop tailscaled")
    try:
        # The other node's own tailscaled is a peer like any: who comes there is seen as he comes.
        with serving(mesh, "node1", peer):
            asked = f"python3 /opt/echo.py ask tcp {peer} 7000"
            assert mesh.on("node2", asked).strip() == mesh.address("node2")
    finally:
        start_tailscaled(mesh, "node2")


def test_tailscaleds_own_peer_api_stays_its_own(mesh):
    peers = json.loads(mesh.on("node2", f"{TS} status --json"))["Peer"].values()
    (url,) = [
        url for one in peers if one["HostName"] == "node1-mesh" for url in one["PeerAPIURL"][:1]
    ]
    host, port = url.removeprefix("http://").rsplit(":", 1)
    asked = (
        f"printf 'GET / HTTP/1.0\\r\\nHost: {host}\\r\\n\\r\\n' | timeout 4 nc -w3 {host} {port}"
    )
    assert "HTTP/1." in mesh.on("node2", asked, check=False)


def test_the_switch_takes_the_node_out_of_the_tailnet_and_leaves_its_pods_in(mesh):
    address = mesh.address("node1")
    mesh.configure("node1", answerForNode=False)
    try:
        with mesh.pinging("node1", "10.42.2.5") as pings:
            mesh.on("node1", f"{NAMESPACE} ensure")
            assert mesh.on("node1", f"{NAMESPACE} check").strip() == "no differences"
            assert mesh.ssh_banner("node2", address) == ""
            assert "5280" not in mesh.on("node1", "ip rule; ip -6 rule")
    finally:
        mesh.configure("node1")
        mesh.on("node1", f"{NAMESPACE} ensure")
    assert pings[0] == pings[1], pings
    assert mesh.ssh_banner("node2", address).startswith("SSH-2.0-OpenSSH")


def test_the_hosts_resolver_is_left_alone_whatever_the_prefs_say(mesh):
    before = mesh.on("node1", "cat /etc/resolv.conf; stat -c '%i %Y' /etc/resolv.conf")
    mesh.on("node1", f"{TS} set --accept-dns=true; sleep 2")
    try:
        after = mesh.on("node1", "cat /etc/resolv.conf; stat -c '%i %Y' /etc/resolv.conf")
    finally:
        mesh.on("node1", f"{TS} set --accept-dns=false")
    assert after == before


def test_a_host_tailscaled_that_comes_and_goes_ten_times_costs_the_pods_no_ping(mesh):
    """Stopped and started, down and up, joined elsewhere, and with accepted routes that hold the
    namespace's link and the other node's underlay address."""
    stolen = ["192.168.0.0/16", f"{mesh.underlay('node2')}/32"]
    mesh.on("node2", f"tailscale set --advertise-routes={','.join(stolen)}")
    mesh.approve("node2", stolen)
    mesh.wait("node1", "ip route show table 52 | grep -q 192.168.0.0/16")
    try:
        with (
            mesh.pinging("node1", "10.42.2.5", "v4") as v4,
            mesh.pinging("node1", "fd42:0:0:2::5", "v6") as v6,
        ):
            for turn in range(10):
                if turn == 5:
                    mesh.join("node1", "tailscale", "elsewhere", "--force-reauth")
                elif turn % 2:
                    mesh.on("node1", "tailscale down && tailscale up")
                else:
                    mesh.on("node1", "systemctl stop tailscaled && systemctl start tailscaled")
                mesh.wait("node1", RUNNING)
        said = mesh.on("node1", f"{TS} ping --c 3 node2-mesh")
        mesh.join("node1", "tailscale", "headcni", "--force-reauth")
        mesh.wait("node1", "ip route show table 52 | grep -q 192.168.0.0/16")
        to = mesh.underlay("node2")
        way = mesh.on("node1", f"ip route get {to} from 192.168.255.254 iif headcni01")
    finally:
        mesh.on("node2", "tailscale set --advertise-routes=")
        mesh.join("node1", "tailscale", "headcni", "--force-reauth")
    print(f"sent, received: v4 {v4}, v6 {v6}")
    assert v4[0] > 50, v4
    assert (v4[0] - v4[1], v6[0] - v6[1]) == (0, 0)
    assert re.search(r"via \S+:41642 in", said), said
    assert "dev eth0" in way, way


def test_a_host_tailscaled_does_not_go_through_our_mesh(mesh):
    """It tells its peers every address of the node as a way to it, the pods' gateway too: what
    goes there would be a tunnel in our tunnel, and break with it."""
    closed = (
        "nft 'table inet test { chain in { type filter hook input priority 0; "
        "iifname eth0 udp dport 41641 drop; }; }'"
    )
    for node in NODES:
        mesh.on(node, closed)
    try:
        mesh.on("node1", "systemctl restart tailscaled")
        mesh.wait("node1", RUNNING)
        said = mesh.on("node1", "tailscale ping --c 10 --timeout 2s node2", check=False)
    finally:
        for node in NODES:
            mesh.on(node, "nft delete table inet test")
    assert "via DERP" in said, said
    assert "via 10.42" not in said and "via [fd42" not in said, said


def test_a_host_tailscaled_does_not_notice_that_ours_comes_and_goes(mesh):
    looked = "ip rule; ip -6 rule; ip route show table 52; nft -s list table ip filter"
    peer = mesh.on("node2", "tailscale ip -4").strip()
    mesh.wait("node1", f"ip route show table 52 | grep -q {peer}")
    before = mesh.on("node1", looked)
    with mesh.pinging("node1", "10.42.2.5") as pings:
        mesh.on(
            "node1",
            "systemd-run --quiet --unit=test-host --property="
            f"StandardOutput=file:/run/host.log ping -i 0.1 -W 1 {peer}",
        )
        for _ in range(3):
            mesh.on("node1", "systemctl restart headcni-tailscaled; sleep 2")
        mesh.on("node1", "systemctl kill -s INT test-host; sleep 1.2", check=False)
    sent, received = re.findall(
        r"(\d+) packets transmitted, (\d+) received", mesh.on("node1", "cat /run/host.log")
    )[0]
    print(f"sent, received: host {sent, received}; pods over three restarts of ours {pings}")
    assert sent == received
    assert mesh.on("node1", looked) == before
    mesh.wait("node1", "ip netns exec pod ping -c1 -W1 10.42.2.5 >/dev/null")


def test_a_restart_of_the_unit_brings_a_deleted_namespace_back(mesh):
    mesh.on("node1", "ip netns del headcni; systemctl restart headcni-tailscaled")
    assert mesh.on("node1", f"{NAMESPACE} check").strip() == "no differences"
    add_routes(mesh, "node1")  # they went with the link
    mesh.wait("node1", "ip netns exec pod ping -c1 -W1 10.42.2.5 >/dev/null")


def test_remove_leaves_the_lab_node_as_it_was(mesh):
    refused = mesh.on("node2", f"{NAMESPACE} remove 2>&1", check=False)
    assert "in use by tailscaled" in refused
    for node in NODES:
        remove_pods(mesh, node)
        mesh.on(node, f"systemctl stop headcni-tailscaled && {NAMESPACE} remove")
        assert mesh.listing(node) == mesh.before[node]


def test_the_confined_daemon_has_a_deleted_namespace_made_again(mesh):
    """By a start of headcni-tailscaled: the daemon's own sandbox lets it mount nothing."""
    unit = "headcni-daemon.service"
    mesh.lab.copy(CNI / "units" / unit, "node1", f"/etc/systemd/system/{unit}")
    mesh.on("node1", f"systemctl daemon-reload && systemctl start headcni-tailscaled {unit}")
    is_right = f"test -e /run/netns/headcni && {NAMESPACE} check >/dev/null 2>&1"
    mesh.wait("node1", is_right)
    mesh.on("node1", "ip netns del headcni && test ! -e /run/netns/headcni")
    mesh.wait("node1", is_right, 90)
    mesh.on("node1", "ip netns exec headcni ip link show tailscale0")
