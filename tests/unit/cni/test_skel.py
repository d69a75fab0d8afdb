"""What all plugins share: versions, errors, and the output of a call."""

from __future__ import annotations

import json

import pytest

from headcni import errors, skel
from headcni.plugins import headcni_ipam, loopback
from headcni.plugins.headcni import plugin as headcni
from headcni.skel import Outcome, Plugin, run

PLUGINS = [headcni.plugin(), headcni_ipam.PLUGIN, loopback.PLUGIN]
STATUS = {"CNI_COMMAND": "STATUS"}


def plugin_that(serve) -> Plugin:
    return Plugin("some-plugin", skel.VERSIONS, lambda _call, _outcome: serve())


def raising(problem: Exception) -> Plugin:
    def serve() -> None:
        raise problem

    return plugin_that(serve)


def answer(outcome: Outcome) -> dict[str, object]:
    return json.loads(outcome.output)


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_each_plugin_answers_version_in_the_version_that_was_asked_for(plugin):
    for version in plugin.versions:
        conf = json.dumps({"cniVersion": version}).encode()
        outcome = run(plugin, {"CNI_COMMAND": "VERSION"}, conf)
        assert outcome.exit_code == 0
        assert answer(outcome) == {
            "cniVersion": version,
            "supportedVersions": list(plugin.versions),
        }


def test_headcni_answers_version_whatever_is_on_stdin():
    for stdin in (b"", b"{", b'{"cniVersion": "7.0.0"}', b'{"cniVersion": ["1.0.0"]}'):
        outcome = run(headcni.plugin(), {"CNI_COMMAND": "VERSION"}, stdin)
        assert answer(outcome)["cniVersion"] == "1.1.0"


@pytest.mark.parametrize(
    ("asked", "shown"), [("1.0.0", "1.0.0"), ("9.9.9", "1.1.0"), (None, "1.1.0")]
)
def test_an_error_has_the_requested_version_if_the_plugin_supports_it(asked, shown):
    conf = json.dumps({"cniVersion": asked}).encode()
    plugin = raising(errors.CniError(errors.KERNEL, "the kernel refused it"))
    outcome = run(plugin, STATUS | {"CNI_COMMAND": "VERSION"}, conf)
    assert outcome.code == 0
    outcome = run(plugin, {"CNI_COMMAND": "GC", "CNI_PATH": "/opt/cni/bin"}, conf)
    assert answer(outcome)["cniVersion"] == shown


def test_the_outcome_has_the_error_that_the_output_shows():
    problem = errors.CniError(errors.STORE, "the store is gone", "look for it")
    outcome = run(raising(problem), {"CNI_COMMAND": "GC", "CNI_PATH": "/opt/cni/bin"}, b"{}")
    assert outcome.error is problem
    assert (outcome.code, outcome.exit_code) == (errors.STORE, 1)
    assert answer(outcome) == problem.as_dict("1.1.0")


@pytest.mark.parametrize("code", [errors.STORE, errors.TRY_AGAIN])
def test_status_reports_our_own_codes_as_not_available(code):
    outcome = run(raising(errors.CniError(code, "no", "why")), STATUS, b"{}")
    assert outcome.code == errors.NOT_AVAILABLE
    assert outcome.error is not None and outcome.error.details == "why"


def test_status_keeps_the_codes_of_the_specification():
    outcome = run(raising(errors.CniError(errors.INVALID_CONFIG, "no")), STATUS, b"{}")
    assert outcome.code == errors.INVALID_CONFIG


def test_any_other_exception_is_a_bug_with_a_trace_on_stderr(capfd):
    outcome = run(raising(ValueError("x" * 100_000)), STATUS, b"{}")
    assert outcome.code == errors.INTERNAL
    assert answer(outcome)["msg"] == "a bug in some-plugin"
    said = capfd.readouterr()
    assert said.out == "" and "Traceback" in said.err
    assert len(said.err) < skel.LONGEST_TRACE + 200


def test_a_verb_without_an_answer_writes_nothing():
    outcome = run(plugin_that(lambda: None), STATUS, b"{}")
    assert (outcome.output, outcome.error) == (b"", None)


def test_a_plugin_may_need_fewer_variables_than_the_specification_says():
    """headcni-ipam starts no other plugins, so its GC needs no CNI_PATH."""
    assert run(PLUGINS[1], {"CNI_COMMAND": "GC"}, b"{}").code == errors.INCOMPATIBLE_VERSION
    assert run(PLUGINS[2], {"CNI_COMMAND": "GC"}, b"{}").code == errors.BAD_ENVIRONMENT
