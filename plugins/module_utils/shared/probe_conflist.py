# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the conflist in use tells a probe about its network."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from . import conflist, modes, probe_pod


def in_use(directory: str) -> dict[str, Any]:
    """The conflist that the container runtime uses."""
    picked = conflist.survey(directory).picked()
    if not picked:
        raise probe_pod.ProbeError(f"there is no conflist in {directory}: run site.yml first")
    path = os.path.join(directory, picked)
    with open(path, encoding="utf-8") as stream:
        conf: dict[str, Any] = json.load(stream)
    return conf if "plugins" in conf else {**conf, "plugins": [conf]}


def ours(conf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section of our own plugin."""
    return next((plugin for plugin in conf["plugins"] if plugin["type"] == "headcni"), {})


def socket_of(conf: Mapping[str, Any], of_the_node: str) -> str:
    """The socket of the mesh's tailscaled; `of_the_node` is that of the node's own."""
    configured = ours(conf).get("tailscale_socket")
    if ours(conf).get("mode", "host") == "daemon":
        return modes.socket_of("daemon", configured or "")
    return str(configured or of_the_node)


def pod_cidrs(conf: Mapping[str, Any]) -> list[str]:
    """From the conflist: the ranges from which pods get their addresses."""
    return listed(ours(conf).get("pod_cidr"))


def listed(given: Any) -> list[str]:
    """From a list, or from a text with commas."""
    given = given or []
    return [text.strip() for text in given.split(",")] if isinstance(given, str) else list(given)


def mtu_of(conf: Mapping[str, Any]) -> int:
    return next((plugin["mtu"] for plugin in conf["plugins"] if plugin.get("mtu")), 1280)
