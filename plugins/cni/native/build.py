"""Build the native shim for every architecture, with the compiler that requirements.lock pins.

    python3 plugins/cni/native/build.py [--output FOLDER] [ARCHITECTURE …]

The same sources give the same bytes, whoever builds them and where. The binaries are part of the
checkout and of the collection, so that a controller needs no compiler: docs/decisions/0016.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOCK = HERE / "requirements.lock"
SOURCES = ("build.py", "requirements.lock", "shim.c")
SUMS, BUILT_FROM = "SHA256SUMS", "BUILT_FROM"

# By name: Zig's target, and the oldest processor that it must run on.
TARGETS = {
    "aarch64": ("aarch64-linux-musl", "generic"),
    "arm": ("arm-linux-musleabi", "arm1176jz_s"),  # ARMv6, a Raspberry Pi Zero
    "ppc64le": ("powerpc64le-linux-musl", "ppc64le"),
    "riscv64": ("riscv64-linux-musl", "baseline_rv64"),
    "s390x": ("s390x-linux-musl", "z10"),
    "x86": ("x86-linux-musl", "pentium4"),
    "x86_64": ("x86_64-linux-musl", "x86_64"),
}
WARNINGS = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wconversion")
HARDENING = ("-static", "-fPIE", "-pie", "-fstack-protector-strong", "-Wl,-z,relro,-z,now")
SAME_BYTES = ("-Wl,--build-id=none", "-ffile-prefix-map=.=", "-g0", "-s")


def cache_dir() -> Path:
    if chosen := os.environ.get("HEADCNI_CACHE"):
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headcni"


def work_dir() -> Path:
    """Zig's own cache, which is right only for one compiler."""
    return cache_dir() / "zig" / digest_of(LOCK)[:24]


def compiler() -> Path:
    """Fetched once from the package index, its hash checked."""
    folder = cache_dir() / "compilers" / digest_of(LOCK)[:24]
    if not folder.exists():
        fresh = folder.with_name(f".unfinished-{folder.name}-{os.getpid()}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--require-hashes", "--disable-pip-version-check"]
        command += ["--target", str(fresh), "--requirement", str(LOCK)]
        try:
            if subprocess.run(command, timeout=900, check=False).returncode != 0:
                sys.exit(f"build: the compiler of {LOCK} could not be fetched")
            if not folder.exists():
                fresh.rename(folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return folder / "ziglang" / "zig"


def build(name: str, output: Path, work: Path) -> Path:
    target, processor = TARGETS[name]
    made = output / name
    command = [str(compiler()), "cc", "-target", target, f"-mcpu={processor}", "-Os"]
    command += [*WARNINGS, *HARDENING, *SAME_BYTES, "-o", str(made.absolute()), "shim.c"]
    caches = {f"ZIG_{which}_CACHE_DIR": str(work) for which in ("LOCAL", "GLOBAL")}
    done = subprocess.run(command, cwd=HERE, env={**os.environ, **caches}, timeout=900, check=False)
    if done.returncode != 0:
        sys.exit(f"build: the native shim for {name} could not be built")
    made.chmod(0o755)
    return made


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sums(folder: Path, names: tuple[str, ...]) -> str:
    """As sha256sum writes them."""
    return "".join(f"{digest_of(folder / name)}  {name}\n" for name in sorted(names))


def is_current(folder: Path = HERE) -> bool:
    """Whether the binaries are those of these sources."""
    try:
        return (folder / BUILT_FROM).read_text() == sums(HERE, SOURCES) and (
            folder / SUMS
        ).read_text() == sums(folder, tuple(TARGETS))
    except FileNotFoundError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", metavar="ARCHITECTURE", help=", ".join(TARGETS))
    parser.add_argument("--output", type=Path, default=HERE, help="folder (where this file is)")
    parser.add_argument("--work", type=Path, help="folder for the compiler's files (in the cache)")
    args = parser.parse_args()
    if unknown := set(args.names) - set(TARGETS):
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(TARGETS)}")
    if not args.names and is_current(args.output):
        return
    args.output.mkdir(parents=True, exist_ok=True)
    for name in args.names or TARGETS:
        print(build(name, args.output, args.work or work_dir()), flush=True)
    if not args.names:
        (args.output / SUMS).write_text(sums(args.output, tuple(TARGETS)))
        (args.output / BUILT_FROM).write_text(sums(HERE, SOURCES))


if __name__ == "__main__":
    main()
