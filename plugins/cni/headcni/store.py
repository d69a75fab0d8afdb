"""The records that must outlive a call: allocations, attachments, tombstones and chains' states."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from ipaddress import ip_address

from . import light_json as json
from .database import FILE_NAME, Database
from .model import Address, Lease, LeasedAddress, Owner, PodRef
from .record import TYPE_CHECKING, NamedTuple, dataclass, field
from .result import leased_by
from .runtime_config import storable

if TYPE_CHECKING:
    import sqlite3
    from typing import Any
else:
    import _sqlite3 as sqlite3  # `sqlite3` imports `datetime`

PRESENT = -1.0  # the mesh interface exists


_SELECT_ATTACHMENT = (
    "SELECT * FROM attachment WHERE network = ? AND container_id = ? AND ifname = ?"
)
_SELECT_STATES = (
    "SELECT place, type, config, result FROM plugin_state"
    " WHERE network = ? AND container_id = ? AND ifname = ? ORDER BY place"
)


@dataclass(frozen=True)
class Attachment:
    """One interface of one container, as ADD left it."""

    owner: Owner
    pod: PodRef
    netns: str
    host_ifname: str
    config: dict[str, Any]
    result: dict[str, Any]
    state: dict[str, Any] = field(default_factory=dict)
    created: float = 0.0

    @property
    def leased(self) -> list[LeasedAddress]:
        """The addresses that ADD gave to the pod."""
        return leased_by(self.result)


@dataclass(frozen=True)
class PluginState:
    """One step of a chain that has run, with what its DEL needs."""

    index: int
    type: str
    config: dict[str, Any]
    result: dict[str, Any]


class Tombstone(NamedTuple):
    """The index of a deleted pod's link. The address is free once that link is deleted."""

    owner: Owner
    link: int


class LastKnown(NamedTuple):
    """The readable records of one owner in a store that cannot be used."""

    attachment: Attachment | None = None
    addresses: tuple[Address, ...] = ()
    states: tuple[PluginState, ...] = ()

    def plugin_states(self, _owner: Owner) -> list[PluginState]:
        return list(self.states)

    def drop_plugin_state(self, _owner: Owner, _index: int) -> None:
        """Done later, when the store can be written; see `unrecorded`."""


class Store(Database):
    """The records. Opening it is cheap. A process keeps one, and closes it at the end."""

    def adopt(
        self, owner: Owner, pod: str, addresses: Iterable[LeasedAddress]
    ) -> tuple[LeasedAddress, ...]:
        """Record addresses that were seen in use as the owner's; returns those that were new.

        An address that has a holder stays with it.
        """
        wanted = tuple(addresses)

        def work(db: sqlite3.Connection) -> tuple[LeasedAddress, ...]:
            taken = insert_allocations(db, owner, pod, wanted)
            for leased in taken:
                db.execute("DELETE FROM conflict WHERE address = ?", (leased.address.packed,))
            if taken:  # free addresses are computed from allocations, so rebuild all pools
                db.execute("UPDATE network SET ranges = ''")
            return taken

        return self.atomically(work)

    def mesh_seen(self, name: str) -> float | None:
        """When STATUS first missed an interface, in seconds since the boot; PRESENT if it existed
        last time; None if it never did since the boot."""
        row = self._one("SELECT value FROM meta WHERE key = ?", f"mesh {name}")
        boot, _unused, since = row[0].rpartition(" ") if row else ("", "", "0")
        return float(since) if boot == self.boot_id and row else None

    def note_mesh(self, name: str, since: float) -> None:
        value = f"{self.boot_id} {since}"
        self._write("INSERT OR REPLACE INTO meta VALUES (?, ?)", f"mesh {name}", value)

    def attachment(self, owner: Owner) -> Attachment | None:
        row = self._one(_SELECT_ATTACHMENT, *owner_key(owner))
        return _attachment(row) if row else None

    def attachments(self, network: str = "") -> list[Attachment]:
        """The attachments of a network, or all of them, oldest first."""
        rows = self._all(
            "SELECT * FROM attachment WHERE ? IN ('', network) ORDER BY created",
            network,
        )
        return [_attachment(row) for row in rows]

    def attachment_counts(self) -> dict[str, int]:
        """The number of attachments on each network, without reading their contents."""
        return dict(self._all("SELECT network, count(*) FROM attachment GROUP BY network"))

    def remember(self, attachment: Attachment) -> None:
        """Write the attachment. It replaces an earlier one of the same owner."""
        pod = attachment.pod
        self._write(
            "INSERT OR REPLACE INTO attachment VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *owner_key(attachment.owner),
            *(pod.namespace, pod.name, pod.uid),
            *(attachment.netns, attachment.host_ifname),
            *map(_dump, (storable(attachment.config), attachment.result, attachment.state)),
            attachment.created or time.time(),
        )

    def forget(self, owner: Owner) -> bool:
        """Remove the owner's attachment and tombstone; false if there was no attachment."""

        def work(db: sqlite3.Connection) -> bool:
            db.execute(
                "DELETE FROM tombstone WHERE network = ? AND container_id = ? AND ifname = ?",
                owner_key(owner),
            )
            return _drop_attachment(db, owner)

        return self.atomically(work)

    def bury(self, tombstone: Tombstone) -> None:
        """Replace the owner's attachment by the tombstone of its link."""

        def work(db: sqlite3.Connection) -> None:
            _drop_attachment(db, tombstone.owner)
            db.execute(
                "INSERT OR REPLACE INTO tombstone VALUES (?, ?, ?, ?)",
                (*owner_key(tombstone.owner), tombstone.link),
            )

        self.atomically(work)

    def tombstones(self) -> list[Tombstone]:
        rows = self._all("SELECT network, container_id, ifname, link FROM tombstone")
        return [Tombstone(Owner(*row[:3]), row[3]) for row in rows]

    def save_plugin_state(self, owner: Owner, state: PluginState) -> None:
        def work(db: sqlite3.Connection) -> None:
            # A runtime that makes ids from names may use the same one after a reboot. Steps of the
            # old sandbox must not be mixed with those of the new one.
            db.execute(
                "DELETE FROM plugin_state"
                " WHERE network = ? AND container_id = ? AND ifname = ? AND boot != ?",
                (*owner_key(owner), self.boot_id),
            )
            db.execute(
                "INSERT OR REPLACE INTO plugin_state VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *owner_key(owner),
                    *(state.index, state.type, _dump(storable(state.config))),
                    _dump(state.result),
                    *(self.boot_id, time.time()),
                ),
            )

        self.atomically(work)

    def plugin_states(self, owner: Owner) -> list[PluginState]:
        """The steps that have run for the owner, in the order of the chain."""
        rows = self._all(
            _SELECT_STATES,
            *owner_key(owner),
        )
        return [_state(row) for row in rows]

    def drop_plugin_state(self, owner: Owner, index: int) -> None:
        self._write(
            "DELETE FROM plugin_state"
            " WHERE network = ? AND container_id = ? AND ifname = ? AND place = ?",
            *owner_key(owner),
            index,
        )

    def owners_with_plugin_states(self, network: str) -> list[Owner]:
        """For GC: the owners whose delegates have something to undo, also from earlier boots."""
        rows = self._all(
            "SELECT DISTINCT network, container_id, ifname FROM plugin_state WHERE network = ?",
            network,
        )
        return [Owner(*row) for row in rows]


def insert_allocations(
    db: sqlite3.Connection, owner: Owner, pod: str, addresses: Iterable[LeasedAddress]
) -> tuple[LeasedAddress, ...]:
    """Record addresses as the owner's, after its other ones, unless they have a holder."""
    (position,) = db.execute(
        "SELECT coalesce(max(position) + 1, 0) FROM allocation"
        " WHERE network = ? AND container_id = ? AND ifname = ?",
        owner_key(owner),
    ).fetchone()
    taken = []
    for leased in addresses:
        gateway = leased.gateway.packed if leased.gateway is not None else None
        if db.execute(
            "INSERT INTO allocation VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (address) DO NOTHING",
            (
                *(leased.address.packed, *owner_key(owner), position),
                *(leased.prefixlen, gateway, pod, time.time()),
            ),
        ).rowcount:
            taken.append(leased)
            position += 1
    return tuple(taken)


def holder_of(db: sqlite3.Connection, address: Address) -> Owner | None:
    row = db.execute(
        "SELECT network, container_id, ifname FROM allocation WHERE address = ?", (address.packed,)
    ).fetchone()
    return Owner(*row) if row is not None else None


def drop_tombstone(db: sqlite3.Connection, tombstone: Tombstone) -> bool:
    """False if it did not exist: another process has dropped it, and a new pod may have the owner's
    name since."""
    dropped = db.execute(
        "DELETE FROM tombstone WHERE network = ? AND container_id = ? AND ifname = ? AND link = ?",
        (*owner_key(tombstone.owner), tombstone.link),
    )
    return dropped.rowcount > 0


def owners_buried(db: sqlite3.Connection, network: str) -> set[Owner]:
    rows = db.execute(
        "SELECT network, container_id, ifname FROM tombstone WHERE network = ?", (network,)
    )
    return {Owner(*row) for row in rows}


def _drop_attachment(db: sqlite3.Connection, owner: Owner) -> bool:
    dropped = db.execute(
        "DELETE FROM attachment WHERE network = ? AND container_id = ? AND ifname = ?",
        owner_key(owner),
    )
    return dropped.rowcount > 0


def attachment_states(db: sqlite3.Connection) -> list[tuple[str, dict[str, Any]]]:
    """The network and the state of each attachment."""
    rows = db.execute("SELECT network, state FROM attachment")
    return [(network, _load(state)) for network, state in rows]


def leases_of_network(db: sqlite3.Connection, network: str) -> list[Lease]:
    rows = db.execute(
        "SELECT network, container_id, ifname, pod, address, prefixlen, gateway FROM allocation"
        " WHERE network = ? ORDER BY network, container_id, ifname, position",
        (network,),
    )
    return _leases(rows.fetchall())


def lease_of_owner(db: sqlite3.Connection, owner: Owner) -> Lease | None:
    rows = db.execute(
        "SELECT network, container_id, ifname, pod, address, prefixlen, gateway FROM allocation"
        " WHERE network = ? AND container_id = ? AND ifname = ? ORDER BY position",
        owner_key(owner),
    )
    return next(iter(_leases(rows.fetchall())), None)


def _leases(rows: Iterable[Any]) -> list[Lease]:
    """Leases from rows of allocations, which are sorted by owner and position."""
    found: dict[Owner, tuple[str, list[LeasedAddress]]] = {}
    for network, container_id, ifname, pod, address, prefixlen, gateway in rows:
        leased = LeasedAddress(
            ip_address(address), prefixlen, None if gateway is None else ip_address(gateway)
        )
        found.setdefault(Owner(network, container_id, ifname), (pod, []))[1].append(leased)
    return [Lease(owner, pod, tuple(addresses)) for owner, (pod, addresses) in found.items()]


def last_known(data_dir: str, owner: Owner) -> LastKnown:
    """Read without writing anything; empty if that fails, too.

    A reader of a WAL database creates two files beside it unless they exist. `immutable` does not,
    but it misses what SQLite has not yet moved from the log into the database itself.
    """
    path = os.path.join(data_dir, FILE_NAME)
    for character in "%?#":
        path = path.replace(character, f"%{ord(character):02x}")
    for how in ("mode=ro", "immutable=1"):
        try:
            db = sqlite3.connect(f"file:{path}?{how}", uri=True, timeout=1.0)
        except sqlite3.Error:
            continue
        try:
            row = db.execute(_SELECT_ATTACHMENT, owner_key(owner)).fetchone()
            lease = lease_of_owner(db, owner)
            states = db.execute(_SELECT_STATES, owner_key(owner)).fetchall()
            return LastKnown(
                _attachment(row) if row else None,
                tuple(one.address for one in lease.addresses) if lease else (),
                tuple(map(_state, states)),
            )
        except (sqlite3.Error, ValueError, TypeError, IndexError):
            continue  # it is broken, or has an unknown schema
        finally:
            db.close()
    return LastKnown()


def _state(row: Any) -> PluginState:
    return PluginState(row[0], row[1], _load(row[2]), _load(row[3]))


def _attachment(row: Any) -> Attachment:
    return Attachment(
        owner=Owner(*row[0:3]),
        pod=PodRef(*row[3:6]),
        netns=row[6],
        host_ifname=row[7],
        config=_load(row[8]),
        result=_load(row[9]),
        state=_load(row[10]),
        created=row[11],
    )


def owner_key(owner: Owner) -> tuple[str, str, str]:
    return owner.network, owner.container_id, owner.ifname


def _dump(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _load(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}  # a damaged row must not stop a DEL, which does not need it
    return value if isinstance(value, dict) else {}
