"""Keyrings: only the keys with expected fingerprints are passed on."""

from __future__ import annotations

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import openpgp
from hypothesis import given
from hypothesis import strategies as st
from openpgp_keys import (
    EXPECTED,
    EXPECTED_FINGERPRINT,
    EXPECTED_SUBKEY,
    ROGUE,
    ROGUE_FINGERPRINT,
)


def tags(keyring: bytes) -> list[int]:
    return [packet.tag for packet in openpgp.packets(keyring)]


def subkey(keyring: bytes) -> bytes:
    parts = list(openpgp.packets(keyring))
    return b"".join(packet.whole for packet in parts[3:])


def test_fingerprints_are_those_that_gpg_shows():
    found = [openpgp.fingerprint(p.body) for p in openpgp.packets(EXPECTED) if p.tag in (6, 14)]
    assert found == [EXPECTED_FINGERPRINT, EXPECTED_SUBKEY]


def test_a_key_beside_the_expected_one_is_dropped_wherever_it_is():
    for keyring in (EXPECTED + ROGUE, ROGUE + EXPECTED, ROGUE + EXPECTED + ROGUE):
        kept = openpgp.only(keyring, {EXPECTED_FINGERPRINT, EXPECTED_SUBKEY})
        assert kept == EXPECTED


def test_a_subkey_that_somebody_has_put_under_the_expected_key_is_dropped():
    kept = openpgp.only(EXPECTED + subkey(ROGUE), {EXPECTED_FINGERPRINT, EXPECTED_SUBKEY})
    assert kept == EXPECTED
    assert tags(openpgp.only(EXPECTED, {EXPECTED_FINGERPRINT})) == [6, 13, 2]


def test_an_expected_subkey_under_another_key_is_dropped():
    with pytest.raises(openpgp.KeyringError, match=f"its keys are {ROGUE_FINGERPRINT}, expected"):
        openpgp.only(ROGUE + subkey(EXPECTED), {EXPECTED_SUBKEY})


def test_armor_is_taken_off_and_put_on():
    assert openpgp.binary(openpgp.armored(EXPECTED)) == openpgp.binary(EXPECTED) == EXPECTED
    windows = openpgp.armored(EXPECTED).replace(b"\n", b"\r\n")
    assert openpgp.only(windows, {EXPECTED_FINGERPRINT, EXPECTED_SUBKEY}) == EXPECTED


@pytest.mark.parametrize("keyring", [b"", b"<html>", EXPECTED[:-1], EXPECTED[:1], b"\x9b\x00"])
def test_what_is_no_keyring_is_refused(keyring):
    with pytest.raises(openpgp.KeyringError):
        openpgp.only(keyring, {EXPECTED_FINGERPRINT, EXPECTED_SUBKEY})


@given(st.binary(max_size=200))
def test_whatever_a_server_sends_is_refused_or_read(data):
    try:
        kept = openpgp.only(data + EXPECTED, {EXPECTED_FINGERPRINT})
    except openpgp.KeyringError:
        return
    assert kept in (EXPECTED, openpgp.only(EXPECTED, {EXPECTED_FINGERPRINT}))


@pytest.mark.parametrize(
    "text",
    [EXPECTED_FINGERPRINT, EXPECTED_FINGERPRINT.lower(), "4101 8993 AF4E E9B5 248C  D3FA 0DB6 4B13 "
     "A25B B01C"],
)  # fmt: skip
def test_a_fingerprint_is_read_as_people_write_it(text):
    assert openpgp.normal(text) == EXPECTED_FINGERPRINT
    assert openpgp.normal(text[:-1]) == openpgp.normal("a key") == ""
