"""tailscale_install: what is wrong with its options is told at once, before anything else."""

from __future__ import annotations

import hashlib
import http.server
import importlib
import io
import platform
import runpy
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tailscale_checksums
from ansible_collections.headcni.mesh.plugins.module_utils.tailscale_checksums import KNOWN
from ansible_collections.headcni.mesh.plugins.module_utils.tailscale_release import (
    architecture,
    checksum_of,
)
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
        ({"checksums": {"t.tgz": "abc"}}, "checksums.t.tgz: 'abc' is no SHA-256"),
        ({"repository_keys": ["957F5868"]}, "repository_keys: '957F5868' is no fingerprint"),
        ({"repository_keys": [], "method": "package"}, "repository_keys: empty, expected the"),
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
            url="https://127.0.0.1:9",
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


# The attack: a local user owns the tarball's inode and keeps it open.

INSTALLATION = "ansible_collections.headcni.mesh.plugins.module_utils.tailscale_installation"
RELEASE = "ansible_collections.headcni.mesh.plugins.module_utils.tailscale_release"


@pytest.fixture
def places(tmp_path, monkeypatch) -> Path:
    """A bare node's folders. Its programs are scripts, which count as made for this node."""
    for name, path in (("CLI", "bin/tailscale"), ("DAEMON", "sbin/tailscaled")):
        for module in (INSTALLATION, RELEASE):
            monkeypatch.setattr(f"{module}.{name}", str(tmp_path / path))
    monkeypatch.setattr(f"{RELEASE}.elf_machine", lambda _: architecture(platform.machine()))
    monkeypatch.setattr(f"{INSTALLATION}.installed_version", lambda: "")
    return tmp_path


def tarball(program: str) -> bytes:
    made = io.BytesIO()
    texts = {
        "tailscale": program,
        "tailscaled": program,
        "systemd/tailscaled.service": "[Unit]\n",
        "systemd/tailscaled.defaults": "PORT=1\n",
    }
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, text in texts.items():
            entry = tarfile.TarInfo(f"tailscale/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return made.getvalue()


GOOD, EVIL = (tarball(f"#!/bin/sh\necho 1.102.5 # {kind}\n") for kind in ("good", "evil"))
FROM_FILE: dict[str, Any] = {**RIGHT, "method": "files", "service": "none"}


def test_a_tarball_that_a_local_user_rewrites_after_the_check_does_not_become_root(
    places, tmp_path, monkeypatch
):
    source = tmp_path / "t.tgz"
    source.write_bytes(GOOD)
    verify = importlib.import_module(INSTALLATION).verify
    with source.open("r+b") as attacker:

        def verify_then_rewrite(*arguments: Any) -> None:
            verify(*arguments)
            attacker.truncate()
            attacker.write(EVIL)
            attacker.flush()

        monkeypatch.setattr(f"{INSTALLATION}.verify", verify_then_rewrite)
        digest = hashlib.sha256(GOOD).hexdigest()
        run("tailscale_install", **FROM_FILE, src=str(source), checksum=digest)
    assert source.read_bytes() == EVIL
    assert "good" in (places / "sbin/tailscaled").read_text()


def test_without_a_checksum_a_tarball_that_others_may_change_is_refused(places, tmp_path):
    source = tmp_path / "t.tgz"
    source.write_bytes(EVIL)
    source.chmod(0o666)
    # Its checksum lies beside it, where others may write, too.
    (tmp_path / "t.tgz.sha256").write_text(hashlib.sha256(EVIL).hexdigest())
    with pytest.raises(Failed, match=rf"src: users other than root may change {source}: give the"):
        run("tailscale_install", **FROM_FILE, src=str(source))
    assert not (places / "sbin").exists()


# The attack: somebody between the node and the mirror changes the tarball and its checksum.


class Mirror(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        digest = hashlib.sha256(EVIL).hexdigest().encode()
        body = digest if self.path.endswith(".sha256") else EVIL
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def mirror() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/stable"
        server.shutdown()


def test_a_maintainer_fills_the_table_of_sums_and_the_other_versions_stay(mirror, tmp_path):
    old = "KNOWN: dict[str, dict[str, str]] = {\n    '1.0.0': {'arm': '00'},\n}\n"
    (tmp_path / "table.py").write_text(old)
    tailscale_checksums.fill("1.102.5", mirror, tmp_path / "table.py")
    digest = hashlib.sha256(EVIL).hexdigest()
    found = runpy.run_path(str(tmp_path / "table.py"))["KNOWN"]
    assert found == {
        "1.0.0": {"arm": "00"},
        "1.102.5": dict.fromkeys(tailscale_checksums.PUBLISHED, digest),
    }


def test_the_table_of_sums_is_as_the_maintainers_script_writes_it():
    text = tailscale_checksums.TABLE.read_text()
    if KNOWN:
        assert text.endswith(tailscale_checksums.written(KNOWN))
    assert all(checksum_of(one, "") for by_arch in KNOWN.values() for one in by_arch.values())


NAME = f"tailscale_1.102.5_{architecture(platform.machine())}.tgz"


@pytest.mark.parametrize("check", [True, False])
def test_what_comes_over_http_without_a_checksum_is_refused(places, mirror, check):
    said = rf"url: {mirror} is read over http, .*no checksum is known for {NAME}: .*tailscale_che"
    with pytest.raises(Failed, match=said):
        run("tailscale_install", check, **RIGHT, url=mirror, service="none")
    assert not (places / "sbin").exists()


def test_nor_is_a_site_trusted_whose_certificate_is_not_checked(places):
    with pytest.raises(Failed, match="read without a check of its certificate"):
        run(
            "tailscale_install",
            **RIGHT,
            url="https://127.0.0.1:9",
            validate_certs=False,
            service="none",
        )


def test_a_checksum_makes_http_safe(places, mirror):
    over_http = {**RIGHT, "url": mirror, "service": "none"}
    with pytest.raises(Failed, match="it is damaged, or not what was asked for"):
        run("tailscale_install", **over_http, checksums={NAME: hashlib.sha256(GOOD).hexdigest()})
    assert not (places / "sbin").exists() or not list((places / "sbin").iterdir())
    run("tailscale_install", **over_http, checksums={NAME: hashlib.sha256(EVIL).hexdigest()})
    assert "evil" in (places / "sbin/tailscaled").read_text()


def test_a_sum_that_comes_with_the_collection_is_believed_rather_than_the_server(
    places, mirror, monkeypatch
):
    known = {"1.102.5": {architecture(platform.machine()): hashlib.sha256(GOOD).hexdigest()}}
    monkeypatch.setattr(f"{INSTALLATION}.KNOWN", known)
    with pytest.raises(Failed, match=hashlib.sha256(GOOD).hexdigest()):
        run("tailscale_install", **RIGHT, url=mirror, service="none")
