"""``headcnictl restore FILE``: the store, the settings and the conflist as a backup has them.

No address is given out twice by it: a backup is refused if a pod runs that it does not know, or
whose addresses it has given to another one. The comparison and the change are one transaction of
the store. An address that is in use without an attachment, by an ADD at work for example, is kept.

The transaction is also what decides: the settings and the conflist lie ready before it, and follow
it. A restore that is interrupted before it has changed nothing, and what it prepared is removed by
the next one. After it, the next one finishes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from ipaddress import ip_address
from typing import Any, Dict, FrozenSet, List, NamedTuple, Optional, Set, Tuple

from .. import repair, schema
from .. import settings as configuration
from ..database import FILE_NAME, StoreTooNew, is_unverified
from ..datapath.link import host_name
from ..errors import CONFLIST, INVALID_CONFIG, IO_FAILURE, STORE, CniError
from ..model import Address, Owner
from ..recover import running
from ..settings import DaemonConfig, control_path
from ..shared import conflist
from ..store import Store, owner_key
from . import backup, node
from .backup import Backup
from .daemon_client import asked
from .main import NO, OK, CannotTell, read, show
from .new_file import new_file, scratch
from .terminal import BAD, GOOD, paint

FOLDER, RECORD, MARK = "restore", "record.json", "restore"
UNDO, KEPT_UNDO = "before-restore-", 3
LOCK_SECONDS = 1.0
MOST_REASONS = 20
UNITS = ("headcni-daemon.service",)
# What belongs to pods. Settings of the running node, such as the boot's id, are not restored.
TABLES = (
    *("allocation", "network", "pool", "span", "imported", "attachment", "firewall"),
    *("firewall_need", "port", "plugin_state", "tombstone"),
)
STRANGE = "its store is not as HeadCNI writes it: somebody has changed it, or it is damaged"
# Python's types of the values in a column of each type. Only addresses may be missing.
_TYPES: Dict[str, Any] = {
    "BLOB": (bytes, type(None)),
    "TEXT": str,
    "INTEGER": int,
    "REAL": (float, int),
}
_ADDRESS_BYTES = (4, 16)
_OWNED = ("allocation", "port", "plugin_state", "tombstone")

Key = Tuple[str, str, str]  # an owner: network, container, interface
Rows = Dict[str, Tuple[List[str], List[Tuple[Any, ...]]]]  # by table: its columns and its rows


class Refused(CniError):
    """The backup does not fit to this node as it is now."""

    def __init__(self, reasons: List[str]) -> None:
        super().__init__(STORE, "the backup is refused", "; ".join(reasons[:MOST_REASONS]))
        self.reasons = reasons


class Known(NamedTuple):
    """What a store knows of pods: the addresses of each owner, and who has an attachment."""

    held: Dict[Key, Set[Address]]
    attached: Dict[Key, Tuple[str, str]]  # the network namespace, and the pod's name


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a file that headcnictl backup has made")
    parser.add_argument("--check", action="store_true", help="only say whether it could be done")
    backup.with_conflist(parser)
    node.with_config(parser)


def run(args: argparse.Namespace) -> int:
    with ExitStack() as until_the_end:

        def place(config: Optional[bytes]) -> str:
            data_dir = _settings(args, config).daemon.data_dir
            return until_the_end.enter_context(scratch(data_dir))

        made = backup.read(args.file, place)
        config = _settings(args, made.config)
        data_dir = config.daemon.data_dir
        reasons = _unfit(args, made)
        if args.check:
            reasons += _compared_only(data_dir, made.store) if not reasons else []
            return _say(args, made, reasons, "", [])
        if reasons:
            return _say(args, made, reasons, "", [])
        _refuse_if_running(args, config)
        with _alone(data_dir):
            settled = settle(data_dir)
            undo = _keep_undo(args, config)
            try:
                done = _restore(args, made, data_dir)
            except Refused as refused:
                return _say(args, made, refused.reasons, settled, [])
        return _say(args, made, [], settled, done, undo)


def _settings(args: argparse.Namespace, text: Optional[bytes]) -> DaemonConfig:
    """The settings that will hold; CniError if the backup's have mistakes."""
    if text is None:
        return node.load(args)
    config, found = configuration.parse(text)
    if found:
        raise CniError(
            INVALID_CONFIG, "the backup's config.yaml is not valid here", str(found[0].path)
        )
    return config


def _unfit(args: argparse.Namespace, made: Backup) -> List[str]:
    """Why this backup is not of this node, or not for this release."""
    reasons = []
    here = os.uname().nodename
    if made.manifest["node"] != here:
        reasons.append(f"it is of node {str(made.manifest['node'])[:253]}, and this is {here}")
    with suppress(CniError):  # without readable settings there is nothing to compare with
        present = node.load(args)
        mine, theirs = backup.pod_cidrs(present), list(made.manifest["pod_cidrs"])
        if mine and theirs and set(mine) != set(theirs):
            reasons.append(
                f"its pod CIDR is {', '.join(theirs)}, and this node's is {', '.join(mine)}"
            )
        there = str(made.manifest["data_dir"])
        if os.path.exists(args.config) and present.daemon.data_dir != there:
            reasons.append(
                f"its daemon.dataDir is {there}, and this node's is {present.daemon.data_dir}"
            )
    version = backup.intact(made.store)
    if version > len(schema.MIGRATIONS):
        reasons.append(
            f"its store has schema {version}, and this release knows schemas up to "
            f"{len(schema.MIGRATIONS)}: install the release that made it"
        )
    if made.conflist is not None:
        try:
            wrong = conflist.validate(json.loads(made.conflist))
        except ValueError as problem:
            raise CniError(CONFLIST, "the backup's conflist is not valid", str(problem)) from None
        reasons += [f"its conflist: {mistake}" for mistake in wrong]
    return reasons


def _refuse_if_running(args: argparse.Namespace, config: DaemonConfig) -> None:
    """The daemon keeps what it has read of the settings, and would write to the store meanwhile."""
    paths = {control_path(config)}
    with suppress(CniError):
        paths.add(control_path(node.load(args)))
    for path in paths:
        with suppress(CniError), asked("status", path, 5.0) as answers:
            if next(answers, None) is not None:
                raise CannotTell("headcni-daemon runs: systemctl stop headcni-daemon")
    for unit in UNITS:
        command = ["systemctl", "is-active", "--quiet", unit]
        with suppress(OSError, subprocess.SubprocessError):
            asked_systemd = subprocess.run(command, timeout=10, check=False, capture_output=True)
            if asked_systemd.returncode == 0:
                raise CannotTell(f"{unit} is active: systemctl stop {unit}")


@contextmanager
def _alone(data_dir: str) -> Iterator[None]:
    from ..shared.filelock import lock

    path = os.path.join(data_dir, f"{FOLDER}.lock")
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        lock(handle, path, LOCK_SECONDS)
        yield
    except TimeoutError:
        raise CannotTell("another restore is at work on this node") from None
    finally:
        os.close(handle)


def settle(data_dir: str) -> str:
    """Finish or undo a restore that was interrupted; says what was done, or nothing."""
    folder = os.path.join(data_dir, FOLDER)
    if not os.path.isdir(folder):
        return ""
    try:
        with open(os.path.join(folder, RECORD), encoding="utf-8") as file:
            record = json.load(file)
    except (OSError, ValueError):
        record = {}  # it was not complete, so nothing has been changed
    with Store.in_directory(data_dir) as store:
        committed = store.read(_marked)
        if record and committed == record["id"]:
            _finish(store, folder, record)
            return "an interrupted restore was finished"
        if committed and not record:  # all was in place, and it was about to remove this folder
            _forget(store, folder)
            return "an interrupted restore was finished"
    shutil.rmtree(folder)
    return "an interrupted restore, which had not changed anything, was removed"


def _marked(db: sqlite3.Connection) -> str:
    row = db.execute("SELECT value FROM meta WHERE key = ?", (MARK,)).fetchone()
    return str(row[0]) if row else ""


def _restore(args: argparse.Namespace, made: Backup, data_dir: str) -> List[str]:
    rows, theirs = _backed_up(made.store)
    with Store.in_directory(data_dir) as store:
        prepared, record = _prepare(args, made, data_dir)
        try:
            store.atomically(lambda db: _replace(db, data_dir, rows, theirs, record["id"]))
        except BaseException:
            if store.read(_marked) != record["id"]:
                shutil.rmtree(prepared)
            raise
        return ["store", *_finish(store, prepared, record)]


def _prepare(args: argparse.Namespace, made: Backup, data_dir: str) -> Tuple[str, Dict[str, Any]]:
    """Lay the settings and the conflist ready. The record comes last: without it nothing counts."""
    folder = os.path.join(data_dir, FOLDER)
    os.mkdir(folder, 0o700)
    record: Dict[str, Any] = {"id": f"{time.time_ns()}", "config": "", "cni_dir": ""}
    for key, text, name, target in (
        ("config", made.config, backup.CONFIG_FILE, os.path.abspath(args.config)),
        ("cni_dir", made.conflist, conflist.NAME, os.path.abspath(args.cni_dir)),
    ):
        if text is not None:
            record[key] = target
            _write(os.path.join(folder, name), text)
    _write(os.path.join(folder, RECORD), json.dumps(record).encode())
    return folder, record


def _finish(store: Store, folder: str, record: Mapping[str, Any]) -> List[str]:
    """Put the settings and the conflist in place. It may be repeated."""
    done = []
    if record["config"]:
        os.makedirs(os.path.dirname(record["config"]), exist_ok=True)
        _write(record["config"], _bytes(folder, backup.CONFIG_FILE))
        done.append(record["config"])
    if record["cni_dir"]:
        try:
            conflist.write(json.loads(_bytes(folder, conflist.NAME)), record["cni_dir"])
        except conflist.ConflistError as problem:
            raise CniError(CONFLIST, "the conflist is not restored", str(problem)) from None
        done.append(os.path.join(record["cni_dir"], conflist.NAME))
    os.unlink(os.path.join(folder, RECORD))  # first: without the files it could not be repeated
    _forget(store, folder)
    return done


def _forget(store: Store, folder: str) -> None:
    shutil.rmtree(folder)
    store.atomically(lambda db: db.execute("DELETE FROM meta WHERE key = ?", (MARK,)))


def _backed_up(path: str) -> Tuple[Rows, Known]:
    """The rows of the backup's store. Opening it brings its schema up to date, and drops what
    belonged to an earlier boot."""
    try:
        with Store(path) as store:
            found = store.read(lambda db: (_rows(db), _known(db)))
            if store.opens > 1:  # the copy was unusable, and what was read is a new one
                raise Refused([STRANGE])
            return found
    except StoreTooNew as problem:
        raise Refused([problem.details or str(problem)]) from None


def _rows(db: sqlite3.Connection) -> Rows:
    """All rows; Refused if HeadCNI has not written them. An address as a text, for example, would
    be given out again."""
    own = _own_columns()
    if _columns(db) != own:
        raise Refused([STRANGE])
    found: Rows = {}
    for table in TABLES:
        cursor = db.execute(f"SELECT * FROM {table}")  # noqa: S608  # one of TABLES
        names = [column[0] for column in cursor.description]
        types = [_TYPES[kind] for _unused, kind, *_others in own[table]]
        rows = cursor.fetchall()
        if not all(isinstance(value, kind) for row in rows for value, kind in zip(row, types)):
            raise Refused([STRANGE])
        found[table] = (names, rows)
    if not all(len(row[0]) in _ADDRESS_BYTES for row in found["allocation"][1]):
        raise Refused([STRANGE])
    return found


def _columns(db: sqlite3.Connection) -> Dict[str, List[Tuple[Any, ...]]]:
    """The tables, and what else has rows or changes some, with name and type of each column."""
    select = (
        "SELECT name, type FROM sqlite_master WHERE type != 'index' AND name NOT LIKE 'sqlite_%'"
    )
    found: Dict[str, List[Tuple[Any, ...]]] = {}
    for name, kind in db.execute(select).fetchall():
        asked = 'SELECT name, type, "notnull", pk FROM pragma_table_info(?)'
        found[name] = db.execute(asked, (name,)).fetchall() if kind == "table" else []
    return found


def _own_columns() -> Dict[str, List[Tuple[Any, ...]]]:
    with closing(sqlite3.connect(":memory:")) as db:
        schema.migrate(db, 0)
        return _columns(db)


def _replace(db: sqlite3.Connection, data_dir: str, rows: Rows, theirs: Known, mark: str) -> None:
    """Everything of pods by what the backup has, or Refused."""
    mine = _known(db)
    in_progress = {key for key in mine.held if key not in mine.attached}
    reasons = _reasons(mine, theirs, _in_use(mine, data_dir, is_unverified(db)))
    if reasons:
        raise Refused(reasons)
    kept = _owned(db, in_progress - set(theirs.held))
    for table, (columns, values) in rows.items():
        db.execute(f"DELETE FROM {table}")  # noqa: S608
        _insert(db, table, columns, values)
    for table, (columns, values) in kept.items():
        _insert(db, table, columns, values)
    db.execute("DELETE FROM conflict")
    db.execute("UPDATE network SET ranges = ''")  # free addresses are computed from allocations
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (MARK, mark))


def _insert(
    db: sqlite3.Connection, table: str, columns: List[str], values: List[Tuple[Any, ...]]
) -> None:
    names, marks = ", ".join(columns), ", ".join("?" * len(columns))
    db.executemany(f"INSERT INTO {table} ({names}) VALUES ({marks})", values)  # noqa: S608


def _owned(db: sqlite3.Connection, owners: Set[Key]) -> Rows:
    """The rows of these owners, of all tables that have any."""
    found: Rows = {}
    for table in _OWNED:
        cursor = db.execute(f"SELECT * FROM {table}")  # noqa: S608
        columns = [column[0] for column in cursor.description]
        at = [columns.index(name) for name in ("network", "container_id", "ifname")]
        rows = [row for row in cursor if tuple(row[place] for place in at) in owners]
        found[table] = (columns, rows)
    return found


def _known(db: sqlite3.Connection) -> Known:
    held: Dict[Key, Set[Address]] = {}
    for network, container, ifname, packed in db.execute(
        "SELECT network, container_id, ifname, address FROM allocation"
    ):
        held.setdefault((network, container, ifname), set()).add(ip_address(packed))
    attached = {
        (network, container, ifname): (netns, "/".join(filter(None, (namespace, name))))
        for network, container, ifname, netns, namespace, name in db.execute(
            "SELECT network, container_id, ifname, netns, pod_namespace, pod_name FROM attachment"
        )
    }
    return Known(held, attached)


def _in_use(mine: Known, data_dir: str, unverified: bool) -> Dict[Key, FrozenSet[Address]]:
    """The running pods with their addresses. If the store is new or was lost, the kernel and the
    runtime's cache show them. Otherwise it knows them; other stores have pods of their own."""
    alive = {
        key: frozenset(mine.held.get(key, ()))
        for key, (netns, _name) in mine.attached.items()
        if not netns or not repair.is_dead(netns, None)
    }
    shown = {owner_key(owner): addresses for owner, addresses in running(data_dir).items()}
    for key, addresses in shown.items():
        if unverified or key in alive:
            alive[key] = alive.get(key, frozenset()) | addresses
    return alive


def _reasons(mine: Known, theirs: Known, in_use: Mapping[Key, FrozenSet[Address]]) -> List[str]:
    """Which running pods the backup does not know or contradicts, and which addresses are taken."""
    holders = {address: key for key, those in theirs.held.items() for address in those}
    by_link = {host_name(Owner(*key)): key for key in theirs.held}
    reasons = []
    for key, addresses in sorted(in_use.items()):
        known = by_link.get(key[1], key) if not key[0] else key
        name = _name(mine, key)
        others = {address for address in addresses if holders.get(address, known) != known}
        if others:
            listed = ", ".join(map(str, sorted(others, key=str)))
            reasons.append(f"{name} runs with {listed}, and the backup has given that to another")
        elif known not in theirs.held and known not in theirs.attached:
            reasons.append(f"{name} runs, and the backup does not know it: delete the pod first")
        elif not addresses <= theirs.held.get(known, set()):
            reasons.append(f"{name} runs with other addresses than the backup has for it")
    for key, held in sorted(mine.held.items()):
        others = {address for address in held if holders.get(address, key) != key}
        if others and key not in in_use and key not in mine.attached:
            listed = ", ".join(map(str, sorted(others, key=str)))
            reasons.append(
                f"{listed} is held by container {key[1][:12]}, and the backup has given it to "
                "another: try again when that container is gone (headcnictl ipam)"
            )
    return reasons


def _name(mine: Known, key: Key) -> str:
    name = mine.attached.get(key, ("", ""))[1]
    return f"pod {name}" if name else f"container {key[1][:12]}"


def _compared_only(data_dir: str, copy: str) -> List[str]:
    """The reasons against it, without a change of the store."""
    _unused, theirs = _backed_up(copy)
    mine, unverified = Known({}, {}), True
    path = os.path.join(data_dir, FILE_NAME)
    if os.path.exists(path):
        with suppress(sqlite3.Error), closing(sqlite3.connect(path, timeout=10.0)) as db:
            db.execute("PRAGMA query_only = ON")
            boot = db.execute("SELECT value FROM meta WHERE key = 'boot'").fetchone()
            if boot is not None and boot[0] == backup.boot_id():
                mine, unverified = _known(db), is_unverified(db)
    return _reasons(mine, theirs, _in_use(mine, data_dir, unverified))


def _keep_undo(args: argparse.Namespace, config: DaemonConfig) -> str:
    """A backup of what is there now, if there is a store; its name."""
    folder = config.daemon.data_dir
    if not os.path.exists(os.path.join(folder, FILE_NAME)):
        return ""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path = os.path.join(folder, f"{UNDO}{stamp}-{time.time_ns() % 1000000:06d}.tar.gz")
    try:
        with new_file(path) as file:
            backup.write(file, config, args.config, args.cni_dir)
    except (CniError, sqlite3.Error):
        return ""  # a broken store, which is perhaps why there is a restore
    kept = sorted(name for name in os.listdir(folder) if name.startswith(UNDO))
    for name in kept[:-KEPT_UNDO]:
        os.unlink(os.path.join(folder, name))
    return path


def _write(path: str, text: bytes) -> None:
    """All or nothing, also after a power cut. Only root may read it."""
    fresh = f"{path}.new"
    with suppress(FileNotFoundError):
        os.unlink(fresh)
    try:
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
        folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as problem:
        raise CniError(IO_FAILURE, f"{path} cannot be written", problem.strerror or "") from None


def _bytes(folder: str, name: str) -> bytes:
    return read(os.path.join(folder, name))


def _say(
    args: argparse.Namespace,
    made: Backup,
    reasons: List[str],
    settled: str,
    done: List[str],
    undo: str = "",
) -> int:
    if args.json:
        show(
            {
                "file": args.file,
                "node": made.manifest["node"],
                "time": made.manifest["time"],
                "pods": made.manifest["pods"],
                "check": args.check,
                "refused": reasons,
                "settled": settled,
                "restored": done,
                "undo": undo,
            },
            as_json=True,
        )
        return NO if reasons else OK
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(made.manifest["time"]))
    lines = [f"{args.file}: of {made.manifest['node']}, {at}, {made.manifest['pods']} pods"]
    lines += [settled] if settled else []
    if reasons:
        lines.append(paint("refused:", BAD))
        lines += [f"  {reason}" for reason in reasons[:MOST_REASONS]]
        more = len(reasons) - MOST_REASONS
        lines += [f"  and {more} more reasons"] if more > 0 else []
    elif args.check:
        lines.append(paint("it can be restored, while headcni-daemon is stopped", GOOD))
    else:
        lines += [f"restored: {one}" for one in done]
        lines += [f"what was there before: {undo}"] if undo else []
        lines.append("now: systemctl start headcni-daemon")
    show("\n".join(lines), as_json=False)
    return NO if reasons else OK
