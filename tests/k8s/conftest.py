"""A cluster on the lab, one server and one other node, and HeadCNI put on it by site.yml.

HEADCNI_CLUSTER=kubeadm makes it Kubernetes as kubeadm sets it up; otherwise it is k3s. Some tests
are for one of them alone.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from k8s_cluster import NODES, made
from lab_command import CHECKOUT

HERE = Path(__file__).parent
KIND = os.environ.get("HEADCNI_CLUSTER", "k3s")
collect_ignore = {
    "k3s": ["test_kubeadm.py"],
    "kubeadm": ["test_pod_watcher.py"],
}[KIND]


def pytest_collection_modifyitems(items):
    """Whichever test is the first waits for the lab and for site.yml."""
    for item in items:
        if item.path.parent == HERE and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def bare_cluster():
    """As it is before anybody gave its pods a network."""
    with made(f"k8s-{KIND}", kind=KIND) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def ready_before(bare_cluster):
    """How Ready each node was before it had a conflist."""
    return bare_cluster.ready_conditions()


@pytest.fixture(scope="session")
def cluster(bare_cluster, ready_before):
    bare_cluster.site()()
    for node in NODES:
        for program in ("echo.py", "pod_watcher.py"):
            bare_cluster.copy(CHECKOUT / "tests/support" / program, node, f"/root/{program}")
    bare_cluster.until_ready()
    return bare_cluster
