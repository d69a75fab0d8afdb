"""headcni_info on a machine that knows nothing of HeadCNI."""

from __future__ import annotations

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import node, node_config, node_release
from ansible_module import Failed, run


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """Nothing of the machine that the tests run on."""
    nothing = {"installed": [], "current": None}
    monkeypatch.setattr(node_release, "report", lambda: nothing)
    monkeypatch.setattr(node_config, "read", lambda: None)
    monkeypatch.setattr(node, "has_systemd", lambda: False)
    return str(tmp_path)


def test_a_node_without_headcni_is_no_failure(elsewhere):
    told = run("headcni_info", cni_conf_dir=elsewhere)
    assert told["changed"] is False
    assert told["current"] is None and told["installed"] == [] and told["running_version"] == ""
    assert told["ready"] is False
    assert told["conflist"] == {
        "directory": elsewhere,
        "in_charge": "",
        "ours": False,
        "disabled": [],
    }


def test_another_platform_is_refused_in_a_sentence(elsewhere, monkeypatch):
    monkeypatch.setattr(node.sys, "platform", "darwin")
    with pytest.raises(Failed, match="HeadCNI needs Linux"):
        run("headcni_info")
