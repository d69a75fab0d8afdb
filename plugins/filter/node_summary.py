# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""A table of the nodes at the end of site.yml, with warnings and notes."""

from __future__ import annotations

DOCUMENTATION = r"""
name: node_summary
short_description: Make a table of the nodes for the end of site.yml
version_added: 0.1.0
description:
  - One line per node, from the results that the roles have registered.
  - Then the warnings of preflight, each once, with the nodes that it concerns.
  - Last, consequences of defaults that may be unexpected.
author:
  - The HeadCNI authors (@headcni)
extends_documentation_fragment:
  - headcni.mesh.hosts
options:
  finished:
    description: The names of the nodes on which nothing has failed.
    type: list
    elements: str
    required: true
"""

EXAMPLES = r"""
- name: Show a summary of all nodes
  ansible.builtin.debug:
    msg: "{{ ansible_play_hosts_all | headcni.mesh.node_summary(hostvars, ansible_play_hosts) }}"
"""

RETURN = r"""
_value:
  description: The lines of the table, and the warnings.
  type: list
  elements: str
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ansible_collections.headcni.mesh.plugins.plugin_utils.table import table

HEAD = ["node", "mode", "pod CIDR", "from", "runtime", "state"]
NAMES_SHOWN = 3  # of the nodes that a warning concerns; the others are only counted
MOST_WARNINGS = 40
RIGHTS = (
    "pods have the node's rights in the tailnet; headcni_node_tailnet_access limits what they reach"
)
ANNOTATION = (
    "the annotation headcni.dev/ip works in no namespace until "
    "headcni_node_ip_annotation_namespaces names it"
)


def summary(
    hosts: Sequence[str], hostvars: Mapping[str, Any], finished: Sequence[str]
) -> list[str]:
    known = {host: hostvars.get(host, {}) for host in hosts}
    done = set(finished)
    rows = [_row(host, known[host], host in done) for host in hosts]
    return [*table([HEAD, *rows]), *_warnings(known), *_good_to_know(known, done)]


def _warnings(known: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The notes of preflight: one line per warning, for any number of nodes."""
    about: dict[str, list[str]] = {}
    everywhere: list[str] = []
    clashes: Mapping[str, Any] = {}  # the same mapping in the variables of each node
    for host, variables in known.items():
        clashes = clashes or variables.get("headcni_route_clashes") or {}
        for note in (*_notes(variables.get("headcni_node_preflight")), *_notes(clashes.get(host))):
            about.setdefault(str(note), []).append(host)
        everywhere = everywhere or list(map(str, variables.get("headscale_routes_notes") or ()))
    lines = [f"- {_nodes(hosts, len(known))}: {note}" for note, hosts in about.items()]
    lines = [*(f"- Headscale: {note}" for note in everywhere), *lines]
    if len(lines) > MOST_WARNINGS:
        left = len(lines) - MOST_WARNINGS
        lines[MOST_WARNINGS:] = [f"- {left} more: see headcni_node_preflight.notes of each node"]
    return ["Warnings:", *lines] if lines else []


def _good_to_know(known: Mapping[str, Mapping[str, Any]], done: Collection[str]) -> list[str]:
    """For the nodes whose daemon this run has started or checked."""
    ours = [host for host in known if host in done and known[host].get("_headcni_node_service")]
    about = {
        RIGHTS: [host for host in ours if _tailnet_access(known[host]) == "all"],
        ANNOTATION: [
            host for host in ours if not known[host].get("headcni_node_ip_annotation_namespaces")
        ],
    }
    lines = [f"- {_nodes(hosts, len(known))}: {note}" for note, hosts in about.items() if hosts]
    return ["Good to know:", *lines] if lines else []


def _tailnet_access(variables: Mapping[str, Any]) -> Any:
    network = (variables.get("headcni_node_extra_config") or {}).get("network") or {}
    given = variables.get("headcni_node_tailnet_access", "all")
    return network.get("tailnetAccess") or given


def _notes(found: Mapping[str, Any] | None) -> Sequence[str]:
    return (found or {}).get("notes") or ()


def _nodes(hosts: Sequence[str], all_of_them: int) -> str:
    if len(hosts) == all_of_them > 1:
        return f"all {all_of_them} nodes"
    more = len(hosts) - NAMES_SHOWN
    if more <= 1:  # the name is as short as the number
        return ", ".join(hosts)
    return f"{', '.join(hosts[:NAMES_SHOWN])} and {more} more"


def _row(host: str, known: Mapping[str, Any], finished: bool) -> list[str]:
    found = known.get("headcni_node_preflight") or {}
    configured = known.get("headcni_node_configured") or found
    release = known.get("_headcni_node_release") or {}
    current = release.get("current") or found.get("current") or {}
    source = configured.get("pod_cidr_source", "")
    return [
        host,
        str(configured.get("mode", "")),
        ", ".join(configured.get("pod_cidrs") or ()),
        f"{source} (a guess)" if configured.get("pod_cidr_guessed") else source,
        str(current.get("version", "")),
        _state(known) if finished else "NOT FINISHED: see above",
    ]


def _state(known: Mapping[str, Any]) -> str:
    service = known.get("_headcni_node_service") or {}
    if not service:
        return "as asked for by tags"
    if service.get("conditions"):
        return "ready"
    return "would be started" if known.get("ansible_check_mode") else "running"


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"node_summary": summary}
