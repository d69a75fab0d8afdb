"""headcni_conflist: in charge, with the others aside, and back again."""

from __future__ import annotations

import json
import os

import pytest
from ansible_module import Failed, run

FLANNEL = json.dumps({"cniVersion": "1.0.0", "name": "cbr0", "plugins": [{"type": "flannel"}]})


@pytest.fixture
def net_d(tmp_path):
    folder = tmp_path / "net.d"
    folder.mkdir()
    (folder / "05-flannel.conflist").write_text(FLANNEL)
    return folder


def put(folder, check=False, **options):
    given = {"pod_cidrs": ["10.1.2.0/24"], "release": "/nowhere", **options}
    return run("headcni_conflist", check, directory=str(folder), **given)


def test_check_mode_foretells_it_then_it_is_done_and_then_nothing_is_left(net_d):
    foretold = put(net_d, check=True)
    assert os.listdir(net_d) == ["05-flannel.conflist"]
    done, again = put(net_d), put(net_d)
    assert (foretold["changed"], done["changed"], again["changed"]) == (True, True, False)
    assert foretold["diff"] == done["diff"]
    assert foretold["in_charge"] == done["in_charge"] == "10-headcni.conflist"
    assert done["disabled"] == ["05-flannel.conflist"]
    assert again["diff"] == []


def test_absent_puts_back_what_was_there(net_d):
    put(net_d)
    foretold = run("headcni_conflist", True, state="absent", directory=str(net_d))
    done = run("headcni_conflist", state="absent", directory=str(net_d))
    again = run("headcni_conflist", state="absent", directory=str(net_d))
    assert (foretold["changed"], done["changed"], again["changed"]) == (True, True, False)
    assert foretold["in_charge"] == done["in_charge"] == "05-flannel.conflist"
    assert os.listdir(net_d) == ["05-flannel.conflist"]
    assert (net_d / "05-flannel.conflist").read_text() == FLANNEL


def test_a_directory_that_was_configured_before_is_as_it_was(net_d, tmp_path):
    (tmp_path / "headcni").mkdir()
    release, other = str(tmp_path / "headcni" / "current"), tmp_path / "other.d"
    put(net_d, release=release)
    foretold = put(other, check=True, release=release)
    assert sorted(os.listdir(net_d))[-1] == "10-headcni.conflist"
    done, again = put(other, release=release), put(other, release=release)
    assert (foretold["changed"], done["changed"], again["changed"]) == (True, True, False)
    assert foretold["diff"] == done["diff"]
    assert done["put_back"] == [str(net_d / "05-flannel.conflist")]
    assert done["removed"] == [str(net_d / "10-headcni.conflist")]
    assert os.listdir(net_d) == ["05-flannel.conflist"]
    assert os.listdir(other) == ["10-headcni.conflist"]


def test_absent_sees_to_a_directory_that_was_configured_before(net_d, tmp_path):
    """The change of directory was cut off, or nobody has run site.yml since."""
    (tmp_path / "headcni").mkdir()
    release = str(tmp_path / "headcni" / "current")
    put(net_d, release=release)
    where = {"directory": str(tmp_path / "other.d"), "release": release}
    done = run("headcni_conflist", state="absent", **where)
    assert done["changed"] and os.listdir(net_d) == ["05-flannel.conflist"]
    assert not run("headcni_conflist", state="absent", **where)["changed"]


def test_what_is_asked_for_is_in_the_file(net_d):
    put(
        net_d,
        pod_cidrs=["10.1.2.0/24", "fd00:1::/64"],
        cluster_cidrs=["10.1.0.0/16", "fd00::/40"],
        mode="daemon",
        datapath="routed",
        mtu=1300,
        magic_dns={"enable": True, "nameservers": ["100.100.100.100"]},
        extra={"data_dir": "/srv/cni"},
    )
    plugin = json.loads((net_d / "10-headcni.conflist").read_text())["plugins"][0]
    assert plugin["mode"] == "daemon" and plugin["datapath"] == "routed"
    assert plugin["mtu"] == 1300 and plugin["enable_ipv6"] is True
    assert plugin["data_dir"] == "/srv/cni"
    assert plugin["magic_dns"]["nameservers"] == ["100.100.100.100"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pod_cidrs": ["10.1.2.1/24"]}, "no host bits: 10.1.2.0/24"),
        ({"pod_cidrs": []}, "pod_cidrs"),
        ({"pod_cidrs": ["10.1.2.0/24", "10.1.3.0/24"]}, "one of a family"),
        ({"mtu": 100}, "mtu: 100"),
        ({"bridge": "a-name-that-is-too-long"}, "bridge"),
        ({"mode": "sideways"}, "must be one of"),
        ({"name": "bad name"}, "name"),
        ({"file": "../evil.conflist"}, "is not a file name"),
    ],
)
def test_bad_input_changes_nothing(net_d, options, said):
    with pytest.raises(Failed) as caught:
        put(net_d, **options)
    assert said in str(caught.value)
    assert os.listdir(net_d) == ["05-flannel.conflist"]


def test_the_plugin_itself_has_the_last_word(net_d, tmp_path):
    command = tmp_path / "release" / "bin" / "headcnictl"
    command.parent.mkdir(parents=True)
    answer = {"problems": [{"path": "plugins[0].mtu", "value": 1000, "expected": "at least 1280"}]}
    command.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'; exit 1\n")
    command.chmod(0o755)
    with pytest.raises(Failed, match=r"plugins\[0\]\.mtu: 1000, expected at least 1280"):
        put(net_d, release=str(tmp_path / "release"))
    assert os.listdir(net_d) == ["05-flannel.conflist"]
