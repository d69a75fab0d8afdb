"""What modules on a node have in common."""

from __future__ import annotations

from ansible_collections.headcni.mesh.plugins.module_utils import node


def test_a_proxys_password_and_what_is_called_a_secret_are_known_as_such():
    environment = {
        "HTTPS_PROXY": "http://user:se:cret@proxy:3128",
        "A": "http://host:80/x@y",
        "SOME_TOKEN": "longsecret",
        "SOME_TOKENS": "ten",
        "TS_DEBUG_KEY": "true",  # to hide this word would hide half of what is said
    }
    assert node.secrets_of(environment) == ["se:cret", "longsecret"]


def test_a_program_that_hangs_or_is_missing_has_failed():
    assert node.run_bounded(["sleep", "60"], seconds=0.2)[:2] == (1, "")
    assert node.run_bounded(["/does/not/exist"])[:2] == (1, "")
