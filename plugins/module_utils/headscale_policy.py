# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""What must be in Headscale's policy: approvals of routes, and the rule that pods need.

Only what is asked for is added or taken away; the rest of the policy is somebody else's. Headscale
does not mind the case of a policy's keys, so neither does this.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any, Optional

from ansible_collections.headcni.mesh.plugins.module_utils.headscale import (
    OPTION,
    REFUSED,
    HeadscaleError,
    check_tags,
)
from ansible_collections.headcni.mesh.plugins.module_utils.headscale_access import (
    Mesh,
    Network,
    Verdict,
    rule_for,
)
from ansible_collections.headcni.mesh.plugins.module_utils.hujson import Document, HujsonError

# What a server without a policy does, for those that take a policy without rules for "nothing".
ALLOW_ALL = [{"action": "accept", "src": ["*"], "dst": ["*:*"]}]

Lists = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Merged:
    text: str
    changed: bool
    comments_lost: bool = False


def parse(routes: Mapping[str, Any], tag_owners: Mapping[str, Any]) -> tuple[Lists, Lists]:
    """The module's options, with each mistake named."""
    mistakes = []
    parsed: dict[str, list[str]] = {}
    for cidr, approvers in routes.items():
        try:
            network = str(ip_network(cidr))
        except ValueError as wrong:
            mistakes.append(f"routes: {cidr!r}, expected a CIDR such as 10.244.0.0/16 ({wrong})")
            continue
        parsed[network] = _names(approvers, f"routes[{cidr}]", mistakes)
        if not parsed[network]:
            mistakes.append(f"routes[{cidr}]: empty, expected approvers such as tag:k8s")
    owners = {
        tag: _names(names, f"tag_owners[{tag}]", mistakes) for tag, names in tag_owners.items()
    }
    for option, those in (
        ("routes", [name for names in parsed.values() for name in names]),
        ("tag_owners", [*owners, *(name for names in owners.values() for name in names)]),
    ):
        try:
            check_tags(option, [one for one in those if one.startswith("tag:") or one in owners])
        except HeadscaleError as problem:
            mistakes.append(str(problem))
    if mistakes:
        raise HeadscaleError(OPTION, "; ".join(mistakes))
    return parsed, owners


def _names(given: Any, place: str, mistakes: list[str]) -> list[str]:
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, (list, tuple)) or not all(isinstance(n, str) and n for n in given):
        mistakes.append(f"{place}: {given!r}, expected a list of names")
        return []
    return list(dict.fromkeys(given))


def merge(
    text: str,
    routes: Lists,
    tag_owners: Lists,
    *,
    allow_all: bool = False,
    pods: Optional[Verdict] = None,
) -> Merged:
    """The policy with these in it. `allow_all`: a policy that is made anew keeps all traffic
    allowed, as it was without one. `pods`: what the policy as it is does for them."""
    edit = _Edit(text)
    if allow_all and not edit.data:
        edit.put(("acls",), ALLOW_ALL)
    if pods is not None and pods.missing:
        edit.append(pods.form, dict(pods.rule))
        for tag in pods.tag_owners:
            edit.extend(("tagOwners",), tag, ())
    for cidr, approvers in routes.items():
        edit.extend(("autoApprovers", "routes"), cidr, approvers, _same_network)
    needed = {name for names in routes.values() for name in names if name.startswith("tag:")}
    needed |= {n for names in tag_owners.values() for n in names if n.startswith("tag:")}
    for tag, owners in tag_owners.items():
        edit.extend(("tagOwners",), tag, owners)
    for tag in sorted(needed - set(tag_owners)):
        edit.extend(("tagOwners",), tag, ())
    return edit.result()


def withdraw(text: str, routes: Lists, tag_owners: Lists, pods: Optional[Mesh] = None) -> Merged:
    """The policy without these. An entry goes when nothing of it is left, and a tag only if no
    other part of the policy has it."""
    edit = _Edit(text)
    if pods is not None:
        for form in ("acls", "grants"):
            edit.remove(form, rule_for(pods, form))
    for cidr, approvers in routes.items():
        edit.reduce(("autoApprovers", "routes"), cidr, approvers, _same_network)
    for tag, owners in tag_owners.items():
        edit.reduce(("tagOwners",), tag, owners, keep=edit.mentions(tag))
    return edit.result()


def mesh_spec() -> dict[str, Any]:
    """The options of modules that judge a policy for pods."""
    return {
        "pod_ranges": {"type": "list", "elements": "str", "default": []},
        "node_pod_ranges": {"type": "list", "elements": "str", "default": []},
        "nodes": {"type": "list", "elements": "str", "default": ["tag:headcni"]},
    }


def parse_mesh(given: Mapping[str, Any]) -> Mesh:
    """These options, with each mistake named."""
    mistakes: list[str] = []
    nodes = given["nodes"]
    tags = [name for name in nodes if name.startswith("tag:")]
    users = [name for name in nodes if not name.startswith("tag:")]
    if not nodes or len(users) > 1 or (users and tags) or "" in users:
        mistakes.append(f"nodes: {nodes!r}, expected the nodes' tags, or one user")
    try:
        check_tags("nodes", tags)
    except HeadscaleError as problem:
        mistakes.append(str(problem))
    networks: dict[str, list[Network]] = {"pod_ranges": [], "node_pod_ranges": []}
    for option, found in networks.items():
        for cidr in given[option]:
            try:
                found.append(ip_network(cidr))
            except ValueError as wrong:
                mistakes.append(
                    f"{option}: {cidr!r}, expected a CIDR such as 10.244.0.0/16 ({wrong})"
                )
    if mistakes:
        raise HeadscaleError(OPTION, "; ".join(mistakes))
    return Mesh(
        tuple(networks["pod_ranges"]),
        tuple(tags),
        "".join(users),
        tuple(networks["node_pod_ranges"]),
    )


def with_tests(text: str, mesh: Mesh) -> str:
    """The policy with tests for Headscale to run: a pod of each range reaches another."""
    edit = _Edit(text)
    for network in mesh.ranges:
        first = network[0] if network.num_addresses == 1 else network[1]
        last = network[-1] if network.num_addresses < 3 else network[-2]
        target = f"{last}:443" if network.version == 4 else f"[{last}]:443"
        for protocol in ("tcp", "udp"):
            edit.append("tests", {"src": str(first), "proto": protocol, "accept": [target]})
    return edit.result().text


def tags_of(text: str) -> set[str]:
    """The tags that the policy knows."""
    edit = _Edit(text)
    return set(edit.data.get(*edit.spelled(("tagOwners",))) or ())


class _Edit:
    """The same steps on the text and on its meaning; in the end both must agree."""

    def __init__(self, text: str) -> None:
        try:
            document = Document(text)
        except HujsonError as wrong:
            raise HeadscaleError(
                REFUSED, f"Headscale's policy cannot be read: {wrong}; mend it there first"
            ) from None
        self._document: Optional[Document] = document
        self._before = document.text
        self.data = copy.deepcopy(document.data)
        self._original = copy.deepcopy(self.data)

    def put(self, path: Sequence[str], data: Any) -> None:
        inner = self.data
        for key in path[:-1]:
            if inner.get(key) is None:
                inner[key] = {}
            inner = inner[key]
        inner[path[-1]] = copy.deepcopy(data)
        self._on_text(Document.put, path, data)

    def append(self, name: str, item: Any) -> None:
        """Add an item to a list at the top of the policy."""
        path = self.spelled((name,))
        if self.data.get(path[0]) is None:
            self.put(path, [item])
            return
        self._top_list(path).append(copy.deepcopy(item))
        self._on_text(Document.append, path, item)

    def remove(self, name: str, item: Any) -> None:
        """Take an item away from a list at the top of the policy, if it is there as it was added.

        The list stays, even if it is empty: without it everything would be allowed.
        """
        path = self.spelled((name,))
        if self.data.get(path[0]) is None or item not in self._top_list(path):
            return
        self._top_list(path).remove(item)
        self._on_text(Document.drop, path, item)

    def _top_list(self, path: Sequence[str]) -> list[Any]:
        held = self.data[path[0]]
        if not isinstance(held, list):
            raise HeadscaleError(
                REFUSED, f"Headscale's policy has no list at {path[0]}: correct it first"
            )
        return held

    def extend(
        self,
        place: Sequence[str],
        key: str,
        names: Sequence[str],
        same: Callable[[str, str], bool] = str.__eq__,
    ) -> None:
        path = (*self.spelled(place), key)
        held = self._object(path[:-1])
        known = next((one for one in held if same(one, key)), None)
        if known is None:
            self.put(path, list(names))
            return
        path = (*path[:-1], known)
        if held[known] is None and names:
            held[known] = []
        for name in names:
            if name not in held[known]:
                held[known].append(name)
                self._on_text(Document.append, path, name)

    def reduce(
        self,
        place: Sequence[str],
        key: str,
        names: Sequence[str],
        same: Callable[[str, str], bool] = str.__eq__,
        keep: bool = False,
    ) -> None:
        path = self.spelled(place)
        held = self._object(path)
        known = next((one for one in held if same(one, key)), None)
        if known is None:
            return
        path = (*path, known)
        left = [name for name in held[known] or () if name not in names]
        if not left and not keep:
            del held[known]
            self._on_text(Document.drop, path)
            return
        for name in [name for name in held[known] or () if name in names]:
            held[known].remove(name)
            self._on_text(Document.drop, path, name)

    def mentions(self, tag: str) -> bool:
        """Whether the policy has the tag anywhere but as an entry of tagOwners."""
        (owners,) = self.spelled(("tagOwners",))
        rest = {key: value for key, value in self.data.items() if key != owners}
        text = json.dumps([rest, list((self.data.get(owners) or {}).values())])
        return f'"{tag}"' in text or f'"{tag}:' in text

    def result(self) -> Merged:
        if self.data == self._original:
            return Merged(self._before, False)
        if self._document is not None and self._document.data == self.data:
            return Merged(self._document.text, True)
        return Merged(json.dumps(self.data, indent=2, ensure_ascii=False) + "\n", True, True)

    def _on_text(self, change: Callable[..., None], *what: Any) -> None:
        if self._document is None:
            return
        try:
            change(self._document, *what)
        except HujsonError:
            self._document = None  # it cannot be placed: the meaning has to do

    def spelled(self, place: Sequence[str]) -> tuple[str, ...]:
        """The path as the policy spells it."""
        path: list[str] = []
        inner: Any = self.data
        for key in place:
            held = inner if isinstance(inner, dict) else {}
            known = next((one for one in held if one.lower() == key.lower()), key)
            path.append(known)
            inner = held.get(known)
        return tuple(path)

    def _object(self, path: Sequence[str]) -> dict[str, Any]:
        inner: Any = self.data
        for key in path:
            inner = inner.get(key)
            if inner is None:
                return {}
            if not isinstance(inner, dict):
                raise HeadscaleError(
                    REFUSED, f"Headscale's policy has no object at {'.'.join(path)}: mend it first"
                )
        for key, value in inner.items():
            if value is not None and not isinstance(value, list):
                raise HeadscaleError(
                    REFUSED,
                    f"Headscale's policy has no list at {'.'.join(path)}[{key}]: mend it first",
                )
        found: dict[str, Any] = inner
        return found


def _same_network(one: str, other: str) -> bool:
    try:
        return ip_network(one, strict=False) == ip_network(other, strict=False)
    except ValueError:
        return one == other
