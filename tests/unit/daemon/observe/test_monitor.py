"""The monitor over real HTTP: what it says, and that nobody can wear it out."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import Mock

import pytest

from headcni.daemon.observe import monitor as module
from headcni.daemon.observe.metrics import Metrics
from headcni.daemon.observe.monitor import BUSY, Monitor
from headcni.errors import IO_FAILURE, CniError


@contextmanager
def running(**options: Any) -> Iterator[Monitor]:
    options.setdefault("ready", {})
    made = Monitor(Metrics("1.2.3"), port=0, **options)
    made.start()
    try:
        yield made
    finally:
        made.stop()


class Reply:
    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status, self.headers = answer.status, answer.headers
        self.body = answer.read()

    @property
    def text(self) -> str:
        return self.body.decode()


def get(one: Monitor, path: str, method: str = "GET", **headers: str) -> Reply:
    connection = http.client.HTTPConnection(one.address, one.port, timeout=20)
    try:
        connection.request(method, path, headers=headers)
        return Reply(connection.getresponse())
    finally:
        connection.close()


def raw(one: Monitor, data: bytes, seconds: float = 15) -> bytes:
    """Send bytes, and read until the other side ends it."""
    family = socket.AF_INET6 if ":" in one.address else socket.AF_INET
    with socket.socket(family) as client:
        client.settimeout(seconds)
        client.connect((one.address, one.port))
        found = b""
        try:
            client.sendall(data)
            while part := client.recv(4096):
                found += part
        except ConnectionError:
            pass
        return found


def test_health_is_ok_while_it_answers():
    with running() as one:
        answer = get(one, "/healthz")
        assert (answer.status, answer.text) == (200, "healthy\n")
        assert get(one, "/healthz", Accept="application/json").text.startswith("{")


def test_a_part_that_died_is_named_by_health():
    with running(alive={"reconciler": lambda: "has not run for 95 s"}) as one:
        answer = get(one, "/healthz")
        assert answer.status == 503
        assert answer.text == "not healthy\n  reconciler: has not run for 95 s\n"


def test_ready_names_each_condition():
    state = {"reason": "not logged in"}
    ready = {"cni socket": lambda: "", "tailscale": lambda: state["reason"]}
    with running(ready=ready) as one:
        answer = get(one, "/ready")
        assert answer.status == 503
        assert answer.text == "not ready\n  cni socket: ok\n  tailscale: not logged in\n"
        seen = json.loads(get(one, "/ready?format=json").text)
        assert seen == {
            "ready": False,
            "conditions": [
                {"name": "cni socket", "ok": True, "reason": ""},
                {"name": "tailscale", "ok": False, "reason": "not logged in"},
            ],
        }
        state["reason"] = ""
        assert get(one, "/ready").status == 200
        assert json.loads(get(one, "/ready", Accept="application/json").text)["ready"] is True


def test_a_condition_that_cannot_be_asked_about_does_not_hold():
    def fails() -> str:
        raise OSError("no socket")

    with running(ready={"tailscale": fails}) as one:
        answer = get(one, "/ready")
        assert answer.status == 503
        assert "tailscale: OSError: no socket" in answer.text


def test_metrics_are_served_where_the_operator_wants_them():
    with running(path="/numbers") as one:
        answer = get(one, "/numbers")
        assert answer.status == 200
        assert "headcni_build_info" in answer.text
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        assert get(one, "/metrics").status == 404


def test_profiles_are_off_unless_asked_for():
    with running() as one:
        for name in ("", "profile", "heap", "threads"):
            answer = get(one, f"/debug/pprof/{name}")
            assert answer.status == 404
            assert "/debug" not in answer.text.partition("only")[2]


def test_profiles_where_asked_for():
    with running(serve_pprof=True) as one:
        assert "heap" in get(one, "/debug/pprof/").text
        assert "MainThread" in get(one, "/debug/pprof/threads").text
        for name in ("profile", "heap"):
            answer = get(one, f"/debug/pprof/{name}?seconds=0.2")
            assert answer.status == 200
            assert b"headcni-daemon" in gzip.decompress(answer.body)


@pytest.mark.parametrize("seconds", ["61", "0", "-1", "x", "nan", "1e9"])
def test_a_profile_of_no_length_or_too_long_is_refused_at_once(seconds):
    with running(serve_pprof=True) as one:
        answer = get(one, f"/debug/pprof/profile?seconds={seconds}")
        assert answer.status == 400
        assert "expected" in answer.text


def test_a_second_profile_at_the_same_time_is_told_to_wait():
    with running(serve_pprof=True) as one:
        path = "/debug/pprof/profile?seconds=1.5"
        first = threading.Thread(target=get, args=(one, path))
        first.start()
        time.sleep(0.5)
        assert get(one, "/debug/pprof/profile?seconds=0.1").status == 429
        assert get(one, "/healthz").status == 200
        first.join(10)


def test_head_has_the_headers_alone_and_other_methods_are_refused():
    with running() as one:
        answer = get(one, "/metrics", method="HEAD")
        assert (answer.status, answer.body) == (200, b"")
        assert int(answer.headers["Content-Length"]) > 100
        assert get(one, "/metrics", method="POST").status == 501
        assert get(one, "/nothing").status == 404


def test_an_ipv6_address_will_do():
    with running(address="::1") as one:
        assert get(one, "/healthz").status == 200
        assert one.where == f"[::1]:{one.port}"


def test_an_address_that_is_taken_is_an_error_that_names_it():
    with running() as one:
        other = Monitor(Metrics(), {}, port=one.port)
        with pytest.raises(CniError) as raised:
            other.start()
        assert raised.value.code == IO_FAILURE
        assert f"127.0.0.1:{one.port}" in str(raised.value)
        assert "monitoring.port" in str(raised.value)
        other.stop()


def test_stopping_frees_the_port_and_another_may_have_it():
    with running() as one:
        port = one.port
    assert not [t for t in threading.enumerate() if t.name == "monitor"]
    with pytest.raises(ConnectionRefusedError):
        raw(one, b"GET /healthz HTTP/1.0\r\n\r\n")
    again = Monitor(Metrics(), {}, port=port)
    again.start()
    again.stop()
    again.stop()


def test_stopping_does_not_wait_for_a_profile():
    with running(serve_pprof=True) as one:
        asker = threading.Thread(target=get, args=(one, "/debug/pprof/profile?seconds=50"))
        asker.start()
        time.sleep(0.5)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    asker.join(5)
    assert not asker.is_alive()


def test_a_request_that_comes_too_slowly_is_dropped(monkeypatch):
    monkeypatch.setattr(module, "REQUEST_SECONDS", 1.0)
    with running() as one, socket.create_connection((one.address, one.port)) as client:
        client.settimeout(10)
        began = time.monotonic()
        closed = False
        while not closed and time.monotonic() - began < 8:
            try:
                client.send(b"G")
                time.sleep(0.2)
                closed = _has_ended(client)
            except ConnectionError:
                closed = True
        assert 0.5 < time.monotonic() - began < 5
        assert get(one, "/healthz").status == 200


def _has_ended(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    finally:
        client.settimeout(10)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /" + b"a" * 100_000 + b" HTTP/1.0\r\n\r\n",
        b"GET /healthz HTTP/1.0\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /healthz HTTP/1.0\r\n" + b"X: a\r\n" * 20_000 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 9,
        b"GET\r\n\r\n",
        b"",
    ],
    ids=["long path", "long header", "many headers", "tls", "no path", "nothing"],
)
def test_nonsense_gets_no_page_and_harms_nobody(request_bytes, monkeypatch):
    monkeypatch.setattr(module, "REQUEST_SECONDS", 1.0)
    with running() as one:
        assert b" 200 " not in raw(one, request_bytes)[:20]
        assert get(one, "/healthz").status == 200


def test_who_comes_beyond_the_limit_is_told_so_and_costs_no_thread():
    gate = threading.Event()
    before = set(threading.enumerate())  # other tests' servers may not have ended all of theirs
    with running(ready={"slow": lambda: "" if gate.wait(20) else "late"}) as one:
        askers = [threading.Thread(target=get, args=(one, "/ready")) for _ in range(BUSY)]
        for asker in askers:
            asker.start()
        _until(lambda: _requests(before) == BUSY)
        assert b"503 Busy" in raw(one, b"")
        assert _requests(before) == BUSY
        gate.set()
        for asker in askers:
            asker.join(10)
        _until(lambda: get(one, "/ready").status == 200)


def test_a_request_for_which_no_thread_could_be_started_takes_no_place_for_good(monkeypatch):
    with running() as one:
        with monkeypatch.context() as short:
            short.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("no thread")))
            for _ in range(BUSY):
                assert raw(one, b"") == b""
        assert get(one, "/healthz").status == 200


def _requests(before: set[threading.Thread]) -> int:
    new = set(threading.enumerate()) - before
    return len([thread for thread in new if "process_request_thread" in thread.name])


def _until(true: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_it_sleeps_while_nobody_asks():
    with running():
        before = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before < 0.02


@pytest.mark.parametrize("said", [b"", b"GET /ready HTTP/1.1\r\nHost: x\r\n"], ids=["idle", "slow"])
def test_clients_that_send_no_whole_request_keep_nobody_out(said):
    with running() as one, ExitStack() as idle:
        for _unused in range(3 * BUSY):
            client = idle.enter_context(socket.create_connection((one.address, one.port), 5))
            client.sendall(said)
        began = time.monotonic()
        assert get(one, "/healthz").status == 200
        assert get(one, "/healthz").status == 200
        assert time.monotonic() - began < 2.0


def test_clients_that_do_not_read_their_answers_keep_nobody_out():
    long = {"long": lambda: "x" * (16 << 20)}
    with running(ready=long) as one, ExitStack() as deaf:
        for _unused in range(BUSY):
            client = deaf.enter_context(socket.create_connection((one.address, one.port), 5))
            client.sendall(b"GET /ready HTTP/1.0\r\n\r\n")
        time.sleep(0.5)
        assert get(one, "/healthz").status == 200
