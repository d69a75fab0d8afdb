"""Who must log in and why, what of the prefs changes, and what is undone if a login fails."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import tailnet
from ansible_collections.headcni.mesh.plugins.module_utils.shared.localapi import (
    NO_ANSWER,
    LocalAPIError,
    Status,
)
from ansible_collections.headcni.mesh.plugins.module_utils.tailnet import (
    Joining,
    Plan,
    Standing,
    TailnetError,
    Wishes,
    key_mistakes,
    plain_http_warning,
    read,
    routed,
    same_server,
    server_mistakes,
    why_login,
)
from hypothesis import given
from hypothesis import strategies as st

SERVER = "https://headscale.example.org"


def status(**changes: Any) -> Status:
    running = {
        "Version": "1.102.5",
        "BackendState": "Running",
        "HaveNodeKey": True,
        "Self": {"PublicKey": "nodekey:01", "Online": True},
    }
    return Status.of({**running, **changes})


def standing(prefs: dict[str, Any] | None = None, **changes: Any) -> Standing:
    return Standing(status(**changes), {"ControlURL": SERVER, "WantRunning": True, **(prefs or {})})


LOGGED_OUT = {"BackendState": "NeedsLogin", "HaveNodeKey": False, "Self": {}}


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (standing(), ""),
        (standing(BackendState="Stopped"), ""),
        (standing(BackendState="Starting"), ""),
        # Just started, and the server away: it is logged in, and only waits.
        (standing(BackendState="NoState"), ""),
        (standing(**{**LOGGED_OUT, "BackendState": "NoState"}), "it is not logged in"),
        (standing(**LOGGED_OUT), "it is not logged in"),
        (standing({"ControlURL": ""}, **LOGGED_OUT), "it is not logged in"),
        (
            standing({"ControlURL": "https://other"}),
            f"it is joined to https://other, not to {SERVER}",
        ),
        (
            standing({"ControlURL": ""}),
            f"it is joined to https://controlplane.tailscale.com, not to {SERVER}",
        ),
        (standing(BackendState="NeedsLogin"), "its login server does not know it"),
        (standing(AuthURL="https://x/register/y"), "its login server does not know it"),
        (standing(BackendState="NeedsMachineAuth"), "it waits to be approved"),
        (standing(Self={"PublicKey": "nodekey:1", "Expired": True}), "its node key has expired"),
        (
            standing(
                Self={"PublicKey": "nodekey:1", "KeyExpiry": "2020-01-01T00:00:00.123456789Z"}
            ),
            "its node key has expired",
        ),
        (standing(Self={"PublicKey": "nodekey:1", "KeyExpiry": "2999-01-01T00:00:00Z"}), ""),
        (standing(Self={"PublicKey": "nodekey:1", "KeyExpiry": "0001-01-01T00:00:00Z"}), ""),
        (Standing(None, {}, "the socket is not there"), "the socket is not there"),
    ],
)
def test_who_must_log_in_and_why(now, reason):
    found = why_login(now, SERVER)
    assert found.startswith(reason) if reason else found == ""


def test_without_a_login_server_any_will_do():
    assert why_login(standing({"ControlURL": "https://other"})) == ""


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (SERVER, f"{SERVER}/", True),
        (SERVER, "https://HEADSCALE.example.org:443", True),
        ("http://10.0.0.1", "http://10.0.0.1:80/", True),
        ("http://[fd00::1]:8080", "http://[FD00::1]:8080", True),
        (SERVER, "http://headscale.example.org", False),
        (SERVER, f"{SERVER}:8443", False),
        ("", "https://login.tailscale.com", True),
        ("https://controlplane.tailscale.com/", "https://login.tailscale.com", True),
        ("", SERVER, False),
    ],
)
def test_one_server_has_many_spellings(one, other, same):
    assert same_server(one, other) is same
    assert same_server(other, one) is same


@pytest.mark.parametrize(
    "url",
    [
        "headscale",
        "ftp://x",
        "https://",
        "https://x/path",
        "https://u:p@x",
        "http://x:99999",
        "//x",
    ],
)
def test_an_address_that_cannot_be_is_refused(url):
    (wrong,) = server_mistakes(url)
    assert wrong.startswith("login_server: ")
    assert repr(url) in wrong
    assert server_mistakes(SERVER) == server_mistakes("http://10.0.0.1:8080/") == []


@pytest.mark.parametrize(
    ("url", "warned"),
    [
        ("http://10.1.2.3:8080", False),
        ("http://localhost:8080", False),
        ("http://192.168.0.1", False),
        ("https://203.0.113.9", False),
        ("http://8.8.8.8", True),
        ("http://headscale.example.org", True),
        ("", False),
    ],
)
def test_plain_http_is_warned_of_where_tailscaled_will_not_have_it(url, warned):
    assert bool(plain_http_warning(url)) is warned


@pytest.mark.parametrize(
    ("key", "wrong"), [("", 0), ("hskey-auth-x", 0), (" key\n", 0), ("file:/x", 1), ("two keys", 1)]
)
def test_a_key_is_judged_by_its_looks_and_never_shown(key, wrong):
    found = key_mistakes(key)
    assert len(found) == wrong
    assert not any(key.strip() in one for one in found)


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        (Wishes(advertise_routes=["10.244.1.5/24"]), "host bits set: expected 10.244.1.0/24"),
        (Wishes(advertise_routes=["fd00::1/64"]), "host bits set: expected fd00::/64"),
        (Wishes(advertise_routes=["10.244.1.0"]), "no prefix length: expected 10.244.1.0/32"),
        (Wishes(advertise_routes=["0.0.0.0/0"]), "exit node"),
        (Wishes(advertise_routes=["::/0"]), "exit node"),
        (Wishes(advertise_routes=["ten/8"]), "no CIDR"),
        (Wishes(advertise_routes=["10.0.0.0/33"]), "no CIDR"),
        (Wishes(hostname="-x"), "no host name"),
        (Wishes(hostname="a" * 64), "no host name"),
        (Wishes(hostname="node.example.org"), "no host name"),
        (Wishes(tags=["node"]), "no tag"),
        (Wishes(tags=["tag:a b"]), "no tag"),
    ],
)
def test_each_mistake_names_the_option_the_value_and_the_cure(wishes, said):
    (wrong,) = wishes.mistakes()
    assert said in wrong


def test_all_mistakes_are_told_at_once():
    assert len(Wishes(hostname="-", tags=["x"], advertise_routes=["y", "::/0"]).mistakes()) == 4


def test_what_is_as_wanted_is_not_edited():
    prefs = {
        "WantRunning": True,
        "RouteAll": True,
        "NoSNAT": True,
        "CorpDNS": False,
        "Hostname": "",
        "AdvertiseRoutes": ["10.244.1.0/24"],
        "AdvertiseTags": ["tag:b", "tag:a"],
    }
    wishes = Wishes(
        hostname="",
        tags=["tag:a", "tag:b"],
        accept_routes=True,
        accept_dns=False,
        shields_up=False,
        snat_subnet_routes=False,
        advertise_routes=["10.244.1.0/24"],
    )
    assert wishes.of(prefs) == {}
    assert Wishes().of(prefs) == {}


def test_only_what_differs_is_edited():
    wishes = Wishes(accept_routes=True, snat_subnet_routes=False, hostname="a", tags=["tag:x"])
    assert wishes.of({"WantRunning": False, "RouteAll": False, "NoSNAT": True}) == {
        "Hostname": "a",
        "RouteAll": True,
        "AdvertiseTags": ["tag:x"],
        "WantRunning": True,
    }


ROUTES = st.lists(st.integers(0, 9).map(lambda n: f"10.{n}.0.0/16"), unique=True, max_size=6)


@given(ROUTES, ROUTES)
def test_merging_never_loses_a_route_and_is_done_once(have, given_):
    merged = routed(have, given_, "merge")
    assert set(merged) == set(have) | set(given_)
    assert merged[: len(have)] == have
    assert routed(merged, given_, "merge") == merged


@given(ROUTES, ROUTES)
def test_exact_and_absent_are_what_they_say(have, given_):
    exit_node = ["0.0.0.0/0", "::/0"]
    assert set(routed([*have, *exit_node], given_, "exact")) == {*given_, *exit_node}
    assert set(routed(have, given_, "absent")) == set(have) - set(given_)


def test_an_exit_node_of_another_tailnet_does_not_come_along():
    now = standing({"ControlURL": "https://other", "ExitNodeID": "n1", "ExitNodeIP": ""})
    plan = Plan.of(now, SERVER, Wishes())
    assert plan.edits == {"ControlURL": SERVER, "ExitNodeID": ""}
    assert Plan.of(standing({"ExitNodeID": "n1"}), SERVER, Wishes(), force=True).edits == {}


def test_the_diff_shows_what_changes_and_the_login():
    plan = Plan.of(standing({"RouteAll": False}, **LOGGED_OUT), SERVER, Wishes(accept_routes=True))
    assert plan.diff() == {
        "before": {"RouteAll": False, "login": "it is not logged in"},
        "after": {"RouteAll": True, "login": f"logged in to {SERVER}"},
    }
    nothing = Plan.of(standing(), SERVER, Wishes())
    assert (nothing.changed, nothing.diff()) == (False, {"before": {}, "after": {}})


class FakeAPI:
    """A tailscaled for what a real one does not do on demand."""

    def __init__(self, *answers: Any, profile: str = "old") -> None:
        self.answers = list(answers)
        self.profile = profile
        self.did: list[Any] = []

    def status(self, peers: bool = False) -> Status:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, Status)
        return answer

    def prefs(self) -> dict[str, Any]:
        return {"ControlURL": SERVER}

    def current_profile(self) -> str:
        return self.profile

    def new_profile(self) -> None:
        self.did.append("new")
        self.profile = ""

    def switch_profile(self, profile: str) -> None:
        self.did.append(f"switch {profile}")
        self.profile = profile

    def delete_profile(self, profile: str) -> None:
        self.did.append(f"delete {profile}")

    def start(self, prefs: dict[str, Any], auth_key: str = "") -> None:
        self.did.append(("start", prefs, auth_key))

    def log_in(self) -> None:
        self.did.append("log in")
        self.profile = self.profile or "fresh"

    def edit_prefs(self, values: dict[str, Any]) -> dict[str, Any]:
        self.did.append(("edit", values))
        return {}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(tailnet, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(tailnet, "STALE_SECONDS", 0.01)
    monkeypatch.setattr(tailnet, "BACK_SECONDS", 0.05)


def relogin(prefs: dict[str, Any] | None = None) -> Plan:
    return Plan.of(standing(prefs), SERVER, Wishes(), force=True)


def test_a_node_with_a_name_for_its_profile_keeps_it():
    api = FakeAPI(status())
    Joining(api, 1).carry_out(relogin({"ProfileName": "mine", "RouteAll": True}), "key")
    start = api.did[1]
    assert start[0] == "start"
    assert start[1] == {
        "ControlURL": SERVER,
        "RouteAll": True,
        "WantRunning": True,
        "LoggedOut": False,
    }
    assert start[2] == "key"
    assert api.did[2:] == ["log in", "delete old", ("edit", {"ProfileName": "mine"})]


def test_a_profile_that_was_taken_up_again_is_not_deleted():
    api = FakeAPI(status())
    api.log_in = lambda: setattr(api, "profile", "old")  # type: ignore[method-assign]
    Joining(api, 1).carry_out(relogin(), "key")
    assert "delete old" not in api.did


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), LocalAPIError(NO_ANSWER, "gone")])
def test_whatever_interrupts_a_login_the_node_goes_back(problem):
    api = FakeAPI(status(**LOGGED_OUT))

    def interrupted() -> None:
        raise problem

    api.log_in = interrupted  # type: ignore[method-assign]
    with pytest.raises((KeyboardInterrupt, TailnetError)):
        Joining(api, 1).carry_out(relogin(), "key")
    assert api.did[-1] == "switch old"


def test_a_node_that_is_registered_but_does_not_run_is_not_taken_back():
    api = FakeAPI(status(BackendState="Starting", Health=["no relay"]))
    with pytest.raises(TailnetError, match=r"no relay.*is registered there"):
        Joining(api, 0.02).carry_out(relogin(), "key")
    assert not any(str(one).startswith("switch") for one in api.did)


def test_an_error_of_the_login_before_is_not_taken_for_this_ones():
    old = status(
        **LOGGED_OUT, Health=["You are logged out. The last login error was: authkey expired"]
    )
    api = FakeAPI(old, old, status())
    assert Joining(api, 1).carry_out(relogin(), "key").state == "Running"


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("register request: http 401: authkey expired", "make a new key"),
        ("authkey already used", "reusable"),
        ("invalid pre auth key", "this very server"),
        ("requested tags [tag:x] are invalid: http 500: auth key", "leave `tags` out"),
    ],
)
def test_a_refused_key_is_told_at_once_with_what_to_do(said, hint):
    refused = status(**LOGGED_OUT, Health=[f"The last login error was: {said}"])
    with pytest.raises(TailnetError, match=hint):
        Joining(FakeAPI(refused, profile=""), 30).carry_out(relogin(), "key")


def test_a_server_that_is_away_is_waited_for_and_then_named():
    away = status(**LOGGED_OUT, Health=["The last login error was: dial tcp: connection refused"])
    with pytest.raises(
        TailnetError, match=f"connection refused: see that this node reaches {SERVER}"
    ):
        Joining(FakeAPI(away, profile=""), 0.05).carry_out(relogin(), "key")


def test_a_tailscaled_that_restarts_meanwhile_is_waited_for():
    gone = LocalAPIError(NO_ANSWER, "nobody answers")
    api = FakeAPI(gone, gone, status())
    plan = Plan.of(standing({"RouteAll": False}), SERVER, Wishes(accept_routes=True))
    assert Joining(api, 1).carry_out(plan, "").state == "Running"
    assert api.did == [("edit", {"RouteAll": True})]


def test_other_tags_need_a_new_start_but_no_login():
    api = FakeAPI(status())
    plan = Plan.of(standing(), SERVER, Wishes(tags=["tag:x"]))
    Joining(api, 1).carry_out(plan, "")
    assert api.did == [("start", {"ControlURL": SERVER, "AdvertiseTags": ["tag:x"]}, "")]


def test_a_node_that_has_just_started_is_asked_until_it_knows():
    api = FakeAPI(
        status(BackendState="NoState"),
        status(Self={"PublicKey": "nodekey:1"}),  # runs by memory, and has not heard of its server
        status(Self={"PublicKey": "nodekey:1"}, AuthURL="https://x"),
    )
    found = read(api)  # type: ignore[arg-type]
    assert found.status is not None
    assert found.status.asked
