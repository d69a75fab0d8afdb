# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""The controller's part of headcni_release: find the tarball, and send it to nodes without it."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.headcni.mesh.plugins.plugin_utils import runtime_release

display = Display()


class ActionModule(ActionBase):
    """Ask the node first: usually it already has the release."""

    _supports_check_mode = True
    _supports_diff = True

    def run(
        self, tmp: str | None = None, task_vars: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        src, wheels = arguments.pop("src", None), arguments.pop("wheels", None)
        if arguments.get("state", "present") == "absent" or (arguments.get("version") and not src):
            arguments.pop("checksum", None)
            return self._module(arguments, task_vars)
        try:
            found = runtime_release.ensure(
                runtime_release.located(self._find_needle, src), wheels or "", display.display
            )
        except runtime_release.ReleaseError as problem:
            raise AnsibleActionFail(str(problem)) from None
        if wrong := found.differences(arguments):
            raise AnsibleActionFail("; ".join(wrong))
        arguments.update(version=found.version, checksum=found.digest)
        result = self._module(arguments, task_vars)
        if not result.pop("needs_src", False) or result.get("failed"):
            return result
        # After the action Ansible removes only the temporary directory that was created last. If we
        # created a second one, the first would stay on the node.
        folder = self._connection._shell.tmpdir or self._make_tmp_path()
        remote = self._connection._shell.join_path(folder, found.path.name)
        self._transfer_file(str(found.path), remote)
        self._fixup_perms2((folder, remote))
        return self._module({**arguments, "src": remote}, task_vars)

    def _module(
        self, arguments: dict[str, Any], task_vars: dict[str, Any] | None
    ) -> dict[str, Any]:
        return self._execute_module(
            module_name="headcni.mesh.headcni_release", module_args=arguments, task_vars=task_vars
        )
