"""Two versions of the runtime and two of Tailscale, to go from one to the other.

python two_versions.py FOLDER puts them there, with versions.json to say which is which.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from runtime_variant import built, variant
from tailscale_site import NEWER, OLDER, contents, pack, tarball_name

LATER = "99.0.0"  # than any runtime of a checkout


def main(folder: Path) -> None:
    source = built(folder)
    for version in (OLDER, NEWER):
        (folder / tarball_name(version)).write_bytes(pack(contents(version), version))
    versions = {
        "files": str(folder),
        "runtime": {"former": str(source), "later": str(variant(source, LATER))},
        "tailscale": {"former": OLDER, "later": NEWER},
    }
    (folder / "versions.json").write_text(json.dumps(versions, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
