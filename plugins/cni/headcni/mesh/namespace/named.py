"""A network namespace with a name, as `ip netns` makes and deletes it."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from contextlib import suppress
from typing import Callable

from ...datapath.netns import CLONE_NEWNET

_MS_BIND, _MS_REC, _MS_SHARED, _MNT_DETACH = 0x1000, 0x4000, 0x100000, 2
_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000

_libc = ctypes.CDLL(None, use_errno=True)


def is_there(path: str) -> bool:
    try:
        return os.stat(path).st_dev == os.stat("/proc/self/ns/net").st_dev
    except FileNotFoundError:
        return False


def create(path: str) -> None:
    _where_the_host_mounts(_add, path)


def delete(path: str) -> None:
    _where_the_host_mounts(_take_away, path)


def _add(path: str) -> None:
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o755, exist_ok=True)
    try:
        _mount("", folder, _MS_SHARED | _MS_REC)
    except OSError as problem:
        if problem.errno != errno.EINVAL:
            raise
        _mount(folder, folder, _MS_BIND | _MS_REC)  # it was not a mount point
        _mount("", folder, _MS_SHARED | _MS_REC)
    with suppress(FileNotFoundError):
        os.unlink(path)
    os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444))
    try:
        _unshare(CLONE_NEWNET)
        _mount("/proc/thread-self/ns/net", path, _MS_BIND)
    except BaseException:
        os.unlink(path)
        raise


def _take_away(path: str) -> None:
    if is_there(path) and _libc.umount2(path.encode(), _MNT_DETACH) != 0:
        raise _os_error(path)
    with suppress(FileNotFoundError):
        os.unlink(path)


def _where_the_host_mounts(work: Callable[[str], None], path: str) -> None:
    """Work in the mount namespace of pid 1, in a thread of its own: the host does not see what a
    hardened service mounts in its own mount namespace."""
    failed: list[BaseException] = []

    def begin() -> None:
        try:
            if _mounts_are_a_copy():
                _unshare(_CLONE_FS)
                with open("/proc/1/ns/mnt", "rb") as mounts:
                    if _libc.setns(mounts.fileno(), _CLONE_NEWNS) != 0:
                        raise _os_error("/proc/1/ns/mnt")
            work(path)
        except BaseException as problem:
            failed.append(problem)

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def _mounts_are_a_copy() -> bool:
    """Whether this is a service's own mount namespace, which follows the host's, but not vice
    versa."""
    with open("/proc/thread-self/mountinfo", encoding="utf-8") as file:
        return any(line.split()[4] == "/" and " master:" in line for line in file)


def _mount(source: str, target: str, flags: int) -> None:
    if _libc.mount(source.encode(), target.encode(), b"none", ctypes.c_ulong(flags), None) != 0:
        raise _os_error(target)


def _unshare(flags: int) -> None:
    if _libc.unshare(flags) != 0:
        raise _os_error("a namespace of its own")


def _os_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), what)
