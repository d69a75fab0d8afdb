"""subnet.env: read, written, and merged under the netconf; and what a delegate is handed."""

from __future__ import annotations

import json
import os
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headcni import config, subnet_env, validation
from headcni.delegates import delegate_config
from headcni.model import NetworkConfig
from headcni.problems import Problem
from headcni.subnet_env import SubnetEnv, load, parse, render, write

FLANNEL = """\
FLANNEL_NETWORK=10.244.0.0/16
FLANNEL_SUBNET=10.244.1.1/24
FLANNEL_IPV6_NETWORK=fd00:244::/48
FLANNEL_IPV6_SUBNET=fd00:244:0:1::1/64
FLANNEL_MTU=1450
FLANNEL_IPMASQ=true
"""
BOTH = (ip_network("10.244.1.0/24"), ip_network("fd00:244:0:1::/64"))


busy_machine = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def read(text: str) -> SubnetEnv:
    problems: list[Problem] = []
    found = parse(text, "f", problems)
    assert problems == []
    return found


def network(file: Path, env: dict[str, str] | None = None, /, **keys: Any) -> NetworkConfig:
    conf = {"cniVersion": "1.0.0", "name": "mesh", "type": "headcni", **keys}
    full = {"HEADCNI_SUBNET_FILE": str(file), **(env or {})}
    return config.parse(json.dumps(conf).encode(), full)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "subnet.env"
    path.write_text(FLANNEL.replace("FLANNEL_", "HEADCNI_").replace("true", "false"))
    return path


def test_a_file_of_flannels_is_read_with_the_host_part_of_the_subnet_taken_off() -> None:
    assert read(FLANNEL) == SubnetEnv(
        (ip_network("10.244.0.0/16"), ip_network("fd00:244::/48")), BOTH, 1450, False
    )


def test_flannels_own_masquerading_means_that_we_need_not() -> None:
    assert read("FLANNEL_IPMASQ=true").ip_masq is False
    assert read("FLANNEL_IPMASQ=false").ip_masq is True
    assert read("HEADCNI_IPMASQ=true").ip_masq is True
    assert read("IPMASQ=0").ip_masq is False


def test_lists_quotes_comments_and_foreign_lines_are_understood() -> None:
    text = """
    # written by hand
    export HEADCNI_NETWORK="10.244.0.0/16, 10.245.0.0/16,fd00:244::/48"
    HEADCNI_SUBNET='10.244.1.0/24,fd00:244:0:1::/64'
    SOMETHING=else
    nonsense
    """
    found = read(text)
    assert [str(n) for n in found.networks] == ["10.244.0.0/16", "10.245.0.0/16", "fd00:244::/48"]
    assert found.subnets == BOTH


def test_our_own_prefix_wins_over_flannels() -> None:
    assert read("HEADCNI_MTU=1300\nFLANNEL_MTU=1400\nMTU=1500").mtu == 1300


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("HEADCNI_SUBNET=10.1.0.0", "f:HEADCNI_SUBNET"),
        ("HEADCNI_NETWORK=x/8", "f:HEADCNI_NETWORK"),
        ("FLANNEL_IPV6_SUBNET=10.1.0.0/24", "f:FLANNEL_IPV6_SUBNET"),
        ("HEADCNI_SUBNET=10.1.0.0/24,10.2.0.0/24", "f:HEADCNI_SUBNET"),
        ("HEADCNI_MTU=big", "f:HEADCNI_MTU"),
        ("HEADCNI_MTU=100", "f:HEADCNI_MTU"),
        ("HEADCNI_IPMASQ=perhaps", "f:HEADCNI_IPMASQ"),
    ],
)
def test_a_mistake_in_the_file_is_named_by_file_and_key(text: str, path: str) -> None:
    problems: list[Problem] = []
    parse(text, "f", problems)
    assert [problem.path for problem in problems] == [path]


def test_the_environment_wins_over_the_file_and_the_netconf_over_both(file: Path) -> None:
    of_file = network(file)
    assert (of_file.pod_cidrs, of_file.mtu, of_file.ip_masq) == (BOTH, 1450, False)
    assert of_file.cluster_cidrs == (ip_network("10.244.0.0/16"), ip_network("fd00:244::/48"))
    assert of_file.enable_ipv6 is True
    assert len(of_file.ipam.range_sets) == 2

    env = {
        "HEADCNI_SUBNET": "10.9.1.0/24",
        "HEADCNI_NETWORK": "10.9.0.0/16",
        "HEADCNI_MTU": "1300",
        "HEADCNI_IPMASQ": "true",
        "HEADCNI_DATA_DIR": "/data",
    }
    of_env = network(file, env)
    assert (of_env.pod_cidrs, of_env.mtu, of_env.ip_masq) == (
        (ip_network("10.9.1.0/24"),),
        1300,
        True,
    )
    assert of_env.cluster_cidrs == (ip_network("10.9.0.0/16"),)
    assert of_env.data_dir == "/data"

    said = network(
        file,
        env,
        pod_cidr="10.8.1.0/24",
        cluster_cidr="10.8.0.0/16",
        mtu=1400,
        ipMasq=False,
        data_dir="/other",
    )
    assert (said.pod_cidrs, said.mtu, said.ip_masq) == ((ip_network("10.8.1.0/24"),), 1400, False)
    assert said.cluster_cidrs == (ip_network("10.8.0.0/16"),)
    assert said.data_dir == "/other"


def test_ranges_of_the_netconf_win_over_the_subnet_of_the_file(file: Path) -> None:
    made = network(file, ipam={"subnet": "10.7.0.0/24"})
    assert made.pod_cidrs == (ip_network("10.7.0.0/24"),)


def test_the_file_of_the_netconf_wins_over_that_of_the_environment(
    file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.env"
    other.write_text("HEADCNI_SUBNET=10.6.0.0/24\n")
    assert network(file, subnet_file=str(other)).pod_cidrs == (ip_network("10.6.0.0/24"),)


def test_a_file_that_was_named_and_is_needed_must_be_there(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.env")
    conf = {"cniVersion": "1.0.0", "name": "mesh", "type": "headcni"}
    env = {"HEADCNI_SUBNET_FILE": missing}
    [problem] = validation.problems(json.dumps(conf).encode(), env)
    assert (problem.path, problem.value) == ("subnet_file", missing)
    conf["pod_cidr"] = "10.1.0.0/24"
    assert validation.problems(json.dumps(conf).encode(), env) == []


def test_a_file_that_is_not_needed_is_not_even_opened(tmp_path: Path) -> None:
    broken = tmp_path / "broken.env"
    broken.write_text("HEADCNI_MTU=broken\n")
    complete: dict[str, Any] = {
        "pod_cidr": "10.1.0.0/24",
        "cluster_cidr": "10.1.0.0/16",
        "mtu": 1300,
        "ipMasq": True,
    }
    assert network(broken, **complete).mtu == 1300
    del complete["mtu"]
    with pytest.raises(Exception, match=r"broken\.env:HEADCNI_MTU"):
        network(broken, **complete)


def test_a_file_that_cannot_be_read_is_a_mistake_with_the_reason(tmp_path: Path) -> None:
    problems: list[Problem] = []
    load({}, str(tmp_path), problems)
    assert "Is a directory" in problems[0].expected


def test_a_subnet_of_the_file_that_no_pod_can_live_in_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "subnet.env"
    path.write_text("HEADCNI_SUBNET=100.64.1.0/24\n")
    with pytest.raises(Exception, match="Tailscale"):
        network(path)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = str(tmp_path / "run" / "headcni" / "subnet.env")
    settings = SubnetEnv((ip_network("10.244.0.0/16"),), BOTH, 1280, True)
    assert write(path, settings) is True
    problems: list[Problem] = []
    assert load({}, path, problems, named=True) == settings
    assert problems == []
    assert os.stat(path).st_mode & 0o777 == 0o644
    inode = os.stat(path).st_ino
    assert write(path, settings) is False
    assert os.stat(path).st_ino == inode
    assert os.listdir(os.path.dirname(path)) == ["subnet.env"]


def test_a_failed_write_leaves_the_old_file_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "subnet.env")
    write(path, SubnetEnv(mtu=1280))

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(path, SubnetEnv(mtu=1400))
    assert os.listdir(tmp_path) == ["subnet.env"]
    assert "1280" in Path(path).read_text()


v4 = st.builds(
    lambda address, length: IPv4Network((address, length), strict=False),
    st.integers(0, 2**32 - 1),
    st.integers(8, 30),
)
v6 = st.builds(
    lambda address, length: IPv6Network((address, length), strict=False),
    st.integers(0, 2**128 - 1),
    st.integers(8, 126),
)


@busy_machine
@given(
    st.builds(
        SubnetEnv,
        st.tuples(v4, v4, v6) | st.tuples(v6) | st.just(()),
        st.tuples(v4, v6) | st.tuples(v4) | st.tuples(v6) | st.just(()),
        st.none() | st.integers(576, 65535),
        st.none() | st.booleans(),
    )
)
def test_any_settings_survive_the_file(settings: SubnetEnv) -> None:
    assert read(render(settings)) == settings


@busy_machine
@given(st.text(max_size=200))
def test_no_text_can_make_the_reader_fail(text: str) -> None:
    parse(text, "f", [])
    parse("HEADCNI_SUBNET=" + text + "\nHEADCNI_MTU=" + text, "f", [])


def delegate(conf: dict[str, Any], **keys: Any) -> dict[str, Any]:
    made = {
        "cniVersion": "0.4.0",
        "name": "mesh",
        "type": "headcni",
        "pod_cidr": "10.244.1.0/24",
        "delegate": conf,
        **keys,
    }
    made = {key: value for key, value in made.items() if value is not None}
    net = config.parse(json.dumps(made).encode(), {"HEADCNI_SUBNET_FILE": "/dev/null"})
    return delegate_config(net, net.delegates[0])


def test_a_delegate_is_handed_what_flannel_would_hand_it() -> None:
    assert delegate({"type": "bridge", "bridge": "cni0"}, mtu=1400) == {
        "type": "bridge",
        "bridge": "cni0",
        "name": "mesh",
        "cniVersion": "0.4.0",
        "mtu": 1400,
        "ipMasq": True,
        "isGateway": True,
        "ipam": {
            "type": "host-local",
            "subnet": "10.244.1.0/24",
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }


def test_what_a_delegate_says_itself_is_left_alone() -> None:
    own = {
        "type": "bridge",
        "mtu": 9000,
        "ipMasq": False,
        "isGateway": False,
        "ipam": {"type": "dhcp"},
        "args": {"x": 1},
    }
    full = delegate(own, args={"cni": {"ips": ["10.244.1.9"]}})
    assert full == {**own, "name": "mesh", "cniVersion": "0.4.0"}
    assert delegate({"type": "bridge", "ipam": {}})["ipam"] == {}


def test_a_delegates_ipam_without_ranges_gets_ours() -> None:
    full = delegate(
        {"type": "ptp", "ipam": {"type": "headcni-ipam"}},
        pod_cidr=["10.244.1.0/24", "fd00::/64"],
        default_route=False,
        cluster_cidr=["10.244.0.0/16", "fd00::/48"],
    )
    assert full["ipam"] == {
        "type": "headcni-ipam",
        "ranges": [[{"subnet": "10.244.1.0/24"}], [{"subnet": "fd00::/64"}]],
        "routes": [{"dst": "10.244.0.0/16"}, {"dst": "fd00::/48"}],
    }
    assert "isGateway" not in full


def test_the_ipam_section_of_the_netconf_is_the_delegates() -> None:
    ipam = {
        "subnet": "10.244.1.0/24",
        "rangeStart": "10.244.1.9",
        "routes": [{"dst": "10.0.0.0/8"}],
    }
    full = delegate({"type": "bridge"}, ipam=ipam, args={"cni": {"ips": ["10.244.1.9"]}})
    assert full["ipam"] == {**ipam, "type": "host-local"}
    assert full["args"] == {"cni": {"ips": ["10.244.1.9"]}}


@pytest.mark.parametrize("kind", ["portmap", "tuning", "bandwidth", "firewall"])
def test_a_plugin_that_makes_no_interface_gets_no_addresses_and_no_mtu(kind: str) -> None:
    assert delegate({"type": kind}) == {"type": kind, "name": "mesh", "cniVersion": "0.4.0"}


def test_each_delegate_gets_what_it_asks_of_the_runtimes_data_and_no_more() -> None:
    given = {
        "portMappings": [{"hostPort": 80, "containerPort": 80}],
        "mac": "02:00:00:00:00:01",
        "dns": {"servers": ["10.0.0.1"]},
    }
    asks = {
        "type": "portmap",
        "capabilities": {"portMappings": True, "dns": False, "bandwidth": True},
    }
    full = delegate(asks, runtimeConfig=given)
    assert full["runtimeConfig"] == {"portMappings": given["portMappings"]}
    assert "runtimeConfig" not in delegate({"type": "portmap"}, runtimeConfig=given)


def test_a_delegates_configuration_is_not_changed_in_place() -> None:
    conf: dict[str, Any] = {"type": "bridge", "ipam": {"type": "host-local"}}
    net = config.parse(
        json.dumps(
            {
                "cniVersion": "1.0.0",
                "name": "mesh",
                "type": "headcni",
                "pod_cidr": "10.1.0.0/24",
                "delegate": conf,
            }
        ).encode(),
        {},
    )
    before = json.dumps(net.raw)
    delegate_config(net, net.delegates[0])
    assert json.dumps(net.raw) == before


def test_the_default_places_are_those_of_the_specification() -> None:
    assert subnet_env.DEFAULT_FILE == "/run/headcni/subnet.env"
    assert subnet_env.DEFAULT_DATA_DIR == "/var/lib/cni/headcni"
