# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Public OpenPGP keys: their fingerprints, and a keyring with only those that are expected.

A package manager trusts every key of its keyring, so a keyring that somebody else has served is cut
down to the keys with known fingerprints.

Only the standard library is used, because this runs on nodes, which may have no gpg.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

_PUBLIC_KEY, _PUBLIC_SUBKEY = 6, 14
_SECRET_KEY, _SECRET_SUBKEY = 5, 7
_FINGERPRINT = re.compile(r"[0-9A-F]{40}")
_ARMOR = re.compile(
    rb"-----BEGIN PGP PUBLIC KEY BLOCK-----(.*?)-----END PGP PUBLIC KEY BLOCK-----", re.DOTALL
)


class KeyringError(ValueError):
    """This is no keyring, or it lacks the key; the message says so."""


class Packet(NamedTuple):
    tag: int
    body: bytes
    whole: bytes  # with its header


def normal(fingerprint: str) -> str:
    """A fingerprint without spaces, in capitals; empty if it is none."""
    found = re.sub(r"[\s:]", "", fingerprint).upper()
    return found if _FINGERPRINT.fullmatch(found) else ""


def packets(data: bytes) -> Iterator[Packet]:
    position = 0
    while position < len(data):
        start = position
        header = data[position]
        if not header & 0x80:
            raise KeyringError("this is no OpenPGP keyring")
        try:
            tag, length, position = _length(data, header, position + 1)
        except IndexError:
            raise KeyringError("the keyring ends in the middle of a key") from None
        body = data[position : position + length]
        if len(body) != length:
            raise KeyringError("the keyring ends in the middle of a key")
        position += length
        yield Packet(tag, body, data[start:position])


def _length(data: bytes, header: int, at: int) -> tuple[int, int, int]:
    """The packet's tag, its length, and where its body begins."""
    if not header & 0x40:
        size = {0: 1, 1: 2, 2: 4}.get(header & 3)
        if size is None:
            raise KeyringError("the keyring has a packet without a length")
        return header >> 2 & 0xF, _number(data, at, size), at + size
    first = data[at]
    if first < 192:
        return header & 0x3F, first, at + 1
    if first < 224:
        return header & 0x3F, (first - 192 << 8) + data[at + 1] + 192, at + 2
    if first == 255:
        return header & 0x3F, _number(data, at + 1, 4), at + 5
    raise KeyringError("the keyring has a packet in parts")


def _number(data: bytes, at: int, size: int) -> int:
    if at + size > len(data):
        raise IndexError
    return int.from_bytes(data[at : at + size], "big")


def fingerprint(body: bytes) -> str:
    """Of a key of version 4; empty for other versions."""
    if body[:1] != b"\x04":
        return ""
    data = b"\x99" + len(body).to_bytes(2, "big") + body
    return hashlib.sha1(data, usedforsecurity=False).hexdigest().upper()


def only(keyring: bytes, expected: Collection[str]) -> bytes:
    """The keyring, binary, without keys and subkeys that are not expected."""
    kept = b""
    seen = []
    primary = keeping = False
    for packet in packets(binary(keyring)):
        if packet.tag in (_SECRET_KEY, _SECRET_SUBKEY):
            primary = keeping = False
        elif packet.tag == _PUBLIC_KEY:
            seen.append(fingerprint(packet.body))
            primary = keeping = seen[-1] in expected
        elif packet.tag == _PUBLIC_SUBKEY:
            keeping = primary and fingerprint(packet.body) in expected
        if keeping:
            kept += packet.whole
    if not kept:
        raise KeyringError(
            f"its keys are {', '.join(seen) or 'none'}, expected {' or '.join(sorted(expected))}"
        )
    return kept


def binary(keyring: bytes) -> bytes:
    """Without its armor, if it has any."""
    found = _ARMOR.search(keyring)
    if not found:
        return keyring
    body = re.split(rb"\r?\n[ \t]*\r?\n", found[1], maxsplit=1)[-1]
    lines = [line.strip() for line in body.splitlines()]
    try:
        return base64.b64decode(b"".join(line for line in lines if line[:1] != b"="), validate=True)
    except binascii.Error:
        raise KeyringError("the keyring's armor is damaged") from None


def armored(keyring: bytes) -> bytes:
    """As rpm reads it."""
    text = base64.b64encode(keyring).decode("ascii")
    lines = [text[at : at + 64] for at in range(0, len(text), 64)]
    crc = base64.b64encode(_crc24(keyring).to_bytes(3, "big")).decode("ascii")
    parts = ("-----BEGIN PGP PUBLIC KEY BLOCK-----", "", *lines, f"={crc}")
    return "\n".join((*parts, "-----END PGP PUBLIC KEY BLOCK-----", "")).encode("ascii")


def _crc24(data: bytes) -> int:
    crc = 0xB704CE
    for byte in data:
        crc ^= byte << 16
        for _unused in range(8):
            crc = crc << 1 ^ (0x1864CFB if crc & 0x800000 else 0)
    return crc & 0xFFFFFF
