"""Taking over from host-local, once."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from ipaddress import ip_address
from pathlib import Path

import pytest

from headcni import errors
from headcni.ipam.allocate import Ipam
from headcni.ipam.hostlocal import import_host_local
from headcni.model import LeasedAddress
from headcni.store import Store
from tests.unit.cni.ipam_support import addresses, audit, ipam_config, nobody_has, owner

CONFIG = ipam_config(subnet="10.1.2.0/24", ranges=[[{"subnet": "fd00:1::/64"}]])


@pytest.fixture
def store(tmp_path):
    with Store(str(tmp_path / "store" / "headcni.db"), boot_id="boot-1") as opened:
        yield opened


@pytest.fixture
def directory(tmp_path):
    """As host-local leaves it: two pods with two addresses each, and one of before 0.7."""
    folder = tmp_path / "networks" / "pods"
    folder.mkdir(parents=True)
    for name, text in {
        "10.1.2.5": "c1\r\neth0",
        "fd00:1::5": "c1\r\neth0",
        "10.1.2.6": "c2\r\neth0",
        "fd00:1::6": "c2\r\neth0",
        "10.1.2.7": "veryold",
        "10.9.9.9": "c3\r\nnet1",
        "last_reserved_ip.0": "10.1.2.7",
        "last_reserved_ip.1": "fd00:1::6",
        "lock": "",
        "notes.txt": "not an address",
        "10.1.2.8": "",
    }.items():
        (folder / name).write_bytes(text.encode())
    return str(folder)


def take_over(store, directory, config=CONFIG):
    return import_host_local(store, "pods", directory, config.range_sets)


def test_every_address_in_the_directory_has_its_holder_in_the_store(store, directory):
    imported = take_over(store, directory)
    audit(store)
    held = {lease.owner: addresses(lease) for lease in Ipam(store).leases("pods")}
    assert held == {
        owner("c1"): ["10.1.2.5", "fd00:1::5"],
        owner("c2"): ["10.1.2.6", "fd00:1::6"],
        owner("c3", ifname="net1"): ["10.9.9.9"],
        owner("veryold"): ["10.1.2.7"],
    }
    assert {lease.owner: addresses(lease) for lease in imported.leases} == held
    assert imported.held_by_others == ()
    (first, _) = Ipam(store).lease(owner("c1")).addresses
    assert (first.interface, str(first.gateway)) == ("10.1.2.5/24", "10.1.2.1")


def test_allocation_goes_on_where_host_local_was(store, directory):
    take_over(store, directory)
    lease = Ipam(store).allocate(owner("new"), CONFIG, "", nobody_has)
    assert addresses(lease) == ["10.1.2.8", "fd00:1::7"]


def test_a_pool_that_was_there_before_loses_what_is_imported(store, directory):
    config = ipam_config(subnet="10.1.2.0/24", strategy="dense-pack")
    ipam = Ipam(store)
    for number in range(3):
        ipam.allocate(owner(f"d{number}"), config, "", nobody_has)
    imported = take_over(store, directory, config)
    audit(store)
    assert addresses(ipam.allocate(owner("d3"), config, "", nobody_has)) == ["10.1.2.8"]
    assert imported.held_by_others == ()


def test_an_address_that_has_a_holder_in_the_store_stays_with_it(store, directory):
    config = ipam_config(subnet="10.1.2.0/24", requested=["10.1.2.5"])
    Ipam(store).allocate(owner("ours"), config, "", nobody_has)
    imported = take_over(store, directory)
    assert list(map(str, imported.held_by_others)) == ["10.1.2.5"]
    assert addresses(Ipam(store).lease(owner("ours"))) == ["10.1.2.5"]
    assert addresses(Ipam(store).lease(owner("c1"))) == ["fd00:1::5"]
    audit(store)


def test_a_second_import_changes_nothing(store, directory):
    take_over(store, directory)
    Ipam(store).release(owner("c1"))
    assert take_over(store, directory) == ((), ())
    assert Ipam(store).lease(owner("c1")) is None


def test_of_two_imports_at_once_the_second_takes_nothing(store, directory, tmp_path):
    handle = os.open(os.path.join(directory, "lock"), os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    taken = []

    def work():
        with Store(store.path, boot_id="boot-1") as own:
            taken.append(len(take_over(own, directory).leases))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    os.close(handle)
    for thread in threads:
        thread.join()
    assert sorted(taken) == [0, 4]


def test_what_was_adopted_before_is_not_taken_for_somebody_elses(store, directory):
    lease = LeasedAddress(ip_address("10.1.2.5"), 24, None)
    store.adopt(owner("c1"), "web/c1", [lease])
    imported = take_over(store, directory)
    assert imported.held_by_others == ()
    assert addresses(Ipam(store).lease(owner("c1"))) == ["10.1.2.5", "fd00:1::5"]


def test_host_locals_files_stay_as_they_were(store, directory):
    before = {file.name: file.read_bytes() for file in Path(directory).iterdir()}
    take_over(store, directory)
    assert {file.name: file.read_bytes() for file in Path(directory).iterdir()} == before


def test_no_directory_is_nothing_to_import_yet(store, tmp_path):
    missing = str(tmp_path / "networks" / "later")
    assert take_over(store, missing) == ((), ())
    os.makedirs(missing)
    with open(os.path.join(missing, "10.1.2.9"), "w") as file:
        file.write("c9\r\neth0")
    assert len(take_over(store, missing).leases) == 1


def test_the_import_waits_for_host_locals_lock(store, directory):
    handle = os.open(os.path.join(directory, "lock"), os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    done = []
    thread = threading.Thread(target=lambda: done.append(take_over(store, directory)))
    thread.start()
    time.sleep(0.1)
    assert done == []
    with open(os.path.join(directory, "10.1.2.99"), "w") as file:
        file.write("last\r\neth0")
    os.close(handle)
    thread.join()
    assert addresses(Ipam(store).lease(owner("last"))) == ["10.1.2.99"]


def test_a_directory_that_cannot_be_read_is_named(store, directory):
    os.unlink(os.path.join(directory, "10.1.2.5"))
    os.mkdir(os.path.join(directory, "10.1.2.5"))
    with pytest.raises(errors.CniError) as caught:
        take_over(store, directory)
    assert caught.value.code == errors.IO_FAILURE
    assert "10.1.2.5" in caught.value.details
    assert Ipam(store).leases("pods") == []
