"""Calls through the daemon: the same answers, none lost while it comes and goes, nothing leaked."""

from __future__ import annotations

import array
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from cni_node import EMPTY, sh

from headcni.daemon.cni.calls import THREADS
from headcni.daemon.cni.listener import READ_SECONDS
from headcni.shim import HEADER, LIMIT, MAGIC

CALLS, AT_ONCE = 200, 16
ALONE = {"HEADCNI_SOCKET": ""}  # the shim asks nobody


def begin(node, conf, pod, verb="ADD", **how):
    """A call that is under way, as a runtime starts it."""
    call = subprocess.Popen(
        node.command(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=node.environment(verb, pod, **how),
    )
    call.stdin.write(json.dumps(conf))
    call.stdin.close()
    call.stdin = None
    return call


class Held:
    """A plugin to delegate to, whose ADD takes as long as we like. It notes what it does."""

    def __init__(self, folder):
        folder.mkdir()
        self.folder, self.hold, self.notes = folder, folder / "hold", folder / "notes"
        self.notes.touch()
        self.hold.touch()
        (folder / "held").write_text(
            f"#!/bin/sh\ncat > /dev/null\n"
            f'echo "$CNI_COMMAND begins" >> {self.notes}\n'
            f'if [ "$CNI_COMMAND" = ADD ]; then\n'
            f"  while [ -e {self.hold} ]; do sleep 0.02; done\n"
            f'  echo \'{{"cniVersion": "1.1.0", "ips": [{{"address": "10.55.1.9/24"}}]}}\'\n'
            f'fi\necho "$CNI_COMMAND ends" >> {self.notes}\n'
        )
        (folder / "held").chmod(0o755)

    def noted(self):
        return self.notes.read_text().splitlines()

    def release(self):
        self.hold.unlink()


@pytest.fixture
def held(node):
    made = Held(node.tmp / "held")
    made.conf = node.conf(delegate={"type": "held"}, ipam=None)
    made.path = {"CNI_PATH": str(made.folder)}
    yield made
    made.hold.unlink(missing_ok=True)


def open_files(server):
    return len(os.listdir(f"/proc/{server.pid}/fd"))


def keeps_no_files(node, server, before):
    """A thread that was started since has its netlink; what leaks, leaks more."""
    node.wait_for(lambda: open_files(server) <= before + 2)


class TestServed:
    def test_every_verb_goes_to_the_daemon(self, node, server, datapath):
        pod, conf = node.pod(), node.dual(datapath=datapath)
        result = node.add(conf, pod).ok
        node.check(conf, pod, result).succeeds()
        node.call("STATUS", conf).succeeds()
        valid = [{"containerID": pod.name, "ifname": "eth0"}]
        node.call("GC", {**conf, "cni.dev/valid-attachments": valid}).succeeds()
        node.check(conf, pod, result).succeeds()
        node.delete(conf, pod).succeeds()
        assert node.is_empty()
        assert node.has_served(ADD=1, CHECK=2, STATUS=1, GC=1, DEL=1)

    def test_it_does_on_every_python(self, node, python):
        node.python = python
        node.start()
        pod, conf = node.pod(), node.conf()
        result = node.add(conf, pod).ok
        node.check(conf, pod, result).succeeds()
        node.delete(conf, pod).succeeds()
        assert node.is_empty()
        assert node.has_served(ADD=1, CHECK=1, DEL=1)

    def test_version_needs_no_daemon(self, node, server):
        server.send_signal(signal.SIGSTOP)
        assert "1.1.0" in node.call("VERSION", '{"cniVersion": "1.1.0"}').ok["supportedVersions"]

    def test_the_shim_imports_next_to_nothing(self, node, server):
        def imported(*argv, **env):
            done = subprocess.run(
                [*node.command()[:-2], "-X", "importtime", "-IS", *argv],
                input=json.dumps(node.conf()),
                env=env,
                text=True,
                capture_output=True,
                timeout=30,
                check=True,
            )
            return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}

        shim = imported(str(node.plugins / "headcni"), **node.environment("STATUS"))
        assert shim - imported("-c", "pass") == {"headcni", "headcni.shim", "_socket"}

    def test_a_containers_calls_are_run_one_after_the_other(self, node, server, held):
        pod = node.pod()
        call = begin(node, held.conf, pod, **held.path)
        node.wait_for(lambda: held.noted() == ["ADD begins"])
        late = begin(node, held.conf, pod, "DEL", **held.path)
        time.sleep(0.3)
        assert held.noted() == ["ADD begins"]
        held.release()
        assert call.wait(20) == 0, call.communicate()
        assert late.wait(20) == 0, late.communicate()
        assert held.noted() == ["ADD begins", "ADD ends", "DEL begins", "DEL ends"]
        assert node.is_empty()

    def test_a_headcni_that_headcni_calls_always_finds_a_thread(self, node, server):
        inner = {"type": "headcni", "ipMasq": False}
        conf = node.conf(delegate=inner, delegate_timeout=20)
        pods = [node.pod() for _ in range(THREADS + 4)]
        with ThreadPoolExecutor(len(pods)) as pool:
            answers = list(pool.map(lambda pod: node.add(conf, pod), pods))
        assert len({answer.address for answer in answers}) == len(pods)
        assert node.has_served(ADD=2 * len(pods))
        with ThreadPoolExecutor(len(pods)) as pool:
            list(pool.map(lambda pod: node.delete(conf, pod).succeeds(), pods))
        assert node.is_empty()

    def test_a_hook_that_fails_does_not_fail_the_pod(self, node):
        node.start(
            code="import headcni.daemon.cni.server as server\n"
            "def hook(*what): raise RuntimeError('no metrics today')\n"
            "server._shown = hook\n"
            "server.main()\n"
        )
        pod, conf = node.pod(), node.conf()
        result = node.add(conf, pod).ok
        node.check(conf, pod, result).succeeds()
        node.wait_for(lambda: node.said("RuntimeError: no metrics today") == 2)
        assert node.said("Traceback") == 0

    def test_phases_say_where_an_add_spent_its_time_and_where_it_failed(self, node, server):
        node.add(node.conf()).succeeds()
        assert node.add(node.conf(), args="IP=10.55.1.2").error["code"] == 103
        assert node.has_served(ADD=2)
        good, bad = (
            [word.partition("=")[0] for word in line.split()[5:]]
            for line in node.log.read_text().splitlines()
            if "verb=ADD" in line
        )
        assert good == ["wait", "config", "ipam", "link", "firewall", "dns", "store"]
        assert bad == ["wait", "config", "ipam"]

    def test_it_holds_nothing_open_between_calls(self, node, server):
        pod, conf = node.pod(), node.conf()

        def round_trip():
            node.add(conf, pod).succeeds()
            node.delete(conf, pod).succeeds()

        round_trip()
        before = open_files(server)
        for _ in range(10):
            round_trip()
        keeps_no_files(node, server, before)

    def test_a_store_that_was_lost_is_found_again(self, node, server):
        conf, data = node.conf(), node.tmp / "data"
        node.add(conf).succeeds()
        data.rename(node.tmp / "away")
        data.write_text("a file where a directory should be")
        assert node.call("STATUS", conf).error["code"] == 50
        assert node.add(conf).error["code"] == 104
        data.unlink()
        (node.tmp / "away").rename(data)
        node.call("STATUS", conf).succeeds()
        node.add(conf).succeeds()
        assert len(node.leftovers()["allocation"]) == 2
        assert node.has_served(ADD=3)


PORT = {
    "capabilities": {"portMappings": True},
    "runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]},
}
# Verb, changes to the configuration (or the whole of it), changes to the environment.
SAME = [
    ("ADD", {}, {}),
    ("ADD", {"cniVersion": "0.3.1"}, {}),
    ("ADD", {"datapath": "routed", **PORT}, {}),
    ("ADD", {"mtu": 17, "mode": "hots"}, {}),
    ("ADD", {"enable_network_policy": True}, {}),
    ("ADD", {"delegate": {"type": "held"}, "ipam": None}, {}),
    ("ADD", {"delegate": {"type": "nowhere"}, "ipam": None}, {}),
    ("ADD", {"ipam": {"type": "static", "addresses": [{"address": "10.55.1.88/24"}]}}, {}),
    ("ADD", {}, {"CNI_NETNS": "/run/netns/nowhere"}),
    ("ADD", {}, {"CNI_NETNS": "/etc/hostname"}),
    ("ADD", {}, {"CNI_IFNAME": "a/b"}),
    ("ADD", {}, {"CNI_ARGS": "K8S_POD_NAME=ü;nonsense"}),
    ("ADD", "{", {}),
    ("ADD", '{"cniVersion": "9.9.9"}', {}),
    ("ADD", "", {}),
    ("CHECK", {}, {}),
    ("DEL", {}, {}),
    ("DEL", {"mtu": "x"}, {}),
    ("GC", {}, {}),
    ("GC", {"cni.dev/valid-attachments": []}, {}),
    ("STATUS", {}, {}),
    ("STATUS", {"headscale_url": "https://headscale.example.org"}, {}),
    ("NONSENSE", {}, {}),
]


@pytest.mark.parametrize(("verb", "conf", "env"), SAME)
def test_daemon_and_shim_give_the_same_bytes(node, server, held, verb, conf, env):
    held.release()
    pod = node.pod()
    stdin = conf if isinstance(conf, str) else json.dumps(node.conf(**conf))
    path = f"{held.folder}:{node.environment(verb)['CNI_PATH']}"
    how = {"container": "one", "args": "IP=10.55.1.77", "CNI_PATH": path, **env}

    def twice(**where):
        answers = [node.raw(verb, stdin, pod, **how, **where) for _ in range(2)]
        node.delete(node.conf(), pod, container="one", CNI_PATH=path, **ALONE).succeeds()
        return answers

    by_daemon = twice()
    assert node.has_served(**{verb: 2})
    assert twice(**ALONE) == by_daemon
    assert node.has_served(**{verb: 2})


class TestWithoutIt:
    """Whatever is the matter with the daemon, the pod gets its network."""

    def test_a_socket_that_a_killed_daemon_left_does_no_harm(self, node, server):
        node.end(server, signal.SIGKILL)
        assert node.socket.exists()
        node.add(node.conf()).succeeds()
        node.start()  # which takes the socket's place
        node.add(node.conf()).succeeds()
        assert node.has_served(ADD=1)

    def test_a_daemon_that_stops_takes_its_socket_with_it(self, node, server):
        assert node.end(server) == 0
        assert not node.socket.exists()
        node.add(node.conf()).succeeds()

    def test_a_daemon_that_is_killed_at_work_has_its_call_run_by_the_shim(self, node, server):
        server.send_signal(signal.SIGSTOP)
        pod = node.pod()
        call = begin(node, node.conf(), pod)
        time.sleep(0.3)
        assert call.poll() is None
        node.end(server, signal.SIGKILL)
        out, err = call.communicate(timeout=20)
        assert call.returncode == 0, out + err
        node.check(node.conf(), pod, json.loads(out)).succeeds()

    def test_a_daemon_that_is_killed_does_not_disturb_what_it_handed_back(self, node, server, held):
        pod = node.pod()
        call = begin(node, held.conf, pod, **held.path)
        node.wait_for(lambda: held.noted() == ["ADD begins"])
        node.end(server, signal.SIGKILL)
        held.release()
        out, err = call.communicate(timeout=20)
        assert call.returncode == 0, out + err
        assert "10.55.1.9/24" in out
        assert held.noted() == ["ADD begins", "ADD ends"]
        node.delete(held.conf, pod, **held.path).succeeds()
        assert node.is_empty()

    def test_a_daemon_that_stops_answers_what_it_has_begun(self, node, server, held):
        pod, conf = node.pod(), held.conf
        begun = begin(node, conf, pod, **held.path)
        node.wait_for(lambda: held.noted() == ["ADD begins"])
        behind = begin(node, conf, pod, **held.path)  # has to wait for the first
        time.sleep(0.3)
        server.send_signal(signal.SIGTERM)
        node.wait_for(lambda: not node.socket.exists())
        other = node.pod()
        node.add(node.conf(), other).succeeds()
        held.release()
        out, _ = begun.communicate(timeout=20)
        assert begun.returncode == 0 and "10.55.1.9/24" in out
        assert behind.wait(20) == 0, behind.communicate()
        assert server.wait(20) == 0
        assert node.has_served(ADD=2)

    def test_an_add_that_nobody_waits_for_any_more_leaves_nothing(self, node, server):
        pod, conf = node.pod(), node.conf()
        node.call("STATUS", conf).succeeds()
        with node.writing():  # so that it has begun, and cannot end
            call = begin(node, conf, pod)
            time.sleep(0.5)
            assert call.poll() is None
            call.kill()
            call.wait(20)
        assert node.has_served(ADD=1, DEL=1)
        assert node.is_empty()
        assert pod.links() == {"lo"}

    def test_a_silent_daemon_is_named_and_nothing_is_done_beside_it(self, node, server):
        server.send_signal(signal.SIGSTOP)
        pod, patience = node.pod(), {"HEADCNI_DAEMON_TIMEOUT": "1"}
        error = node.add(node.conf(), pod, **patience).error
        assert error["code"] == 11
        assert "headcni-daemon did not answer within 1 s" in error["msg"]
        assert str(node.socket) in error["details"]
        assert node.call("STATUS", node.conf(), **patience).error["code"] == 50
        assert pod.links() == {"lo"}
        server.send_signal(signal.SIGCONT)
        node.add(node.conf()).succeeds()
        assert node.has_served(ADD=1)  # those whose shim has gone are not begun
        assert len(node.leftovers()["allocation"]) == 1

    def test_a_daemon_of_another_release_is_not_asked(self, node):
        node.start(
            code="import headcni.daemon.cni.server as server\n"
            "server.CniServer.__init__.__defaults__ = (\n"
            "    *server.CniServer.__init__.__defaults__[:2], '0.0.9',\n"
            "    *server.CniServer.__init__.__defaults__[3:])\n"
            "server.main()\n"
        )
        node.add(node.conf()).succeeds()
        assert node.said("it is of release") == 1
        assert node.served("ADD") == 0

    def test_a_caller_in_another_network_namespace_gets_its_network_there(self, node, server):
        elsewhere = node.pod()
        command = [elsewhere.name if word == node.netns.name else word for word in node.command()]
        pod = node.pod()
        done = subprocess.run(
            command,
            input=json.dumps(node.conf()),
            text=True,
            capture_output=True,
            env=node.environment("ADD", pod),
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        assert "headcni0" in elsewhere.links() and "headcni0" not in node.netns.links()
        assert node.said("another network namespace") == 1

    @pytest.mark.parametrize(
        ("conf", "env"),
        [
            ({"_comment": "x" * LIMIT}, {}),
            ({"delegate": {"type": "held"}, "ipam": None}, {"CNI_PATH": "held"}),
        ],
        ids=["a configuration too large for a frame", "a relative CNI_PATH"],
    )
    def test_what_cannot_be_handed_over_is_done_by_the_shim(self, node, server, held, conf, env):
        held.release()
        done = subprocess.run(
            node.command(),
            input=json.dumps(node.conf(**conf)),
            text=True,
            capture_output=True,
            env=node.environment("ADD", node.pod(), **env),
            cwd=node.tmp,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        assert node.served("ADD") == 0

    def test_a_daemon_that_can_start_no_thread_leaves_its_calls_to_their_shims(self, node):
        server = node.start(
            code="import threading, headcni.daemon.cni.server as server\n"
            "start = threading.Thread.start\n"
            "def refuse(thread):\n"
            "    if thread.name == 'cni': raise RuntimeError(\"can't start new thread\")\n"
            "    start(thread)\n"
            "threading.Thread.start = refuse\n"
            "server.main()\n"
        )
        for _ in range(2):
            node.add(node.conf()).succeeds()
        assert node.served("ADD") == 0
        assert node.end(server) == 0


class TestTheDoor:
    def test_it_is_roots_alone(self, node, server):
        assert node.socket.stat().st_mode & 0o777 == 0o600
        assert node.socket.parent.stat().st_mode & 0o777 == 0o700

    def test_another_uid_is_refused_even_where_it_can_connect(self, node, server):
        home = (node.plugins / "headcni").resolve().parent.parent
        shutil.copytree(home, node.run_dir / "release")
        sh("chmod", "-R", "a+rX", node.run_dir)
        node.socket.chmod(0o666)
        nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        at = node.command().index(node.python)
        program = ["-IS", str(node.run_dir / "release/bin/headcni")]
        done = subprocess.run(
            [*node.command()[:at], *nobody, node.python, *program],
            input=json.dumps(node.conf(data_dir="/proc/nowhere")),
            text=True,
            capture_output=True,
            env=node.environment("ADD", node.pod()),
            timeout=30,
            check=False,
        )
        assert json.loads(done.stdout)["code"] == 104, done.stdout  # it ran in its own process
        asks = "import socket, sys; s = socket.socket(1); s.connect(sys.argv[1]); print(s.recv(9))"
        heard = sh(*nobody, node.python, "-c", asks, node.socket).stdout
        assert heard == "b''\n"
        assert node.said('reason="it is not root" uid=65534') >= 1
        assert node.served("ADD") == 0

    def test_a_socket_of_somebody_else_is_not_spoken_to(self, node):
        node.socket.parent.mkdir(mode=0o777)
        node.socket.parent.chmod(0o777)
        sh("chmod", "a+rX", node.run_dir)
        listen = (
            "import socket, sys; s = socket.socket(1); s.bind(sys.argv[1]); s.listen();"
            "print('ready', flush=True); c = s.accept()[0]; print(c.recv(9), flush=True)"
        )
        nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        with subprocess.Popen(
            [*nobody, node.python, "-c", listen, str(node.socket)],
            stdout=subprocess.PIPE,
            text=True,
        ) as trap:
            try:
                assert trap.stdout.readline() == "ready\n"
                node.add(node.conf()).succeeds()
                assert trap.stdout.readline() == "b''\n"
            finally:
                trap.kill()

    @pytest.mark.parametrize(
        ("garbage", "reason"),
        [
            (b"GET / HTTP/1.1\r\n\r\n", "it begins with b'GET"),
            (b"headcni\x02" + bytes(100), "it begins with b'headcni"),
            (MAGIC + (1 << 31).to_bytes(4, "big"), "1048576 are the limit"),
            (MAGIC + (10).to_bytes(4, "big") + b"no end here", "it goes on after its 22 bytes"),
            (MAGIC + (10).to_bytes(4, "big") + b"no end her", "its environment has no end"),
            (MAGIC + (13).to_bytes(4, "big") + b"0.1.0\0x\0yz\0\0{", "b'yz' is no variable"),
            (bytes(65536), "it begins with"),
        ],
    )
    def test_garbage_harms_nobody(self, node, server, garbage, reason):
        before, began = open_files(server), time.monotonic()
        for _ in range(5):
            with node.connect() as connection:
                fds = array.array("i", [0, 1, 2])
                connection.sendmsg([garbage], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
                with suppress(ConnectionResetError):  # closed before all of it was read
                    assert connection.recv(100) == b""
        assert time.monotonic() - began < READ_SECONDS - 1
        assert node.said(reason) == 5, node.log.read_text()
        keeps_no_files(node, server, before)
        node.add(node.conf()).succeeds()
        assert node.has_served(ADD=1)

    def test_half_a_request_is_dropped_in_time_and_keeps_nobody_waiting(self, node, server):
        message = node.request("ADD", node.pod())
        node.add(node.conf()).succeeds()
        before = open_files(server)
        began = time.monotonic()
        halves = [node.connect() for _ in range(50)]
        for at, half in enumerate(halves):
            half.sendall(message[: at % len(message)])
        node.add(node.conf()).succeeds()
        assert time.monotonic() - began < READ_SECONDS - 1
        assert [half.recv(HEADER) for half in halves] == [b""] * len(halves)
        assert READ_SECONDS - 1 < time.monotonic() - began < READ_SECONDS + 3
        for half in halves:
            half.close()
        keeps_no_files(node, server, before)
        assert node.has_served(ADD=2)

    def test_a_request_may_come_in_pieces(self, node, server):
        node.add(node.conf()).succeeds()
        pod, before = node.pod(), open_files(server)
        message = node.request("ADD", pod)
        fd = os.open(pod.path, os.O_RDONLY)
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        for _ in range(3):
            with node.connect() as connection:
                for piece in (message[:5], message[5:50], message[50:]):
                    connection.sendmsg([piece], passed)  # each with a descriptor: one will do
                    time.sleep(0.05)
                answer = connection.recv(LIMIT)
            assert answer.startswith(MAGIC) and answer[HEADER] == 0
            assert json.loads(answer[HEADER + 1 :])["interfaces"][-1]["sandbox"] == pod.path
        os.close(fd)
        keeps_no_files(node, server, before)

    def test_the_namespace_that_was_handed_over_is_used_not_the_path(self, node, server):
        pod, other = node.pod(), node.pod()
        message = node.request("ADD", other)
        fd = os.open(pod.path, os.O_RDONLY)
        with node.connect() as connection:
            passed = array.array("i", [fd])
            connection.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
            answer = connection.recv(LIMIT)
        os.close(fd)
        assert json.loads(answer[HEADER + 1 :])["interfaces"][-1]["sandbox"] == other.path
        assert "eth0" in pod.links() and "eth0" not in other.links()

    def test_a_second_daemon_does_not_start_and_the_first_goes_on(self, node, server):
        argv, env = node.python_command(
            *("-m", "headcni.daemon.cni.server", "--socket", str(node.socket)),
            *("--data-dir", str(node.tmp / "second")),
        )
        second = subprocess.run(
            argv, env=env, cwd="/", text=True, capture_output=True, timeout=20, check=False
        )
        assert second.returncode == 1
        assert "another headcni-daemon is listening there" in second.stderr
        node.add(node.conf()).succeeds()
        assert node.has_served(ADD=1)


def test_a_storm_while_the_daemon_is_restarted_and_killed_fails_no_call(node):
    seed = random.SystemRandom().randrange(10**6)
    dice = random.Random(seed)
    pods = [node.pod() for _ in range(24)]
    busy = {pod.name: threading.Lock() for pod in pods}
    plans = [(dice.choice(["ADD", "ADD", "DEL"]), dice.choice(pods)) for _ in range(CALLS)]
    over, ends = threading.Event(), {signal.SIGTERM: 0, signal.SIGKILL: 0}

    def restart():
        for number in itertools.cycle(ends):
            if over.is_set() and min(ends.values()) > 0:
                return
            server = node.start()
            over.wait(dice.uniform(0.1, 1.2))
            code = node.end(server, number)
            assert code == (0 if number == signal.SIGTERM else -signal.SIGKILL), seed
            ends[number] += 1

    def call(plan):
        verb, pod = plan
        ports = [{"hostPort": 20000 + pods.index(pod), "containerPort": 80, "protocol": "tcp"}]
        conf = node.conf(capabilities={"portMappings": True}, runtimeConfig={"portMappings": ports})
        with busy[pod.name]:  # a runtime never has two calls for one container
            answer = node.call(verb, conf, pod)
        assert answer.code == 0, f"seed {seed}, {verb} {pod.name}: {answer}"

    with ThreadPoolExecutor(AT_ONCE + 1) as pool:
        restarts = pool.submit(restart)
        try:
            list(pool.map(call, plans))
        finally:
            over.set()
        restarts.result()

    by_daemon = node.served("ADD") + node.served("DEL")
    print(f"seed {seed}: {by_daemon} of {CALLS} calls by the daemon, ended {ends}")
    assert 0 < by_daemon < CALLS, "it was never there, or always"
    held = [row[0] for row in node.leftovers()["allocation"]]
    assert len(held) == len(set(held)) <= len(pods)
    assert node.call("GC", node.conf(**{"cni.dev/valid-attachments": []})).code == 0
    assert node.leftovers() == EMPTY, f"seed {seed}"
    assert all(pod.links() == {"lo"} for pod in pods)


def ipam_conf(node, **ipam):
    section = {"type": "headcni-ipam", "subnet": "10.55.9.0/24", "dataDir": str(node.tmp / "ipam")}
    return {"cniVersion": "1.0.0", "name": "pods", "ipam": {**section, **ipam}}


def test_the_ipam_plugin_is_served_too_and_answers_the_same_as_alone(node, server):
    pod = node.pod()
    there = node.add(ipam_conf(node), pod, plugin="headcni-ipam").ok
    assert node.has_served(**{"IPAM-ADD": 1})
    assert node.add(ipam_conf(node), pod, plugin="headcni-ipam", **ALONE).ok == there
    node.delete(ipam_conf(node), pod, plugin="headcni-ipam").succeeds()
    assert node.has_served(**{"IPAM-ADD": 1, "IPAM-DEL": 1})
    wrong = ipam_conf(node, subnet="10.55.9.0/99")
    theirs = node.add(wrong, pod, plugin="headcni-ipam").error
    assert theirs == node.add(wrong, pod, plugin="headcni-ipam", **ALONE).error


def test_a_chain_of_the_daemons_may_ask_the_daemons_ipam(node, server):
    """A Go bridge within a chain of ours: its ipam call comes while the outer one is at work."""
    inner = {"type": "bridge", "bridge": "inner0", "ipam": ipam_conf(node)["ipam"]}
    conf = node.conf(delegate={**inner, "isGateway": True})
    pod = node.pod()
    assert node.add(conf, pod).address.startswith("10.55.9.")
    assert node.has_served(**{"IPAM-ADD": 1, "ADD": 1})
    node.delete(conf, pod).succeeds()


def test_an_ipam_store_that_is_named_from_where_the_caller_stands_is_the_callers_business(
    node, server
):
    pod = node.pod()
    node.add(ipam_conf(node, dataDir="ipam"), pod, plugin="headcni-ipam")
    assert node.said("its dataDir means something only to its caller") == 1
    assert node.served("IPAM-ADD") == 0
    shutil.rmtree("ipam", ignore_errors=True)


def test_loopback_is_served_too_and_answers_the_same_as_alone(node, server):
    pod, conf = node.pod(), {"cniVersion": "1.0.0", "name": "lo", "type": "loopback"}
    pod.ip("link set lo down")
    there = node.add(conf, pod, plugin="loopback").ok
    assert pod.addresses("lo") == {"127.0.0.1/8", "::1/128"}
    assert node.add(conf, pod, plugin="loopback", **ALONE).ok == there
    node.delete(conf, pod, plugin="loopback").succeeds()
    assert node.has_served(**{"LOOPBACK-ADD": 1, "LOOPBACK-DEL": 1})
    wrong = {**conf, "cniVersion": "9.9.9"}
    theirs = node.add(wrong, pod, plugin="loopback").error
    assert theirs == node.add(wrong, pod, plugin="loopback", **ALONE).error
