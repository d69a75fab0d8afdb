"""Our chains in an iptables filter table: jumped to before the rules that block pods.

Docker, ufw and operators all write there. A chain of ours for each hook, HEADCNI-FORWARD and so on,
says what pods need; the first rule of it is a comment with a digest of the rest, so that a look at
the table tells whether it is what we would write.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence

from ...errors import KERNEL, CniError
from . import chains
from .chains import Chain, Table
from .needs import PodTraffic
from .our_chain import NOTE, OurChain, has_other_jumps, is_ours, our_jumps

SECONDS = 20
_SYSTEM_PATH = ":/usr/local/sbin:/usr/sbin:/sbin"
CHAINS = {"forward": "HEADCNI-FORWARD", "input": "HEADCNI-INPUT", "output": "HEADCNI-OUTPUT"}
DOCKER_USER = "DOCKER-USER"
# Chains that stay before ours where they come first: to fight for that place would never end.
_STAY_FIRST = ("ts-", "KUBE-", "cali-", "CILIUM_", "FLANNEL-")
# Chains that an accept of ours must never come before: they enforce network policies.
_ENFORCE_POLICIES = ("KUBE-ROUTER-", "KUBE-NWPLCY-", "cali-", "CILIUM_")
_BUILT_IN = {"INPUT", "FORWARD", "OUTPUT", "PREROUTING", "POSTROUTING"}
_TABLES = {"filter", "mangle", "raw", "security", "nat"}
_NAMES_FILES = {"ip": "ip_tables_names", "ip6": "ip6_tables_names"}


def wanted(table: Table, traffic: PodTraffic) -> dict[Chain, OurChain]:
    """Our chain for each entry chain that blocks."""
    version = 6 if table.family == "ip6" else 4
    return {
        chain: OurChain.of(
            CHAINS[chain.hook],
            (one.as_iptables() for one in traffic.accepts(chain.hook, version)),
        )
        for chain in table.blocking()
        if chain.hook in CHAINS
    }


def legacy_tables() -> list[Table]:
    """Those of the older iptables, where the kernel has them; to ask does not load its module."""
    found = []
    for family, name in _NAMES_FILES.items():
        try:
            with open(f"/proc/thread-self/net/{name}", encoding="ascii") as file:
                in_use = "filter" in file.read().split()
        except OSError:
            in_use = False
        if in_use:
            listed = _run([_program(family, legacy=True), "-w", "5", "-S"])
            found.append(chains.from_listing(family, listed))
    return found


def writes(table: Table) -> bool:
    """Whether it is a table of iptables, which only iptables should change: it cannot list a table
    with rules of another kind in it."""
    hooked = {chain.name for chain in table.chains.values() if chain.hook}
    return table.family in _NAMES_FILES and table.name in _TABLES and hooked <= _BUILT_IN


def differences(table: Table, traffic: PodTraffic) -> list[str]:
    """What of ours is missing from a table that blocks, in words."""
    found = []
    for chain, ours in wanted(table, traffic).items():
        if not ours.is_in(table):
            found.append(f"{_shown(table)}: chain {ours.name} is missing or differs")
        for holder in _holders(table, chain):
            if not _is_in_place(table, chain, holder, ours.name):
                found.append(f"{_shown(table)}: {holder} does not jump to {ours.name} in time")
    return found


def ensure(table: Table, traffic: PodTraffic) -> None:
    """Write our chains, and the jumps to them, in one transaction."""
    chosen = wanted(table, traffic)
    # Each of these makes the chain, or empties it.
    commands = [f":{ours.name} - [0:0]" for ours in chosen.values()]
    for chain, ours in chosen.items():
        commands.append(f"-A {ours.name} -m comment --comment {ours.comment}")
        commands += [f"-A {ours.name} {rule}" for rule in ours.rules]
        for holder in _holders(table, chain):
            if not _is_in_place(table, chain, holder, ours.name):
                commands += _delete_jumps(table, holder, ours.name)
                commands.append(_insert_jump(table, chain, holder, ours.name))
    restore(table, commands)


def remove(table: Table) -> list[str]:
    """Take our chains out; which there were. One that other rules lead to stays, empty."""
    ours = [name for name in CHAINS.values() if is_ours(table, name)]
    commands = [f":{name} - [0:0]" for name in ours]
    for name in ours:
        for holder in table.chains:
            commands += _delete_jumps(table, holder, name)
        if not has_other_jumps(table, name):
            commands.append(f"-X {name}")
    if ours:
        restore(table, commands)
    return [f"{_shown(table)} {name}" for name in ours]


def _holders(table: Table, chain: Chain) -> list[str]:
    """From where to jump. Docker moves its own jump to the top now and then, so what its users put
    into DOCKER-USER must not come before ours either."""
    targets = [rule.target for rule in table.rules.get(chain.name, ())]
    enforced = any(one.startswith(_ENFORCE_POLICIES) for one in targets)
    if chain.hook == "forward" and DOCKER_USER in table.chains and not enforced:
        return [chain.name, DOCKER_USER]
    return [chain.name]


def _is_in_place(table: Table, chain: Chain, holder: str, name: str) -> bool:
    jumps = our_jumps(table.rules.get(holder, ()), name)
    if chain.hook == "forward":
        return jumps == [_after(table, holder)]
    return len(jumps) == 1 and jumps[0] <= table.first_block(chain)


def _insert_jump(table: Table, chain: Chain, holder: str, name: str) -> str:
    """In FORWARD first. Elsewhere after the operator's own rules, and before the one that drops all
    that is left."""
    if chain.hook == "forward":
        return f"-I {holder} {_after(table, holder) + 1} {_jump(name)}"
    rules = table.rules.get(holder, ())
    at = table.first_block(chain)
    if at == len(rules):
        return f"-A {holder} {_jump(name)}"
    ours_before = len([one for one in our_jumps(rules, name) if one < at])
    return f"-I {holder} {at + 1 - ours_before} {_jump(name)}"


def _after(table: Table, name: str) -> int:
    """How many rules have to stay before ours."""
    if name == DOCKER_USER:
        return 0
    ours = set(CHAINS.values())
    targets = [rule.target for rule in table.rules.get(name, ()) if rule.target not in ours]
    enforcing = [at + 1 for at, one in enumerate(targets) if one.startswith(_ENFORCE_POLICIES)]
    leading = 0
    while leading < len(targets) and targets[leading].startswith(_STAY_FIRST):
        leading += 1
    return max([leading, *enforcing])


def _delete_jumps(table: Table, holder: str, name: str) -> list[str]:
    count = len(our_jumps(table.rules.get(holder, ()), name))
    return [f"-D {holder} {_jump(name)}"] * count


def _jump(name: str) -> str:
    return f"-m comment --comment {NOTE} -j {name}"


def restore(table: Table, commands: Iterable[str]) -> None:
    """All of it or nothing; a table that changed since it was read is left for the next pass."""
    program = _program(table.family, table.legacy, "-restore")
    script = "\n".join([f"*{table.name}", *commands, "COMMIT", ""])
    _run([program, "--noflush", "-w", "5"], script)


def _program(family: str, legacy: bool, suffix: str = "") -> str:
    program = _found(family, legacy, suffix)
    if program:
        return program
    plain, kind = _names(family, legacy)
    raise CniError(
        KERNEL,
        f"{plain} rules of the {kind} kind are in force, and {plain}-{kind} is not on this node",
        "install the package iptables, or set network.firewall to none and allow pods yourself",
    )


def _found(family: str, legacy: bool, suffix: str = "") -> str:
    """The program for this kind of table; some distributions have it under the plain name only."""
    plain, kind = _names(family, legacy)
    path = os.environ.get("PATH", "") + _SYSTEM_PATH
    program = shutil.which(f"{plain}-{kind}{suffix}", path=path)
    if program:
        return program
    program = shutil.which(f"{plain}{suffix}", path=path)
    if program and ("nf_tables" in _run([program, "--version"])) != legacy:
        return program
    return ""


def _names(family: str, legacy: bool) -> tuple[str, str]:
    return "ip6tables" if family == "ip6" else "iptables", "legacy" if legacy else "nft"


def _run(command: Sequence[str], stdin: str = "") -> str:
    try:
        done = subprocess.run(
            command,
            input=stdin.encode(),
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise CniError(KERNEL, f"{command[0]} could not be run", str(problem)) from None
    if done.returncode != 0:
        said = " ".join(done.stderr.decode(errors="replace").split())[:300]
        raise CniError(KERNEL, f"{' '.join(command)} failed", said)
    return done.stdout.decode(errors="surrogateescape")  # comments may be in any encoding


def _shown(table: Table) -> str:
    program = "ip6tables" if table.family == "ip6" else "iptables"
    of_table = "" if table.name == "filter" else f" -t {table.name}"
    return f"{program}-legacy" if table.legacy else f"{program}{of_table}"
