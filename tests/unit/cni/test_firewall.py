"""Which ranges the nft sets hold, from what the store knows."""

from __future__ import annotations

import json
from ipaddress import ip_address

import pytest

from headcni.datapath import pod_ranges
from headcni.model import LeasedAddress, Owner, PodRef
from headcni.store import Attachment, Store, Tombstone

RANGES = {"pods": ["10.55.1.0/24"], "masqueraded": ["10.55.1.0/24"], "cluster": ["10.55.0.0/16"]}
OWNER = Owner("pods", "c1", "eth0")
NEED = ("pods", json.dumps(RANGES, sort_keys=True))


@pytest.fixture
def store(tmp_path):
    with Store(str(tmp_path / "headcni.db"), boot_id="boot-1") as opened:
        with opened.transaction() as db:
            pod_ranges.add(db, NEED)
        yield opened


def changes(store):
    return store.read(pod_ranges.changes)


def test_a_network_with_an_add_at_work_keeps_its_ranges(store):
    """It has its address already, and is attached only when all is done."""
    assert changes(store) == ([NEED], [])
    store.adopt(OWNER, "default/web", [LeasedAddress(ip_address("10.55.1.2"), 24, None)])
    assert changes(store) == ([], [])


def test_a_pod_that_awaits_the_deletion_of_its_link_needs_no_ranges(store):
    store.adopt(OWNER, "default/web", [LeasedAddress(ip_address("10.55.1.2"), 24, None)])
    store.bury(Tombstone(OWNER, 7))
    assert changes(store) == ([NEED], [])


def test_ranges_of_a_pod_that_another_release_left_out_are_added(store):
    other = {**RANGES, "cluster": ["10.0.0.0/8"]}
    store.remember(Attachment(OWNER, PodRef(), "", "hc0", {}, {}, {"ranges": other}))
    assert changes(store) == ([NEED], [("pods", json.dumps(other, sort_keys=True))])
