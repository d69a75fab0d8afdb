# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Find the package that a file belongs to, with any package manager."""

from __future__ import annotations

import os
from typing import Callable

Run = Callable[..., "tuple[int, str, str]"]  # AnsibleModule.run_command, or node.run_bounded
_QUIET = {"LC_ALL": "C"}
# The command of each package manager, and where its output has the package's name.
_MANAGERS: tuple[tuple[str, tuple[str, ...], Callable[[str], str]], ...] = (
    ("/usr/bin/dpkg-query", ("--search",), lambda said: said.partition(":")[0]),
    ("/usr/bin/rpm", ("--query", "--file", "--queryformat=%{NAME}"), str),
    ("/usr/bin/pacman", ("--query", "--quiet", "--owns"), str),
    ("/sbin/apk", ("info", "--quiet", "--who-owns"), str),
)


def package_owner(run: Run, path: str) -> str:
    """The name of the package. Empty if the file belongs to none."""
    for tool, arguments, name_in in _MANAGERS:
        if os.path.exists(tool):
            code, out, _unused = run([tool, *arguments, path], environ_update=_QUIET)
            name = name_in(str(out)).strip() if code == 0 else ""
            if name:
                return name
    return ""
