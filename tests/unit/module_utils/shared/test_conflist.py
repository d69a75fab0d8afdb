"""The conflist on a real directory: written, kept, interrupted, put back."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from pathlib import Path
from typing import Any, Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headcni.shared import conflist
from headcni.shared.conflist import (
    NAME,
    SUFFIX,
    ConflistError,
    Options,
    build,
    plan,
    plan_restore,
    restore,
    survey,
    validate,
    write,
)

FLANNEL = '{"name": "cbr0", "cniVersion": "0.3.1", "plugins": [{"type": "flannel"}]}\n'
LOOPBACK = '{"cniVersion": "0.4.0", "name": "lo", "type": "loopback"}\n'
CONF = build(Options(["10.244.1.0/24"]))


busy_machine = settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def tree(directory: Path) -> dict[str, tuple[bytes, int, int]]:
    """Every file with its content, mode and time of change."""
    return {
        file.name: (file.read_bytes(), file.stat().st_mode, file.stat().st_mtime_ns)
        for file in directory.iterdir()
        if file.is_file()
    }


@pytest.fixture
def net_d(tmp_path: Path) -> Path:
    """A directory with two rivals and files that no runtime picks up."""
    for name, text in (
        ("05-calico.conf", '{"name": "k8s", "cniVersion": "0.3.1", "type": "calico"}'),
        ("10-flannel.conflist", FLANNEL),
        ("99-loopback.conf", LOOPBACK),
        ("README.txt", "hello"),
    ):
        (tmp_path / name).write_text(text)
    (tmp_path / "05-calico.conf").chmod(0o640)
    os.utime(tmp_path / "10-flannel.conflist", (1_000_000_000, 1_000_000_000))
    (tmp_path / "calico.d.conf").mkdir()
    return tmp_path


def names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


def test_the_headcni_conflist_has_what_the_plugin_needs() -> None:
    conf = build(
        Options(
            ["10.244.1.0/24", "fd00:1::/64"],
            service_cidrs=["10.96.0.0/16"],
            cluster_cidrs=["10.244.0.0/16", "fd00::/48"],
            headscale_url="https://hs.example.org",
            magic_dns={"enable": True, "base_domain": "mesh.example.org"},
        )
    )
    assert conf["cniVersion"] == "1.0.0"
    assert conf["cniVersions"] == ["1.0.0", "1.1.0"]
    [plugin] = conf["plugins"]
    assert plugin["type"] == "headcni"
    assert plugin["enable_ipv6"] is True
    assert plugin["bridge"] == "headcni0"
    assert plugin["ipam"] == {
        "type": "headcni-ipam",
        "ranges": [[{"subnet": "10.244.1.0/24"}], [{"subnet": "fd00:1::/64"}]],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
    }


def test_the_bridge_variant_is_that_of_the_specification() -> None:
    options = Options(["10.244.1.0/24"], plugin="bridge", ipam="host-local", cni_version="0.4.0")
    conf = build(options)
    assert conf == {
        "cniVersion": "0.4.0",
        "name": "headcni",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "headcni0",
                "isGateway": True,
                "ipMasq": True,
                "hairpinMode": True,
                "mtu": 1280,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": "10.244.1.0/24"}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }
        ],
    }


def test_anti_spoofing_is_only_spelt_out_where_it_differs_from_the_default() -> None:
    plain = build(Options(["10.244.1.0/24"]))["plugins"][0]
    assert not [key for key in plain if key.startswith("anti_spoofing")]
    given = {"pod_cidrs": ["10.244.1.0/24"], "anti_spoofing": False}
    off = build(Options.of({**given, "anti_spoofing_exempt": "a/*,b/c"}))["plugins"][0]
    assert off["anti_spoofing"] is False
    assert off["anti_spoofing_exempt"] == ["a/*", "b/c"]


def test_a_capability_that_a_chained_plugin_takes_is_not_asked_for_twice() -> None:
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    conf = build(Options(["10.244.1.0/24"], chained=[portmap]))
    assert "portMappings" not in conf["plugins"][0]["capabilities"]
    assert conf["plugins"][0]["capabilities"]["bandwidth"] is True
    assert conf["plugins"][1] == portmap
    assert "cniVersions" not in conf, "a chained Go plugin may not speak 1.1.0"


def test_options_are_taken_from_module_parameters() -> None:
    options = Options.of({"pod_cidrs": "10.1.0.0/24, fd00::/64", "mtu": None, "mode": "daemon"})
    assert options == Options(["10.1.0.0/24", "fd00::/64"], mode="daemon")
    with pytest.raises(ConflistError, match="mtuu"):
        Options.of({"pod_cidrs": ["10.1.0.0/24"], "mtuu": 1280})


@pytest.mark.parametrize("cidrs", [[], ["10.1.0.0/24", "10.2.0.0/24"], ["10.1.0.9/24"], ["x"]])
def test_no_conflist_is_built_for_pod_cidrs_that_cannot_be_right(cidrs: list[str]) -> None:
    with pytest.raises(ConflistError):
        build(Options(cidrs))


def test_what_is_extra_goes_into_the_first_plugin_as_it_is() -> None:
    conf = build(Options(["10.1.0.0/24"], extra={"delegate_timeout": 5}))
    assert conf["plugins"][0]["delegate_timeout"] == 5


def broken(**changes: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(CONF)), **changes}


def with_ipam(**changes: Any) -> dict[str, Any]:
    conf = broken()
    conf["plugins"][0]["ipam"].update(changes)
    return conf


@pytest.mark.parametrize(
    ("conf", "path"),
    [
        ([], ""),
        (None, ""),
        (broken(name=""), "name"),
        (broken(name="-x"), "name"),
        (broken(name="a/b"), "name"),
        (broken(name="é"), "name"),
        (broken(name=3), "name"),
        (broken(cniVersion="0.2.0"), "cniVersion"),
        (broken(cniVersion=None), "cniVersion"),
        (broken(cniVersions="1.0.0"), "cniVersions"),
        (broken(cniVersions=["2.0.0"]), "cniVersions"),
        (broken(disableCheck="yes"), "disableCheck"),
        (broken(plugin=[]), "plugin"),
        (broken(plugins=[]), "plugins"),
        (broken(plugins={}), "plugins"),
        (broken(plugins=["bridge"]), "plugins[0]"),
        (broken(plugins=[{}]), "plugins[0].type"),
        (broken(plugins=[{"type": "../sh"}]), "plugins[0].type"),
        (broken(plugins=[{"type": "x", "capabilities": []}]), "plugins[0].capabilities"),
        (broken(plugins=[{"type": "x", "capabilities": {"a": 1}}]), "plugins[0].capabilities"),
        (broken(plugins=[{"type": "x", "mtu": "1280"}]), "plugins[0].mtu"),
        (broken(plugins=[{"type": "x", "mtu": 100}]), "plugins[0].mtu"),
        (broken(plugins=[{"type": "x", "mtu": True}]), "plugins[0].mtu"),
        (broken(plugins=[{"type": "x", "bridge": "a-name-too-long-"}]), "plugins[0].bridge"),
        (broken(plugins=[{"type": "x", "ipam": []}]), "plugins[0].ipam"),
        (broken(plugins=[{"type": "x", "ipam": {"a": 1}}]), "plugins[0].ipam.type"),
        (with_ipam(ranges={}), "plugins[0].ipam.ranges"),
        (with_ipam(ranges=[[]]), "plugins[0].ipam.ranges[0]"),
        (with_ipam(ranges=[[{}]]), "plugins[0].ipam.ranges[0][0].subnet"),
        (with_ipam(ranges=[["x"]]), "plugins[0].ipam.ranges[0][0]"),
        (with_ipam(subnet="10.1.0.9/24"), "plugins[0].ipam.subnet"),
        (with_ipam(subnet="10.1.0.0/24", gateway="10.2.0.1"), "plugins[0].ipam.gateway"),
        (with_ipam(subnet="10.1.0.0/24", rangeStart="x"), "plugins[0].ipam.rangeStart"),
        (with_ipam(subnet="10.1.0.0/24", rangeEnd=7), "plugins[0].ipam.rangeEnd"),
        (with_ipam(routes={}), "plugins[0].ipam.routes"),
        (with_ipam(routes=[{}]), "plugins[0].ipam.routes[0].dst"),
        (with_ipam(routes=["0.0.0.0/0x"]), "plugins[0].ipam.routes[0].dst"),
    ],
)
def test_each_mistake_is_named_by_its_path(conf: Any, path: str) -> None:
    assert [mistake.path for mistake in validate(conf)] == [path]


def test_all_mistakes_are_named_at_once_and_nothing_is_written(tmp_path: Path) -> None:
    conf = broken(name="", cniVersion="9", plugins=[{"type": "x", "mtu": 1}, {}])
    with pytest.raises(ConflistError, match=r"4 mistakes.*name.*cniVersion.*mtu.*plugins\[1\]"):
        write(conf, str(tmp_path))
    assert names(tmp_path) == []


def test_a_subnet_with_host_bits_is_answered_with_the_right_one() -> None:
    [mistake] = validate(with_ipam(subnet="10.1.0.9/24"))
    assert "10.1.0.0/24" in str(mistake)


def test_keys_of_a_domain_and_comments_are_nobodys_mistake() -> None:
    assert validate({**CONF, "_comment": "x", "example.org/key": 1}) == []


@busy_machine
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "name",
                        "plugins",
                        "type",
                        "ipam",
                        "ranges",
                        "subnet",
                        "routes",
                        "dst",
                        "mtu",
                        "bridge",
                        "capabilities",
                    ]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=20,
    )
)
def test_nothing_that_json_can_say_makes_the_check_itself_fail(conf: Any) -> None:
    for mistake in validate(conf):
        str(mistake)


def test_ours_is_in_charge_and_the_rivals_have_stepped_aside(net_d: Path) -> None:
    before = tree(net_d)
    done = write(CONF, str(net_d))

    assert done.changed
    assert done.back_up == ("05-calico.conf", "10-flannel.conflist")
    assert survey(str(net_d)).picked() == NAME
    assert json.loads((net_d / NAME).read_text())["plugins"] == CONF["plugins"]
    after = tree(net_d)
    for name in done.back_up:
        assert after[name + SUFFIX] == before[name], "content, mode and time are those of before"
    for name in ("99-loopback.conf", "README.txt"):
        assert after[name] == before[name]


def test_a_second_write_changes_nothing_at_all(net_d: Path) -> None:
    write(CONF, str(net_d))
    before, inode = tree(net_d), (net_d / NAME).stat().st_ino
    again = write(CONF, str(net_d))
    assert not again.changed
    assert again.diff() == []
    assert (tree(net_d), (net_d / NAME).stat().st_ino) == (before, inode)


def test_the_plan_of_check_mode_is_what_is_then_done(net_d: Path) -> None:
    before = tree(net_d)
    foreseen = plan(survey(str(net_d)), CONF)
    assert tree(net_d) == before
    assert write(CONF, str(net_d)) == foreseen
    text, files = foreseen.diff()
    assert (text["before"], text["after"]) == ("", (net_d / NAME).read_text())
    assert files["after"] == "05-calico.conf.headcni-backup\n10-flannel.conflist.headcni-backup\n"


def test_the_file_is_closed_to_others_unless_asked_otherwise(tmp_path: Path) -> None:
    write(CONF, str(tmp_path))
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600
    assert write(CONF, str(tmp_path), mode=0o644).changed
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o644


def test_a_directory_that_is_not_there_is_made(tmp_path: Path) -> None:
    write(CONF, str(tmp_path / "etc/cni/net.d"))
    assert names(tmp_path / "etc/cni/net.d") == [NAME]


def test_networks_of_podman_stay_where_podman_looks_for_them(tmp_path: Path) -> None:
    (tmp_path / "87-podman-bridge.conflist").write_text(FLANNEL)
    assert write(CONF, str(tmp_path)).back_up == ()


def test_a_loopback_that_a_runtime_would_pick_before_ours_steps_aside(tmp_path: Path) -> None:
    (tmp_path / "00-loopback.conf").write_text(LOOPBACK)
    assert write(CONF, str(tmp_path)).back_up == ("00-loopback.conf",)


def test_what_is_kept_in_front_of_ours_is_said(tmp_path: Path) -> None:
    (tmp_path / "00-multus.conf").write_text(FLANNEL)
    done = write(CONF, str(tmp_path), keep=["*multus*"])
    assert done.back_up == ()
    assert done.left == (f"00-multus.conf is kept, and comes before {NAME}",)


def test_a_file_that_is_to_be_kept_after_all_comes_back(net_d: Path) -> None:
    write(CONF, str(net_d))
    done = write(CONF, str(net_d), keep=["*flannel*"])
    assert (done.put_back, done.changed) == (("10-flannel.conflist",), True)
    assert (net_d / "10-flannel.conflist").read_text() == FLANNEL
    assert not write(CONF, str(net_d), keep=["*flannel*"]).changed


def test_a_file_of_our_name_that_is_not_ours_is_backed_up_too(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(FLANNEL)
    assert write(CONF, str(tmp_path)).back_up == (NAME,)
    assert (tmp_path / (NAME + SUFFIX)).read_text() == FLANNEL
    assert not write(CONF, str(tmp_path)).changed
    restore(str(tmp_path))
    assert names(tmp_path) == [NAME]
    assert (tmp_path / NAME).read_text() == FLANNEL


def test_a_changed_conflist_of_ours_replaces_the_old_one_without_a_backup(tmp_path: Path) -> None:
    write(CONF, str(tmp_path))
    done = write(build(Options(["10.244.2.0/24"])), str(tmp_path))
    assert (done.writes, done.back_up) == (True, ())
    assert names(tmp_path) == [NAME]


def test_ours_by_a_former_name_is_removed_and_never_comes_back(tmp_path: Path) -> None:
    write(CONF, str(tmp_path))
    done = write(CONF, str(tmp_path), name="05-headcni.conflist")
    assert done.remove == (NAME,)
    assert names(tmp_path) == ["05-headcni.conflist"]
    restore(str(tmp_path), "05-headcni.conflist")
    assert names(tmp_path) == []


def test_a_rival_that_was_written_anew_steps_aside_again(net_d: Path) -> None:
    write(CONF, str(net_d))
    (net_d / "10-flannel.conflist").write_text(FLANNEL.replace("cbr0", "cbr1"))
    assert write(CONF, str(net_d)).back_up == ("10-flannel.conflist",)
    restore(str(net_d))
    assert "cbr1" in (net_d / "10-flannel.conflist").read_text()


def test_a_broken_rival_a_dead_link_and_a_pipe_step_aside_too(tmp_path: Path) -> None:
    (tmp_path / "01-broken.conflist").write_text("{")
    (tmp_path / "02-link.conf").symlink_to("/nowhere")
    os.mkfifo(tmp_path / "03-pipe.json")
    done = write(CONF, str(tmp_path))
    assert done.back_up == ("01-broken.conflist", "02-link.conf", "03-pipe.json")
    assert (tmp_path / ("02-link.conf" + SUFFIX)).is_symlink()
    restore(str(tmp_path))
    assert names(tmp_path) == ["01-broken.conflist", "02-link.conf", "03-pipe.json"]


@pytest.mark.parametrize("name", ["x.conf", "a/b.conflist", ".x.conflist", "", "x"])
def test_only_a_plain_name_of_a_conflist_is_accepted(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConflistError, match="conflist"):
        write(CONF, str(tmp_path), name=name)


def test_without_hard_links_the_backup_is_made_by_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_args: Any, **_kwargs: Any) -> None:
        raise PermissionError("no links here")

    (tmp_path / NAME).write_text(FLANNEL)
    monkeypatch.setattr(os, "link", refused)
    write(CONF, str(tmp_path))
    assert (tmp_path / (NAME + SUFFIX)).read_text() == FLANNEL
    assert survey(str(tmp_path)).picked() == NAME


def test_restore_leaves_the_directory_exactly_as_it_was(net_d: Path) -> None:
    before, listing = tree(net_d), names(net_d)
    write(CONF, str(net_d))
    write(build(Options(["10.244.2.0/24"])), str(net_d))
    foreseen = plan_restore(survey(str(net_d)))
    done = restore(str(net_d))
    assert done == foreseen
    assert done.changed
    assert (tree(net_d), names(net_d)) == (before, listing)
    assert not restore(str(net_d)).changed


def test_restore_does_not_overwrite_what_somebody_wrote_meanwhile(net_d: Path) -> None:
    write(CONF, str(net_d))
    (net_d / "10-flannel.conflist").write_text("newer")
    done = restore(str(net_d))
    assert (net_d / "10-flannel.conflist").read_text() == "newer"
    assert done.left == (
        f"10-flannel.conflist{SUFFIX} stays: somebody has written 10-flannel.conflist anew",
    )
    assert (net_d / ("10-flannel.conflist" + SUFFIX)).read_text() == FLANNEL
    assert not restore(str(net_d)).changed


def test_restore_removes_no_file_that_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(FLANNEL)
    done = restore(str(tmp_path))
    assert (done.changed, len(done.left)) == (False, 1)
    assert names(tmp_path) == [NAME]


def test_restore_where_nothing_is_says_so(tmp_path: Path) -> None:
    assert not restore(str(tmp_path / "missing")).changed
    assert not restore(str(tmp_path)).changed


class Cut(BaseException):
    """Like a power failure: no handler of ordinary errors sees it."""


def cut_at(monkeypatch: pytest.MonkeyPatch, step: int) -> Callable[[], int]:
    """Let the first ``step`` system calls that change something through, then cut."""
    calls = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > step:
                raise Cut
            return real(*args, **kwargs)

        return call

    for name in ("open", "link", "replace", "unlink", "fsync", "fchmod"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    return lambda: calls


def run_cut_at_every_step(
    work: Callable[[], object], prepare: Callable[[], None], check: Callable[[], None]
) -> int:
    """Cut ``work`` at its first, second, … step, until it gets through; ``check`` each time."""
    for step in range(200):
        prepare()
        with pytest.MonkeyPatch.context() as patch:
            cut_at(patch, step)
            try:
                work()
            except Cut:
                finished = False
            else:
                finished = True
        check()
        if finished:
            return step
    raise AssertionError("never got through")


@pytest.mark.parametrize("ours_was_there", [True, False])
def test_a_write_cut_off_at_any_step_is_finished_by_the_next(
    net_d: Path, ours_was_there: bool
) -> None:
    (net_d / "99-loopback.conf").unlink()
    if ours_was_there:
        (net_d / NAME).write_text(FLANNEL)
    original = tree(net_d)
    write(CONF, str(net_d))
    wanted = {name: content for name, (content, *_) in tree(net_d).items()}
    restore(str(net_d))

    def always_some_network() -> None:
        assert survey(str(net_d)).picked() != "", "a runtime found no network at all"
        picked = (net_d / survey(str(net_d)).picked()).read_text()
        json.loads(picked)

    def finish_and_compare() -> None:
        always_some_network()
        write(CONF, str(net_d))
        assert {name: content for name, (content, *_) in tree(net_d).items()} == wanted
        restore(str(net_d))
        assert tree(net_d) == original

    steps = run_cut_at_every_step(lambda: write(CONF, str(net_d)), lambda: None, finish_and_compare)
    assert steps > 8


@pytest.mark.parametrize("ours_was_there", [True, False])
def test_a_restore_cut_off_at_any_step_is_finished_by_the_next(
    net_d: Path, ours_was_there: bool
) -> None:
    (net_d / "99-loopback.conf").unlink()
    if ours_was_there:
        (net_d / NAME).write_text(FLANNEL)
    original = tree(net_d)

    def finish_and_compare() -> None:
        assert survey(str(net_d)).picked() != ""
        restore(str(net_d))
        assert tree(net_d) == original

    def prepare() -> None:
        write(CONF, str(net_d))

    steps = run_cut_at_every_step(lambda: restore(str(net_d)), prepare, finish_and_compare)
    assert steps > 4


def test_a_restore_after_a_write_that_was_cut_off_puts_everything_back(net_d: Path) -> None:
    (net_d / NAME).write_text(FLANNEL)
    original = tree(net_d)

    def check() -> None:
        restore(str(net_d))
        assert tree(net_d) == original

    run_cut_at_every_step(lambda: write(CONF, str(net_d)), lambda: None, check)


def test_a_disk_error_is_passed_on_and_leaves_the_old_network(
    net_d: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {n: c for n, (c, *_) in tree(net_d).items()}

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            write(CONF, str(net_d))
    after = {n: c for n, (c, *_) in tree(net_d).items() if not n.startswith(".")}
    assert after == before


def test_the_content_is_on_the_disk_before_its_name_and_the_name_before_we_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def recorded(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return real(*args, **kwargs)

        return call

    for name in ("replace", "fsync"):
        monkeypatch.setattr(os, name, recorded(name))
    write(CONF, str(tmp_path))
    assert calls[:3] == ["fsync", "replace", "fsync"]


def test_a_writer_waits_while_another_is_at_work_in_the_directory(net_d: Path) -> None:
    other = os.open(net_d, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    writer = threading.Thread(target=write, args=(CONF, str(net_d)))
    writer.start()
    writer.join(0.2)
    assert writer.is_alive()
    assert NAME not in names(net_d)
    os.close(other)
    writer.join(10)
    assert NAME in names(net_d)


def test_several_writers_at_once_leave_one_complete_file(net_d: Path) -> None:
    confs = [build(Options([f"10.244.{n}.0/24"])) for n in range(8)]
    writers = [threading.Thread(target=write, args=(conf, str(net_d))) for conf in confs]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert (net_d / NAME).read_text() in {conflist.render(conf) for conf in confs}
    assert [n for n in names(net_d) if n.startswith(".")] == []
    assert survey(str(net_d)).picked() == NAME


@busy_machine
@given(
    st.dictionaries(
        st.from_regex(r"[0-9a-z]{1,4}\.(conf|conflist|json|bak)", fullmatch=True),
        st.sampled_from([FLANNEL, LOOPBACK, "", "{", conflist.render(CONF)]),
        max_size=5,
    )
)
def test_whatever_was_there_ours_is_picked_and_all_that_is_not_ours_comes_back(
    tmp_path: Path, files: dict[str, str]
) -> None:
    for old in tmp_path.iterdir():
        old.unlink()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    write(CONF, str(tmp_path))
    assert survey(str(tmp_path)).picked() == NAME
    assert not write(CONF, str(tmp_path)).changed
    restore(str(tmp_path))
    ours = conflist.render(CONF)
    expected = {n: t for n, t in files.items() if t != ours or n.endswith(".bak")}
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == expected
