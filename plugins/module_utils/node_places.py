# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Check the directories that HeadCNI writes to: free space, permissions, noexec mounts, and
files of other programs in the way. Changes nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence

from . import node_release

Owner = Callable[[str], str]
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
_TAILSCALED = "/usr/sbin/tailscaled"


def problems(wanted: Mapping[str, int], variables: Mapping[str, str]) -> list[str]:
    """Of directories, each with the MiB that it needs and, if there is one, the variable that says
    where it is."""
    wrong = []
    for path, mebibytes in wanted.items():
        if not os.path.isabs(path):
            wrong.append(f"path: {path!r}, expected an absolute one")
            continue
        there = existing(path)
        if os.path.islink(there) and not os.path.exists(there):
            wrong.append(f"path: {there} is a link to nowhere, and {path} should be in it: mend it")
            continue
        if not os.path.isdir(there):
            wrong.append(f"path: {there} is not a directory, and {path} should be in it")
            continue
        space = os.statvfs(there)
        free = space.f_bavail * space.f_frsize >> 20
        elsewhere = (
            f", or choose another directory by {variables[path]}" if path in variables else ""
        )
        reason = cannot_write(there)
        if space.f_flag & os.ST_RDONLY or reason == errno.EROFS:
            wrong.append(
                f"disk: {path} is on a file system that is mounted read-only: mount it writable, "
                f"or mount a writable one at {path}{elsewhere}"
            )
        elif free < mebibytes:
            wrong.append(f"disk: {free} MiB free for {path}, {mebibytes} are needed: make room")
        elif reason == errno.EPERM and os.geteuid() == 0:
            wrong.append(
                f"disk: nothing can be written to {there}, which is immutable (lsattr -d {there}): "
                f"chattr -i {there}{elsewhere}"
            )
        elif reason:
            wrong.append(
                f"disk: nothing can be written to {there} ({os.strerror(reason)}): "
                f"{path} must be writable for root{elsewhere}"
            )
    return wrong


def existing(path: str) -> str:
    """The directory itself or the nearest one above it that is there, as a link too."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def cannot_write(directory: str) -> int:
    """The error number of an attempt to make a file there; 0 if it works. The file has no name, so
    nobody sees it, and the directory stays as it is."""
    try:
        os.close(os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except OSError as problem:
        if problem.errno not in _NO_TMPFILE:
            return problem.errno or errno.EIO
        # The file system has no unnamed files. For root, access() checks flags and mounts.
        return 0 if os.access(directory, os.W_OK) else errno.EPERM
    return 0


def noexec(path: str) -> list[str]:
    """A noexec file system may contain links to our programs, but not the programs themselves."""
    there = existing(path)
    if not os.path.exists(there) or not os.statvfs(there).f_flag & os.ST_NOEXEC:
        return []
    return [
        f"disk: {path} is on a file system that is mounted noexec, so no program of the release "
        f"could run: mount -o remount,exec for it, also in /etc/fstab, or mount another one there"
    ]


def in_the_way(folders: Sequence[str], owner: Owner) -> list[str]:
    """Programs of others that have the names of ours."""
    wrong = []
    for folder in folders:
        for name in (*node_release.PROGRAMS, node_release.COMMAND):
            path = os.path.join(folder, name)
            if os.path.lexists(path) and not os.path.islink(path):
                package = owner(path)
                whose = f" of the package {package}: remove that" if package else ": move it away"
                wrong.append(f"path: {path} is another program{whose}")
    return wrong


def tailscale(owner_runs: bool, path: str = _TAILSCALED) -> list[str]:
    """Whether tailscaled can be installed in its directory, unless it is there or runs already."""
    folder = os.path.dirname(path)
    if owner_runs or os.path.exists(path) or not os.path.isdir(folder) or not cannot_write(folder):
        return []
    return [
        f"disk: tailscaled is not on this node, and cannot be installed to {folder}, where nothing "
        "can be written: install the package tailscale by the system's own means "
        "(rpm-ostree install tailscale) and run again"
    ]
