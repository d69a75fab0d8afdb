"""Tarballs: which is needed, what is in it, and that all of it is put in place, or nothing."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import os
import stat
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import tailscale_release
from ansible_collections.headcni.mesh.plugins.module_utils.tailscale_release import (
    BEGIN,
    END,
    InstallError,
    Staging,
    architecture,
    block_of,
    checksum_of,
    copy_file,
    elf_machine,
    environment_mistakes,
    fetch_bytes,
    fetch_file,
    installed_version,
    others_may_change,
    private_file,
    unpack,
    variables,
    verify,
    with_block,
)
from hypothesis import example, given
from hypothesis import strategies as st

VERSION = "1.102.5"
# Programs that answer as Tailscale's do, where only that matters: a script is no ELF file, so the
# test that what is unpacked is made for this node is told that it is.
PROGRAM = f"#!/bin/sh\necho {VERSION}\n".encode()


@pytest.mark.parametrize(
    ("machine", "arch"),
    [
        ("x86_64", "amd64"),
        ("i686", "386"),
        ("aarch64", "arm64"),
        ("armv7l", "arm"),
        ("armv6l", "arm"),
        ("s390x", "s390x"),
        ("ppc64le", "ppc64le"),
        ("riscv64", "riscv64"),
    ],
)
def test_every_linux_architecture_has_its_tarball(machine, arch):
    assert architecture(machine) == arch


@pytest.mark.parametrize("machine", ["sparc64", "mips", "ia64", ""])
def test_other_architectures_are_refused_by_name(machine):
    with pytest.raises(InstallError, match=f"architecture is '{machine}': .*riscv64"):
        architecture(machine)


@pytest.mark.parametrize(
    ("head", "arch"),
    [
        (b"\x7fELF\x02\x01" + b"\0" * 12 + b"\x3e\x00", "amd64"),
        (b"\x7fELF\x02\x01" + b"\0" * 12 + b"\xb7\x00", "arm64"),
        (b"\x7fELF\x02\x02" + b"\0" * 12 + b"\x00\x16", "s390x"),
        (b"\x7fELF\x01\x01" + b"\0" * 12 + b"\x08\x00", "the ELF machine 8"),
        (b"#!/bin/sh\n", ""),
        (b"", ""),
    ],
)
def test_what_a_program_is_made_for_is_read_from_its_head(tmp_path, head, arch):
    (tmp_path / "program").write_bytes(head)
    assert elf_machine(str(tmp_path / "program")) == arch


DIGEST = hashlib.sha256(b"x").hexdigest()


@pytest.mark.parametrize(
    "text", [DIGEST, f"{DIGEST}\n", f"{DIGEST}  file.tgz\n", f"sha256:{DIGEST}", DIGEST.upper()]
)
def test_a_checksum_is_read_in_each_of_its_shapes(text):
    assert checksum_of(text, "checksum") == DIGEST


@pytest.mark.parametrize(
    "text", ["", "abc", DIGEST[:-1], f"md5:{DIGEST}", "<html>not found</html>"]
)
def test_what_is_no_checksum_is_refused(text):
    with pytest.raises(InstallError, match=r"^checksum: .* is no SHA-256"):
        checksum_of(text, "checksum")


def test_a_tarball_with_another_checksum_is_refused(tmp_path):
    verify(io.BytesIO(b"x"), DIGEST, "t")
    with pytest.raises(InstallError, match=f"has the SHA-256 {DIGEST}, expected 0000"):
        verify(io.BytesIO(b"x"), "0" * 64, "t")


def test_a_tarball_that_its_owner_rewrites_after_the_check_is_unpacked_as_it_was(tmp_path):
    source = tmp_path / "t"
    source.write_bytes(b"x")
    with source.open("r+b") as attacker, private_file() as copy:
        copy_file(str(source), copy)
        verify(copy, DIGEST, "t")
        attacker.write(b"evil")
        attacker.flush()
        assert source.read_bytes() == b"evil"
        copy.seek(0)
        assert copy.read() == b"x"
        assert os.fstat(copy.fileno()).st_nlink == 0  # it has no name, so nobody can open it


def test_a_pipe_or_a_folder_in_the_place_of_a_tarball_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(InstallError, match="is not a file of at most 1024 MiB"):
            copy_file(str(tmp_path / name), io.BytesIO())
    with pytest.raises(InstallError, match="gone cannot be read: No such file"):
        copy_file(str(tmp_path / "gone"), io.BytesIO())


def test_a_place_that_others_may_change_is_found_wherever_it_is_on_the_path(tmp_path, monkeypatch):
    def owned_by_root(path: str) -> os.stat_result:
        found = os.stat(path, follow_symlinks=False)
        mode = found.st_mode & ~0o022 if not path.startswith(str(tmp_path)) else found.st_mode
        return os.stat_result((mode, *found[1:4], 0, *found[5:10]))

    monkeypatch.setattr(tailscale_release.os, "lstat", owned_by_root)
    (tmp_path / "a").mkdir(mode=0o755)
    (tmp_path / "a/t").write_bytes(b"")
    (tmp_path / "link").symlink_to("a/t")
    assert others_may_change(str(tmp_path / "link")) == ""
    (tmp_path / "a").chmod(0o1777)
    assert others_may_change(str(tmp_path / "link")) == str(tmp_path / "a")
    (tmp_path / "a/t").chmod(0o664)
    assert others_may_change(str(tmp_path / "a/t")) == str(tmp_path / "a/t")


# Putting files in place.


def test_files_are_put_in_place_together_with_their_modes(tmp_path):
    (tmp_path / "one").write_text("old")
    with Staging() as staging:
        staging.write(str(tmp_path / "one"), io.BytesIO(b"new"), 0o755)
        staging.write(str(tmp_path / "deep" / "two"), io.BytesIO(b"new"), 0o600)
        assert (tmp_path / "one").read_text() == "old"
        staging.commit()
    assert (tmp_path / "one").read_text() == (tmp_path / "deep" / "two").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == 0o755
    assert sorted(os.listdir(tmp_path)) == ["deep", "one"]


def test_a_running_program_keeps_the_file_it_was_started_from(tmp_path):
    (tmp_path / "one").write_text("old")
    with (tmp_path / "one").open() as running, Staging() as staging:
        staging.write(str(tmp_path / "one"), io.BytesIO(b"new"), 0o755)
        staging.commit()
        assert running.read() == "old"


def test_nothing_is_changed_when_staging_fails(tmp_path):
    (tmp_path / "one").write_text("old")
    (tmp_path / "file").write_text("")
    with pytest.raises(InstallError, match="nothing was changed"), Staging() as staging:
        staging.write(str(tmp_path / "one"), io.BytesIO(b"new"), 0o755)
        staging.write(str(tmp_path / "file" / "two"), io.BytesIO(b"new"), 0o755)
    assert (tmp_path / "one").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["file", "one"]


def test_what_was_replaced_is_put_back_when_the_last_rename_fails(tmp_path):
    (tmp_path / "one").write_text("old")
    (tmp_path / "two").mkdir()  # a file cannot take the place of a folder
    with pytest.raises(InstallError), Staging() as staging:
        for name in ("fresh", "one", "two"):
            staging.write(str(tmp_path / name), io.BytesIO(b"new"), 0o755)
        staging.commit()
    assert (tmp_path / "one").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["one", "two"]


def test_what_a_killed_run_left_is_used_up(tmp_path):
    (tmp_path / ".one.headcni-new").write_text("half")
    (tmp_path / ".one.headcni-old").write_text("older")
    (tmp_path / "one").write_text("old")
    with Staging() as staging:
        staging.write(str(tmp_path / "one"), io.BytesIO(b"new"), 0o755)
        staging.commit()
    assert os.listdir(tmp_path) == ["one"]


# Unpacking.


@pytest.fixture
def places(tmp_path, monkeypatch) -> Path:
    """A node's folders, with an older Tailscale in them."""
    monkeypatch.setattr(tailscale_release, "CLI", str(tmp_path / "bin/tailscale"))
    monkeypatch.setattr(tailscale_release, "DAEMON", str(tmp_path / "sbin/tailscaled"))
    monkeypatch.setattr(tailscale_release, "elf_machine", lambda _: "amd64")
    for name in ("bin/tailscale", "sbin/tailscaled"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("old")
    return tmp_path


WHOLE = {
    "tailscale": PROGRAM,
    "tailscaled": PROGRAM,
    "systemd/tailscaled.service": b"[Unit]\n",
    "systemd/tailscaled.defaults": b"PORT=1\n",
}


def tarball(contents: dict[str, bytes]) -> io.BytesIO:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, data in contents.items():
            entry = tarfile.TarInfo(f"tailscale_{VERSION}_amd64/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return made


def test_a_whole_tarball_is_unpacked_and_proved(places):
    with Staging() as staging:
        contents = unpack(tarball(WHOLE), "t", VERSION, "amd64", staging)
        staging.commit()
    assert (places / "sbin/tailscaled").read_bytes() == PROGRAM
    assert (contents.unit, contents.defaults) == ("[Unit]\n", "PORT=1\n")
    found = installed_version(str(places / "bin/tailscale"), str(places / "sbin/tailscaled"))
    assert found == VERSION


def without(name: str) -> dict[str, bytes]:
    return {key: data for key, data in WHOLE.items() if key != name}


@pytest.mark.parametrize(
    ("contents", "arch", "said"),
    [
        (without("tailscaled"), "amd64", "has no tailscaled in it"),
        (without("systemd/tailscaled.service"), "amd64", "no systemd/tailscaled.service"),
        ({**WHOLE, "tailscaled": b"#!/bin/sh\necho 1.2.3\n"}, "amd64", "says that it is 1.2.3"),
        ({**WHOLE, "tailscaled": b"#!/bin/sh\nexit 1\n"}, "amd64", "is of no version"),
        ({**WHOLE, "tailscale": b"junk"}, "amd64", "is of no version"),
        (WHOLE, "arm64", "is made for amd64, and this node is arm64"),
    ],
)
def test_a_tarball_that_is_not_the_right_one_changes_nothing(places, contents, arch, said):
    with pytest.raises(InstallError, match=said), Staging() as staging:
        unpack(tarball(contents), "t", VERSION, arch, staging)
    assert (places / "sbin/tailscaled").read_text() == "old"
    assert os.listdir(places / "sbin") == ["tailscaled"]
    assert os.listdir(places / "bin") == ["tailscale"]


@pytest.mark.parametrize("damage", ["text", "empty", "gzip", "cut", "cut in the middle", "sum"])
def test_what_is_no_whole_tarball_changes_nothing(places, damage):
    data = tarball({**WHOLE, "tailscaled": PROGRAM + os.urandom(100000)}).getvalue()
    spoilt = {
        "text": b"<html>404</html>",
        "empty": b"",
        "gzip": gzip.compress(b"no tar"),
        "cut": data[:-10],
        "cut in the middle": data[: len(data) // 2],
        # Only the very end tells: gzip's checksum, after more padding than tar need read.
        "sum": gzip.compress(gzip.decompress(data) + bytes(1 << 20))[:-8] + bytes(8),
    }
    with (
        pytest.raises(InstallError, match=r"t is not a whole tarball|t has no"),
        Staging() as staging,
    ):
        unpack(io.BytesIO(spoilt[damage]), "t", VERSION, "amd64", staging)
        staging.commit()
    assert os.listdir(places / "sbin") == ["tailscaled"]
    assert (places / "sbin/tailscaled").read_text() == "old"


def test_a_member_that_points_elsewhere_is_not_followed(places):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        entry = tarfile.TarInfo("x/tailscale")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(entry)
    with pytest.raises(InstallError, match="has no tailscale in it"), Staging() as staging:
        unpack(made, "t", VERSION, "amd64", staging)


def test_programs_of_two_versions_are_mixed_and_one_alone_is_none(tmp_path):
    for name, said in (("one", "1.0.0"), ("two", "1.0.1")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {said}\n")
        (tmp_path / name).chmod(0o755)
    one, two, none = (str(tmp_path / name) for name in ("one", "two", "none"))
    assert installed_version(one, one) == "1.0.0"
    assert installed_version(one, two) == "mixed"
    assert installed_version(one, none) == installed_version(none, none) == ""


# Fetching.


class _Site(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.asked += 1  # type: ignore[attr-defined]
        if self.path == "/gone":
            self.send_error(404)
            return
        cut = self.path == "/cut" or (self.path == "/once" and self.server.asked == 1)  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", "10")
        self.end_headers()
        self.wfile.write(b"12345" if cut else b"1234567890")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site(monkeypatch) -> Iterator[http.server.ThreadingHTTPServer]:
    monkeypatch.setattr(tailscale_release.time, "sleep", lambda _: None)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Site) as server:
        server.asked = 0  # type: ignore[attr-defined]
        server.url = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def test_a_file_is_fetched_and_a_short_answer_is_tried_again(site):
    fetched = io.BytesIO()
    fetch_file(f"{site.url}/once", fetched, 5)
    assert fetched.getvalue() == b"1234567890"
    assert site.asked == 2
    assert fetch_bytes(f"{site.url}/x", 5) == b"1234567890"


def test_an_answer_that_stays_short_is_given_up_with_its_length(site):
    with pytest.raises(InstallError, match="ended after 5 of 10 bytes"):
        fetch_file(f"{site.url}/cut", io.BytesIO(), 5)
    assert site.asked == 3


def test_what_is_not_there_is_not_asked_for_again(site):
    with pytest.raises(InstallError, match=r"/gone: HTTP 404 Not Found: see that the version"):
        fetch_file(f"{site.url}/gone", io.BytesIO(), 5)
    assert site.asked == 1


def test_a_site_that_is_away_is_named():
    with pytest.raises(InstallError, match=r"127.0.0.1:9/x cannot be fetched: .*refused"):
        fetch_bytes("http://127.0.0.1:9/x", 2)


def test_a_protected_address_that_leads_to_an_unprotected_one_is_refused(monkeypatch):
    class Answer(io.BytesIO):
        def geturl(self) -> str:
            return "http://elsewhere/x"

    monkeypatch.setattr(tailscale_release, "open_url", lambda *_, **__: Answer(b"evil"))
    with pytest.raises(InstallError, match="leads to http://elsewhere/x, which is not protected"):
        fetch_bytes("https://site/x", 5)


# The environment.

NAMES = st.from_regex(r"\A[A-Z_][A-Z0-9_]{0,8}\Z").filter(lambda name: name != "PORT")
VALUES = st.text(st.characters(exclude_characters="\n\r\0", exclude_categories=["Cs"]), max_size=20)


@given(st.text(max_size=60), st.dictionaries(NAMES, VALUES, max_size=4))
@example("", {"A": "\x1e="})  # a line break to Python, and to nobody else
def test_the_owners_part_of_the_file_stays_and_ours_can_be_taken_out_again(text, values):
    if BEGIN in text:
        return
    written = with_block(text, values)
    assert written.startswith(text)
    assert list(block_of(written)) == list(values)
    assert with_block(written, values) == written
    assert with_block(written, {}).rstrip("\n") == text.rstrip("\n")


def test_values_are_quoted_as_systemd_reads_them():
    written = with_block('PORT="41641"\n', {"A": 'x "y" $z \\ `w`'})
    assert written == f'PORT="41641"\n{BEGIN}\nA="x \\"y\\" \\$z \\\\ \\`w\\`"\n{END}\n'


def test_a_block_whose_end_was_lost_is_the_owners_text():
    text = f"{BEGIN}\nA=1\n"
    assert with_block(text, {}) == text


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"1A": "x"}, "environment: '1A' is no name of a variable"),
        ({"A B": "x"}, "'A B' is no name"),
        ({"A": "x\ny"}, "environment.A: the value has a line break"),
        ({"PORT": "1"}, "give the port by the option port"),
    ],
)
def test_an_environment_that_cannot_be_written_is_refused(environment, said):
    (wrong,) = environment_mistakes(environment)
    assert said in wrong


def test_the_port_is_a_variable_too():
    assert variables({"A": 1}, 41642) == {"PORT": "41642", "A": "1"}
    assert variables({}, None) == {}
