"""delegate and plugins: order, prevResult, persisted steps, roll-back; with plugins of shell.

The real Go plugins are in tests/cni/test_go_chain.py; these fail, hang and crash on demand.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

import headcni
from headcni import chain, config, errors
from headcni.exec import MAX_NESTING
from headcni.model import Owner, PodRef
from headcni.result import shape
from headcni.skel import NESTING, VERSIONS, Call
from headcni.store import Attachment, PluginState, Store

OWNER = Owner("pods", "c1", "eth0")
# Writes down every call, then does as it was told for this verb, then gives its result.
PLUGIN = """#!/bin/sh
cd "$(dirname "$0")"
name=$(basename "$0")
echo "$CNI_COMMAND $name" >> calls
cat > "$name.$CNI_COMMAND.stdin"
env > "$name.$CNI_COMMAND.env"
if [ -f "$name.$CNI_COMMAND.do" ]; then . "./$name.$CNI_COMMAND.do"; fi
if [ "$CNI_COMMAND" = ADD ]; then cat "$name.result"; fi
"""
HEADCNI = f"""#!{sys.executable} -I
import json, os, sys
sys.path.insert(0, {str(Path(headcni.__file__).parent.parent)!r})
from headcni import chain, config, errors, result
from headcni.skel import Call
from headcni.store import Store
env, stdin = dict(os.environ), sys.stdin.buffer.read()
with open(os.path.dirname(__file__) + "/calls", "a") as calls:
    print(env["CNI_COMMAND"], "headcni", env.get("HEADCNI_CHAIN"), file=calls)
network = config.parse(stdin, env)
owner = Call.of(env).owner(network.name)
store = Store.in_directory(env["HEADCNI_DATA_DIR"])
try:
    if env["CNI_COMMAND"] == "ADD":
        answer = chain.add(network, env, owner, store)
        print(json.dumps(result.shape(answer, network.cni_version)))
    else:
        chain.delete(network, env, owner, store)
except errors.CniError as problem:
    print(json.dumps(problem.as_dict(network.cni_version)))
    sys.exit(1)
"""


def failing(code=999, msg="no", exit_code=1) -> str:
    answer = json.dumps({"cniVersion": "1.1.0", "code": code, "msg": msg})
    return f"printf %s {shlex.quote(answer)}; exit {exit_code}"


class Chain:
    """Plugins in a directory, a store, and calls of the chain with them."""

    def __init__(self, directory: Path) -> None:
        self.bin = directory / "bin"
        self.bin.mkdir()
        self.data = directory / "data"
        self.store = Store.in_directory(str(self.data))
        self.version = "1.1.0"
        self.plugins = [self.plugin(name) for name in ("first", "second", "third")]

    def plugin(self, name: str, **conf: object) -> dict[str, object]:
        path = self.bin / name
        path.write_text(PLUGIN)
        path.chmod(0o755)
        self.gives(name, {"ips": [{"address": "10.1.2.3/24"}], "interfaces": [{"name": name}]})
        return {"type": name, "ipam": {}, **conf}

    def gives(self, name: str, result: object) -> None:
        (self.bin / f"{name}.result").write_text(json.dumps(result))

    def does(self, name: str, verb: str, script: str) -> None:
        (self.bin / f"{name}.{verb}.do").write_text(script)

    def behaves(self, name: str, verb: str) -> None:
        (self.bin / f"{name}.{verb}.do").unlink()

    @property
    def env(self) -> dict[str, str]:
        return {
            "CNI_CONTAINERID": "c1",
            "CNI_IFNAME": "eth0",
            "CNI_NETNS": "/run/netns/x",
            "CNI_PATH": str(self.bin),
            "HEADCNI_DATA_DIR": str(self.data),
            "PATH": os.environ["PATH"],
        }

    def conf(self, **changes: object) -> dict[str, object]:
        return {
            "cniVersion": self.version,
            "name": "pods",
            "type": "headcni",
            "pod_cidr": "10.1.2.0/24",
            "mtu": 1280,
            "plugins": self.plugins,
            **changes,
        }

    def network(self, **changes: object):
        conf = {k: v for k, v in self.conf(**changes).items() if v is not None}
        return config.parse(json.dumps(conf).encode(), self.env)

    def add(self, **changes: object):
        return chain.add(self.network(**changes), self.env, OWNER, self.store)

    def delete(self, **changes: object) -> None:
        chain.delete(self.network(**changes), self.env, OWNER, self.store)

    def check(self, **changes: object) -> None:
        chain.check(self.network(**changes), self.env, OWNER, self.store)

    def gc(self, valid=(), **changes: object) -> None:
        listed = [{"containerID": container, "ifname": ifname} for container, ifname in valid]
        changes = {"cni.dev/valid-attachments": listed, **changes}
        chain.gc(self.network(**changes), self.env, self.store)

    def status(self, **changes: object) -> None:
        chain.status(self.network(**changes), self.env)

    def error(self, verb: str, *args: object, **changes: object) -> errors.CniError:
        with pytest.raises(errors.CniError) as caught:
            getattr(self, verb)(*args, **changes)
        return caught.value

    def calls(self) -> list[str]:
        """What has been called since the last look, in order."""
        path = self.bin / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    def stdin(self, name: str, verb: str):
        return json.loads((self.bin / f"{name}.{verb}.stdin").read_text())

    def env_of(self, name: str, verb: str) -> dict[str, str]:
        lines = (self.bin / f"{name}.{verb}.env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def steps(self, owner=OWNER) -> list[tuple[int, str]]:
        return [(state.index, state.type) for state in self.store.plugin_states(owner)]


@pytest.fixture
def three(tmp_path):
    made = Chain(tmp_path)
    yield made
    made.store.close()


ADDED = ["ADD first", "ADD second", "ADD third"]
UNDONE = ["DEL third", "DEL second", "DEL first"]


def test_each_plugin_gets_the_result_of_the_one_before_it(three):
    result = three.add()
    assert three.calls() == ADDED
    assert "prevResult" not in three.stdin("first", "ADD")
    assert three.stdin("second", "ADD")["prevResult"]["interfaces"] == [{"name": "first"}]
    assert three.stdin("third", "ADD")["prevResult"]["interfaces"] == [{"name": "second"}]
    assert result == {
        "cniVersion": "1.1.0",
        "interfaces": [{"name": "third"}],
        "ips": [{"address": "10.1.2.3/24"}],
    }


def test_a_single_delegate_is_a_chain_of_one(three):
    three.add(plugins=None, delegate=three.plugins[0])
    three.delete(plugins=None, delegate=three.plugins[0])
    assert three.calls() == ["ADD first", "DEL first"]


def test_the_result_of_a_plugin_before_us_goes_to_our_first(three):
    before = {"cniVersion": "1.1.0", "interfaces": [{"name": "before"}]}
    three.add(prevResult=before)
    assert three.stdin("first", "ADD")["prevResult"] == before


def test_a_delegate_gets_name_version_and_the_capabilities_it_asks_for(three):
    three.plugins[1] = three.plugin("second", capabilities={"portMappings": True, "mac": False})
    ports = [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]
    three.add(
        runtimeConfig={"portMappings": ports, "mac": "02:00:00:00:00:09"},
        capabilities={"portMappings": True, "mac": True},
    )
    first, second = (three.stdin(name, "ADD") for name in ("first", "second"))
    assert (first["name"], first["cniVersion"], first["type"]) == ("pods", "1.1.0", "first")
    assert "runtimeConfig" not in first
    assert second["runtimeConfig"] == {"portMappings": ports}


@pytest.mark.parametrize("version", VERSIONS)
def test_prev_result_has_the_shape_of_the_configurations_version(three, version):
    three.version = version
    canonical = {
        "interfaces": [{"name": "eth0", "mtu": 1280}],
        "ips": [{"address": "10.1.2.3/24", "interface": 0}],
        "routes": [{"dst": "0.0.0.0/0", "mtu": 1280}],
    }
    three.gives("first", shape(canonical, version))
    three.add()
    assert three.stdin("second", "ADD")["prevResult"] == shape(canonical, version)


def test_a_plugin_that_is_missing_is_named_before_any_is_run(three):
    (three.bin / "third").unlink()
    problem = three.error("add")
    assert problem.code == errors.DELEGATE_MISSING
    assert "third" in problem.msg
    assert str(three.bin) in problem.details
    assert three.calls() == []
    assert three.steps() == []


def test_a_failure_undoes_in_reverse_what_ran_and_the_failed_one_too(three):
    three.does("second", "ADD", failing(11, "busy"))
    problem = three.error("add")
    assert (problem.code, problem.msg, problem.details) == (11, "second: busy", "")
    assert three.calls() == ["ADD first", "ADD second", "DEL second", "DEL first"]
    assert three.steps() == []
    assert three.stdin("second", "DEL")["prevResult"]["interfaces"] == [{"name": "first"}]


def test_trouble_in_the_roll_back_is_told_and_does_not_hide_the_first_failure(three):
    three.does("third", "ADD", failing(7, "bad key"))
    three.does("second", "DEL", failing(999, "stuck"))
    problem = three.error("add")
    assert (problem.code, problem.msg) == (7, "third: bad key")
    assert problem.details == "roll-back failed too: second: stuck"
    assert three.calls() == [*ADDED, *UNDONE]
    assert three.steps() == [(1, "second")]


def test_what_a_roll_back_could_not_undo_the_next_del_does(three):
    three.does("third", "ADD", failing())
    three.does("second", "DEL", failing())
    three.error("add")
    three.calls()
    three.behaves("second", "DEL")
    three.delete()
    assert three.calls() == ["DEL second"]
    assert three.steps() == []


def test_a_plugin_that_hangs_is_named_with_the_limit_and_rolled_back(three):
    three.does("second", "ADD", "sleep 60")
    problem = three.error("add", delegate_timeout=3)
    assert problem.code == errors.DELEGATE_TIMEOUT
    assert problem.msg == "second: ADD did not finish within 3 s and was ended"
    assert three.calls() == ["ADD first", "ADD second", "DEL second", "DEL first"]


def test_a_malformed_result_is_a_failure_of_its_plugin(three):
    three.gives("second", {"ips": [{"address": "nowhere"}]})
    problem = three.error("add")
    assert problem.code == errors.DELEGATE_FAILED
    assert problem.msg == "second: the CNI result is malformed"
    assert "ips[0].address" in problem.details
    assert three.calls()[-2:] == ["DEL second", "DEL first"]


def test_a_failure_to_keep_a_result_undoes_the_plugin_that_gave_it(three, monkeypatch):
    def save(owner, state):
        if state.index == 1 and state.result:
            raise errors.CniError(errors.STORE, "the disk is full")
        Store.save_plugin_state(three.store, owner, state)

    monkeypatch.setattr(three.store, "save_plugin_state", save, raising=False)
    assert three.error("add").code == errors.STORE
    assert three.calls() == ["ADD first", "ADD second", "DEL second", "DEL first"]


def test_a_plugin_that_the_crash_of_an_add_cut_off_is_undone_by_the_next_del(three):
    three.does("second", "ADD", "kill -KILL $PPID")
    (three.bin / "headcni").write_text(HEADCNI)
    (three.bin / "headcni").chmod(0o755)
    crashed = subprocess.run(
        [three.bin / "headcni"],
        input=json.dumps(three.conf()).encode(),
        env={**three.env, "CNI_COMMAND": "ADD"},
        check=False,
    )
    assert crashed.returncode == -signal.SIGKILL
    assert three.steps() == [(0, "first"), (1, "second")]
    assert three.calls()[1:] == ["ADD first", "ADD second"]
    three.delete()
    assert three.calls() == ["DEL second", "DEL first"]
    assert three.stdin("second", "DEL")["prevResult"]["interfaces"] == [{"name": "first"}]
    assert three.steps() == []


def test_an_add_that_was_cut_off_is_undone_before_another_begins(three):
    cut_off = PluginState(2, "third", {**three.plugins[2], "name": "pods", "of": "then"}, {})
    three.store.save_plugin_state(OWNER, cut_off)
    three.plugins.pop()
    three.add()
    assert three.calls() == ["DEL third", *ADDED[:2]]
    assert three.stdin("third", "DEL")["of"] == "then"
    assert three.steps() == [(0, "first"), (1, "second")]


def test_what_is_left_of_an_earlier_add_is_told_only_if_this_one_fails(three):
    three.store.save_plugin_state(OWNER, PluginState(5, "gone", {"cniVersion": "1.1.0"}, {}))
    three.add()
    assert three.steps() == [(0, "first"), (1, "second"), (2, "third"), (5, "gone")]
    three.does("first", "ADD", failing())
    details = three.error("add").details
    assert "of an earlier ADD remains: gone: there is no such plugin" in details


def test_del_works_with_the_configuration_of_then_not_of_now(three):
    three.plugins[0] = three.plugin("first", flavour="old")
    three.add()
    three.calls()
    three.plugins = [three.plugin("first", flavour="new"), three.plugin("fourth")]
    three.version = "1.0.0"
    three.delete()
    assert three.calls() == UNDONE
    first = three.stdin("first", "DEL")
    assert (first["flavour"], first["cniVersion"]) == ("old", "1.1.0")
    assert three.steps() == []


def test_del_hands_every_plugin_the_final_result(three):
    three.add()
    three.delete()
    for name in ("first", "second", "third"):
        assert three.stdin(name, "DEL")["prevResult"]["interfaces"] == [{"name": "third"}]


def test_the_runtimes_own_final_result_is_preferred(three):
    three.add()
    final = {"cniVersion": "1.1.0", "interfaces": [{"name": "of-a-later-plugin"}]}
    three.delete(prevResult=final)
    assert three.stdin("first", "DEL")["prevResult"] == final


def test_a_cached_result_that_is_spoilt_does_not_stop_del(three):
    three.add()
    three.delete(prevResult={"cniVersion": "1.1.0", "ips": "spoilt"})
    assert three.stdin("first", "DEL")["prevResult"]["interfaces"] == [{"name": "third"}]
    assert three.steps() == []


def test_before_0_4_0_del_has_no_result_with_it(three):
    three.version = "0.3.1"
    three.add()
    three.delete()
    assert "prevResult" in three.stdin("third", "ADD")
    assert "prevResult" not in three.stdin("third", "DEL")


def test_without_a_record_del_goes_by_the_configuration(three):
    three.delete()
    assert three.calls() == UNDONE
    assert three.stdin("first", "DEL")["name"] == "pods"
    assert "prevResult" not in three.stdin("first", "DEL")


def test_without_a_record_del_passes_over_a_plugin_that_is_not_there(three):
    (three.bin / "second").unlink()
    three.delete()
    assert three.calls() == ["DEL third", "DEL first"]


def test_with_a_record_del_insists_on_the_plugin(three):
    three.add()
    three.calls()
    (three.bin / "second").unlink()
    assert three.error("delete").code == errors.DELEGATE_MISSING
    assert three.calls() == ["DEL third", "DEL first"]
    assert three.steps() == [(1, "second")]


def test_a_second_del_is_as_good_as_the_first(three):
    three.add()
    three.delete()
    three.delete()
    assert three.calls() == [*ADDED, *UNDONE, *UNDONE]


def test_a_plugin_that_fails_its_del_is_named_keeps_its_record_and_stops_nobody(three):
    three.add()
    three.calls()
    three.does("third", "DEL", failing(999, "stuck"))
    three.does("first", "DEL", failing(11, "busy"))
    problem = three.error("delete")
    assert problem.msg == "third: stuck; first: busy"
    assert three.calls() == UNDONE
    assert three.steps() == [(0, "first"), (2, "third")]
    three.behaves("third", "DEL")
    problem = three.error("delete")
    assert (problem.code, problem.msg) == (11, "first: busy")
    assert three.calls() == ["DEL third", "DEL first"]
    three.behaves("first", "DEL")
    three.delete()
    assert three.calls() == ["DEL first"]
    assert three.steps() == []


def test_a_damaged_record_is_undone_with_the_configuration_of_now(three):
    three.add()
    with sqlite3.connect(three.data / "headcni.db") as db:
        db.execute("UPDATE plugin_state SET config = 'spoilt', result = 'too' WHERE place < 2")
    db.close()
    three.plugins = [three.plugin("first", flavour="new")]
    three.delete()
    assert three.stdin("first", "DEL")["flavour"] == "new"
    second = three.stdin("second", "DEL")
    assert (second["type"], second["name"], second["cniVersion"]) == ("second", "pods", "1.1.0")
    assert three.steps() == []


def test_check_asks_every_plugin_in_order_with_the_final_result(three):
    three.add()
    three.calls()
    three.check()
    assert three.calls() == ["CHECK first", "CHECK second", "CHECK third"]
    assert three.stdin("first", "CHECK")["prevResult"]["interfaces"] == [{"name": "third"}]
    final = {"cniVersion": "1.1.0", "interfaces": [{"name": "of-a-later-plugin"}]}
    three.check(prevResult=final)
    assert three.stdin("first", "CHECK")["prevResult"] == final


def test_check_names_what_every_plugin_found(three):
    three.add()
    three.does("first", "CHECK", failing(999, "no route"))
    three.does("third", "CHECK", failing(999, "no rule"))
    problem = three.error("check")
    assert problem.code == errors.DELEGATE_FAILED
    assert problem.msg == "first: no route; third: no rule"


def test_check_is_not_for_0_3_1(three):
    three.version = "0.3.1"
    three.add()
    three.calls()
    three.check()
    assert three.calls() == []


@pytest.mark.parametrize(
    "answer",
    [
        failing(1, "plugin version does not allow CHECK"),
        failing(4, "unknown CNI_COMMAND: CHECK"),
        failing(100, "unknown CNI_COMMAND: CHECK"),
    ],
)
def test_a_plugin_that_does_not_know_check_is_passed_over(three, answer):
    three.add()
    three.does("second", "CHECK", answer)
    three.check()
    assert three.calls()[-1] == "CHECK third"


def test_check_finds_an_add_that_was_cut_off(three):
    three.add()
    three.calls()
    conf = {**three.plugins[1], "cniVersion": "1.1.0"}
    three.store.save_plugin_state(OWNER, PluginState(1, "second", conf, {}))
    problem = three.error("check")
    assert (problem.code, problem.msg) == (
        errors.CHECK_FAILED,
        "second: its ADD did not finish",
    )
    assert three.calls() == ["CHECK first", "CHECK third"]


def test_check_without_a_record_goes_by_the_configuration(three):
    three.check(prevResult={"cniVersion": "1.1.0", "interfaces": [{"name": "eth0"}]})
    assert three.calls() == ["CHECK first", "CHECK second", "CHECK third"]
    assert three.stdin("second", "CHECK")["prevResult"]["interfaces"] == [{"name": "eth0"}]


def test_check_can_be_turned_off(three):
    three.check(disableCheck=True)
    assert three.calls() == []


def test_gc_reaches_every_plugin_with_the_valid_attachments(three):
    three.does("first", "GC", failing(999, "torn"))
    three.does("second", "GC", failing(1, "plugin version does not allow GC"))
    three.does("third", "GC", failing(5, "no disk"))
    problem = three.error("gc", [("c9", "net1")])
    assert problem.msg == "first: torn; third: no disk"
    assert three.calls() == ["GC first", "GC second", "GC third"]
    listed = [{"containerID": "c9", "ifname": "net1"}]
    assert three.stdin("third", "GC")["cni.dev/valid-attachments"] == listed
    assert three.stdin("third", "GC")["cni.dev/attachments"] == listed


def test_gc_undoes_what_is_no_longer_valid_and_nothing_else(three):
    three.add()
    other = Owner("pods", "c2", "eth0")
    env = {**three.env, "CNI_CONTAINERID": "c2", "CNI_ARGS": "K8S_POD_NAME=x"}
    chain.add(three.network(), env, other, three.store)
    three.store.remember(Attachment(other, PodRef(), "/run/netns/of-c2", "", {}, {}))
    three.calls()
    three.gc([("c1", "eth0")])
    assert three.calls() == [*UNDONE, "GC first", "GC second", "GC third"]
    given = three.env_of("first", "DEL")
    assert (given["CNI_CONTAINERID"], given["CNI_NETNS"]) == ("c2", "/run/netns/of-c2")
    assert given["CNI_ARGS"] == ""
    assert three.stdin("first", "DEL")["prevResult"]["interfaces"] == [{"name": "third"}]
    assert three.steps(other) == []
    assert len(three.steps()) == 3


def test_gc_without_the_list_removes_nothing(three):
    three.add()
    problem = three.error("gc", **{"cni.dev/valid-attachments": None})
    assert problem.code == errors.INVALID_CONFIG
    assert len(three.steps()) == 3


def test_gc_can_be_turned_off(three):
    three.gc(disableGC=True)
    assert three.calls() == []


@pytest.mark.parametrize("verb", ["gc", "status"])
def test_verbs_of_1_1_0_are_not_for_plugins_of_before(three, verb):
    three.version = "1.0.0"
    getattr(three, verb)()
    assert three.calls() == []


@pytest.mark.parametrize(
    ("answers", "code", "said"),
    [
        ({}, None, ""),
        ({"second": failing(50, "full")}, 50, "second: full"),
        (
            {"first": failing(50, "full"), "third": failing(51, "cut")},
            51,
            "first: full; third: cut",
        ),
        (
            {"first": failing(51, "cut"), "third": failing(50, "full")},
            51,
            "first: cut; third: full",
        ),
        ({"first": failing(999, "what")}, 50, "first: what"),
        (
            {"first": failing(1, "incompatible CNI versions")},
            50,
            "first: incompatible CNI versions",
        ),
        ({"first": failing(4, "unknown CNI_COMMAND: STATUS")}, None, ""),
    ],
)
def test_status_asks_everybody_and_the_worst_code_wins(three, answers, code, said):
    for name, answer in answers.items():
        three.does(name, "STATUS", answer)
    if code is None:
        three.status()
    else:
        problem = three.error("status")
        assert (problem.code, problem.msg) == (code, said)
    assert three.calls() == ["STATUS first", "STATUS second", "STATUS third"]


def test_a_missing_plugin_makes_the_node_not_ready(three):
    (three.bin / "second").unlink()
    assert three.error("status").code == errors.NOT_AVAILABLE


@pytest.fixture
def within(three):
    """As in the original's example: a headcni with a delegate, first in a chain of ours."""
    (three.bin / "headcni").write_text(HEADCNI)
    (three.bin / "headcni").chmod(0o755)
    inner = {"type": "headcni", "pod_cidr": "10.1.2.0/24", "delegate": three.plugins[0]}
    three.plugins = [inner, three.plugins[1]]
    return three


def test_a_headcni_in_a_chain_of_ours_keeps_records_of_its_own(within):
    result = within.add()
    assert within.calls() == ["ADD headcni 0", "ADD first", "ADD second"]
    assert result["interfaces"] == [{"name": "second"}]
    assert within.steps() == [(0, "headcni"), (1, "second")]
    assert within.steps(Owner("pods/0", "c1", "eth0")) == [(0, "first")]
    within.delete()
    assert within.calls() == ["DEL second", "DEL headcni 0", "DEL first"]
    assert within.steps() == within.steps(Owner("pods/0", "c1", "eth0")) == []


def test_an_error_from_within_keeps_its_code_and_both_names(within):
    within.does("first", "ADD", failing(11, "busy"))
    problem = within.error("add")
    assert (problem.code, problem.msg) == (11, "headcni: first: busy")
    assert within.calls() == [
        "ADD headcni 0",
        "ADD first",
        "DEL first",
        "DEL headcni 0",
        "DEL first",
    ]


def test_plugins_that_call_each_other_without_end_are_stopped_and_can_be_removed(three):
    # Each level adds a level: what a plugin that names itself looks like from here.
    endless = HEADCNI.replace(
        "network = config.parse(stdin, env)",
        "conf = json.loads(stdin); conf['delegate'] = {'type': 'headcni', 'ipam': {}};"
        "conf['pod_cidr'] = '10.1.2.0/24';"
        "network = config.parse(json.dumps(conf).encode(), env)",
    )
    (three.bin / "headcni").write_text(endless)
    (three.bin / "headcni").chmod(0o755)
    three.plugins = [{"type": "headcni", "ipam": {}}]
    problem = three.error("add")
    assert problem.code == errors.INVALID_CONFIG
    assert f"more than {MAX_NESTING} deep" in problem.msg
    assert three.calls()[:MAX_NESTING] == [
        "ADD headcni 0",
        "ADD headcni 0.0",
        "ADD headcni 0.0.0",
        "ADD headcni 0.0.0.0",
    ]
    assert three.steps() == []
    three.delete()


def test_an_owner_within_is_told_apart_once_and_for_all():
    env = {NESTING: "1.0"}
    call = Call("ADD", "c1", ifname="eth0")
    assert call.owner("pods") == OWNER
    within = Call("ADD", "c1", ifname="eth0", env=env)
    assert within.owner("pods") == Owner("pods/1.0", "c1", "eth0")
    assert within.owner(within.owner("pods").network) == Owner("pods/1.0", "c1", "eth0")


@pytest.fixture
def ipam(three):
    """A network whose addresses come from a plugin called first."""
    three.gives("first", {"ips": [{"version": "4", "address": "10.1.2.7/24"}]})
    three.version = "0.4.0"
    three.call = lambda verb, **changes: getattr(chain, f"ipam_{verb}")(
        three.network(plugins=None, ipam={"type": "first", "key": "value"}, **changes), three.env
    )
    return three


def test_an_ipam_plugin_reads_the_whole_netconf_and_its_answer_is_canonical(ipam):
    assert ipam.call("add") == {"cniVersion": "1.1.0", "ips": [{"address": "10.1.2.7/24"}]}
    conf = ipam.stdin("first", "ADD")
    assert (conf["type"], conf["ipam"]) == ("headcni", {"type": "first", "key": "value"})
    ipam.call("check")
    ipam.call("del")
    assert ipam.calls() == ["ADD first", "CHECK first", "DEL first"]


def test_an_ipam_plugin_that_gives_no_address_is_an_error_and_is_undone(ipam):
    ipam.gives("first", {"cniVersion": "0.4.0", "routes": [{"dst": "0.0.0.0/0"}]})
    with pytest.raises(errors.CniError) as caught:
        ipam.call("add")
    assert caught.value.msg == "first: ADD gave no address"
    assert ipam.calls() == ["ADD first", "DEL first"]


def test_an_ipam_plugin_that_fails_is_undone_and_its_error_stays_the_first(ipam):
    ipam.does("first", "ADD", failing(11, "full"))
    ipam.does("first", "DEL", failing(5, "no disk"))
    with pytest.raises(errors.CniError) as caught:
        ipam.call("add")
    assert (caught.value.code, caught.value.msg) == (11, "first: full")
    assert caught.value.details == "roll-back failed too: first: no disk"


def test_an_ipam_plugin_that_is_missing_is_not_asked_to_undo(ipam):
    (ipam.bin / "first").unlink()
    with pytest.raises(errors.CniError) as caught:
        ipam.call("add")
    assert caught.value.code == errors.DELEGATE_MISSING
    assert caught.value.details == f"searched {ipam.bin}"


def test_gc_and_status_reach_an_ipam_plugin(ipam):
    ipam.version = "1.1.0"
    listed = [{"containerID": "c9", "ifname": "eth0"}]
    ipam.call("gc", **{"cni.dev/valid-attachments": listed})
    assert ipam.stdin("first", "GC")["cni.dev/valid-attachments"] == listed
    ipam.does("first", "STATUS", failing(999, "no"))
    with pytest.raises(errors.CniError) as caught:
        ipam.call("status")
    assert caught.value.code == errors.NOT_AVAILABLE
