"""Build the runtime's release: one tarball with all that a node needs, for every architecture.

    python3 plugins/cni/release.py [--output dist]

The same sources give the same bytes, whoever builds it and when. On the node:

    tar -xzf headcni-runtime-X.tar.gz -C /opt/headcni/releases
    ln -s /opt/headcni/releases/headcni-runtime-X/bin/headcni{,-ipam} /opt/cni/bin/
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOCK = HERE / "requirements.lock"
# Not in the sources: Ansible's own checks know no such first line. -IS saves a pod some 10 ms.
FIRST_LINE = b"#!/usr/bin/python3 -IS\n"
SHIMS = ("headcni", "headcni-ipam", "loopback")  # what a container runtime starts
MTIME = 315532800  # 1980-01-01, the oldest that every archive format can say


def version() -> str:
    found = re.search(r'^__version__ = "(.+)"$', (HERE / "headcni/__init__.py").read_text(), re.M)
    if found is None:
        sys.exit("release: headcni/__init__.py has no __version__")
    return found[1]


def contents(wheels: Path) -> Iterator[tuple[str, bytes, int]]:
    """Path in the release, bytes, mode. Links are followed: a release stands alone."""
    for program in sorted((HERE / "bin").iterdir()):
        yield f"bin/{program.name}", FIRST_LINE + program.read_bytes(), 0o755
    for name in SHIMS:  # what the native shim executes, which takes their place in bin/ on a node
        yield f"python/{name}", FIRST_LINE + (HERE / "bin" / name).read_bytes(), 0o755
    yield from native_shims()
    for unit in sorted((HERE / "units").iterdir()):
        yield f"units/{unit.name}", unit.read_bytes(), 0o644
    for source in runtime_sources():
        yield str(source.relative_to(HERE)), source.read_bytes(), 0o644
    for wheel in locked_wheels(wheels):
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            for name in sorted(archive.namelist()):
                if not name.endswith("/"):
                    yield f"vendor/{name}", archive.read(name), 0o644
    yield "VERSION", f"{version()}\n".encode(), 0o644


def runtime_sources(package: Path = HERE / "headcni") -> list[Path]:
    """All files of the package. `shared` in it is a link to a folder, which rglob would skip."""
    return sorted(
        Path(folder, name)
        for folder, _unused, names in os.walk(package, followlinks=True)
        for name in names
        if name.endswith((".py", ".json"))
    )


def native_shims(folder: Path = HERE / "native") -> Iterator[tuple[str, bytes, int]]:
    """One for each architecture; native/build.py makes them, and notes their hashes."""
    if not (folder / "SHA256SUMS").exists():
        return  # taken out of the sources: nodes use the Python shim
    sums = (folder / "SHA256SUMS").read_bytes()
    for line in sums.decode().splitlines():
        digest, name = line.split()
        content = (folder / name).read_bytes()
        if hashlib.sha256(content).hexdigest() != digest:
            sys.exit(f"release: {folder / name} is not what SHA256SUMS says: make native-shim")
        yield f"native/{name}", content, 0o755
    yield "native/SHA256SUMS", sums, 0o644


def locked_wheels(folder: Path) -> Iterator[bytes]:
    """The folder's wheels in order of their names, which must be just those of the lock file."""
    missing = {}
    for entry in re.split(r"^(?=\S+==)", LOCK.read_text(), flags=re.M)[1:]:
        name = re.match(r"[\w.-]+", entry)
        if name:
            missing[_normal(name[0])] = set(re.findall(r"--hash=sha256:([0-9a-f]{64})", entry))
    for wheel in sorted(folder.glob("*.whl")):
        if not wheel.name.endswith("-none-any.whl"):
            sys.exit(f"release: {wheel.name} is not pure Python: nodes have other architectures")
        hashes = missing.pop(_normal(wheel.name.split("-")[0]), None)
        if hashes is None:
            sys.exit(f"release: {wheel} is not in {LOCK.name}, or is there twice: remove it")
        content = wheel.read_bytes()  # once: what is verified is what is packed
        digest = hashlib.sha256(content).hexdigest()
        if digest not in hashes:
            sys.exit(
                f"release: {wheel} has the SHA-256 {digest}, and {LOCK.name} expects another: "
                "remove it, and fetch the one that the lock file names"
            )
        yield content
    if missing:
        lacking = ", ".join(sorted(missing))
        sys.exit(f"release: {folder} has no wheel of {lacking}, which {LOCK.name} names")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def fetch_wheels(target: Path) -> None:
    """The locked wheels from the package index, their hashes checked."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--require-hashes",
        "--disable-pip-version-check",
        "--dest",
        str(target),
        "--requirement",
        str(LOCK),
    ]
    if subprocess.run(command, timeout=600, check=False).returncode != 0:
        sys.exit(
            "release: the wheels of plugins/cni/requirements.lock could not be fetched; "
            "give a folder that has them with --wheels"
        )


def build(output: Path, wheels: Path) -> Path:
    name = f"headcni-runtime-{version()}"
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path, data, mode in contents(wheels):
            entry = tarfile.TarInfo(f"{name}/{path}")
            entry.size, entry.mode, entry.mtime = len(data), mode, MTIME
            entry.uname = entry.gname = "root"
            archive.addfile(entry, io.BytesIO(data))
    output.mkdir(parents=True, exist_ok=True)
    target = output / f"{name}.tar.gz"
    unfinished = target.with_suffix(".new")
    with unfinished.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        packed.write(raw.getvalue())
    unfinished.rename(target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--output", type=Path, default=Path("dist"), help="folder (dist)")
    parser.add_argument("--wheels", type=Path, help="folder with the locked wheels; else fetched")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.wheels is None:
            fetch_wheels(Path(folder))
        print(build(args.output, args.wheels or Path(folder)))


if __name__ == "__main__":
    main()
