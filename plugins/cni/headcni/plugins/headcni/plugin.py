"""One call of the headcni plugin: reads the configuration, opens the store, and runs the verb."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ... import config, skel
from ...address_sources import source_of
from ...errors import STORE, CniError
from ...model import NetworkConfig
from ...record import TYPE_CHECKING
from ...skel import Answer, Call, Outcome, timed
from .node import Node, Opener, opened, opened_until_exit

if TYPE_CHECKING:
    from _socket import socket
    from typing import Callable, Optional


def plugin(open_node: Opener = opened) -> skel.Plugin:
    return skel.Plugin("headcni", skel.VERSIONS, partial(serve, open_node=open_node))


def run(
    env: Mapping[str, str],
    stdin: bytes,
    netns_fd: Optional[int] = None,
    open_node: Opener = opened,
) -> Outcome:
    return skel.run(plugin(open_node), env, stdin, netns_fd)


def main(stdin: bytes, daemon: Optional[socket] = None) -> int:
    """In the process that the container runtime started, if no daemon takes the call."""
    return skel.main(plugin(opened_until_exit), stdin, daemon)


def serve(call: Call, outcome: Outcome, open_node: Opener) -> Answer:
    with timed(outcome.phases, "config"):
        forgiving = call.command == "DEL"
        network = outcome.network = config.parse(call.stdin, call.env, forgiving)
        skel.require_verb(call.command, network.cni_version)
    if network.delegates or source_of(network).runs_plugin:
        from ...exec import ensure_plugins_allowed

        ensure_plugins_allowed()  # before the first change
    try:
        with open_node(network.data_dir) as node:
            node.phases = outcome.phases
            if node.store.is_unverified():
                _recover(node, network, call)
            answer = _verb(call.command)(node, network, call)
            attachment = node.attachment
        outcome.attachment = attachment
    except CniError as problem:
        if call.command != "DEL" or problem.code != STORE:
            raise
        from .delete import delete_unrecorded

        outcome.attachment = delete_unrecorded(network, call, problem)
        outcome.unrecorded = str(problem)
        return None
    return answer


def _verb(command: str) -> Callable[[Node, NetworkConfig, Call], Answer]:
    """The function of a verb. A process that serves one call imports one verb."""
    if command == "ADD":
        from .add import add

        return add
    if command == "DEL":
        from .delete import delete

        return delete
    if command == "CHECK":
        from .check import check

        return check
    if command == "GC":
        from .gc import gc

        return gc
    from .status import status

    return status


def _recover(node: Node, network: NetworkConfig, call: Call) -> None:
    """The store is new, or was lost. ADD and GC must fail if they do not know which addresses are
    in use. The other verbs do not need that."""
    from ...recover import recover

    try:
        with node.phase("recover"):
            recover(node.store, network)
    except CniError:
        if call.command in ("ADD", "GC"):
            raise
