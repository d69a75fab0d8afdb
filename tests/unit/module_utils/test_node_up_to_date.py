"""A part of a node is up to date only if its module would change nothing and warn of nothing."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import (
    node_config,
    node_release,
    node_up_to_date,
    preflight_cni,
    preflight_install,
)
from ansible_collections.headcni.mesh.plugins.module_utils.shared import conflist

PYTHON = node_release.Python((3, 11, 0), "cpython-311")
DIGEST = "d" * 64
GIVEN = {
    "cni_bin_dirs": [],
    "bin_dir": "/usr/local/bin",
    "plugin_dirs": [],
    "keep": 3,
    "native_shim": True,
    "version": "1.1.0",
    "checksum": DIGEST,
    "conflist": {"mtu": 1280},
}


@pytest.fixture
def root(tmp_path):
    """Two releases, of which the second is in use, with nothing left to be done."""
    for name in ("1.0.0", "1.1.0"):
        release = tmp_path / "opt" / "releases" / name
        for folder in ("bin", "units", "headcni/__pycache__"):
            (release / folder).mkdir(parents=True)
        (release / "VERSION").write_text(f"{name}\n")
        (release / ".tarball-sha256").write_text(f"{DIGEST}\n")
        (release / "bin" / "loopback").write_text("")
        (release / "units" / "headcni-daemon.service").write_text("[Unit]\n")
        (release / "headcni/__pycache__/shim.cpython-311.pyc").write_text("")
    root = str(tmp_path / "opt")
    used = node_release.find(node_release.installed(root), "1.1.0", DIGEST)
    node_release.switch(used, root)
    node_release.arrange(used, wanted_at(tmp_path), node_release.Steps(), root=root)
    return root


def wanted_at(tmp_path, **other) -> node_release.Wanted:
    wanted = node_release.Wanted(
        bin_dirs=[str(tmp_path / "cni")],
        command_dir=str(tmp_path / "bin"),
        unit_dir=str(tmp_path / "systemd"),
        plugin_dirs=[],
    )
    return replace(wanted, **other)


@pytest.mark.parametrize("digest", [DIGEST, ""])
def test_a_release_in_use_with_its_links_and_units_is_settled(root, tmp_path, digest):
    assert node_up_to_date.has_release("1.1.0", digest, wanted_at(tmp_path), PYTHON, root)


@pytest.mark.parametrize(
    ("version", "digest", "interpreter", "other"),
    [
        ("1.0.0", DIGEST, PYTHON, {}),  # there, but not in use
        ("1.1.0", "e" * 64, PYTHON, {}),  # another build
        ("1.2.0", DIGEST, PYTHON, {}),  # not there
        ("no name", "", PYTHON, {}),
        ("1.1.0", DIGEST, replace(PYTHON, tag="cpython-313"), {}),  # not compiled for it
        ("1.1.0", DIGEST, PYTHON, {"command_dir": "elsewhere"}),  # a link lacks
        ("1.1.0", DIGEST, PYTHON, {"keep": 1}),  # a mistake, which its module names
    ],
)
def test_one_that_lacks_something_is_not(root, tmp_path, version, digest, interpreter, other):
    if "command_dir" in other:
        other = {"command_dir": str(tmp_path / other["command_dir"])}
    wanted = wanted_at(tmp_path, **other)
    assert not node_up_to_date.has_release(version, digest, wanted, interpreter, root)


@pytest.mark.parametrize("spoilt", ["systemd/headcni-daemon.service", "cni/headcni", "opt/current"])
def test_nor_one_of_which_something_was_taken_away(root, tmp_path, spoilt):
    os.unlink(tmp_path / spoilt)
    assert not node_up_to_date.has_release("1.1.0", DIGEST, wanted_at(tmp_path), PYTHON, root)


def test_nor_one_with_another_program_in_its_way(root, tmp_path):
    (tmp_path / "cni/headcni").unlink()
    (tmp_path / "cni/headcni").write_text("another program")
    assert not node_up_to_date.has_release("1.1.0", DIGEST, wanted_at(tmp_path), PYTHON, root)


def test_nor_one_without_the_loopback_plugin_which_is_warned_of(root, tmp_path):
    for release in node_release.installed(root):
        os.unlink(f"{release.path}/bin/loopback")
    assert not node_up_to_date.has_release("1.1.0", DIGEST, wanted_at(tmp_path), PYTHON, root)


CONFIG = {"network": {"podCIDR": {"nodeLocal": "10.1.2.0/24"}}}


def test_a_configuration_is_settled_if_it_is_just_that_and_closed_to_others(tmp_path):
    path = str(tmp_path / "config.yaml")
    found = node_config.resolved(CONFIG, {})
    assert not node_up_to_date.has_config(CONFIG, found, path)
    node_config.write(path, node_config.render(node_config.pinned(CONFIG, found)))
    assert node_up_to_date.has_config(CONFIG, found, path)
    assert not node_up_to_date.has_config({**CONFIG, "logging": {"level": "DEBUG"}}, found, path)
    os.chmod(path, 0o644)
    assert not node_up_to_date.has_config(CONFIG, found, path)


def test_a_guess_is_never_settled_as_it_is_warned_of(tmp_path):
    config = {"network": {"podCIDR": {"base": "10.1.0.0/16"}}}
    path = str(tmp_path / "config.yaml")
    found = node_config.resolved(config, {})
    assert found.guessed
    node_config.write(path, node_config.render(node_config.pinned(config, found)))
    assert not node_up_to_date.has_config(config, found, path)


@pytest.fixture
def net_d(tmp_path):
    folder = tmp_path / "net.d"
    folder.mkdir()
    conf = conflist.build(
        conflist.Options(pod_cidrs=["10.1.2.0/24"], cluster_cidrs=["10.1.0.0/16"])
    )
    conflist.write(conf, str(folder), name=conflist.NAME, keep=conflist.KEEP)
    return folder


def charged(folder, **options) -> bool:
    given = {"directory": str(folder), **options}
    return node_up_to_date.has_conflist(given, ["10.1.2.0/24"], ["10.1.0.0/16"])


def test_a_conflist_in_charge_is_settled_however_its_options_are_spelt(net_d):
    assert charged(net_d)
    assert charged(net_d, mtu="1280", hairpin="yes", magic_dns=None, capabilities=None)
    assert not charged(net_d, mtu="1300")
    assert not charged(net_d, mtu="many")  # a mistake, which its module names
    assert not charged(net_d, ipma="host-local")
    assert not charged(net_d, file="20-headcni.conflist")


def test_it_is_not_while_another_would_be_taken_instead(net_d):
    other = {"cniVersion": "1.0.0", "name": "cbr0", "plugins": [{"type": "flannel"}]}
    (net_d / "05-flannel.conflist").write_text(json.dumps(other))
    assert not charged(net_d)
    assert not charged(net_d.parent / "nowhere")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, None),
        ({"file": "20-headcni.conflist"}, None),
        (
            {"file": "10-headcni.yaml"},
            "'10-headcni.yaml' is not a file name that ends in .conflist",
        ),
        ({"name": "my net"}, 'name: "my net"'),
        ({"mtu": "many"}, "mtu"),
        ({"chained": [{"capabilities": {"portMappings": True}}]}, "plugins[1].type: missing"),
    ],
)
def test_a_conflist_that_could_not_be_is_told_before_anything_is_changed(net_d, options, said):
    given = {**GIVEN, "conflist": {"directory": str(net_d), **options}}
    found = node_config.resolved(CONFIG, {})
    problems = preflight_cni.conflists(CONFIG, found.cidrs, given)
    assert len(problems) == (1 if said else 0)
    assert (said or "") in "".join(problems)


def test_preflight_names_the_parts_that_are_up_to_date(monkeypatch):
    for name, answer in (("has_release", True), ("has_config", True), ("has_conflist", False)):
        monkeypatch.setattr(node_up_to_date, name, lambda *_, answer=answer: answer)
    found = node_config.resolved(CONFIG, {})
    assert preflight_install.up_to_date(CONFIG, found, GIVEN, PYTHON) == ["release", "config"]
    assert preflight_install.up_to_date(CONFIG, found, {**GIVEN, "version": None}, PYTHON) == [
        "config"
    ]
