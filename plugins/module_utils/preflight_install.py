# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Whether the runtime can be installed, and which of its parts are already up to date."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import (
    node,
    node_config,
    node_places,
    node_release,
    node_up_to_date,
    package_owner,
)
from .shared import container_runtimes, podcidr


def places(given: Mapping[str, Any]) -> list[str]:
    """Space for the release, writable directories, and no other program's files in the way."""
    bin_dirs = given["cni_bin_dirs"]
    wanted = {
        node_release.ROOT: given["min_free_mib"],
        "/etc/headcni": 1,
        "/var/lib/headcni": 8,
        node_release.UNIT_DIR: 1,
        given["cni_conf_dir"]: 1,
        given["bin_dir"]: 1,
        **dict.fromkeys(bin_dirs, 1),
    }
    variables = {
        **dict.fromkeys(bin_dirs, "headcni_node_cni_bin_dirs"),
        given["cni_conf_dir"]: "headcni_node_cni_conf_dir",
        given["bin_dir"]: "headcni_node_bin_dir",
    }
    return [
        *node_places.problems(wanted, variables),
        *node_places.noexec(node_release.ROOT),
        *node_places.in_the_way(
            [*bin_dirs, given["bin_dir"]],
            lambda path: package_owner.package_owner(node.run_bounded, path),
        ),
        *node_places.tailscale(bool(container_runtimes.processes(["tailscaled"]))),
    ]


def release(given: Mapping[str, Any]) -> list[str]:
    """A release that neither the controller nor the node has, or too few releases to keep."""
    wrong = []
    if given["keep"] < node_release.FEWEST:
        wrong.append(
            f"release: keep: {given['keep']}, expected {node_release.FEWEST} or more, "
            "so that one can go back: see headcni_node_release_keep"
        )
    version, there = given["version"] or "", node_release.installed()
    if version and not given["checksum"] and not node_release.find(there, version, ""):
        known = ", ".join(release.name for release in there) or "none"
        wrong.append(
            f"release: version: {version} is not on this node, which has: {known}; "
            "give its tarball by headcni_node_release_src"
        )
    return wrong


def mode(config: Mapping[str, Any]) -> list[str]:
    """Another mode, while pods run, needs more than another configuration."""
    wanted = mode_of(config)
    have = node_config.mode_of(node_config.PATH)
    if have in ("", wanted):
        return []
    return [
        f"mode: this node is in {have} mode, and {wanted} is asked for: switch it with "
        f"playbooks/switch_mode.yml -e headcni_mode={wanted}, which keeps its pods connected"
    ]


def up_to_date(
    config: Mapping[str, Any],
    found: podcidr.Resolution,
    given: Mapping[str, Any],
    interpreter: node_release.Python,
) -> list[str]:
    """The parts of the node that are already as wanted."""
    parts = []
    wanted = node_release.Wanted(
        bin_dirs=given["cni_bin_dirs"],
        command_dir=given["bin_dir"],
        plugin_dirs=given["plugin_dirs"],
        keep=given["keep"],
        native_shim=given["native_shim"],
    )
    version, checksum = given["version"] or "", given["checksum"] or ""
    if version and node_up_to_date.has_release(version, checksum, wanted, interpreter):
        parts.append("release")
    if node_up_to_date.has_config(config, found):
        parts.append("config")
    ranges = [str(cidr) for cidr in found.cidrs], node_config.cluster_cidrs(config, found.cidrs)
    if given["conflist"] and node_up_to_date.has_conflist(given["conflist"], *ranges):
        parts.append("conflist")
    return parts


def mode_of(config: Mapping[str, Any]) -> str:
    return str(node_config.section(config, "tailscale").get("mode", "host"))
