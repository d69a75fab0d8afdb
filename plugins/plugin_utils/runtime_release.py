# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""The runtime's tarball on the controller: given by the user, or built from the collection.

It is built once for each version of the sources, and kept outside of the checkout:

    ~/.cache/headcni/releases/KEY/headcni-runtime-VERSION.tar.gz
    ~/.cache/headcni/unpacked/DIGEST/                               the same, unpacked
    ~/.cache/headcni/wheels/KEY/                                    the wheels of requirements.lock
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError
from ansible_collections.headcni.mesh.plugins.module_utils import node_release
from ansible_collections.headcni.mesh.plugins.module_utils.shared.filelock import lock

SOURCES = Path(__file__).resolve().parent.parent / "cni"
PREFIX = "headcni-runtime-"
BUILD_SECONDS = 15 * 60
KEEP = 5

_FETCH = "import sys, pathlib, release; release.fetch_wheels(pathlib.Path(sys.argv[1]))"
_BUILD = (
    "import sys, pathlib, release;"
    " print(release.build(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])))"
)


class ReleaseError(Exception):
    """There is no tarball and none can be built. The message says why and what to do."""


@dataclass(frozen=True)
class Tarball:
    path: Path
    version: str
    digest: str

    def differences(self, given: Mapping[str, Any]) -> list[str]:
        """How it differs from the version and checksum that were given, if any."""
        return [
            f"{name}: {self.path} has {actual}, expected {given[name]}"
            for name, actual in (("checksum", self.digest), ("version", self.version))
            if given.get(name) and given[name] != actual
        ]

    def unpacked(self) -> Path:
        """The release as a directory, so that its own code can be run."""
        target = cache_dir() / "unpacked" / self.digest[:24]
        if not target.exists():
            with _alone("unpacked"):
                if not target.exists():
                    _unpack(self.path, target)
        return target


def cache_dir() -> Path:
    if chosen := os.environ.get("HEADCNI_CACHE"):
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headcni"


def ensure(
    src: str = "",
    wheels: str = "",
    say: Callable[[str], None] = lambda _unused: None,
    sources: Path = SOURCES,
) -> Tarball:
    """The given tarball, or one that is built from these sources."""
    if src:
        return _given(Path(src).expanduser())
    folder = cache_dir() / "releases" / _key(sources)
    try:
        if not folder.exists():
            with _alone("releases"):
                if not folder.exists():
                    say("building the runtime's release from the collection")
                    _build(sources, folder, wheels)
        return _read(next(folder.glob(f"{PREFIX}*.tar.gz")))
    except OSError as problem:
        raise ReleaseError(
            f"{problem.filename or folder}: {problem.strerror}; the controller keeps releases in "
            f"{cache_dir()}: set XDG_CACHE_HOME to a directory that can be written"
        ) from None


def located(find: Callable[[str, str], str], src: str | None) -> str:
    """The path of a tarball, searched as Ansible searches files of a role or a play."""
    if not src:
        return ""
    try:
        return find("files", src)
    except AnsibleError:
        raise ReleaseError(
            f"src: {src} is not there on the controller; `make release` builds one in dist/"
        ) from None


def check_config(config: Mapping[str, Any], tarball: Tarball) -> list[str]:
    """The mistakes that the daemon of this release finds in a configuration."""
    release = tarball.unpacked()
    code = (
        "import sys, json; from headcni.daemon import config;"
        " made, found = config.parse(sys.stdin.buffer.read());"
        " print(json.dumps([[p.path, p.value, p.expected] for p in found], default=str))"
    )
    env = {**os.environ, "PYTHONPATH": f"{release}:{release / 'vendor'}"}
    done = subprocess.run(
        [sys.executable, "-S", "-B", "-c", code],
        input=json.dumps(config),  # JSON is also YAML
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode != 0:
        raise ReleaseError(f"the configuration cannot be checked: {_last_line(done.stderr)}")
    return [
        f"{path or 'config'}: {json.dumps(value)}, expected {expected}"
        for path, value, expected in json.loads(done.stdout)
    ]


def _given(path: Path) -> Tarball:
    if not path.is_file():
        raise ReleaseError(f"src: {path} is not there; `make release` builds one in dist/")
    try:
        return _read(path)
    except (tarfile.TarError, OSError, EOFError, KeyError) as problem:
        raise ReleaseError(f"src: {path} is not a release of the runtime: {problem}") from None


def _read(path: Path) -> Tarball:
    with tarfile.open(path, "r:gz") as archive:
        first = archive.next()
        top = first.name.split("/")[0] if first else ""
        if not top.startswith(PREFIX):
            raise tarfile.TarError(f"it holds {top!r}, expected {PREFIX}VERSION")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Tarball(path, top.removeprefix(PREFIX), digest)


def _key(sources: Path) -> str:
    """A hash of all files from which a release is built."""
    digest = hashlib.sha256()
    files = [sources / "release.py", sources / "requirements.lock"]
    for folder in ("bin", "units", "headcni", "native"):
        for parent, _unused, names in os.walk(sources / folder, followlinks=True):
            files += (Path(parent, name) for name in names if not name.endswith(".pyc"))
    for file in sorted(files):
        if file.is_file():
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            digest.update(f"{file.relative_to(sources)} {content}\n".encode())
    return digest.hexdigest()[:24]


def _build(sources: Path, folder: Path, wheels: str) -> None:
    chosen = Path(wheels).expanduser() if wheels else _wheels(sources)
    if not any(chosen.glob("*.whl")):
        raise ReleaseError(f"wheels: {chosen} has no wheels; see plugins/cni/requirements.lock")
    with _unfinished(folder) as fresh:
        _python(sources, _BUILD, str(fresh), str(chosen))
    for old in sorted(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)


def _wheels(sources: Path) -> Path:
    lock = (sources / "requirements.lock").read_bytes()
    folder = cache_dir() / "wheels" / hashlib.sha256(lock).hexdigest()[:24]
    if not folder.exists():
        with _unfinished(folder) as fresh:
            _python(sources, _FETCH, str(fresh))
    return folder


def _python(sources: Path, code: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, *arguments],
        cwd=sources,
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode == 0:
        return
    if "No module named pip" in done.stderr:
        raise ReleaseError(
            f"{sys.executable} has no pip to fetch the runtime's wheels with: install it, or build "
            "the tarball elsewhere (make release) and name it by headcni_node_release_src"
        )
    raise ReleaseError(
        f"the runtime's release cannot be built: {_reason(done.stderr)}; without a package index, "
        "name a tarball (headcni_node_release_src) or its wheels (headcni_node_release_wheels)"
    )


@contextmanager
def _unfinished(folder: Path) -> Iterator[Path]:
    """A directory that gets its name only when it is complete."""
    fresh = folder.with_name(f".unfinished-{folder.name}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        yield fresh
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _unpack(tarball: Path, target: Path) -> None:
    with _unfinished(target) as fresh, tarball.open("rb") as file:
        node_release.unpack(file, str(fresh))
    for old in sorted(target.parent.iterdir(), key=lambda path: path.stat().st_mtime)[:-KEEP]:
        if old != target:
            shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _alone(what: str) -> Iterator[None]:
    """Ansible runs this for many nodes at once: one process builds, the others wait."""
    folder = cache_dir() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"runtime-{what}"
    with path.open("w") as file:
        try:
            lock(file.fileno(), str(path), BUILD_SECONDS)
        except TimeoutError:
            raise ReleaseError(
                f"another run has been building for {BUILD_SECONDS} s: try again"
            ) from None
        yield


def _reason(text: str) -> str:
    """The line of pip's output that names the problem; it is not always the last one."""
    lines = [line for line in text.strip().splitlines() if line.startswith(("ERROR:", "release:"))]
    return (lines or [_last_line(text)])[0][:300]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason was given"])[-1][:300]
