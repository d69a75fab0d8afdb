# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
requirements:
  - requests, on the host that runs the module
options:
  url:
    description:
      - The address of the Headscale server, as the host that runs the module reaches it.
      - Without C(/api/v1) at the end. Redirects are not followed.
      - The module warns if O(api_key) would be sent over C(http://) to a public address or to a
        name. It does not warn for loopback and private addresses.
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
      - A file with the CA certificates to trust, if the system does not have them.
    type: path
  validate_certs:
    description: Whether to check the server's certificate. Turn it off only for tests.
    type: bool
    default: true
  timeout:
    description:
      - How many seconds to wait for an answer. Reads are tried four times, writes once.
    type: float
    default: 10
attributes:
  check_mode:
    description: Can run in C(check_mode) and return what it would change, without changing it.
  diff_mode:
    description: Shows in detail what has changed or would change.
  action_group:
    description: Use this group to set O(url), O(api_key) and the like once for all its modules.
    support: full
    membership:
      - headcni.mesh.headscale
notes:
  - Works with Headscale 0.23 to 0.29.
  - Run it on the controller (C(delegate_to=localhost)), so that the API key never reaches a node.
"""
