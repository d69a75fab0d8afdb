"""`ansible-test sanity` on a copy of the collection as users get it: what `make test-sanity` runs.

ansible-test looks only at folders called …/ansible_collections/NAMESPACE/NAME, so the artifact is
built and unpacked as one. It makes a virtual environment for each kind of test, and fetches pip for
them from a site of Ansible's own; as Python brings one along, that is taken instead. All of it is
kept in the cache, in a home of its own: the user's is left alone.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from types import SimpleNamespace

CHECKOUT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
LIMIT = 1800

# What ansible-test runs in an environment that is empty but for Python; its arguments are pip's.
BOOTSTRAP = """\
import runpy, subprocess, sys
subprocess.check_output([sys.executable, "-m", "ensurepip"])
sys.argv[1:] = ["install", *(word for word in sys.argv[1:] if not word.startswith("--no-"))]
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""

# Tests that have nothing to look at here.
SKIPPED = {
    "pslint": "no PowerShell",
}


def main() -> int:
    home = cache() / "ansible-test"
    prepare(home)
    with tempfile.TemporaryDirectory(prefix="headcni-sanity-") as folder:
        copy = stage(Path(folder))
        skipped = [word for test in SKIPPED for word in ("--skip-test", test)]
        command = [BIN / "ansible-test", "sanity", "--color", "no", *skipped, *sys.argv[1:]]
        env = {**os.environ, "HOME": str(home), "PATH": path()}
        return subprocess.run(command, cwd=copy, env=env, timeout=LIMIT, check=False).returncode


def cache() -> Path:
    sys.path.insert(0, str(CHECKOUT))
    from lab.layout import cache_dir

    return cache_dir()


def prepare(home: Path) -> None:
    """pip for its environments, and the user's own settings of pip: ansible-test hands on neither
    variables nor a home."""
    from ansible_test._internal.python_requirements import get_venv_packages

    version = get_venv_packages(SimpleNamespace(version=""))["pip"]
    scripts = home / ".ansible/test/cache"
    scripts.mkdir(parents=True, exist_ok=True)
    (scripts / f"get_pip_{version.replace('.', '_')}.py").write_text(BOOTSTRAP)
    settings = configparser.RawConfigParser()
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    for name, value in re.findall(r"^(\S+?)='(.*)'$", listed, re.MULTILINE):
        section, _, key = name.rpartition(".")
        section = "global" if section == ":env:" else section
        if not settings.has_section(section):
            settings.add_section(section)
        settings.set(section, key, value)
    path = home / ".config/pip/pip.conf"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)  # an index's address may hold a password
    with path.open("w") as file:
        settings.write(file)


def stage(folder: Path) -> Path:
    """The artifact, built and unpacked."""
    build = [BIN / "ansible-galaxy", "collection", "build", "--output-path", folder]
    subprocess.run(build, cwd=CHECKOUT, stdout=subprocess.DEVNULL, timeout=120, check=True)
    copy = folder / "ansible_collections/headcni/mesh"
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(copy, filter="data")
    (copy / "tests").mkdir()
    shutil.copy(CHECKOUT / "tests/config.yml", copy / "tests")
    return copy


def path() -> str:
    """With every Python that there is, and without pyenv's shims, which only pretend to be one."""
    folders = [one for one in os.environ["PATH"].split(":") if not one.endswith("/shims")]
    return ":".join([*folders, *map(str, Path.home().glob(".pyenv/versions/*/bin"))])


if __name__ == "__main__":
    sys.exit(main())
