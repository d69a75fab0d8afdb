# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""The CNI directories that a conflist of ours was ever put in, written down beside the releases:
the one that is configured may be another by now."""

from __future__ import annotations

import os

from .shared import conflist

_FILE = "directories"


def record(directory: str, root: str) -> None:
    """Before the conflist is put there. Where no release is, nobody leaves anything."""
    had = _recorded(root)
    if directory in had or not os.path.isdir(root):
        return
    path = os.path.join(root, _FILE)
    fresh = f"{path}.headcni-new"
    with open(fresh, "w", encoding="utf-8") as stream:
        stream.write("".join(f"{one}\n" for one in (*had, directory)))
    os.replace(fresh, path)


def former(directory: str, root: str) -> list[str]:
    """Those, beside this one, where something of ours is still to be put right."""
    return [
        one
        for one in _recorded(root)
        if one != directory and conflist.plan_restore(conflist.survey(one)).changed
    ]


def _recorded(root: str) -> list[str]:
    try:
        with open(os.path.join(root, _FILE), encoding="utf-8") as stream:
            return stream.read().splitlines()
    except FileNotFoundError:
        return []
