# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which parts of a node are already as wanted: the release, the configuration and the conflist.

Preflight asks this once, before the first change. So a run without changes does not start a module
per part. In case of doubt a part is not up to date: then its own module does what is missing, or
reports what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.module_utils.common.arg_spec import ArgumentSpecValidator

from . import conflist_places, node_config, node_release
from .shared import conflist, podcidr

_STRINGS: dict[str, Any] = {"type": "list", "elements": "str"}

# The options of headcni_conflist that determine the content of the conflist.
CONFLIST: dict[str, dict[str, Any]] = {
    "pod_cidrs": _STRINGS,
    "cluster_cidrs": _STRINGS,
    "service_cidrs": _STRINGS,
    "name": {"default": "headcni"},
    "plugin": {"choices": ["headcni", "bridge"], "default": "headcni"},
    "cni_version": {"choices": list(conflist.CNI_VERSIONS), "default": "1.0.0"},
    "mode": {"choices": ["host", "daemon"], "default": "host"},
    "datapath": {"choices": ["bridge", "routed"], "default": "bridge"},
    "bridge": {"default": "headcni0"},
    "mtu": {"type": "int", "default": 1280},
    "ip_masq": {"type": "bool", "default": True},
    "hairpin": {"type": "bool", "default": True},
    "anti_spoofing": {"type": "bool", "default": True},
    "anti_spoofing_exempt": _STRINGS,
    "reserved_ports": _STRINGS,
    "host_ports_over_listeners": {"type": "bool", "default": False},
    "ip_annotation_namespaces": _STRINGS,
    "network_policy": {"type": "bool", "default": False},
    "ipam": {"choices": ["headcni-ipam", "host-local"], "default": "headcni-ipam"},
    "strategy": {"choices": ["sequential", "random", "dense-pack"]},
    "headscale_url": {},
    "tailscale_socket": {"type": "path"},
    "magic_dns": {"type": "dict"},
    "capabilities": _STRINGS,
    "chained": {"type": "list", "elements": "dict"},
    "extra": {"type": "dict"},
}
# And those for its place, and for other files in the same directory.
CONFLIST_PLACE: dict[str, dict[str, Any]] = {
    "directory": {"type": "path", "default": conflist.DIRECTORY},
    "file": {"default": conflist.NAME},
    "keep": {**_STRINGS, "default": list(conflist.KEEP)},
}


def has_release(
    version: str,
    checksum: str,
    wanted: node_release.Wanted,
    interpreter: node_release.Python,
    root: str = node_release.ROOT,
) -> bool:
    """Whether the release is in use, complete and linked, and no other must be removed."""
    now = node_release.current(root)
    if now is None or wanted.keep < node_release.FEWEST:
        return False
    steps = node_release.Steps()
    try:
        if node_release.find(node_release.installed(root), version, checksum) != now:
            return False
        node_release.arrange(now, wanted, steps, root=root, dry=True)
        node_release.prune(wanted.keep, steps, root=root, dry=True, spare=now.name)
        if node_release.shim_of(now, wanted).problem:
            return False  # its module warns about it
    except (node_release.ReleaseError, OSError):
        return False
    complete = node_release.is_compiled(now, interpreter)
    return complete and not steps and bool(node_release.loopback_of(wanted, now, root))


def has_config(
    config: Mapping[str, Any], found: podcidr.Resolution, path: str = node_config.PATH
) -> bool:
    """Whether the daemon has this configuration, with a pod CIDR that is not a guess."""
    text = node_config.render(node_config.pinned(config, found))
    try:
        return not found.guessed and not node_config.needs_writing(path, text)
    except OSError:
        return False


def has_conflist(given: Mapping[str, Any], pod_cidrs: list[str], cluster_cidrs: list[str]) -> bool:
    """Whether the conflist has this content and is in use, and there is nothing to warn about."""
    try:
        plan = _conflist_plan(given, pod_cidrs, cluster_cidrs)
        elsewhere = conflist_places.former(plan.directory, node_release.ROOT)
    except (conflist.ConflistError, OSError):
        return False
    return not plan.changed and not plan.left and not elsewhere


def conflist_mistakes(
    given: Mapping[str, Any], pod_cidrs: list[str], cluster_cidrs: list[str]
) -> list[str]:
    """What headcni_conflist would refuse at the end of the run."""
    try:
        _conflist_plan(given, pod_cidrs, cluster_cidrs)
    except conflist.ConflistError as problem:
        return [f"conflist: {problem}"]
    except OSError:
        pass  # the check of the directory reports it
    return []


def conflist_notes(
    given: Mapping[str, Any], pod_cidrs: list[str], cluster_cidrs: list[str]
) -> list[str]:
    """What happens to the other files in its directory."""
    try:
        plan = _conflist_plan(given, pod_cidrs, cluster_cidrs)
    except (conflist.ConflistError, OSError):
        return []  # other checks report it
    notes = [f"conflist: {problem}: pods use whatever comes first" for problem in plan.left]
    if plan.back_up:
        shown = ", ".join(plan.back_up[:5]) + (", …" if len(plan.back_up) > 5 else "")
        notes.append(
            f"conflist: {shown} in {plan.directory} will be renamed to …{conflist.SUFFIX}, so that "
            "pods use HeadCNI; uninstall.yml puts it back"
        )
    return notes


def _conflist_plan(
    given: Mapping[str, Any], pod_cidrs: list[str], cluster_cidrs: list[str]
) -> conflist.Plan:
    asked = {**given, "pod_cidrs": pod_cidrs, "cluster_cidrs": cluster_cidrs}
    checked = ArgumentSpecValidator({**CONFLIST, **CONFLIST_PLACE}).validate(asked)
    if checked.error_messages:
        raise conflist.ConflistError("; ".join(checked.error_messages))
    options = checked.validated_parameters
    place = {name: options.pop(name) for name in CONFLIST_PLACE}
    conf = conflist.build(conflist.Options.of(options))
    seen = conflist.survey(place["directory"])
    return conflist.plan(seen, conf, name=place["file"], keep=place["keep"])
