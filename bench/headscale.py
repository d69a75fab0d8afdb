"""The routes of a thousand nodes at a real Headscale, where nothing changes, beside one list."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import ansible_module
from headscale_server import HeadscaleServer

from .measure import Findings, Row, Series, in_turns, median, timed

SIZES = (10, 100, 1000)
ROUNDS = 10
USER = "headcni"
AT_A_TIME = 4  # each request costs Headscale a look at the key by bcrypt


def run(findings: Findings) -> None:
    plot = Series("routes of all nodes, nothing to change", "nodes", "milliseconds")
    with tempfile.TemporaryDirectory(prefix="hct-bench-") as folder:
        server = HeadscaleServer(Path(folder))
        try:
            server.start()
            server.key = server.make_key()
            server.add_user(USER)
            nodes: list[dict[str, Any]] = []
            for size in SIZES:
                with ThreadPoolExecutor(AT_A_TIME) as pool:
                    nodes += pool.map(partial(_node, server), range(len(nodes), size))
                found = _measured(server, nodes)
                findings.raw[f"headscale, {size} nodes"] = found
                took = {name: 1000 * median(one["run"]) for name, one in found.items()}
                for name, value in took.items():
                    plot.lines.setdefault(name, []).append((size, value))
        finally:
            server.stop()
    findings.plots["headscale"] = plot
    what = f"headscale_routes, {SIZES[-1]} nodes, nothing to change"
    ours, theirs = took["headscale_routes"], took["list"]
    findings.rows.append(Row("headscale", what, "one list call", ours, theirs, unit="ms", bar=3.0))


def _node(server: HeadscaleServer, number: int) -> dict[str, Any]:
    route = f"10.{number // 256}.{number % 256}.0/24"
    made = server.add_node(f"node{number}", USER, route)
    server.approve(made, route)
    return {"id": made["id"], "routes": [route]}


def _measured(
    server: HeadscaleServer, nodes: list[dict[str, Any]]
) -> dict[str, dict[str, list[float]]]:
    def routes() -> dict[str, Any]:
        return ansible_module.run(
            "headscale_routes", url=server.url, api_key=server.key, nodes=nodes
        )

    def ours() -> Mapping[str, float]:
        said: dict[str, Any] = {}
        took = timed(lambda: said.update(routes()))
        if said["changed"]:
            raise RuntimeError("routes were changed that had been approved before")
        return {"run": took}

    return in_turns(
        ROUNDS,
        {
            "headscale_routes": ours,
            "list": lambda: {"run": timed(lambda: server.ask("GET", "node"))},
        },
    )
