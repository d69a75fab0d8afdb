"""Removing secrets from text that leaves the node.

Two rules apply. What looks like a secret is removed: keys of Tailscale, Headscale and Kubernetes,
tokens, PEM blocks, and values whose name says so. Secrets of this node are also removed wherever
they occur: what is in its key files and its kubeconfig. It is better to remove too much.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import List, Set

GONE = "(redacted)"
SHORTEST = 8  # a shorter value would also be found in ordinary words
LARGEST_FILE = 1 << 20

# How the names of values end, in any spelling: authKey, auth_key, AUTH-KEY. Every repetition below
# has a limit or starts at a fixed word, so that a large text takes no longer than it is long.
_NAMED = (
    r"(?:token|secret|passw(?:or)?d|passphrase|credentials?|\bpsk|key[_-]?data|certificate-data"
    r"|(?:api|auth|private|secret|access|shared|client|node|machine|noise|wg|signing|encryption"
    r"|tls|etcd|server|account)[_-]?key)"
)
_QUOTED = r"\\?\"(?:[^\"\\]|\\[^\"])*\\?\"|'[^']*'"
_START = r"(?:\b|(?<=\\[nrt]))"  # of a word, also after an escaped end of a line
_PATTERNS = (
    # PEM, on several lines or escaped. A cut one hides the rest of the text.
    (r"(?s)-----BEGIN [A-Z0-9 ]+-----.*?(?:-----END [A-Z0-9 ]+-----|\Z)", GONE),
    (rf"{_START}eyJ[\w-]{{8,}}(?:\.[\w-]*){{0,4}}", GONE),  # a JWT
    (rf"{_START}(?:tskey|hskey)-[\w-]+", GONE),
    (
        rf"{_START}([a-z]{{0,16}}(?:key|pub|priv)):[0-9a-f]{{16,}}",
        rf"\1:{GONE}",
    ),  # nodekey:, privkey:, nlpub:
    (rf"{_START}K10[0-9a-f]{{32,}}(?:::[^\s\"',]+)?", GONE),  # of k3s
    (rf"{_START}[a-z0-9]{{6}}\.[a-z0-9]{{16}}\b", GONE),  # of kubeadm
    (rf"{_START}[0-9a-f]{{48}}\b", GONE),  # a pre-auth key of Headscale up to 0.27
    (rf"{_START}[\w-]{{7,12}}\.[\w-]{{32,}}", GONE),  # an API key of Headscale up to 0.27
    (rf"(?i){_START}(bearer|basic)\s{{1,8}}[\w.~+/=-]{{6,}}", rf"\1 {GONE}"),
    (
        # All of the header: there are other schemes, and a proxy's, and several cookies.
        rf"(?i){_START}((?:proxy-)?authorization|(?:set-)?cookie)"
        r"((?:\\?[\"'])?\s{0,8}[=:]\s{0,8}(?:\\?[\"'])?)[^\r\n\"'\\]{1,4096}",
        rf"\1\2{GONE}",
    ),
    (r"(?i)(//)[^/\s\"']*@", rf"\1{GONE}@"),  # a password may have an @
    (rf"(\\?\"auth\\?\"\s{{0,8}}:\s{{0,8}})(?:{_QUOTED})", rf"\1{GONE}"),  # of a registry
    (
        rf"(?i)({_NAMED}(?:\\?[\"'])?\s{{0,8}}[=:]\s{{0,8}})"
        rf"(?:{_QUOTED}|[|>][+-]?\s{{0,8}}\n\s{{0,64}}\S+"
        r"|[^\s,;&\"'{}\[\]()][^\s,;&\"'{}\[\]]*)",
        rf"\g<1>{GONE}",
    ),
    (
        rf"(?i)(?<!\S)(--?(?:\w{{1,20}}-){{0,4}}\w{{0,20}}{_NAMED})\s{{1,8}}(?!-)[^\s\"',]+",
        rf"\1 {GONE}",
    ),
)
_RULES = tuple((re.compile(pattern), put) for pattern, put in _PATTERNS)
# Long text of letters in both cases and of digits: base64, not a name. Identifiers of containers
# have no capital letters.
_RANDOM = re.compile(r"[A-Za-z0-9+/_-]{40,}={0,2}")


class Redactor:
    """Removes what looks like a secret, and the known ones."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._known = sorted(
            {secret for secret in known if len(secret) >= SHORTEST}, key=len, reverse=True
        )

    def __call__(self, text: str) -> str:
        for secret in self._known:
            text = text.replace(secret, GONE)
        for pattern, put in _RULES:
            text = pattern.sub(put, text)
        return _RANDOM.sub(lambda found: GONE if _is_random(found[0]) else found[0], text)


def _is_random(text: str) -> bool:
    return all(re.search(kind, text) for kind in ("[a-z]", "[A-Z]", "[0-9]"))


def secrets_in(paths: Iterable[str]) -> Set[str]:
    """The secrets in these files: a key alone in its file, and the values of a kubeconfig."""
    found: Set[str] = set()
    for path in filter(None, paths):
        with suppress(OSError):
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read(LARGEST_FILE)
            found |= set(_values(text))
    return found


def _values(text: str) -> Iterator[str]:
    words: List[str] = text.split()
    if len(words) == 1:
        yield words[0]
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon and re.search(rf"(?i){_NAMED}\Z", name.strip("-\"' ")):
            yield value.strip(" \"',")
