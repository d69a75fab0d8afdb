"""Container images made here, of programs that are here anyway: nothing is fetched."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Iterable, Optional, Sequence

from .run import run

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
BUSYBOX = "lab.invalid/busybox:1"
COREDNS = "lab.invalid/coredns:1"
APPLETS = (
    *("sh", "sleep", "nc", "httpd", "wget", "ip", "cat", "ls", "echo", "hostname", "mkdir"),
    *("date", "env", "grep", "nslookup", "ping", "rm", "seq", "top", "touch", "true"),
)


def image(name: str, busybox: bytes, machine: str) -> bytes:
    """Of busybox. It sleeps unless told otherwise, which is all that the first container of a pod
    has to do."""
    layer = _tar(
        {"bin/busybox": (busybox, 0o755)}, {f"bin/{applet}": "busybox" for applet in APPLETS}
    )
    return _archive([name], layer, ["/bin/sleep", "2147483647"], machine)


def web_server(name: str, busybox: bytes, machine: str) -> bytes:
    """Of busybox too: it serves a page on port 80."""
    layer = _tar(
        {"bin/busybox": (busybox, 0o755), "www/index.html": (b"It works\n", 0o644)},
        {"bin/httpd": "busybox"},
    )
    return _archive([name], layer, ["/bin/httpd", "-f", "-p", "80", "-h", "/www"], machine)


def coredns(program: bytes, machine: str) -> bytes:
    return _archive([COREDNS], _tar({"coredns": (program, 0o755)}, {}), ["/coredns"], machine)


def kubernetes(
    tags: Sequence[str], files: dict[str, bytes], links: dict[str, str], machine: str
) -> bytes:
    """One for all components: whoever runs it says which."""
    layer = _tar({path: (data, 0o755) for path, data in files.items()}, links)
    return _archive(tags, layer, ["/usr/local/bin/kubectl"], machine)


def program(
    tags: Sequence[str],
    name: str,
    content: bytes,
    machine: str,
    *,
    arguments: Sequence[str] = (),
    files: Optional[dict[str, bytes]] = None,
    links: Optional[dict[str, str]] = None,
) -> bytes:
    """Of one that is linked statically, and of what else its pods call."""
    held = {name: (content, 0o755)}
    held.update((path, (data, 0o755)) for path, data in (files or {}).items())
    return _archive(tags, _tar(held, links or {}), [f"/{name}"], machine, arguments)


def taken(base: Path, programs: Iterable[str]) -> dict[str, bytes]:
    """Programs of a root file system, with all that they are linked with, by their paths."""
    found = [f"/{path}" for path in programs]
    # Each name with a colon, and below it the paths of its libraries.
    said = run("chroot", base, "ldd", *found).stdout
    linked = (word for word in said.split() if word.startswith("/") and not word.endswith(":"))
    return {
        path[1:]: _seen_in(base, path[1:]).read_bytes() for path in dict.fromkeys((*found, *linked))
    }


def _seen_in(base: Path, path: str) -> Path:
    """Links lead to where they do in the image, absolute ones too."""
    found = base / path
    while found.is_symlink():
        target = os.readlink(found)
        found = base / target[1:] if target.startswith("/") else found.parent / target
    return found


def _archive(
    tags: Sequence[str],
    layer: bytes,
    entrypoint: list[str],
    machine: str,
    arguments: Sequence[str] = (),
) -> bytes:
    """A docker archive, as `ctr images import` takes it."""
    config = json.dumps(
        {
            "architecture": ARCHITECTURES[machine],
            "os": "linux",
            "config": {
                "Entrypoint": entrypoint,
                "Cmd": list(arguments),
                "Env": ["PATH=/usr/local/bin:/usr/sbin:/usr/bin:/bin"],
            },
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{_digest(layer)}"]},
        }
    ).encode()
    manifest = [{"Config": "config.json", "RepoTags": list(tags), "Layers": ["layer.tar"]}]
    return _tar(
        {
            "config.json": (config, 0o644),
            "layer.tar": (layer, 0o644),
            "manifest.json": (json.dumps(manifest).encode(), 0o644),
        },
        {},
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _tar(files: dict[str, tuple[bytes, int]], links: dict[str, str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, (data, mode) in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), mode
            archive.addfile(entry, io.BytesIO(data))
        for path, target in links.items():
            entry = tarfile.TarInfo(path)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            archive.addfile(entry)
    return packed.getvalue()
