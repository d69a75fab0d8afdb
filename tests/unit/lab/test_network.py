"""Which networks the lab may use."""

from __future__ import annotations

import ipaddress

import pytest

from lab import network
from lab.layout import LabError


@pytest.fixture
def host_routes(monkeypatch):
    def set_routes(*networks: str) -> None:
        found = [ipaddress.IPv4Network(n) for n in networks]
        monkeypatch.setattr(network, "host_networks", lambda: found)

    return set_routes


def test_the_first_candidate_serves_where_nothing_is_taken(host_routes):
    host_routes("192.0.2.0/24")
    assert str(network.choose_underlay()) == "172.30.0.0/24"


def test_a_candidate_inside_a_route_of_the_host_is_passed_over(host_routes):
    host_routes("172.16.0.0/12")
    assert str(network.choose_underlay()) == "10.213.0.0/24"


def test_a_candidate_that_contains_an_address_of_the_host_is_passed_over(host_routes):
    host_routes("172.30.0.77/32")
    assert str(network.choose_underlay()) == "172.30.1.0/24"


def test_a_host_that_routes_every_private_network_is_told_to_name_one(host_routes):
    host_routes("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
    with pytest.raises(LabError, match="name a free one with UNDERLAY="):
        network.choose_underlay()


@pytest.mark.parametrize("wanted", ["10.0.2.0/24"])
def test_the_network_that_slirp4netns_uses_is_refused(host_routes, wanted):
    host_routes()
    with pytest.raises(LabError, match=r"clashes with 10\.0\.2\.0/24"):
        network.choose_underlay(wanted)
