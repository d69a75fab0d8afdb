"""What is said of a lab that cannot be, among whatever else is wrong with this machine."""

from __future__ import annotations

import pytest

from lab import preflight
from lab.layout import Lab


@pytest.mark.parametrize(
    ("count", "cluster", "said"),
    [
        (-1, "", "VMS=-1: choose a number from 0 to 40"),
        (41, "", "VMS=41: choose a number from 0 to 40"),
        (1, "k3s", "VMS=1 and K3S=1 do not go together: the cluster is on nodes only"),
        (1, "kubeadm", "VMS=1 and KUBEADM=1 do not go together: the cluster is on nodes only"),
    ],
)
def test_virtual_machines_that_cannot_be_are_refused_by_name(count, cluster, said):
    assert said in preflight.problems(Lab.named("refused"), 1, "", cluster, count)


def test_virtual_machines_on_another_kind_of_processor_are_refused(monkeypatch):
    monkeypatch.setattr(preflight.platform, "machine", lambda: "aarch64")
    found = preflight.problems(Lab.named("refused"), 1, "", "", 2)
    assert "VMS=2: virtual machines are made for x86_64, this is aarch64" in found


def test_virtual_machines_need_more_memory_than_nodes(monkeypatch):
    monkeypatch.setattr(preflight, "_memory", lambda: 2.0)
    found = preflight.problems(Lab.named("refused"), 1, "", "", 3)
    assert "2.0 GiB of memory are free, 3 VMs need 5.1: lower VMS" in found
