"""Fixtures for the tests of all scenarios. The tests reach the nodes over SSH, without Ansible."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import testinfra
from lab_command import CHECKOUT, LabCommand
from testinfra.host import Host
from traffic import Traffic

from lab.layout import Lab, Plan


def address_of(node: str) -> str:
    """In testinfra's format. The lab closes the open connection when it is removed."""
    folder = Lab.of_this_checkout().ssh_config.parent
    return f"ssh://{node}?ssh_config={folder}/config&controlpath={folder}/testinfra-{node}"


def pytest_configure(config: pytest.Config) -> None:
    """A test that uses the fixture `host` runs on each node."""
    if "MOLECULE_SCENARIO_NAME" not in os.environ:
        raise pytest.UsageError("Molecule runs these tests: molecule verify -s NAME")
    nodes = Plan.load(Lab.of_this_checkout()).members
    config.option.hosts = ",".join(address_of(node) for node in nodes)


@cache
def machine(name: str) -> Host:
    return testinfra.get_host(address_of(name))


@pytest.fixture(scope="session")
def lab() -> LabCommand:
    virtual = Plan.load(Lab.of_this_checkout()).vms
    return LabCommand(os.environ["HEADCNI_LAB"], limit=1800 if virtual else 300)


@pytest.fixture(scope="session")
def nodes() -> dict[str, Host]:
    return {node: machine(node) for node in Plan.load(Lab.of_this_checkout()).members}


@pytest.fixture(scope="session")
def between_steps() -> Path:
    """A directory in which a step of a scenario keeps data for the next; removed with the lab."""
    return Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"])


@pytest.fixture(scope="session")
def traffic(lab: LabCommand, nodes: dict[str, Host]) -> Traffic:
    """Traffic between the existing pods, or without pods if there are none yet."""
    found = Traffic(lab, tuple(nodes))
    if all(host.file("/run/netns/pod").exists for host in nodes.values()):
        found.find_pods()
    return found


@pytest.fixture(scope="module")
def pods(lab: LabCommand, traffic: Traffic, nodes: dict[str, Host]) -> Iterator[Traffic]:
    """A pod on each node, for the tests of one file."""
    traffic.pods()
    for node in nodes:
        lab.copy(CHECKOUT / "tests/support/echo.py", node, "/run/echo.py")
    yield traffic
    for node in nodes:
        lab.on(node, "rm /run/echo.py")
    traffic.no_pods()
