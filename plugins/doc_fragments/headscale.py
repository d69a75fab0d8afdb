# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
requirements:
  - requests, on the host that the module runs on
options:
  url:
    description:
      - The Headscale server's address, as the host that the module runs on reaches it.
      - Without the C(/api/v1) at its end. No redirect is followed.
      - A warning is given if O(api_key) would go over C(http://) to a public address or to a name.
        For loopback and private addresses there is none.
      - If it is not given, the environment variable E(HEADSCALE_URL) is used.
    type: str
    required: true
  api_key:
    description:
      - An API key of that server, as C(headscale apikeys create) prints it.
      - If it is not given, the environment variable E(HEADSCALE_API_KEY) is used.
    type: str
    required: true
  ca_file:
    description:
      - A file with the certificates to trust, for a server whose CA the system does not know.
    type: path
  validate_certs:
    description: Whether the server's certificate is checked. Turn it off for a test at most.
    type: bool
    default: true
  timeout:
    description:
      - How many seconds to wait for an answer. Reads are tried four times, writes once.
    type: float
    default: 10
attributes:
  check_mode:
    description: Can run in C(check_mode) and tell what it would change, without changing it.
  diff_mode:
    description: Tells in detail what has changed, or would.
  action_group:
    description: Use O(url), O(api_key) and their like for all modules of the group at once.
    support: full
    membership:
      - headcni.mesh.headscale
notes:
  - Works with Headscale 0.23 to 0.29.
  - Run it on the controller (C(delegate_to=localhost)), so that the API key never reaches a node.
"""
