"""A node that reaches others only through the relay, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from lab_command import LabCommand


@contextmanager
def only_relayed(lab: LabCommand, node: str) -> Iterator[None]:
    """Without UDP of either IP version. Blocking only one version leaves a direct path."""
    with _dropping(lab, node, "meta l4proto udp"):
        yield


@contextmanager
def cut_off(lab: LabCommand, node: str) -> Iterator[None]:
    """Without UDP, and without Headscale, which is also the relay."""
    port = urlsplit(lab.inventory()["lab"]["vars"]["lab_headscale_url"]).port
    with _dropping(lab, node, "meta l4proto udp", f"tcp dport {port}", f"tcp sport {port}"):
        yield


@contextmanager
def _dropping(lab: LabCommand, node: str, *packets: str) -> Iterator[None]:
    chains = "\n".join(
        f"chain {hook} {{\n type filter hook {hook} priority 0;\n"
        + "".join(f' {way}ifname "eth0" {one} drop\n' for one in packets)
        + "}"
        for hook, way in (("input", "i"), ("output", "o"))
    )
    lab.write(node, "/run/dropping.nft", f"table inet dropping {{\n{chains}\n}}\n".encode())
    lab.on(node, "nft -f /run/dropping.nft")
    try:
        yield
    finally:
        lab.on(node, "nft delete table inet dropping")
