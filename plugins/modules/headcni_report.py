#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""The documentation of an action plugin, which does all of the work on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headcni_report
short_description: Write a report of the mesh as one HTML page
version_added: 0.2.0
description:
  - Runs on the controller, once for all hosts, and makes a page from the results that
    M(headcni.mesh.headcni_survey) has registered as C(headcni_survey) on each of them.
  - The page needs no other file and no network. The data is written beside it, as JSON; the next
    report shows what has changed since then.
  - The variable C(headcni_site) of a host names its site. Without it, the DERP region nearest to
    the node counts as its site.
author:
  - The HeadCNI authors (@headcni)
options:
  dir:
    description: The folder of the controller to write to. It is created if it is missing.
    type: path
    required: true
  hosts:
    description: The hosts in the report.
    type: list
    elements: str
    required: true
  headscale:
    description: The result of M(headcni.mesh.headscale_info), for the approvals.
    type: dict
    default: {}
  title:
    description: The heading of the page.
    type: str
    default: HeadCNI mesh
  keep:
    description: How many files with the data of reports to keep.
    type: int
    default: 30
attributes:
  check_mode:
    support: full
    details: In check mode the page is made but not written.
  diff_mode:
    support: none
    details: The page itself shows what has changed.
  action:
    description: Has an action plugin, which runs on the controller.
    support: full
extends_documentation_fragment:
  - headcni.mesh.node
seealso:
  - module: headcni.mesh.headcni_survey
"""

EXAMPLES = r"""
- name: Write the report
  headcni.mesh.headcni_report:
    dir: ./headcni-report
    hosts: "{{ ansible_play_hosts_all }}"
  run_once: true
"""

RETURN = r"""
page:
  description: The path of the page.
  type: str
  returned: success
data:
  description: The path of the data.
  type: str
  returned: success
bytes:
  description: The size of the page.
  type: int
  returned: success
problems:
  description: How many problems the page shows.
  type: int
  returned: success
warnings_found:
  description: How many warnings it shows.
  type: int
  returned: success
"""
