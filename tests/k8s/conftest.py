"""A k3s cluster on the lab, one server, one agent, and HeadCNI put on it by site.yml."""

from __future__ import annotations

from pathlib import Path

import pytest
from k8s_cluster import NODES, made
from lab_command import CHECKOUT

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Whichever test is the first waits for the lab and for site.yml."""
    for item in items:
        if item.path.parent == HERE and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def bare_cluster():
    """k3s as it is before anybody gave its pods a network."""
    with made("k8s") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def ready_before(bare_cluster):
    """How Ready each node was before it had a conflist."""
    found = {}
    for node in NODES:
        conditions = bare_cluster.get("node", node)["status"]["conditions"]
        (found[node],) = [one for one in conditions if one["type"] == "Ready"]
    return found


@pytest.fixture(scope="session")
def cluster(bare_cluster, ready_before):
    bare_cluster.site()()
    for node in NODES:
        for program in ("echo.py", "pod_watcher.py"):
            bare_cluster.copy(CHECKOUT / "tests/support" / program, node, f"/root/{program}")
    bare_cluster.until_ready()
    return bare_cluster
