"""Headscale's file of extra records. A Headscale that reads it is in tests/modules/headscale."""

from __future__ import annotations

import fcntl
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from ansible_module import Failed, run

ZONE = "svc.mesh.example.org"
WEB = {"name": f"web.shop.{ZONE}", "type": "A", "value": "10.96.7.7"}
DB = {"name": f"db.shop.{ZONE}", "type": "AAAA", "value": "fd96::7"}
NAS = {"name": "nas.mesh.example.org", "type": "A", "value": "192.0.2.7"}
# Of another cluster, and one that only ends in the same letters.
OTHERS = [NAS, {**NAS, "name": f"a.east{ZONE}"}, {**NAS, "name": "web.shop.svc.other.example"}]


@pytest.fixture
def records(tmp_path):
    path = tmp_path / "records.json"

    def work(*wanted, check=False, zone=ZONE):
        return run("headscale_extra_records", check, path=str(path), zone=zone, records=wanted)

    work.path = path
    work.read = lambda: json.loads(path.read_text())
    return work


def test_records_are_added_predicted_and_then_left_alone(records):
    records.path.write_text(json.dumps(OTHERS))
    predicted = records(WEB, DB, check=True)
    assert records.read() == OTHERS
    done = records(WEB, DB)
    assert done["diff"] == predicted["diff"] and done["changed"] and predicted["changed"]
    assert records.read() == [*OTHERS, DB, WEB]
    assert (done["added"], done["removed"], done["others"]) == ([DB["name"], WEB["name"]], [], 3)
    assert not records(DB, WEB)["changed"]


def test_stale_names_go_and_all_others_stay_in_their_order(records):
    stale = {**WEB, "name": f"Old.Shop.{ZONE}."}
    records.path.write_text(json.dumps([OTHERS[0], stale, *OTHERS[1:], WEB]))
    assert records(WEB)["removed"] == [stale["name"]]
    assert records.read() == [*OTHERS, WEB]
    assert records()["removed"] == [WEB["name"]]
    assert records.read() == OTHERS


def test_a_link_to_the_file_stays_a_link(records, tmp_path):
    real = tmp_path / "elsewhere.json"
    real.write_text(json.dumps(OTHERS))
    records.path.symlink_to(real)
    records(WEB)
    assert records.path.is_symlink() and json.loads(real.read_text()) == [*OTHERS, WEB]


def test_runs_wait_for_each_other_and_keep_each_others_records(records):
    records.path.write_text(json.dumps(OTHERS))
    folder = os.open(records.path.parent, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)  # as another run does while it works
    with ThreadPoolExecutor(1) as workers:
        done = workers.submit(records, WEB)
        time.sleep(0.5)
        assert not done.done()
        records.path.write_text(json.dumps([*OTHERS, {**NAS, "name": "new.example"}]))
        os.close(folder)
        assert done.result()["others"] == len(OTHERS) + 1
    assert [one["name"] for one in records.read()][-2:] == ["new.example", WEB["name"]]


def test_an_address_that_changed_is_replaced(records):
    records(WEB)
    assert records({**WEB, "value": "10.96.8.8"})["changed"]
    assert records.read() == [{**WEB, "value": "10.96.8.8"}]


def test_the_last_record_leaves_a_list_that_headscale_reads(records):
    """Headscale ignores an empty file."""
    records(WEB)
    records()
    assert records.path.read_text() == "[]\n"


def test_a_new_file_can_be_read_by_headscales_user_and_an_old_one_keeps_its_mode(records):
    records(WEB)
    assert records.path.stat().st_mode & 0o777 == 0o644
    records.path.chmod(0o640)
    os.chown(records.path, 65534, 65534)
    records(DB)
    found = records.path.stat()
    assert (found.st_mode & 0o777, found.st_uid, found.st_gid) == (0o640, 65534, 65534)
    assert [one.name for one in records.path.parent.iterdir()] == ["records.json"]


@pytest.mark.parametrize("text", ["{", '{"name": "a"}', '["a"]', '[{"value": "192.0.2.1"}]'])
def test_a_file_that_is_not_understood_is_not_touched(records, text):
    records.path.write_text(text)
    with pytest.raises(Failed, match="is not a list of records"):
        records(WEB)
    assert records.path.read_text() == text


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": "nas.mesh.example.org"}, r"records\[0\].name: .*expected a name within"),
        ({"name": ZONE}, "expected a name within"),
        ({"name": "a b"}, "expected a domain"),
        ({"value": "fd96::7"}, r"records\[0\].value: 'fd96::7', expected an address for A"),
        ({"value": "web"}, "expected an address for A"),
    ],
)
def test_a_wrong_record_is_refused_before_the_file_changes(records, wrong, said):
    with pytest.raises(Failed, match=said):
        records({**WEB, **wrong})
    assert not records.path.exists()


def test_more_records_than_devices_should_get_are_refused(records):
    many = [{**WEB, "name": f"w{number}.{ZONE}"} for number in range(1001)]
    with pytest.raises(Failed, match="1001, at most 1000"):
        records(*many)
