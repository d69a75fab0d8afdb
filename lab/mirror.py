"""A mirror laid out like Tailscale's download site, made from the binaries that the lab built.

`pack` runs here; as a program (`python3 mirror.py FOLDER PORT`) this file serves the folder on
the control machine.
"""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import os
import platform
import re
import sys
import tarfile
from pathlib import Path

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def pack(version: str, module: Path, home: Path) -> None:
    """Make home/mirror/stable/tailscale_VERSION_ARCH.tgz and its checksum from home/bin."""
    name = f"tailscale_{version}_{ARCHITECTURES[platform.machine()]}"
    stable = home / "mirror" / "stable"
    stable.mkdir(parents=True)
    tarball = stable / f"{name}.tgz"
    contents = {
        "tailscale": (home / "bin" / "tailscale", 0o755),
        "tailscaled": (home / "bin" / "tailscaled", 0o755),
        "systemd/tailscaled.defaults": (module / "cmd/tailscaled/tailscaled.defaults", 0o644),
        "systemd/tailscaled.service": (module / "cmd/tailscaled/tailscaled.service", 0o644),
    }
    with tarfile.open(tarball, "w:gz", compresslevel=1) as archive:
        for path, (source, mode) in contents.items():
            entry = tarfile.TarInfo(f"{name}/{path}")
            data = source.read_bytes()
            entry.size, entry.mode = len(data), mode
            archive.addfile(entry, io.BytesIO(data))
    digest = hashlib.sha256(tarball.read_bytes()).hexdigest()
    tarball.with_name(f"{name}.tgz.sha256").write_text(digest)


class Site(http.server.SimpleHTTPRequestHandler):
    """Files as they are, and /stable/?mode=json as the official site answers it."""

    def do_GET(self) -> None:
        if self.path.partition("?")[0].rstrip("/") == "/stable" and "mode=json" in self.path:
            self._index()
        else:
            super().do_GET()

    def _index(self) -> None:
        found = {}
        for name in sorted(os.listdir(os.path.join(self.directory, "stable"))):
            if match := re.fullmatch(r"tailscale_([\d.]+)_(\w+)\.tgz", name):
                found[match[2]] = (match[1], name)
        latest = max(version for version, _ in found.values())
        answer = {
            "Tarballs": {arch: name for arch, (_, name) in found.items()},
            "TarballsVersion": latest,
            "Version": latest,
        }
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def serve(folder: str, port: int) -> None:
    def site(*args: object) -> Site:
        return Site(*args, directory=folder)  # type: ignore[arg-type]

    http.server.ThreadingHTTPServer(("", port), site).serve_forever()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
