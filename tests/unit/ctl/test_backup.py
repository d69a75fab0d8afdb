"""headcnictl backup and restore: backups that are not of this node, damaged, or of other releases.

tests/daemon has pods that run, and restores that are interrupted.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sqlite3
import tarfile

import pytest

from headcni import schema
from headcni.ctl import backup, new_file, restore
from headcni.ctl import main as ctl
from headcni.database import FILE_NAME
from headcni.store import Store


@pytest.fixture
def node(tmp_path, monkeypatch, capsys):
    """A node with a store, settings, no conflist and no pods."""
    monkeypatch.setattr(restore, "running", lambda _unused: {})

    class Node:
        config, data, file = tmp_path / "config.yaml", tmp_path / "data", tmp_path / "b.tar.gz"

        def configure(self, cidr: str = "10.9.1.0/24") -> None:
            sections = {
                "daemon": {"socket": f"{tmp_path}/cni.sock", "dataDir": str(self.data)},
                "network": {"podCIDR": {"nodeLocal": cidr}},
            }
            self.config.write_text(json.dumps(sections))

        def __call__(self, *words: object) -> tuple[int, str]:
            where = ["--config", str(self.config), "--cni-dir", str(tmp_path / "net.d")]
            code = ctl.main([*map(str, words), *where])
            said = capsys.readouterr()
            return code, said.out + said.err

    made = Node()
    made.configure()
    Store.in_directory(str(made.data)).close()
    assert made("backup", made.file)[0] == 0
    return made


def rewritten(node, change) -> None:
    """The backup with other members."""
    with tarfile.open(node.file) as archive:
        members = {one.name: archive.extractfile(one).read() for one in archive}
    change(members)
    with tarfile.open(node.file, "w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def manifest(**changes: object):
    def change(members: dict[str, bytes]) -> None:
        members[backup.MANIFEST] = json.dumps(
            {**json.loads(members[backup.MANIFEST]), **changes}
        ).encode()

    return change


def test_what_is_restored_is_what_was_backed_up(node):
    text = node.config.read_text()
    node.config.write_text(text.replace("network", "x-network"))
    code, said = node("restore", node.file)
    assert code == 0, said
    assert node.config.read_text() == text
    assert "systemctl start headcni-daemon" in said


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (manifest(node="other-node"), "it is of node other-node"),
        (manifest(pod_cidrs=["10.9.2.0/24"]), "its pod CIDR is 10.9.2.0/24"),
        (manifest(data_dir="/elsewhere"), "its daemon.dataDir is /elsewhere"),
        (manifest(format=2), "format 2 is of another release"),
        (manifest(files={}), "not a complete backup"),
        (lambda members: members.pop(FILE_NAME), "headcni.db missing"),
        (lambda members: members.update({FILE_NAME: b"x"}), "headcni.db has been changed"),
        (lambda members: members.update({"config.yaml": b"x"}), "config.yaml has been changed"),
        (lambda members: members.update({"../evil": b"x"}), "not a complete backup"),
        (lambda members: members.pop(backup.MANIFEST), "is not expected there"),
        (manifest(files=None), "not a complete backup"),
    ],
)
def test_a_backup_that_does_not_fit_is_refused_and_changes_nothing(node, change, told):
    rewritten(node, change)
    before = node.config.read_text()
    for words in (("--check",), ()):
        code, said = node("restore", node.file, *words)
        assert code == 1
        assert told in said
    assert node.config.read_text() == before
    assert not (node.data / restore.FOLDER).exists()
    assert not list(node.data.glob("before-restore-*"))


@pytest.mark.parametrize("size", [0, 10, 500, -500])
def test_a_file_that_is_cut_or_no_backup_is_refused(node, size):
    node.file.write_bytes(node.file.read_bytes()[:size])
    assert node("restore", node.file)[0] == 1
    node.file.write_bytes(b"x" * 5000)
    assert node("restore", node.file)[0] == 1
    assert node("restore", node.file.with_name("none"))[0] == 3


def test_a_store_of_a_newer_release_is_refused(node):
    with sqlite3.connect(node.data / FILE_NAME) as db:
        db.execute(f"PRAGMA user_version = {len(schema.MIGRATIONS) + 1}")
    node.file.unlink()
    assert node("backup", node.file)[0] == 0
    with sqlite3.connect(node.data / FILE_NAME) as db:
        db.execute(f"PRAGMA user_version = {len(schema.MIGRATIONS)}")
    code, said = node("restore", node.file)
    assert code == 1
    assert f"schema {len(schema.MIGRATIONS) + 1}" in said


def test_settings_with_mistakes_are_refused(node):
    node.file.unlink()
    text = node.config.read_text()
    node.config.write_text(text)
    assert node("backup", node.file)[0] == 0

    def change(members: dict[str, bytes]) -> None:
        import hashlib

        wrong = members["config.yaml"].replace(b"network", b"networks")
        members["config.yaml"] = wrong
        known = json.loads(members[backup.MANIFEST])
        known["files"]["config.yaml"] = hashlib.sha256(wrong).hexdigest()
        members[backup.MANIFEST] = json.dumps(known).encode()

    rewritten(node, change)
    code, said = node("restore", node.file)
    assert code == 1
    assert "the backup's config.yaml is not valid here: networks" in said


def test_a_backup_from_before_a_reboot_has_no_pods_any_more(node):
    with Store.in_directory(str(node.data), "an earlier boot") as store, store.transaction() as db:
        db.execute(
            "INSERT INTO allocation VALUES (?, 'pods', 'old', 'eth0', 0, 24, NULL, '', 1)",
            (bytes([10, 9, 1, 5]),),
        )
    node.file.unlink()
    assert node("backup", node.file)[0] == 0
    assert node("restore", node.file)[0] == 0
    with Store.in_directory(str(node.data)) as store:
        assert store.read(lambda db: db.execute("SELECT * FROM allocation").fetchall()) == []


def test_without_a_store_there_is_nothing_to_back_up(node):
    (node.data / FILE_NAME).unlink()
    file = node.file.with_name("second")
    code, said = node("backup", file)
    assert code == 1 and "there is no store" in said
    assert not file.exists()


def test_a_broken_store_is_replaced_by_the_backups(node):
    (node.data / FILE_NAME).write_bytes(b"broken" * 1000)
    file = node.file.with_name("second")
    assert node("backup", file)[0] == 1
    assert not file.exists()
    assert node("restore", "--check", node.file)[0] == 0
    assert (node.data / FILE_NAME).read_bytes().startswith(b"broken")
    code, said = node("restore", node.file)
    assert code == 0, said


def test_copies_of_the_store_are_beside_it_and_removed_by_the_next_command(node):
    """A killed command cannot remove its copy. One that runs keeps its own."""
    killed = node.data / "copy-killed"
    killed.mkdir()
    (killed / FILE_NAME).write_bytes(b"secret")
    outside = node.data.parent / "outside"
    outside.mkdir()
    (node.data / "copy-link").symlink_to(outside)
    with new_file.scratch(str(node.data)) as running:
        assert not killed.exists()
        for words in (("--check",), ()):
            assert node("restore", node.file, *words)[0] == 0
        assert [one.name for one in node.data.glob("copy-*") if not one.is_symlink()] == [
            os.path.basename(running)
        ]
        assert os.stat(running).st_mode & 0o777 == 0o700
    assert outside.is_dir()
    assert not os.path.exists(running)


def test_a_check_on_a_node_without_a_store_leaves_nothing(node):
    shutil.rmtree(node.data)
    assert node("restore", node.file, "--check")[0] == 0
    assert not node.data.exists()


def test_a_restore_that_was_killed_while_it_removed_its_files_is_finished(node, monkeypatch):
    """All is in place. The next restore must not look for files that are gone."""

    really = shutil.rmtree

    def killed(folder: str, **options: bool) -> None:
        if os.path.basename(folder) == restore.FOLDER:
            os.unlink(os.path.join(folder, "config.yaml"))
            raise KeyboardInterrupt
        really(folder, **options)

    with monkeypatch.context() as patched:
        patched.setattr(restore.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            node("restore", node.file)
    assert (node.data / restore.FOLDER).exists()
    code, said = node("restore", node.file)
    assert code == 0, said
    assert "an interrupted restore was finished" in said
    assert not (node.data / restore.FOLDER).exists()


ALLOCATION = "INSERT INTO allocation VALUES ({}, 'pods', 'c', 'eth0', 0, 24, NULL, '', 1)"


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TRIGGER t AFTER DELETE ON conflict BEGIN DELETE FROM allocation; END",
        "DROP TABLE tombstone; CREATE VIEW tombstone AS SELECT 1 AS network",
        'ALTER TABLE port ADD COLUMN "x) VALUES (1) --" TEXT',
        "DROP TABLE port",
        ALLOCATION.format("'10.9.1.5'"),
        ALLOCATION.format("168362245"),
        ALLOCATION.format("x'0a0901'"),
        "INSERT INTO tombstone VALUES (x'00', 'c', 'eth0', 'x')",
    ],
)
def test_a_store_that_headcni_has_not_written_is_refused(node, sql):
    """An address in another form would be given out again."""
    node.file.unlink()
    with sqlite3.connect(node.data / FILE_NAME) as db:
        db.executescript(sql)
    assert node("backup", node.file)[0] == 0
    shutil.rmtree(node.data)
    Store.in_directory(str(node.data)).close()
    for words in (("--check",), ()):
        code, said = node("restore", node.file, *words)
        assert code == 1, said
        assert "is not as HeadCNI writes it" in said
    with Store.in_directory(str(node.data)) as store:
        assert store.read(lambda db: db.execute("SELECT * FROM allocation").fetchall()) == []
