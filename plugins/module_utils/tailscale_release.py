# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Tailscale's own tarballs: which one a node needs, what is in it, and how it gets into place.

Every file is first written beside the place it is for, then all are renamed, or none: a running
tailscaled keeps the program it was started from, a full disk or a read-only one leaves the node as
it was, and what a killed run left is used up by the next.

Only the standard library and Ansible's are used, because this runs on nodes.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import http.client
import os
import re
import socket
import stat
import subprocess
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any, NamedTuple, Optional
from urllib.error import HTTPError, URLError

from ansible.module_utils.urls import open_url

from .shared.localapi import short_version

CLI, DAEMON = "/usr/bin/tailscale", "/usr/sbin/tailscaled"
UNIT = "/etc/systemd/system/tailscaled.service"
DEFAULTS = "/etc/default/tailscaled"
PLAIN_DEFAULTS = 'PORT="41641"\nFLAGS=""\n'  # without these two the unit does not start
NO_LOGS = "TS_NO_LOGS_NO_SUPPORT"
OFFICIAL = "https://pkgs.tailscale.com/stable"

# What the kernel calls a machine, and what Tailscale does.
ARCHITECTURES = {
    "x86_64": "amd64",
    "amd64": "amd64",
    "i386": "386",
    "i486": "386",
    "i586": "386",
    "i686": "386",
    "aarch64": "arm64",
    "arm64": "arm64",
    "armv5tel": "arm",
    "armv6l": "arm",
    "armv7l": "arm",
    "armv8l": "arm",
    "s390x": "s390x",
    "ppc64le": "ppc64le",
    "riscv64": "riscv64",
}
# For these Tailscale publishes no tarball: one has to be built, and served or copied.
UNPUBLISHED = ("s390x", "ppc64le")
# e_machine of an ELF header.
_ELF_MACHINES = {
    3: "386",
    21: "ppc64le",
    22: "s390x",
    40: "arm",
    62: "amd64",
    183: "arm64",
    243: "riscv64",
}

VERSION = re.compile(r"\d+\.\d+\.\d+")
_SHA256 = re.compile(r"(?:sha256:)?([0-9a-fA-F]{64})")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BLOCK = "headcni.mesh.tailscale_install"
BEGIN, END = f"# BEGIN {_BLOCK}", f"# END {_BLOCK}"
_MARK = f"# Installed by {_BLOCK} from "

TRIES = 3
CHUNK = 1 << 20
LARGEST = 1 << 30
SPACIOUS = "/var/tmp"  # noqa: S108 – on many nodes /tmp is in memory; only nameless files go here


class InstallError(Exception):
    """Tailscale cannot be installed as asked; the message says why and what to do."""


def architecture(machine: str) -> str:
    try:
        return ARCHITECTURES[machine]
    except KeyError:
        raise InstallError(
            f"this node's architecture is {machine!r}: Tailscale is installed on "
            f"{', '.join(dict.fromkeys(ARCHITECTURES.values()))}"
        ) from None


def tarball_name(version: str, arch: str) -> str:
    return f"tailscale_{version}_{arch}.tgz"


def checksum_of(text: str, source: str) -> str:
    """The digest in a .sha256 file, or in the option; 64 hexadecimal digits, whatever follows."""
    first = text.split()[0] if text.split() else ""
    found = _SHA256.fullmatch(first)
    if not found:
        raise InstallError(
            f"{source}: {first[:80]!r} is no SHA-256: expected 64 hexadecimal digits"
        )
    return found[1].lower()


@contextmanager
def private_file() -> Iterator[IO[bytes]]:
    """A file without a name, which no other user can open: what is verified is what is unpacked."""
    with writing(SPACIOUS):
        file = tempfile.TemporaryFile(dir=SPACIOUS)  # noqa: SIM115 – closed below
    with file:
        yield file


def file_digest(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    for chunk in iter(lambda: file.read(CHUNK), b""):
        digest.update(chunk)
    return digest.hexdigest()


def verify(file: IO[bytes], wanted: str, what: str) -> None:
    found = file_digest(file)
    if found != wanted:
        raise InstallError(
            f"{what} has the SHA-256 {found}, expected {wanted}: it is damaged, or not what was "
            "asked for; nothing was installed"
        )


def fetch_bytes(url: str, timeout: float, validate_certs: bool = True) -> bytes:
    """Something small: a checksum, a key, a repository's description."""
    with _opened(url, timeout, validate_certs) as answer, _network(url):
        body: bytes = answer.read(1 << 20)
        return body


def copy_file(source: str, file: IO[bytes]) -> None:
    """Copy a file that another user may be able to change, even meanwhile: only the copy counts."""
    # Without O_NONBLOCK, a pipe in its place would hold us up for ever.
    try:
        handle = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as problem:
        raise InstallError(f"src: {source} cannot be read: {problem.strerror}") from None
    found = os.fstat(handle)
    size = found.st_size
    if not stat.S_ISREG(found.st_mode) or size > LARGEST:
        os.close(handle)
        raise InstallError(f"src: {source} is not a file of at most {LARGEST >> 20} MiB")
    with open(handle, "rb") as given:
        for chunk in iter(lambda: given.read(CHUNK), b""):
            size -= len(chunk)
            if size < 0:
                raise InstallError(f"src: {source} grows while it is read: nothing was installed")
            with writing(SPACIOUS):
                file.write(chunk)
                file.flush()


def others_may_change(path: str) -> str:
    """The first part of the path that a user other than root could replace; empty if none."""
    part = os.path.realpath(path)
    while True:
        found = os.lstat(part)
        if found.st_uid != 0 or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return part
        if part == os.path.dirname(part):
            return ""
        part = os.path.dirname(part)


def fetch_file(url: str, file: IO[bytes], timeout: float, validate_certs: bool = True) -> None:
    """Download, whole or not at all. Only what a second try may mend is tried again."""
    for last in (False,) * (TRIES - 1) + (True,):
        file.seek(0)
        file.truncate()
        try:
            with _opened(url, timeout, validate_certs) as answer:
                _copy(answer, file, url)
            return
        except _Truncated as problem:
            if last:
                raise InstallError(str(problem)) from None
            time.sleep(1)


class _Truncated(Exception):
    pass


def _copy(answer: Any, file: IO[bytes], url: str) -> None:
    promised = answer.headers.get("Content-Length")
    size = 0
    with _network(url):
        try:
            for chunk in iter(lambda: answer.read(CHUNK), b""):
                size += len(chunk)
                if size > LARGEST:
                    raise InstallError(f"{url} has more than {LARGEST >> 20} MiB: it is no tarball")
                with writing(SPACIOUS):
                    file.write(chunk)
                    file.flush()
        except http.client.IncompleteRead as problem:
            size += len(problem.partial)
            promised = promised or "more"
    if promised and str(size) != promised:
        raise _Truncated(f"{url} ended after {size} of {promised} bytes: try again")


@contextmanager
def _opened(url: str, timeout: float, validate_certs: bool) -> Iterator[Any]:
    with _network(url):
        answer = open_url(
            url, timeout=timeout, validate_certs=validate_certs, http_agent="headcni.mesh"
        )
    try:
        if url.startswith("https://") and not answer.geturl().startswith("https://"):
            raise InstallError(f"{url} leads to {answer.geturl()}, which is not protected by TLS")
        yield answer
    finally:
        answer.close()


@contextmanager
def _network(url: str) -> Iterator[None]:
    try:
        yield
    except HTTPError as problem:
        hint = "see that the version and the address are right"
        if any(f"_{arch}.tgz" in url for arch in UNPUBLISHED) and url.startswith(OFFICIAL):
            hint = "Tailscale publishes none for this architecture: build one, and use method files"
        raise InstallError(f"{url}: HTTP {problem.code} {problem.reason}: {hint}") from None
    except (URLError, socket.timeout, ConnectionError, http.client.HTTPException) as problem:
        said = getattr(problem, "reason", None) or str(problem) or type(problem).__name__
        raise InstallError(
            f"{url} cannot be fetched: {said}: see that this node reaches it, or use method files"
        ) from None
    except ValueError as problem:
        raise InstallError(f"{url} is no usable address: {problem}") from None


class Contents(NamedTuple):
    """What of a tarball is text: the unit, and the variables that it is started with."""

    unit: str
    defaults: str


class Staging:
    """Files on their way: written beside their places, put there together by ``commit``, and taken
    back by ``undo`` as long as this is open."""

    def __init__(self) -> None:
        self._files: list[tuple[str, str]] = []
        self._done: list[tuple[str, str, bool]] = []

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_unused: object) -> None:
        for _fresh, target in self._files:
            sweep(target)

    def write(self, target: str, content: IO[bytes], mode: int) -> str:
        """Where it is until ``commit``."""
        folder = os.path.dirname(target)
        fresh, _spare = _beside(target)
        self._files.append((fresh, target))
        with writing(folder):
            os.makedirs(folder, exist_ok=True)
            _unlink(fresh)
            handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(handle, "wb") as file:
            for chunk in iter(lambda: content.read(CHUNK), b""):
                with writing(folder):
                    file.write(chunk)
            with writing(folder):
                file.flush()
                os.fchmod(handle, mode)
                os.fsync(handle)
        return fresh

    def commit(self) -> None:
        """All, or none: what was replaced stays at hand."""
        try:
            for fresh, target in self._files:
                with writing(os.path.dirname(target)):
                    spare = _beside(target)[1]
                    _unlink(spare)
                    had = os.path.lexists(target)
                    if had:
                        os.link(target, spare, follow_symlinks=False)
                    self._done.append((spare, target, had))
                    os.replace(fresh, target)
        except BaseException:
            self.undo()
            raise
        for folder in {os.path.dirname(target) for _unused, target in self._files}:
            _sync(folder)

    def undo(self) -> None:
        """Put back what ``commit`` replaced."""
        for spare, target, had in reversed(self._done):
            if had:
                os.replace(spare, target)
            else:
                _unlink(target)
        self._done.clear()


def _beside(target: str) -> tuple[str, str]:
    """The same names each time: what a killed run left is found again."""
    folder, name = os.path.split(target)
    return (
        os.path.join(folder, f".{name}.headcni-new"),
        os.path.join(folder, f".{name}.headcni-old"),
    )


def sweep(target: str) -> None:
    """Remove what was written beside it."""
    for path in _beside(target):
        with suppress(OSError):
            os.unlink(path)


@contextmanager
def writing(where: str) -> Iterator[None]:
    """What stands in the way of writing there, in a sentence."""
    try:
        yield
    except OSError as problem:
        reasons = {
            errno.ENOSPC: "the disk is full: make room",
            errno.EDQUOT: "the quota is used up: make room",
            errno.EROFS: "the file system is read-only: mount it for writing",
            errno.EACCES: "this user may not: become root",
            errno.EPERM: "this is not permitted: become root, or take the immutable flag away",
        }
        reason = reasons.get(problem.errno or 0, problem.strerror or str(problem))
        raise InstallError(f"{where} cannot be written: {reason}; nothing was changed") from None


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _sync(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unpack(tarball: IO[bytes], what: str, version: str, arch: str, staging: Staging) -> Contents:
    """Stage both programs, once they have proved to be of this version and for this node."""
    programs = {"tailscale": CLI, "tailscaled": DAEMON}
    texts = {"systemd/tailscaled.service": "", "systemd/tailscaled.defaults": ""}
    staged: dict[str, str] = {}
    try:
        # One pass, to the very end, where the checksum of gzip's own is.
        tarball.seek(0)
        with gzip.open(tarball, "rb") as stream:
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    name = member.name.partition("/")[2]
                    content = archive.extractfile(member) if member.isfile() else None
                    if content is None or member.size > LARGEST:
                        continue
                    if name in programs:
                        staged[name] = staging.write(programs[name], content, 0o755)
                    elif name in texts:
                        texts[name] = content.read().decode()
            while stream.read(CHUNK):
                pass
    except (tarfile.TarError, EOFError, zlib.error, OSError, UnicodeDecodeError) as problem:
        raise InstallError(
            f"{what} is not a whole tarball of Tailscale's: {problem}; nothing was installed"
        ) from None
    for name in (*programs, *texts):
        if not (staged.get(name) or texts.get(name)):
            raise InstallError(f"{what} has no {name} in it: expected Tailscale's own tarball")
    for name, fresh in staged.items():
        _prove(fresh, f"{name} in {what}", version, arch)
    return Contents(*texts.values())


def _prove(program: str, what: str, version: str, arch: str) -> None:
    made_for = elf_machine(program)
    if made_for != arch:
        raise InstallError(
            f"{what} is made for {made_for or 'no Linux machine'}, and this node is {arch}"
        )
    found = program_version(program)
    if found != version:
        raise InstallError(f"{what} says that it is {found or 'of no version'}, not {version}")


def elf_machine(program: str) -> str:
    """What the program is made for, in Tailscale's words; empty if it is no program."""
    with open(program, "rb") as file:
        head = file.read(20)
    if len(head) < 20 or head[:4] != b"\x7fELF":
        return ""
    number = int.from_bytes(head[18:20], "little" if head[5] == 1 else "big")
    return _ELF_MACHINES.get(number, f"the ELF machine {number}")


def program_version(program: str) -> str:
    """1.102.5; empty if it is not there or does not run."""
    try:
        done = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.decode(errors="replace").splitlines()
    return short_version(lines[0]) if lines else ""


def installed_version(cli: str = CLI, daemon: str = DAEMON) -> str:
    """Of both programs; empty if one lacks, and ``mixed`` if they differ."""
    found = {program_version(program) for program in (daemon, cli)}
    return found.pop() if len(found) == 1 else ("" if "" in found else "mixed")


def marked(unit: str, tarball: str) -> str:
    return f"{_MARK}{os.path.basename(tarball)}\n{unit}"


def is_ours(unit: str) -> bool:
    return unit.startswith(_MARK)


def environment_mistakes(environment: Mapping[str, Any]) -> list[str]:
    wrong = [
        f"environment: {name!r} is no name of a variable: expected letters, digits and _"
        for name in environment
        if not _NAME.fullmatch(str(name))
    ]
    wrong += [
        f"environment.{name}: the value has a line break in it"
        for name, value in environment.items()
        if set("\n\r\0") & set(str(value))
    ]
    if "PORT" in environment:
        wrong.append("environment.PORT: give the port by the option port")
    return wrong


def variables(environment: Mapping[str, Any], port: Optional[int]) -> dict[str, str]:
    """All that tailscaled is to find in its environment for our sake."""
    found = {str(name): str(value) for name, value in environment.items()}
    return {**({"PORT": str(port)} if port is not None else {}), **found}


def block_of(text: str) -> dict[str, None]:
    """The names of the variables in our block."""
    inside = _split(text)[1].split("\n")
    return dict.fromkeys(line.partition("=")[0] for line in inside if "=" in line)


def with_block(text: str, values: Mapping[str, str]) -> str:
    """The file with our block at its end, where it overrides what stands before. The rest is
    its owner's, and stays."""
    before, _unused, after = _split(text)
    rest = before + after
    if not values:
        return rest
    if rest and not rest.endswith("\n"):
        rest += "\n"
    lines = "".join(f"{name}={_quoted(value)}\n" for name, value in values.items())
    return f"{rest}{BEGIN}\n{lines}{END}\n"


def has_only_defaults(text: str) -> bool:
    """Whether nobody has added anything to what Tailscale's own file says."""
    lines = {line for line in text.splitlines() if line.strip() and not line.startswith("#")}
    return lines <= set(PLAIN_DEFAULTS.splitlines())


def _split(text: str) -> tuple[str, str, str]:
    before, begin, rest = text.partition(f"{BEGIN}\n")
    inside, end, after = rest.partition(f"{END}\n")
    return (before, inside, after) if begin and end else (text, "", "")


def _quoted(value: str) -> str:
    """As systemd reads it: in double quotes, with a backslash before what is special there."""
    return '"' + re.sub(r'(["\\`$])', r"\\\1", value) + '"'
