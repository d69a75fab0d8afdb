"""What a machine shows of itself, so that two moments can be compared."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

Listing = dict[str, set[str]]


def listing(lab_id: str, marker: str) -> Listing:
    """Namespaces, mounts, links, routes, rules, nft tables, cgroups, files and processes.

    The machine may be busy with other things: what carries another lab's or another test's name
    is passed over. A process counts if it has the marker in its environment, or if it lives in a
    PID namespace other than ours, as a lab's machines do, and in no other lab's cgroup.
    """
    others = re.compile(rf"hclab-(?!{lab_id})|hct-|/(?!{lab_id})[0-9a-f]{{5}}(/|$)")
    found: Listing = {
        "namespaces": set(_entries("/run/netns")),
        "mounts": {line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()},
        "links": {line.split(":")[1].strip() for line in _lines("ip", "-o", "link")},
        "routes": set(_lines("ip", "route", "show", "table", "all")),
        "rules": set(_lines("ip", "rule")) | set(_lines("ip", "-6", "rule")),
        "nft tables": set(_lines("nft", "list", "tables")),
        "cgroups": {
            path.name
            for top in Path("/sys/fs/cgroup").iterdir()
            if top.is_dir()
            for path in (top, *top.iterdir())
            if path.is_dir() and path.name.startswith("hclab-")
        },
        "lab files": {f"/{name}" for name in _entries("/var/lib/headcni-lab")},
        "forwarding": set(_lines("sysctl", "net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding")),
        "processes": _processes(marker.encode(), others),
    }
    return {kind: {one for one in those if not others.search(one)} for kind, those in found.items()}


def differences(before: Listing, after: Listing) -> dict[str, dict[str, set[str]]]:
    """What the two do not share; processes may well have ended meanwhile, but not begun."""
    return {
        kind: {"gone": before[kind] - after[kind], "left behind": after[kind] - before[kind]}
        for kind in before
        if (after[kind] - before[kind] if kind == "processes" else before[kind] != after[kind])
    }


def assert_nothing_left(before: Listing, after: Listing, when: str = "") -> None:
    """With the whole difference in the message, which pytest would cut short."""
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


def _processes(marker: bytes, others: re.Pattern[str]) -> set[str]:
    own = _ancestors_and_self()
    ours = os.readlink("/proc/self/ns/pid")
    found = set()
    for process in os.listdir("/proc"):
        if not process.isdigit() or int(process) in own:
            continue
        home = Path("/proc", process)
        try:
            title = (home / "cmdline").read_bytes().replace(b"\0", b" ").strip()
            if not title:
                continue  # a kernel thread, or a zombie that its parent has yet to bury
            marked = marker in (home / "environ").read_bytes().split(b"\0")
            elsewhere = os.readlink(home / "ns/pid") != ours
            if marked or (elsewhere and not others.search((home / "cgroup").read_text())):
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
