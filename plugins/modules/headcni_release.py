#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Install a release of the runtime on a node, and return which release is in use."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headcni_release
short_description: Install a release of the HeadCNI runtime on a node
version_added: 0.1.0
description:
  - Installs the runtime in C(/opt/headcni/releases/VERSION/), compiled for the node's own
    C(/usr/bin/python3), and atomically switches C(/opt/headcni/current) to it. A release that does
    not run on the node never becomes the current one.
  - Links the CNI programs into the container runtime's directories and the command C(headcnictl)
    into the path, and installs the systemd units.
  - If I(src) is not given, the controller builds the tarball from the collection, once for each
    version of the sources, and keeps it in the user's cache directory. It is sent only to nodes
    that do not have this build.
author:
  - The HeadCNI authors (@headcni)
options:
  state:
    description:
      - V(present) installs the release and makes it the current one.
      - V(absent) removes the release I(version). Without I(version) it removes all releases, links
        and units. Stop the services first.
    type: str
    choices: [present, absent]
    default: present
  src:
    description:
      - A tarball C(headcni-runtime-VERSION.tar.gz) on the controller, built with C(make release).
      - By default the controller builds it from the collection.
    type: path
  wheels:
    description:
      - A directory on the controller with the wheels of C(plugins/cni/requirements.lock), for a
        controller without access to a package index.
    type: path
  version:
    description:
      - A release that is already on the node, to switch to it, for example for a roll-back.
      - Then nothing is built or sent, unless I(src) is given, too.
    type: str
  checksum:
    description:
      - The SHA-256 of the tarball, in hexadecimal, if you know it from another source.
      - By default the SHA-256 of the file on the controller. The node always checks the tarball.
    type: str
  cni_bin_dirs:
    description: The directories in which the container runtime looks for CNI plugins.
    type: list
    elements: path
    default: [/opt/cni/bin]
  bin_dir:
    description: The directory of the link to the command C(headcnictl).
    type: path
    default: /usr/local/bin
  plugin_dirs:
    description:
      - Directories to search for a C(loopback) plugin, if I(cni_bin_dirs) have none. containerd
        calls it for each pod. The release's own plugin is linked only if no other is found.
    type: list
    elements: path
    default:
      - /usr/lib/cni
      - /usr/libexec/cni
      - /var/lib/rancher/k3s/data/cni
      - /var/lib/rancher/k3s/data/current/bin
  keep:
    description: How many releases to keep, including the current and the previous one.
    type: int
    default: 3
  tailscale_socket:
    description:
      - The socket of the node's own tailscaled. The first installation records its prefs, so that
        they can be restored when HeadCNI is removed.
    type: path
    default: /run/tailscale/tailscaled.sock
    version_added: 0.2.0
  native_shim:
    description:
      - Whether the container runtime starts the native shim, if the release has one for the node's
        architecture. It forwards calls to the daemon without starting Python.
      - With V(false), and on other architectures, it starts the Python shim.
    type: bool
    default: true
    version_added: 0.2.0
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
    details: Shows which links, units and releases change.
extends_documentation_fragment:
  - headcni.mesh.node
seealso:
  - module: headcni.mesh.headcni_config
  - module: headcni.mesh.headcni_info
"""

EXAMPLES = r"""
- name: Install the runtime in this collection
  headcni.mesh.headcni_release:

- name: Install a tarball that was built elsewhere
  headcni.mesh.headcni_release:
    src: files/headcni-runtime-0.1.0.tar.gz

- name: Roll back to an earlier release
  headcni.mesh.headcni_release:
    version: 0.0.9
"""

RETURN = r"""
current:
  description: The release in use, with its name, version and digest.
  type: dict
  returned: success
  sample: {name: 0.1.0, version: 0.1.0, digest: 1f0c…}
previous:
  description: The release that was in use before. None on a fresh node.
  type: dict
  returned: success
installed:
  description: Every release on the node, in the order of their installation.
  type: list
  elements: dict
  returned: success
removed:
  description: Names of the releases that were removed.
  type: list
  elements: str
  returned: success
units_changed:
  description: Units whose file has changed. systemd has been reloaded.
  type: list
  elements: str
  returned: success
shim:
  description: The shim that the container runtime starts, with the reason if it is Python's.
  type: str
  returned: success
  sample: native (x86_64)
loopback:
  description: Where the loopback plugin comes from. Empty if neither node nor release has one.
  type: str
  returned: success
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import node, node_baseline, node_release
from ansible_collections.headcni.mesh.plugins.module_utils.shared import modes

NO_LOOPBACK = (
    "there is no loopback CNI plugin in {dirs}, nor elsewhere on this node: containerd needs it "
    "for each pod. Install containernetworking-plugins (or kubernetes-cni) and run again"
)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"choices": ["present", "absent"], "default": "present"},
            "src": {"type": "path"},
            "wheels": {"type": "path"},
            "version": {"type": "str"},
            "checksum": {"type": "str"},
            "cni_bin_dirs": {"type": "list", "elements": "path", "default": ["/opt/cni/bin"]},
            "bin_dir": {"type": "path", "default": "/usr/local/bin"},
            "plugin_dirs": {
                "type": "list",
                "elements": "path",
                "default": list(node_release.PLUGIN_DIRS),
            },
            "keep": {"type": "int", "default": 3},
            "tailscale_socket": {"type": "path", "default": modes.SOCKETS["host"]},
            "native_shim": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    node.refuse_other_platforms(module)
    fewest = node_release.FEWEST
    if module.params["keep"] < fewest:
        module.fail_json(
            msg=f"keep: {module.params['keep']}, expected {fewest} or more, so that one can go back"
        )
    try:
        result = (present if module.params["state"] == "present" else absent)(module)
    except (node_release.ReleaseError, node.NodeError) as problem:
        module.fail_json(msg=str(problem))
    except OSError as problem:
        module.fail_json(msg=f"{problem.filename or node_release.ROOT}: {problem.strerror}")
    module.exit_json(**result)


def present(module: AnsibleModule) -> dict:
    given, dry = module.params, module.check_mode
    wanted = wanted_of(given)
    version = node_release.check_name(given["version"] or "")
    steps = node_release.Steps()
    interpreter = node_release.ask_python()
    before = node_release.current()
    release = node_release.find(node_release.installed(), version, given["checksum"] or "")
    if release is None:
        if not given["checksum"]:
            there = ", ".join(release.name for release in node_release.installed()) or "none"
            raise node_release.ReleaseError(
                f"version: {version} is not on this node; there are: {there}"
            )
        if given["src"]:
            release = node_release.install(given["src"], version, given["checksum"])
        elif dry:
            release = node_release.foretold(version, given["checksum"])
        else:
            return {"changed": False, "needs_src": True}
        steps.note("", f"release {release.name}")
    elif not node_release.is_compiled(release, interpreter):
        steps.note("", f"release {release.name} compiled for {interpreter.tag}")
        if not dry:
            node_release.compile_release(release.path, release.path)
            node_release.try_out(release.path, release.version)
    if before != release:
        steps.note(f"current: {before.name}" if before else "", f"current: {release.name}")
    loopback = node_release.loopback_of(wanted, release)
    node_release.arrange(release, wanted, node_release.Steps(), dry=True)  # obstacles first
    if before is None and not dry:
        node_baseline.remember(
            (*wanted.bin_dirs, wanted.command_dir), module.params["tailscale_socket"]
        )
    if before != release and not dry:
        node_release.switch(release)
    units = node_release.arrange(release, wanted, steps, dry=dry)
    removed = node_release.prune(
        wanted.keep, steps, dry=dry, spare=before.name if before else release.name
    )
    if units and not dry and node.has_systemd():
        node.order("daemon-reload")
    shim = node_release.shim_of(release, wanted)
    if shim.problem:
        module.warn(f"{shim.problem}; the container runtime starts the Python shim instead")
    if not loopback:
        module.warn(NO_LOOPBACK.format(dirs=" or ".join(wanted.bin_dirs)))
    return {
        "changed": bool(steps),
        "diff": steps.diff(),
        "removed": removed,
        "units_changed": units,
        "shim": shim.label,
        "loopback": loopback,
        **summary(before, release.as_dict()),
    }


def summary(before, current) -> dict:
    return {
        "previous": before.as_dict() if before else None,
        "current": current,
        "installed": node_release.report()["installed"],
    }


def absent(module: AnsibleModule) -> dict:
    version, dry = module.params["version"], module.check_mode
    steps = node_release.Steps()
    before = node_release.current()
    if version:
        release = node_release.find(node_release.installed(), node_release.check_name(version), "")
        if release is not None:
            if release == before:
                raise node_release.ReleaseError(
                    f"version: {version} is in use; switch to another one first"
                )
            steps.note(f"release {release.name}", "")
            if not dry:
                node_release.remove_release(release)
        return {
            "changed": bool(steps),
            "diff": steps.diff(),
            "removed": [release.name] if release else [],
            **summary(before, before.as_dict() if before else None),
        }
    if not dry and node.has_systemd():
        running = [n for n in node_release.unit_names() if node.unit(n).is_active]
        if running:
            raise node_release.ReleaseError(f"{', '.join(running)}: still running; stop it first")
    removed = [release.name for release in node_release.installed()]
    node_release.remove(wanted_of(module.params), steps, dry=dry)
    if steps and not dry and node.has_systemd():
        node.order("daemon-reload")
    return {
        "changed": bool(steps),
        "diff": steps.diff(),
        "removed": removed,
        **summary(before, None),
    }


def wanted_of(given: dict) -> node_release.Wanted:
    for path in (*given["cni_bin_dirs"], given["bin_dir"]):
        if not os.path.isabs(path):
            raise node_release.ReleaseError(f"{path!r}: expected an absolute path")
    return node_release.Wanted(
        bin_dirs=given["cni_bin_dirs"],
        command_dir=given["bin_dir"],
        plugin_dirs=given["plugin_dirs"],
        keep=given["keep"],
        native_shim=given["native_shim"],
    )


if __name__ == "__main__":
    main()
