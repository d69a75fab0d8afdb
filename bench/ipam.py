"""Addresses: a plugin of its own beside host-local, and an allocation inside the daemon."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from ipaddress import ip_address, ip_network
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lab import tools

from .measure import Findings, Row, Series, frozen, in_turns, median, percentile, timed
from .stage import Stage

SUBNET = "10.88.0.0/16"
SHARES = (0, 50, 99)
BARS = {0: 0.8, 50: 1.0, 99: 1.0}
ROUNDS = 15
INSIDE = 3000


def run(stage: Stage, findings: Findings) -> None:
    _as_a_process(stage, findings)
    _inside(stage, findings)


def _as_a_process(stage: Stage, findings: Findings) -> None:
    plot = Series("an address of a /16, by a process of its own", "% in use", "milliseconds")
    for share in SHARES:
        folder = stage.folder / f"ipam-{share}"
        mine, theirs = folder / "ours", folder / "host-local"
        _fill_ours(mine, share)
        _fill_host_local(theirs, share)
        found = in_turns(
            ROUNDS,
            {
                "headcni-ipam": _calls(stage, stage.bin / "headcni-ipam", mine, "data_dir"),
                "host-local": _calls(stage, tools.CNI.bin / "host-local", theirs, "dataDir"),
            },
            warm_up=2,
        )
        findings.raw[f"ipam {share} %"] = found
        ours, peer = (1000 * median(found[name]["ADD"]) for name in found)
        for name, value in zip(found, (ours, peer)):
            plot.lines.setdefault(name, []).append((share, value))
        what = f"headcni-ipam ADD, /16 {share} % full"
        findings.rows.append(Row("ipam", what, "host-local", ours, peer, "ms", bar=BARS[share]))
        shutil.rmtree(folder)
    findings.plots["ipam"] = plot


def _calls(
    stage: Stage, program: Path, folder: Path, key: str
) -> Callable[[], Mapping[str, float]]:
    conf: dict[str, Any] = {
        "cniVersion": "1.0.0",
        "name": "bench",
        "ipam": {"type": program.name, "ranges": [[{"subnet": SUBNET}]]},
    }
    if key == "dataDir":
        conf["ipam"][key] = str(folder)
    else:
        conf[key] = str(folder)

    def once() -> Mapping[str, float]:
        pod = stage.pod()
        found = {}
        for verb in ("ADD", "DEL"):
            env = stage.environment(verb, pod, HEADCNI_DATA_DIR=str(folder))
            found[verb] = timed(lambda env=env: stage.run(program, conf, env))  # type: ignore[misc]
        return found

    return once


def _fill_ours(folder: Path, share: int) -> None:
    from headcni.ipam.allocate import Ipam
    from headcni.store import Store

    folder.mkdir(parents=True)
    with Store.in_directory(str(folder)) as store:
        _take(Ipam(store), share, "bench")


def _take(ipam: Any, share: int, network: str) -> None:
    from headcni.model import Owner

    config = _config()
    for number in range(65_533 * share // 100):
        ipam.allocate(Owner(network, f"filler-{number}", "eth0"), config, "", _free)


def _free(_address: Any) -> bool:
    """Whether somebody else uses it; nobody does here."""
    return False


def _config() -> Any:
    from headcni.model import IpamConfig, Range

    subnet = ip_network(SUBNET)
    pool = Range(subnet, subnet[2], subnet[-2], subnet[1])
    return IpamConfig("headcni-ipam", ((pool,),))


def _fill_host_local(folder: Path, share: int) -> None:
    """As host-local itself would: a file for each address, with the container's id in it."""
    home = folder / "bench"
    home.mkdir(parents=True)
    first = int(ip_network(SUBNET).network_address) + 2
    last = ""
    for number in range(65_533 * share // 100):
        last = str(ip_address(first + number))
        (home / last).write_text(f"filler-{number}\r\neth0")
    if last:
        (home / "last_reserved_ip.0").write_text(last)


def _inside(stage: Stage, findings: Findings) -> None:
    """As the daemon does it, in a process that is warm."""
    from headcni.ipam.allocate import Ipam
    from headcni.model import Owner
    from headcni.store import Store

    config = _config()
    p99, plot = {}, Series("an allocation in the daemon, p99", "% in use", "milliseconds")
    numbers = count()

    def allocate(ipam: Ipam) -> Mapping[str, float]:
        owner = Owner("bench", f"pod-{next(numbers)}", "eth0")
        took = timed(lambda: ipam.allocate(owner, config, "", _free))
        ipam.release(owner)
        return {"allocate": took}

    with ExitStack() as opened:
        pools = {}
        for share in SHARES:
            folder = opened.enter_context(TemporaryDirectory(dir=stage.folder))
            pools[share] = Ipam(opened.enter_context(Store.in_directory(folder)))
            _take(pools[share], share, "bench")
        with frozen():
            found = in_turns(
                INSIDE, {f"{share} %": partial(allocate, ipam) for share, ipam in pools.items()}
            )
    findings.raw["allocation"] = found
    for share in SHARES:
        p99[share] = 1000 * percentile(found[f"{share} %"]["allocate"], 0.99)
        plot.lines.setdefault("headcni", []).append((share, p99[share]))
    findings.plots["allocation"] = plot
    findings.rows.append(
        Row(
            "ipam",
            "an allocation in the daemon, p99, 99 % full",
            "itself at 0 %",
            p99[99],
            p99[0],
            unit="ms",
            bar=1.5,
            limit=1.0,
        )
    )
