# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Tailscale from its official package repository, by apt or dnf.

The package's own scripts would start and restart tailscaled as they please. They are run with
SYSTEMD_OFFLINE=1, which makes their systemctl do nothing of the kind: it is done here, once, and
only where it is wanted.

Only the standard library and Ansible's are used, because this runs on nodes.
"""

from __future__ import annotations

import io
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Callable, NamedTuple

from . import openpgp
from .tailscale_release import InstallError, Staging, fetch_bytes

Run = Callable[..., "tuple[int, str, str]"]  # AnsibleModule.run_command
PACKAGE = "tailscale"
APT_LIST = "/etc/apt/sources.list.d/tailscale.list"
APT_KEYRING = "/usr/share/keyrings/tailscale-archive-keyring.gpg"
DNF_REPO = "/etc/yum.repos.d/tailscale.repo"
DNF_KEYRING = "/etc/pki/rpm-gpg/RPM-GPG-KEY-tailscale"
# "Tailscale Inc. (Package repository signing key)", of 2020-02-25, which signs all repositories.
OFFICIAL_KEY = "2596A99EAAB33821893C0A79458CA832957F5868"
_QUIET = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C", "SYSTEMD_OFFLINE": "1"}

# ID of os-release, and Tailscale's directory for it. {major} comes from VERSION_ID.
_DNF_FOLDERS = {
    "rhel": "rhel/{major}",
    "centos": "centos/{major}",
    "ol": "oracle/{major}",
    "amzn": "amazon-linux/{version}",
    "fedora": "fedora",
    "rocky": "fedora",
    "almalinux": "fedora",
}
_UBUNTU_KIN = ("ubuntu", "pop", "linuxmint", "zorin", "neon", "elementary")


class Source(NamedTuple):
    """The place of a distribution's packages, below the repository's address."""

    tool: str  # apt or dnf
    folder: str  # debian, ubuntu, raspbian, rhel/9, …
    suite: str = ""  # bookworm; of apt only


def source_of(os_release: Mapping[str, str]) -> Source:
    name = os_release.get("ID", "")
    codename = os_release.get("VERSION_CODENAME", "")
    version = os_release.get("VERSION_ID", "")
    if name in _UBUNTU_KIN and os_release.get("UBUNTU_CODENAME", codename):
        return Source("apt", "ubuntu", os_release.get("UBUNTU_CODENAME", codename))
    if name in ("debian", "raspbian") and codename:
        return Source("apt", name, codename)
    if os_release.get("DEBIAN_CODENAME"):
        return Source("apt", "debian", os_release["DEBIAN_CODENAME"])
    if name in _DNF_FOLDERS:
        folder = _DNF_FOLDERS[name].format(major=version.partition(".")[0], version=version)
        return Source("dnf", folder)
    shown = f"{name or 'an unknown system'} {version}".strip()
    raise InstallError(
        f"this node runs {shown}, for which no package repository is known here: "
        "use method tarball or files"
    )


def read_os_release(path: str = "/etc/os-release") -> dict[str, str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return {}
    pairs = (line.partition("=") for line in lines if "=" in line and line[:1] != "#")
    return {name.strip(): value.strip().strip("\"'") for name, _unused, value in pairs}


class Packages(ABC):
    """One package of one repository. ``Apt`` and ``Dnf`` implement it."""

    files: tuple[str, ...] = ()

    def __init__(
        self,
        run: Run,
        source: Source,
        keys: Collection[str],
        url: str,
        timeout: float,
        certs: bool,
    ) -> None:
        self._run = run
        self._keys = keys
        self._source = source
        self._url = url.rstrip("/")
        self._timeout = timeout
        self._certs = certs

    @abstractmethod
    def installed(self) -> str:
        """The installed version. Empty if there is none."""

    @abstractmethod
    def available(self) -> list[str]:
        """The versions in the repository as of its last refresh, newest first."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether the repository is set up correctly. Does not use the network."""

    @abstractmethod
    def lacking(self) -> dict[str, bytes]:
        """The files of the repository that are missing or wrong."""

    @abstractmethod
    def refresh(self) -> None:
        """Read the list of packages from the repository."""

    @abstractmethod
    def install(self, version: str) -> None:
        """Install this version, whether it is newer or older than the installed one."""

    @abstractmethod
    def remove(self) -> None:
        """Remove the package from the node. The repository stays."""

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Set up the repository and read its list of packages. If it does not answer as a
        repository, or a later step fails, remove it again, so that the node is as before."""
        files = self.lacking()
        former = {path: _read(path) for path in files}
        _write(files)
        try:
            self.refresh()
            yield
        except BaseException:
            _write({path: data for path, data in former.items() if data})
            for path, data in former.items():
                if not data:
                    os.unlink(path)
            raise

    def forget(self) -> list[str]:
        """Remove the repository's files, and return their paths."""
        gone = [path for path in self.files if os.path.exists(path)]
        for path in gone:
            os.unlink(path)
        return gone

    def choose(self, version: str) -> str:
        """The version to install. The repository must have it."""
        found = self.available()
        if not found:
            raise InstallError(
                f"the repository at {self._url}/{self._source.folder} has no {PACKAGE} "
                "for this node: see that its address is right"
            )
        if version in ("", "latest"):
            return found[0]
        if version not in found:
            raise InstallError(
                f"version: the repository at {self._url} has no {version}; it has "
                f"{', '.join(found[:10])}"
            )
        return version

    def _has_only_our_keys(self, path: str) -> bool:
        have = _read(path)
        try:
            return openpgp.only(have, self._keys) == openpgp.binary(have)
        except openpgp.KeyringError:
            return False

    def _fetched_keyring(self, name: str) -> bytes:
        """The server's keys, without those that are not expected."""
        address = f"{self._url}/{self._source.folder}/{name}"
        try:
            return openpgp.only(fetch_bytes(address, self._timeout, self._certs), self._keys)
        except openpgp.KeyringError as problem:
            raise InstallError(
                f"repository_keys: {address} cannot be trusted: {problem}. Nothing was installed. "
                "See that the address is right; for a repository that somebody else signs, give "
                "the fingerprint of its key (role: tailscale_repository_keys)"
            ) from None

    def _do(self, *words: str, check: bool = True) -> str:
        code, out, err = self._run(list(words), environ_update=_QUIET)
        if code != 0 and check:
            said = [line.strip() for line in (err or out).splitlines() if line.strip()]
            shown = "; ".join(said[-3:]) or f"exit code {code}"
            named = [word for word in words if word[:1] != "-"]
            raise InstallError(f"`{' '.join(named)}` failed: {shown}")
        return str(out) if code == 0 else ""


class Apt(Packages):
    files = (APT_LIST, APT_KEYRING)

    def installed(self) -> str:
        query = "--showformat=${db:Status-Status} ${Version}"
        state, _unused, version = self._do(
            "dpkg-query", "--show", query, PACKAGE, check=False
        ).partition(" ")
        return version.strip() if state == "installed" else ""

    def available(self) -> list[str]:
        lines = self._do("apt-cache", "madison", PACKAGE).splitlines()
        fields = [[field.strip() for field in line.split("|")] for line in lines]
        ours = f"{self._url}/{self._source.folder} "
        found = [f[1] for f in fields if len(f) == 3 and f[2].startswith(ours)]
        return sorted(dict.fromkeys(found), key=_numbers, reverse=True)

    def _line(self) -> bytes:
        where = f"{self._url}/{self._source.folder} {self._source.suite} main"
        return f"deb [signed-by={APT_KEYRING}] {where}\n".encode()

    def ready(self) -> bool:
        return self._has_only_our_keys(APT_KEYRING) and _read(APT_LIST) == self._line()

    def lacking(self) -> dict[str, bytes]:
        files = {} if _read(APT_LIST) == self._line() else {APT_LIST: self._line()}
        if not self._has_only_our_keys(APT_KEYRING):
            files[APT_KEYRING] = self._fetched_keyring(f"{self._source.suite}.noarmor.gpg")
        return files

    def refresh(self) -> None:
        only = ("Dir::Etc::sourcelist=" + APT_LIST, "Dir::Etc::sourceparts=-")
        patience = ("Acquire::Retries=2", "Acquire::http::Timeout=30", "Acquire::https::Timeout=30")
        mode = ("APT::Get::List-Cleanup=0", "APT::Update::Error-Mode=any")
        options = (*only, *patience, *mode)
        self._do("apt-get", "update", "--quiet=2", *(f"--option={one}" for one in options))

    def install(self, version: str) -> None:
        self._do(
            *("apt-get", "install", "--yes", "--quiet=2", "--no-install-recommends"),
            *("--allow-downgrades", "--option=DPkg::Lock::Timeout=300"),
            "--option=Dpkg::Options::=--force-confold",
            f"{PACKAGE}={version}",
        )

    def remove(self) -> None:
        lock = "--option=DPkg::Lock::Timeout=300"
        self._do("apt-get", "remove", "--yes", "--quiet=2", lock, PACKAGE)


class Dnf(Packages):
    files = (DNF_REPO, DNF_KEYRING)

    def installed(self) -> str:
        return self._do("rpm", "--query", "--queryformat=%{VERSION}", PACKAGE, check=False).strip()

    def available(self) -> list[str]:
        found = self._do(
            *("dnf", "--quiet", "--disablerepo=*", "--enablerepo=tailscale-*", "repoquery"),
            *("--queryformat=%{version}\n", PACKAGE),
        ).split()
        return sorted(dict.fromkeys(found), key=_numbers, reverse=True)

    def _text(self) -> bytes:
        """As Tailscale's own, but not from the server, which could turn the checks off."""
        where = f"{self._url}/{self._source.folder}/$basearch"
        lines = ("[tailscale-stable]", "name=Tailscale stable", f"baseurl={where}", "enabled=1")
        checks = ("type=rpm", "repo_gpgcheck=1", "gpgcheck=1", f"gpgkey=file://{DNF_KEYRING}")
        return "\n".join((*lines, *checks, "")).encode()

    def ready(self) -> bool:
        return self._has_only_our_keys(DNF_KEYRING) and _read(DNF_REPO) == self._text()

    def lacking(self) -> dict[str, bytes]:
        files = {} if _read(DNF_REPO) == self._text() else {DNF_REPO: self._text()}
        if not self._has_only_our_keys(DNF_KEYRING):
            files[DNF_KEYRING] = openpgp.armored(self._fetched_keyring("repo.gpg"))
        return files

    def refresh(self) -> None:
        self._do("dnf", "--quiet", "--assumeyes", "--disablerepo=*", "--enablerepo=tailscale-*",
                 "makecache", "--refresh")  # fmt: skip

    def install(self, version: str) -> None:
        have = self.installed()
        verb = "downgrade" if have and _numbers(version) < _numbers(have) else "install"
        self._do("dnf", "--quiet", "--assumeyes", verb, f"{PACKAGE}-{version}")

    def remove(self) -> None:
        self._do("dnf", "--quiet", "--assumeyes", "remove", PACKAGE)


def packages(run: Run, keys: Collection[str], url: str, timeout: float, certs: bool) -> Packages:
    source = source_of(read_os_release())
    made = {"apt": Apt, "dnf": Dnf}[source.tool]
    expected = {openpgp.normal(key) for key in keys}
    return made(run, source, expected, url, timeout, certs)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _write(files: Mapping[str, bytes]) -> None:
    with Staging() as staging:
        for path, data in files.items():
            staging.write(path, io.BytesIO(data), 0o644)
        staging.commit()
