"""The name under which the collection's modules find `headcni.settings`.

A node's release and the collection may differ in version, so this name and these functions stay:
see plugins/module_utils/node_config.py and plugins/plugin_utils/runtime_release.py.
"""

from __future__ import annotations

from ..settings import as_dict, changes, parse

__all__ = ("as_dict", "changes", "parse")
