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
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[^\s"]\S*')


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
    """The server blocks of a Corefile, without snippets and imports; a ValueError if its braces do
    not match."""
    found: list[Block] = []
    keys: list[str] = []
    directives: list[Tuple[str, ...]] = []
    depth = 0
    for number, words in _lines(text):
        opens = words[-1] == "{"
        if depth == 0:
            if words[0] == "import" and not keys:
                continue
            named = [key for word in words if word != "{" for key in word.split(",") if key]
            keys += named
            if opens:
                depth, directives = 1, []
            continue
        if words == ["}"]:
            depth -= 1
            if depth == 0:
                if not keys[0].startswith("("):  # a snippet serves nothing
                    found.append(Block(tuple(keys), tuple(directives)))
                keys = []
            continue
        if depth == 1:
            directives.append(tuple(word for word in words if word != "{"))
        depth += opens
        depth -= words[-1] == "}" and len(words) > 1
        if depth < 1:
            raise ValueError(f"line {number}: a closing brace after other words")
    if depth or keys:
        raise ValueError("the last server block is not closed")
    return found


def imports(text: str) -> list[str]:
    """The patterns of files that a Corefile imports outside of its server blocks."""
    depth, found = 0, []
    for _unused, words in _lines(text):
        if depth == 0 and words[0] == "import":
            found += words[1:]
        depth += (words[-1] == "{") - (words == ["}"])
    return found


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
        at = text.index(BEGIN)
        at = text.rfind("\n", 0, at) + 1
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


def _lines(text: str) -> Iterator[Tuple[int, list[str]]]:
    """The words of each line that has some, without comments."""
    for number, line in enumerate(text.splitlines(), 1):
        words = []
        for match in _TOKEN.finditer(line):
            if match[0].startswith("#"):
                break
            words.append(match[0])
        if words:
            yield number, words


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
    port = DEFAULT_PORT
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
