"""Where the containerd of each Debian says it looks, and where we read that it does."""

from __future__ import annotations

import subprocess

import pytest
import tomllib
from ansible_collections.headcni.mesh.plugins.module_utils.shared import (
    container_runtimes as runtimes,
)
from fake_root import FakeRoot

from lab import image

SECTION = 'plugins."io.containerd.grpc.v1.cri"'
# What says nothing of it.
DEFAULTS = {
    "nothing": "",
    "only a version": "version = 2\n",
    "the new name without a version": f'[{SECTION}.cni]\nbin_dir = "/x"\n',
}
CONFIGS = {
    "version 1": 'version = 1\n[plugins.cri.cni]\nbin_dir = "/x"\nconf_dir = "/y"\n',
    "version 2": f'version = 2\n[{SECTION}.cni]\nbin_dir = "/x"\n',
    "an import": 'version = 2\nimports = ["b.toml"]\n'
    f'[{SECTION}.cni]\nbin_dir = "/x"\nconf_dir = "/y"\n',
    "an import without a version": 'version = 2\nimports = ["b.toml"]\n',
    "CRI turned off": 'version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n',
    "CRI turned off as Docker's package does": 'disabled_plugins = ["cri"]\n',
}
IMPORTED = {
    "an import": f'version = 2\n[{SECTION}.cni]\nbin_dir = "/b"\nconf_dir = "/c"\n',
    "an import without a version": f'[{SECTION}.cni]\nbin_dir = "/b"\nconf_dir = "/c"\n',
}


@pytest.fixture(params=("bullseye", "bookworm", "trixie"))
def debian(request):
    root = image.base_root() if request.param == "bookworm" else image.of_suite(request.param).root
    if not root.exists():
        pytest.skip(f"make cache builds the image of {request.param}")
    return root


def default_of(debian) -> str:
    return "/usr/lib/cni" if debian.name.startswith("trixie") else "/opt/cni/bin"


def effective(debian, path: str) -> dict:
    """The whole configuration, as containerd itself puts it together."""
    command = [debian / "usr/bin/containerd", "--config", path, "config", "dump"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return tomllib.loads(done.stdout)


def read(root: FakeRoot, path: str) -> runtimes.Runtime:
    root.process("containerd", "--config", path)
    (found,) = runtimes.running(str(root))
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_we_read_what_containerd_reads(debian, tmp_path, name):
    folder = tmp_path / "etc"
    root = FakeRoot(tmp_path)
    root.file("/etc/a.toml", CONFIGS[name])
    if name in IMPORTED:
        root.file("/etc/b.toml", IMPORTED[name])
    said = effective(debian, f"{folder}/a.toml")
    found = read(root, "/etc/a.toml")
    assert found.certain
    assert found.serves_pods is not bool(said["disabled_plugins"])
    if found.serves_pods:
        cni = said["plugins"]["io.containerd.grpc.v1.cri"]["cni"]
        assert (found.bin_dirs, found.conf_dir) == ((cni["bin_dir"],), cni["conf_dir"])


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_those_of_the_containerd_that_runs(debian, tmp_path, name):
    """Debian 13's looks in /usr/lib/cni though no file says so."""
    root = FakeRoot(tmp_path)
    root.file("/etc/a.toml", DEFAULTS[name])
    pid = root.process("containerd", "--config", "/etc/a.toml")
    root.link(f"/proc/{pid}/exe", str(debian / "usr/bin/containerd"))
    (found,) = runtimes.running(str(root))
    assert (found.bin_dirs, found.source, found.certain) == ((default_of(debian),), "", True)


def test_how_imports_are_merged_is_asked_of_the_containerd_that_runs(debian, tmp_path):
    root = FakeRoot(tmp_path)
    root.file("/etc/a.toml", f'imports = ["b.toml"]\n{CONFIGS["version 2"]}')
    root.file("/etc/b.toml", f"version = 2\n[{SECTION}]\ndisable_apparmor = true\n")
    pid = root.process("containerd", "--config", "/etc/a.toml")
    assert not runtimes.running(str(root))[0].certain
    root.link(f"/proc/{pid}/exe", str(debian / "usr/bin/containerd"))
    (found,) = runtimes.running(str(root))
    # The whole section was replaced by the imported one.
    assert (found.bin_dirs, found.source, found.certain) == ((default_of(debian),), "", True)


def test_the_packages_own_configuration_leads_to_usr_lib_cni(debian, tmp_path):
    root = FakeRoot(tmp_path)
    root.file("/etc/a.toml", (debian / "etc/containerd/config.toml").read_text())
    found = read(root, "/etc/a.toml")
    assert (found.bin_dirs, found.conf_dir) == (("/usr/lib/cni",), "/etc/cni/net.d")
