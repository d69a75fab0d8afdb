"""DELs that the store could not record, because its disk is full, read-only or broken.

Such a DEL removes the pod's network and succeeds, because the pod may be what fills the disk. Its
address stays allocated, so no other pod gets it. A note under /run says what must be released. That
is another file system, and it ends with the boot, as allocations do. The next call that can write
the store, or the daemon, records the DEL and deletes the note (docs/decisions/0007).
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from . import light_json as json
from .errors import CniError
from .ipam.allocate import Ipam
from .model import Owner
from .store import Store

NOTES = "/run/headcni/unrecorded"


def note(data_dir: str, owner: Owner, problem: CniError) -> None:
    """Write a note that the owner's DEL has succeeded. If that fails, too, GC or the daemon's sweep
    releases the address, because the attachment is still in the store."""
    import hashlib

    data_dir = os.path.normpath(data_dir)
    text = json.dumps([data_dir, owner.network, owner.container_id, owner.ifname])
    path = os.path.join(_folder(data_dir), hashlib.sha256(text.encode()).hexdigest()[:32])
    said = "it is released when the store can be written"
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            file.write(text)
        os.rename(f"{path}.new", path)
    except OSError as trouble:
        said = f"it is released by GC; no note could be left: {trouble}"
    print(
        f'level=WARN msg="a DEL could not be recorded, so its address stays allocated: {said}"'
        f' network={owner.network} container={owner.container_id} problem="{problem}"',
        file=sys.stderr,
        flush=True,
    )


def settle(store: Store, mine: Owner | None = None) -> None:
    """Record earlier DELs that have a note. An ADD does this first for its owner, `mine`: later it
    would release the new pod's address."""
    data_dir = os.path.normpath(os.path.dirname(store.path))
    folder = _folder(data_dir)
    try:
        names = os.listdir(folder)
    except OSError:
        return  # there are no notes, which is usual
    failed: list[CniError] = []
    for name in names:
        path = os.path.join(folder, name)
        owner = _noted(path, data_dir)
        if owner is None:
            continue
        try:
            _record(store, owner, path)
        except CniError as problem:
            if owner == mine:
                raise
            failed.append(problem)
    with suppress(OSError):
        os.rmdir(folder)
    if failed and mine is None:
        raise failed[0]


def outstanding(store: Store) -> frozenset[Owner]:
    """The owners whose DEL has succeeded and still cannot be recorded. The store has them, but
    their pods are gone."""
    with suppress(CniError):
        settle(store)
    data_dir = os.path.normpath(os.path.dirname(store.path))
    folder = _folder(data_dir)
    try:
        names = os.listdir(folder)
    except OSError:
        return frozenset()
    noted = (_noted(os.path.join(folder, name), data_dir) for name in names)
    return frozenset(owner for owner in noted if owner is not None)


def _folder(data_dir: str) -> str:
    return os.path.join(NOTES, data_dir.strip("/").replace("/", "-")[-200:])


def _noted(path: str, data_dir: str) -> Owner | None:
    try:
        with open(path, encoding="utf-8") as file:
            noted_for, *owner = json.loads(file.read())
        return Owner(*owner) if noted_for == data_dir else None
    except (OSError, ValueError, TypeError):
        return None  # it was recorded meanwhile, or is incomplete


def _record(store: Store, owner: Owner, path: str) -> None:
    """Write what DEL would have written. The note is checked again inside the transaction: another
    process may have recorded it, and a new pod may have the owner's name since."""
    from .datapath import host_ports

    def work(_unused: object) -> None:
        if os.path.exists(path):
            host_ports.withdraw(store, owner)
            lease = Ipam(store).release(owner)
            if lease is not None:
                host_ports.withdraw_from_kernel({one.address for one in lease.addresses})
            for state in store.plugin_states(owner):
                store.drop_plugin_state(owner, state.index)
            store.forget(owner)

    store.atomically(work)
    with suppress(FileNotFoundError):
        os.unlink(path)
