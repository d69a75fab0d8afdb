"""Make the nodes of a lab what a stranger's are: `python3 tests/support/stranger_nodes.py`.

HEADCNI_LAB names the lab. Its control machine must have joined the tailnet.
"""

from __future__ import annotations

import os

from advertised_lan import advertise
from cri_pods import start_debians_containerd
from debian_packages import install
from lab_command import LabCommand
from site_run import Site

# Docker sets the policy only if it is the first to turn forwarding on.
FIREWALLS = "iptables -P FORWARD DROP && ufw allow 22/tcp && ufw --force enable"


def main() -> None:
    lab = LabCommand(os.environ["HEADCNI_LAB"])
    for node in lab.inventory()["headcni"]["hosts"]:
        install(lab, node, "docker.io", "ufw")
        start_debians_containerd(lab, node)
        lab.on(node, f"systemctl restart docker && {FIREWALLS}")
    advertise(Site(lab), "control")


if __name__ == "__main__":
    main()
