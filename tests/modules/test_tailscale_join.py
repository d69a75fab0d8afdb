"""tailscale_join and tailscale_info: a real tailscaled, and real Headscales to join.

The names of the issues are those of neighbouring projects whose users asked for just this.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils.shared.localapi import LocalAPI
from ansible_collections.headcni.mesh.plugins.module_utils.tailnet_options import joined_key
from ansible_module import Failed, run
from headscale_server import HeadscaleServer, Tailscaled
from patience import until

POD = "10.244.1.0/24"
THEIRS = "192.168.50.0/24"


def make_key(
    server: HeadscaleServer, minutes: int = 10, reusable: bool = False, tags: tuple[str, ...] = ()
) -> str:
    if "headcni" not in server.users:
        server.add_user("headcni")
    expiration = datetime.now(timezone.utc) + timedelta(minutes=minutes)
    body = {
        "user": server.users["headcni"]["id"],
        "reusable": reusable,
        "ephemeral": False,
        "expiration": expiration.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "aclTags": list(tags),
    }
    return str(server.ask("POST", "preauthkey", body)["preAuthKey"]["key"])


def known_as(server: HeadscaleServer, key: str) -> dict[str, Any]:
    nodes = server.ask("GET", "node")["nodes"]
    return next((node for node in nodes if node["nodeKey"] == key), {})


@dataclass
class Node:
    """A tailscaled, and the modules at its socket."""

    tailscaled: Tailscaled
    server: HeadscaleServer

    @property
    def socket(self) -> str:
        return str(self.tailscaled.home / "sock")

    def join(self, check: bool = False, **options: Any) -> dict[str, Any]:
        given = {"login_server": self.server.url, "timeout": 20, **options}
        return run("tailscale_join", check, socket=self.socket, **given)

    def info(self, **options: Any) -> dict[str, Any]:
        given = {"login_server": self.server.url, **options}
        return run("tailscale_info", socket=self.socket, **given)

    def prefs(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.tailscaled.tailscale("debug", "prefs"))
        return found

    def routes(self) -> list[str]:
        return self.prefs()["AdvertiseRoutes"] or []

    @property
    def known(self) -> dict[str, Any]:
        """What the server knows of it: nothing, if it does not."""
        return known_as(self.server, self.info()["node_key"])

    def restart(self) -> None:
        self.tailscaled.stop()
        (self.tailscaled.home / "sock").unlink(missing_ok=True)
        self.tailscaled.start()


@contextmanager
def running(home: Path) -> Iterator[HeadscaleServer]:
    server = HeadscaleServer(home)
    try:
        server.start()
        server.key = server.make_key()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """Short: a unix socket's path may have 107 characters."""
    made = Path(tempfile.mkdtemp(prefix="hct-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def server(home) -> Iterator[HeadscaleServer]:
    (home / "one").mkdir()
    with running(home / "one") as made:
        yield made


@pytest.fixture(scope="module")
def other(home) -> Iterator[HeadscaleServer]:
    (home / "two").mkdir()
    with running(home / "two") as made:
        yield made


@pytest.fixture
def fresh(server, tailscaleds) -> Node:
    return Node(tailscaleds(), server)


@pytest.fixture(scope="module")
def node(home, server) -> Iterator[Node]:
    tailscaled = Tailscaled(home / "node")
    tailscaled.start()
    yield Node(tailscaled, server)
    tailscaled.stop()


@pytest.fixture
def joined(node) -> Node:
    """The same for many tests, joined anew only if one of them has made that necessary."""
    if node.info()["needs_login"] or not node.known:
        node.join(auth_key=make_key(node.server), force_reauth=True)
    plain = {"AdvertiseRoutes": [], "Hostname": "", "ShieldsUp": False, "RouteAll": False}
    LocalAPI(node.socket).edit_prefs({**plain, "CorpDNS": True, "ProfileName": ""})
    return node


# Joining, and having joined.


def test_a_fresh_node_joins_with_a_key_and_is_known_by_its_node_key(fresh):
    key = make_key(fresh.server)
    predicted = fresh.join(check=True)
    done = fresh.join(auth_key=key, hostname="alpha", accept_routes=True, snat_subnet_routes=False)
    assert predicted["changed"] and predicted["needs_login"] and predicted["node_key"] == ""
    assert (done["changed"], done["needs_login"], done["backend_state"]) == (True, True, "Running")
    assert done["login_reason"] == "it is not logged in"
    known = known_as(fresh.server, done["node_key"])
    assert known["name"] == "alpha"
    assert sorted(known["ipAddresses"]) == sorted(done["tailnet_ips"])
    assert (fresh.prefs()["RouteAll"], fresh.prefs()["NoSNAT"]) == (True, True)


def test_a_node_that_must_log_in_is_left_alone_until_there_is_a_key(fresh):
    before = fresh.prefs()
    put_off = fresh.join(login="later", hostname="late")
    assert (put_off["changed"], put_off["needs_login"], put_off["node_key"]) == (False, True, "")
    assert fresh.prefs() == before
    made = fresh.join(hostname="late", auth_key=make_key(fresh.server))
    again = fresh.join(login="later", hostname="later")
    assert (again["changed"], again["needs_login"]) == (True, False)
    assert again["node_key"] == made["node_key"]
    options = {"socket": fresh.socket, "login_server": fresh.server.url}
    assert joined_key({**options, "hostname": "later"}) == made["node_key"]
    assert joined_key({**options, "hostname": "late"}) == ""


def test_the_diff_and_the_result_tell_the_prefs_and_not_the_key(fresh):
    key = make_key(fresh.server)
    done = fresh.join(auth_key=key, accept_dns=False)
    assert done["prefs_changed"]["CorpDNS"] == {"before": True, "after": False}
    assert done["diff"]["after"]["ControlURL"] == fresh.server.url
    assert key not in json.dumps({**done, "invocation": None})
    assert done["invocation"]["module_args"]["auth_key"] == "VALUE_SPECIFIED_IN_NO_LOG_PARAMETER"


def test_artis3n_320_a_second_run_changes_nothing(joined):
    wanted = {"accept_routes": True, "hostname": "alpha", "advertise_routes": [POD]}
    assert joined.join(**wanted)["changed"] is True
    for check in (True, False):
        again = joined.join(check=check, **wanted)
        assert (again["changed"], again["prefs_changed"], again["needs_login"]) == (
            False,
            {},
            False,
        )


def test_artis3n_357_no_key_is_demanded_of_a_node_that_is_joined(joined):
    assert joined.info()["needs_login"] is False
    done = joined.join(accept_routes=True)
    assert (done["needs_login"], done["backend_state"]) == (False, "Running")


def test_k3s_10729_an_expired_key_does_not_stop_a_node_that_is_joined(joined):
    before = joined.info()["node_key"]
    done = joined.join(auth_key=make_key(joined.server, minutes=-5))
    assert (done["changed"], done["node_key"]) == (False, before)


def test_k3s_13597_a_restarted_node_is_still_logged_in(joined):
    before = joined.info()["node_key"]
    joined.restart()
    done = joined.join()
    assert (done["changed"], done["backend_state"], done["node_key"]) == (False, "Running", before)


def test_k3s_12830_a_node_whose_server_comes_up_later_is_waited_for_and_needs_no_key(joined):
    joined.server.stop()
    joined.restart()
    back = threading.Timer(7, joined.server.start)
    back.start()
    try:
        assert joined.info()["needs_login"] is False
        done = joined.join(timeout=60)
    finally:
        back.join()
    assert (done["changed"], done["backend_state"]) == (False, "Running")


def test_artis3n_348_and_524_check_mode_predicts_on_a_node_without_tailscaled(tmp_path):
    socket = str(tmp_path / "none")
    given = {"socket": socket, "login_server": "http://127.0.0.1:9", "accept_routes": True}
    predicted = run("tailscale_join", True, **given)
    assert (predicted["changed"], predicted["needs_login"]) == (True, True)
    assert predicted["prefs_changed"]["RouteAll"] == {"before": None, "after": True}
    known = run("tailscale_info", True, socket=socket)
    assert (known["needs_login"], known["backend_state"], known["prefs"]) == (True, "", {})
    with pytest.raises(Failed, match="is not there: start tailscaled"):
        run("tailscale_join", **given)


def test_a_node_that_was_taken_down_comes_up_again_without_a_key(joined):
    joined.tailscaled.tailscale("down")
    assert joined.info()["backend_state"] == "Stopped"
    assert joined.info()["needs_login"] is False
    done = joined.join()
    assert (done["changed"], done["backend_state"]) == (True, "Running")
    assert done["prefs_changed"] == {"WantRunning": {"before": False, "after": True}}


# Routes.


@pytest.mark.parametrize("issue", ["k3s#11803", "k3s#9677"])
def test_the_users_advertised_routes_are_not_wiped(joined, issue):
    joined.tailscaled.tailscale("set", f"--advertise-routes={THEIRS}")
    if issue == "k3s#9677":
        joined.join(advertise_routes=[POD])
    else:
        joined.join(auth_key=make_key(joined.server), force_reauth=True, advertise_routes=[POD])
    assert set(joined.routes()) == {THEIRS, POD}
    joined.join()
    assert set(joined.routes()) == {THEIRS, POD}


def test_exact_routes_take_the_others_back_but_leave_an_exit_node_one(joined):
    joined.tailscaled.tailscale("set", f"--advertise-routes={THEIRS}", "--advertise-exit-node")
    joined.join(advertise_routes=[POD], routes_state="exact")
    assert set(joined.routes()) == {POD, "0.0.0.0/0", "::/0"}


def test_absent_routes_are_taken_back_alone(joined):
    joined.tailscaled.tailscale("set", f"--advertise-routes={THEIRS},{POD}")
    assert joined.join(advertise_routes=[POD], routes_state="absent")["changed"] is True
    assert joined.routes() == [THEIRS]
    assert joined.join(advertise_routes=[POD], routes_state="absent")["changed"] is False


# Having to log in.


def test_k3s_11279_a_changed_login_server_is_joined_with_the_same_prefs(joined, other):
    joined.tailscaled.tailscale("set", f"--advertise-routes={THEIRS}", "--hostname=alpha")
    joined.tailscaled.tailscale("set", "--nickname=mine", "--shields-up", "--accept-dns=false")
    info = joined.info(login_server=other.url)
    assert info["needs_login"] is True
    assert info["login_reason"] == f"it is joined to {joined.server.url}, not to {other.url}"
    with pytest.raises(Failed, match=r"auth_key: none given.*it is joined to"):
        joined.join(login_server=other.url)

    done = joined.join(login_server=other.url, auth_key=make_key(other))
    assert (done["backend_state"], done["login_server"]) == ("Running", other.url)
    assert known_as(other, done["node_key"])
    prefs = joined.prefs()
    assert prefs["ControlURL"] == other.url
    assert prefs["AdvertiseRoutes"] == [THEIRS]
    assert (prefs["Hostname"], prefs["ProfileName"]) == ("alpha", "mine")
    assert (prefs["ShieldsUp"], prefs["CorpDNS"]) == (True, False)
    assert len(json.loads(joined.tailscaled.tailscale("switch", "--list", "--json"))) == 1
    assert joined.join(login_server=other.url)["changed"] is False
    joined.restart()
    assert joined.join(login_server=f"{other.url}/")["changed"] is False


def test_a_login_server_that_refuses_the_node_leaves_it_where_it_was(joined, other):
    before = joined.info()
    with pytest.raises(Failed, match="already used") as failed:
        used = make_key(other)
        stranger = Tailscaled(joined.tailscaled.home / "stranger")
        stranger.start()
        try:
            stranger.join(other.url, used, "stranger")
        finally:
            stranger.stop()
        joined.join(login_server=other.url, auth_key=used)
    assert f"The node is as it was: Running at {joined.server.url}" in str(failed.value)
    after = joined.info()
    assert (after["backend_state"], after["node_key"]) == ("Running", before["node_key"])
    assert after["prefs"] == before["prefs"]


def test_a_login_server_that_is_down_leaves_the_node_where_it_was(joined):
    before = joined.info()
    with pytest.raises(Failed, match=r"does not run after 3 s.*The node is as it was: Running"):
        joined.join(login_server="http://127.0.0.1:9", auth_key="key", timeout=3)
    after = joined.info()
    assert (after["needs_login"], after["prefs"]) == (False, before["prefs"])


def test_a_node_whose_key_has_expired_needs_a_login_and_stays_the_same_node(joined):
    number = joined.known["id"]
    joined.server.ask("POST", f"node/{number}/expire")
    until(lambda: joined.info()["needs_login"])
    assert joined.info()["login_reason"] == "its node key has expired"
    with pytest.raises(Failed, match=r"auth_key: none given.*its node key has expired"):
        joined.join()
    done = joined.join(auth_key=make_key(joined.server))
    assert (done["backend_state"], joined.known["id"]) == ("Running", number)


def test_a_node_that_was_deleted_at_the_server_joins_again(joined):
    joined.server.ask("DELETE", f"node/{joined.known['id']}")
    joined.restart()
    until(lambda: joined.info()["needs_login"])
    done = joined.join(auth_key=make_key(joined.server))
    assert done["backend_state"] == "Running"
    assert known_as(joined.server, done["node_key"])


def test_a_node_that_was_logged_out_joins_again(joined):
    joined.tailscaled.tailscale("logout")
    assert joined.info()["needs_login"] is True
    assert joined.join(auth_key=make_key(joined.server))["backend_state"] == "Running"


def test_force_reauth_makes_a_new_node_key_for_the_same_node_and_only_on_request(joined):
    before, number = joined.info()["node_key"], joined.known["id"]
    with pytest.raises(Failed, match=r"auth_key: none given.*force_reauth is set"):
        joined.join(force_reauth=True)
    done = joined.join(force_reauth=True, auth_key=make_key(joined.server))
    assert done["node_key"] != before
    assert known_as(joined.server, done["node_key"])["id"] == number
    assert len(json.loads(joined.tailscaled.tailscale("switch", "--list", "--json"))) == 1


def test_a_failed_reauth_leaves_the_node_running(joined):
    before = joined.info()["node_key"]
    with pytest.raises(Failed, match=r"authkey expired.*The node is as it was: Running"):
        joined.join(force_reauth=True, auth_key=make_key(joined.server, minutes=-5))
    assert joined.join()["node_key"] == before


def test_a_failed_login_of_a_fresh_node_is_forgotten_and_the_next_works(fresh):
    before = fresh.prefs()
    with pytest.raises(Failed, match=r"authkey expired: make a new key.*The node is as it was"):
        fresh.join(auth_key=make_key(fresh.server, minutes=-5), hostname="alpha")
    assert fresh.prefs() == before
    assert fresh.info()["backend_state"] == "NeedsLogin"
    assert fresh.join(auth_key=make_key(fresh.server))["backend_state"] == "Running"


def test_tags_come_from_the_key(fresh):
    fresh.server.ask("PUT", "policy", {"policy": '{"tagOwners": {"tag:node": ["headcni@"]}}'})
    key = make_key(fresh.server, tags=("tag:node",))
    with pytest.raises(Failed, match="leave `tags` out"):
        fresh.join(auth_key=key, tags=["tag:node"])
    fresh.join(auth_key=make_key(fresh.server, tags=("tag:node",)))
    until(lambda: fresh.info()["tags"] == ["tag:node"])


def test_one_who_may_not_write_is_told_to_become_root(joined):
    for folder in (joined.tailscaled.home, joined.tailscaled.home.parent):
        folder.chmod(0o755)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            said = str(joined.join(hostname="beta"))
        except Failed as failed:
            said = str(failed)
        except BaseException as problem:
            said = repr(problem)
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    assert said.endswith("become root"), said


# The key.


def test_the_key_is_in_no_argument_list_and_no_file(fresh):
    key = make_key(fresh.server)
    seen: set[str] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            for process in Path("/proc").glob("[0-9]*"):
                for name in ("cmdline", "environ"):
                    try:
                        if key.encode() in (process / name).read_bytes():
                            seen.add(f"{process}/{name}")
                    except OSError:
                        continue
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        fresh.join(auth_key=key)
    finally:
        done.set()
        watcher.join()
    assert seen == set()
    for file in fresh.tailscaled.home.rglob("*"):
        assert not file.is_file() or key.encode() not in file.read_bytes(), file
