"""The settings of a node, which the operator writes in /etc/headcni/config.yaml."""

from __future__ import annotations

from .changes import Change, Changes, changes, with_applied
from .effective import Setting, derived, effective
from .file import PATH, RETIRED, check, given, load, parse
from .keys import as_dict
from .node import answered, control_path, for_resolver, in_mode, node_name, node_sizes, pod_cidrs
from .schema import described, schema
from .sections import LEVELS, DaemonConfig

__all__ = [
    "LEVELS",
    "PATH",
    "RETIRED",
    "Change",
    "Changes",
    "DaemonConfig",
    "Setting",
    "answered",
    "as_dict",
    "changes",
    "check",
    "control_path",
    "derived",
    "described",
    "effective",
    "for_resolver",
    "given",
    "in_mode",
    "load",
    "node_name",
    "node_sizes",
    "parse",
    "pod_cidrs",
    "schema",
    "with_applied",
]
