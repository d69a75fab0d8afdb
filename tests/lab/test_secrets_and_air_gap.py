"""Fresh nodes with no way out, provisioned by one run that tells all it can, and is watched.

All that the nodes need comes from the controller. No key is to be found anywhere afterwards, nor
was in any process's arguments or variables meanwhile.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import pytest
import requests
from headscale_proxy import headscale_proxy
from lab_command import CHECKOUT, LabCommand
from leftovers import assert_nothing_left
from process_watch import ProcessWatch, watched_processes
from site_run import Run, Site

from lab import tools

NODES = ("node1", "node2")
NOWHERE = "http://192.0.2.1/stable"
STATE = "/var/lib/tailscale/tailscaled.state"


@pytest.fixture(scope="module")
def lab():
    command = LabCommand("secrets")
    command("down")
    before = command.listing()
    command("up", "--nodes", "2")
    for node in NODES:
        command.on(node, "ip route del default; ip -6 route del default")
    yield command
    command("down")
    assert_nothing_left(before, command.listing())


@dataclass
class Watched:
    """The first run, and what could be seen of it from beside."""

    run: Run
    processes: ProcessWatch
    folder: Path  # what the controller wrote
    keys: dict[str, str]


@pytest.fixture(scope="module")
def watched(lab, tmp_path_factory) -> Watched:
    folder = tmp_path_factory.mktemp("controller")
    known = lab.inventory()["lab"]["vars"]
    says_all = {
        "ANSIBLE_LOG_PATH": str(folder / "log"),
        "ANSIBLE_LOCAL_TEMP": str(folder / "tmp"),
        "ANSIBLE_CACHE_PLUGIN": "jsonfile",
        "ANSIBLE_CACHE_PLUGIN_CONNECTION": str(folder / "facts"),
    }
    site = Site(lab)
    with headscale_proxy(known["lab_headscale_url"]) as headscale, watched_processes() as seen:
        run = site(
            "-vvv",
            "--diff",
            env=says_all,
            headcni_headscale_url=headscale.url,
            tailscale_login_server=known["lab_headscale_url"],
            tailscale_method="files",
            tailscale_files_dir=str(tools.TAILSCALE.home / "mirror" / "stable"),
            tailscale_download_url=NOWHERE,
            tailscale_repository_url=NOWHERE,
        )
        (minted,) = headscale.asked("POST", "/api/v1/preauthkey")
    keys = {
        "the API key": (Path(known["lab_dir"]) / "headscale-api-key").read_text().strip(),
        "the pre-auth key": json.loads(minted)["preAuthKey"]["key"],
    }
    for node in NODES:
        for number, key in enumerate(private_keys(lab.on(node, f"cat {STATE}"))):
            keys[f"private key {number} of {node}"] = key
    return Watched(run, seen, folder, keys)


def private_keys(state: str) -> list[str]:
    """Of a node and of its machine, as its tailscaled keeps them; nothing but zeros is none."""
    values = [base64.b64decode(value) for value in json.loads(state).values()]
    found = {key for value in values for key in re.findall(r"privkey:(\w+)", value.decode())}
    return sorted(key for key in found if key.strip("0"))


def test_the_nodes_had_no_way_out(lab, watched):
    for node in NODES:
        assert (
            "unreachable"
            in lab.run(
                "python3", "-m", "lab", "shell", node, "ip route get 192.0.2.1", check=False
            ).stderr
        )
        assert lab.on(node, "ip route show default; ip -6 route show default") == ""


def test_nodes_without_a_way_out_are_provisioned_whole_from_the_controllers_files(lab, watched):
    assert set(watched.run.counted("failed").values()) == {0}
    for node in NODES:
        assert re.search(rf"{node} +host .* ready", watched.run.output)
    assert "every pod reaches every other" in Site(lab).verify().output
    again = Site(lab)(
        tailscale_method="files",
        tailscale_files_dir=str(tools.TAILSCALE.home / "mirror" / "stable"),
        tailscale_download_url=NOWHERE,
    )
    assert again.counted("changed") == dict.fromkeys(NODES, 0)


def test_the_pre_auth_key_of_the_run_is_worth_nothing_now(lab, watched):
    url = lab.inventory()["lab"]["vars"]["lab_headscale_url"]
    signed = {"Authorization": f"Bearer {watched.keys['the API key']}"}
    found = requests.get(f"{url}/api/v1/preauthkey", headers=signed, timeout=10).json()
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
    assert [key["expiration"][:19] <= now for key in found["preAuthKeys"]] == [True]


def test_every_kind_of_key_was_found_out(watched):
    """Or the tests below would look for nothing."""
    kinds = {re.sub(r"\d", "", name) for name in watched.keys}
    assert kinds == {"the API key", "the pre-auth key", "private key  of node"}
    assert min(map(len, watched.keys.values())) >= 32


def test_no_key_was_in_a_process_s_arguments_or_variables(watched):
    assert watched.processes.looks > 100
    assert watched.processes.having("ansible-playbook") != []
    assert watched.processes.having("/usr/sbin/tailscaled") != []  # those of nodes are seen
    found = [(name, where) for name, key in watched.keys.items()
             for where in watched.processes.having(key)]  # fmt: skip
    assert found == []


@pytest.mark.parametrize("plant", ["sh -c 'sleep 1; true' {}", "WORD={} sleep 1"])
def test_a_key_in_the_arguments_or_variables_of_a_node_would_be_seen(lab, plant):
    with watched_processes() as seen:
        lab.on("node2", plant.format("$(printf %s- planted)9f41c7"))  # put together over there
    assert seen.having("planted-9f41c7") != []


def test_no_key_was_shown_or_logged_or_cached_on_the_controller(watched):
    texts = {"output": watched.run.output, "tasks": json.dumps(watched.run.tasks)}
    for path in (*watched.folder.rglob("*"), *(Path.home() / ".ansible").rglob("*")):
        if path.is_file() and "collections" not in path.parts:
            texts[str(path)] = path.read_text(errors="replace")
    assert "AnsiballZ" in watched.run.output or "ESTABLISH SSH" in watched.run.output  # -vvv
    assert any("/log" in name for name in texts)
    found = [(where, name) for where, text in texts.items()
             for name, key in watched.keys.items() if key in text]  # fmt: skip
    assert found == []


def searched(lab: LabCommand, machine: str, command: str, words: list[str]) -> str:
    """A search on a machine, with what to look for on its standard input."""
    return subprocess.run(
        ["python3", "-m", "lab", "shell", machine, command],
        cwd=CHECKOUT,
        env=lab.env,
        input="\n".join(words) + "\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    ).stdout


FILES = "grep -rlaF -f - / --exclude-dir=proc --exclude-dir=sys --exclude-dir=lab 2>/dev/null"
JOURNAL = "cat > /dev/shm/words; journalctl --all -o export | grep -aF -f /dev/shm/words"


def test_no_key_is_in_a_file_or_in_the_journal_of_a_node(lab, watched):
    words = list(watched.keys.values())
    for node in NODES:
        assert searched(lab, node, FILES, words) == ""
        assert searched(lab, node, f"{JOURNAL}; rm /dev/shm/words", words) == ""
    assert searched(lab, "control", f"{JOURNAL}; rm /dev/shm/words", words) == ""


def test_a_key_in_a_file_or_in_the_journal_would_be_found(lab, watched):
    words = list(watched.keys.values())
    leak = "cat > /run/leak; logger -f /run/leak; journalctl --sync"
    searched(lab, "node1", leak, words[:1])
    try:
        assert "/run/leak" in searched(lab, "node1", FILES, words)
        assert words[0] in searched(lab, "node1", f"{JOURNAL}; rm /dev/shm/words", words)
    finally:
        lab.on("node1", "rm /run/leak")
