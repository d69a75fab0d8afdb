"""Releases on a node: whole or not there, switched in one step, and gone without a trace."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import node_release, node_shim
from ansible_collections.headcni.mesh.plugins.module_utils.node_release import (
    Release,
    ReleaseError,
    Steps,
    Wanted,
)

PLUGIN = 'print(\'{"supportedVersions": ["1.0.0"]}\')\n'
TAG = sys.implementation.cache_tag
# A daemon whose rules the node does not take.
REFUSED = """
import sys
refused = "--check-firewall" in sys.argv
print("rules refused" if refused else "1.0.0")
sys.exit(refused)
"""
# A daemon of a release that knows nothing of it.
OLDER = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--version", action="version", version="1.0.0")
parser.parse_args()
"""


class Tarball:
    """A release at its smallest, of which a test can spoil what it likes."""

    def __init__(self, path, version="1.0.0", **changes):
        files = {
            "bin/headcni": PLUGIN,
            "bin/headcni-daemon": f"print('{version}')\n",
            "bin/headcni-ipam": "",
            "bin/headcnictl": "",
            "headcni/__init__.py": "",
            "headcni/shim.py": "",
            "vendor/some.py": "",
            "units/headcni-daemon.service": f"# {version}\n",
            "VERSION": f"{version}\n",
            **changes,
        }
        self.version, self.path = version, str(path)
        with tarfile.open(path, "w:gz") as archive:
            for name, text in files.items():
                entry = tarfile.TarInfo(f"headcni-runtime-{version}/{name}")
                entry.size, entry.mode = (
                    len(text),
                    0o755 if name.startswith(("bin/", "native/")) else 0o644,
                )
                archive.addfile(entry, io.BytesIO(text.encode()))
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()

    def install(self, root) -> Release:
        return node_release.install(self.path, self.version, self.digest, str(root), sys.executable)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "opt"


@pytest.fixture
def wanted(tmp_path):
    return Wanted(
        bin_dirs=[str(tmp_path / "cni")],
        command_dir=str(tmp_path / "bin"),
        unit_dir=str(tmp_path / "systemd"),
        plugin_dirs=[str(tmp_path / "distribution")],
    )


def test_a_release_is_unpacked_compiled_and_named_after_its_version(root, tmp_path):
    made = Tarball(tmp_path / "t.tar.gz").install(root)
    assert (made.name, made.version) == ("1.0.0", "1.0.0")
    assert node_release.installed(str(root)) == [made]
    assert node_release.is_compiled(made, node_release.ask_python(sys.executable))
    cached = f"{made.path}/headcni/__pycache__/shim.{TAG}.pyc"
    with open(cached, "rb") as file:
        compiled = file.read()
    assert compiled[4:8] == b"\x01\0\0\0"  # by its hash, never checked
    assert ".unfinished" not in compiled.decode("latin-1")
    assert stat.S_IMODE(os.stat(f"{made.path}/bin/headcni").st_mode) == 0o755


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bin/headcni": "raise SystemExit('broken')"}, "does not run on this node"),
        ({"bin/headcni": "print('{}')"}, "does not run on this node"),
        ({"bin/headcni-daemon": "print('0.9')"}, "does not run on this node"),
        (
            {"bin/headcni-daemon": REFUSED},
            "pods of the release could not be networked on this node: rules refused",
        ),
        ({"headcni/shim.py": "def"}, "does not compile"),
        ({"VERSION": "2.0.0\n"}, "version: the tarball holds 2.0.0, expected 1.0.0"),
        ({"../../outside": ""}, "not a release of ours"),
    ],
)
def test_a_release_that_is_not_good_leaves_nothing_behind(root, tmp_path, changes, said):
    with pytest.raises(ReleaseError, match=said):
        Tarball(tmp_path / "t.tar.gz", **changes).install(root)
    assert os.listdir(root / "releases") == []
    assert not (tmp_path / "outside").exists()


def test_a_release_that_cannot_try_its_rules_is_installed_all_the_same(root, tmp_path):
    Tarball(tmp_path / "t.tar.gz", **{"bin/headcni-daemon": OLDER}).install(root)
    assert len(os.listdir(root / "releases")) == 1


def test_a_wrong_checksum_is_told_with_both(root, tmp_path):
    tarball = Tarball(tmp_path / "t.tar.gz")
    with pytest.raises(ReleaseError, match=f"checksum: the tarball has {tarball.digest}, expected"):
        node_release.install(tarball.path, "1.0.0", "0" * 64, str(root), sys.executable)
    assert not root.exists()


def test_a_cut_off_tarball_is_told(root, tmp_path):
    whole = Tarball(tmp_path / "t.tar.gz", **{"vendor/random.py": os.urandom(9000).hex()})
    with open(whole.path, "r+b") as file:
        file.truncate(4000)
    digest = hashlib.sha256(Path(whole.path).read_bytes()).hexdigest()
    with pytest.raises(ReleaseError, match="cannot be read"):
        node_release.install(whole.path, "1.0.0", digest, str(root), sys.executable)


def test_a_tarball_that_is_rewritten_after_the_check_is_installed_as_it_was(
    root, tmp_path, monkeypatch
):
    tarball = Tarball(tmp_path / "t.tar.gz")
    evil = Tarball(tmp_path / "evil.tar.gz", **{"vendor/some.py": "evil"})
    sweep = node_release._sweep

    def rewrite_and_sweep(folder: str) -> None:
        Path(tarball.path).write_bytes(Path(evil.path).read_bytes())
        sweep(folder)

    monkeypatch.setattr(node_release, "_sweep", rewrite_and_sweep)
    made = tarball.install(root)
    assert Path(made.path, "vendor/some.py").read_text() == ""


def test_what_a_killed_run_left_is_swept_away(root, tmp_path):
    (root / "releases" / ".unfinished-1.0.0" / "bin").mkdir(parents=True)
    Tarball(tmp_path / "t.tar.gz").install(root)
    assert os.listdir(root / "releases") == ["1.0.0"]


def test_another_build_of_a_version_stands_beside_the_first(root, tmp_path):
    first = Tarball(tmp_path / "a.tar.gz").install(root)
    second = Tarball(tmp_path / "b.tar.gz", **{"vendor/some.py": "x = 1"}).install(root)
    assert second.name == f"1.0.0+{second.digest[:8]}"
    both = node_release.installed(str(root))
    assert node_release.find(both, "1.0.0", second.digest) == second
    assert node_release.find(both, "1.0.0", "") == first
    assert node_release.find(both, "9", "") is None


def test_the_switch_moves_every_link_at_once(root, tmp_path, wanted):
    old = Tarball(tmp_path / "a.tar.gz", "1.0.0").install(root)
    new = Tarball(tmp_path / "b.tar.gz", "2.0.0").install(root)
    node_release.switch(old, str(root))
    node_release.arrange(old, wanted, Steps(), root=str(root))
    program = tmp_path / "cni" / "headcni"
    assert os.path.realpath(program) == f"{old.path}/bin/headcni"
    node_release.switch(new, str(root))
    assert os.path.realpath(program) == f"{new.path}/bin/headcni"
    assert os.readlink(root / "current") == "releases/2.0.0"
    assert node_release.current(str(root)) == new


def test_a_second_arrangement_finds_nothing_to_do(root, tmp_path, wanted):
    release = Tarball(tmp_path / "t.tar.gz").install(root)
    first, second = Steps(), Steps()
    assert node_release.arrange(release, wanted, first, root=str(root)) == [
        "headcni-daemon.service"
    ]
    assert node_release.arrange(release, wanted, second, root=str(root)) == []
    assert first and not second


def test_check_mode_foretells_what_is_then_done(root, tmp_path, wanted):
    native = "#!/bin/sh\necho 'native shim: not in a release'\nexit 1\n"
    name = node_shim.BINARIES[os.uname().machine]
    files = {
        "units/headcni-tailscaled.service": "",
        "bin/loopback": "",
        f"native/{name}": native,
        "native/SHA256SUMS": f"{hashlib.sha256(native.encode()).hexdigest()}  {name}\n",
    }
    tarball = Tarball(tmp_path / "t.tar.gz", **files)
    foretold, done = Steps(), Steps()
    coming = node_release.foretold("1.0.0", tarball.digest, str(root))
    node_release.arrange(coming, wanted, foretold, root=str(root), dry=True)
    assert not (tmp_path / "cni").exists()
    node_release.arrange(tarball.install(root), wanted, done, root=str(root))
    assert foretold.diff() == done.diff()


def test_another_program_of_our_name_is_not_overwritten(root, tmp_path, wanted):
    (tmp_path / "cni").mkdir()
    (tmp_path / "cni" / "headcni").write_text("the Go original")
    release = Tarball(tmp_path / "t.tar.gz").install(root)
    with pytest.raises(ReleaseError, match=r"cni/headcni: not a link of HeadCNI's; move it away"):
        node_release.arrange(release, wanted, Steps(), root=str(root))
    assert not (tmp_path / "cni" / "headcni-ipam").exists()


def test_loopback_is_taken_from_the_distribution_and_given_back(root, tmp_path, wanted):
    (tmp_path / "distribution").mkdir()
    theirs = tmp_path / "distribution" / "loopback"
    theirs.write_text("plugin")
    release = Tarball(tmp_path / "t.tar.gz").install(root)
    node_release.arrange(release, wanted, Steps(), root=str(root))
    assert os.path.realpath(tmp_path / "cni" / "loopback") == str(theirs)
    again = Steps()
    node_release.arrange(release, wanted, again, root=str(root))
    assert not again
    node_release.remove(wanted, Steps(), root=str(root))
    assert not os.path.lexists(tmp_path / "cni" / "loopback")
    assert theirs.read_text() == "plugin"


def test_a_loopback_that_is_there_already_stays(root, tmp_path, wanted):
    (tmp_path / "cni").mkdir()
    (tmp_path / "cni" / "loopback").write_text("theirs")
    release = Tarball(tmp_path / "t.tar.gz", **{"bin/loopback": "ours"}).install(root)
    node_release.arrange(release, wanted, Steps(), root=str(root))
    assert (tmp_path / "cni" / "loopback").read_text() == "theirs"
    assert node_release.loopback_of(wanted, release, str(root)).endswith("cni/loopback")


def test_every_directory_gets_a_loopback_though_one_of_them_has_its_own(root, tmp_path, wanted):
    """A container runtime looks into one of them only: Debian's containerd into /usr/lib/cni."""
    theirs = tmp_path / "usr" / "loopback"
    theirs.parent.mkdir()
    theirs.write_text("theirs")
    both = replace(wanted, bin_dirs=[*wanted.bin_dirs, str(theirs.parent)])
    release = Tarball(tmp_path / "t.tar.gz", **{"bin/loopback": "ours"}).install(root)
    node_release.switch(release, str(root))
    node_release.arrange(release, both, Steps(), root=str(root))
    assert (tmp_path / "cni" / "loopback").read_text() == "theirs"
    assert not theirs.is_symlink()
    again = Steps()
    node_release.arrange(release, both, again, root=str(root))
    assert not again
    node_release.remove(both, Steps(), root=str(root))
    assert not os.path.lexists(tmp_path / "cni" / "loopback") and theirs.exists()


def test_a_release_that_brings_a_loopback_is_the_last_resort(root, tmp_path, wanted):
    release = Tarball(tmp_path / "t.tar.gz", **{"bin/loopback": "ours"}).install(root)
    node_release.switch(release, str(root))
    node_release.arrange(release, wanted, Steps(), root=str(root))
    assert (tmp_path / "cni" / "loopback").read_text() == "ours"


def test_our_own_loopback_is_not_taken_for_the_distributions_by_the_next_run(
    root, tmp_path, wanted
):
    """With /usr/lib/cni among both, as Debian's containerd wants it, it was linked to itself."""
    usr = str(tmp_path / "usr")
    both = replace(wanted, bin_dirs=[*wanted.bin_dirs, usr], plugin_dirs=[usr])
    release = Tarball(tmp_path / "t.tar.gz", **{"bin/loopback": "ours"}).install(root)
    node_release.switch(release, str(root))
    node_release.arrange(release, both, Steps(), root=str(root))
    again = Steps()
    node_release.arrange(release, both, again, root=str(root))
    assert not again
    for folder in ("cni", "usr"):
        assert (tmp_path / folder / "loopback").read_text() == "ours"


def test_old_releases_go_but_never_the_one_in_use_nor_the_one_before(root, tmp_path):
    made = [Tarball(tmp_path / f"{n}.tar.gz", f"{n}.0").install(root) for n in ("1", "2", "3", "4")]
    node_release.switch(made[0], str(root))
    gone = node_release.prune(3, Steps(), root=str(root), spare="2.0")
    assert gone == ["3.0"]
    assert [one.name for one in node_release.installed(str(root))] == ["1.0", "2.0", "4.0"]
    assert node_release.prune(3, Steps(), root=str(root), spare="2.0") == []


def test_removal_takes_all_of_ours_and_nothing_else(root, tmp_path, wanted):
    release = Tarball(tmp_path / "t.tar.gz").install(root)
    node_release.switch(release, str(root))
    node_release.arrange(release, wanted, Steps(), root=str(root))
    (tmp_path / "cni" / "bridge").write_text("theirs")
    node_release.remove(wanted, Steps(), root=str(root))
    assert os.listdir(tmp_path / "cni") == ["bridge"]
    assert os.listdir(tmp_path / "bin") == os.listdir(tmp_path / "systemd") == []
    assert not root.exists()


def test_removal_finds_the_links_in_directories_of_before(root, tmp_path, wanted):
    release = Tarball(tmp_path / "t.tar.gz").install(root)
    node_release.switch(release, str(root))
    node_release.arrange(release, wanted, Steps(), root=str(root))
    elsewhere = replace(
        wanted, bin_dirs=[str(tmp_path / "other")], command_dir=str(tmp_path / "commands")
    )
    node_release.arrange(release, elsewhere, Steps(), root=str(root))
    assert os.listdir(tmp_path / "cni")  # a runtime may still look there, for a DEL
    node_release.remove(elsewhere, Steps(), root=str(root))
    for folder in ("cni", "bin", "other", "commands"):
        assert os.listdir(tmp_path / folder) == []


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo '[[3, 8, 1], \"cpython-38\", []]'", r"is Python 3\.8\.1: the runtime needs 3\.9"),
        ('echo \'[[3, 11, 2], "cpython-311", ["sqlite3"]]\'', "lacks sqlite3 of the standard"),
        ("echo broken >&2; exit 1", "does not run: broken"),
    ],
)
def test_an_interpreter_that_will_not_do_is_told(tmp_path, script, said):
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    with pytest.raises(ReleaseError, match=said):
        node_release.ask_python(str(python))


def test_no_interpreter_at_all_is_told(tmp_path):
    with pytest.raises(ReleaseError, match=r"is not there: the runtime needs Python 3\.9"):
        node_release.ask_python(str(tmp_path / "python3"))


@pytest.mark.parametrize("name", ["", "../../etc", "a/b", ".hidden", "1 0"])
def test_a_version_that_is_no_name_is_refused(name):
    with pytest.raises(ReleaseError, match="version"):
        node_release.check_name(name)
