# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Install Tailscale on a node: compare what is installed with what is wanted, and do the steps
between.

It uses only the standard library and Ansible's, because it runs on nodes.
"""

from __future__ import annotations

import io
import os
import platform
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from . import openpgp
from .node import secrets_of
from .package_owner import package_owner
from .tailscale_checksums import KNOWN
from .tailscale_packages import Packages, packages
from .tailscale_release import (
    CLI,
    DAEMON,
    DEFAULTS,
    NO_LOGS,
    PLAIN_DEFAULTS,
    UNIT,
    VERSION,
    Contents,
    InstallError,
    Staging,
    architecture,
    block_of,
    checksum_of,
    copy_file,
    environment_mistakes,
    fetch_bytes,
    fetch_file,
    has_only_defaults,
    installed_version,
    is_ours,
    marked,
    others_may_change,
    private_file,
    sweep,
    tarball_name,
    unpack,
    variables,
    verify,
    with_block,
    writing,
)
from .tailscale_service import Service, Unit, lacks, refuse_other_inits, unit_exists


def mistakes(wanted: dict[str, Any]) -> list[str]:
    """All mistakes in the options that can be found without the node."""
    wrong = environment_mistakes(wanted["environment"])
    version, method = wanted["version"], wanted["method"]
    allowed = ("", "latest") if method == "package" else ()
    if wanted["state"] == "present" and version not in allowed and not VERSION.fullmatch(version):
        or_else = ", latest, or none" if method == "package" else f" (method {method} needs one)"
        wrong.append(f"version: {version!r} is no version: expected such as 1.102.5{or_else}")
    if wanted["port"] is not None and not 1 <= wanted["port"] <= 65535:
        wrong.append(f"port: {wanted['port']} is no port: expected 1 to 65535")
    if wanted["timeout"] < 1:
        wrong.append(f"timeout: {wanted['timeout']} is too short: expected a second or more")
    wrong += [
        f"{name}: {wanted[name]!r} is no address such as https://pkgs.tailscale.com/stable"
        for name in ("url", "repository_url")
        if not wanted[name].startswith(("http://", "https://"))
    ]
    sums = {f"checksums.{name}": value for name, value in wanted["checksums"].items()}
    for source, value in {"checksum": wanted["checksum"], **sums}.items():
        if value or source != "checksum":
            try:
                checksum_of(str(value), source)
            except InstallError as problem:
                wrong.append(str(problem))
    wrong += [
        f"repository_keys: {key!r} is no fingerprint: expected 40 hexadecimal digits"
        for key in wanted["repository_keys"]
        if not openpgp.normal(key)
    ]
    if wanted["method"] == "package" and not wanted["repository_keys"]:
        wrong.append("repository_keys: empty, expected the fingerprint of the repository's key")
    return wrong


class Installation:
    """What is installed, what is wanted, and the steps between."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.wanted: dict[str, Any] = module.params
        self.check = module.check_mode
        self.managed = self.wanted["service"] == "managed"
        if platform.system() != "Linux":
            raise InstallError(f"this node runs {platform.system()}: only Linux is supported")
        self.arch = architecture(platform.machine())
        self.service = Service(module.run_command)
        self.before = installed_version()
        self.after = self.before
        self.running = ""
        self.reason = ""
        self.tarball = ""
        self.changed = False
        self.diffs: list[dict[str, str]] = []
        self.texts = {UNIT: _text(UNIT), DEFAULTS: _text(DEFAULTS)}
        self.defaults = PLAIN_DEFAULTS  # what DEFAULTS is where there is none
        # A tailscaled that was there before us still sends its logs: its owner may want support.
        ours = is_ours(self.texts[UNIT]) or not unit_exists() or NO_LOGS in self._block()
        self.environment = {**({NO_LOGS: "true"} if ours else {}), **self.wanted["environment"]}
        if not self.check:
            for path in (CLI, DAEMON, UNIT, DEFAULTS):
                sweep(path)

    # Install.

    def present(self) -> None:
        if self.managed:
            refuse_other_inits()
            self.refuse_a_masked_unit()
        with Staging() as staging:
            if self.wanted["method"] == "package":
                self.from_packages()
            else:
                self.from_tarball(staging)
            if self.before != self.after:
                self.show("tailscale", f"version {self.before}", f"version {self.after}")
            if self.managed:
                self.run(staging)
                return
            self.running = self.service.running_version()
            if not self.check:
                staging.commit()

    def from_packages(self) -> None:
        source = self._packages()
        version = self.wanted["version"]
        have = source.installed()
        if have and version in ("", have):
            self.after = have
            return
        if self.check:
            found = source.available() if source.ready() else []
            newest = found[0] if found else "latest"
            self.after = newest if version in ("", "latest") else version
            self.changed = self.after != have
            return
        with source.prepared():
            self.after = source.choose(version)
            if self.after == have:
                return
            source.install(self.after)
        self.changed = True
        if is_ours(self.texts[UNIT]):
            os.unlink(UNIT)  # from an earlier tarball: it would hide the package's unit
        self.texts = {UNIT: _text(UNIT), DEFAULTS: _text(DEFAULTS)}
        if os.path.isdir("/run/systemd/system"):
            self.service.reload()
            if not have and not self.managed:
                self.service.disable()  # the package's scripts have enabled it

    def from_tarball(self, staging: Staging) -> None:
        version = self.wanted["version"]
        unit_lacks = self.managed and not unit_exists()
        if self.before == version and not unit_lacks:
            return
        name = tarball_name(version, self.arch)
        if self.before not in ("", version):
            self.refuse_a_packages_files(version)
        digest, what = self._checksum(name)
        self.after = version
        self.tarball = name
        self.changed = True
        if self.check:
            return
        with private_file() as tarball:
            if self.wanted["method"] == "tarball":
                fetch_file(what, tarball, *self._site("url")[1:])
            else:
                copy_file(what, tarball)
            if digest:
                verify(tarball, digest, what)
            contents = unpack(tarball, what, version, self.arch, staging)
        if self.managed:
            self.stage_unit(staging, contents, name)

    def _site(self, option: str) -> tuple[str, float, bool]:
        wanted = self.wanted
        return wanted[option].rstrip("/"), wanted["timeout"], wanted["validate_certs"]

    def _checksum(self, name: str) -> tuple[str, str]:
        """The expected SHA-256 of the tarball, if it is known, and the tarball's address."""
        wanted = self.wanted
        given = wanted["checksum"] or str(wanted["checksums"].get(name, ""))
        if wanted["method"] == "tarball":
            what = f"{self._site('url')[0]}/{name}"
            given = given or KNOWN.get(wanted["version"], {}).get(self.arch, "")
            if not given:
                self.refuse_an_unprotected_site(name)
            found = given or fetch_bytes(f"{what}.sha256", *self._site("url")[1:]).decode(
                errors="replace"
            )
            return checksum_of(found, "checksum" if given else f"{what}.sha256"), what
        what = wanted["src"] or ""
        if not os.path.isfile(what) and not self.check:
            raise InstallError(
                f"src: {what or 'none given'}: there is no such file on the node; "
                f"copy {name} there first"
            )
        if not given and not self.check:
            self.refuse_files_of_others(what)
        found = given or _text(f"{what}.sha256")
        return checksum_of(found, "checksum") if found else "", what

    def refuse_an_unprotected_site(self, name: str) -> None:
        """Over http somebody could change the checksum together with the tarball."""
        url = self.wanted["url"]
        if url.startswith("https://") and self.wanted["validate_certs"]:
            return
        why = "over http" if url.startswith("http://") else "without a check of its certificate"
        raise InstallError(
            f"url: {url} is read {why}, so anybody on the way could change what runs as root, and "
            f"no checksum is known for {name}: add its SHA-256 to checksums (role: "
            "tailscale_checksums), or give an https:// address (role: tailscale_download_url)"
        )

    def refuse_files_of_others(self, source: str) -> None:
        """Without a checksum, everybody who may write the tarball decides what runs as root."""
        theirs = others_may_change(source)
        if theirs:
            raise InstallError(
                f"src: users other than root may change {theirs}: give the tarball's SHA-256 by "
                "the option checksum, or put it where only root may write, such as /root"
            )

    def refuse_a_masked_unit(self) -> None:
        if self.service.look().masked:
            raise InstallError(
                f"{self.service.name} is masked: run `systemctl unmask {self.service.name}`, "
                "or use service none"
            )

    def refuse_a_packages_files(self, version: str) -> None:
        owner = package_owner(self.module.run_command, DAEMON)
        if owner:
            raise InstallError(
                f"{DAEMON} {self.before} belongs to the package {owner}, which would put it back: "
                f"use method package, remove that package, or ask for version {self.before} "
                f"instead of {version}"
            )

    def stage_unit(self, staging: Staging, contents: Contents, tarball: str) -> None:
        """The unit, unless there is one that is somebody else's; and its variables, if none."""
        old, new = self.texts[UNIT], marked(contents.unit, tarball)
        if old in ("", contents.unit) or is_ours(old):
            if old != new:
                staging.write(UNIT, io.BytesIO(new.encode()), 0o644)
                self.show(UNIT, old, new)
        else:
            self.module.warn(f"{UNIT} is not of Tailscale's making, and is left as it is")
        self.defaults = contents.defaults

    # Run.

    def run(self, staging: Staging) -> None:
        values = variables(self.environment, self.wanted["port"])
        old = self.texts[DEFAULTS]
        new = with_block(old or self.defaults, values)
        dropped = [name for name in self._block() if name not in values]
        mode = self._mode(values)
        if new != old:
            self.changed = True
            self.show(DEFAULTS, old, new)
            if not self.check:
                staging.write(DEFAULTS, io.BytesIO(new.encode()), mode)
        elif old and os.stat(DEFAULTS).st_mode & 0o777 != mode:
            self.changed = True
            self.show(DEFAULTS, "open to others, with a secret in it", "closed to others")
            if not self.check:
                os.chmod(DEFAULTS, mode)
        unit = self.service.look()
        self.running = self.service.running_version() if unit.active else ""
        self.reason = self._why_restart(unit.active, unit.process, values, dropped)
        if not unit.enabled:
            self.changed = True
            self.show(self.service.name, "disabled", "enabled")
        if self.reason:
            self.changed = True
        if self.check:
            self.running = self.after if self.reason else self.running
            return
        staging.commit()
        try:
            self._set_going(unit)
        except InstallError as problem:
            raise InstallError(f"{problem}. {self._go_back(unit, staging)}") from None

    def _block(self) -> dict[str, None]:
        return block_of(self.texts[DEFAULTS])

    def _mode(self, values: dict[str, str]) -> int:
        if secrets_of(values):
            return 0o600
        return os.stat(DEFAULTS).st_mode & 0o777 if os.path.exists(DEFAULTS) else 0o644

    def _set_going(self, unit: Unit) -> None:
        if self.reason or not unit.enabled:
            self.service.reload()
        if not unit.enabled:
            self.service.enable()
        if self.reason:
            self.service.restart(self.after, self.wanted["timeout"])
            self.running = self.after

    def _go_back(self, unit: Unit, staging: Staging) -> str:
        """Undo everything and run the previous tailscaled again. Returns a sentence with the
        result."""
        kept = self.wanted["method"] == "package" and self.before != self.after
        back = f"The package stays at {self.after}" if kept else "The files are as they were"
        try:
            if not unit.enabled:
                self.service.disable()
            if not unit.active:
                self.service.stop()
            staging.undo()
            self.service.reload()
            if unit.active:
                self.service.restart("", self.wanted["timeout"])
                return f"{back}, and {self.service.running_version()} runs again"
        except InstallError as problem:
            return f"{back}, but: {problem}"
        return back

    def _why_restart(
        self, active: bool, process: int, values: dict[str, str], dropped: list[str]
    ) -> str:
        if not active:
            return "tailscaled does not run"
        if self.running != self.after:
            return f"tailscaled runs {self.running or 'and does not answer'}, not {self.after}"
        stale = [*lacks(process, values), *dropped]
        return f"its environment has changed: {', '.join(stale)}" if stale else ""

    # Remove.

    def absent(self) -> None:
        has_systemd = os.path.isdir("/run/systemd/system")
        owner = package_owner(self.module.run_command, DAEMON) if self.before else ""
        if not self.managed and (owner or unit_exists()):
            return  # the node's own tailscaled needs them
        source = self._packages_of(owner) if owner else None
        files = [path for path in (CLI, DAEMON) if os.path.lexists(path) and not owner]
        if is_ours(self.texts[UNIT]):
            files.append(UNIT)
        rest = with_block(self.texts[DEFAULTS], {})
        if UNIT in files and os.path.exists(DEFAULTS) and has_only_defaults(rest):
            files.append(DEFAULTS)
        changes_rest = DEFAULTS not in files and rest != self.texts[DEFAULTS]
        self.after = ""
        self.changed = bool(owner or files or changes_rest)
        if not self.changed:
            return
        self.show("tailscale", f"version {self.before}", "absent")
        if self.check:
            return
        if has_systemd and self.service.look().loaded:
            self.service.stop()
            self.service.disable()
        if source:
            source.remove()
            source.forget()
            self.service.unmask()  # the package's scripts have masked it
        for path in files:
            with writing(path):
                os.unlink(path)
        if changes_rest:
            with Staging() as staging:
                staging.write(DEFAULTS, io.BytesIO(rest.encode()), self._mode({}))
                staging.commit()
        if has_systemd:
            self.service.reload()

    def _packages(self) -> Packages:
        site = self._site("repository_url")
        return packages(self.module.run_command, self.wanted["repository_keys"], *site)

    def _packages_of(self, owner: str) -> Packages:
        try:
            return self._packages()
        except InstallError:
            raise InstallError(
                f"{DAEMON} belongs to the package {owner}, which is not removed here: remove it "
                "with this system's own package manager"
            ) from None

    def show(self, where: str, before: str, after: str) -> None:
        ended = [
            text if not text or text.endswith("\n") else f"{text}\n" for text in (before, after)
        ]
        self.diffs.append(
            {
                "before_header": where,
                "after_header": where,
                "before": ended[0],
                "after": ended[1],
            }
        )


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
