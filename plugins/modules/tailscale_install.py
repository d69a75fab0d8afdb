#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
module: tailscale_install
short_description: Install Tailscale's programs and run tailscaled
version_added: 0.1.0
description:
  - Installs C(tailscale) and C(tailscaled) from Tailscale's package repository, from its tarball,
    or from a tarball that is on the node already.
  - A checksum is verified before anything is unpacked, and both programs have to prove that they
    are of the version asked for and made for this node, before the first file changes. All files
    then change together, by rename, so that a running tailscaled is not disturbed.
  - tailscaled is restarted only if the one that B(runs) is of another version, or has another
    environment, than it should.
options:
  state:
    description:
      - Whether Tailscale is to be installed. V(absent) removes the programs, the unit and the
        repository; the node's keys in C(/var/lib/tailscale) stay.
    type: str
    choices: [present, absent]
    default: present
  method:
    description:
      - V(package) uses the package repository, by apt or dnf.
      - V(tarball) downloads C(tailscale_VERSION_ARCH.tgz).
      - V(files) takes such a tarball from O(src), for nodes that reach no site.
    type: str
    choices: [package, tarball, files]
    default: tarball
  version:
    description:
      - The version to install, such as V(1.102.5); newer and older ones are replaced. Required
        with O(method=tarball) and O(method=files).
      - With O(method=package) it may be V(latest), or left out if any version will do.
    type: str
    default: ""
  url:
    description:
      - Where the tarballs and their C(.sha256) files are.
      - An C(http://) address is refused for a tarball without a known checksum.
    type: str
    default: https://pkgs.tailscale.com/stable
  repository_url:
    description: Where the package repositories are, for O(method=package).
    type: str
    default: https://pkgs.tailscale.com/stable
  repository_keys:
    description:
      - The fingerprints of the keys that may sign the package repository, for O(method=package).
        The default is Tailscale's. Other keys, and subkeys, that the server has in its keyring are
        not passed on to apt or dnf.
    type: list
    elements: str
    default: [2596A99EAAB33821893C0A79458CA832957F5868]
  src:
    description: The tarball on the node, for O(method=files). Needed only where it is not
      installed yet.
    type: path
  checksum:
    description:
      - The SHA-256 of the tarball. Without it, O(checksums) counts, then the sums that come with
        the collection, then the C(.sha256) file beside the tarball, which has the same server as
        the tarball itself.
      - With O(method=files) it may be left out only if nobody but root may change O(src) and the
        directories above it. Otherwise a local user could replace what runs as root.
    type: str
    default: ""
  checksums:
    description:
      - The SHA-256 of tarballs by their names, such as C(tailscale_1.102.5_amd64.tgz), for nodes of
        several architectures and for going back to a former version.
    type: dict
    default: {}
  environment:
    description:
      - Environment variables for tailscaled, such as a proxy, or C(FLAGS). They are written to a
        block of their own at the end of C(/etc/default/tailscaled); the rest of the file stays.
      - A tailscaled that this module has installed sends no logs to Tailscale's servers
        (C(TS_NO_LOGS_NO_SUPPORT=true)), unless that variable is V(false) here. One that was there
        before is left to do what it did.
    type: dict
    default: {}
  port:
    description: The UDP port of tailscaled. Without it, that in C(/etc/default/tailscaled) counts.
    type: int
  service:
    description:
      - V(managed) has C(tailscaled.service) enabled and running.
      - V(none) installs the programs and nothing else. A unit, its environment and a tailscaled
        that runs are left as they are.
    type: str
    choices: [managed, none]
    default: managed
  join:
    description:
      - The options of M(headcni.mesh.tailscale_join), but for the key. Whether the node is joined
        as they say is then told by its key in what is returned. Nothing is changed for that.
      - What is wrong with them is told before anything is installed.
    type: dict
  timeout:
    description: Seconds to wait for a site to answer, and for tailscaled to start.
    type: int
    default: 60
  validate_certs:
    description: Whether to check the certificates of the sites.
    type: bool
    default: true
attributes:
  check_mode:
    support: full
    details: Predicts, and asks the site for the checksum, so that a wrong version is found.
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

- name: Install it from the package repository
  headcni.mesh.tailscale_install:
    method: package
    version: latest

- name: Install the programs only, from a file, and leave the node's own tailscaled alone
  headcni.mesh.tailscale_install:
    method: files
    version: 1.102.5
    src: /root/tailscale_1.102.5_amd64.tgz
    service: none
"""

RETURN = r"""
version_before:
  description: The version that was installed; empty if there was none.
  returned: success
  type: str
version_after:
  description: The version that is installed, or would be.
  returned: success
  type: str
running_version:
  description: The version of the tailscaled that runs; empty if none does.
  returned: success
  type: str
restarted:
  description: Whether tailscaled was started or restarted, or would be.
  returned: success
  type: bool
restart_reason:
  description: Why.
  returned: success
  type: str
arch:
  description: This node's architecture, as Tailscale calls it.
  returned: success
  type: str
tarball:
  description: The name of the tarball that was needed, or would be; empty if none.
  returned: success
  type: str
  sample: tailscale_1.102.5_amd64.tgz
node_key:
  description: The node's public key, by which Headscale knows it, if it is joined as O(join) says
    and nothing had to change, or would have to; otherwise empty.
  returned: success
  type: str
joined_elsewhere:
  description: The server that the node is joined to, if that is not the one of O(join). To join
    that one takes the node out of a tailnet.
  returned: success
  type: str
joined_tags:
  description: The tags that the login server has given the node; null if the node has yet to log in
    to the server of O(join).
  returned: with O(join), if it is known
  type: list
  elements: str
differs:
  description: Whether anything had to change, or would have to; as C(changed), which a task may
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
