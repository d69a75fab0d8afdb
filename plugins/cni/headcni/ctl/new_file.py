"""A new file that only root can read: never an existing one, and never half of one."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from .main import CannotTell


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
