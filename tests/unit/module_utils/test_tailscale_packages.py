"""Packages: where each distribution's are, what is run for them, and what a failure leaves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import openpgp, tailscale_packages
from ansible_collections.headcni.mesh.plugins.module_utils.tailscale_packages import (
    Apt,
    Dnf,
    Source,
    read_os_release,
    source_of,
)
from ansible_collections.headcni.mesh.plugins.module_utils.tailscale_release import InstallError
from openpgp_keys import EXPECTED, EXPECTED_FINGERPRINT, ROGUE

URL = "https://mirror.example.org/stable"


@pytest.mark.parametrize(
    ("os_release", "source"),
    [
        ({"ID": "debian", "VERSION_CODENAME": "bookworm"}, Source("apt", "debian", "bookworm")),
        ({"ID": "raspbian", "VERSION_CODENAME": "trixie"}, Source("apt", "raspbian", "trixie")),
        ({"ID": "ubuntu", "VERSION_CODENAME": "noble"}, Source("apt", "ubuntu", "noble")),
        (
            {"ID": "linuxmint", "VERSION_CODENAME": "wilma", "UBUNTU_CODENAME": "noble"},
            Source("apt", "ubuntu", "noble"),
        ),
        ({"ID": "lmde", "DEBIAN_CODENAME": "bookworm"}, Source("apt", "debian", "bookworm")),
        ({"ID": "rhel", "VERSION_ID": "9.5"}, Source("dnf", "rhel/9")),
        ({"ID": "centos", "VERSION_ID": "10"}, Source("dnf", "centos/10")),
        ({"ID": "ol", "VERSION_ID": "9.4"}, Source("dnf", "oracle/9")),
        ({"ID": "amzn", "VERSION_ID": "2023"}, Source("dnf", "amazon-linux/2023")),
        ({"ID": "rocky", "VERSION_ID": "9.5"}, Source("dnf", "fedora")),
        ({"ID": "almalinux", "VERSION_ID": "10.0"}, Source("dnf", "fedora")),
        ({"ID": "fedora", "VERSION_ID": "43"}, Source("dnf", "fedora")),
    ],
)
def test_every_distribution_has_its_folder(os_release, source):
    assert source_of(os_release) == source


@pytest.mark.parametrize("os_release", [{"ID": "nixos", "VERSION_ID": "26.05"}, {}, {"ID": "arch"}])
def test_others_are_told_to_use_the_tarball(os_release):
    with pytest.raises(InstallError, match="no package repository is known here: use method tar"):
        source_of(os_release)


def test_os_release_is_read_with_and_without_quotes(tmp_path):
    (tmp_path / "r").write_text("# x\nID=debian\nVERSION_ID=\"12\"\nVERSION_CODENAME='bookworm'\n")
    assert read_os_release(str(tmp_path / "r")) == {
        "ID": "debian",
        "VERSION_ID": "12",
        "VERSION_CODENAME": "bookworm",
    }
    assert read_os_release(str(tmp_path / "none")) == {}


class Machine:
    """What programs would say, by the first words of their commands; and what was run."""

    def __init__(self, **answers: tuple[int, str, str]) -> None:
        self.answers = answers
        self.ran: list[list[str]] = []
        self.environment: dict[str, str] = {}

    def __call__(self, argv: list[str], environ_update: Any = None) -> tuple[int, str, str]:
        self.ran.append(argv)
        self.environment = environ_update or {}
        for name, answer in self.answers.items():
            if name in " ".join(argv).replace("-", "_").replace(" ", "_"):
                return answer
        return 0, "", ""


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    for name in ("APT_LIST", "APT_KEYRING", "DNF_REPO", "DNF_KEYRING"):
        monkeypatch.setattr(tailscale_packages, name, str(tmp_path / name), raising=False)
    return tmp_path


@pytest.fixture
def server(monkeypatch) -> dict[str, bytes]:
    """What the repository's server has, by its address."""
    pages = {
        f"{URL}/debian/bookworm.noarmor.gpg": EXPECTED,
        f"{URL}/rhel/9/repo.gpg": openpgp.armored(EXPECTED),
    }
    monkeypatch.setattr(tailscale_packages, "fetch_bytes", lambda url, *_: pages[url])
    return pages


KEYS = {EXPECTED_FINGERPRINT}


def apt(machine: Machine) -> Apt:
    return Apt(machine, Source("apt", "debian", "bookworm"), KEYS, URL, 10, True)


def dnf(machine: Machine) -> Dnf:
    return Dnf(machine, Source("dnf", "rhel/9"), KEYS, URL, 10, True)


def test_apt_is_given_the_repository_signed_by_its_key(files, server):
    machine = Machine()
    assert not apt(machine).ready()
    with apt(machine).prepared():
        pass
    assert (files / "APT_LIST").read_text() == (
        f"deb [signed-by={files}/APT_KEYRING] {URL}/debian bookworm main\n"
    )
    assert (files / "APT_KEYRING").read_bytes() == openpgp.only(EXPECTED, KEYS)
    assert apt(machine).ready()
    assert machine.ran[0][:2] == ["apt-get", "update"]
    assert f"--option=Dir::Etc::sourcelist={files}/APT_LIST" in machine.ran[0]


def test_a_repository_that_does_not_answer_is_not_left_behind(files, server):
    (files / "APT_LIST").write_text("deb of the user's\n")
    machine = Machine(apt_get_update=(100, "", "E: The repository is not signed.\n"))
    said = "`apt-get update` failed: E: The repository is not"
    with pytest.raises(InstallError, match=said), apt(machine).prepared():
        pass
    assert (files / "APT_LIST").read_text() == "deb of the user's\n"
    assert os.listdir(files) == ["APT_LIST"]


@pytest.mark.parametrize("rogue", [ROGUE, b"<html>404</html>", b""])
@pytest.mark.parametrize("make", [apt, dnf])
def test_a_mirrors_own_key_is_not_trusted_on_first_use(files, server, make, rogue):
    for address in server:
        server[address] = rogue
    said = rf"repository_keys: {URL}/.* cannot be trusted: .*give the fingerprint"
    with pytest.raises(InstallError, match=said), make(Machine()).prepared():
        pass
    assert os.listdir(files) == []


@pytest.mark.parametrize(("make", "keyring"), [(apt, "APT_KEYRING"), (dnf, "DNF_KEYRING")])
def test_a_key_that_a_mirror_has_added_is_not_passed_on(files, server, make, keyring):
    for address in server:
        server[address] = EXPECTED + ROGUE
    with make(Machine()).prepared():
        pass
    written = openpgp.binary((files / keyring).read_bytes())
    assert written == openpgp.only(EXPECTED, KEYS)


@pytest.mark.parametrize(("make", "keyring"), [(apt, "APT_KEYRING"), (dnf, "DNF_KEYRING")])
def test_a_keyring_that_an_earlier_run_trusted_on_first_use_is_replaced(
    files, server, make, keyring
):
    (files / keyring).write_bytes(ROGUE)
    assert not make(Machine()).ready()
    with make(Machine()).prepared():
        pass
    assert openpgp.binary((files / keyring).read_bytes()) == openpgp.only(EXPECTED, KEYS)
    assert make(Machine()).ready()


def test_nor_is_one_that_was_of_no_use(files, server):
    with pytest.raises(InstallError, match="has no tailscale"), apt(Machine()).prepared():
        apt(Machine()).choose("1.2.3")
    assert os.listdir(files) == []


def test_only_versions_of_this_repository_count_the_newest_first(files):
    said = (
        f"tailscale | 1.98.1 | {URL}/debian bookworm/main amd64 Packages\n"
        f"tailscale | 1.102.5 | {URL}/debian bookworm/main amd64 Packages\n"
        " tailscale | 9.9.9 | https://elsewhere/debian bookworm/main amd64 Packages\n"
    )
    source = apt(Machine(apt_cache_madison=(0, said, "")))
    assert source.available() == ["1.102.5", "1.98.1"]
    assert source.choose("latest") == source.choose("") == "1.102.5"
    assert source.choose("1.98.1") == "1.98.1"
    with pytest.raises(InstallError, match=r"has no 1.2.3; it has 1.102.5, 1.98.1"):
        source.choose("1.2.3")


def test_a_repository_without_the_package_is_said_to_be_so(files):
    with pytest.raises(InstallError, match=r"stable/debian has no tailscale for this node"):
        apt(Machine()).choose("latest")


def test_the_packages_scripts_start_and_stop_nothing(files):
    machine = Machine()
    apt(machine).install("1.102.5")
    assert machine.environment["SYSTEMD_OFFLINE"] == "1"
    assert "tailscale=1.102.5" in machine.ran[0]
    assert "--allow-downgrades" in machine.ran[0]


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ((0, "installed 1.102.5", ""), "1.102.5"),
        ((0, "config-files 1.98.1", ""), ""),
        ((1, "", "no packages found"), ""),
    ],
)
def test_what_apt_has_installed(files, said, version):
    assert apt(Machine(dpkg_query=said)).installed() == version


def test_dnf_is_given_the_repository_with_its_checks_on(files, server):
    source = dnf(Machine())
    assert not source.ready()
    with source.prepared():
        pass
    written = (files / "DNF_REPO").read_text().splitlines()
    assert f"baseurl={URL}/rhel/9/$basearch" in written
    assert {"repo_gpgcheck=1", "gpgcheck=1", f"gpgkey=file://{files}/DNF_KEYRING"} <= set(written)
    assert source.ready()
    assert source.lacking() == {}


@pytest.mark.parametrize(
    ("have", "verb"), [("", "install"), ("1.98.1", "install"), ("1.104.0", "downgrade")]
)
def test_dnf_upgrades_and_downgrades_to_the_version_asked_for(files, have, verb):
    machine = Machine(rpm=(0 if have else 1, have, ""))
    dnf(machine).install("1.102.5")
    assert machine.ran[-1][-2:] == [verb, "tailscale-1.102.5"]
    assert machine.environment["SYSTEMD_OFFLINE"] == "1"
