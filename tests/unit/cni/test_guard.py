"""Who is checked, and that a changed table is known to be one."""

from __future__ import annotations

import hashlib

import pytest

from headcni.datapath import guard, guard_rules, nft_messages
from headcni.model import PodRef


def test_a_change_to_the_table_comes_with_a_new_version() -> None:
    """Nodes keep a table whose version they know, so a change without a new one reaches nobody."""
    made = repr([*guard_rules.structure(nft_messages.BRIDGE, guard.TABLE, "")])
    digest = hashlib.sha256(made.encode()).hexdigest()[:16]
    assert (guard.VERSION, digest) == (3, "ccd9808a195ca54a")


def test_the_keys_of_all_sets_have_the_length_that_their_parts_have() -> None:
    lengths = {name: sum(size for _, size in parts) for name, parts in guard_rules._SETS.items()}
    assert lengths == guard._SETS


@pytest.mark.parametrize(
    ("exempt", "pod", "checked"),
    [
        ((), PodRef("a", "b"), True),
        (("a/b",), PodRef("a", "b"), False),
        (("a/*",), PodRef("a", "b"), False),
        (("a/*",), PodRef("aa", "b"), True),
        (("*/b?",), PodRef("a", "b1"), False),
        (("A/b",), PodRef("a", "b"), True),
        (("*/*",), PodRef(), True),  # nobody said which pod it is
    ],
)
def test_a_pod_is_checked_unless_the_network_exempts_it(exempt, pod, checked) -> None:
    assert guard.applies(True, exempt, pod) is checked
    assert guard.applies(False, exempt, pod) is False


def test_the_link_local_address_is_that_of_the_kernel() -> None:
    assert str(guard.link_local("0a:58:0a:37:01:02")) == "fe80::858:aff:fe37:102"
