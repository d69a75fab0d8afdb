# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Write the report of the mesh on the controller."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible_collections.headcni.mesh.plugins.plugin_utils.report import folder, gathered
from ansible_collections.headcni.mesh.plugins.plugin_utils.report.page import page
from ansible_collections.headcni.mesh.plugins.plugin_utils.report.problems import BAD
from ansible_collections.headcni.mesh.plugins.plugin_utils.report.record import ReportError
from ansible_collections.headcni.mesh.plugins.plugin_utils.report.view import view


class ActionModule(ActionBase):
    """Runs once for all hosts, whose answers are in their variables."""

    _supports_check_mode = True
    _requires_connection = False

    def run(
        self, tmp: str | None = None, task_vars: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        _unused, given = self.validate_argument_spec(
            argument_spec={
                "dir": {"type": "path", "required": True},
                "hosts": {"type": "list", "elements": "str", "required": True},
                "headscale": {"type": "dict", "default": {}},
                "title": {"type": "str", "default": "HeadCNI mesh"},
                "keep": {"type": "int", "default": 30},
            }
        )
        if given["keep"] < 1:
            raise AnsibleActionFail(
                f"keep (headcni_report_keep): {given['keep']}, expected 1 or more"
            )
        hostvars: Mapping[str, Any] = (task_vars or {})["hostvars"]
        target = Path(given["dir"]).expanduser()
        try:
            report = gathered.report(
                given["hosts"],
                {host: hostvars[host].get("headcni_survey") for host in given["hosts"]},
                {host: hostvars[host].get("headcni_site") for host in given["hosts"]},
                given["headscale"],
                time.time(),
            )
            earlier, not_compared = folder.earlier(target, report)
            shown = view(report, given["title"], earlier, not_compared)
            content = page(shown)
            if not self._task.check_mode:
                folder.save(target, report, content, given["keep"])
        except ReportError as problem:
            raise AnsibleActionFail(f"no report can be made: {problem}") from None
        except OSError as problem:
            raise AnsibleActionFail(
                f"dir (headcni_report_dir): {problem.filename or target}: {problem.strerror}"
            ) from None
        bad = sum(problem.level == BAD for problem in shown.problems)
        return {
            **result,
            "changed": True,
            "page": str(target.absolute() / folder.PAGE),
            "data": str(target.absolute() / folder.data_name(report)),
            "bytes": len(content.encode()),
            "problems": bad,
            "warnings_found": len(shown.problems) - bad + shown.more_problems,
        }
