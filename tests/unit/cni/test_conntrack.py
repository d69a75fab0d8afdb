"""Which tracked connections are deleted, where the kernel here cannot show it."""

from __future__ import annotations

import errno
import socket
import struct
from ipaddress import ip_address

import pytest

from headcni.datapath import conntrack
from headcni.datapath.netlink import KernelError, Request, attribute, nested, u8

NODE, CLIENT, POD = "192.0.2.1", "192.0.2.2", "10.55.1.2"


def direction(kind, protocol, source, destination, source_port, destination_port):
    addresses = (
        attribute(1, socket.inet_aton(source)),
        attribute(2, socket.inet_aton(destination)),
    )
    ports = (struct.pack("!H", port) for port in (source_port, destination_port))
    numbers = (attribute(2 + at, port) for at, port in enumerate(ports))
    return nested(kind, nested(1, *addresses), nested(2, u8(1, protocol), *numbers))


def message(protocol, port=53, answered_by=NODE, answering_port=53):
    """As the kernel lists a connection from CLIENT to a port of NODE."""
    return (
        struct.pack("=BBH", socket.AF_INET, 0, 0)
        + direction(1, protocol, CLIENT, NODE, 40000, port)
        + direction(2, protocol, answered_by, CLIENT, answering_port, 40000)
        + attribute(12, b"\0\0\0\7")
    )


BOTH = (conntrack.UDP, conntrack.SCTP)


def parsed(*args, **kwargs):
    return conntrack.parse(socket.AF_INET, message(*args, **kwargs), BOTH)


def test_of_the_clients_of_host_ports_only_udp_and_sctp_are_looked_at():
    assert parsed(socket.IPPROTO_TCP) is None
    assert conntrack.parse(socket.AF_INET, message(socket.IPPROTO_TCP)) is not None
    assert conntrack.parse(socket.AF_INET, struct.pack("=BBH", socket.AF_INET, 0, 0)) is None
    for protocol in (conntrack.UDP, conntrack.SCTP):
        entry = parsed(protocol, answered_by=POD)
        assert entry.original.protocol == protocol
        assert entry.reply.source == ip_address(POD).packed
        assert b"\0\0\0\7" in entry.key  # an entry that took its place is not deleted


@pytest.mark.parametrize(
    ("port", "answered_by", "answering_port", "chosen"),
    [
        (53, NODE, 53, True),  # it came before the pod
        (53, "10.55.1.9", 53, True),  # it led to the pod of before
        (54, POD, 5353, True),  # another host port that leads to the same
        (54, NODE, 54, False),
        (54, POD, 80, False),
    ],
)
def test_a_kernel_that_does_not_filter_costs_time_only(port, answered_by, answering_port, chosen):
    """It lists all there is, so each entry is compared here."""
    matches = conntrack._port_matcher(
        [conntrack.HostPort(conntrack.UDP, ip_address(NODE), 53, ip_address(POD), 5353)]
    )
    assert matches(parsed(conntrack.UDP, port, answered_by, answering_port)) is chosen


def test_many_ports_or_addresses_are_one_question():
    port = conntrack.HostPort(conntrack.UDP, None, 1, ip_address(POD), 1)
    ports = [port._replace(port=number, pod_port=number) for number in range(1, 100)]
    assert len(conntrack._about_ports(4, conntrack.UDP, ports)) == 1
    assert len(conntrack._about_ports(4, conntrack.UDP, ports[:2])) == 3
    packed = [bytes([10, 0, 0, number]) for number in range(100)]
    assert len(conntrack._about_addresses(socket.AF_INET, packed)) == 1


@pytest.mark.parametrize(("tracked", "asked"), [("0", 0), ("64", 1), ("65", 2)])
def test_few_connections_are_listed_once_for_an_address(monkeypatch, tracked, asked):
    """For each list the kernel walks through its whole table, which is shared by all namespaces."""
    questions = []

    def listed(_kernel, question, _protocols):
        questions.append(question)
        return iter(())

    monkeypatch.setattr(conntrack.netns, "read_sysctl", lambda _unused: tracked)
    monkeypatch.setattr(conntrack, "_listed", listed)
    conntrack.forget_addresses([ip_address(POD)])
    assert len(questions) == asked


def test_a_kernel_without_ctnetlink_fails_no_pod_and_is_told_of_once(monkeypatch, capsys):
    def refuse(*_unused):
        raise KernelError(errno.EINVAL, Request(0, 0, b"", "list tracked connections"), "")

    monkeypatch.setattr(conntrack.netns, "read_sysctl", lambda _unused: "5")
    monkeypatch.setattr(conntrack, "_listed", refuse)
    monkeypatch.setattr(conntrack, "_told", False)
    for _unused in range(2):
        conntrack.forget_addresses([ip_address(POD)])
    said = capsys.readouterr().err
    assert said.count("load nf_conntrack_netlink") == 1
