# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a service account's token says about itself: its account, and when it begins and expires.

The signature is not checked: only the API server can do that.
"""

from __future__ import annotations

import binascii
import json
import re
import time
from typing import Any, NamedTuple, Optional

FILE = "/var/lib/headcni/kubernetes-token"  # the daemon renews only the token in this file
SHORTEST, LONGEST = 600, 31_536_000  # seconds; Kubernetes grants no less than ten minutes
LARGEST = 65_536
_LAST_STAMP = 32_503_680_000.0  # the year 3000
_SUBJECT = re.compile(r"system:serviceaccount:([a-z0-9-]{1,63}):([a-z0-9.-]{1,253})\Z")


class BearerToken(NamedTuple):
    """Times are seconds since 1970. `expires` is 0 for a token that never expires."""

    namespace: str
    account: str
    issued: float = 0.0
    expires: float = 0.0

    @property
    def lifetime(self) -> float:
        return max(0.0, self.expires - self.issued)

    @property
    def renew_at(self) -> float:
        """Early, so that a node may be off for two thirds of the lifetime at any time."""
        return self.issued + self.lifetime / 3

    @property
    def late_at(self) -> float:
        """From now on somebody should look: the daemon has tried for a third of the lifetime."""
        return self.expires - self.lifetime / 3

    def has_expired(self, now: float) -> bool:
        return 0 < self.expires <= now


def read(text: str) -> Optional[BearerToken]:
    """None if it is not a token of a service account."""
    parts = text.split(".") if len(text) <= LARGEST else []
    if len(parts) != 3:
        return None
    try:
        padded = parts[1].translate({45: 43, 95: 47}) + "=" * (-len(parts[1]) % 4)
        claims = json.loads(binascii.a2b_base64(padded))
    except (ValueError, RecursionError):
        return None
    if not isinstance(claims, dict):
        return None
    subject = _SUBJECT.match(str(claims.get("sub", ""))[:400])
    if subject is None:
        return None
    return BearerToken(subject[1], subject[2], _stamp(claims, "iat"), _stamp(claims, "exp"))


def _stamp(claims: dict[str, Any], name: str) -> float:
    value = claims.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0.0
    return float(value) if 0 <= value <= _LAST_STAMP else 0.0


def date(stamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(stamp))
