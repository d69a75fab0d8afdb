"""What a lab and the runtime have put on this machine, so that two moments can be compared.

Other programs may create and remove namespaces, links, containers and rules at any time. So only
what carries our names counts: the lab's id, or a name that the HeadCNI runtime uses.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from lab.layout import Lab, cache_dir

Listing = dict[str, set[str]]

# On this machine the runtime must create nothing: it works inside the lab's machines.
RUNTIME_NAMESPACE = re.compile(r"headcni")
RUNTIME_LINK = re.compile(r"headcni|hci?[0-9a-f]{11}$")
RUNTIME_ROUTE = re.compile(r"\b(table|lookup) 520[0-9]\b|\bdev headcni|\bdev hci?[0-9a-f]{11}\b")
OUR_NFT_TABLE = re.compile(r"^table \S+ (headcni|lab$)")


def listing(lab: Lab, marker: str) -> Listing:
    """Namespaces, mounts, links, routes, rules, nft tables, cgroups, files and processes of ours.

    A process is ours if it has the marker in its environment or runs in one of the lab's cgroups.
    """
    places = (f"{lab.dir}/", f"{cache_dir()}/", f"/run/netns/{lab.prefix}")
    of_lab = re.compile(rf"\bdev {lab.host_link}\b")
    routes = [*_lines("ip", "route", "show", "table", "all")]
    routes += _lines("ip", "-6", "route", "show", "table", "all")
    return {
        "namespaces": {
            name
            for name in _entries("/run/netns")
            if name.startswith(lab.prefix) or RUNTIME_NAMESPACE.match(name)
        },
        "mounts": {
            point
            for point in (line.split()[1] for line in _lines("cat", "/proc/self/mounts"))
            if point.startswith(places)
        },
        "links": {
            name
            for name in _entries("/sys/class/net")
            if name.startswith(lab.prefix) or RUNTIME_LINK.match(name)
        },
        "routes": {line for line in routes if of_lab.search(line) or RUNTIME_ROUTE.search(line)},
        "rules": {
            line
            for line in (*_lines("ip", "rule"), *_lines("ip", "-6", "rule"))
            if RUNTIME_ROUTE.search(line)
        },
        "nft tables": {
            line for line in _lines("nft", "list", "tables") if OUR_NFT_TABLE.match(line)
        },
        "cgroups": {
            str(path)
            for top in Path("/sys/fs/cgroup").iterdir()
            for path in (top, top / lab.prefix)
            if path.name == lab.prefix and path.is_dir()
        },
        "lab files": {str(lab.dir)} if lab.dir.exists() else set(),
        "processes": _processes(marker.encode(), lab.prefix),
    }


def differences(before: Listing, after: Listing) -> dict[str, dict[str, set[str]]]:
    """What only one of the two has. A process may have ended meanwhile, but none may be new."""
    return {
        kind: {"gone": before[kind] - after[kind], "left behind": after[kind] - before[kind]}
        for kind in before
        if (after[kind] - before[kind] if kind == "processes" else before[kind] != after[kind])
    }


def assert_nothing_left(before: Listing, after: Listing, when: str = "") -> None:
    """Fail with the whole difference in the message; pytest would shorten it."""
    left = differences(before, after)
    if left:
        raise AssertionError(f"{when} {left}".strip())


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _lines(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return [line.strip() for line in done.stdout.splitlines()]


def _processes(marker: bytes, cgroup: str) -> set[str]:
    own = _ancestors_and_self()
    found = set()
    for process in os.listdir("/proc"):
        if not process.isdigit() or int(process) in own:
            continue
        home = Path("/proc", process)
        try:
            title = (home / "cmdline").read_bytes().replace(b"\0", b" ").strip()
            if not title:
                continue  # a kernel thread, or a process that has ended but was not waited for
            marked = marker in (home / "environ").read_bytes().split(b"\0")
            if marked or f"/{cgroup}/" in (home / "cgroup").read_text():
                found.add(f"{process} {title.decode(errors='replace')[:150]}")
        except OSError:
            continue
    return found


def _ancestors_and_self() -> set[int]:
    found, process = set(), os.getpid()
    while process > 1:
        found.add(process)
        process = int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return found
