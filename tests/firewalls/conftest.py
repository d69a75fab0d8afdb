"""A lab of nodes with firewalls, for all tests here."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator

import pytest
from firewalled_nodes import CONTAINER_PORT, NODES, SITE, Fleet, Seen
from lab_command import CHECKOUT, LabCommand
from site_run import Site

from lab.image import base_root
from lab.images import web_server

DOCS = CHECKOUT / "docs/firewalls.md"
BEGIN, END = "<!-- seen: begin -->", "<!-- seen: end -->"


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """Nodes that nobody has touched."""
    lab = LabCommand("firewalls", limit=600)
    lab("up", "--nodes", str(len(NODES)))
    made = Fleet(lab, Site(lab, SITE))
    for machine in ("control", *NODES):
        lab.on(machine, "mkdir -p /var/empty")
        made.serve(machine)
    yield made
    lab("down")


@pytest.fixture(scope="session")
def seen(request: pytest.FixtureRequest) -> Iterator[Seen]:
    noted = Seen()
    yield noted
    print(noted.table())
    if os.environ.get("HEADCNI_WRITE_DOCS") and not request.session.testsfailed:
        text = DOCS.read_text()
        before, after = text.partition(BEGIN)[0], text.partition(END)[2]
        DOCS.write_text(f"{before}{BEGIN}\n\n{noted.table()}\n\n{END}{after}")


@pytest.fixture(scope="session")
def container(fleet: Fleet) -> str:
    """A container of Docker's own on node1, published: `docker` must go on serving it."""
    busybox = (base_root() / "bin/busybox").read_bytes()
    archive = web_server("lab.invalid/web:1", busybox, platform.machine())
    fleet.lab.write("node1", "/root/web.tar", archive)
    fleet.lab.on("node1", "docker load -q -i /root/web.tar")
    fleet.lab.on("node1", f"docker run -d --name web -p {CONTAINER_PORT}:80 lab.invalid/web:1")
    return "web"
