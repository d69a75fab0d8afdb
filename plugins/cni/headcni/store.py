"""What must outlive a call: allocations, attachments and the chain's states, in one SQLite file.

Every CNI call may be a process of its own and the daemon has threads, so: between processes
SQLite's own locks, between threads one connection behind one lock. A connection per thread would
gain nothing (SQLite has a single writer), would cost an open in each new thread, and would wait
by SQLite's sleeping back-off where a lock hands over at once. A Store does not survive fork().
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from ipaddress import ip_address
from typing import Any, Callable, NamedTuple, TypeVar, final

from .errors import STORE, TRY_AGAIN, CniError
from .model import Address, Lease, LeasedAddress, Owner, PodRef
from .record import dataclass, field
from .result import leased_by
from .runtime_config import storable

T = TypeVar("T")

DATA_DIR = "/var/lib/cni/headcni"
PRESENT = -1.0  # of a mesh interface: it is there
FILE_NAME = "headcni.db"
BOOT_ID_FILE = "/proc/sys/kernel/random/boot_id"
BUSY_SECONDS = 10.0
KEPT_ASIDE = 3
ROOM = 256 << 10  # bytes; a disk with less has no room for the store's log and its index
STATES_KEPT_SECONDS = 30 * 86400.0
_SUFFIXES = ("", "-wal", "-shm")
_UNUSABLE = "the allocation store cannot be used"

# Addresses are big-endian BLOBs: those of one family sort as numbers do, 128 bits included.
# Only SQL that SQLite 3.34 knows (RHEL 9, Debian 11): no RETURNING, no STRICT.
_VERSION_1 = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    # One address, one holder, whatever the network: a node has one routing table.
    """CREATE TABLE allocation (
        address BLOB PRIMARY KEY, network TEXT NOT NULL, container_id TEXT NOT NULL,
        ifname TEXT NOT NULL, position INTEGER NOT NULL, prefixlen INTEGER NOT NULL,
        gateway BLOB, pod TEXT NOT NULL, created REAL NOT NULL) WITHOUT ROWID""",
    """CREATE UNIQUE INDEX allocation_owner
        ON allocation (network, container_id, ifname, position)""",
    "CREATE TABLE conflict (address BLOB PRIMARY KEY, until REAL NOT NULL) WITHOUT ROWID",
    # `ranges` is what the pools were built from; a difference, or '', means build them again.
    "CREATE TABLE network (name TEXT PRIMARY KEY, ranges TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE pool (
        id INTEGER PRIMARY KEY, network TEXT NOT NULL, set_index INTEGER NOT NULL,
        range_index INTEGER NOT NULL, subnet TEXT NOT NULL, first BLOB NOT NULL,
        last BLOB NOT NULL, cursor BLOB, UNIQUE (network, set_index, range_index))""",
    # What a pool may hand out ('usable') and what of it nobody has ('free'). The key's columns
    # come first: of others SQLite 3.40's integrity_check says that they are NULL.
    """CREATE TABLE span (
        pool INTEGER NOT NULL, kind TEXT NOT NULL, last BLOB NOT NULL, first BLOB NOT NULL,
        PRIMARY KEY (pool, kind, last)) WITHOUT ROWID""",
    """CREATE TABLE imported (
        network TEXT NOT NULL, directory TEXT NOT NULL, taken INTEGER NOT NULL, at REAL NOT NULL,
        PRIMARY KEY (network, directory)) WITHOUT ROWID""",
    """CREATE TABLE attachment (
        network TEXT NOT NULL, container_id TEXT NOT NULL, ifname TEXT NOT NULL,
        pod_namespace TEXT NOT NULL, pod_name TEXT NOT NULL, pod_uid TEXT NOT NULL,
        netns TEXT NOT NULL, host_ifname TEXT NOT NULL, config TEXT NOT NULL,
        result TEXT NOT NULL, state TEXT NOT NULL, created REAL NOT NULL,
        PRIMARY KEY (network, container_id, ifname))""",
    "CREATE INDEX attachment_container ON attachment (container_id)",
    # What every node-wide nft ruleset is made from. host_ip is '' for any address of the family.
    """CREATE TABLE firewall (
        network TEXT PRIMARY KEY, pods TEXT NOT NULL, masqueraded TEXT NOT NULL,
        cluster TEXT NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE port (
        family INTEGER NOT NULL, protocol TEXT NOT NULL, host_ip TEXT NOT NULL,
        host_port INTEGER NOT NULL, pod_ip TEXT NOT NULL, pod_port INTEGER NOT NULL,
        network TEXT NOT NULL, container_id TEXT NOT NULL, ifname TEXT NOT NULL,
        pod TEXT NOT NULL,
        PRIMARY KEY (family, protocol, host_ip, host_port)) WITHOUT ROWID""",
    "CREATE INDEX port_owner ON port (network, container_id, ifname)",
    """CREATE TABLE plugin_state (
        network TEXT NOT NULL, container_id TEXT NOT NULL, ifname TEXT NOT NULL,
        place INTEGER NOT NULL, type TEXT NOT NULL, config TEXT NOT NULL, result TEXT NOT NULL,
        boot TEXT NOT NULL, created REAL NOT NULL,
        PRIMARY KEY (network, container_id, ifname, place))""",
)

# A pod's link that DEL took down and did not wait for. Its address is free when it is gone.
_VERSION_2 = (
    """CREATE TABLE tombstone (
        network TEXT NOT NULL, container_id TEXT NOT NULL, ifname TEXT NOT NULL,
        link INTEGER NOT NULL, PRIMARY KEY (network, container_id, ifname)) WITHOUT ROWID""",
)

# What of the nft sets live pods need: several for one network, if its configuration has changed or
# pods have ranges of their own. `ranges` is JSON. The table `firewall` says the same for releases
# that do not know this one.
_VERSION_3 = (
    """CREATE TABLE firewall_need (
        network TEXT NOT NULL, ranges TEXT NOT NULL, place INTEGER NOT NULL,
        PRIMARY KEY (network, ranges)) WITHOUT ROWID""",
    """INSERT INTO firewall_need SELECT network, '{"cluster": ' || cluster || ', "masqueraded": '
        || masqueraded || ', "pods": ' || pods || '}', 0 FROM firewall""",
)

# Step i brings version i to i + 1. A step that older releases can live with (a new table or
# index) leaves meta.oldest_reader alone, so that a roll-back of the release keeps the store; any
# other (a new column, too) raises it to its own version.
MIGRATIONS: tuple[tuple[str, ...], ...] = (_VERSION_1, _VERSION_2, _VERSION_3)


# Pools stay, for their cursors: addresses of before the reboot are not used again at once.
_END_OF_BOOT = (
    "DELETE FROM allocation",
    "DELETE FROM conflict",
    "DELETE FROM span",
    "DELETE FROM attachment",
    "DELETE FROM port",
    "DELETE FROM firewall",
    "DELETE FROM firewall_need",
    "DELETE FROM tombstone",
    "DELETE FROM meta WHERE key IN ('lost', 'new')",
    "UPDATE network SET ranges = ''",
)


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
    """A link of a pod that is gone, by its index: to be deleted before the address is free."""

    owner: Owner
    link: int


class Lost(NamedTuple):
    """The store began anew though pods may be running: look for their addresses and adopt them."""

    reason: str
    moved_to: str  # "" if there was nothing to move
    at: float


class LastKnown(NamedTuple):
    """What can still be read of one owner in a store that cannot be used."""

    attachment: Attachment | None = None
    addresses: tuple[Address, ...] = ()
    states: tuple[PluginState, ...] = ()

    def plugin_states(self, _owner: Owner) -> list[PluginState]:
        return list(self.states)

    def drop_plugin_state(self, _owner: Owner, _index: int) -> None:
        """Left for when the store can be written; see `unrecorded`."""


class StoreReplaced(CniError):
    """The database was unusable and has been replaced; the same work may be done again."""


class StoreTooNew(CniError):
    """A newer release has written the database. It is sound, and stays as it is."""


@final
class Store:
    """The node's memory. Opening it is cheap; keep one per process and close it at the end."""

    def __init__(self, path: str = f"{DATA_DIR}/{FILE_NAME}", boot_id: str | None = None) -> None:
        self.path = path
        self.boot_id = _boot_id() if boot_id is None else boot_id
        self._lock = threading.RLock()
        self._db: sqlite3.Connection
        self._file: tuple[int, int] = (0, 0)
        self._usable = False
        self._unverified = False
        self.opens = 0  # how often the file was opened: more than once if it was replaced
        try:
            with _translated(path):
                self._open()
        except BaseException:
            self._close_quietly()
            raise

    @classmethod
    def in_directory(cls, data_dir: str = DATA_DIR, boot_id: str | None = None) -> Store:
        return cls(os.path.join(data_dir, FILE_NAME), boot_id)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def log_size(self) -> int:
        """In bytes, of SQLite's log beside the database."""
        try:
            return os.stat(f"{self.path}-wal").st_size
        except OSError:
            return 0

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_unused: object) -> None:
        self.close()

    def transaction(self) -> AbstractContextManager[sqlite3.Connection]:
        """All of it or nothing, nobody else writing meanwhile. Inside another one it joins that."""
        return self._session("BEGIN IMMEDIATE")

    def atomically(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do the work in a transaction; once more if the database had to be replaced."""
        return self._twice("BEGIN IMMEDIATE", work)

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do work that only reads, against one consistent picture."""
        return self._twice("BEGIN", work)

    def prove_writable(self) -> None:
        """An empty transaction writes nothing, and succeeds on a full disk."""
        self._write("INSERT OR REPLACE INTO meta VALUES ('proved', ?)", str(time.time()))

    @property
    def lost(self) -> Lost | None:
        """Set while addresses may be in use that the store does not know; see `recovered`.

        It is kept in the database: the process that finds it broken may be a DEL, and the one
        that can look around comes later.
        """
        row = self._one("SELECT value FROM meta WHERE key = 'lost'")
        return Lost(*json.loads(row[0])) if row else None

    def recovered(self) -> None:
        """What was in use has been adopted: forget that anything was lost."""
        self._write("DELETE FROM meta WHERE key IN ('lost', 'new')")

    def is_unverified(self) -> bool:
        """Whether somebody has to look for addresses in use: the store is new, or was lost. Asked
        by every call, so it is known from opening the file, unless that was replaced since."""
        if _identity(self.path) != self._file:
            self.read(lambda _unused: None)
        if self._unverified:
            self._unverified = self.read(is_unverified)
        return self._unverified

    def adopt(
        self, owner: Owner, pod: str, addresses: Iterable[LeasedAddress]
    ) -> tuple[LeasedAddress, ...]:
        """Take addresses as held by the owner because they were seen in use; say which were new.

        An address that somebody holds stays with its holder.
        """
        wanted = tuple(addresses)

        def work(db: sqlite3.Connection) -> tuple[LeasedAddress, ...]:
            taken = insert_allocations(db, owner, pod, wanted)
            for leased in taken:
                db.execute("DELETE FROM conflict WHERE address = ?", (leased.address.packed,))
            if taken:  # free space is computed from allocations: have every pool built again
                db.execute("UPDATE network SET ranges = ''")
            return taken

        return self.atomically(work)

    def mesh_seen(self, name: str) -> float | None:
        """When STATUS first missed an interface of this boot, in seconds since then; PRESENT if it
        was there last time; None if it never was."""
        row = self._one("SELECT value FROM meta WHERE key = ?", f"mesh {name}")
        boot, _unused, since = row[0].rpartition(" ") if row else ("", "", "0")
        return float(since) if boot == self.boot_id and row else None

    def note_mesh(self, name: str, since: float) -> None:
        value = f"{self.boot_id} {since}"
        self._write("INSERT OR REPLACE INTO meta VALUES (?, ?)", f"mesh {name}", value)

    def attachment(self, owner: Owner) -> Attachment | None:
        row = self._one(_SELECT_ATTACHMENT, *_key(owner))
        return _attachment(row) if row else None

    def attachments(self, network: str = "") -> list[Attachment]:
        """Those of a network, or all of them, oldest first."""
        rows = self._all(
            "SELECT * FROM attachment WHERE ? IN ('', network) ORDER BY created",
            network,
        )
        return [_attachment(row) for row in rows]

    def attachment_counts(self) -> dict[str, int]:
        """How many there are on each network, without reading what is in them."""
        return dict(self._all("SELECT network, count(*) FROM attachment GROUP BY network"))

    def remember(self, attachment: Attachment) -> None:
        """Keep it, in place of what was known of the same owner."""
        pod = attachment.pod
        self._write(
            "INSERT OR REPLACE INTO attachment VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *_key(attachment.owner),
            *(pod.namespace, pod.name, pod.uid),
            *(attachment.netns, attachment.host_ifname),
            *map(_dump, (storable(attachment.config), attachment.result, attachment.state)),
            attachment.created or time.time(),
        )

    def forget(self, owner: Owner) -> bool:
        """Drop it, and nothing is left of it; false if it was not known."""

        def work(db: sqlite3.Connection) -> bool:
            db.execute(
                "DELETE FROM tombstone WHERE network = ? AND container_id = ? AND ifname = ?",
                _key(owner),
            )
            return _drop_attachment(db, owner)

        return self.atomically(work)

    def bury(self, tombstone: Tombstone) -> None:
        """Drop the owner's attachment and know in its place that a link of it is to be deleted."""

        def work(db: sqlite3.Connection) -> None:
            _drop_attachment(db, tombstone.owner)
            db.execute(
                "INSERT OR REPLACE INTO tombstone VALUES (?, ?, ?, ?)",
                (*_key(tombstone.owner), tombstone.link),
            )

        self.atomically(work)

    def tombstones(self) -> list[Tombstone]:
        rows = self._all("SELECT network, container_id, ifname, link FROM tombstone")
        return [Tombstone(Owner(*row[:3]), row[3]) for row in rows]

    def save_plugin_state(self, owner: Owner, state: PluginState) -> None:
        def work(db: sqlite3.Connection) -> None:
            # A runtime that makes ids from names may come back with the same one after a reboot:
            # steps of the old sandbox must not be mixed with those of the new one.
            db.execute(
                "DELETE FROM plugin_state"
                " WHERE network = ? AND container_id = ? AND ifname = ? AND boot != ?",
                (*_key(owner), self.boot_id),
            )
            db.execute(
                "INSERT OR REPLACE INTO plugin_state VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *_key(owner),
                    *(state.index, state.type, _dump(storable(state.config))),
                    _dump(state.result),
                    *(self.boot_id, time.time()),
                ),
            )

        self.atomically(work)

    def plugin_states(self, owner: Owner) -> list[PluginState]:
        """What has run for the owner, in the order of the chain."""
        rows = self._all(
            _SELECT_STATES,
            *_key(owner),
        )
        return [_state(row) for row in rows]

    def drop_plugin_state(self, owner: Owner, index: int) -> None:
        self._write(
            "DELETE FROM plugin_state"
            " WHERE network = ? AND container_id = ? AND ifname = ? AND place = ?",
            *_key(owner),
            index,
        )

    def owners_with_plugin_states(self, network: str) -> list[Owner]:
        """For GC: whose delegates have something to undo, those of earlier boots included."""
        rows = self._all(
            "SELECT DISTINCT network, container_id, ifname FROM plugin_state WHERE network = ?",
            network,
        )
        return [Owner(*row) for row in rows]

    def _one(self, sql: str, *values: Any) -> Any:
        return self.read(lambda db: db.execute(sql, values).fetchone())

    def _all(self, sql: str, *values: Any) -> list[Any]:
        return self.read(lambda db: db.execute(sql, values).fetchall())

    def _write(self, sql: str, *values: Any) -> bool:
        return self.atomically(lambda db: db.execute(sql, values).rowcount > 0)

    def _twice(self, begin: str, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            with self._session(begin) as db:
                return work(db)
        except StoreReplaced:
            with self._session(begin) as db:
                return work(db)

    @contextmanager
    def _session(self, begin: str) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if not self._usable:  # replacing it has failed, for want of room say: it is tried again
                with _translated(self.path):
                    self._open(vanished=True)
            if self._db.in_transaction:
                yield self._db
                return
            with _translated(self.path):
                try:
                    self._begin(begin)
                    yield self._db
                    self._db.execute("COMMIT")
                except sqlite3.DatabaseError as problem:
                    self._roll_back()
                    reason = _corruption(problem)
                    self._open(broken=reason)
                    raise StoreReplaced(STORE, "the store was replaced", reason) from None
                except BaseException:
                    self._roll_back()
                    raise

    def _begin(self, begin: str) -> None:
        self._db.execute(begin)
        if _identity(self.path) != self._file:
            # Another process set the file aside, or somebody deleted it: what is written to the
            # old one now, nobody will ever read.
            self._db.execute("ROLLBACK")
            self._open(vanished=True)
            self._db.execute(begin)

    def _roll_back(self) -> None:
        with suppress(sqlite3.Error):  # it is broken: whoever called is about to say so
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _open(self, broken: str = "", vanished: bool = False) -> None:
        """Connect. What changes the file itself is done by one process at a time."""
        self._usable = False
        self.opens += 1
        try:
            if broken or not self._connect() or self._version() != len(MIGRATIONS):
                self._repair(broken, vanished)
            self._enter_boot()
            self._usable = True
        except sqlite3.DatabaseError as problem:
            reason = _corruption(problem)
            if broken:
                raise
            self._open(broken=reason)
        except OSError as problem:
            raise CniError(STORE, _UNUSABLE, _explained(self.path, str(problem))) from problem

    def _connect(self) -> bool:
        """Open the file if it is there, and know which one it was."""
        self._close_quietly()
        self._file = _identity(self.path)
        if self._file == (0, 0):
            return False
        self._db = sqlite3.connect(
            self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        if _identity(self.path) != self._file:
            return self._connect()  # replaced under our hands
        # A commit need not survive a power cut, since after it everything here is dead anyway;
        # but the file must stay sound for the plugin states. In WAL mode that is NORMAL: no
        # fsync per commit, one per checkpoint. (OFF would save that one and risk the file.)
        self._db.execute("PRAGMA synchronous = NORMAL")
        return True

    def _version(self) -> int:
        """The schema's version as far as it matters: newer ones that we can use count as ours."""
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version == 0:  # the file is only ever put in place complete
            raise sqlite3.DatabaseError("the file is empty or of something else")
        if version > len(MIGRATIONS):
            self._refuse_if_too_new(version)
            version = len(MIGRATIONS)
        return int(version)

    def _refuse_if_too_new(self, version: int) -> None:
        select = "SELECT value FROM meta WHERE key = 'oldest_reader'"
        try:
            oldest = int(self._db.execute(select).fetchone()[0])
        except (sqlite3.OperationalError, TypeError, ValueError):
            oldest = version  # a schema that does not even say so in the way that we know
        if oldest > len(MIGRATIONS):
            raise StoreTooNew(
                STORE,
                _UNUSABLE,
                f"{self.path} has schema {version}, and this release knows schemas up to"
                f" {len(MIGRATIONS)}: a newer HeadCNI has written it; install that release again,"
                " or drain the node, move the file away and reboot",
            )

    def _repair(self, broken: str, vanished: bool) -> None:
        """Make, replace or migrate the file, whichever is still needed once it is our turn."""
        os.makedirs(os.path.dirname(self.path) or ".", mode=0o700, exist_ok=True)
        with _file_lock(self.path + ".lock"):
            if broken:
                self._keep_if_newer()
            lost = self._set_aside(broken) if broken else None
            if _identity(self.path) == (0, 0):
                if vanished:
                    lost = Lost("the database file was gone", "", time.time())
                self._put_new(lost)
            self._connect()
            version = self._version()
            if version < len(MIGRATIONS):
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    _migrate(self._db, version)
                    self._db.execute("COMMIT")
                except BaseException:
                    self._roll_back()
                    raise

    def _keep_if_newer(self) -> None:
        """What looks broken to us may have been migrated by a newer release while we had it open:
        a table that we know may be gone."""
        with suppress(sqlite3.Error):
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version > len(MIGRATIONS):
                self._refuse_if_too_new(version)

    def _put_new(self, lost: Lost | None) -> None:
        """Build an empty store beside the place and rename it in: nobody ever sees half of one."""
        unfinished = self.path + ".new"
        for suffix in _SUFFIXES:
            _unlink(unfinished + suffix)
        os.mknod(unfinished, 0o600)
        db = sqlite3.connect(unfinished, isolation_level=None)
        try:
            db.execute("PRAGMA journal_mode = WAL")  # stays with the file
            db.execute("BEGIN")
            _migrate(db, 0)
            meta = [("oldest_reader", "1"), ("boot", self.boot_id)]
            meta.append(("lost", json.dumps(lost)) if lost else ("new", "1"))
            db.executemany("INSERT INTO meta VALUES (?, ?)", meta)
            db.execute("COMMIT")
        finally:
            db.close()
        # A log that was left behind belongs to another file, and would be played into this one.
        for suffix in _SUFFIXES[1:]:
            _unlink(self.path + suffix)
        os.rename(unfinished, self.path)

    def _set_aside(self, reason: str) -> Lost | None:
        """Rename the broken file, unless another process has done so; under the file lock."""
        self._close_quietly()
        if _identity(self.path) != self._file:
            return None
        now = time.time()
        stem = time.strftime(f"{self.path}.broken-%Y%m%dT%H%M%SZ", time.gmtime(now))
        aside, number = stem, 1
        while os.path.exists(aside):
            aside, number = f"{stem}-{number}", number + 1
        for suffix in _SUFFIXES:
            with suppress(FileNotFoundError):
                os.rename(self.path + suffix, aside + suffix)
        _keep_newest(self.path + ".broken-", KEPT_ASIDE)
        return Lost(reason, aside, now)

    def _close_quietly(self) -> None:
        with suppress(AttributeError, sqlite3.Error):  # never opened, or broken
            self._db.close()

    def _enter_boot(self) -> None:
        """On the first open after a reboot, drop what died with the old boot.

        Allocations and attachments belonged to namespaces that are gone. The chain's states stay
        readable: kubelet first sends DEL for the sandboxes of the old boot, and delegates keep
        things that survive one (host-local its files, others a lease somewhere). The ADDs that
        follow have new container ids and may get the same addresses at once, and a late DEL
        cannot free them since its owner holds nothing. States whose DEL never came are dropped
        by GC, or at a reboot after a month.
        """
        known = dict(
            self._db.execute("SELECT key, value FROM meta WHERE key IN ('boot', 'lost', 'new')")
        )
        self._unverified = "lost" in known or "new" in known
        if known.get("boot") == self.boot_id:
            return
        select = "SELECT value FROM meta WHERE key = 'boot'"
        self._db.execute("BEGIN IMMEDIATE")
        try:
            if self._db.execute(select).fetchone() != (self.boot_id,):
                for statement in _END_OF_BOOT:
                    self._db.execute(statement)
                self._db.execute(
                    "DELETE FROM plugin_state WHERE boot != ? AND created < ?",
                    (self.boot_id, time.time() - STATES_KEPT_SECONDS),
                )
                self._db.execute("INSERT OR REPLACE INTO meta VALUES ('boot', ?)", (self.boot_id,))
            self._db.execute("COMMIT")
        except BaseException:
            self._roll_back()
            raise


def insert_allocations(
    db: sqlite3.Connection, owner: Owner, pod: str, addresses: Iterable[LeasedAddress]
) -> tuple[LeasedAddress, ...]:
    """Record addresses as the owner's, after those that it has; what has a holder is left out."""
    (position,) = db.execute(
        "SELECT coalesce(max(position) + 1, 0) FROM allocation"
        " WHERE network = ? AND container_id = ? AND ifname = ?",
        _key(owner),
    ).fetchone()
    taken = []
    for leased in addresses:
        gateway = leased.gateway.packed if leased.gateway is not None else None
        if db.execute(
            "INSERT INTO allocation VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (address) DO NOTHING",
            (
                *(leased.address.packed, *_key(owner), position),
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
    """False if it was not there: somebody else has dropped it, and may have used the owner's name
    for a new pod since."""
    dropped = db.execute(
        "DELETE FROM tombstone WHERE network = ? AND container_id = ? AND ifname = ? AND link = ?",
        (*_key(tombstone.owner), tombstone.link),
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
        _key(owner),
    )
    return dropped.rowcount > 0


def attachment_states(db: sqlite3.Connection) -> list[tuple[str, dict[str, Any]]]:
    """The network and the state of each attachment."""
    rows = db.execute("SELECT network, state FROM attachment")
    return [(network, _load(state)) for network, state in rows]


def is_unverified(db: sqlite3.Connection) -> bool:
    """Whether addresses may be in use that the store does not know of."""
    select = "SELECT 1 FROM meta WHERE key IN ('lost', 'new')"
    return db.execute(select).fetchone() is not None


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
        _key(owner),
    )
    return next(iter(_leases(rows.fetchall())), None)


def _leases(rows: Iterable[Any]) -> list[Lease]:
    """Rows of allocations, an owner's together and in order, as leases."""
    found: dict[Owner, tuple[str, list[LeasedAddress]]] = {}
    for network, container_id, ifname, pod, address, prefixlen, gateway in rows:
        leased = LeasedAddress(
            ip_address(address), prefixlen, None if gateway is None else ip_address(gateway)
        )
        found.setdefault(Owner(network, container_id, ifname), (pod, []))[1].append(leased)
    return [Lease(owner, pod, tuple(addresses)) for owner, (pod, addresses) in found.items()]


def last_known(data_dir: str, owner: Owner) -> LastKnown:
    """Read without writing anything; nothing is known if not even that works.

    A reader of a WAL database makes two files beside it unless they are there. `immutable` does
    without them; it misses what has not been moved from the log into the database itself.
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
            row = db.execute(_SELECT_ATTACHMENT, _key(owner)).fetchone()
            lease = lease_of_owner(db, owner)
            states = db.execute(_SELECT_STATES, _key(owner)).fetchall()
            return LastKnown(
                _attachment(row) if row else None,
                tuple(one.address for one in lease.addresses) if lease else (),
                tuple(map(_state, states)),
            )
        except (sqlite3.Error, ValueError, TypeError, IndexError):
            continue  # broken, or of a schema that we do not know
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


def _key(owner: Owner) -> tuple[str, str, str]:
    return owner.network, owner.container_id, owner.ifname


def _dump(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _load(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}  # a damaged row must not stop a DEL, which can do without
    return value if isinstance(value, dict) else {}


def _boot_id() -> str:
    try:
        with open(BOOT_ID_FILE, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""  # no /proc: every boot looks the same, and GC has to do the cleaning


def _identity(path: str) -> tuple[int, int]:
    """Which file the path names now; (0, 0) if none."""
    try:
        stat = os.stat(path)
    except OSError:
        return (0, 0)
    return stat.st_dev, stat.st_ino


def _migrate(db: sqlite3.Connection, version: int) -> None:
    for step in MIGRATIONS[version:]:
        for statement in step:
            db.execute(statement)
    db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _keep_newest(prefix: str, count: int) -> None:
    directory, start = os.path.split(prefix)
    names = [name for name in os.listdir(directory or ".") if name.startswith(start)]
    for name in sorted(name for name in names if not name.endswith(("-wal", "-shm")))[:-count]:
        for suffix in _SUFFIXES:
            _unlink(os.path.join(directory, name + suffix))


@contextmanager
def _file_lock(path: str) -> Iterator[None]:
    from .shared.filelock import lock  # rarely needed: the file is made, migrated or replaced

    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            lock(handle, path, BUSY_SECONDS)
        except TimeoutError as problem:
            raise CniError(
                TRY_AGAIN, f"the allocation store was busy for {BUSY_SECONDS:.0f} s", str(problem)
            ) from None
        yield
    finally:
        os.close(handle)


def _corruption(problem: sqlite3.DatabaseError) -> str:
    """The reason if the file itself is bad; anything else is raised again.

    Python raises plain DatabaseError for SQLITE_CORRUPT and SQLITE_NOTADB and a subclass for all
    else (the code itself is in the exception only since 3.11).
    """
    text = str(problem)
    if problem.__class__ is sqlite3.DatabaseError:
        return text
    if "no such table" in text or "decode to UTF-8" in text:
        return text
    raise problem


@contextmanager
def _translated(path: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as problem:
        text = str(problem)
        if "locked" in text:
            raise CniError(
                TRY_AGAIN,
                f"the allocation store was busy for {BUSY_SECONDS:.0f} s",
                f"{path}: another process holds it; see who with: fuser -v {path}",
            ) from problem
        raise CniError(STORE, _UNUSABLE, _explained(path, text)) from problem


def _explained(path: str, text: str) -> str:
    """What is wrong with the disk, and what to do: SQLite says "disk I/O error" of most of it."""
    folder = os.path.dirname(path) or "."
    try:
        disk = os.statvfs(folder)
    except OSError:
        return f"{path}: {text}; check the directory and its permissions"
    if disk.f_flag & os.ST_RDONLY:
        return (
            f"{path}: the file system of {folder} is read-only ({text}); see why with: dmesg,"
            " then mount it read-write again"
        )
    if disk.f_files and not disk.f_ffree:
        return f"{path}: the disk has no inodes left ({text}); delete files; see: df -i {folder}"
    if disk.f_bfree * disk.f_frsize < ROOM or "full" in text or "No space" in text:
        return f"{path}: the disk is full ({text}); free some space; see: df -h {folder}"
    return f"{path}: {text}; check permissions and the disk"
