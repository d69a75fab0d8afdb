"""The daemon hears of the kernel's routes and links, but not of the links of pods."""

from __future__ import annotations

import subprocess

import pytest

from headcni.datapath import netns
from headcni.datapath.rtnl import RT_TABLE_LOCAL, RTM_NEWLINK
from headcni.mesh.kernel_routes import ROUTE, RTM_DELROUTE, RTM_NEWROUTE, read_link
from headcni.mesh.route_events import RTM_DELLINK, Interest, RouteEvents, _news

NOBODYS = Interest(5200, frozenset(), "tailscale0", 0, frozenset(), -1)


def heard(*commands):
    """What is announced while the commands run, in a network namespace of its own: the names of
    links, and the tables of routes."""

    def work():
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        events = RouteEvents()
        try:
            for command in commands:
                subprocess.run(["ip", *command.split()], check=True)
            links, tables = [], []
            while True:
                try:
                    data = events._socket.recv(65536)
                except BlockingIOError:
                    return links, tables
                for kind, body in _news(data, NOBODYS):
                    if kind in (RTM_NEWLINK, RTM_DELLINK):
                        links.append(read_link(body).name)
                    elif kind in (RTM_NEWROUTE, RTM_DELROUTE):
                        tables.append(ROUTE.unpack_from(body)[4])
        finally:
            events.close()

    return netns.apart(work)


@pytest.mark.parametrize("name", ["hc0123456789a", "hci0123456789a"])
def test_nothing_is_heard_of_a_pods_link(name):
    links, tables = heard(
        "link add headcni0 type bridge",
        f"link add {name} type veth peer name other",
        f"link set {name} master headcni0 up",
        "link set other up",
        f"link del {name}",
    )
    assert name not in links
    assert {"headcni0", "other"} <= set(links)
    assert RT_TABLE_LOCAL not in tables


@pytest.mark.parametrize(
    "name", ["tailscale0", "headcni01", "hc0123456789", "eth0", "lan0123456789"]
)
def test_everything_is_heard_of_other_links(name):
    links, _tables = heard(f"link add {name} type bridge", f"link del {name}")
    assert links.count(name) >= 2


def test_changes_of_routes_are_heard():
    _links, tables = heard(
        "route add 10.77.0.0/24 dev lo table 52",
        "route add unreachable 10.78.0.0/24 table 5200",
        "route del 10.77.0.0/24 dev lo table 52",
        "route add 10.79.0.0/24 dev lo",
    )
    assert tables == [52, 252, 52, 254]  # 252: in an attribute, as the number has no room
