"""README.md and docs/quick-start.md, typed by somebody who has nothing but their own machines.

Every command is run as it is printed, in one terminal that begins in an empty directory, on nodes
that nobody has provisioned. The names on the pages (node1.example.org, headscale.example.org, the
repository at GitHub) lead to the lab and to this checkout. The only typed answer is the API key.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from documented_commands import Step, steps
from lab_command import CHECKOUT, LabCommand
from leftovers import assert_nothing_left
from public_names import HEADSCALE, addresses, give_public_names
from reader_terminal import Terminal, terminal
from traffic import Traffic

from lab.layout import Lab

pytestmark = pytest.mark.timeout(900)

NODES = ("node1", "node2", "node3", "node4")
# Each walk has nodes of its own, which appear in it as node1.example.org and node2.example.org.
WALKS = {"README.md": ("node1", "node2"), "docs/quick-start.md": ("node3", "node4")}
LEFT_ON_A_NODE = (
    "ls -d /opt/headcni /etc/headcni /var/lib/headcni /opt/cni/bin/headcni"
    " /etc/cni/net.d/10-headcni.conflist /usr/local/bin/headcnictl /var/lib/tailscale 2>/dev/null;"
    " systemctl list-unit-files --no-legend 'headcni*' 'tailscaled*'"
)


@dataclass(frozen=True)
class Walk:
    lab: LabCommand
    nodes: tuple[str, ...]
    terminal: Terminal
    api_key: str

    def take(self, step: Step) -> str:
        answers = f"{self.api_key}\n" if step.asks_for_the_key else ""
        return self.terminal.run(step.commands, answers)

    def assert_untouched(self) -> None:
        for node in self.nodes:
            assert self.lab.on(node, LEFT_ON_A_NODE, check=False) == "", node
        headscale = "/opt/lab/headscale/headscale nodes list -o json"
        assert not json.loads(self.lab.on("control", headscale))

    def assert_nothing_to_diagnose(self) -> None:
        """On fresh nodes, before their first pod."""
        for node in self.nodes:
            self.lab.on(node, "headcnictl diagnose")

    def assert_pods_talk(self) -> None:
        """By pods of our own, whatever the playbook that verifies has said."""
        pods = Traffic(self.lab, self.nodes)
        pods.pods()
        try:
            pods.reached()
        finally:
            pods.no_pods()


@pytest.fixture(scope="module")
def lab() -> Iterator[LabCommand]:
    command = LabCommand("quick-start")
    command("down")
    before = command.listing()
    command("up", "--nodes", str(len(NODES)))
    yield command
    command("down")
    assert_nothing_left(before, command.listing())


@pytest.fixture(scope="module")
def ca_file(lab: LabCommand, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return give_public_names(lab, NODES, tmp_path_factory.mktemp("authority"))


@pytest.fixture
def walk(request: pytest.FixtureRequest, lab: LabCommand, ca_file: Path) -> Iterator[Walk]:
    nodes = WALKS[request.param]
    files = Lab.named(lab.name)
    found = lab.inventory()["_meta"]["hostvars"]
    names = {f"node{n}.example.org": found[node]["ansible_host"] for n, node in enumerate(nodes, 1)}
    known_hosts = files.ssh_key.with_name("known_hosts")
    # By the names of the page, as a reader's known_hosts would have them.
    keys = dict(line.split(" ", 1) for line in known_hosts.read_text().splitlines())
    # A short path: below it are SSH's sockets, whose paths may have 108 characters.
    with tempfile.TemporaryDirectory(prefix="hct-", dir="/tmp") as short:
        folder = Path(short)
        (folder / "known_hosts").write_text(
            "".join(f"{name} {keys[address]}\n" for name, address in names.items())
        )
        ssh_config = (
            f"Host *.example.org\n  IdentityFile {files.ssh_key}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {folder}/known_hosts\n  StrictHostKeyChecking yes\n"
        )
        hosts = {HEADSCALE: addresses(lab)[0], **names}
        with terminal(folder, hosts, ssh_config, ca_file) as opened:
            yield Walk(lab, nodes, opened, files.api_key.read_text().strip())


@pytest.mark.parametrize(("page", "walk"), [(one, one) for one in WALKS], indirect=["walk"])
def test_every_command_of_the_page_works_as_it_is_printed(page: str, walk: Walk) -> None:
    found = steps(CHECKOUT / page)
    for playbook in ("site", "verify", "uninstall"):
        assert any(step.runs(playbook) for step in found), playbook
    walk.assert_untouched()
    begun = time.monotonic()
    for step in found:
        said = walk.take(step)
        print(f"{page}:{step.line} ({step.section}), {time.monotonic() - begun:.0f} s\n{said}")
        assert walk.api_key not in said
        if step.only_checks:
            walk.assert_untouched()
        if step.runs("site") and not step.runs("verify"):
            walk.assert_nothing_to_diagnose()
        if step.runs("verify"):
            walk.assert_pods_talk()
    walk.assert_untouched()
