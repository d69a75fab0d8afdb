"""A lab's nodes, the tailscale modules on them, and a site from which they get Tailscale."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lab_command import LabCommand
from leftovers import assert_nothing_left
from tailscale_site import NEWER, OLDER, Site, contents, pack, served

from lab.layout import Lab, Plan

SOCKET = "/run/tailscale/tailscaled.sock"
DERP = {"TS_DEBUG_USE_DERP_HTTP": "true"}


class Failed(Exception):
    pass


@dataclass(frozen=True)
class Nodes:
    """Modules on the lab's nodes, as a task of a playbook would run them."""

    lab: LabCommand
    site: Site

    def run(
        self, module: str, node: str, *, check: bool = False, python: str = "", **options: Any
    ) -> Any:
        argv = ["-i", "inventories/lab", node, "-m", f"headcni.mesh.{module}"]
        argv += ["-a", json.dumps(options or {"socket": SOCKET}), "--diff", *["--check"] * check]
        if python:
            argv += ["-e", f"ansible_python_interpreter={python}"]
        json_ = {"ANSIBLE_CALLBACK_RESULT_FORMAT": "json"}
        done = self.lab.run(".venv/bin/ansible", *argv, check=False, **json_)
        shown, arrow, said = done.stdout.partition(" => ")
        assert arrow, done.stdout + done.stderr
        found = json.JSONDecoder().raw_decode(said)[0]
        if "FAILED" in shown:
            raise Failed(found["msg"])
        assert "SUCCESS" in shown or "CHANGED" in shown, done.stdout + done.stderr
        return {**found, "shown": shown, "warned": done.stderr}

    def install(self, node: str = "node1", **options: Any) -> Any:
        given = {
            "version": NEWER,
            "url": f"{self.site.url}/stable",
            "checksums": self.site.checksums(),
            "environment": DERP,
            **options,
        }
        return self.run("tailscale_install", node, **given)

    def on(self, command: str, node: str = "node1") -> str:
        return self.lab.on(node, command).strip()

    def process(self, node: str = "node1") -> str:
        return self.on("systemctl show -P MainPID tailscaled", node)


@contextmanager
def nodes_of(name: str, count: int) -> Iterator[Nodes]:
    """Bare ones. Afterwards nothing of them may be left."""
    lab = LabCommand(name)
    lab("down")
    before = lab.listing()
    lab("up", "--nodes", str(count))
    plan = Plan.load(Lab.named(name))
    with served(str(plan.host)) as site:
        for version in (OLDER, NEWER):
            site.offer("stable", version, pack(contents(version), version))
        yield Nodes(lab, site)
    lab("down")
    assert_nothing_left(before, lab.listing())
