"""loopback: brings up a pod's `lo`, as containerd and others ask for beside the pod's own network.

For nodes whose distribution has no such plugin; it answers as that of the CNI project does.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable, Mapping
from ipaddress import ip_address, ip_interface
from typing import Any, NamedTuple, Optional

from . import result
from .call import Call
from .datapath import netns, rtnl
from .datapath.netlink import Netlink, Request, attributes
from .errors import (
    BAD_ENVIRONMENT,
    CHECK_FAILED,
    INCOMPATIBLE_VERSION,
    INTERNAL,
    INVALID_CONFIG,
    NETNS_GONE,
    UNDECODABLE,
    CniError,
)

NAME = "lo"
INDEX = 1  # of lo, in every network namespace
MAC = "00:00:00:00:00:00"
# Runtimes ask for lo by versions that nothing else is asked for in.
OLDEST = result.OLDEST
VERSIONS = (*OLDEST, "0.3.0", *result.VERSIONS)
SINCE = {"CHECK": "0.4.0", "GC": "1.1.0", "STATUS": "1.1.0"}
RTM_GETLINK, RTM_GETADDR = 18, 22
_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=BBBBi")

Conf = Mapping[str, Any]


class Lo(NamedTuple):
    """How the namespace's lo stands."""

    up: bool
    addresses: tuple[str, ...]  # with their prefix lengths, as the kernel lists them


def run(env: Mapping[str, str], stdin: bytes, netns_fd: Optional[int] = None) -> tuple[int, bytes]:
    """One call: the error's code or 0, and what belongs on stdout."""
    version = VERSIONS[-1]
    try:
        call = Call.of(env, netns_fd)
        conf = _decode(stdin)
        version = str(conf.get("cniVersion") or OLDEST[0])
        if call.command == "VERSION":
            supported = {"cniVersion": version, "supportedVersions": list(VERSIONS)}
            return 0, _encode(supported)
        _require(call.command, version)
        answer = VERBS[call.command](call, conf, version)
    except CniError as problem:
        shown = version if version in VERSIONS else VERSIONS[-1]
        return problem.code, _encode(problem.as_dict(shown))
    except Exception as problem:  # a traceback on stdout would be no answer
        bug = CniError(INTERNAL, "a bug in loopback", f"{type(problem).__name__}: {problem}")
        return bug.code, _encode(bug.as_dict(version))
    return 0, b"" if answer is None else _encode(answer)


def add(call: Call, conf: Conf, version: str) -> Mapping[str, Any]:
    previous = conf.get("prevResult")
    passed_on = None if previous is None else result.shape(_read(previous, version), version)
    with netns.opened(call.netns, call.netns_fd) as fd:
        if netns.is_our_own(fd):
            raise CniError(
                BAD_ENVIRONMENT,
                f"CNI_NETNS={call.netns} is the node's own network namespace",
                "a pod on the host's network needs no CNI",
            )
        with netns.entered(fd), Netlink() as kernel:
            kernel.do([rtnl.link_up(NAME)])
            lo = _look(kernel)
    strangers = [one for one in lo.addresses if not ip_interface(one).ip.is_loopback]
    if strangers:
        raise CniError(
            INVALID_CONFIG,
            f"lo of {call.netns} has {', '.join(strangers)}",
            "expected loopback addresses only: somebody else has set this namespace up",
        )
    return passed_on or _shown(lo, call.netns, version)


def delete(call: Call, _conf: Conf, _version: str) -> None:
    """A namespace that is gone took its lo along; the node's own keeps it."""
    if not call.netns:
        return
    try:
        with netns.opened(call.netns, call.netns_fd) as fd:
            if not netns.is_our_own(fd):
                with netns.entered(fd), Netlink() as kernel:
                    kernel.do([rtnl.link_down(NAME)])
    except CniError as problem:
        if problem.code != NETNS_GONE:
            raise


def check(call: Call, conf: Conf, version: str) -> None:
    previous = conf.get("prevResult")
    if previous is None:
        raise CniError(INVALID_CONFIG, "prevResult is missing", "CHECK compares with it")
    expected = _read(previous, version)
    with netns.opened(call.netns, call.netns_fd) as fd, netns.entered(fd), Netlink() as kernel:
        lo = _look(kernel)
    if not lo.up:
        raise CniError(CHECK_FAILED, f"lo of {call.netns} is down", "ADD had brought it up")
    names = [one["name"] for one in expected.get("interfaces", ())]
    missing = [
        ip["address"]
        for ip in expected.get("ips", ())
        if _on_lo(names, ip.get("interface")) and ip["address"] not in lo.addresses
    ]
    if missing:
        raise CniError(
            CHECK_FAILED, f"lo of {call.netns} lacks {', '.join(missing)}", "prevResult has it"
        )


def nothing(_call: Call, _conf: Conf, _version: str) -> None:
    """GC: lo goes with its namespace. STATUS: there is nothing that might not be ready."""


VERBS: dict[str, Callable[[Call, Conf, str], Optional[Mapping[str, Any]]]] = {
    "ADD": add,
    "DEL": delete,
    "CHECK": check,
    "GC": nothing,
    "STATUS": nothing,
}


def _on_lo(names: list[str], number: Optional[int]) -> bool:
    return number is not None and 0 <= number < len(names) and names[number] == NAME


def _shown(lo: Lo, sandbox: str, version: str) -> dict[str, Any]:
    """One address of each family, the kernel's first."""
    four = [one for one in lo.addresses if ":" not in one][:1]
    six = [one for one in lo.addresses if ":" in one][:1]
    made = {
        "interfaces": [{"name": NAME, "mac": MAC, "sandbox": sandbox}],
        "ips": [{"interface": 0, "address": one} for one in (*four, *six)],
    }
    return result.shape(made, version)


def _look(kernel: Netlink) -> Lo:
    question = Request(RTM_GETLINK, 0, _LINK.pack(0, 0, INDEX, 0, 0), "look at lo")
    _unused, _unused, _unused, flags, _unused = _LINK.unpack_from(
        kernel.ask(question) or bytes(_LINK.size)
    )
    found = []
    question = Request(RTM_GETADDR, 0, _ADDRESS.pack(0, 0, 0, 0, 0), "list the addresses")
    for body in kernel.dump(question):
        family, prefix, _unused, _unused, index = _ADDRESS.unpack_from(body)
        packed = dict(attributes(body[_ADDRESS.size :])).get(rtnl.IFA_ADDRESS)
        if index == INDEX and family in (socket.AF_INET, socket.AF_INET6) and packed:
            found.append(f"{ip_address(packed)}/{prefix}")
    return Lo(bool(flags & rtnl.IFF_UP), tuple(found))


def _decode(stdin: bytes) -> Conf:
    try:
        conf = json.loads(stdin)
    except (ValueError, RecursionError) as problem:
        raise CniError(UNDECODABLE, "the configuration is not JSON", str(problem)) from None
    if not isinstance(conf, dict):
        raise CniError(UNDECODABLE, "the configuration is not a JSON object")
    return conf


def _read(previous: Any, version: str) -> Mapping[str, Any]:
    if not isinstance(previous, Mapping) or version in OLDEST:
        raise CniError(
            INVALID_CONFIG,
            f"prevResult with cniVersion {version}",
            "expected an object, and a version from 0.3.0 on",
        )
    return result.read(previous, version)


def _require(verb: str, version: str) -> None:
    if version not in VERSIONS:
        raise CniError(
            INCOMPATIBLE_VERSION,
            f"cniVersion is {version}",
            f"loopback speaks {', '.join(VERSIONS)}",
        )
    since = SINCE.get(verb)
    if since and VERSIONS.index(version) < VERSIONS.index(since):
        raise CniError(
            INCOMPATIBLE_VERSION,
            f"cniVersion {version} has no {verb}",
            f"set it to {since} or later",
        )


def _encode(answer: Mapping[str, Any]) -> bytes:
    return json.dumps(answer, separators=(",", ":")).encode() + b"\n"


def main(stdin: bytes) -> int:
    """The process that the runtime started, when there is no daemon to ask. Its exit code."""
    import sys

    code, answer = run(os.environ, stdin)
    sys.stdout.buffer.write(answer)
    sys.stdout.flush()
    return 1 if code else 0
