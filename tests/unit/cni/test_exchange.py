"""An exchange ends when it should, whatever the server does."""

from __future__ import annotations

import http.client
import threading
import time
from contextlib import suppress
from urllib.parse import urlsplit

import pytest
from stub_server import says, stub_server

from headcni.exchange import Connection, Exchange, Exchanges

# Seen as an end of the answer, or, on a busy machine where it had not begun, as an error.
CUT_OFF = suppress(OSError, http.client.HTTPException)


@pytest.fixture
def server():
    with stub_server() as stub:
        yield stub


def drips(request):
    """A byte now and then: no time-out of a socket ever strikes."""
    request.send_response(200)
    request.end_headers()
    for _ in range(200):
        request.wfile.write(b" ")
        time.sleep(0.05)


def ask(server, exchange: Exchange) -> bytes:
    address = urlsplit(server.url)
    connection = Connection(exchange, address.hostname or "", address.port or 0, 5.0, None)
    try:
        connection.request("GET", "/")
        return connection.getresponse().read()
    finally:
        connection.close()


def test_an_answer_in_time_is_whole(server):
    server.answers = [says(200, "well")]
    with Exchanges().begin(5.0) as exchange:
        assert ask(server, exchange) == b"well"
    assert not exchange.ended.is_set() and not exchange.late


def test_a_server_that_drips_is_cut_off_when_the_time_is_up(server):
    server.answers = [drips]
    began = time.monotonic()
    with Exchanges().begin(0.3) as exchange, CUT_OFF:
        ask(server, exchange)
    assert exchange.late and exchange.ended.is_set()
    assert time.monotonic() - began < 3


def test_what_is_in_progress_can_be_ended_and_what_comes_later_goes_on(server):
    server.answers = [drips]
    exchanges = Exchanges()
    ending = threading.Timer(0.3, exchanges.end)
    ending.start()
    began = time.monotonic()
    with exchanges.begin(20.0) as exchange, CUT_OFF:
        ask(server, exchange)
    ending.join()
    assert exchange.ended.is_set() and not exchange.late
    assert time.monotonic() - began < 3
    server.answers = [says(200, "well")]
    with exchanges.begin(5.0) as later:
        assert ask(server, later) == b"well"


def test_an_end_that_comes_before_the_connection_counts_too(server):
    server.answers = [says(200, "well")]
    with Exchanges().begin() as exchange:
        exchange.end()
        with pytest.raises((OSError, http.client.HTTPException)):
            ask(server, exchange)


def test_time_does_not_strike_after_the_exchange(server):
    with Exchanges().begin(0.1) as exchange:
        pass
    time.sleep(0.3)
    assert not exchange.late
