# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""The controller's part of headcni_preflight: the configuration, the release and the time."""

from __future__ import annotations

import time
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.headcni.mesh.plugins.module_utils import node_config
from ansible_collections.headcni.mesh.plugins.plugin_utils import runtime_release

display = Display()


class ActionModule(ActionBase):
    """Check what the controller can check, then the node, and report everything together."""

    _supports_check_mode = True

    def run(
        self, tmp: str | None = None, task_vars: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        super().run(tmp, task_vars)
        if getattr(self._connection._shell, "_IS_WINDOWS", False):
            raise AnsibleActionFail("Windows cannot be a node: HeadCNI needs Linux")
        arguments = dict(self._task.args)
        report_only = boolean(arguments.pop("report_only", False))
        release, problems = self._release(arguments)
        result = self._execute_module(
            module_name="headcni.mesh.headcni_preflight",
            module_args={**arguments, "report_only": True, "now": time.time()},
            task_vars=task_vars,
        )
        if result.get("failed"):
            return result
        # The node's own release has accepted a configuration that is up to date. To check it here
        # again would take as long as all the rest.
        if release and not {"release", "config"} <= set(result.get("up_to_date", [])):
            problems += self._mistakes(arguments, release)
        # If the pod CIDR is wrong in the configuration, the node reports it, too: once is enough.
        found = result.get("problems", [])
        if any(problem.startswith("network.podCIDR") for problem in problems):
            found = [
                problem for problem in found if not problem.startswith("pod CIDR: network.podCIDR")
            ]
        result["problems"] = [*problems, *found]
        if result["problems"] and not report_only:
            count = len(result["problems"])
            result.update(
                failed=True,
                msg=f"{'one problem' if count == 1 else f'{count} problems'} on this node: "
                + "; ".join(result["problems"]),
            )
        return result

    def _release(
        self, arguments: dict[str, Any]
    ) -> tuple[runtime_release.Tarball | None, list[str]]:
        """The tarball, and the problems with it. Adds its version and checksum to the arguments."""
        src, wheels = arguments.pop("src", None), arguments.pop("wheels", None)
        problems = []
        # A missing tarball must not hide mistakes in the configuration.
        for given in dict.fromkeys((src, None)):
            try:
                path = runtime_release.located(self._find_needle, given)
                release = runtime_release.ensure(path, wheels or "", display.display)
            except runtime_release.ReleaseError as problem:
                problems.append(f"release: {problem}")
                continue
            if given:
                problems += [
                    f"release: {difference}" for difference in release.differences(arguments)
                ]
            if src or not arguments.get("version"):  # otherwise the node already has it
                arguments.update(version=release.version, checksum=release.digest)
            return release, problems
        return None, problems

    def _mistakes(self, arguments: dict[str, Any], release: runtime_release.Tarball) -> list[str]:
        config = node_config.pruned(arguments.get("config") or {})
        try:
            return runtime_release.check_config(config, release)
        except runtime_release.ReleaseError as problem:
            return [f"release: {problem}"]
