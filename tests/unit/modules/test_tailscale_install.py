"""tailscale_install: what is wrong with its options is told at once, before anything else."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_module import Failed, run

RIGHT: dict[str, Any] = {"version": "1.102.5"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"version": ""}, "version: '' is no version: expected such as 1.102.5 (method tarball"),
        ({"version": "latest"}, "version: 'latest' is no version"),
        ({"version": "1.102"}, "version: '1.102' is no version"),
        ({"version": "v1.102.5"}, "version: 'v1.102.5' is no version"),
        ({"version": "../../x"}, "version: '../../x' is no version"),
        ({"version": "new", "method": "package"}, "expected such as 1.102.5, latest, or none"),
        ({"method": "snap"}, "value of method must be one of: package, tarball, files"),
        ({"service": "on"}, "value of service must be one of: managed, none"),
        ({"port": 0}, "port: 0 is no port: expected 1 to 65535"),
        ({"port": 70000}, "port: 70000 is no port"),
        ({"timeout": 0}, "timeout: 0 is too short"),
        ({"url": "pkgs.tailscale.com"}, "url: 'pkgs.tailscale.com' is no address"),
        ({"repository_url": "ftp://x"}, "repository_url: 'ftp://x' is no address"),
        ({"checksum": "abc"}, "checksum: 'abc' is no SHA-256"),
        ({"environment": {"A-B": "x"}}, "environment: 'A-B' is no name of a variable"),
        ({"environment": {"PORT": "1"}}, "environment.PORT: give the port by the option port"),
        # Before anything is installed for a node that could not join then.
        ({"join": {"hostname": "node_1"}}, "hostname: 'node_1' is no host name"),
        ({"join": {"login_server": "headscale"}}, "login_server: 'headscale' is no address"),
        ({"join": {"tags": ["k8s"]}}, "tags: 'k8s' is no tag: expected tag:NAME"),
        ({"join": {"advertise_routes": ["10.1.2.3/24"]}}, "10.1.2.3/24 has host bits set"),
        ({"join": {"accept_routes": "perhaps"}}, "accept_routes"),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_the_cure(options, said):
    with pytest.raises(Failed) as failed:
        run("tailscale_install", **{**RIGHT, **options})
    assert said in str(failed.value)


def test_all_that_is_wrong_is_told_at_once():
    with pytest.raises(Failed) as failed:
        run("tailscale_install", version="x", port=0, environment={"1": ""}, checksum="y")
    assert str(failed.value).count(";") == 3


def test_what_is_wrong_for_both_is_told_once():
    with pytest.raises(Failed) as failed:
        run("tailscale_install", **RIGHT, timeout=0, join={"timeout": 0})
    assert str(failed.value).count("too short") == 1


def test_other_machines_and_systems_are_refused(monkeypatch):
    module = "ansible_collections.headcni.mesh.plugins.module_utils.tailscale_installation.platform"
    monkeypatch.setattr(f"{module}.machine", lambda: "sparc64")
    with pytest.raises(Failed, match="this node's architecture is 'sparc64'"):
        run("tailscale_install", True, **RIGHT)
    monkeypatch.setattr(f"{module}.system", lambda: "Darwin")
    with pytest.raises(Failed, match="this node runs Darwin: only Linux is supported"):
        run("tailscale_install", True, **RIGHT)


def test_a_proxys_password_is_shown_nowhere():
    with pytest.raises(Failed) as failed:
        run(
            "tailscale_install",
            True,
            version="1.102.5",
            url="http://127.0.0.1:9",
            environment={"HTTPS_PROXY": "http://me:hunter22@proxy"},
            service="none",
        )
    assert "hunter22" not in str(failed.value.result)


def test_nor_is_it_where_another_option_is_wrong():
    with pytest.raises(Failed) as failed:
        run("tailscale_install", version="x", environment={"P": "http://me:hunter22@proxy"})
    assert "hunter22" not in str(failed.value.result)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"state": "absent"}, "the package tailscale, which is not removed here: remove it with"),
        ({**RIGHT, "service": "none"}, "the package tailscale, which would put it back"),
    ],
)
def test_the_files_of_a_package_that_only_its_manager_may_change_stay(monkeypatch, options, said):
    """As on Arch, where pacman has them."""
    utils = "ansible_collections.headcni.mesh.plugins.module_utils"
    monkeypatch.setattr(f"{utils}.tailscale_installation.installed_version", lambda: "1.98.1")
    monkeypatch.setattr(
        f"{utils}.package_owner._MANAGERS", (("/bin/sh", ("-c", "echo tailscale"), str),)
    )
    monkeypatch.setattr(f"{utils}.tailscale_packages.read_os_release", lambda: {"ID": "arch"})
    with pytest.raises(Failed, match=said):
        run("tailscale_install", True, **options)
