"""What leaves the node in a support bundle has no secrets in it."""

from __future__ import annotations

import base64
import json
import secrets
import string
import time

import pytest

from headcni.ctl.redact import GONE, Redactor, secrets_in

TEXT = string.ascii_letters + string.digits


def random(length: int, letters: str = TEXT) -> str:
    return "".join(secrets.choice(letters) for _unused in range(length))


HEX = "0123456789abcdef"
PEM = (
    "-----BEGIN EC PRIVATE KEY-----\n"
    + "\n".join(random(64, TEXT + "+/") for _unused in range(3))
    + "\n-----END EC PRIVATE KEY-----"
)
JWT = ".".join(
    base64.urlsafe_b64encode(part).decode().rstrip("=")
    for part in (b'{"alg":"RS256"}', b'{"sub":"system:serviceaccount:x"}', secrets.token_bytes(64))
)
BARE = {
    "auth key of Tailscale": f"tskey-auth-{random(12)}CNTRL-{random(32)}",
    "auth key of Headscale": f"hskey-auth-{random(12)}-{random(64)}",
    "API key of Headscale": f"hskey-api-{random(12)}-{random(64)}",
    "old API key of Headscale": f"{random(10)}.{random(43)}",
    "older API key of Headscale": f"{random(7)}.{random(32)}",
    "old auth key of Headscale": random(48, HEX),
    "node key": f"nodekey:{random(64, HEX)}",
    "private key of a node": f"privkey:{random(64, HEX)}",
    "machine key": f"mkey:{random(64, HEX)}",
    "disco key": f"discokey:{random(64, HEX)}",
    "lock key": f"nlpriv:{random(64, HEX)}",
    "JWT": JWT,
    "token of k3s": f"K10{random(64, HEX)}::server:{random(32, HEX)}",
    "token of kubeadm": f"{random(6, HEX)}.{random(16, HEX)}",
    "base64": base64.b64encode(secrets.token_bytes(48) + b"aA1").decode(),
}
AROUND = (
    "{}",
    "the key {} was refused",
    '"{}"',
    "level=INFO part=mesh msg=joined with={}",
    '{{"deep": {{"list": ["{}"]}}}}',
    "--flag={} --more",
    "https://example.com/?value={}&x=1",
    "[{}]",
    "({})",
    "name: {}",
    '{{"text": "before\\n{}\\nafter"}}',
    '{{"text": "before\\t{}"}}',
)


def secret_of(text: str) -> str:
    return text.partition(":")[2] if text.startswith(("nodekey", "privkey", "mkey")) else text


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kind", BARE)
def test_what_looks_like_a_secret_is_removed_wherever_it_is(kind, around):
    text = around.format(BARE[kind])
    said = Redactor()(text)
    assert secret_of(BARE[kind]) not in said
    assert GONE in said
    before = around.format("\0").partition("\0")[0]
    assert said.startswith(before[:4])


@pytest.mark.parametrize(
    "text",
    [
        "password: SECRET",
        'password = "SECRET"',
        '{"authKey": "SECRET"}',
        '{\\"authKey\\": \\"SECRET\\"}',
        "headscale: {authKey: SECRET}",
        "auth_key=SECRET",
        "tailscale up --auth-key=SECRET --hostname=n",
        "tailscale up --auth-key SECRET --hostname n",
        "  token: SECRET",
        "K3S_TOKEN=SECRET",
        "HEADSCALE_API_KEY='SECRET'",
        "client-key-data: SECRET",
        "    client-certificate-data: SECRET",
        "x-api-key: SECRET",
        "Authorization: Bearer SECRET",
        "authorization: basic SECRET",
        "Authorization: token SECRET",
        '{"Proxy-Authorization": "Digest username=me, response=SECRET"}',
        "Cookie: a=b; session=SECRET",
        '{"auths": {"registry.example": {"auth": "SECRET"}}}',
        '{\\"auths\\": {\\"registry.example\\": {\\"auth\\": \\"SECRET\\"}}}',
        "https://user:p@SECRET@example.com/",
        "https://user:SECRET@example.com/",
        "https://SECRET@example.com/",
        "https://example.com/?token=SECRET&x=1",
        "psk: SECRET",
        "privateKey: |\n  SECRET\n",
        "clientSecret: SECRET",
        "registry.password: SECRET",
        "passwd=SECRET",
        "the token: SECRET",
    ],
)
def test_a_value_whose_name_says_so_is_removed_whatever_it_is(text):
    said = Redactor()(text.replace("SECRET", "hunter22"))
    assert "hunter22" not in said
    assert GONE in said


@pytest.mark.parametrize(
    "text", [PEM, f"before\n{PEM}\nafter", json.dumps({"data": PEM}), f"x: |\n  {PEM}\n"]
)
def test_a_private_key_is_removed_on_lines_and_in_json(text):
    said = Redactor()(text)
    assert not [line for line in PEM.splitlines()[1:-1] if line in said]
    assert ("after" in said) == ("after" in text)


def test_a_private_key_whose_end_is_cut_or_whose_beginning_is_missing_is_removed_too():
    lines = PEM.splitlines()
    assert not [line for line in lines[1:-1] if line in Redactor()("\n".join(lines[:3]))]
    assert not [line for line in lines[1:-1] if line in Redactor()("\n".join(lines[2:]))]


@pytest.mark.parametrize(
    "text",
    [
        '{"key": "network.mtu", "value": 1280, "origin": "file"}',
        "headscale.apiKeyFile                default  -",
        '{"kubernetes_token_expires": 1800000000.5, "key_expires": 0}',
        "daemon.tokenLifetime  default  7776000",
        "headcni_kubernetes_token_expiry_timestamp_seconds 0",
        f'"container_id": "{"0123456789abcdef" * 4}"',
        "inet6 fd7a:115c:a1e0::1/128 scope global link/ether 02:42:ac:11:00:02",
        "ip saddr 10.244.1.0/24 ip daddr != 10.244.0.0/16 masquerade fully-random",
        "magicsock: disco: node [AbC12] d:0123456789abcdef now using 192.0.2.1:41641",
        "https://headscale.example.com/api/v1/node",
        "/opt/headcni/releases/headcni-runtime-0.2.0/bin/headcnictl",
        "web-7d9c5b8f6d-x2x5z on 10-flannel.conflist.headcni-backup",
    ],
)
def test_what_helps_to_find_a_fault_stays(text):
    assert Redactor()(text) == text


def test_the_secrets_of_this_node_are_removed_in_any_place(tmp_path):
    key, kubeconfig = tmp_path / "key", tmp_path / "kubeconfig"
    key.write_text("short-one\n")
    kubeconfig.write_text("users:\n- name: x\n  user:\n    token: plain-words\n    password: pw\n")
    known = secrets_in([str(key), str(kubeconfig), str(tmp_path / "none"), ""])
    assert {"short-one", "plain-words"} <= known
    said = Redactor(known)("a short-one and plain-words, and pw stays")
    assert said == f"a {GONE} and {GONE}, and pw stays"


def test_a_large_text_takes_no_long_time():
    began = time.monotonic()
    for text in ("a-" * (1 << 20), "token " * (1 << 19), "-----BEGIN A-----\n" * (1 << 16)):
        Redactor()(text)
    assert time.monotonic() - began < 20
