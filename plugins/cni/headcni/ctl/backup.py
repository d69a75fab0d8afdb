"""``headcnictl backup FILE``: the store, the settings and the conflist of this node in one file.

The store is copied by SQLite while it is in use, so that the copy is one consistent state of it.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import sqlite3
import tarfile
import time
import zlib
from collections.abc import Mapping
from contextlib import closing
from typing import Any, BinaryIO, Callable, Dict, List, NamedTuple, Optional

from .. import __version__
from .. import settings as configuration
from ..database import BOOT_ID_FILE, FILE_NAME
from ..errors import INVALID_CONFIG, STORE, CniError
from ..settings import DaemonConfig
from ..shared import conflist
from ..shared.podcidr import PodCidrError
from . import node
from .main import OK, CannotTell, show
from .new_file import add, new_file, scratch

FORMAT = 1
MANIFEST, STORE_FILE, CONFIG_FILE = "manifest.json", FILE_NAME, "config.yaml"
LARGEST = 1 << 30  # of the store
LARGEST_TEXT = 1 << 20  # of the others
COPY_SECONDS = 30.0


class Backup(NamedTuple):
    """What a backup has. The store is a file."""

    manifest: Mapping[str, Any]
    config: Optional[bytes]
    conflist: Optional[bytes]
    store: str


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the .tar.gz to create")
    with_conflist(parser)
    node.with_config(parser)


def with_conflist(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cni-dir", default=conflist.DIRECTORY, help="where conflists are (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    config = node.load(args)
    with new_file(args.file) as file:
        manifest = write(file, config, args.config, args.cni_dir)
        size = file.tell()
    if args.json:
        show({"file": args.file, "bytes": size, **manifest}, as_json=True)
    else:
        names = ", ".join(sorted(manifest["files"]))
        show(f"{args.file}: {size / 1000:.0f} kB: {names}", as_json=False)
        show(f"{manifest['pods']} pod interfaces, schema {manifest['schema']}", as_json=False)
    return OK


def write(file: BinaryIO, config: DaemonConfig, path: str, cni_dir: str) -> Dict[str, Any]:
    """Write the backup, and return its manifest."""
    texts = {CONFIG_FILE: path, conflist.NAME: os.path.join(cni_dir, conflist.NAME)}
    parts = {name: text for name, where in texts.items() if (text := _text(where)) is not None}
    source = os.path.join(config.daemon.data_dir, FILE_NAME)
    if not os.path.exists(source):
        raise CniError(STORE, f"there is no store at {source}", "no pod has been here")
    with scratch(config.daemon.data_dir) as folder:
        copy = os.path.join(folder, STORE_FILE)
        _copy_store(source, copy)
        with closing(sqlite3.connect(copy)) as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            (pods,) = db.execute("SELECT count(*) FROM attachment").fetchone()
        manifest = {
            "format": FORMAT,
            "time": time.time(),
            "node": os.uname().nodename,
            "version": __version__,
            "schema": version,
            "boot": boot_id(),
            "pod_cidrs": pod_cidrs(config),
            "data_dir": config.daemon.data_dir,
            "pods": pods,
            "files": {name: hashlib.sha256(text).hexdigest() for name, text in parts.items()},
        }
        manifest["files"][STORE_FILE] = _digest(copy)
        with (
            gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            add(archive, MANIFEST, json.dumps(manifest, indent=2).encode())
            for name, text in parts.items():
                add(archive, name, text)
            member = tarfile.TarInfo(STORE_FILE)
            member.size, member.mode = os.path.getsize(copy), 0o600
            with open(copy, "rb") as store:
                archive.addfile(member, store)
    return manifest


def read(path: str, place: Callable[[Optional[bytes]], str]) -> Backup:
    """Check the backup, and put its store into the folder that `place` chooses by the backup's
    settings; CniError if it is none or damaged."""
    try:
        with tarfile.open(path, "r:gz") as archive:
            return _read(archive, place)
    except (tarfile.TarError, EOFError, zlib.error, ValueError, KeyError, TypeError) as problem:
        raise CniError(INVALID_CONFIG, f"{path} is not a complete backup", str(problem)) from None
    except OSError as problem:
        if isinstance(problem, gzip.BadGzipFile):
            raise CniError(INVALID_CONFIG, f"{path} is not a backup", str(problem)) from None
        raise CannotTell(f"{path} cannot be read: {problem.strerror}") from None


def _read(archive: tarfile.TarFile, place: Callable[[Optional[bytes]], str]) -> Backup:
    found: Dict[str, bytes] = {}
    path = ""
    manifest: Dict[str, Any] = {}
    while (member := archive.next()) is not None:
        content = archive.extractfile(member)
        first = not manifest
        if (
            not member.isreg()
            or content is None
            or member.name in found
            or first != (member.name == MANIFEST)
            or path  # the store comes last
        ):
            raise ValueError(f"{member.name[:80]!r} is not expected there")
        if member.size > (LARGEST if member.name == STORE_FILE else LARGEST_TEXT):
            raise ValueError(f"{member.name[:80]!r} is too large")
        if first:
            manifest = json.loads(content.read())
            if manifest["format"] != FORMAT:
                raise ValueError(f"format {manifest['format']!r} is of another release")
            continue
        if member.name == STORE_FILE:
            path = os.path.join(place(found.get(CONFIG_FILE)), STORE_FILE)
            with open(path, "xb") as store:
                while piece := content.read(1 << 20):
                    store.write(piece)
            digest, found[STORE_FILE] = _digest(path), b""
        else:
            found[member.name] = content.read()
            digest = hashlib.sha256(found[member.name]).hexdigest()
        if digest != manifest["files"][member.name]:
            raise ValueError(f"{member.name} has been changed")
    missing = {STORE_FILE, *manifest["files"]} - set(found)
    if missing:
        raise ValueError(f"{', '.join(sorted(missing))} missing")
    return Backup(manifest, found.get(CONFIG_FILE), found.get(conflist.NAME), path)


def pod_cidrs(config: DaemonConfig) -> List[str]:
    """This node's own; empty if they are a guess or not known."""
    try:
        known = configuration.pod_cidrs(config)
    except PodCidrError:
        return []
    return [] if known.guessed else [str(cidr) for cidr in known.cidrs]


def boot_id() -> str:
    try:
        with open(BOOT_ID_FILE, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def intact(path: str) -> int:
    """The version of a store's schema; CniError if the file is broken."""
    try:
        with closing(sqlite3.connect(path)) as db:
            said = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            (version,) = db.execute("PRAGMA user_version").fetchone()
    except sqlite3.Error as problem:
        said = str(problem)
    if said != "ok":
        raise CniError(STORE, "the copy of the store is broken", said)
    return int(version)


def _copy_store(source: str, copy: str) -> None:
    until = time.monotonic() + COPY_SECONDS

    def check(_status: int, _left: int, _total: int) -> None:
        if time.monotonic() > until:
            raise CniError(STORE, f"the store could not be copied within {COPY_SECONDS:.0f} s")

    os.close(os.open(copy, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    try:
        with (
            closing(sqlite3.connect(source, timeout=COPY_SECONDS)) as original,
            closing(sqlite3.connect(copy)) as target,
        ):
            original.execute("PRAGMA query_only = ON")
            original.backup(target, progress=check)
    except sqlite3.Error as problem:
        raise CniError(STORE, f"the store at {source} cannot be copied", str(problem)) from None
    intact(copy)


def _text(path: str) -> Optional[bytes]:
    """A file; None if it does not exist."""
    try:
        with open(path, "rb") as file:
            text = file.read(LARGEST_TEXT + 1)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise CannotTell(f"{path} cannot be read: {problem.strerror}") from None
    if len(text) > LARGEST_TEXT:
        raise CannotTell(f"{path} is larger than {LARGEST_TEXT} bytes")
    return text


def _digest(path: str) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            found.update(piece)
    return found.hexdigest()
