"""tailscale_install on nodes: put there, kept, upgraded, downgraded, taken away; and the role."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tailscale_nodes import DERP, Failed, Nodes, nodes_of
from tailscale_site import ARCH, NEWER, OLDER, contents, pack, repository, tarball_name


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with nodes_of("tailscale", 2) as made:
        yield made


@pytest.fixture
def installed(nodes) -> Nodes:
    nodes.install()
    return nodes


@pytest.fixture
def bare(nodes) -> Nodes:
    nodes.install(state="absent")
    return nodes


LEFTOVERS = (
    "ls -d /usr/bin/.tail* /usr/sbin/.tail* /etc/default/.tail* /var/tmp/* 2>/dev/null; true"
)


def test_a_dry_run_predicts_the_first_run_and_touches_nothing(bare):
    predicted = bare.install(check=True)
    assert bare.on("ls /usr/sbin/tailscaled 2>&1; true").endswith("No such file or directory")
    done = bare.install()
    for name in ("changed", "version_before", "version_after", "running_version", "restarted"):
        assert predicted[name] == done[name]
    assert (done["version_before"], done["version_after"]) == ("", NEWER)
    assert bare.on("tailscale version | head -1; systemctl is-enabled tailscaled") == (
        f"{NEWER}\nenabled"
    )
    assert bare.on(LEFTOVERS) == ""


def test_a_second_run_changes_nothing_downloads_nothing_and_restarts_nothing(installed):
    before, asked = installed.process(), len(installed.site.asked)
    for check in (True, False):
        again = installed.install(check=check)
        assert (again["changed"], again["restarted"]) == (False, False)
        assert "+++" not in again["shown"]
    assert (installed.process(), len(installed.site.asked)) == (before, asked)


def test_a_version_is_pinned_up_and_down_and_the_one_that_runs_follows(installed):
    for version, former in ((OLDER, NEWER), (NEWER, OLDER)):
        done = installed.install(version=version)
        assert (done["version_before"], done["version_after"]) == (former, version)
        assert done["restart_reason"] == f"tailscaled runs {former}, not {version}"
        running = json.loads(installed.on("tailscale status --json --peers=false || true"))
        assert running["Version"].startswith(version)


def test_a_restart_that_a_former_run_owes_is_made_up_for(installed):
    """As if a run had been cut off between the programs and the restart."""
    installed.install(version=OLDER, service="none")
    done = installed.install(version=OLDER)
    assert (done["version_before"], done["restarted"]) == (OLDER, True)
    assert done["restart_reason"] == f"tailscaled runs {NEWER}, not {OLDER}"


def test_the_environment_is_what_the_running_one_has_and_the_owners_lines_stay(installed):
    installed.on("echo '# mine' >> /etc/default/tailscaled")
    done = installed.install(environment={**DERP, "TS_X": "a $b"}, port=41700)
    assert done["restart_reason"] == "its environment has changed: PORT, TS_X"
    environ = installed.on(f"tr '\\0' '\\n' < /proc/{installed.process()}/environ")
    assert {"PORT=41700", "TS_X=a $b"} <= set(environ.splitlines())
    assert "# mine" in installed.on("cat /etc/default/tailscaled")
    back = installed.install()
    assert back["restart_reason"] == "its environment has changed: PORT, TS_X"
    assert "41700" not in installed.on("cat /etc/default/tailscaled")
    assert installed.install()["changed"] is False


def test_it_sends_no_logs_to_tailscales_servers_unless_told_or_it_was_there_before(bare):
    def variable() -> str:
        environ = bare.on(f"tr '\\0' '\\n' < /proc/{bare.process()}/environ")
        return next((one for one in environ.splitlines() if one.startswith("TS_NO_LOGS")), "")

    bare.install()
    assert variable() == "TS_NO_LOGS_NO_SUPPORT=true"
    told = {**DERP, "TS_NO_LOGS_NO_SUPPORT": "false"}
    assert "TS_NO_LOGS_NO_SUPPORT" in bare.install(environment=told)["restart_reason"]
    assert variable() == "TS_NO_LOGS_NO_SUPPORT=false"
    assert bare.install(environment=told)["changed"] is False

    # As an owner would have it: his own unit, and nothing of ours among its variables.
    bare.on("sed -i /TS_NO_LOGS/d /etc/default/tailscaled")
    bare.on("sed -i /^#/d /etc/systemd/system/tailscaled.service")
    bare.on("systemctl daemon-reload && systemctl restart tailscaled")
    try:
        assert bare.install()["changed"] is False
        assert variable() == ""
    finally:
        bare.on("systemctl disable --now tailscaled")
        bare.on("rm /etc/systemd/system/tailscaled.service /etc/default/tailscaled")


def test_a_secret_among_the_variables_is_closed_to_others_and_stays_so(installed):
    secret = {**DERP, "SOME_TOKEN": "longsecret"}
    installed.install(environment=secret)
    installed.on("chmod 644 /etc/default/tailscaled")
    for check in (True, False):
        done = installed.install(environment=secret, check=check)
        assert (done["changed"], done["restarted"]) == (True, False)
    assert installed.on("stat -c %a /etc/default/tailscaled") == "600"
    assert installed.install(environment=secret)["changed"] is False
    assert installed.install()["restarted"] is True


def test_with_service_none_the_nodes_own_tailscaled_is_left_alone(installed):
    before, unit = installed.process(), installed.on("cat /etc/systemd/system/tailscaled.service")
    done = installed.install(version=OLDER, service="none", environment={"TS_Y": "1"}, port=1234)
    assert (done["version_after"], done["restarted"]) == (OLDER, False)
    assert installed.process() == before
    assert installed.on("cat /etc/systemd/system/tailscaled.service") == unit
    assert "TS_Y" not in installed.on("cat /etc/default/tailscaled")
    assert installed.install(version=OLDER, service="none")["changed"] is False


def test_with_service_none_a_bare_node_gets_the_programs_and_nothing_else(bare):
    done = bare.install(service="none")
    assert (done["changed"], done["running_version"]) == (True, "")
    assert (
        bare.on(
            "ls /etc/default/tailscaled /etc/systemd/system/tailscaled.service 2>/dev/null; true"
        )
        == ""
    )
    assert bare.install(service="none")["changed"] is False
    assert bare.install(service="managed")["restarted"] is True


def test_absent_takes_all_away_and_leaves_the_nodes_keys(installed):
    installed.on("touch /var/lib/tailscale/keep")
    assert installed.install(state="absent", check=True)["changed"] is True
    done = installed.install(state="absent")
    assert (done["changed"], done["version_after"]) == (True, "")
    places = "/usr/bin /usr/sbin /etc/default /etc/systemd"
    left = f"find {places} -name '*tailscale*'; systemctl is-active tailscaled; true"
    assert installed.on(left) == "inactive"
    assert installed.on("ls /var/lib/tailscale/keep")
    assert installed.install(state="absent")["changed"] is False


def test_a_tailscaled_that_does_not_start_is_replaced_by_the_former_one(installed):
    text = installed.on("cat /etc/default/tailscaled")
    with pytest.raises(
        Failed, match=rf"restart tailscaled.service` failed.*and {NEWER} runs again"
    ):
        installed.install(version=OLDER, environment={**DERP, "FLAGS": "--no-such-flag"})
    assert installed.on("cat /etc/default/tailscaled") == text
    assert installed.install()["changed"] is False
    assert installed.on(LEFTOVERS) == ""


def test_one_that_does_not_start_on_a_bare_node_leaves_it_bare(bare):
    with pytest.raises(Failed, match="The files are as they were"):
        bare.install(environment={"FLAGS": "--no-such-flag"})
    assert bare.on("ls /usr/bin/tailscale /usr/sbin/tailscaled 2>/dev/null; true") == ""
    assert bare.install()["changed"] is True


def test_a_unit_of_somebody_elses_is_kept(bare):
    bare.install()
    bare.on("sed -i '1s/.*/# mine/' /etc/systemd/system/tailscaled.service")
    done = bare.install(version=OLDER)
    assert "is left as it is" in " ".join(done["warned"].split())
    assert bare.on("head -1 /etc/systemd/system/tailscaled.service") == "# mine"
    bare.on("systemctl disable --now tailscaled; rm /etc/systemd/system/tailscaled.service")


# From files, as on nodes that reach no site.


def test_a_tarball_on_the_node_is_enough(bare):
    source = f"/root/{tarball_name(NEWER)}"
    bare.lab.write("node1", source, bare.site.files[f"/stable/{tarball_name(NEWER)}"])
    asked = len(bare.site.asked)
    done = bare.install(method="files", src=source, url="http://127.0.0.1:9")
    assert (done["version_after"], done["running_version"]) == (NEWER, NEWER)
    assert bare.install(method="files", src="/root/gone")["changed"] is False
    assert len(bare.site.asked) == asked


ROLE = """\
- hosts: node2
  gather_facts: false
  vars: {_tailscale_trust_preflight: true}
  tasks:
    - ansible.builtin.include_role: {name: headcni.mesh.tailscale, tasks_from: preflight}
    - ansible.builtin.include_role: {name: headcni.mesh.tailscale, tasks_from: install}
"""


def test_k3s_ansible_393_nodes_without_a_way_out_are_served_by_the_controller(nodes, tmp_path):
    nodes.run("tailscale_install", "node2", state="absent")
    (tmp_path / "play.yml").write_text(ROLE)
    (tmp_path / tarball_name(NEWER)).write_bytes(nodes.site.files[f"/stable/{tarball_name(NEWER)}"])
    nodes.on("ip route del default; ip -6 route del default; true", "node2")
    argv = (
        *("-i", "inventories/lab", str(tmp_path / "play.yml"), "-e", "tailscale_method=files"),
        *("-e", f"tailscale_files_dir={tmp_path}", "-e", f"tailscale_version={NEWER}"),
    )
    asked = len(nodes.site.asked)
    nodes.lab.run(".venv/bin/ansible-playbook", *argv, "--check")
    first = nodes.lab.run(".venv/bin/ansible-playbook", *argv).stdout
    assert "Copy the tarball to the node" in first
    assert nodes.on("tailscale version | head -1; ls /var/tmp", "node2") == NEWER
    again = nodes.lab.run(".venv/bin/ansible-playbook", *argv).stdout
    assert "changed=0" in again
    assert "Copy the tarball to the node" not in again
    assert len(nodes.site.asked) == asked


# What a user of the node without any rights does: the name is known beforehand, and so are the
# bytes, which anybody can download.
ATTACKER = """\
import os, shutil, sys, time
name, good, evil, seconds = sys.argv[1], sys.argv[2], sys.argv[3], 120
for _ in range(seconds * 100):
    for folder in [*os.listdir("/var/tmp"), "."]:
        path = os.path.join("/var/tmp", folder, name)
        try:
            mine = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            continue
        with open(good, "rb") as content:
            os.write(mine, content.read())
        print("planted", path, flush=True)
        for _ in range(seconds * 1000):
            if os.fstat(mine).st_uid == 0:  # the role has taken the file for its own
                with open(evil, "rb") as content:
                    os.ftruncate(mine, 0)
                    os.pwrite(mine, content.read(), 0)
                print("rewritten", path, flush=True)
                sys.exit()
            time.sleep(0.001)
    time.sleep(0.01)
"""


def test_a_local_user_who_plants_the_tarball_does_not_become_root(nodes, tmp_path):
    nodes.run("tailscale_install", "node2", state="absent")
    name = tarball_name(NEWER)
    good = nodes.site.files[f"/stable/{name}"]
    files = contents(NEWER)
    evil = pack({**files, "tailscaled": files["tailscaled"] + b"EVIL"}, NEWER)
    for path, data in (("good", good), ("evil", evil), ("attack.py", ATTACKER.encode())):
        nodes.lab.write("node2", f"/srv/{path}", data)
    nodes.on(
        "chmod 644 /srv/*; systemd-run --quiet --unit=attack --uid=nobody"
        f" python3 /srv/attack.py {name} /srv/good /srv/evil; sleep 3",
        "node2",
    )
    try:
        (tmp_path / "play.yml").write_text(ROLE)
        (tmp_path / name).write_bytes(good)
        nodes.lab.run(
            *(".venv/bin/ansible-playbook", "-i", "inventories/lab", str(tmp_path / "play.yml")),
            *("-e", "tailscale_method=files", "-e", f"tailscale_files_dir={tmp_path}"),
            *("-e", f"tailscale_version={NEWER}"),
        )
        assert "planted" in nodes.on("journalctl --no-pager --unit=attack", "node2")
        assert nodes.on("tail -c 4 /usr/sbin/tailscaled | tr -d '\\0'", "node2") != "EVIL"
        assert "rewritten" not in nodes.on("journalctl --no-pager --unit=attack", "node2")
    finally:
        nodes.on(f"systemctl stop attack; rm -rf /srv/* /var/tmp/{name}; true", "node2")


# From packages.


@pytest.fixture(scope="module")
def apt(nodes, tmp_path_factory) -> Iterator[Nodes]:
    if shutil.which("gpg") is None:
        pytest.fail("gpg signs the test's repository: install it")
    folder: Path = tmp_path_factory.mktemp("apt")
    repository(nodes.site, folder, "repo/debian", "bookworm", OLDER, NEWER)
    nodes.run("tailscale_install", "node1", state="absent")
    yield nodes
    nodes.run("tailscale_install", "node1", state="absent", method="package")


def by_package(apt: Nodes, **options: Any) -> Any:
    repository_url = f"{apt.site.url}/repo"
    given = {"repository_url": repository_url, "repository_keys": apt.site.keys, **options}
    return apt.install(method="package", **given)


def test_packages_come_from_the_signed_repository_and_are_pinned_up_and_down(apt):
    predicted = by_package(apt, check=True, version=OLDER)
    assert apt.on("ls /etc/apt/sources.list.d/") == ""
    done = by_package(apt, version=OLDER)
    assert (predicted["changed"], predicted["version_after"]) == (True, done["version_after"])
    assert (done["version_after"], done["running_version"]) == (OLDER, OLDER)
    assert by_package(apt, version=OLDER)["changed"] is False
    newest = by_package(apt, version="latest")
    assert (newest["version_before"], newest["running_version"]) == (OLDER, max(OLDER, NEWER))
    assert by_package(apt, version="")["changed"] is False
    assert by_package(apt, version="latest")["changed"] is False
    again = by_package(apt, version=min(OLDER, NEWER))
    assert (again["version_after"], again["restarted"]) == (min(OLDER, NEWER), True)
    assert "signed-by=" in apt.on("cat /etc/apt/sources.list.d/tailscale.list")


def test_the_latest_is_what_the_repository_has_now_whatever_the_node_remembers(apt, tmp_path):
    """Also where preflight, which does not refresh the node's lists, sees nothing to do."""
    by_package(apt, state="absent")
    (tmp_path / "play.yml").write_text(ROLE.replace("node2", "node1"))
    argv = (
        *("-i", "inventories/lab", str(tmp_path / "play.yml"), "-e", "tailscale_method=package"),
        *("-e", f"tailscale_repository_url={apt.site.url}/grows", "-e", "tailscale_version=latest"),
    )
    keys = apt.site.keys
    for versions in (sorted((OLDER, NEWER))[:1], (OLDER, NEWER)):
        repository(apt.site, tmp_path, "grows/debian", "bookworm", *versions)
        given = json.dumps({"tailscale_repository_keys": apt.site.keys})
        apt.lab.run(".venv/bin/ansible-playbook", *argv, "-e", given)
        assert apt.on("tailscale version | head -1") == max(versions)
    again = apt.lab.run(".venv/bin/ansible-playbook", *argv, "-e", given).stdout
    assert "changed=0" in again
    apt.site.keys = keys
    by_package(apt, state="absent")


def test_a_packages_files_are_not_overwritten_by_a_tarball(apt):
    by_package(apt, version=NEWER)
    with pytest.raises(Failed, match=r"belongs to the package tailscale.*use method package"):
        apt.install(version=OLDER)
    assert apt.install(version=NEWER)["changed"] is False


def test_a_package_with_service_none_restarts_nothing_and_enables_nothing(apt):
    by_package(apt, version=NEWER)
    before = apt.process()
    done = by_package(apt, version=OLDER, service="none")
    assert (done["version_after"], done["restarted"], apt.process()) == (OLDER, False, before)
    assert by_package(apt, state="absent")["changed"] is True
    by_package(apt, version=NEWER, service="none")
    assert apt.on("systemctl is-enabled tailscaled; systemctl is-active tailscaled; true") == (
        "disabled\ninactive"
    )
    assert by_package(apt, version=NEWER)["restarted"] is True


def test_a_package_can_be_removed_and_a_tarball_put_in_its_place(apt):
    by_package(apt, version=NEWER)
    gone = by_package(apt, state="absent")
    assert gone["changed"] is True
    assert (
        apt.on("ls /etc/apt/sources.list.d/ /usr/share/keyrings | grep -c tailscale; true") == "0"
    )
    assert apt.install(version=NEWER)["running_version"] == NEWER
    assert by_package(apt, version=NEWER)["changed"] is True
    assert apt.on("systemctl show -P FragmentPath tailscaled").startswith("/lib/systemd/system/")


def test_a_repository_that_is_not_signed_by_its_key_is_not_left_behind(apt):
    by_package(apt, state="absent")
    stranger = apt.site.files["/repo/debian/dists/bookworm/InRelease"].replace(b"test", b"evil")
    for path, data in list(apt.site.files.items()):
        if path.startswith("/repo/"):
            apt.site.files[path.replace("/repo/", "/evil/")] = data
    apt.site.files["/evil/debian/dists/bookworm/InRelease"] = stranger
    with pytest.raises(Failed, match=r"`apt-get update` failed"):
        by_package(apt, repository_url=f"{apt.site.url}/evil", version=NEWER)
    assert (
        apt.on("ls /etc/apt/sources.list.d/; ls /usr/share/keyrings | grep tailscale; true") == ""
    )


def test_a_repository_that_is_signed_by_its_own_key_is_not_trusted_on_first_use(apt):
    """The mirror, or somebody on the way to it, has replaced the packages, signature and key."""
    by_package(apt, state="absent")
    with pytest.raises(Failed, match=rf"its keys are {apt.site.keys[0]}, expected 2596A99EAAB3"):
        apt.install(method="package", repository_url=f"{apt.site.url}/repo", version=NEWER)
    assert (
        apt.on("ls /etc/apt/sources.list.d/; ls /usr/share/keyrings | grep tailscale; true") == ""
    )


def test_a_version_that_the_repository_lacks_is_refused_with_those_it_has(apt):
    by_package(apt, state="absent")
    with pytest.raises(Failed, match=rf"has no 1.2.3; it has {NEWER}, {OLDER}"):
        by_package(apt, version="1.2.3")
    assert (
        apt.on("ls /etc/apt/sources.list.d/; ls /usr/share/keyrings | grep tailscale; true") == ""
    )


def test_the_architecture_is_named_as_tailscale_names_it(nodes):
    assert nodes.run("tailscale_info", "node1")["arch"] == ARCH
