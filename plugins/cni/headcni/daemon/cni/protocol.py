"""The messages on the server's socket, taken apart. headcni/shim.py sends and explains them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional

from ...errors import CniError
from ...shim import HEADER, IPAM, LIMIT, LOOPBACK, MAGIC, PROGRAM


class Malformed(Exception):
    """The message is not a valid request."""


@dataclass(frozen=True)
class Request:
    release: str
    netns: str  # the caller's own network namespace
    env: Mapping[str, str]
    stdin: bytes

    @property
    def program(self) -> str:
        """The program that was started: headcni, headcni-ipam or loopback."""
        return self.env.get(PROGRAM.decode(), "")

    @property
    def is_ipam(self) -> bool:
        return self.program == IPAM.decode()

    @property
    def is_loopback(self) -> bool:
        return self.program == LOOPBACK.decode()


def whole(received: bytearray) -> Optional[int]:
    """The length of the message that is arriving; None while it is unknown."""
    if received[: len(MAGIC)] != MAGIC[: len(received)]:
        raise Malformed(f"it begins with {bytes(received[: len(MAGIC)])!r}")
    if len(received) < HEADER:
        return None
    length = HEADER + int.from_bytes(received[len(MAGIC) : HEADER], "big")
    if length > LIMIT:
        raise Malformed(f"it is {length} bytes long, and {LIMIT} are the limit")
    if len(received) > length:
        raise Malformed(f"it goes on after its {length} bytes")
    return length


def parse(message: bytes) -> Request:
    head, end, stdin = message[HEADER:].partition(b"\0\0")
    release, *variables = head.split(b"\0")
    if not end or not variables:
        raise Malformed("its environment has no end")
    env = {}
    for variable in variables[1:]:
        name, equals, value = variable.partition(b"=")
        if not name or not equals:
            raise Malformed(f"{variable[:40]!r} is no variable")
        env[os.fsdecode(name)] = os.fsdecode(value)
    return Request(os.fsdecode(release), os.fsdecode(variables[0]), env, stdin)


def answer(exit_code: int, output: bytes) -> bytes:
    body = bytes([exit_code]) + output
    return MAGIC + len(body).to_bytes(4, "big") + body


@dataclass(frozen=True)
class Report:
    """The outcome of a call that was handed back to its shim."""

    error: Optional[CniError]
    phases: dict[str, float]


def report(received: bytearray) -> Optional[Report]:
    """None if the shim ended before it had reported."""
    try:
        if whole(received) != len(received):
            return None
        said = json.loads(received[HEADER:])
        phases = {str(name): float(seconds) for name, seconds in said["phases"].items()}
        error = None
        if said["code"]:
            told = json.loads(said["output"])
            error = CniError(int(said["code"]), str(told["msg"]), str(told.get("details", "")))
        return Report(error, phases)
    except (Malformed, ValueError, KeyError, TypeError, AttributeError):
        return None
