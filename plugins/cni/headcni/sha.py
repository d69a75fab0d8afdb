"""sha256 without OpenSSL, whose library takes milliseconds to load, where Python has its own."""

from __future__ import annotations

from .record import TYPE_CHECKING

__all__ = ["sha256"]

if TYPE_CHECKING:
    from hashlib import sha256
else:
    # Python 3.12 and newer, Python before that, and Red Hat's, which has only OpenSSL's.
    for _module in ("_sha2", "_sha256", "hashlib"):
        try:
            sha256 = __import__(_module).sha256
            break
        except ImportError:
            continue
