# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Container runtimes, other CNIs and conflists on the node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import node_config, node_up_to_date, other_networks
from .shared import conflist, container_runtimes, podcidr

Look = Callable[[Mapping[str, Any], list[str], list[str]], list[str]]


def conflists(
    config: Mapping[str, Any],
    own: Sequence[podcidr.Network],
    given: Mapping[str, Any],
    look: Look = node_up_to_date.conflist_mistakes,
) -> list[str]:
    """What `look` finds in the conflist and its directory."""
    if not given["conflist"]:
        return []
    ranges = [str(cidr) for cidr in own], node_config.cluster_cidrs(config, own)
    return look(given["conflist"], *ranges)


def runtimes(given: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Problems and notes: whether the node's container runtimes find our plugins and conflist."""
    running = container_runtimes.running()
    if not running:
        return [], [
            "container runtime: none runs on this node, so it is not known where it will look for "
            "plugins: once it runs, site.yml --tags preflight compares that"
        ]
    deciding = container_runtimes.of_kubelet(running)
    network = (given["conflist"] or {}).get("name") or "headcni"
    return container_runtimes.compare(
        running, deciding, given["cni_bin_dirs"], given["cni_conf_dir"], network
    )


def other_cnis(given: Mapping[str, Any]) -> list[str]:
    try:
        return other_networks.rivals(conflist.survey(given["cni_conf_dir"]))
    except OSError:
        return []  # the check of the directory reports it
