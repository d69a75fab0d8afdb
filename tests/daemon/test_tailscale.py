"""tailscaled's LocalAPI: a tailscaled that nobody logged in, one that is joined to a lab's
Headscale, and a stub for what neither would say."""

from __future__ import annotations

import http.server
import json
import os
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path

import pytest
from cni_node import Namespace
from lab_command import LabCommand
from leftovers import assert_nothing_left
from patience import until

from headcni.mesh.localapi import Bus, LocalApi, Note, TailscaleError
from headcni.mesh.prefs import NodePrefs
from lab import tools
from lab.layout import Lab
from lab.machines import leader

OURS, OURS6, OTHER = (ip_network(n) for n in ("10.244.1.0/24", "fd44:0:1::/64", "10.244.9.0/24"))
THEIRS = "192.168.50.0/24"


@contextmanager
def listening(bus: Bus) -> Iterator[list[Note]]:
    notes: list[Note] = []
    thread = threading.Thread(target=_collect, args=(bus, notes), daemon=True)
    thread.start()
    try:
        yield notes
    finally:
        bus.close()
        thread.join(2)
        assert not thread.is_alive()


def _collect(bus: Bus, notes: list[Note]) -> None:
    for note in bus:
        notes.append(note)


@dataclass
class Tailscaled:
    """The real one, without a tunnel and without a network."""

    netns: Namespace
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> str:
        return str(self.folder / "tailscaled.sock")

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                *("ip", "netns", "exec", self.netns.name, str(tools.TAILSCALE.bin / "tailscaled")),
                *("--tun=userspace-networking", "--state=mem:", "--port=0"),
                *(f"--statedir={self.folder}", f"--socket={self.socket}"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until(lambda: self._answers(), 20)

    def _answers(self) -> bool:
        try:
            return LocalApi(self.socket).status().state != "NoState"
        except TailscaleError:
            return False

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)


@pytest.fixture(scope="module")
def logged_out(tmp_path_factory) -> Iterator[Tailscaled]:
    folder = tmp_path_factory.mktemp("ts")
    for one in (folder, *folder.parents[:2]):
        one.chmod(0o755)
    made = Tailscaled(Namespace.create("tailscaled"), folder)
    made.start()
    yield made
    made.kill()
    made.netns.remove()


def test_a_missing_socket_is_named(tmp_path):
    with pytest.raises(TailscaleError, match="is not there: start tailscaled") as caught:
        LocalApi(str(tmp_path / "none.sock")).status()
    assert caught.value.kind == "no-socket"


def test_a_socket_that_nobody_listens_at_is_told_apart(tmp_path):
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / "s"))
    with pytest.raises(TailscaleError, match="nobody answers") as caught:
        LocalApi(str(tmp_path / "s")).prefs()
    assert caught.value.kind == "no-answer"


def test_a_tailscaled_that_hangs_is_not_waited_for_longer_than_the_limit(tmp_path):
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / "s"))
        deaf.listen()
        began = time.monotonic()
        with pytest.raises(TailscaleError, match="did not answer in time"):
            LocalApi(str(tmp_path / "s"), timeout=0.3).status()
        assert time.monotonic() - began < 10


def test_whoever_is_not_root_may_read_but_not_write(logged_out):
    told = _as_nobody(lambda: LocalApi(logged_out.socket).status().state)
    assert told == "NeedsLogin"
    refused = _as_nobody(lambda: str(LocalApi(logged_out.socket).edit_prefs({"RouteAll": True})))
    assert refused.startswith("denied tailscaled does not allow PATCH")
    assert "run as root" in refused


def _as_nobody(ask: Callable[[], str]) -> str:
    """The answer, or the error's kind and text, from a process without privileges."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            answer = ask()
        except TailscaleError as problem:
            answer = f"{problem.kind} {problem}"
        except BaseException as problem:
            answer = repr(problem)
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    return answer


def test_a_node_that_is_not_logged_in_is_told_to_join_first(logged_out, tmp_path):
    prefs = NodePrefs(LocalApi(logged_out.socket), str(tmp_path / "prefs.json"))
    with pytest.raises(TailscaleError, match="not logged in") as caught:
        prefs.advertise([OURS])
    assert caught.value.kind == "logged-out"
    assert not (tmp_path / "prefs.json").exists()


def test_the_bus_says_what_changes_and_is_found_again_when_tailscaled_was_killed(logged_out):
    api = LocalApi(logged_out.socket)
    with listening(api.watch()) as notes:
        until(lambda: notes)
        assert {"State", "Prefs"} <= notes[0].fields
        heard = len(notes)
        api.edit_prefs({"ShieldsUp": True})
        until(lambda: any("Prefs" in note.fields for note in notes[heard:]))
        assert not any(note.problem for note in notes)
        killed = len(notes)
        logged_out.kill()
        until(lambda: notes[-1].problem)
        logged_out.start()
        until(
            lambda: any("State" in note.fields for note in notes[killed:]), 10
        )  # others may follow


def test_a_silent_bus_is_asked_for_anew(logged_out):
    with listening(LocalApi(logged_out.socket).watch(silence=0.3)) as notes:
        until(lambda: sum("State" in note.fields for note in notes) >= 3)
        assert not any(note.problem for note in notes)


def test_without_a_tailscaled_the_bus_tries_ever_more_rarely(tmp_path):
    began = time.monotonic()
    with listening(LocalApi(str(tmp_path / "none")).watch()) as notes:
        until(lambda: len(notes) >= 4)
    # The pauses are 0.1, 0.2 and 0.4 s, give or take half of each.
    assert time.monotonic() - began > 0.5 * (0.1 + 0.2 + 0.4)
    assert "is not there" in notes[0].problem


class _Stub(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        code, body = self.server.answer  # type: ignore[attr-defined]
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "stub"

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def saying(folder: Path, code: int, body: bytes) -> Iterator[LocalApi]:
    with socketserver.ThreadingUnixStreamServer(str(folder / "s"), _Stub) as server:
        server.answer = code, body  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield LocalApi(str(folder / "s"))
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("code", "body", "kind", "said"),
    [
        (200, b'{"Version": "1.20.4-t1", "BackendState": "Running"}', "too-old", "1.20.4-t1 is"),
        (200, b'{"BackendState": "Running"}', "too-old", "of unknown version"),
        (404, b"not found", "too-old", "does not know GET"),
        (500, b'{"Error": "out of order"}', "refused", "out of order (HTTP 500)"),
        (403, b"status access denied", "denied", "run as root"),
        (200, b"<html>", "refused", "cannot be understood"),
        (200, b"[]", "refused", "cannot be understood"),
    ],
)
def test_what_tailscaled_answers_wrong_is_said_in_a_sentence(tmp_path, code, body, kind, said):
    with saying(tmp_path, code, body) as api, pytest.raises(TailscaleError) as caught:
        api.status()
    assert caught.value.kind == kind
    assert said in str(caught.value)


def test_of_a_peer_is_kept_what_it_serves_and_not_its_own_addresses(tmp_path):
    peer = {
        "ID": "7",
        "PublicKey": "nodekey:00",
        "HostName": "host",
        "DNSName": "node7.mesh.lab.",
        "TailscaleIPs": ["100.64.0.7", "fd7a::7"],
        "AllowedIPs": ["100.64.0.7/32", "fd7a::7/128", "10.244.7.0/24"],
        "Online": True,
        "Expired": True,
        "CapMap": {"some": []},
    }
    before_allowed_ips = {**peer, "ID": "8", "PrimaryRoutes": ["10.244.8.0/24"]}
    del before_allowed_ips["AllowedIPs"]
    status = {
        "Version": "1.102.5",
        "BackendState": "Running",
        "Self": {**peer, "PrimaryRoutes": ["10.244.1.0/24"]},
        "Peer": {"a": peer, "b": before_allowed_ips},
    }
    with saying(tmp_path, 200, json.dumps(status).encode()) as api:
        found = api.status()
    assert found.served == ("10.244.1.0/24",)
    assert [(one.id, one.name, one.routes) for one in found.peers] == [
        ("7", "node7", ("10.244.7.0/24",)),
        ("8", "node7", ("10.244.8.0/24",)),
    ]
    assert found.peers[0].online
    assert found.peers[0].expired


# Joined to a Headscale: prefs that an operator also changes.


@pytest.fixture(scope="module")
def joined() -> Iterator[LabCommand]:
    lab = LabCommand("mesh-prefs")
    lab("down")
    before = lab.listing()
    lab("up", "--nodes", "1", "--playbook", "tests/support/joined.yml")
    yield lab
    lab("down")
    assert_nothing_left(before, lab.listing())


@pytest.fixture
def api(joined) -> Iterator[LocalApi]:
    """With nothing advertised, and both switches off."""
    process = leader(Lab.named(joined.name), "node1")
    made = LocalApi(f"/proc/{process}/root/run/tailscale/tailscaled.sock")
    made.edit_prefs({"AdvertiseRoutes": [], "RouteAll": False, "NoSNAT": False})
    return made


@pytest.fixture
def prefs(api, tmp_path) -> NodePrefs:
    return NodePrefs(api, str(tmp_path / "state" / "prefs.json"))


def advertised(api: LocalApi) -> set[str]:
    return set(api.prefs()["AdvertiseRoutes"] or ())


def test_routes_are_merged_with_the_operators_and_only_ours_are_taken_back(joined, api, prefs):
    joined.on("node1", f"tailscale set --advertise-routes={THEIRS}")
    assert prefs.advertise([OURS, OURS6]) == (f"advertise {OURS}", f"advertise {OURS6}")
    assert advertised(api) == {THEIRS, str(OURS), str(OURS6)}
    assert prefs.advertise([OURS, OURS6]) == ()
    assert prefs.withdraw([OURS, ip_network(THEIRS)]) == (f"withdraw {OURS}",)
    assert advertised(api) == {THEIRS, str(OURS6)}
    assert prefs.withdraw() == (f"withdraw {OURS6}",)
    assert advertised(api) == {THEIRS}


def test_another_pod_cidr_replaces_the_old_one(api, prefs):
    prefs.advertise([OURS])
    prefs.advertise([OTHER])
    assert advertised(api) == {str(OTHER)}


def test_a_route_that_the_operator_advertised_first_stays_theirs(joined, api, prefs):
    joined.on("node1", f"tailscale set --advertise-routes={OURS}")
    prefs.advertise([OURS, OTHER])
    prefs.withdraw()
    assert advertised(api) == {str(OURS)}


def test_a_route_that_the_operator_wiped_is_put_back_beside_theirs(joined, api, prefs):
    prefs.advertise([OURS])
    joined.on("node1", f"tailscale set --advertise-routes={THEIRS}")
    assert prefs.advertise([OURS]) == (f"advertise {OURS}",)
    assert advertised(api) == {THEIRS, str(OURS)}
    prefs.withdraw()
    assert advertised(api) == {THEIRS}


def test_what_the_operator_changes_between_our_reading_and_writing_is_not_lost(api, tmp_path):
    added = iter(["192.168.60.0/24", "192.168.61.0/24"])

    @dataclass(frozen=True)
    class Interrupted(LocalApi):
        def edit_prefs(self, values):
            new = next(added, None)
            if new is not None:
                api.edit_prefs({"AdvertiseRoutes": [*advertised(api) - {str(OURS)}, new]})
            return super().edit_prefs(values)

    NodePrefs(Interrupted(api.socket_path), str(tmp_path / "p.json")).advertise([OURS])
    assert {"192.168.61.0/24", str(OURS)} <= advertised(api)
    NodePrefs(api, str(tmp_path / "p.json")).withdraw()
    assert "192.168.61.0/24" in advertised(api)
    assert str(OURS) not in advertised(api)


def test_switches_get_their_former_values_back(api, prefs):
    changed = prefs.ensure([OURS])
    assert changed == (f"advertise {OURS}", "set RouteAll to true", "set NoSNAT to true")
    assert prefs.ensure([OURS]) == ()
    prefs.restore()
    now = api.prefs()
    assert (now["RouteAll"], now["NoSNAT"], advertised(api)) == (False, False, set())


def test_a_switch_that_was_on_already_stays_on(api, prefs):
    api.edit_prefs({"RouteAll": True})
    prefs.ensure([OURS])
    prefs.restore()
    now = api.prefs()
    assert (now["RouteAll"], now["NoSNAT"]) == (True, False)


def test_another_process_knows_what_is_ours(api, prefs, tmp_path):
    prefs.ensure([OURS])
    NodePrefs(api, str(tmp_path / "state" / "prefs.json")).restore()
    assert advertised(api) == set()
    assert not api.prefs()["NoSNAT"]
    assert list((tmp_path / "state").iterdir()) == []


def test_whoever_dies_between_note_and_deed_leaves_no_route_that_is_nobodys(api, tmp_path):
    @dataclass(frozen=True)
    class Dying(LocalApi):
        def edit_prefs(self, values):
            super().edit_prefs(values)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        NodePrefs(Dying(api.socket_path), str(tmp_path / "p.json")).advertise([OURS])
    assert advertised(api) == {str(OURS)}
    NodePrefs(api, str(tmp_path / "p.json")).withdraw()
    assert advertised(api) == set()


def test_a_spoilt_note_is_put_aside_and_nothing_is_taken_from_the_operator(api, tmp_path):
    api.edit_prefs({"AdvertiseRoutes": [THEIRS]})
    (tmp_path / "p.json").write_text("{")
    prefs = NodePrefs(api, str(tmp_path / "p.json"))
    prefs.advertise([OURS])
    prefs.withdraw()
    assert advertised(api) == {THEIRS}
    assert (tmp_path / "p.json.broken").read_text() == "{"


def test_an_unapproved_route_is_told_so(prefs):
    prefs.advertise([OURS])
    assert prefs.approved([OURS]) == {str(OURS): False}
