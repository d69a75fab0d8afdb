"""What sending a release leaves on the node: nothing. The node is a folder of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.playbook.play_context import PlayContext
from ansible.playbook.task import Task
from ansible.plugins.loader import connection_loader, get_plugin_loader_namespace
from ansible.template import Templar
from ansible_collections.headcni.mesh.plugins.action import headcni_release
from ansible_collections.headcni.mesh.plugins.plugin_utils import runtime_release


@pytest.fixture
def remote_tmp(tmp_path) -> Path:
    return tmp_path / "remote"


@pytest.fixture
def action(tmp_path, remote_tmp, monkeypatch):
    """The action with a real connection and shell. Only the module is not run: it would install
    the release on this machine."""
    tarball = tmp_path / "headcni-runtime-1.0.0.tar.gz"
    tarball.write_text("the release")
    found = runtime_release.Tarball(tarball, "1.0.0", "d" * 64)
    monkeypatch.setattr(runtime_release, "ensure", lambda *_unused: found)
    task = Task()
    context = PlayContext()
    connection = connection_loader.get("local", context)
    connection._load_name = "local"
    connection._shell.set_options(var_options={"ansible_remote_tmp": str(remote_tmp)})
    loader = DataLoader()
    return headcni_release.ActionModule(
        task, connection, context, loader, Templar(loader=loader), get_plugin_loader_namespace()
    )


def run(action, answers, monkeypatch) -> list[dict]:
    """As Ansible's task executor runs it: `run`, then `cleanup` in any case."""
    asked = []

    def module(module_args, **_unused):
        asked.append(module_args)
        if "src" in module_args:
            assert Path(module_args["src"]).read_text() == "the release"
        return dict(answers[len(asked) - 1])

    monkeypatch.setattr(action, "_execute_module", module)
    try:
        action.run(task_vars={})
    finally:
        action.cleanup()
    return asked


@pytest.mark.parametrize("last", [{"changed": True}, {"failed": True, "msg": "no space"}])
def test_a_release_that_was_sent_leaves_no_temporary_directory(
    action, remote_tmp, monkeypatch, last
):
    asked = run(action, [{"needs_src": True}, last], monkeypatch)
    assert asked[1]["src"].startswith(str(remote_tmp))
    assert os.listdir(remote_tmp) == []


def test_a_node_that_has_the_release_gets_no_temporary_directory(action, remote_tmp, monkeypatch):
    assert len(run(action, [{"changed": False}], monkeypatch)) == 1
    assert not remote_tmp.exists()


def test_a_directory_that_the_first_module_run_needed_is_used_and_removed(
    action, remote_tmp, monkeypatch
):
    """Without pipelining Ansible puts the module into a directory before it runs."""
    action._make_tmp_path()
    run(action, [{"needs_src": True}, {"changed": True}], monkeypatch)
    assert os.listdir(remote_tmp) == []
