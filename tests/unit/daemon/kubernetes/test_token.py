"""The daemon's own token: renewed early, written whole, and never silently lost."""

from __future__ import annotations

import json
import os
import stat

import pytest
from kube_server import KubeServer, jwt

from headcni import log as logs
from headcni.daemon.kubernetes.access import Source
from headcni.daemon.kubernetes.client import KubeClient, Selector
from headcni.daemon.kubernetes.errors import DENIED, KubeError
from headcni.daemon.kubernetes.token import LONGEST_PAUSE, LOOK_SECONDS, TokenKeeper
from headcni.shared import bearer_token

NOW = 1_800_000_000.0
DAY = 86_400.0
LIFETIME = 90 * DAY


class Node:
    """A node with a token of 90 days, an API server, and a clock of their own."""

    def __init__(self, folder, monkeypatch) -> None:
        self.now = NOW
        self.server = KubeServer(folder / "server", clock=lambda: self.now)
        self.file = folder / "kubernetes-token"
        self.give(jwt(NOW, NOW + LIFETIME))
        self.source = Source(str(self.server.kubeconfig(tokenFile=str(self.file), token="")))
        self.failed = 0
        monkeypatch.setattr("headcni.daemon.kubernetes.client.time.time", lambda: self.now)
        self.restart()

    def give(self, token: str) -> None:
        """As site.yml does."""
        self.file.write_text(token)
        self.file.chmod(0o600)
        self.server.accepts.add(token)

    def restart(self) -> None:
        self.keeper = TokenKeeper(
            KubeClient(self.source, timeout=2),
            self.source,
            LIFETIME,
            path=str(self.file),
            on_failure=self._count,
            clock=lambda: self.now,
        )

    def _count(self) -> None:
        self.failed += 1

    def look_at(self, days: float) -> float:
        self.now = NOW + days * DAY
        return self.keeper.look()

    @property
    def requests(self) -> int:
        return sum(one.startswith("POST ") for one in self.server.asked)


@pytest.fixture
def node(tmp_path, monkeypatch):
    made = Node(tmp_path, monkeypatch)
    yield made
    made.server.close()


def test_a_token_is_renewed_when_a_third_of_its_life_is_over(node):
    assert node.look_at(29.9) == LOOK_SECONDS and node.requests == 0
    node.look_at(30)
    assert node.requests == 1 and node.keeper.expires == NOW + 120 * DAY
    (asked,) = node.server.token_requests
    assert asked["spec"] == {"expirationSeconds": int(LIFETIME)}
    assert node.keeper.trouble() == ""
    # It is what the next question is asked with, and it is good for another thirty days.
    node.server.accepts = {node.file.read_text()}
    assert KubeClient(node.source).pods(Selector("node1")).pods == ()
    node.look_at(59.9)
    assert node.requests == 1


def test_the_new_token_is_written_whole_and_for_root_alone(node, monkeypatch):
    before, replaced = node.file.read_text(), []
    real = os.replace

    def replace(source, target):
        assert node.file.read_text() == before  # whole until the very end
        assert stat.S_IMODE(os.stat(source).st_mode) == 0o600
        replaced.append(target)
        real(source, target)

    monkeypatch.setattr("headcni.daemon.kubernetes.token.os.replace", replace)
    node.look_at(30)
    assert replaced == [str(node.file)]
    assert stat.S_IMODE(node.file.stat().st_mode) == 0o600
    assert os.listdir(node.file.parent) == [
        name for name in os.listdir(node.file.parent) if not name.endswith(".new")
    ]


def test_after_a_restart_the_daemon_goes_on_with_the_renewed_token(node):
    node.look_at(30)
    node.restart()
    node.look_at(31)
    assert node.requests == 1 and node.keeper.expires == NOW + 120 * DAY


def test_a_server_that_grants_less_is_asked_sooner(node):
    node.server.longest_token = 3600
    node.look_at(30)
    assert node.keeper.expires == node.now + 3600
    assert node.keeper.look() == LOOK_SECONDS and node.requests == 1
    node.now += 1201
    node.keeper.look()
    assert node.requests == 2 and node.keeper.expires == node.now + 3600


def test_a_failure_is_told_and_tried_again_with_ever_longer_pauses(node, capsys):
    logs.set_up()
    node.server.answer_with = (500, {}, b"{}")
    waits = []
    for _ in range(12):
        node.look_at(30) if not waits else node.keeper.look()
        waits.append(node.keeper._retry_at - node.now)
        node.now = node.keeper._retry_at
    assert LOOK_SECONDS * 0.8 <= waits[0] <= LOOK_SECONDS * 1.2
    assert waits[-1] <= LONGEST_PAUSE * 1.2 and waits[6] > 10 * waits[0]
    assert node.failed == node.requests == 12
    said = node.keeper.trouble()
    assert "expires on 2027-04-15" in said and "was not renewed" in said and "HTTP 500" in said
    logged = capsys.readouterr().err
    assert logged.count("was not renewed") == 1 and node.file.read_text() not in logged
    node.server.answer_with = None
    node.keeper.look()
    assert node.keeper.trouble() == "" and node.failed == 12


def test_no_question_is_asked_before_the_pause_is_over(node):
    node.server.answer_with = (500, {}, b"{}")
    node.look_at(30)
    assert 0 < node.keeper.look() <= LOOK_SECONDS and node.requests == 1


def test_a_node_that_was_off_for_too_long_is_told_to_run_site_yml(node, capsys):
    logs.set_up()
    node.server.accepts = set()  # as the API server has it with a token that has expired
    node.look_at(91)
    node.keeper.look()
    said = "the token for Kubernetes expired on 2027-04-15 08:00 UTC: run site.yml for this node"
    assert node.keeper.trouble() == said
    assert capsys.readouterr().err.count("run site.yml") == 1
    with pytest.raises(KubeError, match=r"its token expired on 2027-04-15.*run site\.yml") as told:
        KubeClient(node.source).pods(Selector("node1"))
    assert told.value.kind == DENIED
    node.give(jwt(node.now, node.now + LIFETIME))  # which it does
    node.keeper.look()
    assert node.keeper.trouble() == "" and node.keeper.expires == node.now + LIFETIME


def test_a_token_that_nobody_renewed_is_warned_about_before_it_expires(node, monkeypatch):
    monkeypatch.setattr(node.keeper, "_attempt", lambda *_unused: None)
    node.look_at(59)
    assert node.keeper.trouble() == ""
    node.look_at(61)
    assert "expires on 2027-04-15 08:00 UTC and was not renewed yet" in node.keeper.trouble()


def test_an_account_that_may_not_renew_is_told_what_it_lacks(node):
    denied = {"kind": "Status", "message": "forbidden", "reason": "Forbidden", "code": 403}
    node.server.answer_with = (403, {}, json.dumps(denied).encode())
    node.look_at(30)
    assert "needs create on serviceaccounts/token of its own account: run site.yml" in (
        node.keeper.trouble()
    )


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"status": {"token": "two words"}},
        {"status": {"token": "x" * 100_000}},
        {"status": {"token": "opaque"}},
        {"status": {"token": jwt(NOW, 0)}},
        {"status": {"token": jwt(NOW, NOW + LIFETIME, "system:serviceaccount:other:other")}},
    ],
)
def test_an_answer_that_is_no_token_of_ours_leaves_the_old_one(node, answer):
    before = node.file.read_text()
    node.server.answer_with = (201, {}, json.dumps(answer).encode())
    node.look_at(30)
    assert node.file.read_text() == before
    assert len(node.keeper.trouble()) < 500 and "was not renewed" in node.keeper.trouble()


def test_a_clock_that_is_far_ahead_does_not_make_it_ask_all_the_time(node):
    node.server.clock = lambda: NOW - 60 * DAY
    node.look_at(30)
    assert "compare this node's clock" in node.keeper.trouble() and node.requests == 1
    node.keeper.look()
    assert node.requests == 1


def test_a_clock_that_was_ahead_and_is_put_right_does_not_stop_the_renewal(node):
    node.server.answer_with = (500, {}, b"{}")
    node.look_at(80)
    node.server.answer_with = None
    node.look_at(40)
    assert node.requests == 2 and node.keeper.trouble() == ""


@pytest.mark.parametrize("token", ["opaque", jwt(NOW, 0), "a.b.c", "..", "a.W10.c"])
def test_a_token_that_never_expires_or_is_of_another_kind_is_left_alone(node, token):
    node.give(token)
    assert node.look_at(400) == LOOK_SECONDS
    assert node.requests == 0 and node.keeper.trouble() == "" and node.keeper.expires == 0


def test_a_token_that_is_the_operators_own_is_not_renewed(node):
    other = node.file.with_name("theirs")
    node.file.rename(other)
    node.source = Source(str(node.server.kubeconfig(tokenFile=str(other), token="")))
    node.restart()
    node.look_at(60)
    assert node.requests == 0 and node.keeper.trouble() == ""


def test_a_kubeconfig_that_is_missing_is_looked_for_again(node):
    os.unlink(node.source.kubeconfig)
    assert node.look_at(30) == LOOK_SECONDS and node.keeper.trouble() == ""


def test_the_thread_ends_when_it_is_told_to_although_the_server_is_silent(node):
    node.now, node.server.delay = NOW + 30 * DAY, 20
    node.keeper.start()
    node.keeper.stop()
    assert not node.keeper.is_alive()


def test_what_a_token_says_is_bounded():
    assert bearer_token.read("x" * (bearer_token.LARGEST + 1)) is None
    assert bearer_token.read(jwt(NOW, 1e300)) == bearer_token.BearerToken(
        "kube-system", "headcni-node-node1", NOW, 0.0
    )
