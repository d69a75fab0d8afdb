"""headcni-ipam as a runtime or another plugin calls it: verbs, versions, shapes and codes."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import headcni
from headcni import errors, recover
from headcni.plugins.headcni_ipam import means_its_own_folder, run
from headcni.skel import ALL_VERSIONS as VERSIONS
from headcni.store import Store

SECTION = {
    "type": "headcni-ipam",
    "subnet": "10.1.2.0/24",
    "ranges": [[{"subnet": "fd00:1::/64", "gateway": "fe80::1"}]],
    "routes": [
        {"dst": "0.0.0.0/0"},
        {"dst": "fd99::/64", "gw": "fd00:1::9", "mtu": 1400, "priority": 7, "table": 51},
    ],
}


class Plugin:
    """headcni-ipam with a data directory of its own."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.section = SECTION
        self.version = "1.1.0"

    def call(self, verb, container_id="c1", conf=None, env=None, **keys):
        conf = {
            "cniVersion": self.version,
            "name": "pods",
            "type": "bridge",
            "ipam": self.section,
            **(conf or {}),
        }
        stdin = keys.get("stdin", json.dumps(conf).encode())
        environment = {
            "CNI_COMMAND": verb,
            "CNI_CONTAINERID": container_id,
            "CNI_IFNAME": "eth0",
            "CNI_NETNS": "/run/netns/x",
            "CNI_PATH": "/opt/cni/bin",
            "HEADCNI_DATA_DIR": str(self.data_dir),
            **(env or {}),
        }
        outcome = run({k: v for k, v in environment.items() if v is not None}, stdin)
        return outcome.exit_code, json.loads(outcome.output) if outcome.output else None

    def ok(self, verb, *args, **keys):
        code, answer = self.call(verb, *args, **keys)
        assert code == 0, answer
        return answer

    def error(self, verb, *args, **keys):
        code, answer = self.call(verb, *args, **keys)
        assert code == 1
        assert set(answer) <= {"cniVersion", "code", "msg", "details"}
        return answer

    def ips(self, *args, **keys):
        return [ip["address"] for ip in self.ok("ADD", *args, **keys)["ips"]]


@pytest.fixture
def plugin(tmp_path) -> Plugin:
    return Plugin(tmp_path / "data")


V4 = {"address": "10.1.2.2/24", "gateway": "10.1.2.1"}
V6 = {"address": "fd00:1::1/64", "gateway": "fe80::1"}
OLD_IPS = [{**V4, "version": "4"}, {**V6, "version": "6"}]
OLD_ROUTES = [{"dst": "0.0.0.0/0"}, {"dst": "fd99::/64", "gw": "fd00:1::9"}]


@pytest.mark.parametrize(
    ("version", "ips", "routes"),
    [
        ("0.3.0", OLD_IPS, OLD_ROUTES),
        ("0.3.1", OLD_IPS, OLD_ROUTES),
        ("0.4.0", OLD_IPS, OLD_ROUTES),
        ("1.0.0", [V4, V6], OLD_ROUTES),
        ("1.1.0", [V4, V6], SECTION["routes"]),
    ],
)
def test_add_answers_in_the_shape_of_the_version_that_was_asked_for(plugin, version, ips, routes):
    plugin.version = version
    assert plugin.ok("ADD") == {"cniVersion": version, "ips": ips, "routes": routes}


@pytest.mark.parametrize("version", VERSIONS)
def test_add_del_add_walks_through_in_every_version(plugin, version):
    plugin.version = version
    first = plugin.ok("ADD")
    assert plugin.ok("ADD") == first, "again the same"
    assert plugin.ok("ADD", "c2") != first
    assert plugin.ok("DEL") is None
    assert plugin.ok("DEL") is None, "and idempotent"
    third = plugin.ok("ADD", "c3")
    addresses = [ip["address"] for ip in third.get("ips", ())]
    old = [third[family]["ip"] for family in ("ip4", "ip6") if family in third]
    assert (addresses or old) == ["10.1.2.4/24", "fd00:1::3/64"]


@pytest.mark.parametrize(
    ("verb", "version", "code"),
    [
        ("CHECK", "0.3.1", errors.INCOMPATIBLE_VERSION),
        ("CHECK", "0.4.0", 0),
        ("CHECK", "1.0.0", 0),
        ("CHECK", "1.1.0", 0),
        ("GC", "0.4.0", errors.INCOMPATIBLE_VERSION),
        ("GC", "1.0.0", errors.INCOMPATIBLE_VERSION),
        ("GC", "1.1.0", 0),
        ("STATUS", "1.0.0", errors.INCOMPATIBLE_VERSION),
        ("STATUS", "1.1.0", 0),
        ("CHECK", "0.2.0", errors.INCOMPATIBLE_VERSION),
        ("ADD", "0.2.0", 0),
        ("ADD", "0.1.0", 0),
        ("ADD", None, 0),
        ("ADD", "2.0.0", errors.INCOMPATIBLE_VERSION),
        ("DEL", "9", errors.INCOMPATIBLE_VERSION),
    ],
)
def test_each_version_has_the_verbs_that_it_has(plugin, verb, version, code):
    plugin.ok("ADD")
    conf = {"cniVersion": version, "cni.dev/valid-attachments": []}
    exit_code, answer = plugin.call(verb, conf=conf)
    assert exit_code == (1 if code else 0)
    assert (answer or {}).get("code", 0) == code


def test_version_lists_what_is_spoken(plugin):
    answer = plugin.ok("VERSION", conf={"cniVersion": "0.4.0"})
    assert answer == {"cniVersion": "0.4.0", "supportedVersions": list(VERSIONS)}


def test_version_needs_nothing_but_the_version(plugin):
    outcome = run({"CNI_COMMAND": "VERSION"}, b'{"cniVersion": "1.0.0"}')
    assert (outcome.code, json.loads(outcome.output)["cniVersion"]) == (0, "1.0.0")


@pytest.mark.parametrize(
    ("verb", "env", "word"),
    [
        ("ADD", {"CNI_COMMAND": "FROB"}, "FROB"),
        ("ADD", {"CNI_COMMAND": None}, "CNI_COMMAND"),
        ("ADD", {"CNI_CONTAINERID": None}, "CNI_CONTAINERID"),
        ("ADD", {"CNI_CONTAINERID": "../etc"}, "CNI_CONTAINERID"),
        ("ADD", {"CNI_IFNAME": None}, "CNI_IFNAME"),
        ("ADD", {"CNI_IFNAME": "a-name-that-is-too-long"}, "CNI_IFNAME"),
        ("ADD", {"CNI_IFNAME": "eth/0"}, "CNI_IFNAME"),
        ("ADD", {"CNI_NETNS": None}, "CNI_NETNS"),
        ("CHECK", {"CNI_NETNS": ""}, "CNI_NETNS"),
        ("DEL", {"CNI_CONTAINERID": None}, "CNI_CONTAINERID"),
    ],
)
def test_a_wrong_environment_is_code_4_and_names_the_variable(plugin, verb, env, word):
    error = plugin.error(verb, env=env)
    assert error["code"] == errors.BAD_ENVIRONMENT
    assert word in error["msg"] + error["details"]


def test_all_that_is_wrong_with_the_environment_is_named_at_once(plugin):
    error = plugin.error("ADD", env={"CNI_CONTAINERID": "", "CNI_IFNAME": "", "CNI_NETNS": ""})
    assert error["details"].count(";") == 2


def test_del_does_not_need_a_namespace(plugin):
    plugin.ok("ADD")
    plugin.ok("DEL", env={"CNI_NETNS": None})
    assert plugin.error("CHECK")["code"] == errors.CHECK_FAILED


@pytest.mark.parametrize("stdin", [b"", b"{", b"[]", b"null", b"\xff\xfe"])
def test_what_is_no_json_object_is_code_6(plugin, stdin):
    for verb in ("ADD", "DEL", "VERSION"):
        assert plugin.error(verb, stdin=stdin)["code"] == errors.UNDECODABLE


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({"name": ""}, ["name"]),
        ({"name": None, "ipam": None}, ["name", "ipam"]),
        ({"ipam": {"subnet": "10.1.2.9/24", "strategy": "x"}}, ["ipam.subnet", "ipam.strategy"]),
        ({"runtimeConfig": {"ips": ["x"]}}, ["runtimeConfig.ips[0]"]),
        ({"args": {"cni": {"ips": ["x"]}}}, ["args.cni.ips[0]"]),
    ],
)
def test_a_wrong_configuration_is_code_7_with_every_mistake(plugin, conf, words):
    error = plugin.error("ADD", conf=conf)
    assert error["code"] == errors.INVALID_CONFIG
    assert all(word in error["details"] for word in words)


def test_del_frees_the_address_though_the_ranges_are_spoilt(plugin):
    plugin.ok("ADD")
    plugin.section = {**SECTION, "subnet": "nonsense", "frob": 1}
    plugin.ok("DEL")
    plugin.section = SECTION
    assert plugin.error("CHECK")["code"] == errors.CHECK_FAILED


def test_a_full_pool_is_code_11(plugin):
    plugin.section = {"subnet": "10.1.2.0/30"}
    plugin.ok("ADD", env={"CNI_ARGS": "IgnoreUnknown=1;K8S_POD_NAMESPACE=web;K8S_POD_NAME=a"})
    error = plugin.error("ADD", "c2")
    assert error["code"] == 11
    assert "1 of 1" in error["msg"]
    assert "namespace web 1" in error["details"]
    assert plugin.ok("STATUS") is None, "no reason to call the node not ready"


@pytest.mark.parametrize(
    "keys",
    [
        {"env": {"CNI_ARGS": "IgnoreUnknown=1;IP=10.1.2.77"}},
        {"conf": {"args": {"cni": {"ips": ["10.1.2.77"]}}}},
        {"conf": {"runtimeConfig": {"ips": ["10.1.2.77/24"]}}},
    ],
    ids=["CNI_ARGS", "args", "runtimeConfig"],
)
def test_an_address_is_asked_for_in_three_ways(plugin, keys):
    assert plugin.ips(**keys) == ["10.1.2.77/24", "fd00:1::1/64"]
    error = plugin.error("ADD", "c2", **keys)
    assert error["code"] == errors.ADDRESS_TAKEN
    assert "c1" in error["msg"]


def test_ranges_of_the_runtime_come_first(plugin):
    plugin.section = {"subnet": "10.1.2.0/24"}
    conf = {"runtimeConfig": {"ipRanges": [[{"subnet": "10.7.0.0/24"}]]}}
    assert plugin.ips(conf=conf) == ["10.7.0.2/24", "10.1.2.2/24"]


def test_resolv_conf_becomes_dns(plugin, tmp_path):
    (tmp_path / "resolv.conf").write_text(
        "# a comment\nnameserver 10.0.0.53\nnameserver fd00::53 # too\ndomain example.org\n"
        "search a.example b.example\noptions ndots:5 rotate\nsortlist 1.2.3.4\n\nnameserver\n"
    )
    plugin.section = {"subnet": "10.1.2.0/24", "resolvConf": str(tmp_path / "resolv.conf")}
    assert plugin.ok("ADD")["dns"] == {
        "nameservers": ["10.0.0.53", "fd00::53"],
        "domain": "example.org",
        "search": ["a.example", "b.example"],
        "options": ["ndots:5", "rotate"],
    }
    plugin.section = {"subnet": "10.1.2.0/24", "resolvConf": "/nowhere"}
    assert plugin.error("ADD", "c2")["code"] == errors.INVALID_CONFIG
    assert plugin.error("STATUS")["code"] == errors.NOT_AVAILABLE


def test_check_compares_with_the_previous_result(plugin):
    result = plugin.ok("ADD")
    plugin.ok("CHECK", conf={"prevResult": result})
    result["ips"][0]["address"] = "10.1.2.9/24"
    error = plugin.error("CHECK", conf={"prevResult": result})
    assert error["code"] == errors.CHECK_FAILED
    assert "10.1.2.2/24" in error["msg"]
    assert "10.1.2.9/24" in error["details"]


@pytest.mark.parametrize("key", ["cni.dev/valid-attachments", "cni.dev/attachments"])
def test_gc_keeps_what_is_valid_and_frees_the_rest(plugin, key):
    for name in ("c1", "c2", "c3"):
        plugin.ok("ADD", name)
    valid = [{"containerID": "c2", "ifname": "eth0"}, {"containerID": "c3", "ifname": "net1"}]
    plugin.ok("GC", conf={key: valid}, env={"CNI_CONTAINERID": None, "CNI_IFNAME": None})
    plugin.ok("CHECK", "c2")
    for name in ("c1", "c3"):
        assert plugin.error("CHECK", name)["code"] == errors.CHECK_FAILED


@pytest.mark.parametrize(
    "conf", [{}, {"cni.dev/valid-attachments": "all"}, {"cni.dev/valid-attachments": [{}]}]
)
def test_gc_without_a_list_frees_nothing(plugin, conf):
    plugin.ok("ADD")
    assert plugin.error("GC", conf=conf)["code"] == errors.INVALID_CONFIG
    plugin.ok("CHECK")


def test_status_is_50_when_the_store_cannot_be_used(plugin):
    plugin.data_dir.write_text("a file where the directory should be")
    error = plugin.error("STATUS")
    assert error["code"] == errors.NOT_AVAILABLE
    assert str(plugin.data_dir) in error["details"]
    assert plugin.error("ADD")["code"] == errors.STORE


def test_the_store_is_in_the_data_directory_that_is_given(plugin, tmp_path):
    plugin.section = {"subnet": "10.1.2.0/24", "dataDir": str(tmp_path / "elsewhere")}
    plugin.ok("ADD")
    assert (tmp_path / "elsewhere" / "headcni.db").exists()
    assert not plugin.data_dir.exists()


def test_an_address_of_the_host_itself_is_not_handed_out(plugin):
    plugin.section = {"subnet": "127.0.0.0/29", "gateway": "127.0.0.6"}
    assert plugin.ips() == ["127.0.0.2/29"]


@pytest.mark.parametrize("how", ["true", "path", "own dataDir"])
def test_host_locals_directory_is_imported_on_request_by_whatever_verb_comes_first(
    plugin, tmp_path, how, monkeypatch
):
    networks = tmp_path / "networks"
    (networks / "pods").mkdir(parents=True)
    (networks / "pods" / "10.1.2.2").write_bytes(b"old\r\neth0")
    (networks / "pods" / "10.1.2.3").write_bytes(b"older\r\neth0")
    monkeypatch.setattr("headcni.ipam.hostlocal.DATA_DIR", str(networks))
    plugin.section = {
        "subnet": "10.1.2.0/24",
        **{
            "true": {"importHostLocal": True},
            "path": {"importHostLocal": str(networks / "pods")},
            "own dataDir": {"importHostLocal": True, "dataDir": str(networks)},
        }[how],
    }
    plugin.ok("DEL", "old")
    assert plugin.ips("older") == ["10.1.2.3/24"]
    assert plugin.ips("c1") == ["10.1.2.2/24"], "which the DEL has freed"
    assert plugin.ips("c2") == ["10.1.2.4/24"]


def test_del_succeeds_though_host_locals_directory_cannot_be_imported(plugin, tmp_path):
    (tmp_path / "pods" / "10.1.2.9").mkdir(parents=True)
    plugin.section = {"subnet": "10.1.2.0/24", "importHostLocal": str(tmp_path / "pods")}
    plugin.ok("DEL")
    assert plugin.error("ADD")["code"] == errors.IO_FAILURE


def cache(folder: Path, container_id: str, address: str, **conf: object) -> None:
    """An entry of libcni's cache."""
    folder.mkdir(exist_ok=True)
    config = {"cniVersion": "1.1.0", "name": "pods", **conf}
    (folder / f"pods-{container_id}-eth0").write_text(
        json.dumps(
            {
                "kind": "cniCacheV1",
                "containerId": container_id,
                "config": base64.b64encode(json.dumps(config).encode()).decode(),
                "ifName": "eth0",
                "networkName": "pods",
                "cniArgs": [["K8S_POD_NAMESPACE", "web"], ["K8S_POD_NAME", container_id]],
                "result": {"ips": [{"address": address, "gateway": "10.1.2.1"}]},
            }
        )
    )


def test_after_the_store_is_lost_what_libcni_remembers_is_adopted(plugin, tmp_path, monkeypatch):
    results = tmp_path / "results"
    monkeypatch.setattr(recover, "RESULTS_DIR", str(results))
    plugin.section = {"subnet": "10.1.2.0/24", "type": "headcni-ipam", "strategy": "dense-pack"}
    plugin.ok("ADD", "c1")
    cache(results, "c1", "10.1.2.2/24", plugins=[{"type": "bridge", "ipam": plugin.section}])
    cache(results, "c2", "10.1.2.3/24", type="headcni")
    cache(results, "c3", "10.1.2.4/24", type="bridge", ipam={"type": "host-local"})
    (results / "garbage").write_text("{")
    (results / "more-garbage").write_text('{"config": "bm8=", "result": 5}')
    (plugin.data_dir / "headcni.db").write_bytes(b"broken" * 5000)
    plugin.ok("DEL", "c7")
    assert plugin.ips("c4") == ["10.1.2.4/24"], "and not one of those of c1 and c2"
    assert plugin.ips("c1") == ["10.1.2.2/24"]
    with Store.in_directory(str(plugin.data_dir)) as store:
        assert store.lost is None
    assert len(list(plugin.data_dir.glob("*.broken-*"))) == 1


def test_a_bug_is_an_answer_too(plugin, monkeypatch):
    monkeypatch.setattr("headcni.plugins.headcni_ipam.Ipam", None)
    error = plugin.error("ADD")
    assert error["code"] == errors.INTERNAL
    assert "TypeError" in error["details"]


def test_as_a_program_it_reads_stdin_and_answers_on_stdout(plugin):
    conf = {"cniVersion": "1.0.0", "name": "pods", "ipam": {"subnet": "10.1.2.0/24"}}
    folder = str(Path(headcni.__file__).parents[1])
    program = (
        f"import sys; sys.path.insert(0, {folder!r});"
        " from headcni.plugins.headcni_ipam import main;"
        " sys.exit(main(sys.stdin.buffer.read()))"
    )
    done = [
        subprocess.run(
            [sys.executable, "-I", "-S", "-B", "-c", program],
            input=json.dumps(conf).encode(),
            capture_output=True,
            env={
                **os.environ,
                "CNI_COMMAND": verb,
                "CNI_CONTAINERID": "c1",
                "CNI_IFNAME": "eth0",
                "CNI_NETNS": "/run/netns/x",
                "HEADCNI_DATA_DIR": str(plugin.data_dir),
            },
        )
        for verb in ("ADD", "DEL", "GC")
    ]
    assert [one.returncode for one in done] == [0, 0, 1]
    assert json.loads(done[0].stdout)["ips"] == [{"address": "10.1.2.2/24", "gateway": "10.1.2.1"}]
    assert done[1].stdout == b""
    assert json.loads(done[2].stdout)["code"] == errors.INCOMPATIBLE_VERSION
    assert [one.stderr for one in done] == [b""] * 3


def test_a_configuration_without_a_bottom_is_refused_and_nothing_worse():
    deep = b'{"ipam":' + b"[" * 100_000
    assert not means_its_own_folder(deep)
    outcome = run({"CNI_COMMAND": "STATUS"}, deep)
    told = json.loads(outcome.output)["code"]
    assert (outcome.exit_code, told) == (1, errors.UNDECODABLE)
