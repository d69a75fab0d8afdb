# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""The block of HeadCNI in CoreDNS' Corefile, and what the rest of the file says about zones.

The rest of the file belongs to others and stays byte for byte as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import NamedTuple, Tuple, Union

BEGIN, END = "# BEGIN headcni", "# END headcni"
LARGEST = 1 << 20  # Kubernetes limits a ConfigMap to this size
DEFAULT_PORT = "53"
# The ranges of a tailnet, and the addresses of tailscaled's resolver in them.
RANGES = ("100.64.0.0/10", "fd7a:115c:a1e0::/48")
RESOLVERS = {4: "100.100.100.100", 6: "fd7a:115c:a1e0::53"}
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*\Z")
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|#[^\n]*|[^\s"]\S*|"', re.DOTALL)
_PORTS = {"tls": "853", "quic": "853", "https": "443", "https3": "443", "grpc": "443"}
DEEPEST = 20  # snippets in snippets


class Block(NamedTuple):
    """A server block: its keys, and the directives in it, each as its words."""

    keys: Tuple[str, ...]
    directives: Tuple[Tuple[str, ...], ...]

    @property
    def zones(self) -> Tuple[Tuple[str, str], ...]:
        """Zone and port of each key. A zone is in lower case, without the dot at its end."""
        return tuple(found for key in self.keys for found in _zones(key))


def domain(text: str) -> str:
    """A domain in its one form; a ValueError that says what is expected."""
    found = text.strip().rstrip(".").lower()
    if not _NAME.match(found):
        raise ValueError(f"{text[:80]!r}, expected a domain such as mesh.example.org")
    return found


def blocks(text: str) -> list[Block]:
    """The server blocks of a Corefile, with what they import from snippets; a ValueError if CoreDNS
    would read it otherwise than we do."""
    return _parsed(text)[0]


def imports(text: str) -> list[str]:
    """The patterns of files that a Corefile imports outside of its server blocks."""
    return _parsed(text)[1]


def _parsed(text: str) -> tuple[list[Block], list[str]]:
    """As CoreDNS reads it: a directive ends with its line, but not within braces."""
    found, imported = list[Block](), list[str]()
    snippets: dict[str, Tuple[Tuple[str, ...], ...]] = {}
    tokens = _Tokens(text)
    while tokens.left():
        if tokens.peek() == "import":
            imported += tokens.rest_of_line()[1:]
            continue
        keys = _keys(tokens)
        directives = []
        while tokens.peek() != "}":
            directives.append(_directive(tokens))
        tokens.take()
        if keys[0].startswith("("):  # a snippet serves nothing
            snippets[keys[0].strip("()")] = tuple(directives)
        else:
            found.append(Block(tuple(keys), tuple(_with_snippets(directives, snippets))))
    return found, imported


def _keys(tokens: _Tokens) -> list[str]:
    """Of a server block, with its opening brace. They end with the line, or go on after a comma."""
    keys, line, goes_on = list[str](), tokens.line(), True
    while tokens.peek() != "{":
        if not goes_on and tokens.line() != line:
            break
        line, word = tokens.line(), tokens.take()
        goes_on = word.endswith(",")
        keys += [key for key in word.split(",") if key]
    if not keys or not tokens.left() or tokens.peek() != "{":
        raise ValueError(f"line {line}: a server block without a name or without braces")
    tokens.take()
    return keys


def _directive(tokens: _Tokens) -> Tuple[str, ...]:
    words, depth = list[str](), 0
    while tokens.left():
        word = tokens.peek()
        if words and not depth and not tokens.goes_on():
            break
        if word == "}" and not depth:
            raise ValueError(f"line {tokens.line()}: a closing brace after other words")
        depth += (word == "{") - (word == "}")
        if word not in ("{", "}") and not depth:
            words.append(word)
        tokens.take()
    return tuple(words) or ("{",)


def _with_snippets(
    directives: Iterable[Tuple[str, ...]],
    snippets: dict[str, Tuple[Tuple[str, ...], ...]],
    depth: int = 0,
) -> Iterator[Tuple[str, ...]]:
    for words in directives:
        yield words
        if words[0] == "import" and len(words) > 1 and words[1] in snippets:
            if depth >= DEEPEST:
                raise ValueError("snippets import each other without end")
            yield from _with_snippets(snippets[words[1]], snippets, depth + 1)


def reloads(text: str) -> bool:
    """Whether CoreDNS reads the file again when it changes."""
    return any(words[0] == "reload" for block in blocks(text) for words in block.directives)


def port_of_all(found: Iterable[Block]) -> str:
    """The port on which names that no other block serves are answered."""
    return next((port for block in found for zone, port in block.zones if zone == ""), DEFAULT_PORT)


def block(name: str, ranges: Iterable[str], resolvers: Iterable[str], port: str) -> str:
    """Our block, with its markers."""
    keys = " ".join(f"{zone}:{port}" for zone in (name, *map(_key, ranges)))
    return f"""\
{BEGIN}
# Names of the tailnet, answered by the tailscaled of the node. HeadCNI's site.yml keeps this block.
{keys} {{
    errors
    cache 30
    forward . {" ".join(resolvers)}
}}
{END}
"""


def without_block(text: str) -> str:
    """The file as it is without our block. A ValueError if its markers do not match."""
    lines = text.splitlines(keepends=True)
    begins = [at for at, line in enumerate(lines) if line.strip() == BEGIN]
    ends = [at for at, line in enumerate(lines) if line.strip() == END]
    if not begins and not ends:
        return text
    if len(begins) != 1 or len(ends) != 1 or ends[0] < begins[0]:
        raise ValueError(
            f"the markers '{BEGIN}' and '{END}' must be there once each, in this order: "
            "remove what is left of the block by hand"
        )
    return "".join([*lines[: begins[0]], *lines[ends[0] + 1 :]])


def with_block(text: str, ours: str) -> str:
    """The file with our block: in its old place, or at the end."""
    before = without_block(text)
    if before != text:
        lines = text.splitlines(keepends=True)
        first = next(at for at, line in enumerate(lines) if line.strip() == BEGIN)
        at = len("".join(lines[:first]))
        return before[:at] + ours + before[at:]
    return text + ("" if not text or text.endswith("\n") else "\n") + ours


def conflicts(name: str, ranges: Iterable[str], port: str, others: Iterable[Block]) -> list[str]:
    """Why our block cannot be added: CoreDNS does not start if two blocks serve the same zone, and
    it asks the block with the longest matching zone, so ours must not hide the cluster's names."""
    wanted = {(zone, port) for key in (name, *map(_key, ranges)) for zone, _p in _zones(key)}
    found = []
    for other in others:
        for zone, at in dict.fromkeys(one for one in other.zones if one in wanted):
            found.append(f"another server block already serves {zone}:{at}")
        for words in other.directives:
            for cluster in _kubernetes_zones(words):
                if f".{cluster}".endswith(f".{name}"):
                    found.append(
                        f"the cluster's domain {cluster} is part of the tailnet's domain {name}, "
                        "so the names of services would no longer be found"
                    )
    return list(dict.fromkeys(found))


class _Tokens:
    """The words of a Corefile, without comments. A word in quotes may have several lines."""

    def __init__(self, text: str) -> None:
        self._found: list[tuple[int, int, str]] = []  # the lines of its beginning and end
        self._at, line, last = 0, 1, 0
        for match in _TOKEN.finditer(text):
            line += text.count("\n", last, match.start())
            begins, last = line, match.end()
            line += match[0].count("\n")
            if match[0] == '"':
                raise ValueError(f"line {begins}: a quotation mark that is not closed")
            if not match[0].startswith("#"):
                self._found.append((begins, line, match[0]))

    def left(self) -> bool:
        return self._at < len(self._found)

    def peek(self) -> str:
        if not self.left():
            raise ValueError("the last server block is not closed")
        return self._found[self._at][2]

    def line(self) -> int:
        self.peek()
        return self._found[self._at][0]

    def goes_on(self) -> bool:
        """Whether the next word is on the line of the last one."""
        return self._found[self._at][0] == self._found[self._at - 1][1]

    def take(self) -> str:
        word = self.peek()
        self._at += 1
        return word

    def rest_of_line(self) -> list[str]:
        words = [self.take()]
        while self.left() and self.goes_on():
            words.append(self.take())
        return words


def _kubernetes_zones(words: Tuple[str, ...]) -> list[str]:
    """The domains that the plugin kubernetes answers for, without reverse zones."""
    if words[0] != "kubernetes":
        return []
    zones = [word.rstrip(".").lower() for word in words[1:]]
    return [zone for zone in zones if zone and not zone.endswith(".arpa") and "/" not in zone]


def _key(cidr: str) -> str:
    return str(ip_network(cidr))


def _zones(key: str) -> Iterator[Tuple[str, str]]:
    key = key.strip('"').lower()
    scheme, found, rest = key.partition("://")
    zone = rest if found else scheme
    port = _PORTS.get(scheme, DEFAULT_PORT) if found else DEFAULT_PORT
    match = re.match(r"(.*?):(\d+)\Z", zone)
    # fd7a:115c:a1e0::/48 has no port, and neither has an address.
    if match and (match[1].count(":") == 0 or "/" in match[1]):
        zone, port = match[1], match[2]
    try:
        network = ip_network(zone)
    except ValueError:
        yield zone.rstrip("."), port
        return
    for part in _octets(network):
        yield _reverse(part), port


def _octets(network: Union[IPv4Network, IPv6Network]) -> Iterator[Union[IPv4Network, IPv6Network]]:
    """The parts of a range that have a reverse zone of their own, as CoreDNS makes them."""
    step = 8 if network.version == 4 else 4
    length = -(-network.prefixlen // step) * step
    yield from network.subnets(new_prefix=max(length, step))


def _reverse(network: Union[IPv4Network, IPv6Network]) -> str:
    step, suffix = (8, "in-addr.arpa") if network.version == 4 else (4, "ip6.arpa")
    count = network.prefixlen // step
    packed = network.network_address
    labels = (
        str(packed).split(".") if network.version == 4 else list(packed.exploded.replace(":", ""))
    )
    return ".".join([*reversed(labels[:count]), suffix])
