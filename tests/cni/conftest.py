"""Every test gets a node of its own: a network namespace, a store, and a world outside.

What runs is the release, unpacked and linked as on a node.
"""

from __future__ import annotations

import shutil
import tarfile

import pytest
from cni_node import CniNode, sh
from lab_command import CHECKOUT

PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13")


@pytest.fixture(scope="session")
def release(tmp_path_factory):
    """The tarball that `make release` makes."""
    folder = tmp_path_factory.mktemp("dist")
    made = sh(
        CHECKOUT / ".venv/bin/python", CHECKOUT / "plugins/cni/release.py", "--output", folder
    )
    return folder / made.stdout.strip().rpartition("/")[2]


@pytest.fixture(scope="session")
def plugins(release, tmp_path_factory):
    """/opt/cni/bin of a node that has installed it."""
    opt = tmp_path_factory.mktemp("opt")
    with tarfile.open(release) as archive:
        archive.extractall(opt / "releases", filter="data")
    (opt / "bin").mkdir()
    for name in ("headcni", "headcni-ipam", "loopback"):
        program = next((opt / "releases").glob(f"*/bin/{name}"))
        (opt / "bin" / name).symlink_to(program)
    return opt / "bin"


@pytest.fixture
def node(tmp_path, plugins):
    made = CniNode.create(tmp_path, plugins)
    yield made
    made.remove()


@pytest.fixture(params=["bridge", "routed"])
def datapath(request):
    return request.param


def _find(version: str) -> str | None:
    """An interpreter of that version; pyenv's shims only pretend to be one."""
    import os

    for folder in (*os.environ["PATH"].split(":"), *_pyenv(version)):
        found = shutil.which(f"python{version}", path=folder)
        if found and "shims" not in found:
            return found
    return None


def _pyenv(version: str) -> list[str]:
    import glob
    import os

    return glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin"))


@pytest.fixture(params=PYTHONS)
def python(request):
    found = _find(request.param)
    if found is None:
        pytest.skip(f"there is no Python {request.param} on this machine")
    return found
