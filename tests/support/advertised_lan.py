"""A node that serves the lab's own underlay in the tailnet: a subnet router at home."""

from __future__ import annotations

import json

from site_run import Site

HEADSCALE = "/opt/lab/headscale/headscale"


def advertise(site: Site, node: str = "node2") -> None:
    """Have a node of the mesh serve the underlay as well."""
    lab = site.lab
    prefs = json.loads(lab.on(node, "tailscale debug prefs"))
    routes = ",".join(sorted({*(prefs["AdvertiseRoutes"] or ()), lab.underlay()}))
    lab.on(node, f"tailscale set --advertise-routes={routes}")
    nodes = json.loads(lab.on("control", f"{HEADSCALE} nodes list -o json"))
    number = next(one["id"] for one in nodes if one["given_name"] == node)
    lab.on("control", f"{HEADSCALE} nodes approve-routes -i {number} -r {routes}")


def await_route(site: Site, node: str) -> None:
    """Until the node's tailscaled has accepted the underlay."""
    site.lab.wait(node, f"ip route show table 52 | grep -q '^{site.lab.underlay()} '", 60)


def way(site: Site, node: str) -> str:
    """The interface that leads to a neighbour in the underlay."""
    neighbour = site.lab.underlay().rpartition(".")[0] + ".1"
    return site.lab.on(node, f"ip route get {neighbour}").partition(" dev ")[2].split()[0]
