"""The ipam section: host-local's as it is, ours beside it, and every mistake at once."""

from __future__ import annotations

import pytest

from headcni import errors
from headcni.ipam.config import parse_ipam
from headcni.model import IpamConfig
from headcni.problems import Problem, error
from headcni.skel import split_cni_args
from tests.unit.cni.ipam_support import ipam_config


def mistakes(section: object, **others: object) -> list[Problem]:
    problems: list[Problem] = []
    config = parse_ipam(section, "ipam", problems, **others)
    assert isinstance(config, IpamConfig), "what is right of it is still there"
    return problems


def spans(config: IpamConfig) -> list[list[str]]:
    return [[f"{r.start}-{r.end} via {r.gateway}" for r in ranges] for ranges in config.range_sets]


def test_a_subnet_alone_gets_host_locals_defaults():
    config = ipam_config(type="host-local", subnet="10.244.1.0/24")
    assert config.type == "host-local"
    assert config.strategy == "sequential"
    assert spans(config) == [["10.244.1.1-10.244.1.254 via 10.244.1.1"]]
    assert spans(ipam_config(subnet="fd00:1::/64")) == [
        ["fd00:1::1-fd00:1::ffff:ffff:ffff:ffff via fd00:1::1"]
    ]


def test_host_locals_own_example_is_taken_as_it_is():
    config = ipam_config(
        type="host-local",
        ranges=[
            [
                {
                    "subnet": "10.10.0.0/16",
                    "rangeStart": "10.10.1.20",
                    "rangeEnd": "10.10.3.50",
                    "gateway": "10.10.0.254",
                },
                {"subnet": "172.16.5.0/24"},
            ],
            [
                {
                    "subnet": "3ffe:ffff:0:01ff::/64",
                    "rangeStart": "3ffe:ffff:0:01ff::0010",
                    "rangeEnd": "3ffe:ffff:0:01ff::0020",
                }
            ],
        ],
        routes=[
            {"dst": "0.0.0.0/0"},
            {"dst": "192.168.0.0/16", "gw": "10.10.5.1"},
            {"dst": "3ffe:ffff:0:01ff::1/64", "mtu": 1400, "priority": 5},
        ],
        dataDir="/run/my-orchestrator/container-ipam-state",
        resolvConf="",
    )
    assert spans(config) == [
        [
            "10.10.1.20-10.10.3.50 via 10.10.0.254",
            "172.16.5.1-172.16.5.254 via 172.16.5.1",
        ],
        ["3ffe:ffff:0:1ff::10-3ffe:ffff:0:1ff::20 via 3ffe:ffff:0:1ff::1"],
    ]
    assert [(str(r.dst), str(r.gateway), r.mtu, r.priority) for r in config.routes] == [
        ("0.0.0.0/0", "None", None, None),
        ("192.168.0.0/16", "10.10.5.1", None, None),
        ("3ffe:ffff:0:1ff::/64", "None", 1400, 5),
    ]


def test_the_runtimes_ranges_come_first_then_the_subnet_then_the_ranges():
    problems: list[Problem] = []
    config = parse_ipam(
        {"subnet": "10.2.0.0/24", "ranges": [[{"subnet": "10.3.0.0/24"}]]},
        "ipam",
        problems,
        {"ipRanges": [[{"subnet": "10.1.0.0/24"}]]},
    )
    assert problems == []
    assert [str(ranges[0].subnet) for ranges in config.range_sets] == [
        "10.1.0.0/24",
        "10.2.0.0/24",
        "10.3.0.0/24",
    ]


def test_requested_addresses_come_from_three_places_and_each_counts_once():
    problems: list[Problem] = []
    config = parse_ipam(
        {"subnet": "10.2.0.0/24"},
        "ipam",
        problems,
        {"ips": ["10.2.0.7/24", "10.2.0.9"]},
        {"IP": "10.2.0.8", "K8S_POD_NAME": "web"},
        {"cni": {"ips": ["::ffff:10.2.0.9"]}},
    )
    assert problems == []
    assert list(map(str, config.requested)) == ["10.2.0.8", "10.2.0.9", "10.2.0.7"]


def annotated(value: object) -> dict[str, object]:
    return {"io.kubernetes.cri.pod-annotations": {"headcni.dev/ip": value, "other.io/ip": "x"}}


@pytest.mark.parametrize(
    ("value", "asked"),
    [
        ("10.2.0.9", ["10.2.0.9"]),
        (" 10.2.0.9/24 , fd00::9 ", ["10.2.0.9", "fd00::9"]),
        ("", []),
        (None, []),
    ],
)
def test_a_pods_annotation_asks_for_addresses_too(value, asked):
    problems: list[Problem] = []
    config = parse_ipam({"subnet": "10.2.0.0/24"}, "ipam", problems, annotated(value))
    assert problems == []
    assert list(map(str, config.requested)) == asked


@pytest.mark.parametrize("value", ["10.2.0.300", "10.2.0.9,", "10.2.0.9;fd00::9", 7, ["10.2.0.9"]])
def test_a_wrong_annotation_is_named_as_the_pods_author_wrote_it(value):
    [problem] = mistakes({"subnet": "10.2.0.0/24"}, runtime_config=annotated(value))
    assert problem.path == "annotation headcni.dev/ip"
    assert problem.expected.startswith("an address")


def test_annotations_that_are_no_object_are_a_mistake():
    wrong = {"io.kubernetes.cri.pod-annotations": ["headcni.dev/ip"]}
    [problem] = mistakes({"subnet": "10.2.0.0/24"}, runtime_config=wrong)
    assert problem.path == "runtimeConfig.io.kubernetes.cri.pod-annotations"


def test_exclusions_are_addresses_cidrs_and_ranges_and_only_those_that_matter_are_kept():
    config = ipam_config(
        subnet="10.2.0.0/24",
        exclude=["10.2.0.9", "10.2.0.16/30", "10.2.0.100-10.2.0.110", "10.9.0.1", "fd00::1"],
        ranges=[[{"subnet": "fd00::/64", "exclude": ["fd00::5"]}]],
    )
    v4, v6 = (ranges[0] for ranges in config.range_sets)
    assert [f"{a}-{b}" for a, b in v4.exclude] == [
        "10.2.0.9-10.2.0.9",
        "10.2.0.16-10.2.0.19",
        "10.2.0.100-10.2.0.110",
    ]
    assert [f"{a}-{b}" for a, b in v6.exclude] == ["fd00::1-fd00::1", "fd00::5-fd00::5"]


@pytest.mark.parametrize(
    ("section", "path", "expected"),
    [
        ({}, "ipam.subnet", "a subnet"),
        ({"ranges": []}, "ipam.subnet", "a subnet"),
        ({"subnet": "10.1.2.3/24"}, "ipam.subnet", "10.1.2.0/24"),
        ({"subnet": "10.1.2.0"}, "ipam.subnet", "CIDR"),
        ({"subnet": 7}, "ipam.subnet", "CIDR"),
        ({"subnet": "10.1.2.0/24", "rangeStart": "10.1.3.1"}, "ipam.rangeStart", "10.1.2.0/24"),
        ({"subnet": "10.1.2.0/24", "rangeEnd": "fd00::1"}, "ipam.rangeEnd", "10.1.2.0/24"),
        (
            {"subnet": "10.1.2.0/24", "rangeStart": "10.1.2.9", "rangeEnd": "10.1.2.5"},
            "ipam.rangeStart",
            "up to 10.1.2.5",
        ),
        ({"subnet": "10.1.2.0/24", "gateway": "fd00::1"}, "ipam.gateway", "IPv4"),
        (
            {"gateway": "10.1.2.1", "ranges": [[{"subnet": "10.1.2.0/24"}]]},
            "ipam.gateway",
            "subnet",
        ),
        ({"subnet": "10.1.2.0/24", "strategy": "dense"}, "ipam.strategy", "dense-pack"),
        ({"subnet": "10.1.2.0/24", "strategy": ["random"]}, "ipam.strategy", "random"),
        ({"subnet": "10.1.2.0/24", "type": ""}, "ipam.type", "headcni-ipam"),
        ({"subnet": "10.1.2.0/24", "dataDir": "state"}, "ipam.dataDir", "absolute"),
        ({"subnet": "10.1.2.0/24", "resolvConf": 5}, "ipam.resolvConf", "absolute"),
        ({"subnet": "10.1.2.0/24", "importHostLocal": "yes"}, "ipam.importHostLocal", "true"),
        ({"subnet": "10.1.2.0/24", "exclude": "10.1.2.3"}, "ipam.exclude", "a list"),
        ({"subnet": "10.1.2.0/24", "exclude": ["10.1.2.9-3"]}, "ipam.exclude[0]", "a-b"),
        ({"subnet": "10.1.2.0/24", "exclude": ["10.9.0.0/8"]}, "ipam.exclude[0]", "a CIDR"),
        ({"subnet": "10.1.2.0/30", "exclude": ["10.1.2.2"]}, "ipam", "at least one address"),
        ({"subnet": "10.1.2.0/24", "routes": {}}, "ipam.routes", "a list"),
        ({"subnet": "10.1.2.0/24", "routes": [{}]}, "ipam.routes[0].dst", "CIDR"),
        (
            {"subnet": "10.1.2.0/24", "routes": [{"dst": "0.0.0.0/0", "gw": "fd00::1"}]},
            "ipam.routes[0].gw",
            "IPv4",
        ),
        (
            {"subnet": "10.1.2.0/24", "routes": [{"dst": "0.0.0.0/0", "mtu": "big"}]},
            "ipam.routes[0].mtu",
            "number",
        ),
        (
            {"subnet": "10.1.2.0/24", "routes": [{"dst": "0.0.0.0/0", "table": 1 << 32}]},
            "ipam.routes[0].table",
            "a number from 0 to 4294967295",
        ),
        (
            {"subnet": "10.1.2.0/24", "routes": [{"dst": "0.0.0.0/0", "scope": 256}]},
            "ipam.routes[0].scope",
            "a number from 0 to 255",
        ),
        ({"ranges": [{"subnet": "10.1.2.0/24"}]}, "ipam.ranges[0]", "a list of ranges"),
        ({"ranges": [[]]}, "ipam.ranges[0]", "a list of ranges"),
        ({"ranges": [[{}]]}, "ipam.ranges[0][0].subnet", "the subnet"),
        (
            {"ranges": [[{"subnet": "10.1.2.0/24"}, {"subnet": "fd00::/64"}]]},
            "ipam.ranges[0]",
            "one address family",
        ),
        (
            {"ranges": [[{"subnet": "10.1.0.0/16"}, {"subnet": "10.1.2.0/24"}]]},
            "ipam.ranges[0][1]",
            "apart from ipam.ranges[0][0]",
        ),
        (
            {"subnet": "10.1.0.0/16", "ranges": [[{"subnet": "10.1.2.0/24"}]]},
            "ipam.ranges[0]",
            "apart from ipam",
        ),
    ],
    ids=str,
)
def test_a_mistake_is_named_with_its_place_and_what_would_be_right(section, path, expected):
    (problem,) = mistakes(section)
    assert problem.path == path
    assert expected in problem.expected


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("rangestart", "rangeStart"),
        ("range_end", "rangeEnd"),
        ("RANGES", "ranges"),
        ("startegy", "strategy"),
        ("datadir", "dataDir"),
        ("excludes", "exclude"),
        ("import_host_local", "importHostLocal"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(key, nearest):
    (problem,) = mistakes({"subnet": "10.1.2.0/24", key: 1})
    assert problem == Problem(f"ipam.{key}", 1, f"a known key: {nearest}?")


def test_a_key_like_no_other_gets_the_list():
    (problem,) = mistakes({"subnet": "10.1.2.0/24", "zzz": 1})
    assert "one of type, subnet" in problem.expected


def test_all_mistakes_are_found_at_once_and_what_is_right_is_kept():
    problems: list[Problem] = []
    config = parse_ipam(
        {
            "subnet": "10.1.2.3/24",
            "strategy": "best",
            "rangeStrat": "10.1.2.9",
            "ranges": [[{"subnet": "fd00::/64"}], [{"subnet": "fd01::/64", "gatway": "fd01::9"}]],
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "everywhere"}],
            "exclude": ["10.1.2.4", "ten"],
        },
        "plugins[0].ipam",
        problems,
        {"ips": ["x"], "ipRanges": [[{"subnet": "nonsense"}]]},
        {"IP": "y"},
    )
    assert [problem.path for problem in problems] == [
        "plugins[0].ipam.rangeStrat",
        "plugins[0].ipam.exclude[1]",
        "runtimeConfig.ipRanges[0][0].subnet",
        "plugins[0].ipam.subnet",
        "plugins[0].ipam.ranges[1][0].gatway",
        "plugins[0].ipam.strategy",
        "plugins[0].ipam.routes[1].dst",
        "CNI_ARGS.IP",
        "runtimeConfig.ips[0]",
    ]
    assert [str(ranges[0].subnet) for ranges in config.range_sets] == ["fd00::/64", "fd01::/64"]
    assert [str(route.dst) for route in config.routes] == ["0.0.0.0/0"]
    told = error(problems, str)
    assert told.code == errors.INVALID_CONFIG
    assert "9 mistakes" in told.msg
    assert "plugins[0].ipam.subnet is '10.1.2.3/24': expected" in told.details


@pytest.mark.parametrize("section", [None, [], "10.1.2.0/24", 5], ids=str)
def test_a_section_that_is_no_object_is_one_mistake(section):
    (problem,) = mistakes(section)
    assert problem.path == "ipam"


def test_null_is_taken_for_not_given():
    absent = ("rangeStart", "gateway", "ranges", "routes", "exclude", "strategy", "dataDir")
    config = ipam_config(subnet="10.1.2.0/24", **dict.fromkeys(absent))
    assert spans(config) == [["10.1.2.1-10.1.2.254 via 10.1.2.1"]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("IP=10.1.2.3", {"IP": "10.1.2.3"}),
        (
            "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web-0",
            {"IgnoreUnknown": "1", "K8S_POD_NAMESPACE": "default", "K8S_POD_NAME": "web-0"},
        ),
        ("A=b=c;nonsense;", {"A": "b=c"}),
    ],
)
def test_cni_args_are_taken_apart(text, expected):
    assert split_cni_args(text) == expected
