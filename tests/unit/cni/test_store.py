"""The store: what it keeps, what a reboot ends, and that no damage can wedge a node."""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import stat
import threading
import time
from contextlib import closing
from ipaddress import ip_address
from pathlib import Path

import pytest

from headcni import database, errors, schema
from headcni.ipam.allocate import Ipam
from headcni.model import LeasedAddress, PodRef
from headcni.store import Attachment, PluginState, Store, Tombstone
from tests.unit.cni.ipam_support import addresses, audit, ipam_config, nobody_has, owner

WEB = PodRef("default", "web-0", "4f1c")


def attachment(container_id: str, **changes: object) -> Attachment:
    values = {
        "owner": owner(container_id),
        "pod": WEB,
        "netns": "/run/netns/x",
        "host_ifname": "hc0123",
        "config": {"name": "pods", "type": "headcni"},
        "result": {"cniVersion": "1.1.0", "ips": [{"address": "10.1.2.3/24"}]},
        "state": {"ports": [8080]},
        "created": 17.5,
    }
    return Attachment(**{**values, **changes})


def leased(text: str) -> LeasedAddress:
    return LeasedAddress(ip_address(text), 24, ip_address("10.1.2.1"))


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "data" / "headcni.db")


@pytest.fixture
def store(path):
    with Store(path, boot_id="boot-1") as opened:
        yield opened


def spoil(path: str, start: int = 0, text: bytes = b"this is no database ") -> None:
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(text * 4000)


def broken_files(path: str) -> list[str]:
    folder = Path(path).parent
    return sorted(
        f.name for f in folder.glob("*.broken-*") if not f.name.endswith(("-wal", "-shm"))
    )


def test_an_attachment_is_found_again_as_it_was(store):
    store.remember(attachment("c1"))
    assert store.attachment(owner("c1")) == attachment("c1")
    assert store.attachment(owner("c2")) is None
    assert store.attachment(owner("c1", ifname="net1")) is None


def test_remembering_again_replaces(store):
    store.remember(attachment("c1"))
    store.remember(attachment("c1", netns="/run/netns/y"))
    assert [known.netns for known in store.attachments()] == ["/run/netns/y"]


def test_an_attachment_without_a_time_gets_the_present_one(store):
    before = time.time()
    store.remember(attachment("c1", created=0.0))
    assert before <= store.attachment(owner("c1")).created <= time.time()


def test_forgetting_says_whether_there_was_anything(store):
    store.remember(attachment("c1"))
    assert store.forget(owner("c1")) is True
    assert store.forget(owner("c1")) is False
    assert store.attachments() == []


def test_a_tombstone_takes_the_attachments_place_until_it_is_forgotten(store):
    store.remember(attachment("c1"))
    store.bury(Tombstone(owner("c1"), 17))
    assert store.attachments() == []
    assert store.tombstones() == [Tombstone(owner("c1"), 17)]
    store.bury(Tombstone(owner("c1"), 18))
    assert store.tombstones() == [Tombstone(owner("c1"), 18)]
    assert store.forget(owner("c1")) is False
    assert store.tombstones() == []


def test_a_reboot_ends_tombstones(path):
    with Store(path, boot_id="boot-1") as before:
        before.bury(Tombstone(owner("c1"), 17))
    with Store(path, boot_id="boot-2") as after:
        assert after.tombstones() == []


def test_a_store_of_the_release_without_tombstones_gets_them(path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:1])
        with Store(path, boot_id="boot-1") as before:
            before.remember(attachment("c1"))
    with Store(path, boot_id="boot-1") as after:
        assert after.lost is None
        assert after.attachment(owner("c1")) == attachment("c1")
        after.bury(Tombstone(owner("c1"), 17))
    with monkeypatch.context() as patch:  # and after a roll-back it is still read
        patch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:1])
        with Store(path, boot_id="boot-1") as rolled_back:
            assert rolled_back.lost is None


def test_ranges_of_the_older_table_are_kept_until_a_reboot(path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:2])
        with Store(path, boot_id="boot-1") as before, before.transaction() as db:
            row = ("pods", '["10.55.1.0/24"]', "[]", '["10.55.0.0/16"]')
            db.execute("INSERT INTO firewall VALUES (?, ?, ?, ?)", row)
    with Store(path, boot_id="boot-1") as after, after.transaction() as db:
        needs = db.execute("SELECT network, ranges FROM firewall_need").fetchall()
        ranges = {"pods": ["10.55.1.0/24"], "masqueraded": [], "cluster": ["10.55.0.0/16"]}
        assert needs == [("pods", json.dumps(ranges, sort_keys=True))]
    with Store(path, boot_id="boot-2") as rebooted, rebooted.transaction() as db:
        assert db.execute("SELECT * FROM firewall_need").fetchall() == []
        assert db.execute("SELECT * FROM firewall").fetchall() == []


def test_attachments_are_listed_by_network(store):
    store.remember(attachment("c1"))
    store.remember(attachment("c1", owner=owner("c1", "blue", "net1"), created=18.5))
    store.remember(attachment("c2", created=19.5))
    assert [known.owner.container_id for known in store.attachments("pods")] == ["c1", "c2"]
    assert len(store.attachments()) == 3
    assert [known.owner.network for known in store.attachments()] == ["pods", "blue", "pods"]


def test_what_was_written_is_there_after_closing(path):
    with Store(path, boot_id="boot-1") as first:
        first.remember(attachment("c1"))
    with Store(path, boot_id="boot-1") as second:
        assert second.attachment(owner("c1")) == attachment("c1")


def test_plugin_states_come_back_in_the_order_of_the_chain(store):
    for index in (2, 0, 1):
        store.save_plugin_state(
            owner("c1"), PluginState(index, f"step{index}", {"n": index}, {"ips": []})
        )
    assert [state.type for state in store.plugin_states(owner("c1"))] == ["step0", "step1", "step2"]
    assert store.plugin_states(owner("c1"))[1] == PluginState(1, "step1", {"n": 1}, {"ips": []})


def test_plugin_states_are_dropped_one_by_one(store):
    for index in range(3):
        store.save_plugin_state(owner("c1"), PluginState(index, "x", {}, {}))
    store.save_plugin_state(owner("c2"), PluginState(0, "x", {}, {}))
    store.drop_plugin_state(owner("c1"), 2)
    assert [state.index for state in store.plugin_states(owner("c1"))] == [0, 1]
    for index in (0, 1):
        store.drop_plugin_state(owner("c1"), index)
    assert store.plugin_states(owner("c1")) == []
    assert store.owners_with_plugin_states("pods") == [owner("c2")]


def test_only_root_can_read_the_store(path, store):
    store.remember(attachment("c1"))
    files = list(Path(path).parent.iterdir())
    assert stat.S_IMODE(os.stat(Path(path).parent).st_mode) == 0o700
    assert len(files) >= 3
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_the_boot_id_is_the_kernels_unless_given(path):
    with Store(path) as store:
        assert store.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_a_reboot_ends_allocations_and_attachments(path):
    config = ipam_config(subnet="10.1.2.0/29")
    with Store(path, boot_id="boot-1") as before:
        before.remember(attachment("c1"))
        Ipam(before).allocate(owner("c1"), config, "", nobody_has)
    with Store(path, boot_id="boot-2") as after:
        assert after.attachments() == []
        assert Ipam(after).leases("pods") == []
        assert after.lost is None
        for number in range(5):
            Ipam(after).allocate(owner(f"new{number}"), config, "", nobody_has)
        audit(after)


def test_a_late_del_after_a_reboot_still_finds_the_states_of_its_delegates(path):
    with Store(path, boot_id="boot-1") as before:
        before.save_plugin_state(owner("c1"), PluginState(0, "bridge", {"a": 1}, {}))
    with Store(path, boot_id="boot-2") as after:
        assert [state.type for state in after.plugin_states(owner("c1"))] == ["bridge"]
        after.drop_plugin_state(owner("c1"), 0)
    with Store(path, boot_id="boot-3") as later:
        assert later.plugin_states(owner("c1")) == []


def test_a_new_chain_under_an_old_id_does_not_inherit_the_steps_of_the_old_boot(path):
    with Store(path, boot_id="boot-1") as before:
        for index in range(3):
            before.save_plugin_state(owner("c1"), PluginState(index, "old", {}, {}))
    with Store(path, boot_id="boot-2") as after:
        after.save_plugin_state(owner("c1"), PluginState(0, "new", {}, {}))
        assert [state.type for state in after.plugin_states(owner("c1"))] == ["new"]


def test_states_whose_del_never_came_go_at_a_reboot_after_a_month(path, monkeypatch):
    with Store(path, boot_id="boot-1") as before:
        before.save_plugin_state(owner("c1"), PluginState(0, "old", {}, {}))
    now = time.time()
    monkeypatch.setattr(database.time, "time", lambda: now + 31 * 86400)
    with Store(path, boot_id="boot-2") as after:
        assert after.plugin_states(owner("c1")) == []


def test_several_processes_may_open_after_a_reboot_and_one_cleans_up(path):
    with Store(path, boot_id="boot-1") as before:
        before.remember(attachment("c1"))
    with Store(path, boot_id="boot-2") as first:
        first.remember(attachment("c2"))
        with Store(path, boot_id="boot-2") as second:
            assert [known.owner.container_id for known in second.attachments()] == ["c2"]


def test_a_transaction_that_fails_leaves_nothing(store):
    with pytest.raises(RuntimeError), store.transaction():
        store.remember(attachment("c1"))
        store.save_plugin_state(owner("c1"), PluginState(0, "x", {}, {}))
        raise RuntimeError
    assert store.attachments() == []
    assert store.plugin_states(owner("c1")) == []


def test_an_error_in_the_body_of_a_transaction_is_not_taken_for_the_stores(store):
    with pytest.raises(FileNotFoundError), store.transaction():
        os.stat("/nowhere/at/all")


def test_threads_share_one_store(store):
    config = ipam_config(subnet="10.1.2.0/24")
    seen, failed = [], []

    def work(number: int) -> None:
        try:
            for turn in range(10):
                holder = owner(f"c{number}-{turn}")
                seen.extend(addresses(Ipam(store).allocate(holder, config, "", nobody_has)))
                store.remember(attachment("c", owner=holder))
        except BaseException as problem:
            failed.append(problem)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(set(seen)) == len(seen) == 80
    assert len(store.attachments()) == 80
    audit(store)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: spoil(path),
        lambda path: spoil(path, 4096),
        lambda path: spoil(path, 100, b"\xff"),
        lambda path: os.truncate(path, 0),
        lambda path: os.truncate(path, 4096),
        lambda path: os.truncate(path, 12_000),
        lambda path: Path(path).write_bytes(b"x"),
    ],
    ids=["header", "pages", "schema", "empty", "one page", "torn", "one byte"],
)
def test_a_broken_file_is_set_aside_and_the_store_begins_anew(path, damage):
    with Store(path, boot_id="boot-1") as before:
        for number in range(50):
            before.remember(attachment(f"c{number}"))
    damage(path)
    with Store(path, boot_id="boot-1") as after:
        after.forget(owner("c1"))
        after.remember(attachment("c9"))
        assert [known.owner.container_id for known in after.attachments()] == ["c9"]
        assert after.lost is not None
        assert after.lost.moved_to.endswith(broken_files(path)[0])
        Ipam(after).allocate(owner("c9"), ipam_config(subnet="10.1.2.0/29"), "", nobody_has)
        audit(after)
    assert len(broken_files(path)) == 1


def test_a_file_that_breaks_while_it_is_open_does_not_make_anything_fail(path, store):
    for number in range(50):
        store.remember(attachment(f"c{number}"))
    store.read(lambda db: db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall())
    with store.transaction() as db:
        db.execute("PRAGMA cache_size = 0")
    spoil(path, 4096)
    assert store.plugin_states(owner("c1")) == []
    assert store.forget(owner("c1")) is False or store.lost is None
    assert Ipam(store).release(owner("c1")) is None
    store.attachments()
    assert store.lost is not None
    assert len(broken_files(path)) == 1


def test_every_process_learns_that_the_store_was_lost_until_somebody_recovers(path):
    Store(path, boot_id="boot-1").close()
    spoil(path)
    Store(path, boot_id="boot-1").close()
    with Store(path, boot_id="boot-1") as later:
        assert "not a database" in later.lost.reason
        later.recovered()
    with Store(path, boot_id="boot-1") as last:
        assert last.lost is None


def test_what_was_lost_no_longer_matters_after_a_reboot(path):
    Store(path, boot_id="boot-1").close()
    spoil(path)
    Store(path, boot_id="boot-1").close()
    with Store(path, boot_id="boot-2") as after:
        assert after.lost is None


def test_an_open_store_notices_that_another_process_replaced_the_file(path, store):
    store.remember(attachment("c1"))
    with Store(path, boot_id="boot-1") as other:
        other._open(broken="as if it had found it broken")
        other.remember(attachment("c2"))
    assert [known.owner.container_id for known in store.attachments()] == ["c2"]
    store.remember(attachment("c3"))
    with Store(path, boot_id="boot-1") as other:
        assert len(other.attachments()) == 2
        assert other.lost.reason == "as if it had found it broken"


def test_a_process_that_comes_second_does_not_set_the_new_file_aside(path, store):
    with Store(path, boot_id="boot-1") as other:
        other._open(broken="found first")
        other.remember(attachment("c2"))
        store._open(broken="found second")
        assert [known.owner.container_id for known in store.attachments()] == ["c2"]
    assert len(broken_files(path)) == 1


def test_an_open_store_notices_that_its_file_was_deleted(path, store):
    store.remember(attachment("c1"))
    for file in Path(path).parent.iterdir():
        file.unlink()
    store.remember(attachment("c2"))
    with Store(path, boot_id="boot-1") as other:
        assert [known.owner.container_id for known in other.attachments()] == ["c2"]
        assert other.lost.reason == "the database file was gone"


def test_a_log_left_behind_by_a_deleted_file_is_not_played_into_the_new_one(path, store):
    for number in range(50):
        store.remember(attachment(f"c{number}"))
    assert os.path.getsize(path + "-wal") > 0
    os.unlink(path)
    with Store(path, boot_id="boot-1") as other:
        assert other.attachments() == []
        with other.transaction() as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_only_the_newest_broken_files_are_kept(path):
    for _ in range(6):
        Store(path, boot_id="boot-1").close()
        spoil(path)
    Store(path, boot_id="boot-1").close()
    assert len(broken_files(path)) == database.KEPT_ASIDE


def test_an_unfinished_new_file_is_no_obstacle(path):
    Path(path).parent.mkdir()
    Path(path + ".new").write_bytes(b"half a database")
    Path(path + ".new-wal").write_bytes(b"half a log")
    with Store(path, boot_id="boot-1") as store:
        store.remember(attachment("c1"))
        assert store.lost is None


def test_damaged_json_does_not_stop_a_del(path, store):
    store.remember(attachment("c1"))
    with store.transaction() as db:
        db.execute("UPDATE attachment SET state = '{half', config = '[]'")
    assert store.attachment(owner("c1")).state == {}
    assert store.attachment(owner("c1")).config == {}
    assert store.forget(owner("c1"))


def test_seen_addresses_are_adopted_and_then_not_handed_out(store):
    config = ipam_config(subnet="10.1.2.0/29", strategy="dense-pack")
    ipam = Ipam(store)
    ipam.allocate(owner("c1"), config, "", nobody_has)
    new = store.adopt(owner("c2"), "default/web-0", [leased("10.1.2.3"), leased("10.1.2.2")])
    assert [str(one.address) for one in new] == ["10.1.2.3"]
    assert store.adopt(owner("c2"), "default/web-0", [leased("10.1.2.3")]) == ()
    assert addresses(ipam.allocate(owner("c3"), config, "", nobody_has)) == ["10.1.2.4"]
    assert addresses(ipam.lease(owner("c2"))) == ["10.1.2.3"]
    assert addresses(ipam.lease(owner("c1"))) == ["10.1.2.2"]
    audit(store)
    store.adopt(owner("c2"), "default/web-0", [leased("10.1.2.5")])
    assert addresses(ipam.release(owner("c2"))) == ["10.1.2.3", "10.1.2.5"]
    assert addresses(ipam.allocate(owner("c4"), config, "", nobody_has)) == ["10.1.2.3"]
    audit(store)


def test_an_adopted_address_can_be_released_before_the_pool_is_built_again(store):
    config = ipam_config(subnet="10.1.2.0/29", strategy="dense-pack")
    ipam = Ipam(store)
    ipam.allocate(owner("c1"), config, "", nobody_has)
    store.adopt(owner("c2"), "", [leased("10.1.2.6"), leased("10.1.2.4")])
    assert addresses(ipam.release(owner("c2"))) == ["10.1.2.6", "10.1.2.4"]
    for number in range(3, 7):
        ipam.allocate(owner(f"c{number}"), config, "", nobody_has)
    audit(store)


def test_an_older_schema_is_migrated_with_what_is_in_it(path, monkeypatch):
    with Store(path, boot_id="boot-1") as before:
        before.remember(attachment("c1"))
    added = ("CREATE TABLE extra (x)", "INSERT INTO extra VALUES (7)")
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, added))
    for _ in range(2):
        with Store(path, boot_id="boot-1") as after:
            assert after.attachment(owner("c1")) == attachment("c1")
            with after.transaction() as db:
                assert db.execute("SELECT x FROM extra").fetchall() == [(7,)]


def test_a_migration_that_fails_changes_nothing(path, monkeypatch):
    Store(path, boot_id="boot-1").close()
    bad = ("CREATE TABLE extra (x)", "INSERT INTO meta VALUES ('boot', 'twice')")
    with monkeypatch.context() as patch, pytest.raises(errors.CniError) as caught:
        patch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, bad))
        Store(path, boot_id="boot-1")
    assert caught.value.code == errors.STORE
    with Store(path, boot_id="boot-1") as store, store.transaction() as db:
        assert not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'extra'").fetchall()


def test_a_newer_schema_that_we_can_read_is_used_as_it_is(path):
    make_newer(path, oldest_reader=1)
    with Store(path, boot_id="boot-1") as after:
        assert after.attachment(owner("c1")) == attachment("c1")
        assert after.lost is None


def make_newer(path: str, oldest_reader: int) -> bytes:
    """The store as a newer release would leave it; its bytes."""
    with Store(path, boot_id="boot-1") as before:
        before.remember(attachment("c1"))
        with before.transaction() as db:
            db.execute("UPDATE meta SET value = ? WHERE key = 'oldest_reader'", (oldest_reader,))
            db.execute("PRAGMA user_version = 99")
    return Path(path).read_bytes()


def test_a_newer_schema_that_we_cannot_read_is_refused_and_left_alone(path):
    before = make_newer(path, oldest_reader=98)
    for _ in range(2):
        with pytest.raises(errors.CniError) as caught:
            Store(path, boot_id="boot-1")
        assert caught.value.code == errors.STORE
        assert path in caught.value.details and "schema 99" in caught.value.details
        assert "install" in caught.value.details
    assert broken_files(path) == []
    assert Path(path).read_bytes() == before


def test_a_store_that_becomes_too_new_while_it_is_open_is_refused_and_left_alone(path, store):
    """An upgrade and a roll-back while the daemon of the old release runs on."""
    store.remember(attachment("c1"))
    make_newer(path, oldest_reader=98)
    with pytest.raises(errors.CniError) as caught:
        store._open(vanished=True)
    assert caught.value.code == errors.STORE
    with pytest.raises(errors.CniError) as caught:
        store.remember(attachment("c2"))
    assert caught.value.code == errors.STORE
    assert broken_files(path) == []


def test_a_store_that_a_newer_release_migrates_while_it_is_open_is_not_taken_for_broken(
    path, store
):
    store.remember(attachment("c1"))
    make_newer(path, oldest_reader=98)
    with closing(sqlite3.connect(path, isolation_level=None)) as newer:
        newer.execute("ALTER TABLE attachment RENAME TO interface")
    with pytest.raises(errors.CniError) as caught:
        store.attachments()
    assert caught.value.code == errors.STORE and "schema 99" in caught.value.details
    assert broken_files(path) == []


def test_a_roll_back_across_a_schema_change_and_forward_again_keeps_everything(path, monkeypatch):
    newer = (*schema.MIGRATIONS, ("CREATE TABLE extra (x)",))
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", newer)
        with Store(path, boot_id="boot-1") as store:
            store.remember(attachment("c1"))
            store.adopt(owner("c1"), "", [leased("10.1.2.3")])
    with Store(path, boot_id="boot-1") as older:
        assert older.attachment(owner("c1")) == attachment("c1")
        older.remember(attachment("c2"))
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", newer)
        with Store(path, boot_id="boot-1") as store:
            assert [one.owner.container_id for one in store.attachments()] == ["c1", "c2"]
            assert addresses(Ipam(store).lease(owner("c1"))) == ["10.1.2.3"]
            assert store.lost is None
            audit(store)
    assert broken_files(path) == []


def test_a_store_of_every_earlier_schema_is_brought_forward_with_what_is_in_it(path, monkeypatch):
    for version in range(1, len(schema.MIGRATIONS) + 1):
        for file in Path(path).parent.glob("*"):
            file.unlink()
        with monkeypatch.context() as patch:
            patch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:version])
            with Store(path, boot_id="boot-1") as store:
                store.remember(attachment("c1"))
                store.adopt(owner("c1"), "", [leased("10.1.2.3")])
        with Store(path, boot_id="boot-1") as store:
            assert store.attachment(owner("c1")) == attachment("c1")
            assert addresses(Ipam(store).lease(owner("c1"))) == ["10.1.2.3"]
            assert store.lost is None
            with store.transaction() as db:
                (now,) = db.execute("PRAGMA user_version").fetchone()
                assert now == len(schema.MIGRATIONS)


def test_a_place_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.CniError) as caught:
        Store(str(tmp_path / "file" / "headcni.db"), boot_id="boot-1")
    assert caught.value.code == errors.STORE
    assert str(tmp_path) in caught.value.details
    os.mkdir(tmp_path / "headcni.db")
    with pytest.raises(errors.CniError) as caught:
        Store(str(tmp_path / "headcni.db"), boot_id="boot-1")
    assert caught.value.code == errors.STORE


def test_a_store_that_stays_locked_is_a_reason_to_try_again(path, store, monkeypatch):
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
    with Store(path, boot_id="boot-1") as other, store.transaction():
        with pytest.raises(errors.CniError) as caught:
            other.remember(attachment("c1"))
        assert caught.value.code == errors.TRY_AGAIN
        assert other.attachments() == []
    with Store(path, boot_id="boot-1") as other:
        other.remember(attachment("c1"))


def test_the_store_is_in_wal_mode_so_that_readers_and_a_writer_do_not_wait(path, store):
    with store.transaction(), Store(path, boot_id="boot-1") as other:
        assert other.attachments() == []
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_lock_that_is_never_let_go_is_named_and_not_waited_for_for_ever(path, monkeypatch):
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.2)
    os.makedirs(os.path.dirname(path))
    holder = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)
    try:
        with pytest.raises(errors.CniError) as caught:
            Store(path)
    finally:
        os.close(holder)
    assert caught.value.code == errors.TRY_AGAIN and f"{path}.lock" in caught.value.details
    Store(path).close()


def test_a_store_that_could_not_be_put_right_at_once_is_put_right_later(path, store, monkeypatch):
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.1)
    store.remember(attachment("c1"))
    holder = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)
    os.unlink(path)
    for _ in range(2):
        with pytest.raises(errors.CniError) as caught:
            store.remember(attachment("c2"))
        assert caught.value.code == errors.TRY_AGAIN
    os.close(holder)
    store.remember(attachment("c3"))
    assert [known.owner.container_id for known in store.attachments()] == ["c3"]
    assert store.lost.reason == "the database file was gone"


def test_a_store_that_was_closed_stays_closed(path):
    store = Store(path, boot_id="boot-1")
    store.close()
    with pytest.raises(sqlite3.ProgrammingError):
        store.attachments()
