"""The collection as others get it: built, installed far from the checkout, called by name."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml
from lab_command import CHECKOUT

ANSIBLE = CHECKOUT / ".venv" / "bin"
CHECKOUT_ONLY = {
    *("lab", "tests", "collections", "bench", "extensions", "molecule", "Makefile"),
    *(".ci", ".config", ".venv"),
}


def run(*argv: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(a) for a in argv],
        cwd=cwd,
        env={**os.environ, **env},
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("artifact")
    run(ANSIBLE / "ansible-galaxy", "collection", "build", "--output-path", target, cwd=CHECKOUT)
    return next(target.glob("headcni-mesh-*.tar.gz"))


@pytest.fixture(scope="module")
def installed(artifact, tmp_path_factory) -> Path:
    """A folder elsewhere with the collection in ./collections and nothing else."""
    home = tmp_path_factory.mktemp("elsewhere")
    elsewhere = {"ANSIBLE_COLLECTIONS_PATH": str(home / "collections")}
    run(
        ANSIBLE / "ansible-galaxy",
        "collection",
        "install",
        "--offline",
        artifact,
        "--collections-path",
        home / "collections",
        cwd=home,
        **elsewhere,
    )
    return home


def test_the_artifact_has_nothing_that_only_a_checkout_needs(artifact):
    with tarfile.open(artifact) as archive:
        tops = {name.split("/")[0] for name in archive.getnames()}
    assert tops & CHECKOUT_ONLY == set()
    assert {"roles", "playbooks", "plugins", "meta", "README.md", "LICENSE"} <= tops


def test_the_artifact_tells_what_the_controller_needs(artifact):
    """ansible-builder reads both; pip installs the second."""
    with tarfile.open(artifact) as archive:
        files = {
            name: archive.extractfile(name).read().decode()
            for name in ("meta/execution-environment.yml", "requirements.txt")
        }
    described = yaml.safe_load(files["meta/execution-environment.yml"])
    assert described["dependencies"] == {"python": "requirements.txt"}
    named = re.findall(r"(?m)^([\w-]+)>=[\d.]+$", files["requirements.txt"])
    assert named == ["ansible-core", "requests"]


def test_the_artifact_holds_no_compiled_file_and_no_link_that_leads_out_of_it(artifact):
    with tarfile.open(artifact) as archive:
        assert [n for n in archive.getnames() if n.endswith(".pyc")] == []
        assert [m.name for m in archive if m.issym() and m.linkname.startswith("/")] == []


def test_the_artifact_has_the_native_shim_so_that_a_controller_needs_no_compiler(artifact):
    folder = "plugins/cni/native"
    with tarfile.open(artifact) as archive:
        listed = archive.extractfile(f"{folder}/SHA256SUMS").read().decode().splitlines()
        for digest, name in map(str.split, listed):
            content = archive.extractfile(f"{folder}/{name}").read()
            assert hashlib.sha256(content).hexdigest() == digest
    assert len(listed) == 7


def test_the_playbook_resolves_by_its_full_name_elsewhere(installed):
    inventory = installed / "hosts"
    inventory.write_text("[headcni]\nnowhere ansible_connection=local\n")
    listed = run(
        ANSIBLE / "ansible-playbook",
        "-i",
        inventory,
        "headcni.mesh.site",
        "--list-tasks",
        cwd=installed,
        ANSIBLE_COLLECTIONS_PATH=str(installed / "collections"),
    )
    assert "headcni.mesh.tailscale : Install Tailscale" in listed.stdout


@pytest.mark.parametrize("role", ["tailscale", "headcni_node", "headscale_routes"])
def test_a_role_resolves_by_its_full_name_elsewhere(installed, role):
    shown = run(
        ANSIBLE / "ansible-doc",
        "--type",
        "role",
        f"headcni.mesh.{role}",
        cwd=installed,
        ANSIBLE_COLLECTIONS_PATH=str(installed / "collections"),
    )
    assert f"{role}_" in shown.stdout


def test_the_command_for_all_nodes_works_elsewhere(installed):
    inventory = installed / "nobody"
    inventory.write_text(
        f"[headcni]\nnowhere ansible_connection=local ansible_python_interpreter={ANSIBLE}/python\n"
    )
    home = installed / "collections/ansible_collections/headcni/mesh"
    done = subprocess.run(
        [home / "bin/headcnictl", "-i", inventory, "version"],
        cwd=installed,
        env={**os.environ, "PATH": f"{ANSIBLE}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    missing = "headcnictl: HeadCNI is not installed on this node: run site.yml"
    assert done.stdout == f"nowhere:\n{missing}\n"
    assert done.returncode == 3, done.stderr
