"""Fill plugins/module_utils/tailscale_checksums.py for a version of Tailscale.

    python3 tests/support/tailscale_checksums.py 1.102.5

Downloads each tarball from Tailscale's site, compares it with the .sha256 file there, and notes its
SHA-256. Run it on two networks and compare the sums before the commit: this is what nodes believe.
"""

from __future__ import annotations

import argparse
import hashlib
import runpy
import sys
import urllib.request
from pathlib import Path

TABLE = Path(__file__).parents[2] / "plugins/module_utils/tailscale_checksums.py"
SITE = "https://pkgs.tailscale.com/stable"
PUBLISHED = ("386", "amd64", "arm", "arm64", "riscv64")
CHUNK = 1 << 20


def digest(address: str) -> str:
    found = hashlib.sha256()
    with urllib.request.urlopen(address, timeout=60) as answer:
        for chunk in iter(lambda: answer.read(CHUNK), b""):
            found.update(chunk)
    return found.hexdigest()


def published(address: str) -> str:
    with urllib.request.urlopen(f"{address}.sha256", timeout=60) as answer:
        return str(answer.read(1000).decode().split()[0])


def sums(version: str, site: str = SITE) -> dict[str, str]:
    """By architecture."""
    found = {}
    for arch in PUBLISHED:
        address = f"{site}/tailscale_{version}_{arch}.tgz"
        print(f"fetching {address}", file=sys.stderr)
        found[arch] = digest(address)
        if found[arch] != published(address):
            sys.exit(f"{address} has the SHA-256 {found[arch]}, and its .sha256 file has another")
    return found


def written(known: dict[str, dict[str, str]]) -> str:
    """The table as it is in the file."""
    lines = []
    for version, by_arch in known.items():
        lines += [f'    "{version}": {{']
        lines += [f'        "{arch}": "{value}",' for arch, value in by_arch.items()]
        lines += ["    },"]
    return "\n".join(["KNOWN: dict[str, dict[str, str]] = {", *lines, "}", ""])


def fill(version: str, site: str = SITE, table: Path = TABLE) -> None:
    """Note the sums of a version; those of other versions stay."""
    known = runpy.run_path(str(table))["KNOWN"]
    before, _mark, _old = table.read_text().partition("KNOWN: ")
    table.write_text(before + written({**known, version: sums(version, site)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("version", help="such as 1.102.5")
    fill(parser.parse_args().version)


if __name__ == "__main__":
    main()
