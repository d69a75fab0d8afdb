"""Keeps pods' packets passing: our own nft tables complete, and other firewalls informed about
pods.

Runs when any nftables rule changes, and at intervals.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Callable, Optional

from .. import unrecorded
from ..datapath import blocked, firewall, guard, loopback_ports
from ..datapath.host_firewall import Cooperation, Found, PodTraffic, remove
from ..datapath.netlink import NETLINK_NETFILTER, SOL_NETLINK, Netlink
from ..errors import CniError
from ..log import Log
from ..mesh.localapi import LocalApi
from ..model import Owner
from ..periodic import Periodic, Source, WakeUp
from ..recover import recover
from ..store import Store

NETLINK_ADD_MEMBERSHIP, NFNLGRP_NFTABLES = 1, 7
QUIET_SECONDS = 0.05  # a reload causes many changes: wait until they have ended
SHORTEST_PAUSE = 1.0  # between two passes because of changes
# Between passes while a firewall could not be told, or while the older iptables blocks, which does
# not announce changes.
POLL_SECONDS = 2.0
SHARE = 5  # passes take at most a fifth of the time, however many rules there are
STOP_SECONDS = 5.0
RETRY_SECONDS = 60.0
MOST_TRIES = 3  # then give up on a tailscaled that cannot write its rules
_HEADER = struct.Struct("=IH")  # the first fields of a netlink message: length and type
_ONLY_ELEMENTS = (12, 14, 15)  # NFT_MSG_NEWSETELEM, _DELSETELEM and _NEWGEN
NETFILTER_ON = 2
MARKER = "/var/lib/headcni/netfilter-mode-is-switched"

log = Log("firewalls")


class TailscaleRules:
    """The iptables rules of the node's own tailscaled, in host mode. A firewall that starts may
    flush them, and tailscaled writes them again only when its netfilter mode changes."""

    def __init__(self, api: LocalApi, marker: str = MARKER) -> None:
        self._api, self._marker = api, marker
        self._not_before = 0.0
        self._tries = 0

    def ensure(self, has_rules: bool) -> bool:
        """Returns whether the rules had to be written again. The mode is switched off and on. A
        marker file exists in between, so if this process dies, the next one switches it on."""
        if os.path.exists(self._marker):
            self._switch_on()
            return True
        if has_rules:
            self._tries = 0
            return False
        if self._tries >= MOST_TRIES or time.monotonic() < self._not_before:
            return False
        self._not_before = time.monotonic() + RETRY_SECONDS
        if not self._api.status(peers=False).running or self._mode() != NETFILTER_ON:
            return False
        with open(self._marker, "w", encoding="ascii") as file:
            os.fsync(file.fileno())
        self._tries += 1
        self._api.edit_prefs({"NetfilterMode": 0})
        self._switch_on()
        return True

    def _mode(self) -> int:
        return int(self._api.prefs().get("NetfilterMode") or 0)

    def _switch_on(self) -> None:
        self._api.edit_prefs({"NetfilterMode": NETFILTER_ON})
        os.unlink(self._marker)


class Firewalls:
    """Works from start() to stop(), once. When it stops, everything stays in place."""

    def __init__(
        self,
        store: Callable[[], Store],
        traffic: Callable[[], PodTraffic],
        manage: bool,
        interval: float,
        on_pass: Callable[[float, bool, int], None],
        tailscale: Optional[TailscaleRules] = None,
        limit: Callable[[], object] = lambda: None,
    ) -> None:
        """`on_pass` gets the duration of a pass, whether it succeeded, and the number of
        repairs. `limit` makes sure that the store has the limits on what pods may reach of the
        tailnet."""
        self._store, self._traffic, self._on_pass = store, traffic, on_pass
        self._limit = limit
        self._manage = manage
        self._others = Cooperation(manage)
        self._tailscale = tailscale if manage else None
        self._problem = self._others_problem = ""
        self._left_alone = False
        self._began = self._took = 0.0
        self._loop = Periodic(
            "firewalls", self._work, interval, delay=self._delay, failed=self._failed
        )

    @property
    def found(self) -> tuple[Found, ...]:
        return self._others.found

    def held_back(self) -> str:
        """For /ready: what keeps pods' packets from passing; empty if nothing does."""
        return self._problem

    def start(self) -> None:
        changes = _changes()
        self._loop.start([Source(changes, lambda: _has_rules(changes))], at_end=changes.close)

    def stop(self) -> None:
        self._loop.stop(STOP_SECONDS)
        blocked.write("")

    def every(self, seconds: float) -> None:
        """Change the interval between regular passes."""
        self._loop.every(seconds)

    def is_alive(self) -> bool:
        return self._loop.is_alive()

    def _work(self) -> float:
        self._began = time.monotonic()
        self._pass()
        often = self._others.legacy or bool(self._others_problem)
        interval = min(self._loop.interval, POLL_SECONDS) if often else self._loop.interval
        return self._began + interval - time.monotonic()

    def _failed(self, bug: Exception) -> None:
        """Rules of other programs may be odd. The next pass may succeed."""
        log.error("a bug in HeadCNI", problem=repr(bug))
        self._tell(f"a bug in HeadCNI: {bug!r}")

    def _delay(self, wake_up: WakeUp) -> float:
        """After a rule has changed, wait until the changes have ended."""
        if wake_up.woken:
            return 0.0
        pause = self._began + max(SHORTEST_PAUSE, SHARE * self._took) - time.monotonic()
        return min(wake_up.left, max(QUIET_SECONDS, pause))

    def _pass(self) -> None:
        began, repaired, problems = time.monotonic(), [], []
        others: list[str] = []
        deleted: frozenset[Owner] = frozenset()
        if not self._manage and not self._left_alone:
            self._leave_alone()
        try:
            deleted = unrecorded.outstanding(self._store())
            if self._store().is_unverified():
                recover(self._store())  # no CNI call may come for a long time
            self._limit()
            if firewall.repair(self._store(), deleted):
                repaired.append("the nft table inet headcni")
        except (CniError, OSError) as problem:
            problems.append(str(problem))
        try:
            with Netlink() as kernel:
                unchecked = guard.repair(self._store(), kernel, deleted)
            repaired += [f"anti-spoofing: {line}" for line in unchecked]
        except (CniError, OSError) as problem:  # pods are reachable without it
            log.error("pods are not protected against spoofing", problem=problem)
        try:
            with Netlink() as kernel:
                reopened = loopback_ports.repair(kernel, self._traffic().bridges)
            repaired += [f"{name}: 127.0.0.0/8 was not kept out" for name in reopened]
        except (CniError, OSError) as problem:
            log.error("pods may reach the node's loopback addresses", problem=problem)
        try:
            found = self._others.ensure(self._traffic())
            repaired += self._others.repaired
            others = [
                firewall_found.in_words()
                for firewall_found in found
                if firewall_found.problem and not firewall_found.blocks_node
            ]
        except (CniError, OSError) as problem:
            problems.append(str(problem))
        try:
            if self._tailscale and self._tailscale.ensure(self._others.has_tailscale_rules):
                repaired.append("the iptables rules of tailscaled")
        except (CniError, OSError) as problem:  # pods do not need them
            log.warn("tailscaled's own rules were not written again", problem=problem)
        for line in repaired:
            log.info("repaired", was=line)
        self._block("; ".join(others))
        problems += others
        self._tell("; ".join(problems))
        self._took = time.monotonic() - began
        self._on_pass(self._took, not problems, len(repaired))

    def _leave_alone(self) -> None:
        """With network.firewall: none, remove what an earlier configuration has added."""
        try:
            for removed in remove():
                log.info("removed, since network.firewall is none", what=removed)
            self._left_alone = True
        except (CniError, OSError) as problem:
            log.warn("not removed, though network.firewall is none", problem=problem)

    def _block(self, problem: str) -> None:
        """For STATUS, which may cause pods to be evicted: only lasting problems that we should
        solve."""
        lasting = problem if problem == self._others_problem and self._manage else ""
        blocked.write(lasting)
        self._others_problem = problem

    def _tell(self, problem: str) -> None:
        if problem != self._problem:
            if problem:
                log.error("packets of pods may not pass", problem=problem)
            else:
                log.info("packets of pods pass again")
            self._problem = problem


def _changes() -> socket.socket:
    """A socket that becomes readable when a rule of any nftables table has changed."""
    listener = socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER
    )
    listener.bind((0, 0))
    listener.setsockopt(SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, NFNLGRP_NFTABLES)
    listener.setblocking(False)
    return listener


def _has_rules(changes: socket.socket) -> bool:
    """Whether more than set elements has changed, which every ADD and DEL changes."""
    found = False
    while True:
        try:
            data, at = changes.recv(65536), 0
        except BlockingIOError:
            return found
        except OSError:  # the buffer was full: something has changed, which is all we want to know
            found = True
            continue
        while at + _HEADER.size <= len(data):
            length, kind = _HEADER.unpack_from(data, at)
            found = found or kind & 0xFF not in _ONLY_ELEMENTS
            at += max(length + 3 & ~3, 16)
