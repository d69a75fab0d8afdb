# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Check whether only some nodes of the mesh have its tag."""

from __future__ import annotations

DOCUMENTATION = r"""
name: tag_mix
short_description: Check whether only some nodes have the mesh's tag
version_added: 0.1.0
description:
  - Nodes with the mesh's tag accept pod routes only from peers that have the tag, too. The result
    names the nodes whose routes they would refuse.
  - A node's tags are those that preflight has found, C(tailscale_preflight.joined_tags). A node
    that has not logged in yet gets the tag with its key, unless C(tailscale_auth_key) is given.
author:
  - The HeadCNI authors (@headcni)
extends_documentation_fragment:
  - headcni.mesh.hosts
options:
  tags:
    description: The mesh's tags. A node needs one of them. An empty list accepts any peer.
    type: list
    elements: str
    required: true
"""

EXAMPLES = r"""
- name: Refuse a mesh in which only some nodes have the tag
  ansible.builtin.assert:
    that: ansible_play_hosts_all | headcni.mesh.tag_mix(hostvars, ['tag:headcni']) == ''
"""

RETURN = r"""
_value:
  description: The problem and how to solve it. Empty if there is none.
  type: str
"""

from collections.abc import Mapping, Sequence
from typing import Any

SHOWN = 8


def tag_mix(hosts: Sequence[str], hostvars: Mapping[str, Any], tags: Sequence[str]) -> str:
    tagged: list[str] = []
    untagged: list[str] = []
    for host in hosts:
        known = hostvars.get(host, {})
        found = known.get("tailscale_preflight") or {}
        if "joined_tags" not in found:
            continue
        joined = found["joined_tags"]
        if joined is not None:
            (tagged if set(tags) & set(joined) else untagged).append(host)
        elif not known.get("tailscale_auth_key"):
            tagged.append(host)
    if not tags or not tagged or not untagged:
        return ""
    wanted = " or ".join(tags)
    return (
        f"{_names(untagged)}: joined without {wanted}, unlike {_names(tagged)}: "
        "nodes with the tag refuse the pods' routes of the others. Tag them (headscale nodes tag), "
        "or set headcni_node_peer_tags: [] to accept any peer"
    )


def _names(hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - SHOWN} more" if len(hosts) > SHOWN else ""
    return ", ".join(hosts[:SHOWN]) + more


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"tag_mix": tag_mix}
