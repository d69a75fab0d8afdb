# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
attributes:
  check_mode:
    description: Can run in C(check_mode) and return what it would change, without changing it.
  diff_mode:
    description: Shows in detail what has changed or would change.
  platform:
    description: The platform of the nodes.
    support: full
    platforms: linux
"""
    READ_ONLY = r"""
attributes:
  check_mode:
    support: full
    details: It never changes anything.
  diff_mode:
    support: none
    details: There is nothing to compare.
"""
