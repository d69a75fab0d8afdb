# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""The two modes of a node: the socket of the tailscaled in use, and the link to other nodes."""

from __future__ import annotations

MODES = ("host", "daemon")
SOCKETS = {"host": "/run/tailscale/tailscaled.sock", "daemon": "/run/headcni/tailscaled.sock"}
LINKS = {"host": "tailscale0", "daemon": "headcni01"}


def other(mode: str) -> str:
    return "daemon" if mode == "host" else "host"


def socket_of(mode: str, configured: str = "") -> str:
    """The socket of the tailscaled that a mode uses, unless another is configured."""
    return configured or SOCKETS[mode]
