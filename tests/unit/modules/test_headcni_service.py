"""When a service is started, restarted, reloaded or left alone."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import monitor, node
from ansible_collections.headcni.mesh.plugins.module_utils.shared import localapi
from ansible_collections.headcni.mesh.plugins.modules import headcni_service
from ansible_module import run

NAME = "headcni-daemon.service"
ASKED = {
    "name": "headcni-daemon",
    "state": "started",
    "restart": False,
    "reload": False,
    "port": None,
}


def unit(active="active", changed_at=1000.0):
    return node.Unit(NAME, "loaded", active, "enabled", 1, changed_at, False)


@pytest.fixture
def times(monkeypatch):
    """When each thing that a service is made of was last changed."""
    known: dict[str, float] = {}
    monkeypatch.setattr(headcni_service, "changed_at", lambda path: known.get(path, 0.0))
    return known


CONFIG, CURRENT = "/etc/headcni/config.yaml", "/opt/headcni/current"
UNIT = f"/etc/systemd/system/{NAME}"


@pytest.mark.parametrize(
    ("asked", "active", "newer", "action"),
    [
        ({}, "active", None, "none"),
        ({}, "inactive", None, "started"),
        ({}, "failed", None, "started"),
        ({"restart": True}, "active", None, "restarted"),
        ({"restart": True}, "inactive", None, "started"),
        ({"state": "restarted"}, "active", None, "restarted"),
        ({"reload": True}, "active", None, "reloaded"),
        ({"reload": True}, "active", CONFIG, "reloaded"),
        ({"reload": True}, "active", CURRENT, "restarted"),
        ({"reload": True, "restart": True}, "active", CONFIG, "restarted"),
        # A run that was cut off between writing and restarting is finished by the next.
        ({}, "active", CONFIG, "restarted"),
        ({}, "active", CURRENT, "restarted"),
        ({}, "active", UNIT, "restarted"),
    ],
)
def test_what_is_done_with_the_daemon(times, asked, active, newer, action):
    if newer:
        times[newer] = 2000.0
    assert headcni_service.decide({**ASKED, **asked}, unit(active), None)[0] == action


def test_a_tailscaled_with_another_port_or_environment_is_restarted(times, monkeypatch):
    asked = {**ASKED, "name": "headcni-tailscaled", "port": 41642}
    monkeypatch.setattr(headcni_service, "has_port", lambda pid, port: port == 41642)
    assert headcni_service.decide(asked, unit(), None)[0] == "none"
    assert headcni_service.decide({**asked, "port": 5}, unit(), None)[0] == "restarted"
    assert headcni_service.decide(asked, unit(), ("", "A=b"))[0] == "restarted"
    times[CONFIG] = 2000.0  # the daemon's affair
    assert headcni_service.decide(asked, unit(), None)[0] == "none"


def test_a_tailscaled_whose_program_was_replaced_is_restarted(times, monkeypatch, tmp_path):
    """By another version: what is installed is what runs, in daemon mode too."""
    asked = {**ASKED, "name": "headcni-tailscaled", "port": 41642}
    monkeypatch.setattr(headcni_service, "has_port", lambda pid, port: True)
    program = shutil.copy("/bin/sleep", tmp_path / "tailscaled")
    with subprocess.Popen([program, "60"]) as process:
        running = unit()._replace(pid=process.pid)
        assert headcni_service.decide(asked, running, None)[0] == "none"
        os.replace(shutil.copy("/bin/sleep", tmp_path / "new"), program)
        assert headcni_service.decide(asked, running, None)[0] == "restarted"
        process.kill()


def test_a_value_with_quotes_survives_systemd():
    assert headcni_service.quoted('a "b" \\') == 'a \\"b\\" \\\\'


class Monitor:
    """What the daemon answers, one answer after the other."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def __call__(self, address, port):
        conditions = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        wrong = [f"{one['name']}: {one['reason']}" for one in conditions if not one["ok"]]
        return monitor.Readiness(bool(conditions) and not wrong, conditions, wrong)


def condition(name, reason=""):
    return {"name": name, "ok": not reason, "reason": reason}


class Module:
    def __init__(self, **params):
        defaults = {"ready_address": "127.0.0.1", "ready_port": 1, "ready_timeout": 0}
        self.params = {**defaults, "ready_without": ["pods"], **params}
        self.warnings = []

    def warn(self, text):
        self.warnings.append(text)


def test_it_waits_until_every_condition_holds(monkeypatch):
    coming = [condition("tailscale", "starting")], [], [condition("tailscale")]
    monkeypatch.setattr(monitor, "ready", Monitor(*coming))
    module = Module(ready_timeout=10)
    assert headcni_service.wait_until_ready(module, NAME) == [condition("tailscale")]


def test_what_does_not_hold_is_named_in_the_end(monkeypatch):
    monkeypatch.setattr(
        monitor, "ready", Monitor([condition("routes", "no way"), condition("store", "lost")])
    )
    with pytest.raises(node.NodeError, match="not ready after 0 s: routes: no way; store: lost"):
        headcni_service.wait_until_ready(Module(), NAME)


def test_a_missing_api_server_is_a_warning(monkeypatch):
    monkeypatch.setattr(monitor, "ready", Monitor([condition("pods", "no API server")]))
    module = Module()
    headcni_service.wait_until_ready(module, NAME)
    assert module.warnings == [f"{NAME}: pods: no API server"]


class Tailscaled:
    """A service that is another process at each look, and answers in the life of that number."""

    def __init__(self, monkeypatch, answers_in: int = 0):
        self.life = 0
        self.answers_in = answers_in
        monkeypatch.setattr(node, "unit", self.unit)
        monkeypatch.setattr(localapi.LocalAPI, "status", self.status)
        monkeypatch.setattr(node, "last_words", lambda names, lines, pid: [f"no TUN ({pid})"])
        monkeypatch.setattr(headcni_service, "POLL_SECONDS", 0.0)

    def unit(self, name):
        self.life += 1
        return unit()._replace(pid=self.life)

    def status(self):
        if self.life != self.answers_in:
            raise localapi.LocalAPIError(localapi.NO_SOCKET, "there is no socket", "start it")


def test_a_tailscaled_that_was_restarted_meanwhile_is_waited_for(monkeypatch):
    made = Tailscaled(monkeypatch, answers_in=2)
    headcni_service.wait_until_it_answers("headcni-tailscaled.service", 10)
    assert made.life == 2


def test_a_tailscaled_that_ends_again_and_again_is_quoted(monkeypatch):
    Tailscaled(monkeypatch)
    with pytest.raises(node.NodeError, match=r"does not stay up: no TUN \(2\); see journalctl"):
        headcni_service.wait_until_it_answers("headcni-tailscaled.service", 10)


def test_a_tailscaled_that_never_answers_is_not_waited_for_any_longer(monkeypatch):
    Tailscaled(monkeypatch)
    with pytest.raises(node.NodeError, match="does not answer after 0 s: there is no socket"):
        headcni_service.wait_until_it_answers("headcni-tailscaled.service", 0)


@pytest.fixture
def variables(monkeypatch, tmp_path):
    """The file with the variables of our tailscaled, which runs."""
    path = tmp_path / "headcni-tailscaled"
    monkeypatch.setattr(headcni_service, "ENVIRONMENT", str(path))
    monkeypatch.setattr(node, "unit", lambda _: unit(changed_at=2e10))
    monkeypatch.setattr(headcni_service, "has_port", lambda pid, port: True)
    return path


def asked(check=False, **environment):
    return run(
        "headcni_service",
        check,
        name="headcni-tailscaled",
        environment=environment,
        ready_timeout=0,
    )


def test_a_secret_among_the_variables_is_shown_nowhere(variables):
    done = asked(True, HTTPS_PROXY="http://me:hunter22@proxy", SOME_TOKEN="longsecret")
    assert done["changed"] and "HTTPS_PROXY" in done["diff"]["after"]
    assert "hunter22" not in str(done) and "longsecret" not in str(done)


def test_the_variables_are_closed_to_others_again_without_a_restart(variables, monkeypatch):
    monkeypatch.setattr(node, "order", lambda *_: None)
    assert asked(A="b")["action"] == "restarted"
    assert asked(A="b")["changed"] is False
    os.chmod(variables, 0o644)
    for check in (True, False):
        done = asked(check, A="b")
        assert (done["changed"], done["action"]) == (True, "none")
    assert variables.stat().st_mode & 0o777 == 0o600
    assert asked(A="b")["changed"] is False
