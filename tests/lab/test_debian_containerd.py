"""site.yml on a node with Debian's containerd as its package configures it.

It looks for plugins in /usr/lib/cni, so with the defaults no pod could ever start there. The tests
follow each other on one lab, as an operator would go on with it.
"""

from __future__ import annotations

import pytest
from cri_pods import CONFIG, CRICTL, run_pod, start_debians_containerd
from lab_command import LabCommand
from leftovers import assert_nothing_left
from site_run import Run, Site

TOLD = "headcni_node_cni_bin_dirs: [/opt/cni/bin, /usr/lib/cni]"
DONE = {"headcni_node_cni_bin_dirs": ["/opt/cni/bin", "/usr/lib/cni"]}


def words(run: Run) -> str:
    """What was shown, however its lines were broken."""
    return " ".join(run.output.split())


@pytest.fixture(scope="module")
def site():
    command = LabCommand("debian-containerd")
    command("down")
    before = command.listing()
    command("up", "--nodes", "2")
    start_debians_containerd(command)
    yield Site(command)
    command("down")
    assert_nothing_left(before, command.listing())


@pytest.fixture(scope="module")
def refused(site) -> Run:
    return site(check=False)


@pytest.fixture(scope="module")
def told(site, refused) -> Run:
    """The run with the line that the refusal named."""
    return site(**DONE)


def test_the_run_stops_before_the_first_change_with_the_line_to_add(site, refused):
    assert refused.code != 0
    assert TOLD in refused.failures("node1")
    assert not [task for host, task in refused.changed if host == "node1"]
    assert not site.lab.on("node1", "ls -d /opt/headcni /etc/headcni", check=False).strip()


def test_the_other_node_is_finished_and_its_warnings_are_shown(refused):
    assert refused.counted("failed") == {"node1": 1, "node2": 0}
    assert "Warnings:" in refused.output
    assert "node2: container runtime: none runs on this node" in words(refused)


def test_with_that_line_a_pod_starts_and_the_other_node_reaches_it(site, told):
    assert set(told.counted("failed").values()) == {0}
    pod, _, address = run_pod(site.lab, "web", "sleep 1000")
    assert address.startswith("10.55.1.")
    site.lab.wait("node2", f"ping -c 1 -W 2 {address} >/dev/null")
    site.lab.on("node1", f"{CRICTL} rmp -f {pod}")


def test_check_mode_and_the_checks_alone_show_the_warnings(site, told):
    for how in (("--check",), ("--tags", "preflight")):
        assert "node2: container runtime: none runs on this node" in words(site(*how, **DONE))


def test_a_changed_configuration_that_containerd_has_not_read_is_a_warning(site, told):
    site.lab.on("node1", f"sleep 2; sed -i s,/usr/lib/cni,/opt/cni/bin, {CONFIG}")
    shown = words(site("--tags", "preflight", **DONE))
    assert f"node1: container runtime: {CONFIG} was changed after containerd was started" in shown
