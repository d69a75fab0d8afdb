"""What connect-test on a node shows of its results. tests/lab has the real pods."""

from __future__ import annotations

from headcni.ctl import connect_test

OK = {"ok": True, "detail": "0.2 ms"}
BAD = {"ok": False, "detail": "the pod does not reach https://example.com, nor does the node"}
SKIPPED = {"ok": None, "detail": "pods have no nameserver of the tailnet's"}
LOSS = {"ok": True, "detail": "0 of 20 pings were lost", "percent": 0.0, "ms": 0.14}
DERP = {"kind": "derp", "through": "DERP region lab (999)", "ms": 12.0}

ANSWER = connect_test._answer(
    "node1",
    {"outside": BAD, "dns": SKIPPED},
    {
        "node1": {"mtu": 1280, "v4": OK, "mtu4": OK, "loss": LOSS},
        "node2": {"path": DERP, "ping by tailscaled": OK},
        "10.2.0.2": {"mtu": 1280, "v4": BAD, "mtu4": BAD},
    },
)


def test_the_answer_has_the_form_of_that_of_verify():
    assert ANSWER["version"] == 1 and ANSWER["failed"] == 3
    case = {"from": "node1", "to": "node1", "check": "v4", "ok": True, "detail": "0.2 ms"}
    assert case in ANSWER["cases"]
    here, peer, pod = ANSWER["pairs"]
    assert here == {
        "from": "node1",
        "to": "node1",
        "path": "local",
        "through": "",
        "latency_ms": 0.14,
        "loss_percent": 0.0,
        "mtu": 1280,
        "throughput_mbit": None,
    }
    assert (peer["path"], peer["through"], peer["latency_ms"]) == (
        "derp",
        "DERP region lab (999)",
        12.0,
    )
    assert (pod["mtu"], pod["latency_ms"]) == (None, None)


def test_the_text_is_a_table_then_what_is_well_and_then_every_failure():
    assert connect_test._in_words(ANSWER).splitlines() == [
        "TO        PATH   LATENCY  LOSS  MTU   THROUGHPUT  THROUGH",
        "node1     local  0.1 ms   0 %   1280  -           -",
        "node2     derp   12.0 ms  -     -     -           DERP region lab (999)",
        "10.2.0.2  -      -        -     -     -           -",
        "FAIL: node1: outside: the pod does not reach https://example.com, nor does the",
        "  node",
        "not checked: node1: dns: pods have no nameserver of the tailnet's",
        "FAIL: node1 -> 10.2.0.2: v4: the pod does not reach https://example.com, nor",
        "  does the node",
        "FAIL: node1 -> 10.2.0.2: mtu4: the pod does not reach https://example.com, nor",
        "  does the node",
        "ok: v4, mtu4, loss, ping by tailscaled",
    ]
