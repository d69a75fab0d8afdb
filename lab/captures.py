"""Terminal captures for the documentation, from a lab that runs: `make captures`.

It starts a pod on two nodes, asks bin/headcnictl, once more with a fault on the second node, and
writes the answers into docs/captures.md. Addresses of the lab's private network are replaced by
those for documentation. The lab is as before in the end.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from .layout import CHECKOUT, Lab, Plan

PAGE = CHECKOUT / "docs/captures.md"
POD = CHECKOUT / "tests/support/named_pod.py"
PODS = {"node1": "web-1", "node2": "db-1"}
SECONDS = 300.0
FAULT = "sysctl -qw net.ipv4.ip_forward=0"
REPAIR = "sysctl -qw net.ipv4.ip_forward=1"
TRACE = ("trace", "shop/web-1", "shop/db-1")


class Capture(NamedTuple):
    name: str
    words: tuple[str, ...]
    broken: bool = False  # while the second node has a fault


CAPTURES = (
    Capture("status", ("status", "--all")),
    Capture("routes", ("-l", "node1", "routes")),
    Capture("ipam", ("-l", "node1", "ipam")),
    Capture("trace", TRACE),
    Capture("trace of a broken path", TRACE, broken=True),
    Capture("diagnose", ("diagnose", "--all"), broken=True),
    Capture("connect-test", ("connect-test", "--perf")),
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m lab.captures", description=__doc__)
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    args = parser.parse_args(arguments)
    lab = Lab.of_this_checkout()
    if not lab.plan_file.exists():
        print("there is no lab: run make up first", file=sys.stderr)
        return 1
    page = args.page.read_text()
    for name, text in captured(lab).items():
        page = filled(page, name, text)
    args.page.write_text(page)
    return 0


def captured(lab: Lab) -> dict[str, str]:
    found = {}
    with ExitStack() as cleanup:
        for node, name in PODS.items():
            cleanup.enter_context(a_pod(lab, node, name))
        ask(("connect-test",))  # the paths between nodes begin relayed, and become direct
        for broken in (False, True):
            if broken:
                cleanup.callback(on, lab, "node2", REPAIR)
                on(lab, "node2", FAULT)
            for one in CAPTURES:
                if one.broken == broken:
                    found[one.name] = documented(Plan.load(lab), one.words, ask(one.words))
    return found


@contextmanager
def a_pod(lab: Lab, node: str, name: str) -> Iterator[None]:
    program = POD.read_text()
    on(lab, node, f"python3 - ADD shop {name}", program)
    try:
        yield
    finally:
        on(lab, node, f"python3 - DEL shop {name}", program)


def on(lab: Lab, node: str, command: str, given: str = "") -> None:
    subprocess.run(
        ["ssh", "-F", str(lab.ssh_config), node, command],
        input=given,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )


def ask(words: tuple[str, ...]) -> str:
    done = subprocess.run(
        [CHECKOUT / "bin/headcnictl", "-i", "inventories/lab", *words],
        cwd=CHECKOUT,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"headcnictl {' '.join(words)}: {done.stderr}")
    return done.stdout


def documented(plan: Plan, words: tuple[str, ...], output: str) -> str:
    """As a user sees it, with the prompt and addresses for documentation."""
    for private, public in replacements(plan).items():
        output = output.replace(private, public)
    lines = [f"$ bin/headcnictl -i inventories/mine {' '.join(words)}", *output.split("\n")]
    return "\n".join(line.rstrip() for line in lines).strip()


def replacements(plan: Plan) -> Mapping[str, str]:
    return {
        str(plan.gateway).rpartition(".")[0] + ".": "192.0.2.",
        str(plan.gateway6).rpartition("::")[0] + "::": "2001:db8::",
    }


def filled(page: str, name: str, text: str) -> str:
    between = re.compile(rf"(?s)(<!-- captured: {name} -->\n).*?(<!-- end of {name} -->)")
    page, count = between.subn(
        lambda found: f"{found[1]}\n```text\n{text}\n```\n\n{found[2]}", page
    )
    if count != 1:
        raise SystemExit(f"the page needs exactly one part <!-- captured: {name} -->")
    return page


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
