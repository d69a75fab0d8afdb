"""site.yml on a node with Debian's containerd as its package configures it.

It looks for plugins in /usr/lib/cni, so with the defaults no pod could ever start there. The tests
follow each other on one lab, as an operator would go on with it.
"""

from __future__ import annotations

import re

import pytest
from cri_pods import CONFIG, CRICTL, run_pod, start_debians_containerd
from lab_command import LabCommand
from leftovers import assert_nothing_left
from site_run import Run, Site

from lab.images import BUSYBOX

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


VERIFY = {**DONE, "headcni_verify_crictl": "/opt/lab/cri/crictl"}


def left(site) -> str:
    """Of verify.yml's pods, on the node with containerd."""
    site.lab.wait("node1", "! ls /sys/class/net | grep -v headcni | grep ^hc")
    return site.lab.on(
        "node1", f"{CRICTL} pods -q; ip netns list; ls -d /run/headcni-probe", check=False
    )


def test_verify_has_containerd_start_the_pod_that_asks_and_answers(site, told):
    found = site.verify(**VERIFY)
    assert re.search(r"node1 +containerd +ok", found.output)
    assert re.search(r"node2 +plugins +ok", found.output)
    assert "not checked: runtime: no container runtime runs on this node (node2)" in words(found)
    assert "mtu6, port, route, dns, loss, runtime, outside" in found.output
    assert "every pod reaches every other" in found.output
    assert left(site) == ""


def test_without_crictl_or_without_the_image_verify_says_that_containerd_was_not_asked(site, told):
    found = site.verify(**DONE)
    assert re.search(r"node1 +plugins +ok", found.output)
    said = "not checked: runtime: there is no crictl on this node, so containerd was not asked"
    assert said in words(found) and "headcni_verify_crictl (node1)" in words(found)
    site.lab.on("node1", f"ctr -n k8s.io images rm --sync {BUSYBOX}")
    try:
        found = site.verify(**VERIFY)
    finally:
        site.lab.on("node1", "ctr -n k8s.io images import /root/busybox.tar")
    assert f"starts from, {BUSYBOX}, is not on this node: crictl pull {BUSYBOX}" in words(found)
    assert left(site) == ""


def test_verify_is_red_in_containerds_words_if_it_cannot_start_a_pod(site, told):
    """Our own call of the plugin in /opt/cni/bin works all the same. A runtime that finds no plugin
    to take a pod down keeps it; the next run removes it."""
    site.lab.on("node1", "mv /usr/lib/cni/headcni /usr/lib/cni/off")
    try:
        found = site.verify(check=False, **VERIFY)
        assert site.verify(headcni_verify_runtime=False, **VERIFY).code == 0
    finally:
        site.lab.on("node1", "mv /usr/lib/cni/off /usr/lib/cni/headcni")
    assert found.code != 0
    said = words(found)
    assert "node1: containerd does not start pods, and says that their network is why:" in said
    assert 'failed to find plugin "headcni" in path [/usr/lib/cni]' in said
    assert "Next: headcnictl diagnose on this node, and journalctl -u containerd" in said
    assert "The next run of verify.yml tries again to remove what is left" in said
    assert left(site) != ""
    site.verify(**VERIFY)
    assert left(site) == ""


def test_beside_kubelet_containerd_starts_a_pod_for_a_moment(site, told):
    """kubelet would end it. All that counts is that a process has this name."""
    site.lab.on(
        "node1", "cp /bin/sleep /run/kubelet && systemd-run --unit=kubelet /run/kubelet 900"
    )
    try:
        found = site.verify(**VERIFY)
        config = b"clusterDNS: [10.55.2.250]\n"
        site.lab.write("node1", "/var/lib/kubelet/config.yaml", config)
        red = site.verify(check=False, headcni_verify_timeout=2, **VERIFY)
    finally:
        site.lab.on("node1", "systemctl stop kubelet; rm -rf /run/kubelet /var/lib/kubelet")
    assert re.search(r"node1 +containerd, for a moment +ok", found.output)
    assert "headcni_verify_cluster_dns (node1)" in words(found)
    assert red.code != 0
    assert "node1: cluster_dns: 10.55.2.250: timed out" in words(red)
    assert "next, for cluster_dns: kubectl -n kube-system get pods" in words(red)
    assert left(site) == ""


def test_check_mode_and_the_checks_alone_show_the_warnings(site, told):
    for how in (("--check",), ("--tags", "preflight")):
        assert "node2: container runtime: none runs on this node" in words(site(*how, **DONE))


def test_a_changed_configuration_that_containerd_has_not_read_is_a_warning(site, told):
    site.lab.on("node1", f"sleep 2; sed -i s,/usr/lib/cni,/opt/cni/bin, {CONFIG}")
    shown = words(site("--tags", "preflight", **DONE))
    assert f"node1: container runtime: {CONFIG} was changed after containerd was started" in shown
