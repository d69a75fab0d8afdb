# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""The two modes of a node: where each has its tailscaled, and the link to the other nodes.

The runtime has this file by a link.
"""

from __future__ import annotations

MODES = ("host", "daemon")
SOCKETS = {"host": "/run/tailscale/tailscaled.sock", "daemon": "/run/headcni/tailscaled.sock"}
LINKS = {"host": "tailscale0", "daemon": "headcni01"}


def other(mode: str) -> str:
    return "daemon" if mode == "host" else "host"
