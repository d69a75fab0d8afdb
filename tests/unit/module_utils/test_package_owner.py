"""Whose a file is, by what each package manager really says."""

from __future__ import annotations

import os

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import package_owner
from ansible_collections.headcni.mesh.plugins.module_utils.node import run_bounded

SAID = {
    "/usr/bin/dpkg-query": (0, "tailscale: /usr/sbin/tailscaled\n", ""),
    "/usr/bin/rpm": (0, "tailscale", ""),
    "/usr/bin/pacman": (0, "tailscale\n", ""),
    "/sbin/apk": (0, "tailscale\n", ""),
}
UNKNOWN = {
    "/usr/bin/dpkg-query": (1, "", "dpkg-query: no path found matching pattern /x"),
    "/usr/bin/rpm": (1, "file /x is not owned by any package", ""),
    "/usr/bin/pacman": (1, "", "error: No package owns /x"),
    "/sbin/apk": (1, "", "ERROR: /x: Could not find owner package"),
}


@pytest.mark.parametrize("tool", SAID)
def test_the_owner_of_a_file_is_found_by_each(tool, monkeypatch):
    monkeypatch.setattr(os.path, "exists", lambda path: path == tool)
    asked = []

    def run(argv, environ_update):
        asked.append(argv)
        return answers[tool]

    answers = SAID
    assert package_owner.package_owner(run, "/usr/sbin/tailscaled") == "tailscale"
    assert asked[0][0] == tool and asked[0][-1] == "/usr/sbin/tailscaled"
    answers = UNKNOWN
    assert package_owner.package_owner(run, "/x") == ""


@pytest.mark.skipif(not os.path.exists("/usr/bin/dpkg-query"), reason="a real dpkg is asked")
def test_the_dpkg_of_this_machine_knows_its_own_file(tmp_path):
    assert package_owner.package_owner(run_bounded, "/usr/bin/dpkg-query") == "dpkg"
    assert package_owner.package_owner(run_bounded, str(tmp_path / "mine")) == ""
