"""A process of its own that allocates, for the tests that run several and end some of them.

python ipam_worker.py PATH NAME MODE COUNT: writes a line to stdout for each thing done, at once.
"""

from __future__ import annotations

import os
import sys
from random import Random

from headcni.errors import CniError
from headcni.ipam.allocate import Ipam
from headcni.ipam.config import parse_ipam
from headcni.model import Owner
from headcni.store import Store

SECTION = {"subnet": "10.1.2.0/24", "ranges": [[{"subnet": "fd00:1::/64"}]], "strategy": "random"}


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def main(path: str, name: str, mode: str, count: int) -> None:
    config = parse_ipam(SECTION, "ipam", [])
    dice = Random(name)
    mine: list[Owner] = []
    say("ready")
    sys.stdin.readline()
    for number in range(count):
        # As CNI does it: each call opens the store anew.
        with Store(path, boot_id="boot-1") as store:
            ipam = Ipam(store, recover=lambda _: say("recovering"))
            if mode == "churn" and mine and dice.random() < 0.4:
                owner = mine.pop(dice.randrange(len(mine)))
                say("releasing", owner.container_id)
                ipam.release(owner)
            owner = Owner("pods", f"{name}-{number}", "eth0")
            try:
                lease = ipam.allocate(owner, config, "default/pod", lambda _: False)
            except CniError as refused:
                say("refused", refused.code, refused)
            else:
                say("took", owner.container_id, *(one.address for one in lease.addresses))
                mine.append(owner)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
