"""What of a verb can be seen without a pod."""

from __future__ import annotations

import json
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from headcni import chain, config, errors
from headcni.address_sources import source_of
from headcni.model import Owner
from headcni.plugins.headcni.plugin import run
from headcni.skel import Call

CONF = {
    "cniVersion": "1.1.0",
    "name": "pods",
    "type": "headcni",
    "ipam": {"type": "headcni-ipam", "subnet": "10.9.1.0/24"},
}


def call(verb: str, tmp_path, **conf: object) -> int:
    env = {
        "CNI_COMMAND": verb,
        "CNI_CONTAINERID": "c1",
        "CNI_IFNAME": "eth0",
        "CNI_NETNS": "/run/netns/there-is-no-such-one",
        "CNI_PATH": "/opt/cni/bin",
    }
    given = {**CONF, "data_dir": str(tmp_path), **conf}
    return run(env, json.dumps(given).encode()).code


@pytest.mark.parametrize(
    ("verb", "key", "code"),
    [
        ("CHECK", "disableCheck", errors.UNKNOWN_CONTAINER),
        ("GC", "disableGC", errors.INVALID_CONFIG),
    ],
)
def test_a_verb_that_is_turned_off_finds_nothing_wrong(verb, key, code, tmp_path):
    assert call(verb, tmp_path) == code
    assert call(verb, tmp_path, **{key: False}) == code
    assert call(verb, tmp_path, **{key: True}) == 0


def test_what_another_ipam_gave_goes_back_to_it_if_it_cannot_be_noted(monkeypatch):
    """A full disk, say: the pod fails, and its address must not stay with the other IPAM."""

    def note(*_unused: object) -> bool:
        raise errors.CniError(errors.STORE, "the store cannot be written")

    asked = []
    given = {"ips": [{"address": "10.9.1.7/24", "gateway": "10.9.1.1"}]}
    monkeypatch.setattr(chain, "ipam_add", lambda *_unused: asked.append("ADD") or given)
    monkeypatch.setattr(chain, "ipam_del", lambda *_unused: asked.append("DEL"))
    node = SimpleNamespace(ipam=SimpleNamespace(note=note))
    conf = json.dumps({**CONF, "ipam": {"type": "host-local", "subnet": "10.9.1.0/24"}})
    network = config.parse(conf.encode(), {})
    with pytest.raises(errors.CniError, match="cannot be written"), ExitStack() as undo:
        source_of(network).lease(node, Owner("pods", "c1", "eth0"), Call("ADD"), undo)
    assert asked == ["ADD", "DEL"]
