# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""The runtime's releases on a node: a directory each, and one link that says which is in use.

    /opt/headcni/releases/0.1.0/     code, wheels, compiled files
    /opt/headcni/current             -> releases/0.1.0, switched by one rename
    /opt/cni/bin/headcni             -> /opt/headcni/current/bin/headcni, and so on

A release is unpacked, compiled and tried out under a name that nobody looks at, and only then gets
its own: what stands under releases/ is whole. Two builds of one version, as a developer makes them,
stand side by side: the second is called 0.1.0+1a2b3c4d, after its digest.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any

from . import node_shim
from .node_shim import content_of

ROOT = "/opt/headcni"
PYTHON = "/usr/bin/python3"  # as in the first line of the programs
OLDEST_PYTHON = (3, 9)
PROGRAMS = ("headcni", "headcni-ipam")  # the programs that a container runtime calls
COMMAND = "headcnictl"
LOOPBACK = "loopback"  # containerd calls it for each pod, but does not include it
UNIT_DIR = "/etc/systemd/system"
FEWEST = 2  # releases to keep, so that a roll-back is possible

# Where distributions and k3s keep the CNI project's own plugins.
PLUGIN_DIRS = (
    "/usr/lib/cni",
    "/usr/libexec/cni",
    "/var/lib/rancher/k3s/data/cni",
    "/var/lib/rancher/k3s/data/current/bin",
)

_DIGEST_FILE = ".tarball-sha256"
_UNFINISHED = ".unfinished-"
_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+_-]*\Z")
_LARGEST = 256 << 20  # unpacked; a real one has some 10 MB


class ReleaseError(Exception):
    """The release cannot be installed. The message says why and what to do."""


@dataclass(frozen=True)
class Release:
    """An installed release."""

    name: str
    version: str
    digest: str
    path: str

    def as_dict(self) -> dict[str, str]:
        return {"name": self.name, "version": self.version, "digest": self.digest}


@dataclass(frozen=True)
class Wanted:
    """What the node should have in addition to the release itself."""

    bin_dirs: Sequence[str] = ("/opt/cni/bin",)
    command_dir: str = "/usr/local/bin"
    unit_dir: str = UNIT_DIR
    plugin_dirs: Sequence[str] = PLUGIN_DIRS
    keep: int = 3
    native_shim: bool = True


@dataclass
class Steps:
    """What is or would be done: for each change, a line with the old state and a line with the
    new one."""

    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)

    def note(self, before: str, after: str) -> None:
        if before:
            self.before.append(before)
        if after:
            self.after.append(after)

    def __bool__(self) -> bool:
        return bool(self.before or self.after)

    def diff(self) -> dict[str, str]:
        return {
            "before": "".join(f"{line}\n" for line in self.before),
            "after": "".join(f"{line}\n" for line in self.after),
        }


@dataclass(frozen=True)
class Python:
    version: tuple[int, ...]
    tag: str  # of compiled files: cpython-311


def ask_python(path: str = PYTHON) -> Python:
    """The interpreter that runs the programs. Checks its version, and that it has what they
    import."""
    question = (
        "import sys, json\n"
        "missing = []\n"
        "for name in ('sqlite3', 'ctypes', 'ssl', 'http.server', 'compileall'):\n"
        "    try: __import__(name)\n"
        "    except ImportError: missing.append(name)\n"
        "print(json.dumps([list(sys.version_info[:3]), sys.implementation.cache_tag, missing]))\n"
    )
    try:
        done = _run([path, "-IS", "-c", question], 30)
    except FileNotFoundError:
        raise ReleaseError(
            f"{path} is not there: the runtime needs Python 3.9 or newer; install python3"
        ) from None
    if done.returncode != 0:
        raise ReleaseError(f"{path} does not run: {_last_line(done.stderr)}")
    version, tag, missing = json.loads(done.stdout)
    if tuple(version) < OLDEST_PYTHON:
        shown = ".".join(map(str, version))
        raise ReleaseError(
            f"{path} is Python {shown}: the runtime needs 3.9 or newer: use a newer release of "
            "this distribution (docs/platforms.md)"
        )
    if missing:
        raise ReleaseError(
            f"{path} lacks {', '.join(missing)} of the standard library: "
            "install the distribution's full python3, not only a minimal one"
        )
    return Python(tuple(version), tag)


def installed(root: str = ROOT) -> list[Release]:
    """Every complete release, in the order of installation."""
    folder = os.path.join(root, "releases")
    found = []
    for name in _names(folder):
        path = os.path.join(folder, name)
        version = _text(os.path.join(path, "VERSION"))
        if not name.startswith(".") and version and not os.path.islink(path):
            digest = _text(os.path.join(path, _DIGEST_FILE))
            found.append((os.stat(path).st_ctime, Release(name, version, digest, path)))
    return [release for _unused, release in sorted(found, key=lambda one: (one[0], one[1].name))]


def current(root: str = ROOT) -> Release | None:
    """The release in use."""
    target = os.path.realpath(os.path.join(root, "current"))
    return next((one for one in installed(root) if os.path.realpath(one.path) == target), None)


def foretold(version: str, digest: str, root: str = ROOT) -> Release:
    """The release that ``install`` would create, for check mode."""
    return Release(version, version, digest, os.path.join(root, "releases", f".{version}"))


def find(releases: Sequence[Release], version: str, digest: str) -> Release | None:
    """By digest, if one is given. Otherwise by name, or by a version that only one release has."""
    if digest:
        return next(
            (one for one in releases if (one.version, one.digest) == (version, digest)), None
        )
    named = [one for one in releases if one.name == version]
    return next(iter(named or [one for one in releases if one.version == version]), None)


def install(
    tarball: str, version: str, digest: str, root: str = ROOT, python: str = PYTHON
) -> Release:
    """Unpack, compile and test the release, and only then give it its name. Does not change
    `current`."""
    ask_python(python)
    content = _read_once(tarball)
    actual = hashlib.sha256(content).hexdigest()
    if actual != digest:
        raise ReleaseError(f"checksum: the tarball has {actual}, expected {digest}")
    folder = os.path.join(root, "releases")
    os.makedirs(folder, exist_ok=True)
    _sweep(folder)
    name = version
    if os.path.lexists(os.path.join(folder, name)):
        name = f"{version}+{digest[:8]}"
    path = os.path.join(folder, name)
    with _explained_space(folder), _unfinished(folder, name) as fresh:
        unpack(io.BytesIO(content), fresh)
        found = _text(os.path.join(fresh, "VERSION"))
        if found != version:
            raise ReleaseError(f"version: the tarball holds {found or 'none'}, expected {version}")
        compile_release(fresh, path, python)
        try_out(fresh, version, python)
        _write(os.path.join(fresh, _DIGEST_FILE), f"{digest}\n".encode(), 0o644)
        # After a power cut, a release with its final name must not contain empty files.
        _run(["sync", "-f", fresh], 120)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)  # the same build, but somebody has removed parts of it
        os.rename(fresh, path)
    return Release(name, version, digest, path)


def is_compiled(release: Release, interpreter: Python) -> bool:
    cached = os.path.join(release.path, "headcni", "__pycache__", f"shim.{interpreter.tag}.pyc")
    return os.path.exists(cached)


def compile_release(path: str, as_if: str, python: str = PYTHON) -> None:
    """For this interpreter. Python never checks the compiled files against the sources, which do
    not change."""
    command = [python, "-IS", "-m", "compileall", "-q", "-j", "0"]
    command += ["--invalidation-mode", "unchecked-hash", "-s", path, "-p", as_if]
    done = _run([*command, f"{path}/headcni", f"{path}/vendor"], 600)
    if done.returncode != 0:
        raise ReleaseError(f"the release does not compile: {_last_line(done.stdout + done.stderr)}")


def try_out(path: str, version: str, python: str = PYTHON) -> None:
    """Check that it runs on this node: VERSION of the plugin, the daemon and the command."""
    env = {"CNI_COMMAND": "VERSION", "PATH": os.environ.get("PATH", "/usr/bin:/bin")}
    shim = os.path.join(path, "python", "headcni")  # the one in bin/ may be native
    if not os.path.exists(shim):
        shim = os.path.join(path, "bin", "headcni")
    asked = [python, "-IS", shim]
    done = _run(asked, 60, stdin='{"cniVersion": "1.0.0"}', env=env)
    with suppress(ValueError, KeyError, TypeError):
        if done.returncode == 0 and "1.0.0" in json.loads(done.stdout)["supportedVersions"]:
            asked = [python, "-IS", os.path.join(path, "bin", "headcni-daemon"), "--version"]
            done = _run(asked, 60, env=env)
            if done.returncode == 0 and done.stdout.strip() == version:
                _try_firewall(asked[:-1], env)
                return
    said = _last_line(done.stderr) or _last_line(done.stdout) or f"exit code {done.returncode}"
    raise ReleaseError(f"the release does not run on this node: {asked[2]}: {said}")


def _try_firewall(daemon: Sequence[str], env: Mapping[str, str]) -> None:
    """Whether this node takes the release's nft rules; they are written where nothing stays."""
    done = _run([*daemon, "--check-firewall"], 60, env=dict(env))
    older = done.returncode == 2 and "unrecognized arguments" in done.stderr
    if done.returncode != 0 and not older:
        said = _last_line(done.stdout) or _last_line(done.stderr)
        raise ReleaseError(f"pods of the release could not be networked on this node: {said}")


def switch(release: Release, root: str = ROOT) -> None:
    """With one rename, so that all programs always belong to the same release."""
    _link(os.path.join("releases", release.name), os.path.join(root, "current"))


def arrange(
    release: Release, wanted: Wanted, steps: Steps, *, root: str = ROOT, dry: bool = False
) -> list[str]:
    """Links and units as they should be, for a release that is or will be `current`; units that
    changed. All obstacles are named at once, before the first change."""
    links = _links(release, wanted, root)
    in_the_way = [path for path in links if os.path.lexists(path) and not os.path.islink(path)]
    if in_the_way:
        raise ReleaseError(
            f"{', '.join(in_the_way)}: not a link of HeadCNI's; move it away, "
            "or choose another directory"
        )
    _arrange_shim(release, wanted, steps, dry=dry)
    if not dry:
        _record(links, root)
    for path, target in links.items():
        had = _target(path)
        if had == target:
            continue
        steps.note(f"{path} -> {had}" if had else "", f"{path} -> {target}")
        if not dry:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            _link(target, path)
    units = []
    coming = not os.path.isdir(
        release.path
    )  # predicted in check mode: the content of its units is unknown
    for name in unit_names(root) if coming else _names(os.path.join(release.path, "units")):
        path = os.path.join(wanted.unit_dir, name)
        content = content_of(os.path.join(release.path, "units", name))
        if os.path.exists(path) and (coming or content_of(path) == content):
            continue
        units.append(name)
        steps.note(f"{path} of before" if os.path.exists(path) else "", f"{path} of {release.name}")
        if not dry:
            os.makedirs(wanted.unit_dir, exist_ok=True)
            _write(path, content, 0o644)
    return units


def _arrange_shim(release: Release, wanted: Wanted, steps: Steps, *, dry: bool) -> None:
    """The native shim in the release's bin/, or Python's. A release comes with Python's."""
    shim = shim_of(release, wanted)
    outdated = node_shim.outdated(release.path, shim)
    if outdated or (shim.is_native and not os.path.isdir(release.path)):
        steps.note("", f"shim: {shim.label}")
    for name in () if dry else outdated:
        _write(os.path.join(release.path, "bin", name), shim.programs[name], 0o755)
    if outdated and not dry:  # as in install(): a power cut must not leave an empty file
        _run(["sync", "-f", release.path], 120)


def shim_of(release: Release, wanted: Wanted) -> node_shim.Shim:
    """The shim that this release is to have here."""
    try:
        return node_shim.choose(release.path, wanted.native_shim)
    except node_shim.ShimError as problem:
        raise ReleaseError(str(problem)) from None


def loopback_of(wanted: Wanted, release: Release | None, root: str = ROOT) -> str:
    """Where the plugin that sets up pods' `lo` comes from. Empty if there is none."""
    for folder in (*wanted.bin_dirs, *wanted.plugin_dirs):
        if _has_loopback(folder, root):
            return os.path.join(folder, LOOPBACK)
    own = os.path.join(release.path, "bin", LOOPBACK) if release else ""
    # A release that is only predicted includes one, as all releases do now.
    return own if release and (os.path.exists(own) or not os.path.exists(release.path)) else ""


def _has_loopback(folder: str, root: str) -> bool:
    """One that is not ours."""
    path = os.path.join(folder, LOOPBACK)
    return os.path.exists(path) and not _target(path).startswith(root + os.sep)


def _links(release: Release, wanted: Wanted, root: str) -> dict[str, str]:
    """Path and target of each link. They lead by way of `current`, so a switch moves them all."""
    programs = os.path.join(root, "current", "bin")
    links = {
        os.path.join(folder, name): os.path.join(programs, name)
        for folder in wanted.bin_dirs
        for name in PROGRAMS
    }
    links[os.path.join(wanted.command_dir, COMMAND)] = os.path.join(programs, COMMAND)
    source = loopback_of(wanted, release, root)
    # A container runtime may use only one of these directories.
    lacking = [folder for folder in wanted.bin_dirs if not _has_loopback(folder, root)]
    if source and lacking:
        # Linked through our own root, so that we recognise it as ours when we remove it.
        ours = os.path.join(root, "plugins", LOOPBACK)
        inside = source.startswith(release.path + os.sep)
        links[ours] = os.path.join(programs, LOOPBACK) if inside else source
        for folder in lacking:
            links[os.path.join(folder, LOOPBACK)] = ours
    return links


def _recorded(root: str) -> list[str]:
    """Every place that a link of ours was ever put: the directories may be others by now."""
    return content_of(os.path.join(root, "links")).decode(errors="replace").splitlines()


def _record(links: Iterable[str], root: str) -> None:
    had = _recorded(root)
    new = [path for path in links if path not in had]
    if new:
        text = "".join(f"{path}\n" for path in (*had, *new))
        _write(os.path.join(root, "links"), text.encode(), 0o644)


def prune(
    keep: int, steps: Steps, *, root: str = ROOT, dry: bool = False, spare: str = ""
) -> list[str]:
    """Remove all but the latest releases, but never the one in use or the one named `spare`."""
    used = current(root)
    kept = {spare, used.name if used else ""}
    candidates = [one for one in installed(root) if one.name not in kept]
    room = max(0, keep - len(kept - {""}))
    gone = candidates[: len(candidates) - room] if room < len(candidates) else []
    for one in gone:
        steps.note(f"release {one.name}", "")
        if not dry:
            shutil.rmtree(one.path)
    return [one.name for one in gone]


def remove(wanted: Wanted, steps: Steps, *, root: str = ROOT, dry: bool = False) -> None:
    """Links and units of ours, then everything under the root."""
    names = [
        *(os.path.join(folder, one) for folder in wanted.bin_dirs for one in (*PROGRAMS, LOOPBACK)),
        os.path.join(wanted.command_dir, COMMAND),
        *_recorded(root),
    ]
    for path in dict.fromkeys(names):
        had = _target(path)
        if had.startswith(root + os.sep):
            steps.note(f"{path} -> {had}", "")
            if not dry:
                os.unlink(path)
    for name in unit_names(root):
        path = os.path.join(wanted.unit_dir, name)
        if os.path.lexists(path):
            steps.note(path, "")
            if not dry:
                os.unlink(path)
    if os.path.lexists(root):
        steps.note(root, "")
        if not dry:
            shutil.rmtree(root)


def remove_release(release: Release) -> None:
    shutil.rmtree(release.path)


def unit_names(root: str = ROOT) -> list[str]:
    """Of every release here, whatever the one in use has; without one, those we know."""
    found = {
        name for release in installed(root) for name in _names(os.path.join(release.path, "units"))
    }
    return sorted(found | {"headcni-daemon.service", "headcni-tailscaled.service"})


def _read_once(path: str) -> bytes:
    """What is verified is what is unpacked, even if the file changes meanwhile."""
    with open(path, "rb") as stream:
        content = stream.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise ReleaseError("the tarball is too large to be a release of ours")
    return content


def unpack(tarball: IO[bytes], target: str) -> None:
    """Without its top folder. Only plain files are taken: a release has no others."""
    room = _LARGEST
    try:
        with tarfile.open(fileobj=tarball, mode="r:gz") as archive:
            for member in archive:
                parts = member.name.split("/")[1:]
                if member.isdir():
                    continue
                stream = archive.extractfile(member) if member.isfile() else None
                if stream is None or not parts or {"", ".", ".."} & set(parts):
                    raise ReleaseError(f"the tarball holds {member.name!r}: not a release of ours")
                room -= member.size
                if room < 0:
                    raise ReleaseError("the tarball is too large to be a release of ours")
                path = os.path.join(target, *parts)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                _write(path, stream.read(), 0o755 if member.mode & 0o100 else 0o644)
    except (tarfile.TarError, EOFError) as problem:
        raise ReleaseError(f"the tarball cannot be read: {problem}") from None


@contextmanager
def _unfinished(folder: str, name: str) -> Iterator[str]:
    path = os.path.join(folder, f"{_UNFINISHED}{name}")
    os.mkdir(path, 0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _sweep(folder: str) -> None:
    """What a run that was cut off has left."""
    for name in _names(folder):
        if name.startswith(_UNFINISHED):
            shutil.rmtree(os.path.join(folder, name))


@contextmanager
def _explained_space(folder: str) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        with suppress(OSError):
            space = os.statvfs(folder)
            free = space.f_bavail * space.f_frsize >> 20
            raise ReleaseError(
                f"{folder}: {problem.strerror or problem} ({free} MiB free there); "
                "make room or mount it writable, and run again"
            ) from None
        raise


def check_name(text: str) -> str:
    """A release's name that is safe in a path."""
    if not _NAME.match(text):
        raise ReleaseError(f"version: {text!r}, expected one such as 0.1.0")
    return text


def _run(
    argv: Sequence[str], seconds: float, *, stdin: str = "", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            list(argv),
            input=stdin,
            env=dict(env) if env is not None else None,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ReleaseError(f"{' '.join(argv[:4])} did not end within {seconds:g} s") from None


def _link(target: str, path: str) -> None:
    fresh = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.headcni-new")
    with suppress(FileNotFoundError):
        os.unlink(fresh)
    os.symlink(target, fresh)
    os.replace(fresh, path)


def _write(path: str, content: bytes, mode: int) -> None:
    fresh = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.headcni-new")
    with open(fresh, "wb") as stream:
        stream.write(content)
        os.fchmod(stream.fileno(), mode)
    os.replace(fresh, path)


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _text(path: str) -> str:
    return content_of(path).decode("utf-8", "replace").strip()


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:300]


def report(root: str = ROOT) -> dict[str, Any]:
    """For results: the installed releases, and the one in use."""
    used = current(root)
    return {
        "installed": [one.as_dict() for one in installed(root)],
        "current": used.as_dict() if used else None,
    }
