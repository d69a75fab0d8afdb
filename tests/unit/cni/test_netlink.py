"""Many requests in one send: what the kernel says of each, with one acknowledgement for all."""

from __future__ import annotations

import errno
import struct

import pytest

from headcni.datapath.netlink import KernelError, Netlink, Request, text
from headcni.errors import CniError

RTM_GETLINK, IFLA_IFNAME = 18, 3


def look_at(name: str, *fine: int) -> Request:
    body = struct.pack("=BxHiII", 0, 0, 0, 0, 0) + text(IFLA_IFNAME, name)
    return Request(RTM_GETLINK, 0, body, f"look at {name}", fine)


@pytest.fixture
def kernel():
    with Netlink() as conversation:
        yield conversation


def test_requests_that_succeed_need_no_more_than_the_last_acknowledgement(kernel):
    kernel.do([look_at("lo"), look_at("lo"), look_at("lo")])


def test_a_refusal_is_raised_wherever_it_stands_and_names_its_request(kernel):
    for place in range(3):
        asked = [look_at("lo") for _ in range(3)]
        asked[place] = look_at(f"hctest{place}")
        with pytest.raises(KernelError) as refused:
            kernel.do(asked)
        assert refused.value.errno == errno.ENODEV
        assert refused.value.request == asked[place]


def test_the_first_of_several_refusals_is_raised(kernel):
    with pytest.raises(KernelError) as refused:
        kernel.do([look_at("hctest1", errno.ENODEV), look_at("hctest2"), look_at("hctest3")])
    assert refused.value.request.what == "look at hctest2"


def test_what_was_done_already_is_no_failure_not_even_of_the_last(kernel):
    kernel.do([look_at("lo"), look_at("hctest1", errno.ENODEV)])
    kernel.do([look_at("hctest1", errno.ENODEV), look_at("lo")])


def test_after_a_refusal_the_next_request_has_its_own_answer(kernel):
    with pytest.raises(KernelError):
        kernel.do([look_at("hctest1"), look_at("hctest2"), look_at("lo")])
    assert kernel.ask(look_at("lo")) is not None
    assert kernel.ask(look_at("hctest1")) is None
    kernel.do([look_at("lo")])


def test_a_kernel_that_does_not_answer_is_waited_for_only_so_long(kernel, monkeypatch):
    monkeypatch.setattr("headcni.datapath.netlink.RECEIVE_SECONDS", 0.05)
    with pytest.raises(CniError, match=r"did not answer a netlink request in 0\.05 s"):
        kernel._read()
    kernel.do([look_at("lo")])
