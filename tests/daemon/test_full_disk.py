"""A disk that takes no writes: DEL succeeds, ADD says why it cannot, nothing is given twice."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from cni_node import sh

from headcni import errors, unrecorded
from headcni.model import Owner

# One pass for each line on stdin, with a store that was opened in time.
UPKEEP = """
import sys
from headcni.daemon.firewalls import Firewalls
from headcni.datapath.host_firewall import PodTraffic
from headcni.store import Store
store = Store.in_directory(sys.argv[1])
upkeep = Firewalls(lambda: store, PodTraffic, False, 60.0, lambda *_: None)
print("ready", flush=True)
for _ in sys.stdin:
    upkeep._pass()
    print("done", flush=True)
"""


class Disk:
    """The node's data_dir on a file system of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        sh("mount", "-t", "tmpfs", "-o", "size=1m", "headcni-test", folder)

    def remove(self) -> None:
        sh("umount", "-l", self.folder, check=False)


class Full(Disk):
    reason = "full"

    def spoil(self) -> None:
        assert self.fill(), "it was full before"

    def fill(self) -> int:
        """Again, too: a store that is closed gives back the room of its log."""
        for number in itertools.count():  # a file of its own each: not a byte is left over
            try:
                with tempfile.NamedTemporaryFile(
                    dir=self.folder, prefix="ballast", delete=False
                ) as file:
                    file.write(b"\0" * 4096)
            except OSError:
                return number
        return 0

    def mend(self) -> None:
        for file in self.folder.glob("ballast*"):
            file.unlink()


class ReadOnly(Disk):
    reason = "read-only"

    def spoil(self) -> None:
        """As the kernel does after an I/O error; a remount would wait for the daemon's files."""
        sh("mount", "-o", "remount,ro", self.folder)

    def fill(self) -> int:
        return 0  # it stays read-only

    def mend(self) -> None:
        sh("mount", "-o", "remount,rw", self.folder)


@pytest.fixture(autouse=True)
def no_notes_stay(node):
    yield
    shutil.rmtree(unrecorded._folder(str(node.tmp / "data")), ignore_errors=True)
    with suppress(OSError):
        os.rmdir(unrecorded.NOTES)  # if that was the last


@pytest.fixture(params=["alone", "daemon"])
def served(request, node):
    """Whether the node has a daemon; it is started by `begin`."""
    return request.param == "daemon"


@pytest.fixture(params=[Full, ReadOnly])
def disk(request, node, served):
    if request.param is ReadOnly and served:
        pytest.skip("a file system cannot be remounted read-only while the daemon writes to it")
    made = request.param(node.tmp / "data")
    if served:
        node.start()
    yield made
    made.remove()


def with_port(conf, port):
    ports = [{"hostPort": port, "containerPort": 80, "protocol": "tcp"}]
    return {
        **conf,
        "capabilities": {"portMappings": True},
        "runtimeConfig": {"portMappings": ports},
    }


def links(node) -> set[str]:
    return {link for link in node.netns.links() if link.startswith("hc")}


def mapped(node) -> list[str]:
    return [line for line in node.nft().splitlines() if " : 10.55." in line]


def test_del_frees_the_node_while_the_disk_takes_no_writes(node, disk, datapath):
    conf, pods = node.conf(datapath=datapath), [node.pod(), node.pod()]
    for number, pod in enumerate(pods):
        node.add(with_port(conf, 8080 + number), pod).succeeds()
    disk.spoil()
    for _ in range(2):
        node.delete(with_port(conf, 8080), pods[0]).succeeds()
        node.wait_for(lambda: len(links(node)) == 1)
        assert len(mapped(node)) == 1 and "8081" in mapped(node)[0]
    assert pods[0].links() == {"lo"}
    disk.mend()
    node.delete(with_port(conf, 8081), pods[1]).succeeds()
    assert node.is_empty()


def test_the_daemon_keeps_no_deleted_store_open(node):
    """What is open stays on the disk: on a small one there would be no room for a new store."""
    disk, conf = Full(node.tmp / "data"), node.conf()
    server = node.start()
    refused = 0
    try:
        for _ in range(5):
            node.add(conf).succeeds()
            for file in (node.tmp / "data").glob("headcni.db*"):
                file.unlink()
            disk.spoil()
            refused += sum(node.add(conf).code != 0 for _ in range(5))
            disk.mend()
        assert refused
        open_files = [os.readlink(one) for one in Path(f"/proc/{server.pid}/fd").iterdir()]
        assert [one for one in open_files if "headcni.db" in one and "deleted" in one] == []
    finally:
        disk.remove()


@contextmanager
def upkeep(node):
    """Has the daemon's upkeep of the firewall done once, whenever it is called."""
    argv, env = node.python_command("-c", UPKEEP, str(node.tmp / "data"))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(argv, env=env, text=True, **pipes) as process:

        def once():
            process.stdin.write("once\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"

        try:
            assert process.stdout.readline() == "ready\n"
            yield once
        finally:
            process.kill()


def test_the_daemons_upkeep_does_not_put_back_what_del_removed(node, datapath):
    """Of the dead pod, the store still has the ports and the attachment."""
    disk = Full(node.tmp / "data")
    conf, pods = node.conf(datapath=datapath), [node.pod(), node.pod()]
    try:
        for number, pod in enumerate(pods):
            node.add(with_port(conf, 8080 + number), pod).succeeds()
        hosts = links(node)
        with upkeep(node) as once:
            disk.spoil()
            node.delete(with_port(conf, 8080), pods[0]).succeeds()
            (dead,) = hosts - links(node)
            for damage in ("list tables", "flush ruleset"):
                node.netns.run("nft", *damage.split())
                once()
                assert len(mapped(node)) == 1 and "8081" in mapped(node)[0]
                assert node.guarded() == hosts - {dead}
            disk.mend()
            once()
            assert [row[2] for row in node.leftovers()["allocation"]] == [pods[1].name]
    finally:
        disk.remove()


def test_a_note_that_cannot_be_settled_does_not_keep_dead_links(node):
    conf, pod = node.conf(), node.pod()
    node.add(conf, pod).succeeds()
    (host,) = links(node)
    index = node.netns.ip_json(f"link show {host}")[0]["ifindex"]
    node.sql("DELETE FROM attachment")
    node.sql("INSERT INTO tombstone VALUES ('pods', ?, 'eth0', ?)", pod.name, index)
    node.sql("INSERT INTO tombstone VALUES ('pods', 'noted', 'eth0', 0)")
    node.sql(
        "CREATE TRIGGER refuse BEFORE DELETE ON tombstone WHEN OLD.container_id = 'noted'"
        " BEGIN SELECT RAISE(ABORT, 'not this one'); END"
    )
    noted = Owner("pods", "noted", "eth0")
    unrecorded.note(str(node.tmp / "data"), noted, errors.CniError(errors.STORE, "full"))
    node.delete(conf, None, container="somebody-else").succeeds()
    assert links(node) == set()


def test_a_pod_without_a_namespace_can_be_deleted_while_the_disk_takes_no_writes(node, disk):
    pod, conf = node.pod(), with_port(node.conf(), 8080)
    result = node.add(conf, pod).ok
    disk.spoil()
    pod.remove()
    node.delete({**conf, "prevResult": result}, pod, CNI_NETNS="").succeeds()
    assert mapped(node) == []
    disk.mend()
    node.add(node.conf(), node.pod()).succeeds()
    assert len(links(node)) == 1


def test_an_address_whose_release_was_not_recorded_is_free_once_the_disk_is(node, disk, datapath):
    conf = node.conf(
        datapath=datapath, ipam={"type": "headcni-ipam", "subnet": "10.55.1.0/29"}
    )  # five addresses
    pods = [node.pod() for _ in range(5)]
    given = {node.add(conf, pod).address for pod in pods}
    assert len(given) == 5
    disk.spoil()
    node.delete(conf, pods[0]).succeeds()
    disk.fill()
    assert node.add(conf).error
    disk.mend()
    again = node.pod()
    assert node.add(conf, again).address in given
    in_use = [address for pod in (*pods[1:], again) for address in pod.addresses("eth0")]
    shown = [address for address in in_use if address.startswith("10.")]
    assert len(set(shown)) == 5, shown
    assert node.add(conf).error["code"] == errors.TRY_AGAIN
    for pod in (*pods, again):
        node.delete(conf, pod).succeeds()
    assert node.is_empty()


def test_a_container_that_comes_back_keeps_its_new_address(node, disk):
    """What is owed for its predecessor by the same name is settled before, and only once."""
    conf, pod = node.conf(), node.pod()
    node.add(conf, pod).succeeds()
    disk.spoil()
    node.delete(conf, pod).succeeds()
    disk.mend()
    address = node.add(conf, pod).address
    others = [node.add(conf).address for _ in range(3)]
    assert address not in others
    node.delete(conf, None, container="somebody-else").succeeds()
    assert node.add(conf).address != address
    assert f"{address}/24" in pod.addresses("eth0")
    rows = node.leftovers()["allocation"]
    assert pod.name in {row[2] for row in rows}


def test_add_and_status_name_the_disk_and_what_to_do(node, disk):
    conf = node.conf()
    node.add(conf).succeeds()
    node.call("STATUS", conf).succeeds()
    disk.spoil()
    error = node.add(conf).error
    assert error["code"] == errors.STORE
    assert disk.reason in error["details"] and str(disk.folder) in error["details"]
    disk.fill()
    error = node.call("STATUS", conf).error
    assert error["code"] == errors.NOT_AVAILABLE
    assert disk.reason in error["details"] and str(disk.folder) in error["details"]
    valid = {"cni.dev/valid-attachments": []}
    error = node.call("GC", {**conf, **valid}).error
    assert error["code"] == errors.STORE and disk.reason in error["details"]
    disk.mend()
    node.call("STATUS", conf).succeeds()
    node.call("GC", {**conf, **valid}).succeeds()
    assert node.is_empty()


def test_an_add_that_meets_a_full_disk_halfway_leaves_nothing(node, disk):
    conf = node.conf(ipam={"type": "headcni-ipam", "subnet": "10.55.1.0/30"})  # one address
    disk.spoil()
    pod = node.pod()
    assert node.add(conf, pod).error
    node.delete(conf, pod).succeeds()
    disk.mend()
    node.add(conf, pod).succeeds()


def test_the_ipam_plugin_and_a_chain_can_be_deleted_too(node, disk):
    ipam = {"type": "headcni-ipam", "subnet": "10.55.1.0/30", "dataDir": str(disk.folder)}
    chained = node.conf(ipam=None, delegate={"type": "bridge", "bridge": "cni-other", "ipam": ipam})
    pod = node.pod()
    node.add(chained, pod).succeeds()
    disk.spoil()
    node.delete(chained, pod).succeeds()
    assert pod.links() == {"lo"}
    disk.mend()
    node.add(chained, pod).succeeds()
    node.delete(chained, pod).succeeds()
    assert node.is_empty()


def test_del_frees_the_node_though_nothing_of_the_store_can_be_read(node, datapath):
    conf, pods = node.conf(datapath=datapath), [node.pod(), node.pod()]
    for number, pod in enumerate(pods):
        node.add(with_port(conf, 8080 + number), pod).succeeds()
    (node.tmp / "data").rename(node.tmp / "away")
    (node.tmp / "data").write_text("in the way")
    node.delete(conf, pods[0]).succeeds()
    assert len(links(node)) == 1
    assert len(mapped(node)) == 1 and "8081" in mapped(node)[0]
    (node.tmp / "data").unlink()
    (node.tmp / "away").rename(node.tmp / "data")
    node.delete(conf, pods[1]).succeeds()
    assert node.is_empty()


def test_del_leaves_the_ports_of_a_neighbour_whose_address_the_pod_has_claimed(node, datapath):
    conf, thief, victim = node.conf(datapath=datapath), node.pod(), node.pod()
    node.add(conf, thief).succeeds()
    claimed = node.add(with_port(conf, 8080), victim).address
    thief.ip(f"addr add {claimed}/32 dev eth0")
    (node.tmp / "data").rename(node.tmp / "away")
    (node.tmp / "data").write_text("in the way")
    node.delete(conf, thief).succeeds()
    assert len(mapped(node)) == 1


def test_the_daemon_frees_the_address_by_itself_when_there_is_space(node):
    disk = Full(node.tmp / "data")
    try:
        node.start()
        conf, pod = node.conf(), node.pod()
        node.add(conf, pod).succeeds()
        disk.spoil()
        node.delete(conf, pod).succeeds()
        node.wait_for(lambda: node.said("full"))
        disk.mend()
        assert node.is_empty()
        assert node.said("could not be recorded") == 1
    finally:
        disk.remove()


def test_del_leaves_a_store_of_a_newer_release_alone(node, served):
    conf, pod = node.conf(), node.pod()
    node.add(with_port(conf, 8080), pod).succeeds()
    node.netns.run(
        node.python,
        "-c",
        "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]);"
        "db.execute('PRAGMA user_version = 99');"
        "db.execute(\"UPDATE meta SET value = '99' WHERE key = 'oldest_reader'\"); db.commit()",
        node.tmp / "data" / "headcni.db",
    )
    before = (node.tmp / "data" / "headcni.db").read_bytes()
    if served:
        server = node.start()
        assert node.said("a newer HeadCNI has written it")
    assert node.add(conf).error["code"] == errors.STORE
    assert "newer HeadCNI" in json.dumps(node.call("STATUS", conf).error)
    node.delete(conf, pod).succeeds()
    assert links(node) == set() and mapped(node) == []
    if served:
        assert server.poll() is None
    assert (node.tmp / "data" / "headcni.db").read_bytes() == before
    assert not list((node.tmp / "data").glob("*.broken-*"))
