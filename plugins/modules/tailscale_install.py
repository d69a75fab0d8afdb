#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
module: tailscale_install
short_description: Install Tailscale's programs and run tailscaled
version_added: 0.1.0
description:
  - Installs C(tailscale) and C(tailscaled) from Tailscale's package repository, from its tarball,
    or from a tarball that is already on the node.
  - Verifies a checksum before it unpacks anything, and checks that both programs have the wanted
    version and run on this node before it changes the first file. Then it replaces all files by
    renaming, which does not disturb a running tailscaled.
  - Restarts tailscaled only if the B(running) one has another version or another environment than
    wanted.
options:
  state:
    description:
      - Whether Tailscale should be installed. V(absent) removes the programs, the unit and the
        repository. The node's keys in C(/var/lib/tailscale) stay.
    type: str
    choices: [present, absent]
    default: present
  method:
    description:
      - V(package) uses the package repository, with apt or dnf.
      - V(tarball) downloads C(tailscale_VERSION_ARCH.tgz).
      - V(files) uses the tarball O(src), for nodes that cannot download anything.
    type: str
    choices: [package, tarball, files]
    default: tarball
  version:
    description:
      - The version to install, such as V(1.102.5). A newer or older version is replaced. Required
        with O(method=tarball) and O(method=files).
      - With O(method=package) it may be V(latest), or empty if any version will do.
    type: str
    default: ""
  url:
    description:
      - The address of the tarballs and their C(.sha256) files.
      - An C(http://) address is refused for a tarball without a known checksum.
    type: str
    default: https://pkgs.tailscale.com/stable
  repository_url:
    description: The address of the package repositories, for O(method=package).
    type: str
    default: https://pkgs.tailscale.com/stable
  repository_keys:
    description:
      - The fingerprints of the keys that may sign the package repository, for O(method=package).
        The default is Tailscale's key. Other keys and subkeys in the server's keyring are not
        passed on to apt or dnf.
    type: list
    elements: str
    default: [2596A99EAAB33821893C0A79458CA832957F5868]
  src:
    description: The tarball on the node, for O(method=files). Required only if the version is not
      installed yet.
    type: path
  checksum:
    description:
      - The SHA-256 of the tarball. By default it comes from O(checksums), then from the sums in the
        collection, then from the C(.sha256) file next to the tarball, which comes from the same
        server as the tarball itself.
      - With O(method=files) it is optional only if nobody but root may change O(src) and the
        directories above it. Otherwise a local user could replace a program that runs as root.
    type: str
    default: ""
  checksums:
    description:
      - The SHA-256 of tarballs by name, such as C(tailscale_1.102.5_amd64.tgz), for nodes with
        different architectures and for rolling back to an earlier version.
    type: dict
    default: {}
  environment:
    description:
      - Environment variables for tailscaled, such as a proxy, or C(FLAGS). They are written to a
        separate block at the end of C(/etc/default/tailscaled). The rest of the file stays.
      - A tailscaled that this module has installed sends no logs to Tailscale's servers
        (C(TS_NO_LOGS_NO_SUPPORT=true)), unless that variable is V(false) here. For a tailscaled
        that was there before, this is not changed.
    type: dict
    default: {}
  port:
    description: The UDP port of tailscaled. By default the one in C(/etc/default/tailscaled).
    type: int
  service:
    description:
      - V(managed) enables and starts C(tailscaled.service).
      - V(none) only installs the programs. It does not change the unit, its environment or a
        running tailscaled.
    type: str
    choices: [managed, none]
    default: managed
  join:
    description:
      - The options of M(headcni.mesh.tailscale_join), without the key. If the node has joined with
        exactly these options, RV(node_key) is its key. This option changes nothing.
      - Mistakes in these options are reported before anything is installed.
    type: dict
  timeout:
    description: How many seconds to wait for a server to answer, and for tailscaled to start.
    type: int
    default: 60
  validate_certs:
    description: Whether to check the certificates of the servers.
    type: bool
    default: true
attributes:
  check_mode:
    support: full
    details: It also downloads the checksum, so that it finds a wrong version.
  diff_mode:
    support: full
    details: Shows the versions, the unit and the environment.
extends_documentation_fragment:
  - headcni.mesh.node
author:
  - The HeadCNI authors (@headcni)
"""

EXAMPLES = r"""
- name: Install Tailscale from its tarball, and run it
  headcni.mesh.tailscale_install:
    version: 1.102.5

- name: Install Tailscale from the package repository
  headcni.mesh.tailscale_install:
    method: package
    version: latest

- name: Install only the programs, from a file, without touching the node's own tailscaled
  headcni.mesh.tailscale_install:
    method: files
    version: 1.102.5
    src: /root/tailscale_1.102.5_amd64.tgz
    service: none
"""

RETURN = r"""
version_before:
  description: The version that was installed. Empty if there was none.
  returned: success
  type: str
version_after:
  description: The version that is installed or would be.
  returned: success
  type: str
running_version:
  description: The version of the running tailscaled. Empty if none runs.
  returned: success
  type: str
restarted:
  description: Whether tailscaled was started or restarted or would be.
  returned: success
  type: bool
restart_reason:
  description: Why it was restarted.
  returned: success
  type: str
arch:
  description: Tailscale's name for this node's architecture.
  returned: success
  type: str
tarball:
  description: The name of the tarball that was or would be needed. Empty if none.
  returned: success
  type: str
  sample: tailscale_1.102.5_amd64.tgz
node_key:
  description: The node's public key in Headscale, if the node has joined as O(join) says and
    nothing was or would be changed. Otherwise empty.
  returned: success
  type: str
joined_elsewhere:
  description: The server that the node has joined, if it is not the one of O(join). Joining the
    latter would remove the node from its tailnet.
  returned: success
  type: str
joined_tags:
  description: The tags that the login server has assigned to the node. Null if the node has not
    logged in to the server of O(join) yet.
  returned: with O(join), if it is known
  type: list
  elements: str
differs:
  description: Whether anything was or would be changed. The same as C(changed), which a task may
    override.
  returned: success
  type: bool
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils.node import secrets_of
from ansible_collections.headcni.mesh.plugins.module_utils.tailnet_options import (
    joined_elsewhere,
    joined_key,
    joined_tags,
    mistakes_of,
)
from ansible_collections.headcni.mesh.plugins.module_utils.tailscale_installation import (
    Installation,
    mistakes,
)
from ansible_collections.headcni.mesh.plugins.module_utils.tailscale_packages import OFFICIAL_KEY
from ansible_collections.headcni.mesh.plugins.module_utils.tailscale_release import InstallError

SPEC = {
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "method": {"type": "str", "choices": ["package", "tarball", "files"], "default": "tarball"},
    "version": {"type": "str", "default": ""},
    "url": {"type": "str", "default": "https://pkgs.tailscale.com/stable"},
    "repository_url": {"type": "str", "default": "https://pkgs.tailscale.com/stable"},
    "repository_keys": {
        "type": "list",
        "elements": "str",
        "default": [OFFICIAL_KEY],
        "no_log": False,
    },
    "src": {"type": "path"},
    "checksum": {"type": "str", "default": ""},
    "checksums": {"type": "dict", "default": {}},
    "environment": {"type": "dict", "default": {}},
    "port": {"type": "int"},
    "service": {"type": "str", "choices": ["managed", "none"], "default": "managed"},
    "join": {"type": "dict"},
    "timeout": {"type": "int", "default": 60},
    "validate_certs": {"type": "bool", "default": True},
}


def main() -> None:
    module = AnsibleModule(argument_spec=SPEC, supports_check_mode=True)
    module.no_log_values.update(secrets_of(module.params["environment"]))
    join = module.params["join"]
    wrong = mistakes(module.params) + (mistakes_of(join) if join else [])
    if wrong:
        module.fail_json(msg="; ".join(dict.fromkeys(wrong)))
    try:
        work = Installation(module)
        if module.params["state"] == "present":
            work.present()
        else:
            work.absent()
    except InstallError as problem:
        module.fail_json(msg=str(problem))
    module.exit_json(
        changed=work.changed,
        version_before=work.before,
        version_after=work.after,
        running_version=work.running,
        restarted=bool(work.reason),
        restart_reason=work.reason,
        arch=work.arch,
        tarball=work.tarball,
        node_key=joined_key(join) if join and not work.changed else "",
        joined_elsewhere=joined_elsewhere(join) if join else "",
        differs=work.changed,
        diff=work.diffs,
        **(joined_tags(join) if join else {}),
    )


if __name__ == "__main__":
    main()
