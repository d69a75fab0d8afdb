"""Input of a pod's author, as large as Kubernetes and the runtimes let it be: none of it makes an
answer, a log line, the store or the time of a call grow without bound."""

from __future__ import annotations

import io
import json
import time

import pytest

from headcni import config
from headcni import log as logs
from headcni.daemon.observe.events import FAILED, KEPT, Event, Events
from headcni.errors import CniError
from headcni.ipam.config import ANNOTATIONS
from headcni.model import Owner, PodRef
from headcni.plugins import headcni_ipam
from headcni.store import Attachment, PluginState, Store

LONGEST = 256 << 10  # all annotations of a pod, by Kubernetes
OWNER = Owner("pods", "container", "eth0")


def netconf(**runtime_config):
    return {
        "cniVersion": "1.1.0",
        "name": "pods",
        "type": "headcni",
        "pod_cidr": "10.55.1.0/24",
        "cluster_cidr": "10.55.0.0/16",
        "ipam": {"type": "headcni-ipam", "subnet": "10.55.1.0/24"},
        "runtimeConfig": runtime_config,
    }


def parse(conf, **env):
    return config.parse(json.dumps(conf).encode(), env)


def attachment(conf):
    return Attachment(OWNER, PodRef("shop", "web-0"), "/run/netns/web", "hc1", conf, {}, {}, 1.0)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({ANNOTATIONS: {"headcni.dev/ip": "," * LONGEST}}, "annotation headcni.dev/ip"),
        ({ANNOTATIONS: {"headcni.dev/ip": "x" * LONGEST}}, "annotation headcni.dev/ip"),
        ({ANNOTATIONS: {"headcni.dev/ip": ["x"] * LONGEST}}, "annotation headcni.dev/ip"),
        ({ANNOTATIONS: "x" * LONGEST}, ANNOTATIONS),
        ({"ips": ["x"] * 50_000}, "runtimeConfig.ips"),
        ({"ips": "x" * LONGEST}, "runtimeConfig.ips"),
        ({"mac": "x" * LONGEST}, "runtimeConfig.mac"),
        ({"ipRanges": [[{"subnet": "x"}]] * 20_000}, "runtimeConfig.ipRanges"),
        ({"portMappings": [{"hostPort": "x" * 100}] * 2000}, "runtimeConfig.portMappings[0]"),
        ({"dns": {"servers": [" "] * 50_000}}, "runtimeConfig.dns.servers[0]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_huge_mistake_gets_a_short_answer_soon(given, named):
    began = time.process_time()
    with pytest.raises(CniError) as refused:
        parse(netconf(**given))
    answer = json.dumps(refused.value.as_dict("1.1.0"))
    assert named in answer
    assert len(answer) < 8192
    assert time.process_time() - began < 1.0


def test_headcni_ipam_by_itself_gives_a_short_answer_too():
    conf = netconf(**{ANNOTATIONS: {"headcni.dev/ip": "," * LONGEST}})
    env = {
        "CNI_COMMAND": "ADD",
        "CNI_CONTAINERID": "c",
        "CNI_IFNAME": "eth0",
        "CNI_NETNS": "/run/netns/x",
        "CNI_ARGS": "IP=" + "," * LONGEST,
    }
    outcome = headcni_ipam.run(env, json.dumps(conf).encode())
    answer = outcome.output
    assert outcome.exit_code == 1
    assert b"headcni.dev/ip" in answer and b"CNI_ARGS.IP" in answer
    assert len(answer) < 8192


def test_eight_thousand_host_ports_are_read_in_less_than_a_second():
    ports = [{"hostPort": 10_000 + n, "containerPort": 80} for n in range(8000)]
    began = time.process_time()
    assert len(parse(netconf(portMappings=ports)).port_mappings) == 8000
    assert time.process_time() - began < 1.0


def test_eight_thousand_times_the_same_host_port_is_refused_in_less_than_a_second():
    ports = [{"hostPort": 80, "containerPort": 80, "hostIP": "192.0.2.1"}] * 8000
    began = time.process_time()
    with pytest.raises(CniError, match="7999 mistakes"):
        parse(netconf(portMappings=ports))
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize("text", ["x" * (1 << 20), "\0" * (1 << 20)])
def test_an_error_is_short_whatever_it_quotes(text):
    assert len(json.dumps(CniError(100, text, text).as_dict("1.1.0"))) < 65536


def test_an_event_and_its_log_line_are_short_whatever_they_quote():
    stream = io.StringIO()
    logs.set_up("DEBUG", stream=stream)
    events = Events()
    for _unused in range(KEPT):
        events.tell(Event(FAILED, PodRef("a", "b"), reason="x" * LONGEST, pod_ip=["::1"] * 9999))
    assert max(map(len, stream.getvalue().splitlines())) < 8192
    assert len(json.dumps(events.kept())) < KEPT * 2048


@pytest.mark.parametrize("style", ["logfmt", "json"])
def test_a_log_line_has_an_end(style):
    stream = io.StringIO()
    logs.set_up("DEBUG", style, stream)
    logs.Log("test").info("x" * LONGEST, text="y" * LONGEST, items=["z"] * LONGEST)
    logs.Log("test").error("bug", problem=ValueError("v" * LONGEST))
    assert max(map(len, stream.getvalue().splitlines())) < 65536


def test_the_store_keeps_the_address_of_an_annotation_and_no_large_ones(tmp_path):
    given = {"headcni.dev/ip": "10.55.1.7", "small": "kept", "large": "x" * LONGEST}
    conf = netconf(**{ANNOTATIONS: given, "portMappings": [{"hostPort": 1, "containerPort": 2}]})
    conf["args"] = {"cni": {"labels": "x" * LONGEST}}
    with Store.in_directory(str(tmp_path)) as store:
        store.remember(attachment(conf))
        store.save_plugin_state(OWNER, PluginState(0, "bridge", conf, {}))
        kept, state = store.attachment(OWNER), store.plugin_states(OWNER)[0]
    for one in (kept.config, state.config):
        assert one["runtimeConfig"][ANNOTATIONS] == {"headcni.dev/ip": "10.55.1.7", "small": "kept"}
        assert one["runtimeConfig"]["portMappings"] == conf["runtimeConfig"]["portMappings"]
        assert len(json.dumps(one)) < 16384
