"""Virtual machines are machines of the lab: commands and Ansible treat them as they treat nodes."""

from __future__ import annotations

import re

import pytest

from lab.layout import Lab, Plan

VMS = {"vm1": "12", "vm2": "13"}


@pytest.mark.parametrize("vm", VMS)
def test_a_virtual_machine_runs_a_debian_with_a_kernel_of_its_own_and_nothing_has_failed(lab, vm):
    look = ". /etc/os-release; echo $VERSION_ID; systemctl is-system-running; systemd-detect-virt"
    version, state, kind = lab.on(vm, look).split()
    assert (version, state) == (VMS[vm], "running")
    assert kind == {"kvm": "kvm", "tcg": "qemu"}[Plan.load(Lab.named(lab.name)).accelerator]
    here = lab.run("uname", "-r").stdout.split()
    assert lab.on(vm, "uname -r").split() not in (here, lab.on("node1", "uname -r").split())


def test_the_table_shows_them_beside_the_nodes(lab):
    shown = lab("status").stdout
    for machine in ("control", "node1", *VMS):
        assert re.search(rf"^ +{machine} .* running ", shown, re.M), shown


def test_ansible_is_told_of_them_as_it_is_of_nodes(lab):
    known = lab.inventory()
    assert known["headcni"]["hosts"] == ["node1", *VMS]
    assert known["vm"]["hosts"] == [*VMS]
    assert {tuple(one) for one in known["_meta"]["hostvars"].values()} == {
        ("ansible_host", "lab_number")
    }


def test_a_pulled_cable_is_seen_by_the_card_and_a_healed_one_carries_again(lab):
    """The machine itself watches, because nobody can reach it during that time."""
    watch = "while sleep 0.5; do cat /sys/class/net/eth0/carrier; done > /run/carrier"
    lab.on("vm1", f"systemd-run --quiet --unit=watch sh -c '{watch}'")
    lab("cut", "vm1")
    try:
        lost = lab.on("node1", f"ping -c 5 -W 2 {address(lab, 'vm1')}", check=False)
        assert " 0 received" in lost
    finally:
        lab("heal", "vm1")
    lab.on("node1", f"ping -c 1 -w 60 {address(lab, 'vm1')}")
    seen = lab.on("vm1", "systemctl stop watch; cat /run/carrier; rm /run/carrier").split()
    assert set(seen) == {"0", "1"} and seen[-1] == "1"


def test_a_slowed_cable_is_slow_both_ways(lab):
    lab("slow", "vm1", "--rate", "1mbit")
    try:
        for way in ("", "-R"):
            lab.on("node1", "iperf3 -s -1 -D")
            lab.wait("node1", "ss -ltn | grep -q :5201")
            sent = lab.on(
                "vm1", f"iperf3 {way} -t 5 -f k -c {address(lab, 'node1')} | grep receiver"
            )
            rate = re.search(r"([\d.]+) Kbits/sec", sent)
            assert rate and float(rate[1]) < 1300, sent
    finally:
        lab("heal", "vm1")


def address(lab, machine: str) -> str:
    return str(lab.inventory()["_meta"]["hostvars"][machine]["ansible_host"])


def test_fewer_virtual_machines_than_there_are_is_refused(lab):
    refused = lab("up", "--nodes", "1", check=False)
    assert refused.returncode == 1
    assert "the lab has 2 virtual machines: `make down` before VMS=0" in refused.stderr
