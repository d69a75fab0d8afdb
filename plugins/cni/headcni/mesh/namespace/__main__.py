"""``python3 -m headcni.mesh.namespace``: make, check or remove the namespace of daemon mode."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Optional

from ... import settings as configuration
from ...errors import CniError
from .mesh_namespace import MeshNamespace
from .settings import from_daemon, from_json


def tell_firewalls(path: str) -> None:
    """Tell other firewalls about the namespace now: tailscaled needs its way out before the daemon
    has been started for the first time."""
    from ...datapath.host_firewall import Cooperation
    from .. import pod_traffic

    config = configuration.load(path, missing_ok=True)
    if config.network.firewall != "auto":
        return
    for firewall in Cooperation(manage=True).ensure(pod_traffic.now(config, ())):
        print(f'msg="{firewall.in_words()}"', file=sys.stderr)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Exit codes: 0 it is or was made right, 1 `check` found differences, 2 it failed."""
    parser = argparse.ArgumentParser(
        prog="headcni.mesh.namespace",
        description="The network namespace of daemon mode.",
    )
    parser.add_argument("verb", choices=("ensure", "check", "remove"))
    parser.add_argument("--config", default=configuration.PATH, help="the daemon's (%(default)s)")
    parser.add_argument("--mesh", help="in place of it: JSON with MeshConfig's own keys")
    given = parser.parse_args(arguments)
    try:
        wanted = from_json(given.mesh) if given.mesh else from_daemon(given.config)
        mesh = MeshNamespace(wanted)
        if given.verb == "remove":
            mesh.remove()
        elif given.verb == "ensure":
            repaired = mesh.ensure()
            for difference in repaired:
                print(f'msg="repaired" difference="{difference}"', file=sys.stderr)
            if repaired and not given.mesh:
                tell_firewalls(given.config)
        else:
            found = mesh.differences()
            print("\n".join(found) or "no differences")
            return 1 if found else 0
    except (CniError, OSError) as problem:
        print(f'level=ERROR msg="{problem}"', file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
