"""loopback: brings up the `lo` of a pod. Runtimes call it in addition to the pod's own network.

For nodes whose distribution lacks it. It answers as the loopback plugin of the CNI project does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ipaddress import ip_interface
from typing import Any, NamedTuple, Optional

from .. import result, skel
from ..datapath import interfaces, netns, rtnl
from ..datapath.netlink import Netlink
from ..errors import CHECK_FAILED, INVALID_CONFIG, NETNS_GONE, CniError
from ..skel import Answer, Call, Outcome

NAME = "lo"
MAC = "00:00:00:00:00:00"

Conf = Mapping[str, Any]


class Lo(NamedTuple):
    """The state of the namespace's lo."""

    up: bool
    addresses: tuple[str, ...]  # with their prefix lengths, as the kernel lists them


def serve(call: Call, _outcome: Outcome) -> Answer:
    conf = skel.decode(call.stdin)
    version = skel.version_of(PLUGIN, conf)
    skel.require_version(PLUGIN, version)
    skel.require_verb(call.command, version)
    return VERBS[call.command](call, conf, version)


# Runtimes may ask for lo in versions that they use for no other plugin.
PLUGIN = skel.Plugin("loopback", skel.ALL_VERSIONS, serve, assumed_version=skel.ALL_VERSIONS[0])


def add(call: Call, conf: Conf, version: str) -> Mapping[str, Any]:
    previous = conf.get("prevResult")
    passed_on = None if previous is None else result.shape(_read(previous, version), version)
    with netns.of_pod(call.netns, call.netns_fd) as fd, netns.entered(fd), Netlink() as kernel:
        kernel.do([rtnl.link_up(NAME)])
        lo = _look(kernel)
    strangers = [one for one in lo.addresses if not ip_interface(one).ip.is_loopback]
    if strangers:
        raise CniError(
            INVALID_CONFIG,
            f"lo of {call.netns} has {', '.join(strangers)}",
            "expected loopback addresses only: another program has set up this namespace",
        )
    return passed_on or _shown(lo, call.netns, version)


def delete(call: Call, _conf: Conf, _version: str) -> None:
    """A deleted namespace has no lo any more. The node's own lo stays up."""
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
    """GC: lo ends with its namespace. STATUS: the plugin needs nothing."""


VERBS: dict[str, Callable[[Call, Conf, str], Answer]] = {
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
    lo = interfaces.links(kernel)[NAME]
    return Lo(lo.up, tuple(interfaces.addresses(kernel).get(lo.number, ())))


def _read(previous: Any, version: str) -> Mapping[str, Any]:
    if not isinstance(previous, Mapping) or version in skel.OLDEST:
        raise CniError(
            INVALID_CONFIG,
            f"prevResult with cniVersion {version}",
            "expected an object, and a version from 0.3.0 on",
        )
    return result.read(previous, version)


def main(stdin: bytes) -> int:
    """In the process that the container runtime started, if no daemon takes the call."""
    return skel.main(PLUGIN, stdin)
