# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""The controller's address, as seen from a node that it has logged in to."""

from __future__ import annotations

import os
from contextlib import suppress
from ipaddress import ip_address, ip_network

MOST_ANCESTORS = 16
MOST_BYTES = 1 << 17  # of one process's environment
TAILNETS = (ip_network("100.64.0.0/10"), ip_network("fd7a:115c:a1e0::/48"))


def controller_address(pid: int | None = None, proc: str = "/proc") -> str:
    """The address from which the SSH connection comes. Empty if this process does not descend from
    an SSH session, or if the connection comes through the tailnet.

    sudo removes SSH_CONNECTION from the environment, but its parent processes still have it.
    """
    pid = os.getpid() if pid is None else pid
    for _unused in range(MOST_ANCESTORS):
        words = _connection(pid, proc).split()
        if len(words) == 4:
            return _outside_tailnet(words[0], words[2])
        pid = _parent(pid, proc)
        if pid <= 1:
            break
    return ""


def _connection(pid: int, proc: str) -> str:
    with suppress(OSError), open(f"{proc}/{pid}/environ", "rb") as stream:
        for entry in stream.read(MOST_BYTES).split(b"\0"):
            if entry.startswith(b"SSH_CONNECTION="):
                return entry.partition(b"=")[2].decode("ascii", "replace")
    return ""


def _parent(pid: int, proc: str) -> int:
    with suppress(OSError, ValueError, IndexError), open(f"{proc}/{pid}/stat", "rb") as stream:
        # The process name, in parentheses, may contain any character.
        return int(stream.read(4096).rpartition(b")")[2].split()[1])
    return 0


def _outside_tailnet(client: str, server: str) -> str:
    try:
        ends = [ip_address(one.partition("%")[0]) for one in (client, server)]
    except ValueError:
        return ""
    ends = [getattr(one, "ipv4_mapped", None) or one for one in ends]
    if ends[0].is_link_local or ends[0].is_loopback:
        return ""
    through_tailnet = any(ends[1] in one for one in TAILNETS)
    return "" if through_tailnet else str(ends[0])
