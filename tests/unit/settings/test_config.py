"""/etc/headcni/config.yaml: every key, every mistake, and what SIGHUP can do."""

from __future__ import annotations

import json
import textwrap
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from headcni import settings as config
from headcni.errors import INVALID_CONFIG, IO_FAILURE, CniError
from headcni.settings import DaemonConfig, as_dict, changes, check, load, parse, schema
from headcni.shared.podcidr import resolve

SCHEMA = Path(config.__file__).with_name("config.schema.json")

# The values of the original's chart (text 002), and its other keys as they mean here.
ORIGINAL = """
daemon: {reconcileInterval: 30s}
headscale:
  url: https://headscale.example.com
  timeout: 30s
  retries: 3
tailscale:
  mode: daemon
  socket:
    path: /var/run/headcni/headcni_tailscale.sock
  interfaceName: headcni01
network:
  podCIDR:
    nodeLocal: "10.244.1.0/24"  # this node's
    base: "10.244.0.0/16"
    perNode: "/24"
  serviceCIDR: "10.96.0.0/16"
  mtu: 1280
  enableIPv6: false
ipam: {type: host-local, strategy: sequential, gcInterval: 1h}
dns:
  magicDNS:
    enabled: true
    nameservers: ["8.8.8.8", "8.8.4.4"]
    searchDomains: [cluster.local]
    options: ["ndots:5"]
monitoring: {enabled: true, port: 9001, path: /metrics}
logging: {level: info, format: json}
"""


def read(text: str) -> DaemonConfig:
    made, found = parse(textwrap.dedent(text).encode())
    assert found == []
    return made


def mistakes(text: str) -> dict[str, tuple[Any, str]]:
    _, found = parse(textwrap.dedent(text).encode())
    return {one.path: (one.value, one.expected) for one in found}


def test_an_empty_file_has_every_default():
    assert read("") == read("---\n# nothing yet\n") == read("logging:\n") == DaemonConfig()
    assert DaemonConfig().tailscale.socket_path == "/run/tailscale/tailscaled.sock"
    assert DaemonConfig().tailscale.interface == "tailscale0"


def test_the_originals_file_is_understood():
    made = read(ORIGINAL)
    assert made.network.pod_cidr.node_local == (ip_network("10.244.1.0/24"),)
    assert made.network.service_cidr == (ip_network("10.96.0.0/16"),)
    assert made.daemon.reconcile_interval == 30.0
    assert made.headscale.timeout == 30.0
    assert made.tailscale.socket_path == "/var/run/headcni/headcni_tailscale.sock"
    assert made.dns.magic_dns.nameservers == ("8.8.8.8", "8.8.4.4")
    assert made.logging.level == "INFO"


def test_an_empty_value_is_none():
    assert read("daemon: {socket: '', dataDir: }\nlogging: {level: ''}") == DaemonConfig()


def test_socket_and_interface_follow_the_mode():
    made = read("tailscale: {mode: daemon}")
    assert made.tailscale.socket_path == "/run/headcni/tailscaled.sock"
    assert made.tailscale.interface == "headcni01"


def test_both_families_are_one_cidr_each():
    made = read("network: {podCIDR: {nodeLocal: [10.1.0.0/24, 'fd00:1::/64'], perNode: '/24,/64'}}")
    assert list(map(str, made.network.pod_cidr.node_local)) == ["10.1.0.0/24", "fd00:1::/64"]
    text = "network: {podCIDR: {nodeLocal: '10.1.0.0/24, fd00:1::/64'}}"
    assert read(text).network.pod_cidr.node_local == made.network.pod_cidr.node_local


@pytest.mark.parametrize(
    ("written", "seconds"), [("500ms", 0.5), ("30s", 30), ("1.5m", 90), ("2", 2), ("0.5", 0.5)]
)
def test_times_are_seconds_or_have_a_unit(written, seconds):
    assert read(f"headscale: {{timeout: {written}}}").headscale.timeout == seconds


@pytest.mark.parametrize(
    ("written", "tags"),
    [
        ("tag:k8s", ("tag:k8s",)),
        ("[tag:k8s, tag:edge]", ("tag:k8s", "tag:edge")),
        ("any", ()),
        ("[]", ()),
        ("''", ("tag:headcni",)),
        ("null", ("tag:headcni",)),
    ],
)
def test_the_tag_of_peers_is_one_or_several_or_any(written, tags):
    made = read(f"tailscale: {{peerTags: {written}}}")
    assert made.tailscale.peer_tags == tags
    assert read(json.dumps(as_dict(made))) == made
    yaml = YAML(typ="safe", pure=True).load(f"tailscale: {{peerTags: {written}}}")
    if yaml["tailscale"]["peerTags"] is not None:
        assert list(jsonschema.Draft7Validator(schema()).iter_errors(yaml)) == []


@pytest.mark.parametrize(
    ("written", "answered"),
    [
        ("true", True),
        ("false", False),
        ("[]", False),
        (
            "[22, 6443/tcp, '10250', 8472/udp, 30000-32767]",
            "22 6443/tcp 10250 8472/udp 30000-32767",
        ),
    ],
)
def test_the_node_answers_on_all_ports_or_none_or_those_of_a_list(written, answered):
    made = read(f"tailscale: {{answerForNode: {written}}}")
    have = made.tailscale.answer_for_node
    assert (have if isinstance(have, bool) else " ".join(map(str, have))) == answered
    assert read(json.dumps(as_dict(made))) == made
    yaml = YAML(typ="safe", pure=True).load(f"tailscale: {{answerForNode: {written}}}")
    assert list(jsonschema.Draft7Validator(schema()).iter_errors(yaml)) == []


def test_the_lengths_of_nodes_ranges_are_those_of_the_file():
    made = read("network: {podCIDR: {perNode: '/24,/64', peerSizes: [25, 24, 80]}}")
    assert config.node_sizes(made) == ((4, 24), (4, 25), (6, 64), (6, 80))
    assert config.node_sizes(DaemonConfig()) == ()


WRONG = [
    ("network: {mtu: '1280'}", "network.mtu", "a number from 576"),
    ("network: {mtu: true}", "network.mtu", "a number from 576"),
    ("network: {podCIDR: {nodeLocal: 10.1.0.9/24}}", "network.podCIDR.nodeLocal", "10.1.0.0/24"),
    ("network: {podCIDR: {nodeLocal: 100.64.1.0/24}}", "network.podCIDR.nodeLocal", "Tailscale"),
    ("network: {podCIDR: {nodeLocal: 5}}", "network.podCIDR.nodeLocal", "a CIDR"),
    ("network: {podCIDR: {perNode: /99x}}", "network.podCIDR.perNode", "/24"),
    ("network: {serviceCIDR: [10.0.0.0/8, 10.1.0.0/16]}", "network.serviceCIDR", "one family"),
    ("headscale: {url: hs.example.com}", "headscale.url", "http"),
    ("headscale: {timeout: 30 seconds}", "headscale.timeout", "such as 30s"),
    ("headscale: {timeout: 1h}", "headscale.timeout", "to 5m"),
    ("headscale: {apiKeyFile: key.txt}", "headscale.apiKeyFile", "an absolute path"),
    ("tailscale: {mode: both}", "tailscale.mode", "host or daemon"),
    ("tailscale: {interfaceName: much-too-long-for-a-link}", "tailscale.interfaceName", "15"),
    ("tailscale: {socket: /run/x.sock}", "tailscale.socket", "keys such as path"),
    ("tailscale: {peerTags: headcni}", "tailscale.peerTags[0]", "a tag such as tag:headcni"),
    ("tailscale: {peerTags: [tag:a, 'tag:']}", "tailscale.peerTags[1]", "a tag such as"),
    ("tailscale: {peerTags: [tag:a, any]}", "tailscale.peerTags[1]", "a tag such as"),
    ("tailscale: {answerForNode: 22}", "tailscale.answerForNode", "true, false or a list"),
    ("tailscale: {answerForNode: [22, 0]}", "tailscale.answerForNode[1]", "a port or a range"),
    ("tailscale: {answerForNode: [9-5]}", "tailscale.answerForNode[0]", "a port or a range"),
    ("tailscale: {answerForNode: [22/icmp]}", "tailscale.answerForNode[0]", "a port or a range"),
    ("tailscale: {answerForNode: [true]}", "tailscale.answerForNode[0]", "a port or a range"),
    (
        f"tailscale: {{answerForNode: {list(range(1, 66))}}}",
        "tailscale.answerForNode",
        "a list of up to 64 ports",
    ),
    ("tailscale: {peerTags: 5}", "tailscale.peerTags", "a list of tags"),
    ("network: {podCIDR: {peerSizes: [24, 127]}}", "network.podCIDR.peerSizes[1]", "to 126"),
    ("ipam: {strategy: best}", "ipam.strategy", "dense-pack"),
    ("dns: {magicDNS: {enabled: yes}}", "dns.magicDNS.enabled", "true or false"),
    ("dns: {magicDNS: {nameservers: [1.1.1.1, x]}}", "dns.magicDNS.nameservers[1]", "an IP"),
    ("dns: {magicDNS: {nameservers: 1.1.1.1}}", "dns.magicDNS.nameservers", "a list"),
    ("dns: {magicDNS: {enabled: true}}", "dns.magicDNS.enabled", "beside it"),
    ("monitoring: {port: 70000}", "monitoring.port", "1 to 65535"),
    ("monitoring: {address: localhost}", "monitoring.address", "an IP address"),
    ("monitoring: {path: /ready}", "monitoring.path", "its own"),
    ("logging: {level: verbose}", "logging.level", "FATAL"),
    ("logging: [a]", "logging", "a section with keys such as level"),
    ("loging: {level: INFO}", "loging", "logging?"),
    ("network: {pod_cidr: {}}", "network.pod_cidr", "podCIDR?"),
    ("network: {3: 4}", "network.3", "a known key"),
    ("daemon: {logLevel: debug}", "daemon.logLevel", "logging.level"),
    ("security: {tls: {enabled: true}}", "security", "no such section"),
    ("network: {enableNetworkPolicy: yes please}", "network.enableNetworkPolicy", "true or false"),
    ("network: {unknownPolicy: maybe}", "network.unknownPolicy", "deny or allow"),
    ("network: {logDenied: 5000}", "network.logDenied", "0 to 1000"),
    ("headscale: {apiKeyFile: /k}", "headscale.apiKeyFile", "headscale.url"),
    (
        "network: {podCIDR: {nodeLocal: 10.9.0.0/24, base: 10.1.0.0/16}}",
        "network.podCIDR.nodeLocal",
        "within network.podCIDR.base 10.1.0.0/16",
    ),
    (
        "network: {podCIDR: {base: 10.1.0.0/16}, serviceCIDR: 10.1.9.0/24}",
        "network.podCIDR.base",
        "apart from network.serviceCIDR",
    ),
    ("network: {mtu: 1000, podCIDR: {base: 'fd00::/48'}}", "network.mtu", "at least 1280"),
    ("- a\n- b", "", "sections such as"),
    ("network: {mtu: 1280", "line 1, column 20", "valid YAML"),
    ("logging: {}\nlogging: {}", "line 2, column 1", "given once"),
    ("a: !!python/object:os.system {}", "line 1, column 4", "valid YAML"),
]


@pytest.mark.parametrize(("text", "path", "expected"), WRONG, ids=[w[0] for w in WRONG])
def test_a_mistake_is_named_with_what_was_expected(text, path, expected):
    found = mistakes(text)
    assert list(found) == [path]
    assert expected in found[path][1]


def test_all_mistakes_are_told_at_once_and_the_rest_is_read():
    made, found = parse(b"network: {mtu: x}\nlogging: {level: loud, format: json}\nmonitring: {}\n")
    assert [one.path for one in found] == ["network.mtu", "logging.level", "monitring"]
    assert (made.network.mtu, made.logging.format) == (1280, "json")


@pytest.mark.parametrize(
    "text",
    [
        "headscale: {authKey: s3cret}",
        "headscale: {apiKey: s3cret}",
        "headscale: {url: 'https://me:s3cret@hs.example.com'}",
        "security: {auth: {token: s3cret}}",
        "headscale: {token: s3cret, token: s3cret}",
        "headscale: {authKey: 's3cret}",
        "headscale: {x: [s3cret]}",
    ],
)
def test_a_secret_is_never_repeated(text, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    for as_json in (False, True):
        code, shown = check(str(file), as_json)
        assert code == 1
        assert "s3cret" not in shown
    with pytest.raises(CniError) as raised:
        load(str(file))
    assert "s3cret" not in str(raised.value)


def test_a_key_of_the_original_that_asks_for_nothing_passes():
    read("headscale: {authKey: ''}\ntailscale: {tags: []}\nnetwork: {enableNetworkPolicy: false}")
    read("_note: mine\nx-anchors: {a: 1}\nlogging: {_why: it was loud}")


def test_load_raises_every_mistake_in_one_error(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("network: {mtu: 1}\nlogging: {level: loud}\n")
    with pytest.raises(CniError) as raised:
        load(str(file))
    assert raised.value.code == INVALID_CONFIG
    assert "2 mistakes" in raised.value.msg
    assert "network.mtu" in raised.value.details
    assert "logging.level" in raised.value.details


def test_a_file_that_is_not_there_is_an_error_unless_the_defaults_will_do(tmp_path):
    missing = str(tmp_path / "none.yaml")
    with pytest.raises(CniError) as raised:
        load(missing)
    assert raised.value.code == IO_FAILURE
    assert missing in str(raised.value)
    assert load(missing, missing_ok=True) == DaemonConfig()
    with pytest.raises(CniError):
        load(str(tmp_path), missing_ok=True)


def test_check_prints_what_differs_from_the_defaults(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("logging: {level: debug}\nnetwork: {mtu: 1280}\n")
    code, shown = check(str(file))
    assert code == 0
    assert shown.splitlines() == [f"{file}: no mistakes", '  logging.level = "DEBUG"']


def test_check_in_json_has_the_whole_configuration(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("network: {mtu: 1400}\n")
    code, shown = check(str(file), as_json=True)
    assert code == 0
    answer = json.loads(shown)
    assert answer["valid"] is True
    assert answer["config"]["network"]["mtu"] == 1400
    file.write_text("network: {mtu: 14000000}\n")
    code, shown = check(str(file), as_json=True)
    assert code == 1
    assert json.loads(shown)["problems"][0]["path"] == "network.mtu"
    code, shown = check(str(tmp_path / "none"), as_json=True)
    assert code == 3
    assert json.loads(shown)["valid"] is False


def test_sighup_applies_some_changes_and_names_the_others():
    old = read("logging: {level: INFO}\nnetwork: {mtu: 1280}\ntailscale: {mode: host}")
    new = read("logging: {level: DEBUG}\nnetwork: {mtu: 1400}\ntailscale: {mode: daemon}")
    applied, needs_restart = changes(old, new)
    assert [str(one) for one in applied] == ['logging.level: "INFO" → "DEBUG"']
    assert [one.path for one in needs_restart] == ["tailscale.mode", "network.mtu"]
    in_force = config.with_applied(old, new)
    assert in_force.logging.level == "DEBUG"
    assert (in_force.network.mtu, in_force.tailscale.mode) == (1280, "host")
    assert changes(in_force, new).applied == ()


def test_no_change_is_no_change():
    assert changes(read(ORIGINAL), read(ORIGINAL)) == ((), ())


def test_what_is_shown_can_be_read_again():
    made = read(ORIGINAL)
    assert read(json.dumps(as_dict(made))) == made


def test_the_resolver_gets_what_the_file_says():
    made = read("network: {podCIDR: {base: 10.7.0.0/16, perNode: /26}}")
    found = resolve(config.for_resolver(made), {}, root="/nonexistent", hostname="node1")
    assert found.source == "hash"
    assert found.cidrs[0].prefixlen == 26
    assert resolve(config.for_resolver(DaemonConfig()), {}, root="/nonexistent").source == "default"


def test_the_schema_file_is_what_the_code_says():
    written = json.loads(SCHEMA.read_text())
    assert written == json.loads(json.dumps(schema())), (
        "write it anew: python3 -m headcni.settings > config.schema.json"
    )


def test_the_schema_takes_what_the_code_takes():
    yaml = YAML(typ="safe", pure=True)
    check_schema = jsonschema.Draft7Validator(schema())
    jsonschema.Draft7Validator.check_schema(schema())
    original = yaml.load(ORIGINAL)
    del original["network"]["enableIPv6"]  # passes with false, but is not to be suggested
    assert list(check_schema.iter_errors(original)) == []
    assert list(check_schema.iter_errors(as_dict(DaemonConfig()))) == []


@pytest.mark.parametrize(
    "text",
    [w[0] for w in WRONG if w[1].startswith(("tailscale.mode", "logging", "monitoring.port", "lo"))]
    + ["network: {mtu: x}", "headscale: {url: hs}", "dns: {magicDNS: {nameservers: 1}}"],
)
def test_the_schema_refuses_what_the_code_refuses(text):
    yaml = YAML(typ="safe", pure=True)
    assert list(jsonschema.Draft7Validator(schema()).iter_errors(yaml.load(text)))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)
paths = sorted(path for path, *_ in config.described())


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(paths), values, max_size=6))
def test_whatever_stands_there_is_read_or_named(given_values):
    tree: dict[str, Any] = {}
    for path, value in given_values.items():
        *sections, key = path.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    text = json.dumps(tree, ensure_ascii=True).encode()
    made, found = parse(text)
    assert isinstance(made, DaemonConfig)
    for one in found:
        assert one.path.split("[")[0] in paths, one
    json.dumps([one._asdict() for one in found])
    again, none = parse(json.dumps(as_dict(made)).encode())
    if not found:
        assert (again, none) == (made, [])


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_no_bytes_make_it_stumble(text):
    made, _ = parse(text)
    assert isinstance(made, DaemonConfig)


def test_an_alias_to_itself_does_no_harm():
    assert list(mistakes("network: &a {mtu: *a}")) == ["network.mtu"]
    assert "network.mtu" in mistakes("network: {mtu: &a [*a]}")
