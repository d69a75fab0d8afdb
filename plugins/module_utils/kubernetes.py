# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Kubernetes, by its own kubectl: k3s brings one to every node."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

from ansible_collections.headcni.mesh.plugins.module_utils.shared import bearer_token

if TYPE_CHECKING:
    from ansible.module_utils.basic import AnsibleModule

K3S_KUBECTL = ("k3s", "kubectl")
K3S_KUBELET = "/var/lib/rancher/k3s/agent/kubelet.kubeconfig"
K3S_ADMIN = "/etc/rancher/k3s/k3s.yaml"
PLACES = ("/usr/local/bin", "/opt/bin")  # where k3s' installer puts it; not on every root's PATH
ANSWER_SECONDS = 30

# The options of modules that work as the cluster's administrator.
ADMIN_SPEC: dict[str, Any] = {
    "kubectl": {"type": "list", "elements": "str", "default": list(K3S_KUBECTL)},
    "kubeconfig": {"type": "path", "default": K3S_ADMIN},
}


class KubectlError(Exception):
    """kubectl could not do it; the message is what it said."""


class Kubectl:
    """One command line, one kubeconfig."""

    def __init__(self, command: Sequence[str], kubeconfig: str) -> None:
        self._command = [*command, f"--kubeconfig={kubeconfig}"]

    def run(self, *words: str, given: str = "") -> str:
        limit = f"--request-timeout={ANSWER_SECONDS}s"
        try:
            done = subprocess.run(
                [*self._command, limit, *words],
                input=given,
                capture_output=True,
                text=True,
                timeout=2 * ANSWER_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise KubectlError(f"no answer within {2 * ANSWER_SECONDS} s") from None
        if done.returncode != 0:
            # The last line tells; those before it are retries.
            raise KubectlError((done.stderr.strip().splitlines() or ["it said nothing"])[-1][:500])
        return done.stdout

    def get(self, *words: str) -> Optional[dict[str, Any]]:
        """An object; None where there is none."""
        found = self.run("get", *words, "--ignore-not-found", "-o", "json")
        return dict(json.loads(found)) if found.strip() else None

    def token(self, namespace: str, account: str, seconds: int) -> str:
        """A new token of a service account, by TokenRequest: it is stored nowhere."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        wanted = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": seconds},
        }
        said = json.loads(self.run("create", "--raw", path, "-f", "-", given=json.dumps(wanted)))
        token = str((said.get("status") or {}).get("token") or "")
        if bearer_token.read(token) is None:
            raise KubectlError(f"the answer to POST {path} has no token")
        return token

    def cluster(self) -> dict[str, Any]:
        """Where the API server is and which CA it has, as data, not as files. No secrets."""
        said = json.loads(self.run("config", "view", "--raw", "--flatten", "-o", "json"))
        by_name = {one["name"]: one for one in said.get("contexts") or []}
        context = by_name.get(said.get("current-context", ""), {}).get("context", {})
        for one in said.get("clusters") or []:
            if one["name"] == context.get("cluster"):
                return dict(one["cluster"])
        raise KubectlError("the kubeconfig's current context names no cluster")


def administrator(module: AnsibleModule) -> Kubectl:
    """With the options of ADMIN_SPEC."""
    program, *words = module.params["kubectl"]
    program = module.get_bin_path(program, required=True, opt_dirs=list(PLACES))
    return Kubectl([program, *words], module.params["kubeconfig"])


def fail(module: AnsibleModule, wrong: KubectlError) -> None:
    module.fail_json(
        msg=f"Kubernetes, asked with {module.params['kubeconfig']}, does not do it: {wrong}"
    )


def lifetime(text: str) -> int:
    """The seconds in 30m, 12h or 2160h; a ValueError that says what is expected."""
    units = {"s": 1, "m": 60, "h": 3600}
    match = re.match(r"(\d{1,9})([smh])\Z", text)
    seconds = int(match[1]) * units[match[2]] if match else 0
    if bearer_token.SHORTEST <= seconds <= bearer_token.LONGEST:
        return seconds
    raise ValueError(
        f"the lifetime of a token is {text[:40]!r}, but must be from 10m to 8760h, such as 2160h"
    )
