"""New files and folders that only root can read: never existing ones, and never half of a file."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from ..shared.filelock import lock
from .main import CannotTell

SCRATCH = "copy-"


@contextmanager
def new_file(path: str) -> Iterator[BinaryIO]:
    """The file, open for writing. It is removed if the block fails."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise CannotTell(f"{path} exists already: choose another file") from None
    except OSError as problem:
        raise CannotTell(f"{path} cannot be created: {problem.strerror}") from None
    try:
        os.fchmod(handle, 0o600)  # whatever the umask is
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as problem:
        os.unlink(path)
        raise CannotTell(f"{path} cannot be written: {problem.strerror}") from None
    except BaseException:
        os.unlink(path)
        raise


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    """A member that only root can read when it is unpacked."""
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = len(content), 0o600, int(time.time())
    archive.addfile(member, io.BytesIO(content))


@contextmanager
def scratch(parent: str) -> Iterator[str]:
    """A folder for a copy of the store, beside the store. It is locked while it is in use. If its
    command was killed, nobody has the lock, and the next command removes the folder."""
    made = not os.path.isdir(parent)
    try:
        os.makedirs(parent, mode=0o700, exist_ok=True)
        for name in os.listdir(parent):
            if name.startswith(SCRATCH):
                _remove_unused(os.path.join(parent, name))
        folder, handle = _locked_folder(parent)
    except OSError as problem:
        raise CannotTell(f"{parent} cannot be used: {problem.strerror}") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)
        if made:
            with suppress(OSError):  # there is something in it by now
                os.rmdir(parent)


def _locked_folder(parent: str) -> tuple[str, int]:
    while True:
        folder = tempfile.mkdtemp(prefix=SCRATCH, dir=parent)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(TimeoutError):
            lock(handle, folder, 0.0)
            if os.path.isdir(folder):
                return folder, handle
        os.close(handle)  # another command took it for an unused one


def _remove_unused(folder: str) -> None:
    with suppress(OSError):  # in use, or another command has removed it
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            lock(handle, folder, 0.0)
            shutil.rmtree(folder)
        finally:
            os.close(handle)
