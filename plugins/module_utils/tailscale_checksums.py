# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""The SHA-256 of Tailscale's tarballs, by version and architecture.

What is listed here need not be taken on trust from the server that has the tarball. A maintainer
fills it for a version by `make checksums TAILSCALE=1.102.5` on a machine that reaches the official
site, and compares the sums with those from a second network before the commit. A version that is
not listed is compared with the .sha256 file beside the tarball.
"""

from __future__ import annotations

KNOWN: dict[str, dict[str, str]] = {}
