"""What of a verb can be seen without a pod."""

from __future__ import annotations

import json

import pytest

from headcni import errors, verbs

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
    return verbs.run(env, json.dumps(given).encode()).code


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
