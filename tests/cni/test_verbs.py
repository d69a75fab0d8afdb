"""Each verb in each CNI version, run as a runtime runs it: directly, and through libcni."""

from __future__ import annotations

import time

import pytest
from cni_node import EMPTY

VERSIONS = ["0.3.1", "0.4.0", "1.0.0", "1.1.0"]
RUNNERS = ["directly", "by cnitool"]


def at_least(version, wanted):
    return tuple(map(int, version.split("."))) >= tuple(map(int, wanted.split(".")))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_result_has_the_shape_of_the_version_that_was_asked_for(node, datapath, version):
    pod = node.pod()
    conf = node.dual(cniVersion=version, datapath=datapath)
    result = node.add(conf, pod).ok
    assert result["cniVersion"] == version
    assert set(result) == {"cniVersion", "interfaces", "ips", "routes"}
    ends = result["interfaces"]
    assert [end["name"] for end in ends][-1] == "eth0"
    assert len(ends) == (3 if datapath == "bridge" else 2)
    assert ends[-1]["sandbox"] == pod.path
    assert all(("mtu" in end) == at_least(version, "1.1.0") for end in ends[-2:])
    families = [ip.get("version") for ip in result["ips"]]
    assert families == ([None, None] if at_least(version, "1.0.0") else ["4", "6"])
    assert [ip["interface"] for ip in result["ips"]] == [len(ends) - 1] * 2
    assert [ip["gateway"] for ip in result["ips"]] == ["10.55.1.1", "fd55:0:0:1::1"]
    assert result["routes"] == [
        {"dst": "0.0.0.0/0", "gw": "10.55.1.1"},
        {"dst": "::/0", "gw": "fd55:0:0:1::1"},
    ]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_pod_comes_is_checked_and_goes_without_a_trace(node, datapath, version, runner):
    pod, conf = node.pod(), node.dual(cniVersion=version, datapath=datapath)
    if runner == "directly":
        result = node.add(conf, pod).ok
        if at_least(version, "0.4.0"):
            node.check(conf, pod, result).succeeds()
        node.delete({**conf, "prevResult": result}, pod).succeeds()
    else:
        result = node.cnitool("add", conf, pod).ok
        if at_least(version, "0.4.0"):
            assert node.cnitool("check", conf, pod).code == 0
        assert node.cnitool("del", conf, pod).code == 0
    assert pod.links() == {"lo"}
    assert node.leftovers() == EMPTY


def test_version_names_the_versions_that_are_spoken(node):
    answer = node.call("VERSION", '{"cniVersion": "0.4.0"}').ok
    assert answer["cniVersion"] == "0.4.0"
    assert set(VERSIONS) <= set(answer["supportedVersions"])


@pytest.mark.parametrize("verb", ["GC", "STATUS"])
def test_a_verb_that_the_version_does_not_have_is_refused(node, verb):
    error = node.call(verb, node.conf(cniVersion="1.0.0")).error
    assert error["code"] == 1
    assert f"{verb} is not part of CNI 1.0.0" in error["msg"]


class TestAdd:
    def test_a_second_add_for_the_same_container_returns_the_same_answer(self, node, datapath):
        pod, conf = node.pod(), node.conf(datapath=datapath)
        assert node.add(conf, pod).ok == node.add(conf, pod).ok
        assert len(node.leftovers()["allocation"]) == 1

    def test_an_add_after_the_link_was_lost_makes_it_again(self, node):
        pod, conf = node.pod(), node.conf()
        first = node.add(conf, pod).ok
        node.netns.ip(f"link del {first['interfaces'][1]['name']}")
        second = node.add(conf, pod).ok
        node.check(conf, pod, second).succeeds()

    def test_the_same_container_in_a_new_sandbox_gets_a_network_there(self, node):
        conf, old, new = node.conf(), node.pod(), node.pod()
        node.add(conf, old, container="same")
        result = node.add(conf, new, container="same").ok
        assert "eth0" in new.links()
        assert "eth0" not in old.links()
        node.check(conf, new, result, container="same").succeeds()

    def test_a_namespace_replaced_under_the_same_path_gets_a_network(self, node, datapath):
        pod, conf = node.pod(), node.conf(datapath=datapath)
        node.add(conf, pod, container="same").succeeds()
        with pod.replaced():
            result = node.add(conf, pod, container="same").ok
            assert "eth0" in pod.links()
            node.check(conf, pod, result, container="same").succeeds()
            assert node.add(conf, pod, container="same").ok == result

    def test_delegates_are_called_again_for_a_replaced_namespace(self, node):
        delegate = {"type": "bridge", "bridge": "br0"}
        ipam = {"type": "host-local", "dataDir": str(node.tmp / "leases")}
        pod, conf = node.pod(), node.conf(delegate=delegate, ipam=ipam)
        node.add(conf, pod, container="same").succeeds()
        with pod.replaced():
            node.add(conf, pod, container="same").succeeds()
            assert "eth0" in pod.links()

    @pytest.mark.parametrize("known", ["namespace known", "attachment of an older release"])
    def test_an_add_after_the_pods_end_was_lost_makes_it_again(self, node, known):
        pod, conf = node.pod(), node.conf()
        node.add(conf, pod).succeeds()
        if known != "namespace known":
            node.sql("UPDATE attachment SET state = '{}'")
        pod.ip("link set eth0 name lost0")
        node.add(conf, pod).succeeds()
        assert "eth0" in pod.links()
        assert "lost0" not in pod.links()

    def test_an_attachment_of_an_older_release_is_still_known(self, node):
        pod, conf = node.pod(), node.conf()
        first = node.add(conf, pod).ok
        index = pod.ip_json("link show dev eth0")[0]["ifindex"]
        node.sql("UPDATE attachment SET state = '{}'")
        assert node.add(conf, pod).ok == first
        assert pod.ip_json("link show dev eth0")[0]["ifindex"] == index

    def test_a_link_of_another_pod_that_cannot_be_deleted_fails_no_add(self, node):
        """An unrelated tombstone, on a link that the kernel refuses to delete: a renamed lo."""
        pod, conf = node.pod(), node.conf()
        node.add(conf, pod).succeeds()
        node.bury_a_link_that_stays("other")
        node.add(conf).succeeds()
        assert node.call("GC", {**conf, "cni.dev/valid-attachments": []}).code == 0

    def test_a_link_that_cannot_be_deleted_keeps_no_other_from_being_deleted(self, node):
        pod, conf = node.pod(), node.conf()
        result = node.add(conf, pod, container="again").ok
        name = result["interfaces"][1]["name"]
        index = node.netns.ip_json(f"link show dev {name}")[0]["ifindex"]
        node.sql("DELETE FROM attachment")
        node.sql("INSERT INTO tombstone VALUES ('pods', 'again', 'eth0', ?)", index)
        node.bury_a_link_that_stays("other")
        node.add(conf, pod, container="again").succeeds()
        assert len(node.leftovers()["tombstone"]) == 1

    def test_a_container_id_may_be_longer_than_a_links_alias(self, node, datapath):
        name, conf = "c" * 250, node.conf(datapath=datapath)
        pod = node.pod()
        result = node.add(conf, pod, container=name).ok
        node.check(conf, pod, result, container=name).succeeds()
        node.sql("DELETE FROM attachment")
        valid = [{"containerID": name, "ifname": "eth0"}]
        node.call("GC", {**conf, "cni.dev/valid-attachments": valid}).succeeds()
        assert "eth0" in pod.links()
        node.call("GC", {**conf, "cni.dev/valid-attachments": []}).succeeds()
        assert node.leftovers() == EMPTY

    def test_two_interfaces_of_one_pod_have_two_addresses(self, node):
        pod, conf = node.pod(), node.conf(default_route=False)
        one, two = node.add(conf, pod), node.add(conf, pod, ifname="net1")
        assert one.address != two.address
        assert {"eth0", "net1"} <= pod.links()

    def test_a_pod_that_has_the_interface_already_is_refused_and_nothing_is_left(self, node):
        pod = node.pod()
        pod.ip("link add eth0 type veth peer name other")
        error = node.add(node.conf(), pod).error
        assert "the pod has an interface eth0 already" in error["msg"]
        assert node.leftovers() == EMPTY

    @pytest.mark.parametrize(
        ("path", "said"),
        [
            ("/run/netns/nowhere", "cannot be opened"),
            ("/etc/hostname", "is not a network namespace"),
        ],
    )
    def test_a_namespace_that_is_none_is_named(self, node, path, said):
        error = node.call("ADD", node.conf(), container="a", CNI_NETNS=path).error
        assert error["code"] == 102
        assert path in error["msg"] and said in error["msg"]
        assert node.leftovers() == EMPTY

    def test_the_nodes_own_namespace_is_refused(self, node):
        error = node.call("ADD", node.conf(), node.netns).error
        assert "is the node's own network namespace" in error["msg"]

    def test_all_mistakes_of_a_configuration_are_named_at_once(self, node):
        conf = node.conf(mtu=17, mode="hots", datapth="routed")
        error = node.add(conf).error
        assert error["code"] == 7
        for part in ("mtu", "17", "mode", "hots", "datapth", "datapath"):
            assert part in error["details"]

    def test_network_policy_is_refused_for_links_that_are_not_ours(self, node):
        conf = node.conf(enable_network_policy=True, delegate={"type": "bridge"})
        error = node.add(conf).error
        assert error["code"] == 2
        assert "only on links of its own" in error["msg"]

    def test_a_failure_half_way_leaves_nothing(self, node):
        taken = [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]
        conf = node.conf(runtimeConfig={"portMappings": taken}, capabilities={"portMappings": True})
        first = node.pod()
        node.add(
            conf, first, args="IgnoreUnknown=1;K8S_POD_NAMESPACE=web;K8S_POD_NAME=one"
        ).succeeds()
        before = node.leftovers()
        second = node.pod()
        error = node.add(conf, second, args="IgnoreUnknown=1;K8S_POD_NAMESPACE=web").error
        assert error["code"] == 110
        assert "web/one" in error["details"]
        assert second.links() == {"lo"}
        assert node.leftovers() == before

    def test_a_requested_address_is_given_and_refused_when_taken(self, node):
        conf = node.conf()
        assert node.add(conf, args="IP=10.55.1.77").address == "10.55.1.77"
        error = node.add(conf, args="IP=10.55.1.77").error
        assert "10.55.1.77" in error["msg"]

    def test_an_address_that_the_node_has_itself_is_not_given_out(self, node):
        node.netns.ip("addr add 10.55.1.2/32 dev eth0")
        assert node.add(node.conf()).address == "10.55.1.3"

    def test_a_full_pool_says_try_again_and_how_many_are_in_use(self, node):
        conf = node.conf(
            ipam={
                "type": "headcni-ipam",
                "subnet": "10.55.1.0/24",
                "rangeStart": "10.55.1.10",
                "rangeEnd": "10.55.1.11",
            }
        )
        for name in ("a", "b"):
            node.add(
                conf, args=f"IgnoreUnknown=1;K8S_POD_NAMESPACE=web;K8S_POD_NAME={name}"
            ).succeeds()
        error = node.add(conf).error
        assert error["code"] == 11
        assert "2 of 2" in error["msg"] + error["details"]
        assert "web" in error["details"]
        assert node.call("STATUS", conf).ok == {}  # or kubelet would evict the two that run


class TestDel:
    def test_it_is_idempotent(self, node, datapath):
        pod, conf = node.pod(), node.conf(datapath=datapath)
        node.add(conf, pod).succeeds()
        assert [node.delete(conf, pod).code for _ in range(3)] == [0, 0, 0]
        assert node.leftovers() == EMPTY

    def test_it_needs_no_namespace(self, node):
        pod, conf = node.pod(), node.conf()
        node.add(conf, pod).succeeds()
        assert node.delete(conf, None, container=pod.name).code == 0
        assert node.leftovers() == EMPTY

    def test_it_works_after_the_namespace_is_gone(self, node):
        pod, conf = node.pod(), node.conf()
        node.add(conf, pod).succeeds()
        pod.remove()
        assert node.delete(conf, pod).code == 0
        assert node.leftovers() == EMPTY

    def test_it_works_without_state(self, node):
        pod, conf = node.pod(), node.conf()
        node.add(conf, pod).succeeds()
        for file in (node.tmp / "data").iterdir():
            file.unlink()
        assert node.delete(conf, pod).code == 0
        assert node.leftovers()["links"] == set()

    def test_it_works_with_a_corrupt_store(self, node):
        pod, conf = node.pod(), node.conf()
        node.add(conf, pod).succeeds()
        for file in (node.tmp / "data").glob("headcni.db*"):
            file.write_bytes(b"not a database" * 1000)
        assert node.delete(conf, pod).code == 0
        assert node.leftovers()["links"] == set()

    def test_it_works_for_a_container_that_was_never_added(self, node):
        assert node.delete(node.conf(), None, container="never").code == 0

    def test_it_works_whatever_has_become_of_the_configuration(self, node):
        pod, conf = node.pod(), node.conf()
        node.add(conf, pod).succeeds()
        assert node.delete({**conf, "mtu": "x", "ipam": 7, "datapth": 1}, pod).code == 0
        assert node.leftovers() == EMPTY

    def test_a_late_del_does_not_free_the_address_of_a_newer_sandbox(self, node):
        conf = node.conf(
            ipam={
                "type": "headcni-ipam",
                "subnet": "10.55.1.0/24",
                "rangeStart": "10.55.1.9",
                "rangeEnd": "10.55.1.9",
            }
        )
        old, new = node.pod(), node.pod()
        node.add(conf, old).succeeds()
        node.delete(conf, old).succeeds()
        result = node.add(conf, new).ok
        node.delete(conf, old).succeeds()
        node.check(conf, new, result).succeeds()


TAMPERINGS = [
    ("pod", "addr del {address} dev eth0", "eth0 has no address {address}"),
    ("pod", "link set eth0 mtu 1400", "eth0 has MTU 1400, expected 1280"),
    ("pod", "route del default", "no route 0.0.0.0/0 via 10.55.1.1"),
    ("pod", "link set eth0 down", "eth0 is down"),
    ("pod", "link set eth0 address 02:00:00:00:00:01", "eth0 has MAC 02:00:00:00:00:01"),
    ("pod", "link set eth0 name eth9", "interface eth0 is missing"),
    ("node", "link set {host} down", "{host} is down"),
    ("node", "link set {host} nomaster", "{host} is not a port of headcni0"),
    ("node", "link set headcni0 down", "bridge headcni0 is down"),
    ("node", "addr del 10.55.1.1/24 dev headcni0", "headcni0 has no address 10.55.1.1/24"),
    ("node", "link del headcni0", "bridge headcni0 is missing"),
    ("node", "link del {host}", "{host} is missing"),
]


class TestCheck:
    @pytest.mark.parametrize(
        ("where", "command", "said"), TAMPERINGS, ids=[t[1] for t in TAMPERINGS]
    )
    def test_each_difference_is_named(self, node, where, command, said):
        pod, conf = node.pod(), node.conf()
        result = node.add(conf, pod).ok
        node.check(conf, pod, result).succeeds()
        names = {"host": result["interfaces"][1]["name"], "address": result["ips"][0]["address"]}
        (pod if where == "pod" else node.netns).ip(command.format(**names))
        error = node.check(conf, pod, result).error
        assert error["code"] == 108
        assert said.format(**names) in error["details"]

    def test_a_lost_host_route_is_named(self, node):
        pod, conf = node.pod(), node.conf(datapath="routed")
        result = node.add(conf, pod).ok
        node.netns.ip(f"route del {result['ips'][0]['address']}")
        assert (
            f"no route {result['ips'][0]['address']}"
            in node.check(conf, pod, result).error["details"]
        )

    def test_a_flushed_firewall_is_named_and_the_next_add_makes_it_again(self, node):
        ports = [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]
        conf = node.conf(runtimeConfig={"portMappings": ports}, capabilities={"portMappings": True})
        pod = node.pod()
        result = node.add(conf, pod).ok
        node.netns.run("nft", "flush", "map", "inet", "headcni", "ports4")
        assert "host port tcp/8080: missing" in node.check(conf, pod, result).error["details"]
        node.netns.run("nft", "flush", "table", "inet", "headcni")
        said = node.check(conf, pod, result).error["details"]
        assert "headcni: lacks the rules 127.0.0.0/8 from outside, " in said
        assert "from a pod, IPv4" in said
        node.netns.run("nft", "flush", "ruleset")
        assert "nft table inet headcni: missing" in node.check(conf, pod, result).error["details"]
        node.add(node.conf()).succeeds()
        node.check(conf, pod, result).succeeds()

    @pytest.mark.parametrize(
        ("command", "said"),
        [
            (
                "flush set inet headcni masqueraded4",
                "nft set masqueraded4: holds nothing, expected 10.55.1.0-10.55.1.255",
            ),
            (
                "add element inet headcni cluster4 { 0.0.0.0/1 }",
                "nft set cluster4: holds 0.0.0.0-127.255.255.255, expected 10.55.0.0-10.55.255.255",
            ),
            (
                "flush chain inet headcni output; add rule inet headcni output accept",
                "nft table inet headcni: lacks the rules for the node, from itself",
            ),
            (
                "insert rule inet headcni postrouting accept",
                "nft table inet headcni: its rules were changed",
            ),
        ],
    )
    def test_sets_and_rules_that_somebody_changed_are_named(self, node, command, said):
        pod, conf = node.pod(), node.conf()
        result = node.add(conf, pod).ok
        node.netns.run("nft", *command.split())
        details = node.check(conf, pod, result).error["details"]
        assert details == f"{said} [headcnictl explain HC108]"

    def test_a_pod_is_compared_with_the_configuration_that_it_was_added_with(self, node, datapath):
        pod, conf = node.pod(), node.conf(datapath=datapath, mtu=1280)
        result = node.add(conf, pod).ok
        other = "routed" if datapath == "bridge" else "bridge"
        changed = node.conf(datapath=other, mtu=1400, bridge="headcni7", ipMasq=False)
        node.check(changed, pod, result).succeeds()
        pod.ip("link set eth0 mtu 1400")
        said = node.check(changed, pod, result).error["details"]
        assert said == "pod: eth0 has MTU 1400, expected 1280 [headcnictl explain HC108]"

    def test_host_ports_are_found_where_nobody_knows_the_protocols_names(self, node, monkeypatch):
        hide = "[ ! -e /etc/protocols ] || mount --bind /dev/null /etc/protocols"
        *inside, python, isolated, plugin = node.command()
        hidden = [*inside, "unshare", "-m", "sh", "-c", f'{hide} && exec "$@"', "sh"]
        monkeypatch.setattr(node, "command", lambda *_: [*hidden, python, isolated, plugin])
        ports = [
            {"hostPort": 8080 + at, "containerPort": 80, "protocol": protocol}
            for at, protocol in enumerate(("tcp", "udp", "sctp"))
        ]
        conf = node.conf(runtimeConfig={"portMappings": ports}, capabilities={"portMappings": True})
        pod = node.pod()
        node.check(conf, pod, node.add(conf, pod).ok).succeeds()

    def test_a_lost_allocation_is_named(self, node):
        pod, conf = node.pod(), node.conf()
        result = node.add(conf, pod).ok
        import sqlite3

        with sqlite3.connect(node.tmp / "data" / "headcni.db") as db:
            db.execute("DELETE FROM allocation")
        assert "is not recorded as this pod's" in node.check(conf, pod, result).error["details"]

    def test_a_container_that_was_never_added_is_code_3(self, node):
        assert node.check(node.conf(), node.pod(), {}).error["code"] == 3


class TestGc:
    def test_what_is_not_valid_is_freed_and_what_is_stays(self, node, datapath):
        ports = {
            "runtimeConfig": {
                "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]
            },
            "capabilities": {"portMappings": True},
        }
        keep, drop = node.pod(), node.pod()
        conf = node.conf(datapath=datapath)
        result = node.add(conf, keep).ok
        node.add({**conf, **ports}, drop).succeeds()
        valid = [{"containerID": keep.name, "ifname": "eth0"}]
        assert node.call("GC", {**conf, "cni.dev/valid-attachments": valid}).code == 0
        node.check(conf, keep, result).succeeds()
        left = node.leftovers()
        assert len(left["allocation"]) == len(left["attachment"]) == len(left["links"]) == 1
        assert left["port"] == left["mapped"] == []

    def test_a_link_that_a_killed_add_left_is_found_by_its_alias(self, node):
        pod, conf = node.pod(), node.conf()
        node.add(conf, pod).succeeds()
        import sqlite3

        with sqlite3.connect(node.tmp / "data" / "headcni.db") as db:
            db.execute("DELETE FROM attachment")
        assert node.call("GC", {**conf, "cni.dev/valid-attachments": []}).code == 0
        assert node.leftovers() == EMPTY

    def test_a_link_that_a_killed_add_left_without_an_alias_goes_with_its_address(self, node):
        pod, conf = node.pod(), node.conf()
        node.add(conf, pod).succeeds()
        import sqlite3

        (made,) = node.leftovers()["links"]
        node.netns.run("ip", "link", "set", made, "alias", "")
        with sqlite3.connect(node.tmp / "data" / "headcni.db") as db:
            db.execute("DELETE FROM attachment")
        assert node.call("GC", {**conf, "cni.dev/valid-attachments": []}).code == 0
        assert node.leftovers() == EMPTY

    def test_another_networks_pods_are_left_alone(self, node):
        mine = node.conf()
        other = node.conf(
            name="other",
            bridge="headcni1",
            pod_cidr="10.55.2.0/24",
            ipam={"type": "headcni-ipam", "subnet": "10.55.2.0/24"},
        )
        pod = node.pod()
        result = node.add(other, pod).ok
        assert node.call("GC", {**mine, "cni.dev/valid-attachments": []}).code == 0
        node.check(other, pod, result).succeeds()

    def test_without_a_list_nothing_is_freed(self, node):
        pod, conf = node.pod(), node.conf()
        result = node.add(conf, pod).ok
        assert node.call("GC", conf).error["code"] == 7
        node.check(conf, pod, result).succeeds()


class TestStatus:
    def test_a_node_that_can_take_pods_says_nothing(self, node):
        assert node.call("STATUS", node.conf()).ok == {}

    def test_a_mesh_that_is_down_is_51_with_what_to_look_at(self, node):
        conf = node.conf(headscale_url="https://headscale.example.org")
        error = node.call("STATUS", conf).error
        assert error["code"] == 51
        assert "tailscale0" in error["msg"] and "systemctl status tailscaled" in error["details"]
        node.netns.ip("tuntap add tailscale0 mode tun")
        assert node.call("STATUS", conf).code == 0

    def test_a_mesh_that_is_gone_for_moments_is_no_reason_to_evict_pods(self, node):
        conf = node.conf(headscale_url="https://headscale.example.org", mesh_grace=2)
        node.netns.ip("tuntap add tailscale0 mode tun")
        assert node.call("STATUS", conf).code == 0
        node.netns.ip("link del tailscale0")
        assert node.call("STATUS", conf).code == 0
        node.netns.ip("tuntap add tailscale0 mode tun")
        assert node.call("STATUS", conf).code == 0
        node.netns.ip("link del tailscale0")
        assert node.call("STATUS", conf).code == 0
        time.sleep(2)
        error = node.call("STATUS", conf).error
        assert error["code"] == 51
        assert "it is missing for" in error["details"] and "mesh_grace" in error["details"]
        assert node.call("STATUS", {**conf, "mesh_grace": 60}).code == 0
        node.sql("UPDATE meta SET value = 'another-boot -1' WHERE key = 'mesh tailscale0'")
        assert node.call("STATUS", {**conf, "mesh_grace": 60}).error["code"] == 51

    def test_a_store_that_cannot_be_opened_is_50(self, node):
        (node.tmp / "data").write_text("a file where a directory should be")
        error = node.call("STATUS", node.conf()).error
        assert error["code"] == 50
        assert str(node.tmp / "data") in error["details"]
