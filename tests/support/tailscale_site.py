"""Tailscale's download site as nodes of a lab see it, with versions and faults of our choice.

The programs are the lab's own. Another version is the same program with another number in it.
"""

from __future__ import annotations

import hashlib
import http.server
import io
import os
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lab import tools
from lab.mirror import ARCHITECTURES

NEWER = tools.tailscale_version()
# As long, so that it fits into the program.
OLDER = f"{NEWER[:-1]}{int(NEWER[-1]) - 1}" if NEWER[-1] != "0" else f"{NEWER[:-3]}0.9"
ARCH = ARCHITECTURES[os.uname().machine]


def tarball_name(version: str) -> str:
    return f"tailscale_{version}_{ARCH}.tgz"


def program(name: str, version: str) -> bytes:
    data = (tools.TAILSCALE.bin / name).read_bytes()
    return data.replace(NEWER.encode(), version.encode()) if version != NEWER else data


def from_source(path: str) -> bytes:
    return (tools.TAILSCALE.module_dir("tailscale.com") / path).read_bytes()


def contents(version: str) -> dict[str, bytes]:
    return {
        "tailscale": program("tailscale", version),
        "tailscaled": program("tailscaled", version),
        "systemd/tailscaled.service": from_source("cmd/tailscaled/tailscaled.service"),
        "systemd/tailscaled.defaults": from_source("cmd/tailscaled/tailscaled.defaults"),
    }


def pack(files: dict[str, bytes], version: str) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz", compresslevel=1) as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(f"{tarball_name(version)[:-4]}/{name}")
            entry.size, entry.mode = len(data), 0o755
            archive.addfile(entry, io.BytesIO(data))
    return made.getvalue()


@dataclass
class Site:
    """Serves `files` by their paths. Of what is in `cut`, only the first half arrives."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)  # fingerprints of the repositories' keys

    def checksums(self, folder: str = "stable") -> dict[str, str]:
        """Of the tarballs offered there, by their names: without them, http is refused."""
        return {
            path.rpartition("/")[2]: hashlib.sha256(data).hexdigest()
            for path, data in self.files.items()
            if path.startswith(f"/{folder}/") and path.endswith(".tgz")
        }

    def offer(self, folder: str, version: str, data: bytes) -> None:
        path = f"/{folder}/{tarball_name(version)}"
        self.files[path] = data
        self.files[f"{path}.sha256"] = hashlib.sha256(data).hexdigest().encode()


@contextmanager
def served(address: str) -> Iterator[Site]:
    site = Site()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.asked.append(self.path)
            data = site.files.get(self.path)
            if data is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if self.path in site.cut else data)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer((address, 0), Handler) as server:
        site.url = f"http://{address}:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
        try:
            yield site
        finally:
            server.shutdown()


CONTROL = """\
Package: tailscale
Version: {version}
Architecture: {arch}
Maintainer: nobody <nobody@invalid>
Description: Tailscale, as its own package has it
"""


def package(folder: Path, version: str) -> Path:
    """A package with the places and the scripts of Tailscale's own."""
    root = folder / f"tailscale_{version}"
    files = {
        "usr/bin/tailscale": (program("tailscale", version), 0o755),
        "usr/sbin/tailscaled": (program("tailscaled", version), 0o755),
        "lib/systemd/system/tailscaled.service": (
            from_source("cmd/tailscaled/tailscaled.service"),
            0o644,
        ),
        "etc/default/tailscaled": (from_source("cmd/tailscaled/tailscaled.defaults"), 0o644),
        "DEBIAN/control": (CONTROL.format(version=version, arch=ARCH).encode(), 0o644),
        "DEBIAN/conffiles": (b"/etc/default/tailscaled\n", 0o644),
        **{
            f"DEBIAN/{name}": (from_source(f"release/deb/debian.{name}.sh"), 0o755)
            for name in ("postinst", "prerm", "postrm")
        },
    }
    for path, (data, mode) in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(mode)
    made = folder / f"tailscale_{version}_{ARCH}.deb"
    _run("dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", str(root), str(made))
    return made


def repository(site: Site, folder: Path, prefix: str, suite: str, *versions: str) -> None:
    """Offer a signed repository of packages, laid out as the official one, below /PREFIX."""
    home = folder / "gpg"
    home.mkdir(mode=0o700, exist_ok=True)
    gpg = ("gpg", "--homedir", str(home), "--batch", "--quiet", "--pinentry-mode", "loopback")
    if not (home / "pubring.kbx").exists():
        nobody = ("nobody@invalid", "rsa2048", "sign", "1d")
        _run(*gpg, "--passphrase", "", "--quick-generate-key", *nobody)
    packages = ""
    for version in versions:
        made = folder / f"tailscale_{version}_{ARCH}.deb"
        data = (made if made.exists() else package(folder, version)).read_bytes()
        site.files[f"/{prefix}/pool/{made.name}"] = data
        packages += CONTROL.format(version=version, arch=ARCH) + (
            f"Filename: pool/{made.name}\nSize: {len(data)}\n"
            f"SHA256: {hashlib.sha256(data).hexdigest()}\n\n"
        )
    index = f"main/binary-{ARCH}/Packages"
    release = (
        f"Origin: test\nSuite: {suite}\nCodename: {suite}\nArchitectures: {ARCH}\n"
        f"Components: main\nDate: {_run('date', '-Ru').strip()}\nSHA256:\n"
        f" {hashlib.sha256(packages.encode()).hexdigest()} {len(packages)} {index}\n"
    )
    (folder / "Release").write_text(release)
    site.files[f"/{prefix}/dists/{suite}/{index}"] = packages.encode()
    site.files[f"/{prefix}/dists/{suite}/InRelease"] = _run(
        *gpg, "--clearsign", "--output", "-", str(folder / "Release")
    ).encode()
    listed = _run(*gpg, "--list-keys", "--with-colons").splitlines()
    site.keys = [line.split(":")[9] for line in listed if line.startswith("fpr:")][:1]
    key = subprocess.run([*gpg, "--export"], capture_output=True, timeout=60, check=True).stdout
    site.files[f"/{prefix}/{suite}.noarmor.gpg"] = key
    _run("gpgconf", "--homedir", str(home), "--kill", "all")


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
