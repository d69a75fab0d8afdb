# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
attributes:
  check_mode:
    description: Can run in C(check_mode) and tell what it would change, without changing it.
  diff_mode:
    description: Tells in detail what has changed, or would.
  platform:
    description: The nodes it is for.
    support: full
    platforms: linux
"""
