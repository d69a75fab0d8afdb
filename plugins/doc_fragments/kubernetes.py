# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  kubectl:
    description:
      - The command that runs kubectl. Without a path it is also searched where k3s puts it.
    type: list
    elements: str
    default: [k3s, kubectl]
  kubeconfig:
    description: The administrator's kubeconfig.
    type: path
    default: /etc/rancher/k3s/k3s.yaml
"""
