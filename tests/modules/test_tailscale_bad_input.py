"""What cannot be done is said in one sentence, and the node is as it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from tailscale_nodes import Failed, Nodes, nodes_of
from tailscale_site import NEWER, OLDER, contents, pack, tarball_name

# A node with Python in a mount namespace of its own, where one thing is not as usual. Python's
# end leaves a list of what is in the folder then.
PYTHON = """\
#!/bin/sh
export SPOIL={spoil!r} FOLDER={folder!r}
exec unshare --mount sh -ec '
    eval "$SPOIL"
    set +e
    /usr/bin/python3 "$@"
    code=$?
    ls -A "$FOLDER" > /run/left
    exit $code
' sh "$@"
"""
SPOILT = {
    "read-only-usr": ("mount --bind /usr /usr; mount -o remount,bind,ro /usr", "/nonexistent"),
    "read-only-etc": ("mount --bind /etc /etc; mount -o remount,bind,ro /etc", "/nonexistent"),
    "full-sbin": ("mount -t tmpfs -o size=8M none /usr/sbin", "/usr/sbin"),
    "full-tmp": ("mount -t tmpfs -o size=8M none /var/tmp", "/var/tmp"),
    "no-systemd": ("mount -t tmpfs none /run/systemd", "/run/systemd"),
}
STATE = (
    "sha256sum /usr/bin/tailscale /usr/sbin/tailscaled /etc/default/tailscaled"
    " /etc/systemd/system/tailscaled.service;"
    " find /usr/bin /usr/sbin /etc/default /etc/apt /usr/share/keyrings /var/tmp"
    " ! -type d '(' -newer /run/mark -o -name '.*headcni*' ')' | sort;"
    " ls -A /var/tmp;"
    " systemctl is-enabled tailscaled; systemctl show -P MainPID tailscaled;"
    " tailscale debug prefs"
)


class Case(NamedTuple):
    options: dict[str, Any]
    said: str
    python: str = ""
    before: str = ""
    after: str = ""


FILES = {"method": "files", "version": OLDER}
PACKAGE = {"method": "package", "version": "1.2.3"}

INSTALL = {
    "an unknown method": Case({"method": "snap"}, "value of method must be one of"),
    "a malformed version": Case({"version": "1.102"}, "version: '1.102' is no version"),
    "latest of tarballs": Case({"version": "latest"}, "version: 'latest' is no version"),
    "a version that does not exist": Case(
        {"version": "1.2.3", "checksum": "0" * 64}, "HTTP 404 Not Found: see that"
    ),
    "a site that is away": Case({"url": "http://127.0.0.1:9"}, "cannot be fetched: "),
    "an address without a scheme": Case({"url": "example.org"}, "is no address such as"),
    "a wrong checksum given": Case({"checksum": "0" * 64}, "expected 0000000"),
    "no checksum at all": Case({"checksum": "sha1:abc"}, "checksum: 'sha1:abc' is no SHA-256"),
    "http without a checksum": Case({"checksums": {}}, "/stable is read over http, so anybody"),
    "a download cut short": Case({"url": "SITE/cut"}, "bytes: try again"),
    "a tarball cut short": Case({"url": "SITE/half"}, "is not a whole tarball of Tailscale's"),
    "no tarball": Case({"url": "SITE/junk"}, "is not a whole tarball of Tailscale's"),
    "a tarball without tailscaled": Case({"url": "SITE/lacks"}, "has no tailscaled in it"),
    "programs of another machine": Case({"url": "SITE/arm"}, "is made for the ELF machine 8, and"),
    "programs of another version": Case(
        {"url": "SITE/other"}, f"says that it is {NEWER}, not {OLDER}"
    ),
    "a file that is not there": Case({**FILES, "src": "/root/none"}, "src: /root/none: there is"),
    "no file given": Case(FILES, "src: none given"),
    "a folder for a file": Case({**FILES, "src": "/root"}, "src: /root: there is no such file"),
    "a text for a file": Case({**FILES, "src": "/etc/passwd"}, "is not a whole tarball"),
    "a read-only /usr": Case(
        {}, "/usr/bin cannot be written: the file system is r", "read-only-usr"
    ),
    "a read-only /etc": Case(
        {}, "cannot be written: the file system is read-only", "read-only-etc"
    ),
    "a full disk for programs": Case({}, "/usr/sbin cannot be written: the disk is ", "full-sbin"),
    "a full disk for downloads": Case({}, "cannot be written: the disk is full", "full-tmp"),
    "no systemd": Case({}, "init is not systemd: with service none", "no-systemd"),
    "a masked unit": Case(
        {},
        "tailscaled.service is masked: run `systemctl unmask",
        before="mv /etc/systemd/system/tailscaled.service /root/; systemctl mask tailscaled",
        after="systemctl unmask tailscaled; mv /root/tailscaled.service /etc/systemd/system/;"
        " systemctl enable tailscaled",
    ),
    "a variable with a blank": Case({"environment": {"A B": 1}}, "'A B' is no name of a variable"),
    "a port out of range": Case({"port": 99999}, "port: 99999 is no port: expected 1 to 65535"),
    "a repository that is away": Case(
        {**PACKAGE, "repository_url": "SITE/none"}, "bookworm.noarmor.gpg: HTTP 404"
    ),
}


@pytest.fixture(scope="module")
def node() -> Iterator[Nodes]:
    """Tailscale is installed and runs, and is not logged in."""
    with nodes_of("tailscale", 1) as made:
        site, whole = made.site, contents(OLDER)
        good = site.files[f"/stable/{tarball_name(OLDER)}"]
        site.offer("cut", OLDER, good)
        site.cut.add(f"/cut/{tarball_name(OLDER)}")
        site.offer("half", OLDER, good[: len(good) // 2])
        site.offer("junk", OLDER, b"junk")
        site.offer("lacks", OLDER, pack({"tailscale": whole["tailscale"]}, OLDER))
        mips = whole["tailscale"][:18] + b"\x08\x00" + whole["tailscale"][20:]
        site.offer("arm", OLDER, pack({**whole, "tailscale": mips}, OLDER))
        site.offer("other", OLDER, site.files[f"/stable/{tarball_name(NEWER)}"])
        made.install()
        for name, (spoil, folder) in SPOILT.items():
            script = PYTHON.format(spoil=spoil, folder=folder)
            made.lab.write("node1", f"/root/{name}", script.encode())
            made.on(f"chmod +x /root/{name}")
        made.on("sleep 0.1; touch /run/mark")
        yield made


def state(node: Nodes) -> str:
    return node.on(STATE)


@pytest.mark.parametrize("name", INSTALL)
def test_what_cannot_be_installed_leaves_the_node_as_it_was(node, name):
    case = INSTALL[name]
    before = state(node)
    options = {"version": OLDER, **case.options}
    options = {k: str(v).replace("SITE", node.site.url) if "SITE" in str(v) else v
               for k, v in options.items()}  # fmt: skip
    if "SITE" in case.options.get("url", ""):
        options["checksums"] = node.site.checksums(case.options["url"].partition("/")[2])
    python = f"/root/{case.python}" if case.python else ""
    if case.before:
        node.on(case.before)
    try:
        with pytest.raises(Failed) as failed:
            node.install(python=python, **options)
    finally:
        if case.after:
            node.on(case.after)
    assert case.said in str(failed.value)
    assert str(failed.value).count("\n") == 0
    assert state(node) == before
    if python and SPOILT[case.python][1] != "/nonexistent":
        assert node.on("cat /run/left") == ""


KEYS = ("expired", "used")


@pytest.fixture(scope="module")
def keys(node) -> dict[str, str]:
    headscale = "/opt/lab/headscale/headscale"
    node.on(f"{headscale} users create headcni", "control")
    make = f"{headscale} preauthkeys create --user 1 --expiration"
    made = {
        "expired": node.on(f"{make} 1s | tail -1; sleep 1.2", "control"),
        "used": node.on(f"{make} 1h | tail -1", "control"),
    }
    node.run("tailscale_join", "node1", login_server=server(node), auth_key=made["used"])
    node.on("tailscale logout; systemctl restart tailscaled; touch /run/mark")
    return made


def server(node: Nodes) -> str:
    return str(node.lab.inventory()["lab"]["vars"]["lab_headscale_url"])


JOIN = {
    "a socket that is not there": Case({"socket": "/run/none"}, "/run/none is not there: start"),
    "a file for a socket": Case({"socket": "/etc/passwd"}, "nobody answers at tailscaled's socket"),
    "another's socket": Case(
        {"socket": "/run/systemd/private"}, "tailscaled went away while asked at"
    ),
    "no key": Case({}, "auth_key: none given, and this node must log in: it is not logged in"),
    "an expired key": Case({"auth_key": "expired"}, "authkey expired: make a new key"),
    "a key that was used up": Case({"auth_key": "used"}, "already used: make a new key, or a"),
    "a key of nobody's": Case({"auth_key": "hskey-auth-x-y"}, "give a key that this very server"),
    "a file for a key": Case({"auth_key": "file:/root/key"}, "auth_key: it starts with file:"),
    "a server that is away": Case(
        {"auth_key": "used", "login_server": "http://127.0.0.1:9", "timeout": 3},
        "see that this node reaches http://127.0.0.1:9",
    ),
    "no address for a server": Case({"login_server": "headscale"}, "login_server: 'headscale' is"),
    "host bits": Case({"advertise_routes": ["10.1.2.3/24"]}, "host bits set: expected 10.1.2.0/24"),
    "an exit node": Case({"advertise_routes": ["0.0.0.0/0"]}, "would make this node an exit node"),
    "no CIDR": Case({"advertise_routes": ["pods"]}, "advertise_routes: 'pods' is no CIDR"),
    "no host name": Case({"hostname": "a_b"}, "hostname: 'a_b' is no host name"),
    "no tag": Case({"tags": ["node"]}, "tags: 'node' is no tag"),
    "no time": Case({"timeout": 0}, "timeout: 0 is too short"),
}


@pytest.mark.parametrize("name", JOIN)
def test_who_cannot_join_is_as_it_was(node, keys, name):
    case = JOIN[name]
    before = state(node)
    options = {"login_server": server(node), "timeout": 20, "accept_routes": True, **case.options}
    if options.get("auth_key") in keys:
        options["auth_key"] = keys[options["auth_key"]]
    with pytest.raises(Failed) as failed:
        node.run("tailscale_join", "node1", **options)
    assert case.said in str(failed.value)
    assert not any(key in str(failed.value) for key in keys.values())
    assert state(node) == before
    assert json.loads(node.on("tailscale status --json"))["BackendState"] == "NeedsLogin"
