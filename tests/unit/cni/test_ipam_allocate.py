"""Who gets which address, what comes back, and what is said when there is none."""

from __future__ import annotations

import random
import time
from ipaddress import ip_address

import pytest

from headcni import errors
from headcni.errors import CniError
from headcni.ipam.allocate import ATTEMPTS, HOLD_SECONDS, Ipam, Usage
from headcni.model import IpamConfig, LeasedAddress, Owner
from headcni.store import Store, Tombstone
from tests.unit.cni.ipam_support import (
    addresses,
    audit,
    free_addresses,
    ipam_config,
    nobody_has,
    owner,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Node:
    """An Ipam with a seeded dice and a clock that is set by hand."""

    def __init__(self, path: str, boot_id: str = "boot-1") -> None:
        self.store = Store(path, boot_id=boot_id)
        self.clock = Clock()
        self.ipam = Ipam(self.store, below=random.Random(3).randrange, clock=self.clock)

    def add(
        self, holder: str | Owner, config: IpamConfig, pod: str = "", in_use=nobody_has
    ) -> list[str]:
        holder = owner(holder) if isinstance(holder, str) else holder
        lease = self.ipam.allocate(holder, config, pod, in_use)
        audit(self.store)
        return addresses(lease)

    def refusal(
        self, holder: str | Owner, config: IpamConfig, in_use=nobody_has, pod: str = ""
    ) -> CniError:
        with pytest.raises(CniError) as caught:
            self.add(holder, config, pod, in_use)
        audit(self.store)
        return caught.value


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "headcni.db")


@pytest.fixture
def node(path):
    node = Node(path)
    yield node
    node.store.close()


SMALL = ipam_config(subnet="10.1.2.0/29")


def test_sequential_goes_on_after_the_last_one_and_wraps(node):
    assert [node.add(f"c{n}", SMALL) for n in range(4)] == [[f"10.1.2.{n}"] for n in range(2, 6)]
    node.ipam.release(owner("c0"))
    node.ipam.release(owner("c3"))
    assert node.add("c4", SMALL) == ["10.1.2.6"]
    assert node.add("c5", SMALL) == ["10.1.2.2"]
    assert node.add("c6", SMALL) == ["10.1.2.5"]


def test_dense_pack_takes_the_lowest(node):
    config = ipam_config(subnet="10.1.2.0/29", strategy="dense-pack")
    for number in range(4):
        node.add(f"c{number}", config)
    node.ipam.release(owner("c1"))
    node.ipam.release(owner("c2"))
    assert node.add("c5", config) == ["10.1.2.3"]


def test_random_hands_out_all_of_the_pool_in_no_order(node):
    config = ipam_config(subnet="10.1.2.0/27", strategy="random")
    given = [node.add(f"c{number}", config)[0] for number in range(29)]
    assert sorted(given, key=ip_address) == [f"10.1.2.{n}" for n in range(2, 31)]
    assert given != sorted(given, key=ip_address)
    assert node.refusal("late", config).code == errors.TRY_AGAIN


def test_one_address_comes_from_each_range_set_with_its_own_gateway(node):
    config = ipam_config(subnet="10.1.2.0/24", ranges=[[{"subnet": "fd00:1::/64"}]])
    lease = node.ipam.allocate(owner("c1"), config, "default/web", nobody_has)
    assert [(one.interface, str(one.gateway)) for one in lease.addresses] == [
        ("10.1.2.2/24", "10.1.2.1"),
        ("fd00:1::2/64", "fd00:1::1"),
    ]
    assert node.ipam.lease(owner("c1")) == lease
    assert node.ipam.leases("pods") == [lease]


def test_within_a_set_the_ranges_are_used_in_order(node):
    config = ipam_config(
        ranges=[[{"subnet": "10.1.2.0/30"}, {"subnet": "10.1.3.0/30"}, {"subnet": "10.1.4.0/30"}]]
    )
    assert [node.add(f"c{n}", config)[0] for n in range(3)] == ["10.1.2.2", "10.1.3.2", "10.1.4.2"]
    node.ipam.release(owner("c1"))
    assert node.add("c4", config) == ["10.1.3.2"]


def test_a_second_allocation_for_the_same_owner_returns_the_same_address(node):
    assert node.add("c1", SMALL) == node.add("c1", SMALL)
    assert node.add(owner("c1", ifname="net1"), SMALL) != node.add("c1", SMALL)
    assert len(node.ipam.leases("pods")) == 2


def test_a_second_allocation_does_not_ask_the_kernel_about_the_pods_own_address(node):
    first = node.add("c1", SMALL)
    assert node.add("c1", SMALL, in_use=lambda _: True) == first


def test_all_or_nothing_when_one_of_the_sets_is_full(node):
    config = ipam_config(subnet="10.1.2.0/24", ranges=[[{"subnet": "fd00:1::/126"}]])
    node.add("c1", config)
    node.add("c2", config)
    before = free_addresses(node.store)
    assert node.refusal("c3", config).code == errors.TRY_AGAIN
    assert free_addresses(node.store) == before
    assert node.ipam.lease(owner("c3")) is None


def test_releasing_twice_is_no_error_and_frees_nobody_else(node):
    node.add("c1", SMALL)
    node.add("c2", SMALL)
    assert addresses(node.ipam.release(owner("c1"))) == ["10.1.2.2"]
    assert node.ipam.release(owner("c1")) is None
    assert node.ipam.release(owner("c2", ifname="net1")) is None
    assert node.ipam.release(owner("c2", network="other")) is None
    assert [lease.owner for lease in node.ipam.leases("pods")] == [owner("c2")]


def test_what_another_ipam_gave_is_given_to_nobody_until_it_is_released(node):
    node.add("c0", SMALL)
    others = [LeasedAddress(ip_address(f"10.1.2.{last}"), 29, None) for last in (3, 200)]
    for _ in range(2):
        assert node.ipam.note(owner("theirs"), "default/web-0", others)
    held = [*others, LeasedAddress(ip_address("10.1.2.2"), 29, None)]
    assert not node.ipam.note(owner("another"), "default/web-1", held), "c0 has it"
    assert node.ipam.lease(owner("another")) is None
    audit(node.store)
    assert node.add("c1", SMALL) == ["10.1.2.4"]
    assert addresses(node.ipam.release(owner("theirs"))) == ["10.1.2.3", "10.1.2.200"]
    audit(node.store)
    assert [node.add(f"c{n}", SMALL) for n in (2, 3, 4)] == [
        ["10.1.2.5"],
        ["10.1.2.6"],
        ["10.1.2.3"],
    ]


def test_a_late_del_does_not_free_the_address_of_a_newer_sandbox(node):
    config = ipam_config(subnet="10.1.2.0/30")
    node.add("old", config)
    node.ipam.release(owner("old"))
    assert node.add("new", config) == ["10.1.2.2"]
    node.ipam.release(owner("old"))
    assert addresses(node.ipam.lease(owner("new"))) == ["10.1.2.2"]


def test_a_requested_address_is_the_one_that_is_given(node):
    assert node.add("c1", ipam_config(subnet="10.1.2.0/24", requested=["10.1.2.77"])) == [
        "10.1.2.77"
    ]
    config = ipam_config(
        subnet="10.1.2.0/24", ranges=[[{"subnet": "fd00:1::/64"}]], requested=["fd00:1::99/64"]
    )
    assert node.add("c2", config) == ["10.1.2.2", "fd00:1::99"]


def test_a_requested_address_that_is_taken_names_its_holder_within_the_namespace(node):
    config = ipam_config(subnet="10.1.2.0/24", requested=["10.1.2.77"])
    node.add("c1", config, pod="default/web-0")
    refused = node.refusal("c2", config, pod="default/web-1")
    assert refused.code == errors.ADDRESS_TAKEN
    assert "default/web-0" in refused.msg
    assert "c1" in refused.details
    assert "web-0" not in str(node.refusal("c2", config, pod="other/web-1"))
    assert node.ipam.lease(owner("c2")) is None


@pytest.mark.parametrize(
    ("requested", "word"),
    [
        (["10.1.3.1"], "no range"),
        (["fd00::1"], "no range"),
        (["10.1.2.1"], "never handed out"),
        (["10.1.2.9"], "never handed out"),
        (["10.1.2.4", "10.1.2.5"], "one range set"),
    ],
)
def test_an_impossible_request_is_a_mistake_of_the_configuration(node, requested, word):
    config = ipam_config(
        subnet="10.1.2.0/28",
        rangeStart="10.1.2.1",
        rangeEnd="10.1.2.14",
        exclude=["10.1.2.9"],
        requested=requested,
    )
    refused = node.refusal("c1", config)
    assert refused.code == errors.INVALID_CONFIG
    assert word in refused.msg


def test_a_second_add_that_asks_for_another_address_is_refused(node):
    node.add("c1", SMALL)
    refused = node.refusal("c1", ipam_config(subnet="10.1.2.0/29", requested=["10.1.2.6"]))
    assert refused.code == errors.ADDRESS_TAKEN
    assert "10.1.2.2" in refused.msg
    assert node.add("c1", ipam_config(subnet="10.1.2.0/29", requested=["10.1.2.2"])) == ["10.1.2.2"]


def test_an_address_that_the_kernel_knows_is_passed_over_and_held_back(node):
    foreign = {"10.1.2.2", "10.1.2.3"}
    assert node.add("c1", SMALL, in_use=lambda a: str(a) in foreign) == ["10.1.2.4"]
    assert node.ipam.usage("pods")[0].held_back == 2
    assert [node.add(f"d{n}", SMALL) for n in range(2)] == [["10.1.2.5"], ["10.1.2.6"]]
    assert "2 held back" in node.refusal("late", SMALL).msg
    node.clock.now += HOLD_SECONDS + 1
    assert node.add("later", SMALL) == ["10.1.2.2"]
    assert node.ipam.usage("pods")[0].held_back == 0


def test_at_most_three_addresses_are_tried(node):
    asked = []
    config = ipam_config(subnet="10.1.2.0/24")
    refused = node.refusal("c1", config, in_use=lambda a: not asked.append(a))
    assert refused.code == errors.TRY_AGAIN
    assert len(asked) == ATTEMPTS == 3
    assert len(set(asked)) == 3
    assert node.ipam.lease(owner("c1")) is None
    assert node.add("c1", config) == ["10.1.2.5"]


def test_if_one_of_two_addresses_is_in_use_neither_is_kept_of_that_try(node):
    config = ipam_config(subnet="10.1.2.0/29", ranges=[[{"subnet": "fd00:1::/64"}]])
    assert node.add("c1", config, in_use=lambda a: str(a) == "fd00:1::2") == [
        "10.1.2.3",
        "fd00:1::3",
    ]
    assert "10.1.2.2" in free_addresses_v4(node.store)


def free_addresses_v4(store: Store) -> list[str]:
    with store.transaction() as db:
        rows = db.execute("SELECT first, last FROM span WHERE kind = 'free' AND length(first) = 4")
        return [
            str(ip_address(n))
            for a, b in rows
            for n in range(int.from_bytes(a, "big"), int.from_bytes(b, "big") + 1)
        ]


def test_a_requested_address_that_the_kernel_knows_is_refused_at_once(node):
    asked = []
    config = ipam_config(subnet="10.1.2.0/29", requested=["10.1.2.4"])
    refused = node.refusal("c1", config, in_use=lambda a: not asked.append(a))
    assert refused.code == errors.ADDRESS_TAKEN
    assert len(asked) == 1
    assert node.add("c1", config) == ["10.1.2.4"], "held back is no obstacle to who asks for it"


def test_when_the_kernel_cannot_be_asked_nothing_stays_reserved(node):
    def fails(address):
        raise OSError("netlink is gone")

    with pytest.raises(OSError, match="netlink"):
        node.add("c1", SMALL, in_use=fails)
    assert node.ipam.leases("pods") == []
    assert len(free_addresses(node.store)) == 5


def test_an_address_collected_and_given_away_meanwhile_is_not_held_back(node):
    config = ipam_config(subnet="10.1.2.0/30")

    def collected_meanwhile(address):
        node.ipam.collect("pods", [])
        node.add("c2", config)
        return True

    refused = node.refusal("c1", config, in_use=collected_meanwhile)
    assert refused.code == errors.TRY_AGAIN
    assert addresses(node.ipam.lease(owner("c2"))) == ["10.1.2.2"]


def test_nothing_is_locked_while_the_kernel_is_asked(node, path):
    def asks_with_another_process_writing(address):
        with Store(path, boot_id="boot-1") as other:
            Ipam(other).allocate(owner("c2"), SMALL, "", nobody_has)
        return False

    node.add("c1", SMALL, in_use=asks_with_another_process_writing)
    assert len(node.ipam.leases("pods")) == 2


def test_exhaustion_says_how_many_are_used_by_whom_and_what_to_do(node):
    config = ipam_config(subnet="10.1.2.0/28")
    for number in range(13):
        namespace = "default" if number < 8 else "kube-system" if number < 11 else ""
        node.add(f"c{number}", config, pod=f"{namespace}/p{number}" if namespace else "")
    with node.store.transaction() as db:
        db.execute(
            "UPDATE allocation SET created = ? WHERE container_id IN ('c1', 'c9')",
            (time.time() - 2 * 86400,),
        )
    refused = node.refusal("late", config)
    assert refused.code == errors.TRY_AGAIN
    assert "13 of 13" in refused.msg
    assert "10.1.2.0/28" in refused.msg
    assert "namespace default 8, namespace kube-system 3, unnamed pods 2" in refused.details
    assert "2 of them for more than a day" in refused.details
    assert "GC" in refused.details


def test_a_change_of_ranges_rebuilds_the_pool_around_what_is_held(node):
    node.add("c1", SMALL)
    node.add("c2", SMALL)
    wider = ipam_config(subnet="10.1.2.0/28", gateway="10.1.2.14", strategy="dense-pack")
    assert node.add("c3", wider) == ["10.1.2.1"]
    assert node.add("c4", wider) == ["10.1.2.4"]
    elsewhere = ipam_config(subnet="10.9.0.0/29")
    assert node.add("c5", elsewhere) == ["10.9.0.2"]
    assert node.add("c1", elsewhere) == ["10.1.2.2"], "who has an address keeps it"
    node.ipam.release(owner("c1"))
    audit(node.store)
    back = ipam_config(subnet="10.1.2.0/28", exclude=["10.1.2.5-10.1.2.15"], strategy="dense-pack")
    assert node.add("c6", back) == ["10.1.2.2"]


def test_an_address_that_has_become_the_gateway_is_not_freed_into_the_pool(node):
    node.add("c1", SMALL)
    changed = ipam_config(subnet="10.1.2.0/29", gateway="10.1.2.2", strategy="dense-pack")
    node.add("c2", changed)
    node.ipam.release(owner("c1"))
    audit(node.store)
    assert "10.1.2.2" not in free_addresses(node.store)


def test_sequential_goes_on_where_it_was_after_a_reboot(path):
    before = Node(path)
    assert before.add("c1", SMALL) == ["10.1.2.2"]
    before.store.close()
    after = Node(path, boot_id="boot-2")
    assert after.add("c2", SMALL) == ["10.1.2.3"]
    after.store.close()


def test_collecting_frees_what_is_not_valid_and_only_on_this_network(node):
    for number in range(3):
        node.add(f"c{number}", SMALL)
    node.add(owner("c9", network="other"), ipam_config(subnet="10.9.0.0/29"))
    freed = node.ipam.collect("pods", [("c1", "eth0"), ("c2", "net1")])
    audit(node.store)
    assert [lease.owner.container_id for lease in freed] == ["c0", "c2"]
    assert [lease.owner.container_id for lease in node.ipam.leases("pods")] == ["c1"]
    assert len(node.ipam.leases("other")) == 1
    assert node.ipam.collect("pods", [owner("c1")]) == []


def test_an_address_is_held_back_until_its_tombstone_goes(node):
    first = node.add("c1", SMALL)
    grave = Tombstone(owner("c1"), 17)
    node.store.bury(grave)
    assert node.ipam.collect("pods", []) == []  # GC leaves it to whoever deletes the link
    assert len(node.ipam.leases("pods")) == 1
    node.ipam.release_buried([grave])
    audit(node.store)
    assert node.ipam.leases("pods") == [] and node.store.tombstones() == []
    assert first[0] in free_addresses(node.store)


def test_a_tombstone_that_is_gone_or_another_ones_frees_nothing(node):
    """The names of its owner may be another pod's by now."""
    node.add("c1", SMALL)
    node.ipam.release_buried([Tombstone(owner("c1"), 17)])
    node.store.bury(Tombstone(owner("c1"), 18))
    node.ipam.release_buried([Tombstone(owner("c1"), 17)])
    audit(node.store)
    assert len(node.ipam.leases("pods")) == 1
    assert node.store.tombstones() == [Tombstone(owner("c1"), 18)]


def test_usage_counts_each_range_set(node):
    config = ipam_config(
        subnet="10.1.2.0/29",
        ranges=[[{"subnet": "fd00:1::/64"}, {"subnet": "fd00:2::/126"}]],
    )
    assert node.ipam.usage("pods") == ()
    node.add("c1", config)
    node.add("c2", config)
    v4, v6 = node.ipam.usage("pods")
    assert v4 == Usage("pods", 0, ("10.1.2.0/29",), 5, 2, 0)
    assert v4.free == 3
    assert v6.subnets == ("fd00:1::/64", "fd00:2::/126")
    assert (v6.total, v6.leased) == (2**64 - 2 + 2, 2)


def test_an_address_is_never_given_out_on_two_networks(node):
    config = ipam_config(subnet="10.1.2.0/29", strategy="dense-pack")
    given = [node.add(owner(f"c{n}", network="red" if n % 2 else "blue"), config) for n in range(5)]
    assert len({one for (one,) in given}) == 5
    refused = node.refusal(owner("late", network="red"), config)
    assert "network blue 3" in refused.details
    node.ipam.release(owner("c0", network="blue"))
    assert node.add(owner("c7", network="red"), config) == ["10.1.2.2"]


def test_subnets_of_two_networks_that_overlap_but_differ_are_refused(node):
    node.add(owner("c1", network="red"), ipam_config(subnet="10.1.0.0/16"))
    refused = node.refusal(owner("c2", network="blue"), SMALL)
    assert refused.code == errors.INVALID_CONFIG
    assert "10.1.2.0/29 of network blue overlaps 10.1.0.0/16 of network red" in refused.msg
    assert "data_dir with type headcni, ipam.dataDir with" in refused.details
    assert "dataDir" in refused.details


def test_a_network_that_nobody_uses_any_more_is_no_obstacle(node):
    node.add(owner("c1", network="red"), ipam_config(subnet="10.1.0.0/16"))
    node.ipam.release(owner("c1", network="red"))
    assert node.add(owner("c2", network="blue"), SMALL) == ["10.1.2.2"]
    assert node.refusal(owner("c3", network="red"), ipam_config(subnet="10.1.0.0/16")).code == (
        errors.INVALID_CONFIG
    )


def test_two_stores_are_two_spaces(node, tmp_path):
    other = Node(str(tmp_path / "vlan7" / "headcni.db"))
    assert node.add("c1", SMALL) == other.add("c1", SMALL)
    other.store.close()


def test_after_a_loss_nothing_is_handed_out_before_what_is_in_use_was_adopted(node, path):
    config = ipam_config(subnet="10.1.2.0/24", strategy="dense-pack")
    given = [node.ipam.allocate(owner(f"c{n}"), config, "", nobody_has) for n in range(5)]
    node.store.close()
    with open(path, "r+b") as file:
        file.write(b"broken" * 5000)
    asked = []

    def recover(store):
        asked.append(store.lost.reason)
        for lease in given:
            store.adopt(lease.owner, lease.pod, lease.addresses)

    node.store = Store(path, boot_id="boot-1")
    node.ipam = Ipam(node.store, recover=recover)
    assert node.ipam.release(owner("unknown")) is None
    assert node.add("c5", config) == ["10.1.2.7"]
    assert node.add("c6", config) == ["10.1.2.8"]
    assert len(asked) == 1
    assert node.store.lost is None


def test_a_recovery_that_fails_is_tried_again_at_the_next_allocation(node):
    node.store._open(broken="as if")

    def fails(store):
        raise CniError(errors.KERNEL, "netlink is gone")

    node.ipam = Ipam(node.store, recover=fails)
    assert node.refusal("c1", SMALL).code == errors.KERNEL
    assert node.store.lost is not None
    node.ipam = Ipam(node.store, recover=lambda store: None)
    assert node.add("c1", SMALL) == ["10.1.2.2"]


def test_the_primary_key_makes_a_double_allocation_impossible(node):
    node.add("c1", SMALL)
    with node.store.transaction() as db:  # as if free space had been computed wrongly
        db.execute("UPDATE span SET first = ? WHERE kind = 'free'", (b"\x0a\x01\x02\x02",))
    config = ipam_config(subnet="10.1.2.0/29", strategy="dense-pack")
    with pytest.raises(CniError) as caught:
        node.ipam.allocate(owner("c2"), config, "", nobody_has)
    assert caught.value.code == errors.INTERNAL
    assert node.ipam.lease(owner("c2")) is None


def test_a_pool_of_no_ranges_is_refused(node):
    assert node.refusal("c1", IpamConfig("headcni-ipam")).code == errors.INVALID_CONFIG


@pytest.mark.parametrize("strategy", ["sequential", "random", "dense-pack"])
def test_the_last_address_of_a_slash_16_costs_what_the_first_costs(node, strategy):
    config = ipam_config(subnet="10.7.0.0/16", strategy=strategy)
    first = cost(node, config, held=range(0))
    assert first > 100, "something is counted"
    assert cost(node, config, held=range(65_532)) < 1.5 * first + 50
    assert cost(node, config, held=range(0, 65_533, 2)) < 1.5 * first + 50, "32 766 intervals"


def cost(node: Node, config: IpamConfig, held: range) -> int:
    """What an allocation costs while others hold these of the pool's addresses."""
    with node.store.transaction() as db:
        db.execute("DELETE FROM allocation")
        db.execute("UPDATE network SET ranges = ''")
        start = int(config.range_sets[0][0].start) + 1
        db.executemany(
            "INSERT INTO allocation VALUES (?, 'pods', ?, 'eth0', 0, 16, NULL, '', 0)",
            [((start + n).to_bytes(4, "big"), f"filler{n}") for n in held],
        )
    return min(vm_steps(node, config, f"c{turn}") for turn in range(3))


def vm_steps(node: Node, config: IpamConfig, name: str) -> int:
    """The work of SQLite's machine for an allocation: a figure that no busy machine disturbs."""
    node.ipam.allocate(owner(name), config, "", nobody_has)
    node.ipam.release(owner(name))
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    with node.store.transaction() as db:
        db.set_progress_handler(count, 1)
    node.ipam.allocate(owner(name), config, "", nobody_has)
    with node.store.transaction() as db:
        db.set_progress_handler(None, 1)
    node.ipam.release(owner(name))
    return steps
