"""The SQLite file of the store: opened, created, migrated, and replaced if it is broken.

Every CNI call may be a process of its own, and the daemon has threads. Processes use SQLite's own
locks. Threads share one connection with a lock. A connection per thread would not be faster, since
SQLite has a single writer: each new thread would have to open it, and would wait with SQLite's
sleeping back-off, whereas a lock continues at once. A Database does not survive fork().
"""

from __future__ import annotations

import os
import time
from _thread import RLock
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from . import light_json as json
from . import schema
from .errors import STORE, TRY_AGAIN, CniError
from .record import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import sqlite3
    from typing import Any, Callable, TypeVar

    from typing_extensions import Self

    T = TypeVar("T")
else:
    import _sqlite3 as sqlite3  # `sqlite3` imports `datetime`

DATA_DIR = "/var/lib/cni/headcni"
FILE_NAME = "headcni.db"
BOOT_ID_FILE = "/proc/sys/kernel/random/boot_id"
BUSY_SECONDS = 10.0
KEPT_ASIDE = 3
ROOM = 256 << 10  # bytes; the store's log and its index need as much
STATES_KEPT_SECONDS = 30 * 86400.0
_SUFFIXES = ("", "-wal", "-shm")
_UNUSABLE = "the allocation store cannot be used"


class Lost(NamedTuple):
    """The store is empty although pods may be running: find and adopt their addresses."""

    reason: str
    moved_to: str  # "" if there was nothing to move
    at: float


class StoreReplaced(CniError):
    """The database was unusable and has been replaced. The same work may be done again."""


class StoreTooNew(CniError):
    """A newer release has written the database. It is valid, and is not changed."""


class Database:
    """The file of the store: opens, replaces and migrates it, and runs transactions."""

    def __init__(self, path: str = f"{DATA_DIR}/{FILE_NAME}", boot_id: str | None = None) -> None:
        self.path = path
        self.boot_id = _boot_id() if boot_id is None else boot_id
        self._lock = RLock()
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
    def in_directory(cls, data_dir: str = DATA_DIR, boot_id: str | None = None) -> Self:
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_unused: object) -> None:
        self.close()

    def transaction(self) -> AbstractContextManager[sqlite3.Connection]:
        """Everything or nothing, and no other process writes meanwhile. It may be nested."""
        return self._session("BEGIN IMMEDIATE")

    def atomically(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do the work in a transaction, and once more if the database had to be replaced."""
        return self._twice("BEGIN IMMEDIATE", work)

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do work that only reads, on one consistent state."""
        return self._twice("BEGIN", work)

    def prove_writable(self) -> None:
        """An empty transaction writes nothing, and succeeds on a full disk."""
        self._write("INSERT OR REPLACE INTO meta VALUES ('proved', ?)", str(time.time()))

    @property
    def lost(self) -> Lost | None:
        """Set while addresses may be in use that the store does not know; see `recovered`.

        It is kept in the database: the process that finds it broken may be a DEL, and a later
        process recovers it.
        """
        row = self._one("SELECT value FROM meta WHERE key = 'lost'")
        return Lost(*json.loads(row[0])) if row else None

    def recovered(self) -> None:
        """The addresses in use have been adopted: forget that they were lost."""
        self._write("DELETE FROM meta WHERE key IN ('lost', 'new')")

    def is_unverified(self) -> bool:
        """Whether the store is new or was lost, so that it may lack addresses in use. Every call
        asks this, so it is read when the file is opened, and again if the file was replaced."""
        if _identity(self.path) != self._file:
            self.read(lambda _unused: None)
        if self._unverified:
            self._unverified = self.read(is_unverified)
        return self._unverified

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
            if not self._usable:  # replacing it has failed, perhaps for lack of space: try again
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
            # Another process set the file aside, or it was deleted: nobody would read what we
            # write to the old one.
            self._db.execute("ROLLBACK")
            self._open(vanished=True)
            self._db.execute(begin)

    def _roll_back(self) -> None:
        with suppress(sqlite3.Error):  # it is broken, and the caller is about to report that
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _open(self, broken: str = "", vanished: bool = False) -> None:
        """Connect. Only one process at a time changes the file itself."""
        self._usable = False
        self.opens += 1
        try:
            if broken or not self._connect() or self._version() != len(schema.MIGRATIONS):
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
        """Open the file if it exists, and remember which file it was."""
        self._close_quietly()
        self._file = _identity(self.path)
        if self._file == (0, 0):
            return False
        self._db = sqlite3.connect(
            self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        if _identity(self.path) != self._file:
            return self._connect()  # it was replaced meanwhile
        # A commit need not survive a power cut, because no pod does. But the file must stay valid
        # for the plugin states. In WAL mode NORMAL does that: an fsync per checkpoint, and none per
        # commit. (OFF would save that one and risk the file.)
        self._db.execute("PRAGMA synchronous = NORMAL")
        return True

    def _version(self) -> int:
        """The version of the schema. Newer versions that we can use count as ours."""
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version == 0:  # a file is complete when it gets its name
            raise sqlite3.DatabaseError("the file is empty or of something else")
        if version > len(schema.MIGRATIONS):
            self._refuse_if_too_new(version)
            version = len(schema.MIGRATIONS)
        return int(version)

    def _refuse_if_too_new(self, version: int) -> None:
        select = "SELECT value FROM meta WHERE key = 'oldest_reader'"
        try:
            oldest = int(self._db.execute(select).fetchone()[0])
        except (sqlite3.OperationalError, TypeError, ValueError):
            oldest = version  # a schema whose `meta` we cannot read
        if oldest > len(schema.MIGRATIONS):
            raise StoreTooNew(
                STORE,
                _UNUSABLE,
                f"{self.path} has schema {version}, and this release knows schemas up to"
                f" {len(schema.MIGRATIONS)}: a newer HeadCNI has written it; install that release"
                " again, or drain the node, move the file away and reboot",
            )

    def _repair(self, broken: str, vanished: bool) -> None:
        """Create, replace or migrate the file, if it is still necessary once we have the lock."""
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
            if version < len(schema.MIGRATIONS):
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    schema.migrate(self._db, version)
                    self._db.execute("COMMIT")
                except BaseException:
                    self._roll_back()
                    raise

    def _keep_if_newer(self) -> None:
        """A file that looks broken may have been migrated by a newer release while we had it open:
        a table that we know may be gone."""
        with suppress(sqlite3.Error):
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version > len(schema.MIGRATIONS):
                self._refuse_if_too_new(version)

    def _put_new(self, lost: Lost | None) -> None:
        """Build an empty store under another name and rename it, so that it is never incomplete."""
        unfinished = self.path + ".new"
        for suffix in _SUFFIXES:
            _unlink(unfinished + suffix)
        os.mknod(unfinished, 0o600)
        db = sqlite3.connect(unfinished, isolation_level=None)
        try:
            db.execute("PRAGMA journal_mode = WAL")  # stays with the file
            db.execute("BEGIN")
            schema.migrate(db, 0)
            meta = [("oldest_reader", "1"), ("boot", self.boot_id)]
            meta.append(("lost", json.dumps(lost)) if lost else ("new", "1"))
            db.executemany("INSERT INTO meta VALUES (?, ?)", meta)
            db.execute("COMMIT")
        finally:
            db.close()
        # A log that was left behind belongs to another file. SQLite would apply it to this one.
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
        """On the first open after a reboot, drop what belonged to the old boot.

        Allocations and attachments belonged to namespaces that are gone. The states of chains stay:
        kubelet first sends DEL for the sandboxes of the old boot, and delegates have things that
        survive a reboot (host-local its files, others a lease). The ADDs that follow have new
        container ids and may get the same addresses at once. A late DEL cannot free those, because
        its owner holds nothing. States whose DEL never came are dropped by GC, or at a reboot after
        a month.
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
                for statement in schema.END_OF_BOOT:
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


def is_unverified(db: sqlite3.Connection) -> bool:
    """Whether addresses may be in use that the store does not know."""
    select = "SELECT 1 FROM meta WHERE key IN ('lost', 'new')"
    return db.execute(select).fetchone() is not None


def _boot_id() -> str:
    from .datapath.netns import read_file

    return read_file(BOOT_ID_FILE) or ""  # no /proc: every boot looks the same, and GC cleans up


def _identity(path: str) -> tuple[int, int]:
    """The device and inode of the path; (0, 0) if it does not exist."""
    try:
        stat = os.stat(path)
    except OSError:
        return (0, 0)
    return stat.st_dev, stat.st_ino


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
    from .shared.filelock import lock  # rarely needed

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
    """The reason if the file itself is broken; any other problem is raised again.

    Python raises plain DatabaseError for SQLITE_CORRUPT and SQLITE_NOTADB, and a subclass for
    others. (The exception has the code itself only since Python 3.11.)
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
    """What is wrong with the disk, and what to do. SQLite often says only "disk I/O error"."""
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
