"""upgrade.yml and rollback.yml: rolling, with pods that talk, and what runs is what counts."""

from __future__ import annotations

import json

import pytest
from tailscale_site import NEWER, OLDER, contents, pack, served

from lab.layout import Lab, Plan

pytestmark = pytest.mark.timeout(900)
NODES = ("node1", "node2")


@pytest.fixture(scope="module")
def first(cluster, releases) -> str:
    """The version that the nodes begin with, as their daemons say."""
    cluster.site(headcni_node_release_src=str(releases["first"]))
    return running(cluster, "node1")


def running(cluster, node: str) -> str:
    return json.loads(cluster.lab.on(node, "headcnictl status --json"))["version"]


def tailscaled(cluster, node: str, socket: str = "/run/tailscale/tailscaled.sock") -> str:
    status = json.loads(cluster.lab.on(node, f"tailscale --socket={socket} status --json"))
    return status["Version"].partition("-")[0]


def upgrade(cluster, releases, version: str, check: bool = True, **given):
    source = str(releases[version])
    return cluster.run(
        "upgrade",
        check=check,
        headcni_upgrade="runtime",
        headcni_node_release_src=source,
        headcni_node_ready_timeout=30,
        **given,
    )


def assert_free(costs) -> None:
    for pair, cost in costs.items():
        assert cost.transfer and cost.gap < 1 and cost.lost <= 2, f"{pair}: {cost}"


def test_the_runtime_is_upgraded_node_by_node_and_pods_do_not_notice(
    cluster, releases, first, capsys
):
    with cluster.traffic.flowing() as costs:
        done = upgrade(cluster, releases, "0.2.0")
    cluster.told(capsys, "runtime upgraded")
    assert_free(costs)
    assert [running(cluster, node) for node in NODES] == ["0.2.0", "0.2.0"]
    assert f"{first} -> 0.2.0" in done.output
    again = upgrade(cluster, releases, "0.2.0")
    assert again.changed == set() and "left as it was" in again.output


@pytest.mark.parametrize(
    ("playbook", "task"),
    [
        ("upgrade", "Test what the pod reaches before the change"),
        ("rollback", "Test what the pod reaches before the change"),
        ("upgrade", "Test what the pod reaches after the change"),
    ],
)
def test_a_run_that_fails_without_a_change_leaves_the_release_that_was(
    cluster, releases, first, playbook, task
):
    """It is not taken for one that was there when a run began that had been cut off."""
    given = {"headcni_upgrade": "runtime", "headcni_node_release_src": str(releases["0.2.0"])}
    done = cluster.faulty(playbook, "--limit", "node1", task=task, how="fail", **given)
    assert "FAILED, and put back" in done.output
    assert running(cluster, "node1") == "0.2.0"


def test_a_release_that_does_not_run_is_switched_back_by_itself(cluster, releases, first, capsys):
    with cluster.traffic.flowing() as costs:
        done = upgrade(cluster, releases, "0.3.0", check=False)
    cluster.told(capsys, "runtime switched back")
    assert_free(costs)
    assert done.code != 0
    assert "FAILED, and put back" in done.output and "not reached" in done.output
    assert [running(cluster, node) for node in NODES] == ["0.2.0", "0.2.0"]
    for node in NODES:
        assert "0.3.0" not in cluster.lab.on(node, "ls /opt/headcni/releases")


def test_an_upgrade_that_is_killed_is_finished_by_the_next(cluster, releases, first):
    upgrade(cluster, releases, "first")
    given = {"headcni_upgrade": "runtime", "headcni_node_release_src": str(releases["0.2.0"])}
    task = "Run the daemon, and wait until it is ready"
    cluster.faulty("upgrade", task=task, how="kill 0", **given)
    upgrade(cluster, releases, "0.2.0")
    assert [running(cluster, node) for node in NODES] == ["0.2.0", "0.2.0"]


def test_a_roll_back_goes_to_the_release_before_and_pods_do_not_notice(
    cluster, releases, first, capsys
):
    with cluster.traffic.flowing() as costs:
        cluster.run("rollback")
    cluster.told(capsys, "runtime rolled back")
    assert_free(costs)
    assert [running(cluster, node) for node in NODES] == [first, first]
    refused = cluster.run("rollback", check=False)
    assert refused.code != 0 and "has no release older than" in refused.output
    cluster.run("rollback", headcni_release="0.2.0")
    assert running(cluster, "node2") == "0.2.0"


def test_tailscale_is_changed_node_by_node_and_connections_survive(cluster, capsys):
    plan = Plan.load(Lab.named(cluster.lab.name))
    assert plan is not None
    with served(str(plan.host)) as mirror:
        for version in (OLDER, NEWER):
            mirror.offer("stable", version, pack(contents(version), version))
        for version in (OLDER, NEWER):
            with cluster.traffic.flowing() as costs:
                cluster.run(
                    "upgrade",
                    headcni_upgrade="tailscale",
                    tailscale_version=version,
                    tailscale_download_url=f"{mirror.url}/stable",
                    tailscale_checksums=mirror.checksums(),
                )
            cluster.told(capsys, f"tailscale {version}")
            assert [tailscaled(cluster, node) for node in NODES] == [version, version]
            for pair, cost in costs.items():
                assert cost.transfer and cost.gap < 20, f"{pair}: {cost}"


def test_a_tailscale_from_the_controllers_files_is_put_back_by_itself(cluster, tarballs):
    done = cluster.faulty(
        "upgrade",
        task="Test what the pod reaches after the change",
        how="fail",
        headcni_upgrade="tailscale",
        tailscale_version=OLDER,
        tailscale_method="files",
        tailscale_files_dir=str(tarballs),
    )
    assert done.code != 0
    assert "FAILED, and put back" in done.output and "not reached" in done.output
    assert [tailscaled(cluster, node) for node in NODES] == [NEWER, NEWER]
    assert OLDER not in cluster.lab.on("node1", "ls /var/tmp; tailscaled --version")
    cluster.traffic.reached()


def test_in_daemon_mode_too_site_yml_runs_the_tailscale_that_it_installs(cluster, tarballs):
    files = {"tailscale_method": "files", "tailscale_files_dir": str(tarballs)}
    given = {"headcni_mode": "daemon", **files, "tailscale_version": OLDER}
    cluster.run("switch_mode", "--limit", "node1", headcni_mode="daemon")
    foretold = cluster.site("--check", "--limit", "node1", **given)
    done = cluster.site("--limit", "node1", **given)
    assert tailscaled(cluster, "node1", "/run/headcni/tailscaled.sock") == OLDER
    assert foretold.changed == done.changed
    assert cluster.site("--limit", "node1", **given).changed == set()
    cluster.traffic.reached()
    cluster.site("--limit", "node1", **{**given, "tailscale_version": NEWER})
    cluster.run("switch_mode", "--limit", "node1", headcni_mode="host")
    assert tailscaled(cluster, "node1") == NEWER
