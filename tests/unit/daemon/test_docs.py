"""The documents say what the code does."""

from __future__ import annotations

import json
import re

import pytest
from lab_command import CHECKOUT

from headcni import config as netconf
from headcni import settings as config
from headcni import subnet_env, validation
from headcni.ipam import config as ipam
from headcni.settings import DaemonConfig

CONFIGURATION = (CHECKOUT / "docs/configuration.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", CONFIGURATION, re.M | re.S)


def rows(text: str) -> list[list[str]]:
    """The cells of every line of every table."""
    return [
        [c.strip() for c in line.split(" | ")] for line in text.splitlines() if line[:2] == "| "
    ]


def first_cells(text: str) -> set[str]:
    return {name for row in rows(text) for name in re.findall(r"`([^`]+)`", row[0])}


def test_every_key_of_a_netconf_is_described():
    told = first_cells(CONFIGURATION)
    assert [key for key in netconf._KEYS if key not in told] == []
    assert [key for key in ipam.KEYS if key not in told] == []
    assert [alias for alias in netconf._ALIASES.values() if f"`{alias}`" not in CONFIGURATION] == []
    ours = ("portMappings", "bandwidth", "ipRanges", "ips", "dns", "mac", ipam.ANNOTATIONS)
    assert [name for name in ours if name not in told or name not in netconf._CAPABILITIES] == []
    assert f"{ipam.IP_ANNOTATION}: " in CONFIGURATION


def test_every_variable_is_described():
    runtime = CHECKOUT / "plugins/cni/headcni"
    sources = [*runtime.rglob("*.py"), *(runtime / "shared").glob("*.py")]
    text = "".join(source.read_text() for source in sources if "daemon" not in source.parts)
    used = set(re.findall(r"""["'](HEADCNI_[A-Z_]+[A-Z]|NODE_POD_CIDR|NODE_NAME)["']""", text))
    used |= {f"HEADCNI_{key}" for key in subnet_env._KEYS}
    assert {"HEADCNI_DATA_DIR", "HEADCNI_CHAIN", "HEADCNI_MTU"} <= used
    told = first_cells(CONFIGURATION) | {"HEADCNI_CHAIN", "HEADCNI_PROGRAM"}  # nobody's but ours
    assert used <= told


def test_the_example_of_config_yaml_is_valid_and_shows_every_key():
    from ruamel.yaml import YAML

    [example] = [block for block in blocks("yaml") if "logging:" in block]
    made, found = config.parse(example.encode())
    assert found == []
    assert isinstance(made, DaemonConfig)
    tree = YAML(typ="safe", pure=True).load(example)
    for path, *_ in config.described():
        place = tree
        for part in path.split("."):
            assert part in place, f"the example lacks {path}"
            place = place[part]


@pytest.mark.parametrize("example", [b for b in blocks("json") if "cniVersion" in b])
def test_the_examples_of_netconfs_are_valid(example, monkeypatch, tmp_path):
    monkeypatch.setattr(subnet_env, "DEFAULT_FILE", str(tmp_path / "subnet.env"))
    assert validation.problems(json.dumps(json.loads(example)).encode(), {}) == []


def test_every_page_of_the_monitor_is_described():
    from headcni.daemon.observe.metrics import Metrics
    from headcni.daemon.observe.monitor import Monitor

    pages = [page for page in Monitor(Metrics(), {})._pages if not page.endswith("/")]
    assert [page for page in pages if f"`{page}" not in CONFIGURATION] == []


def test_every_verb_of_headcnictl_is_described():
    from headcni.ctl.main import VERBS

    assert [verb for verb in VERBS if f"`headcnictl {verb}" not in CONFIGURATION] == []
