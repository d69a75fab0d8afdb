"""Any sequence of operations, changes and crashes keeps the invariants (see `audit`).

Beyond them: nobody has an address twice, an owner that has one keeps it and is told the same again,
an allocation has an address of every range set or does not exist, and "exhausted" is only said of a
set that has nothing free.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headcni import errors
from headcni.errors import CniError
from headcni.ipam.allocate import HOLD_SECONDS, Ipam
from headcni.ipam.pool import gateways, usable
from headcni.model import Lease, Owner
from headcni.store import Attachment, PluginState, PodRef, Store
from tests.unit.cni.ipam_support import FAST_DIR, addresses, audit, ipam_config

CONFIGS = [
    {"subnet": "10.1.2.0/29"},
    {"subnet": "10.1.2.0/29", "gateway": "10.1.2.3"},
    {"subnet": "10.1.2.0/28", "exclude": ["10.1.2.4", "10.1.2.8-10.1.2.9"]},
    {"subnet": "10.1.2.0/29", "rangeStart": "10.1.2.4"},
    {"subnet": "10.1.2.0/30", "ranges": [[{"subnet": "fd00:1::/64"}]]},
    {
        "ranges": [
            [{"subnet": "10.1.2.0/30"}, {"subnet": "10.1.3.0/30"}],
            [{"subnet": "fd00::/125"}],
        ]
    },
    {"subnet": "10.1.2.0/31"},
    {"subnet": "ffff:ffff:ffff:ffff:ffff:ffff:ffff:fff8/125"},
    {"subnet": "255.255.255.248/29", "gateway": "192.0.2.1"},
    {"subnet": "0.0.0.0/29", "gateway": "0.0.0.5"},
]
configs = st.builds(
    lambda section, strategy: ipam_config(**section, strategy=strategy),
    st.sampled_from(CONFIGS),
    st.sampled_from(["sequential", "random", "dense-pack"]),
)
owners = st.builds(
    Owner,
    st.sampled_from(["red", "blue"]),
    st.sampled_from([f"c{n}" for n in range(8)]),
    st.sampled_from(["eth0", "eth0", "net1"]),
)


class IpamMachine(RuleBasedStateMachine):
    """One node: its store, who should hold what, and what else is in the kernel."""

    @initialize(config=configs, seed=st.integers(0, 99))
    def start(self, config, seed):
        self.folder = tempfile.mkdtemp(dir=FAST_DIR, prefix="headcni-test-")
        self.path = os.path.join(self.folder, "headcni.db")
        self.boot, self.now, self.dice = 1, 0.0, Random(seed)
        self.configs = {"red": config, "blue": config}
        self.held: dict[Owner, Lease] = {}
        self.remembered: set[Owner] = set()
        self.states: dict[Owner, int] = {}
        self.foreign: set[object] = set()
        self.open()

    def open(self):
        self.store = Store(self.path, boot_id=f"boot-{self.boot}")
        self.ipam = Ipam(self.store, below=self.dice.randrange, clock=lambda: self.now)

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)

    @rule(owner=owners)
    def allocate(self, owner):
        config = self.configs[owner.network]
        try:
            lease = self.ipam.allocate(owner, config, "ns/pod", self.foreign.__contains__)
        except CniError as refused:
            assert owner not in self.held
            self.check_refusal(refused, owner)
            return
        if owner in self.held:
            assert lease == self.held[owner]
        else:
            assert len(lease.addresses) == len(config.range_sets)
            assert not self.foreign & {one.address for one in lease.addresses}
        self.held[owner] = lease

    def check_refusal(self, refused, owner):
        if refused.code == errors.INVALID_CONFIG:
            assert "overlaps" in refused.msg
            assert any(other.network != owner.network for other in self.held)
            return
        assert refused.code == errors.TRY_AGAIN, refused
        if "in a row" in refused.msg:
            assert self.foreign
            return
        assert any(not self.free_in(owner.network, n) for n in range(self.sets(owner.network)))

    def sets(self, network):
        return len(self.configs[network].range_sets)

    def free_in(self, network, set_index):
        config = self.configs[network]
        with self.store.transaction() as db:
            back = {int.from_bytes(row[0], "big") for row in db.execute("SELECT * FROM conflict")}
        taken = back | {int(one.address) for lease in self.held.values() for one in lease.addresses}
        ranges = config.range_sets[set_index]
        for range_ in ranges:
            for first, last in usable(range_, gateways(config.range_sets)):
                if last - first > 100 or set(range(first, last + 1)) - taken:
                    return True
        return False

    @rule(owner=owners, number=st.integers(0, 9))
    def allocate_requested(self, owner, number):
        config = self.configs[owner.network]
        range_ = config.range_sets[0][0]
        address = range_.start + number if int(range_.start) + number <= int(range_.end) else None
        if address is None:
            return
        wanted = type(config)(config.type, config.range_sets, config.strategy, (), (address,))
        holders = {one.address: who for who, lease in self.held.items() for one in lease.addresses}
        try:
            lease = self.ipam.allocate(owner, wanted, "ns/pod", self.foreign.__contains__)
        except CniError as refused:
            if refused.code == errors.ADDRESS_TAKEN:
                assert owner in self.held or address in holders or address in self.foreign
            return
        assert address in {one.address for one in lease.addresses}
        assert holders.get(address) in (None, owner)
        self.held[owner] = lease

    @rule(owner=owners)
    def release(self, owner):
        assert self.ipam.release(owner) == self.held.pop(owner, None)

    @rule(network=st.sampled_from(["red", "blue"]), valid=st.sets(owners))
    def collect(self, network, valid):
        dead = [o for o in self.held if o.network == network]
        dead = [o for o in dead if (o.container_id, o.ifname) not in ids(valid)]
        assert {lease.owner for lease in self.ipam.collect(network, valid)} == set(dead)
        for owner in dead:
            del self.held[owner]

    @rule(network=st.sampled_from(["red", "blue"]), config=configs)
    def change_ranges(self, network, config):
        self.configs[network] = config

    @rule(config=configs)
    def change_ranges_of_both(self, config):
        self.configs = {"red": config, "blue": config}

    @rule(network=st.sampled_from(["red", "blue"]), data=st.data())
    def something_else_takes_an_address(self, network, data):
        range_ = self.configs[network].range_sets[0][0]
        address = range_.start + data.draw(st.integers(0, 6))
        if address not in {one.address for lease in self.held.values() for one in lease.addresses}:
            self.foreign.add(address)

    @rule()
    def something_else_goes_away(self):
        self.foreign.clear()

    @rule(seconds=st.sampled_from([1.0, HOLD_SECONDS]))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(owner=owners)
    def remember(self, owner):
        self.store.remember(Attachment(owner, PodRef(), "/ns", "hc0", {}, {}, {}, 1.0))
        self.store.save_plugin_state(owner, PluginState(0, "x", {}, {}))
        self.remembered.add(owner)
        self.states[owner] = self.boot

    @rule(owner=owners)
    def forget(self, owner):
        assert self.store.forget(owner) == (owner in self.remembered)
        self.remembered.discard(owner)

    @rule(owner=owners)
    def drop_states(self, owner):
        self.store.drop_plugin_state(owner, 0)
        self.states.pop(owner, None)

    @rule()
    def restart(self):
        self.store.close()
        self.open()

    @rule()
    def reboot(self):
        self.store.close()
        self.boot += 1
        self.held, self.remembered, self.foreign = {}, set(), set()
        self.open()

    @rule(
        owner=owners,
        what=st.sampled_from(["allocate", "release", "collect"]),
        step=st.integers(1, 400),
    )
    def crash(self, owner, what, step):
        """The database stops at any instruction of any statement, and a new process goes on."""
        with suppress(CniError):
            with self.store.transaction() as db:
                db.set_progress_handler(Countdown(step), 1)
            if what == "allocate":
                config = self.configs[owner.network]
                self.ipam.allocate(owner, config, "ns/pod", self.foreign.__contains__)
            elif what == "release":
                self.ipam.release(owner)
            else:
                self.ipam.collect(owner.network, [])
        self.store.close()
        self.open()
        # Either it happened or it did not; nothing in between.
        for known in (
            [owner] if what != "collect" else [o for o in self.held if o.network == owner.network]
        ):
            lease = self.ipam.lease(known)
            if known in self.held and lease is not None:
                assert lease == self.held[known]
            elif lease is not None:
                assert what == "allocate"
                assert len(lease.addresses) == self.sets(owner.network)
                if self.foreign & {one.address for one in lease.addresses}:
                    self.ipam.release(known)  # ended before the kernel's answer was noted
                    continue
            self.set_held(known, lease)

    def set_held(self, owner, lease):
        if lease is None:
            self.held.pop(owner, None)
        else:
            self.held[owner] = lease

    @rule()
    def the_file_breaks_and_what_is_seen_is_adopted(self):
        self.store.close()
        with open(self.path, "r+b") as file:
            file.write(b"broken " * 100)
        self.open()
        assert self.store.lost is not None
        for owner, lease in self.held.items():
            assert self.store.adopt(owner, lease.pod, lease.addresses) == lease.addresses
        self.store.recovered()
        self.remembered, self.states = set(), {}

    @invariant()
    def the_store_is_sound(self):
        if hasattr(self, "store"):
            audit(self.store)

    @invariant()
    def everyone_has_what_they_should_have_and_nobody_else(self):
        if not hasattr(self, "store"):
            return
        known = {lease.owner: lease for net in ("red", "blue") for lease in self.ipam.leases(net)}
        assert known == self.held
        given = [one for lease in known.values() for one in addresses(lease)]
        assert len(given) == len(set(given))
        assert {one.owner for one in self.store.attachments()} == self.remembered
        for net in ("red", "blue"):
            assert set(self.store.owners_with_plugin_states(net)) == {
                owner for owner in self.states if owner.network == net
            }


class Countdown:
    """Tells SQLite to give up, once."""

    def __init__(self, steps):
        self.steps = steps

    def __call__(self):
        self.steps -= 1
        return self.steps == 0


def ids(valid):
    return {(owner.container_id, owner.ifname) for owner in valid}


IpamMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("IPAM_MACHINE_EXAMPLES", "120")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestAnySequenceOfOperationsAndCrashesKeepsTheInvariants = IpamMachine.TestCase
