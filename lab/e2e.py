"""The images that upstream's specs of the network ask for, made here.

agnhost is upstream's own, built with the specs. What it has beside it upstream comes from Alpine,
here from Debian: a shell, curl, dig, netcat and their like, which specs call in their pods. The
CoreDNS in it is the lab's.
"""

from __future__ import annotations

import platform
import shutil
from pathlib import Path
from typing import Iterable

from . import images
from .image import Image
from .run import run

PACKAGES = ("bind9-dnsutils", "busybox-static", "curl", "iproute2", "netcat-openbsd", "wget")
# The rest is busybox', but for its shell, which would call its own applets and not these.
PROGRAMS = ("curl", "dash", "dig", "getent", "nc", "ss", "wget")
USERLAND = Image("what the specs' pods call", "bookworm", PACKAGES, "true")
# Where the specs look for images: the file that KUBE_TEST_REPO_LIST names.
REGISTRY = "lab.invalid/e2e"
REGISTRIES = "".join(
    f"{name}Registry: {REGISTRY}\n"
    for name in (
        *("promoterE2e", "buildImage", "invalid", "gcEtcd", "gc", "sigStorage", "private"),
        *("dockerLibrary", "cloudProviderGcp"),
    )
)
# These are one here. Of what nginx is for upstream, its pods have only to run.
AGNHOST = ("agnhost", "busybox", "glibc-dns-testing", "nginx", "pause")
REGRESSION = "regression-issue-74839"
SERVED = ("localhost.crt", "localhost.key")  # what agnhost serves TLS with


def pack(module: Path, home: Path) -> None:
    for name in SERVED:
        shutil.copyfile(module / "test/images/agnhost/porter" / name, home / name)


def archives(wanted: Iterable[str], home: Path, coredns: Path) -> dict[str, bytes]:
    """By file name, of the images that are wanted those that are made here; `home` is where
    agnhost was built, `coredns` a folder with it."""
    tags: dict[str, list[str]] = {}
    for tag in wanted:
        tags.setdefault(tag.removeprefix(f"{REGISTRY}/").partition(":")[0], []).append(tag)
    base, machine = USERLAND.root, platform.machine()
    files = images.taken(base, (f"usr/bin/{name}" for name in PROGRAMS))
    files.update((name, (home / name).read_bytes()) for name in SERVED)
    files["coredns"] = (coredns / "coredns").read_bytes()
    files["bin/busybox"] = (base / "bin/busybox").read_bytes()
    applets = set(run("chroot", base, "busybox", "--list").stdout.split()) - {"busybox", *PROGRAMS}
    return {
        "agnhost.tar": images.program(
            [tag for name in AGNHOST for tag in tags[name]],
            "agnhost",
            (home / "bin/agnhost").read_bytes(),
            machine,
            arguments=["pause"],
            files=files,
            links={
                **{f"bin/{name}": "busybox" for name in sorted(applets)},
                "bin/sh": "/usr/bin/dash",
            },
        ),
        "regression.tar": images.program(
            tags[REGRESSION], REGRESSION, (home / "bin" / REGRESSION).read_bytes(), machine
        ),
    }
