"""The daemon at Headscale: on a lab, with the real one; a stub makes the errors that it won't."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from ipaddress import ip_network
from pathlib import Path
from ssl import PROTOCOL_TLS_SERVER, SSLContext
from typing import Any

import pytest
from lab_command import LabCommand
from leftovers import assert_nothing_left
from patience import until
from stub_server import StubServer, says, stub_server

from headcni.mesh import headscale as headscale_module
from headcni.mesh.approvals import ApprovalKeeper, ApprovalReport, Identity, clashes, identify
from headcni.mesh.headscale import Breaker, HeadscaleClient, HeadscaleError, Node, read_key
from headcni.mesh.localapi import LocalApi
from lab.layout import Lab
from lab.machines import leader

OWN = ("10.244.1.0/24", "fd44:0:1::/64")
SECRET = "hskey-api-0123456789ab-verysecret"


@dataclass
class Questions:
    """What was asked of Headscale, and how it ended; in the place of Metrics.headscale."""

    seen: list[tuple[str, str]] = field(default_factory=list)

    @contextmanager
    def __call__(self, operation: str) -> Iterator[None]:
        outcome = "error"
        try:
            yield
            outcome = "ok"
        finally:
            self.seen.append((operation, outcome))


@dataclass
class Tailnet:
    """The lab's Headscale, and the tailscaled of its two nodes."""

    lab: LabCommand
    tmp: Path
    url: str
    lab_key: str = field(repr=False)
    keepers: list[ApprovalKeeper] = field(default_factory=list)

    @property
    def key_file(self) -> Path:
        return self.tmp / "api-key"

    def write_key(self, key: str) -> None:
        self.key_file.touch(0o600)
        self.key_file.write_text(key)

    def api(self, machine: str) -> LocalApi:
        process = leader(Lab.named(self.lab.name), machine)
        return LocalApi(f"/proc/{process}/root/run/tailscale/tailscaled.sock")

    def client(self, timeout: float = 10.0, retries: int = 0, **how: Any) -> HeadscaleClient:
        return HeadscaleClient(self.url, str(self.key_file), timeout, retries, **how)

    def keeper(
        self,
        client: HeadscaleClient | None = None,
        own: tuple[str, ...] = OWN,
        identity: Identity | None = None,
        **how: Any,
    ) -> ApprovalKeeper:
        """node1's."""

        def found() -> Identity:
            return identity or identify(self.api("node1"))

        made = ApprovalKeeper(client or self.client(), found, map(ip_network, own), **how)
        self.keepers.append(made)
        return made

    @contextmanager
    def running(self, *args: Any, **how: Any) -> Iterator[list[ApprovalReport]]:
        reports: list[ApprovalReport] = []
        keeper = self.keeper(*args, on_report=reports.append, **how)
        keeper.start()
        try:
            until(lambda: reports)
            yield reports
        finally:
            keeper.stop()

    def ask(self, path: str, body: dict[str, object] | None = None) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.url}/api/v1/{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {self.lab_key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def node(self, name: str) -> dict[str, Any]:
        return next(one for one in self.ask("node")["nodes"] if one["name"] == name)

    def approved(self, name: str) -> set[str]:
        return set(self.node(name)["approvedRoutes"])

    def approve(self, name: str, *routes: str) -> None:
        self.ask(f"node/{self.node(name)['id']}/approve_routes", {"routes": list(routes)})

    def advertise(self, name: str, *routes: str) -> None:
        self.api(name).edit_prefs({"AdvertiseRoutes": list(routes)})
        until(lambda: set(self.node(name)["availableRoutes"]) == set(routes))

    @contextmanager
    def away(self, how: str = "systemctl stop headscale") -> Iterator[None]:
        """Without Headscale, or with one that hangs."""
        self.lab.on("control", how)
        try:
            yield
        finally:
            self.lab.on("control", "systemctl kill -s CONT headscale; systemctl start headscale")
            until(self.answers)

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """It takes connections, as the kernel does that for it, and says nothing."""
        with self.away("systemctl kill -s STOP headscale"):
            yield

    def answers(self) -> bool:
        try:
            return bool(self.ask("node"))
        except OSError:
            return False

    def reset(self) -> None:
        for keeper in self.keepers:
            keeper.stop()
        self.keepers.clear()
        self.write_key(self.lab_key + "\n")
        for name in ("node1", "node2"):
            self.advertise(name)
            self.approve(name)


@pytest.fixture(scope="module")
def joined(tmp_path_factory) -> Iterator[Tailnet]:
    lab = LabCommand("headscale")
    lab("down")
    before = lab.listing()
    try:
        lab("up", "--nodes", "2", "--playbook", "tests/support/joined.yml")
        known = lab.inventory()["lab"]["vars"]
        key = Path(known["lab_dir"], "headscale-api-key").read_text().strip()
        yield Tailnet(lab, tmp_path_factory.mktemp("key"), known["lab_headscale_url"], key)
    finally:
        lab("down")
    assert_nothing_left(before, lab.listing())


@pytest.fixture
def tailnet(joined) -> Iterator[Tailnet]:
    joined.reset()
    yield joined
    for keeper in joined.keepers:
        keeper.stop()


def test_a_node_gets_its_own_cidrs_approved_and_nothing_else(tailnet):
    tailnet.advertise("node1", *OWN, "192.168.50.0/24")
    tailnet.advertise("node2", "10.244.2.0/24")
    report = tailnet.keeper().ensure_once()
    assert (report.approved, report.restored, report.alarms, report.problem) == (OWN, (), (), "")
    assert report.condition.ok
    assert tailnet.approved("node1") == set(OWN)
    assert tailnet.approved("node2") == set()
    until(lambda: set(tailnet.node("node1")["subnetRoutes"]) == set(OWN))


def test_a_second_pass_writes_nothing(tailnet):
    questions = Questions()
    keeper = tailnet.keeper(tailnet.client(timed=questions))
    assert keeper.held_back() == "Headscale has not been asked yet"
    assert keeper.ensure_once().changed
    assert not keeper.ensure_once().changed
    assert keeper.held_back() == ""
    assert questions.seen == [("list", "ok"), ("approve", "ok"), ("list", "ok"), ("list", "ok")]


def test_what_others_had_approved_for_this_node_stays(tailnet):
    theirs = {"192.168.50.0/24", "0.0.0.0/0", "::/0"}
    tailnet.approve("node1", *theirs)
    keeper = tailnet.keeper()
    keeper.ensure_once()
    assert tailnet.approved("node1") == theirs | set(OWN)
    assert set(keeper.withdraw().withdrawn) == set(OWN)
    assert tailnet.approved("node1") == theirs


def test_only_ours_are_withdrawn_and_a_second_time_nothing(tailnet):
    tailnet.approve("node2", "10.244.2.0/24")
    keeper = tailnet.keeper()
    keeper.ensure_once()
    assert keeper.withdraw().changed
    assert (tailnet.approved("node1"), tailnet.approved("node2")) == (set(), {"10.244.2.0/24"})
    again = keeper.withdraw()
    assert (again.changed, again.problem) == (False, "")
    assert "has withdrawn" in keeper.held_back()


def test_a_running_keeper_does_not_bring_back_what_was_withdrawn(tailnet):
    tailnet.advertise("node1", *OWN)
    keeper = tailnet.keeper(interval=0.1)
    keeper.start()
    until(lambda: tailnet.approved("node1") == set(OWN))
    keeper.withdraw()
    time.sleep(1)
    assert tailnet.approved("node1") == set()


def test_routes_are_withdrawn_though_tailscaled_has_gone_first(tailnet):
    asked: list[Identity] = [identify(tailnet.api("node1"))]
    keeper = ApprovalKeeper(tailnet.client(), lambda: asked.pop(), map(ip_network, OWN))
    keeper.ensure_once()
    keeper._identity = lambda: identify(LocalApi("/run/there-is-no-such.sock"))
    assert keeper.withdraw().problem == ""
    assert tailnet.approved("node1") == set()


def test_an_approval_that_was_lost_is_restored(tailnet):
    """headscale#1655."""
    tailnet.advertise("node1", *OWN)
    with tailnet.running(interval=0.2, stale=3600.0) as reports:
        until(lambda: tailnet.approved("node1") == set(OWN))
        tailnet.approve("node1", "192.168.50.0/24")
        lost = time.monotonic()
        until(lambda: tailnet.approved("node1") == {*OWN, "192.168.50.0/24"})
        took = time.monotonic() - lost
        until(lambda: any(set(report.restored) == set(OWN) for report in reports))
    assert set(tailnet.node("node1")["subnetRoutes"]) == set(OWN)
    print(f"restored {took:.2f} s after the loss")


def test_while_all_is_well_headscale_is_asked_for_this_node_alone(tailnet):
    questions = Questions()
    tailnet.approve("node1", *OWN)
    with tailnet.running(tailnet.client(timed=questions), interval=0.05) as reports:
        until(lambda: len(reports) > 10)
    assert set(questions.seen[1:]) == {("get", "ok")}
    assert questions.seen[0] == ("list", "ok")
    assert all(report.condition.ok for report in reports)


def test_a_claim_of_another_node_is_found_in_time(tailnet):
    with tailnet.running(interval=0.1, stale=1.0) as reports:
        tailnet.approve("node2", OWN[0])
        until(lambda: reports[-1].alarms)


def test_a_node_that_joined_anew_does_not_go_by_its_former_self(tailnet):
    me, reports = [identify(tailnet.api("node2"))], []
    keeper = ApprovalKeeper(
        tailnet.client(), lambda: me[0], map(ip_network, OWN), reports.append, interval=0.1
    )
    keeper.start()
    try:
        until(lambda: len(reports) > 1)
        assert reports[-1].condition.ok
        me[0] = identify(tailnet.api("node1"))
        until(lambda: reports[-1].alarms)
        assert re.search(r"node2 \(node \d+\) has", reports[-1].condition.message)
    finally:
        keeper.stop()


@pytest.mark.parametrize("theirs", ["10.244.1.0/24", "10.244.1.128/25", "10.244.0.0/16"])
def test_a_cidr_that_another_node_has_is_refused_with_an_alarm(tailnet, theirs):
    tailnet.approve("node2", theirs)
    client = tailnet.client()
    approve, asked = client.approve, []
    client.approve = lambda node, routes: approve(node, asked.extend(routes) or routes)
    keeper = tailnet.keeper(client)
    report = keeper.ensure_once()
    assert report.approved == OWN[1:]  # of the other family, which nobody else has
    assert asked == [OWN[1]]
    assert tailnet.approved("node1") == set(OWN[1:])
    assert tailnet.approved("node2") == {theirs}
    (alarm,) = report.alarms
    assert (alarm.kind, alarm.prefix) == ("own-cidr", theirs)
    assert alarm.claimants == ("this node", "node2")
    assert f"has {theirs} approved, so this node's own {OWN[0]} is not asked for" in alarm.message
    assert alarm.message == keeper.held_back()

    tailnet.approve("node2")
    assert keeper.ensure_once().approved == OWN[:1]
    assert keeper.held_back() == ""


def test_an_exit_node_takes_nothing_from_us(tailnet):
    tailnet.approve("node2", "0.0.0.0/0", "::/0")
    report = tailnet.keeper().ensure_once()
    assert (report.approved, report.alarms) == (OWN, ())


def test_of_two_nodes_that_ask_in_the_same_moment_not_both_keep_it(tailnet):
    client = tailnet.client()
    nodes = client.nodes

    def just_before() -> list[Node]:
        found = nodes()
        client.nodes = nodes  # type: ignore[method-assign]
        tailnet.approve("node2", OWN[0])
        return found

    client.nodes = just_before  # type: ignore[method-assign]
    tailnet.approve("node1", "192.168.50.0/24")
    report = tailnet.keeper(client).ensure_once()
    assert tailnet.approved("node1") == {OWN[1], "192.168.50.0/24"}
    assert tailnet.approved("node2") == {OWN[0]}
    assert (report.approved, len(report.alarms)) == (OWN[1:], 1)


def test_what_we_serve_stays_when_another_node_claims_it_later(tailnet):
    for name in ("node1", "node2"):
        tailnet.advertise(name, *OWN)
    keeper = tailnet.keeper()
    keeper.ensure_once()
    until(lambda: set(tailnet.node("node1")["subnetRoutes"]) == set(OWN))
    tailnet.approve("node2", OWN[0])
    report = keeper.ensure_once()
    assert tailnet.approved("node1") == set(OWN)
    assert "is approved for both" in report.alarms[0].message
    assert report.condition.ok


def test_a_node_is_known_by_its_key_and_not_by_its_name(tailnet):
    stranger = Identity("nodekey:" + "1" * 64, "node1")
    report = tailnet.keeper(identity=stranger).ensure_once()
    assert "does not know this node by its key" in report.problem
    assert re.search(r"the node1 there \(node \d+\) has another key", report.problem)
    assert not report.condition.ok
    assert tailnet.approved("node1") == set()


def test_a_node_that_is_deleted_has_nothing_to_withdraw(tailnet):
    report = tailnet.keeper(identity=Identity("nodekey:" + "1" * 64, "gone")).withdraw()
    assert (report.problem, report.withdrawn) == ("", ())


def test_a_node_that_is_logged_out_has_no_identity(tailnet):
    """A tailscaled of its own, that never logged in."""
    command = (
        "rm -rf /run/fresh && mkdir /run/fresh && systemd-run -q --unit=fresh "
        "/usr/sbin/tailscaled --tun=userspace-networking --port=0 --statedir=/run/fresh "
        "--socket=/run/fresh/sock"
    )
    binary = tailnet.lab.on("node2", "command -v tailscaled").strip()
    tailnet.lab.on("node2", command.replace("/usr/sbin/tailscaled", binary))
    try:
        process = leader(Lab.named(tailnet.lab.name), "node2")
        until(lambda: Path(f"/proc/{process}/root/run/fresh/sock").exists())
        with pytest.raises(HeadscaleError, match="is not logged in"):
            identify(LocalApi(f"/proc/{process}/root/run/fresh/sock"))
    finally:
        tailnet.lab.on("node2", "systemctl stop fresh")


def test_a_wrong_key_is_told_of_and_a_new_one_counts_at_once(tailnet):
    keeper = tailnet.keeper()
    tailnet.write_key(SECRET)
    report = keeper.ensure_once()
    assert f"does not accept the API key in {tailnet.key_file}" in report.problem
    assert "Unauthorized (HTTP 401)" in report.problem
    assert not report.condition.ok
    tailnet.write_key(tailnet.lab_key)
    assert keeper.ensure_once().approved == OWN


def test_an_expired_key_is_told_of_and_the_approval_stays(tailnet):
    made = tailnet.lab.on("control", "/opt/lab/headscale/headscale apikeys create --expiration 3s")
    tailnet.write_key(made.strip().splitlines()[-1])
    keeper = tailnet.keeper()
    assert keeper.ensure_once().approved == OWN
    until(lambda: keeper.ensure_once().problem, every=0.2)
    report = keeper.ensure_once()
    assert "it may have expired" in report.problem
    assert report.condition.ok
    assert report.condition.message.startswith("approved when last seen")


def test_a_headscale_that_is_away_is_told_of_and_asked_until_it_is_back(tailnet):
    client = tailnet.client(breaker=Breaker(rest=0.2, longest=0.5))
    with tailnet.away(), tailnet.running(client, interval=0.2) as reports:
        assert f"Headscale at {tailnet.url} cannot be reached" in reports[0].problem
        assert "Connection refused" in reports[0].problem
        assert not reports[0].condition.ok
        tailnet.lab.on("control", "systemctl start headscale")
        until(lambda: reports[-1].condition.ok)
        assert tailnet.approved("node1") == set(OWN)


def test_a_headscale_that_hangs_is_not_waited_for_longer_than_the_time_out(tailnet):
    client = tailnet.client(timeout=0.5)
    with tailnet.hanging():
        began = time.monotonic()
        with pytest.raises(HeadscaleError, match=r"did not answer in 0\.5 s"):
            client.nodes()
        assert time.monotonic() - began < 10


def test_a_keeper_stops_at_once_though_headscale_hangs(tailnet, caplog):
    caplog.set_level(logging.DEBUG)
    with tailnet.hanging():
        keeper = tailnet.keeper(tailnet.client(timeout=60, retries=3))
        keeper.start()
        time.sleep(0.5)
        thread = keeper._loop._thread
        began = time.monotonic()
        keeper.stop()
        assert time.monotonic() - began < 4
        assert not thread.is_alive()
    assert "stopping" not in caplog.text
    assert tailnet.approved("node1") == set()


def test_the_breaker_opens_when_headscale_is_away_and_closes_when_it_is_back(tailnet):
    client = tailnet.client(retries=9, pauses=(0.01, 0.05), breaker=Breaker(3, rest=1.0))
    assert client.breaker.state == "closed"
    questions = Questions()
    client._timed = questions
    with tailnet.away():
        with pytest.raises(HeadscaleError, match="cannot be reached"):
            client.nodes()
        assert client.breaker.state == "open"
        assert questions.seen == [("list", "error")] * 3
        with pytest.raises(HeadscaleError, match="failed 3 times in a row") as resting:
            client.nodes()
        assert "the last time: Headscale at" in str(resting.value)
        assert len(questions.seen) == 3
        until(lambda: client.breaker.state == "half-open")
        with pytest.raises(HeadscaleError, match="cannot be reached"):
            client.nodes()  # the one question that is let through
        assert client.breaker.state == "open"
        assert len(questions.seen) == 4
    until(lambda: client.breaker.state == "half-open")
    assert len(client.nodes()) == 2
    assert client.breaker.state == "closed"


def test_headscale_explains_what_it_refuses(tailnet):
    client = tailnet.client()
    node = client.nodes()[0]
    with pytest.raises(HeadscaleError, match=r"parsing route: .*no '/'.* \(HTTP 500\)"):
        client.approve(node, ["x"])
    with pytest.raises(HeadscaleError, match=r"no longer exists.* \(HTTP 400\)"):
        client.approve(node._replace(id="999"), OWN)


# What the real one won't do on demand.


def node_json(**fields: object) -> dict[str, object]:
    known = {"id": "1", "nodeKey": "nodekey:1", "machineKey": "mkey:1", "givenName": "node1"}
    return {**known, "approvedRoutes": [], "subnetRoutes": [], "online": True, **fields}


def lists(*nodes: dict[str, object]) -> Callable[..., None]:
    return says(200, {"nodes": nodes})


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with stub_server() as made:
        yield made


@pytest.fixture
def key_file(tmp_path) -> Path:
    file = tmp_path / "api-key"
    file.touch(0o600)
    file.write_text(f"{SECRET}\n")
    return file


@pytest.fixture
def client(stub, key_file) -> HeadscaleClient:
    return HeadscaleClient(stub.url, str(key_file), 5.0, 2, pauses=(0.01, 0.02))


@pytest.mark.parametrize(
    ("status", "kind", "body", "said"),
    [
        (400, "application/json", '{"code":3,"message":"no such thing","details":[]}', "no such"),
        (
            422,
            "application/problem+json",
            '{"title":"Bad route","status":422,"detail":"it has no mask"}',
            r"Bad route: it has no mask \(HTTP 422\); see the log of Headscale",
        ),
        (
            500,
            "application/problem+json",
            '{"title":"Internal Server Error","detail":"listing","errors":[{"message":"locked"}]}',
            r"Internal Server Error: listing: locked \(HTTP 500\); see the log of Headscale",
        ),
        (401, "application/problem+json", '{"title":"Unauthorized"}', "not accept the API key"),
        (403, "text/plain", "no", "does not accept the API key"),
        (400, "text/plain", "", "it does not say why"),
        (502, "text/html", "<html>" + "x" * 10000, r"a web page \(HTTP 502\)"),
        (500, "text/plain", "a\nb\x1b[31m" + "x" * 1000, r"a b \[31mx{192}… \(HTTP 500\)"),
        (200, "text/html", "<html>hello</html>", "cannot be understood: <html>hello</html>"),
        (200, "application/json", "[]", "it is no JSON object"),
        (200, "application/json", "{}", "there is no list of nodes"),
    ],
)
def test_each_shape_of_an_error_becomes_one_line(stub, client, status, kind, body, said):
    stub.answers = [says(status, body, kind)]
    with pytest.raises(HeadscaleError, match=said) as raised:
        client.nodes()
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


def test_a_read_is_asked_again_and_a_write_is_not(stub, client):
    sick = says(503, "later", "text/plain")
    stub.answers = [sick, sick, lists(node_json())]
    (node,) = client.nodes()
    assert stub.requests == ["GET /api/v1/node"] * 3
    stub.requests.clear()
    stub.answers = [sick]
    with pytest.raises(HeadscaleError, match="later"):
        client.approve(node, OWN)
    assert stub.requests == ["POST /api/v1/node/1/approve_routes"]


def test_what_was_refused_is_not_asked_again(stub, client):
    stub.answers = [says(401, "Unauthorized", "text/plain")]
    for _ in range(10):
        with pytest.raises(HeadscaleError, match="API key"):
            client.nodes()
    assert len(stub.requests) == 10
    assert client.breaker.state == "closed"


def test_while_half_open_one_question_is_asked_at_a_time(stub, key_file):
    client = HeadscaleClient(stub.url, str(key_file), 5.0, 0, breaker=Breaker(1, rest=0.1))
    stub.answers = [says(503, "later", "text/plain")]
    with pytest.raises(HeadscaleError):
        client.nodes()
    until(lambda: client.breaker.state == "half-open")
    go = threading.Event()

    def waits(request: BaseHTTPRequestHandler) -> None:
        go.wait(5)
        lists()(request)

    stub.answers = [waits]
    probe = threading.Thread(target=client.nodes)
    probe.start()
    until(lambda: len(stub.requests) == 2)
    with pytest.raises(HeadscaleError, match="asked again just now"):
        client.nodes()
    go.set()
    probe.join(5)
    assert client.breaker.state == "closed"
    assert len(stub.requests) == 2


def test_an_answer_that_comes_byte_by_byte_has_no_more_time_than_another(stub, key_file):
    def drips(request: BaseHTTPRequestHandler) -> None:
        for byte in b"HTTP/1.0 200 OK\r\nX-Header: " + b"x" * 1000:
            request.wfile.write(bytes([byte]))
            time.sleep(0.05)

    stub.answers = [drips]
    client = HeadscaleClient(stub.url, str(key_file), 0.5, 0)
    began = time.monotonic()
    with pytest.raises(HeadscaleError, match=r"did not answer in 0\.5 s"):
        client.nodes()
    assert time.monotonic() - began < 10


def test_half_an_answer_without_a_length_is_not_taken_for_a_whole_one(stub, key_file):
    def stalls(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b'HTTP/1.0 200 OK\r\n\r\n{"nodes": []}')
        given_up.wait(10)

    given_up = threading.Event()
    stub.answers = [stalls]
    with pytest.raises(HeadscaleError, match=r"did not answer in 0\.3 s"):
        HeadscaleClient(stub.url, str(key_file), 0.3, 0).nodes()
    given_up.set()


def test_an_answer_without_end_is_not_read_to_the_end(stub, client, monkeypatch):
    monkeypatch.setattr(headscale_module, "LARGEST_ANSWER", 1 << 20)

    def pours(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
        for _ in range(1000):
            request.wfile.write(b" " * 65536)

    stub.answers = [pours]
    with pytest.raises(HeadscaleError, match="more than 1 MiB"):
        client.nodes()


def test_a_redirect_is_not_followed_with_the_key(stub, client):
    stub.answers = [says(302, "", "text/html", Location="http://elsewhere.example/")]
    with pytest.raises(HeadscaleError, match=r"it sends us to http://elsewhere\.example/"):
        client.nodes()
    assert len(stub.requests) == 1


def test_the_key_is_in_no_error_and_no_log_even_if_the_server_sends_it_back(stub, client, caplog):
    caplog.set_level(logging.DEBUG)
    echo = json.dumps({"code": 2, "message": f"bad header: Bearer {SECRET}"})
    stub.answers = [says(500, echo)]
    keeper = ApprovalKeeper(client, lambda: Identity("nodekey:1", "node1"), map(ip_network, OWN))
    report = keeper.ensure_once()
    assert "bad header: Bearer [the key]" in report.problem
    told = [str(vars(record)) for record in caplog.records]
    assert any("bad header" in line for line in told)
    assert not any("verysecret" in line for line in [*told, str(report)])


@pytest.mark.parametrize("where", ["list", "write"])
def test_a_server_older_than_our_api_is_refused_by_name(stub, client, where):
    """0.23 to 0.25 list nodes without approvals, and do not know the call."""
    node = node_json()
    if where == "list":
        del node["approvedRoutes"]
    stub.answers = [lists(node), says(404, '{"code":5,"message":"Not Found"}')]
    keeper = ApprovalKeeper(client, lambda: Identity("nodekey:1", "node1"), map(ip_network, OWN))
    assert "is too old" in (problem := keeper.ensure_once().problem)
    assert "upgrade it to 0.26 or newer" in problem
    assert len(stub.requests) == (1 if where == "list" else 2)


def test_a_node_that_0_30_no_longer_has_is_not_taken_for_an_old_headscale(stub, client):
    """It was removed between the list and the approval."""
    gone = (
        '{"title":"Not Found","detail":"setting approved routes","errors":[{"message":"no node"}]}'
    )
    stub.answers = [lists(node_json()), says(404, gone, "application/problem+json")]
    keeper = ApprovalKeeper(client, lambda: Identity("nodekey:1", "node1"), map(ip_network, OWN))
    problem = keeper.ensure_once().problem
    assert "Not Found: setting approved routes: no node (HTTP 404); see the log of Head" in problem


@pytest.mark.parametrize("status", [401, 404, 422, 500])
@pytest.mark.parametrize(
    "body",
    [
        '{"title": "Bad',
        '{"title": ' + "[" * 200_000,
        "null",
        '{"title": {"a": [1]}, "detail": 7, "errors": {"message": "x"}}',
        '{"title": "Bad", "errors": [1, null, {"message": {"a": 1}}, {}]}',
        r'{"title": "\ud800", "detail": "\udfff\u0000"}',
        "\udcff\udcfe",
        '{"title": ' + "9" * 10_000 + "}",
        json.dumps({"title": "T", "errors": [{"message": "m" * 99}] * 20_000}),
        json.dumps({"title": "t" * (4 << 20)}),
        json.dumps({"title": "a\nb", "detail": f"c\x1b[31m\r\u2028d {SECRET}"}),
        json.dumps({"title": " " * 3190 + SECRET}),
    ],
    ids=range(12),
)
def test_a_malformed_problem_is_still_one_short_line(stub, client, body, status):
    stub.answers = [says(status, body, "application/problem+json")]
    with pytest.raises(HeadscaleError, match=f"HTTP {status}") as raised:
        client.approve(Node("1", "nodekey:1", "node1", True, (), ()), OWN)
    said = str(raised.value)
    assert said.isprintable()
    assert len(said) < 500
    assert "hskey-" not in said


def test_an_answer_that_is_nested_without_end_is_not_understood(stub, client):
    stub.answers = [says(200, '{"nodes": ' + "[" * 200_000)]
    with pytest.raises(HeadscaleError, match="cannot be understood"):
        client.nodes()


def test_an_approval_that_headscale_does_not_keep_is_no_approval(stub, client):
    stub.answers = [lists(node_json()), says(200, "{}"), lists(node_json())]
    keeper = ApprovalKeeper(client, lambda: Identity("nodekey:1", "node1"), map(ip_network, OWN))
    report = keeper.ensure_once()
    assert report.approved == ()
    assert keeper.held_back() == f"Headscale did not keep the approval of {', '.join(OWN)}"


def test_a_withdrawal_that_got_no_answer_is_looked_at_again(stub, client):
    """It was done, and only the answer was lost."""
    had = node_json(approvedRoutes=[*OWN, "192.168.50.0/24"])
    stub.answers = [
        lists(had),
        says(504, "lost", "text/plain"),
        lists(node_json(approvedRoutes=["192.168.50.0/24"])),
    ]
    keeper = ApprovalKeeper(client, lambda: Identity("nodekey:1", "node1"), map(ip_network, OWN))
    report = keeper.withdraw()
    assert (report.problem, set(report.withdrawn)) == ("", set(OWN))
    assert [line.split()[0] for line in stub.requests] == ["GET", "POST", "GET"]


def test_trouble_is_logged_when_it_begins_and_ends_and_not_at_each_pass(stub, client, caplog):
    caplog.set_level(logging.INFO)
    client.breaker = Breaker(2, rest=0.3)
    keeper = ApprovalKeeper(client, lambda: Identity("nodekey:1", "node1"), map(ip_network, OWN))
    stub.answers = [says(503, "later", "text/plain")]
    keeper.ensure_once()
    for _ in range(5):
        keeper.ensure_once()
    assert [r.getMessage() for r in caplog.records].count("approval not certain") == 2
    until(lambda: client.breaker.state == "half-open")
    stub.answers = [lists(node_json(approvedRoutes=list(OWN)))]
    for _ in range(3):
        keeper.ensure_once()
    assert [r.getMessage() for r in caplog.records][-2:] == [
        "Headscale answers again",
        "all is well again",
    ]


def test_a_certificate_that_is_not_trusted_gets_no_key_and_a_trusted_one_does(
    key_file, tmp_path, monkeypatch
):
    cert, private = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj "
        f"/CN=localhost -addext subjectAltName=DNS:localhost -keyout {private} -out {cert}".split(),
        check=True,
        capture_output=True,
        timeout=30,
    )
    tls = SSLContext(PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, private)
    with stub_server(tls) as stub:
        stub.answers = [lists(node_json())]
        with pytest.raises(HeadscaleError, match=r"certificate of .* is not trusted: self.signed"):
            HeadscaleClient(stub.url, str(key_file), 5.0, 0).nodes()
        assert stub.requests == []
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        assert len(HeadscaleClient(stub.url, str(key_file), 5.0, 0).nodes()) == 1


def test_a_key_file_is_used_only_if_it_is_roots_alone(key_file):
    assert read_key(str(key_file)) == SECRET
    key_file.chmod(0o400)
    assert read_key(str(key_file)) == SECRET
    for mode in (0o640, 0o604, 0o620, 0o602):
        key_file.chmod(mode)
        with pytest.raises(HeadscaleError, match=rf"open to others .*\(mode {mode:04o}\): give it"):
            read_key(str(key_file))
    key_file.chmod(0o600)
    os.chown(key_file, 1234, 0)
    with pytest.raises(HeadscaleError, match="belongs to user 1234, not to root"):
        read_key(str(key_file))


@pytest.mark.parametrize(
    "content", ["", "\n", "two keys", "a\r\nX-Other: b", "schlüssel", "x" * 9999]
)
def test_a_key_file_with_anything_but_one_key_is_refused_unquoted(key_file, content):
    key_file.write_text(content)
    with pytest.raises(HeadscaleError, match="does not hold one key") as raised:
        read_key(str(key_file))
    assert not content.strip() or content not in str(raised.value)


def test_a_key_file_that_is_no_file_is_refused(tmp_path):
    with pytest.raises(HeadscaleError, match="cannot be read: No such file"):
        read_key(str(tmp_path / "none"))
    with pytest.raises(HeadscaleError, match="is not a regular file"):
        read_key(str(tmp_path))
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(HeadscaleError, match="is not a regular file"):
        read_key(str(tmp_path / "fifo"))


def test_a_missing_key_leaves_the_breaker_alone(stub, client, key_file):
    key_file.unlink()
    for _ in range(10):
        with pytest.raises(HeadscaleError, match="cannot be read"):
            client.nodes()
    assert client.breaker.state == "closed"
    assert stub.requests == []


def test_clashes_among_five_thousand_nodes_are_found_in_no_time():
    nodes = [
        Node(str(n), f"nodekey:{n}", f"n{n}", True, (f"10.{n >> 8}.{n & 255}.0/24",), ())
        for n in range(5000)
    ]
    began = time.monotonic()
    (clash,) = clashes(["10.3.7.128/25", "fd44::/64"], nodes)
    took = time.monotonic() - began
    assert (clash.cidr, clash.theirs, clash.node.id) == ("10.3.7.128/25", "10.3.7.0/24", "775")
    print(f"5,000 nodes: {took * 1000:.0f} ms")
    assert took < 10
