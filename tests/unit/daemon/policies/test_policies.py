"""What the daemon shows of network policies, whatever the enforcer and the source say."""

from __future__ import annotations

from typing import Any

import pytest

from headcni.ctl import main as ctl
from headcni.ctl.status import _in_words as in_words
from headcni.daemon.daemon import Daemon
from headcni.daemon.observe.control import Control
from headcni.daemon.observe.events import Events
from headcni.daemon.observe.gauges import measure_policies
from headcni.daemon.observe.metrics import Metrics
from headcni.daemon.policies import policies as shown
from headcni.daemon.policies.feed import Feed
from headcni.daemon.policies.policies import Policies, Settings
from headcni.errors import CniError
from headcni.model import Owner
from headcni.policy.enforcer import Denied, PodState, Report
from headcni.policy.objects import World
from headcni.settings import parse


class Enforcer:
    """Reports what it is told to."""

    def __init__(self) -> None:
        self.now = Report(True, (), 0, 0, 0, 0, 0, 0.0, 0, 0.0, 0, 0, "")
        self.packets: list[Denied] = []
        self.refusal: CniError | None = None
        self.configured: list[tuple[str, int]] = []

    def start(self) -> None:
        if self.refusal:
            raise self.refusal

    def stop(self) -> None: ...

    def is_alive(self) -> bool:
        return True

    def configure(self, *settings: Any) -> None:
        self.configured.append(settings)

    def set_world(self, world: World) -> None: ...
    def pod_changed(self, key: Any, pod: Any) -> None: ...
    def namespace_changed(self, name: Any, namespace: Any) -> None: ...
    def policy_changed(self, key: Any, policy: Any) -> None: ...

    def report(self) -> Report:
        return self.now

    def denied(self) -> list[Denied]:
        if self.refusal:
            raise self.refusal
        return self.packets

    def world(self) -> World:
        return World.of(complete=self.now.complete)


class Source:
    name = "files"

    def __init__(self) -> None:
        self.said: tuple[str, ...] = ()

    def start(self) -> None: ...
    def stop(self) -> None: ...

    def is_alive(self) -> bool:
        return True

    def problems(self) -> tuple[str, ...]:
        return self.said

    def pods_changed(self) -> None: ...


@pytest.fixture
def made():
    enforcer: Any = Enforcer()
    feed = Feed(enforcer)
    policies = Policies(
        enforcer, feed, Source(), lambda: Settings("deny", 5), lambda: 0, node_name="node1"
    )
    policies.start()
    yield policies
    policies.stop()


def list_all(policies: Policies) -> None:
    for known in (policies.feed.pods, policies.feed.namespaces, policies.feed.policies):
        known.listed({}, {})


def state(name: str, known: bool = True, ingress: Any = ()) -> PodState:
    owner = Owner("pods", f"container-{name}", "eth0")
    return PodState(owner, ("shop", name), (), known, tuple(ingress), ())


def test_readiness_waits_for_the_first_list_and_then_only_for_the_kernel(made):
    made.source.said = ("the API server cannot be reached",)
    assert "the API server cannot be reached" in made.not_known() and not made.held_back()
    list_all(made)
    assert made.not_known() == ""
    assert made.warnings() == [
        "network policies stay as they were: the API server cannot be reached"
    ]
    made.enforcer.now = made.enforcer.now._replace(problem="the kernel refused")
    assert "the kernel refused" in made.held_back()


def test_a_kernel_that_refuses_the_table_makes_the_node_not_ready_and_ends_nothing():
    enforcer: Any = Enforcer()
    enforcer.refusal = CniError(101, "nft is not there")
    policies = Policies(
        enforcer, Feed(enforcer), Source(), lambda: Settings("deny", 0), lambda: 0, "node1"
    )
    policies.start()
    assert "nft is not there" in policies.held_back() and policies.is_alive()
    policies.stop()


def test_pods_without_policies_are_a_warning(made):
    made._without = lambda: 3
    assert "3 pod interfaces have no network policies" in made.warnings()[0]


def test_an_answer_is_bounded_and_says_how_much_it_leaves_out(made):
    many = [("shop", f"policy-{number:03}") for number in range(200)]
    made.enforcer.now = made.enforcer.now._replace(pods=(state("web", ingress=many),))
    made.enforcer.packets = [Denied(key, "Ingress", 1) for key in many * 3]
    answer = made.answer([])
    ingress = answer["pods"][0]["ingress"]
    assert len(ingress) == shown.MOST_SHOWN + 1 and ingress[-1] == "and 150 more"
    assert len(answer["denied"]) == shown.MOST_DENIED and answer["more_denied"] == 100


def test_counters_that_cannot_be_read_are_a_problem_and_not_a_silence(made):
    list_all(made)
    made.enforcer.refusal = CniError(101, "the kernel does not answer")
    assert "denied packets cannot be counted" in made.answer([])["problems"][0]


def test_an_explanation_needs_known_policies(made):
    made.enforcer.now = made.enforcer.now._replace(complete=False)
    assert "not known yet" in made.answer(["explain", "a/b", "c/d", "80"])["error"]
    made.enforcer.now = made.enforcer.now._replace(complete=True)
    assert "is no pod" in made.answer(["explain", "a/b", "c/d", "80"])["error"]
    assert "is not explain" in made.answer(["what"])["error"]


def test_settings_that_change_reach_the_enforcer(made):
    made.configure()
    assert made.enforcer.configured == [("deny", 5)]


def test_metrics_count_packets_by_policy_and_the_number_of_series_is_bounded(made):
    metrics = Metrics()
    measure_policies(metrics, made)
    many = [("shop", f"policy-{number:03}") for number in range(shown.MOST_LABELS + 50)]
    made.enforcer.packets = [Denied(key, "Egress", 2) for key in many]
    made.enforcer.now = made.enforcer.now._replace(policies=250, profiles=7, elements=90, repairs=1)
    metrics.policies_applied("pod", 0.002, True)
    metrics.policies_applied("all", 0.5, False)
    text = metrics.render()[1].decode()
    series = [line for line in text.splitlines() if line.startswith("headcni_policy_denied_pack")]
    assert len(series) == shown.MOST_LABELS + 1
    others = 'headcni_policy_denied_packets_total{direction="Egress",namespace="",policy="others"}'
    assert f"{others} 100.0" in series
    for expected in (
        "headcni_policies 250.0",
        "headcni_policy_chains 7.0",
        "headcni_policy_set_elements 90.0",
        "headcni_policy_repairs_total 1.0",
        'headcni_policy_apply_duration_seconds_count{kind="pod",outcome="ok"} 1.0',
        'headcni_network_errors_total{error_type="network-policy"} 1.0',
    ):
        assert expected in text


@pytest.fixture
def config(made, tmp_path):
    """config.yaml of a daemon whose control socket asks `made`."""
    path = tmp_path / "config.yaml"
    path.write_text(f"daemon: {{socket: {tmp_path}/cni.sock}}\n")
    control = Control(f"{tmp_path}/daemon.sock", dict, Events(), made.answer)
    control.start()
    yield ["--config", str(path)]
    control.stop()


def test_headcnictl_lists_pods_policies_and_denied_packets(made, config, capsys):
    list_all(made)
    made.enforcer.now = made.enforcer.now._replace(
        policies=1,
        pods=(state("web", ingress=[("shop", "deny")]), state("new", known=False)),
    )
    made.enforcer.packets = [
        Denied(("shop", "deny"), "Ingress", 12),
        Denied(("shop", "quiet"), "Ingress", 0),
        Denied(("", "unknown"), "", 7),
    ]
    assert ctl.main(["policy", *config]) == ctl.OK
    said = capsys.readouterr().out
    assert "pods not known yet  -          7" in said and "quiet" not in said
    assert "1 network policies from files" in said
    assert any(line.split() == ["shop/web", "shop/deny", "open"] for line in said.splitlines())
    assert "not known: deny" in said and "shop/deny           Ingress    12" in said
    made.source.said = ("/etc/headcni/policies/a.yaml: a mistake",)
    assert ctl.main(["policy", "--json", *config]) == ctl.NO
    assert "a.yaml: a mistake" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [["explain"], ["explain", "a/b", "c/d"], ["what"], ["explain", "a b", "c/d", "80"]]
    + [["explain", "a/b", "c/d", port] for port in ("80/icmp", "", "80/", "a_b")],
)
def test_headcnictl_refuses_a_question_that_it_does_not_understand(words, config):
    with pytest.raises(SystemExit) as raised:
        ctl.main(["policy", *words, *config])
    assert raised.value.code == ctl.USAGE


def test_headcnictl_says_what_the_daemon_does_not_know(config, capsys):
    assert ctl.main(["policy", "explain", "a/b", "c/d", "80", *config]) == ctl.UNKNOWN
    assert "is no pod that is known" in capsys.readouterr().err


def whole(tmp_path, network: str, more: str = "") -> Daemon:
    place = f"socket: {tmp_path}/cni.sock, dataDir: {tmp_path}/data"
    text = f"daemon: {{{place}{more}}}\nnetwork: {{podCIDR: {{nodeLocal: 10.9.1.0/24}}, {network}}}"
    config, problems = parse(text.encode())
    assert problems == []
    (tmp_path / "data").mkdir(exist_ok=True)
    return Daemon(config, str(tmp_path / "config.yaml"))


def test_a_daemon_without_policies_watches_none_and_says_so(tmp_path):
    daemon = whole(tmp_path, "mtu: 1280")
    assert daemon.policies is None and daemon.status()["policies"] is None
    (answer,) = daemon.control.answers("policy")
    assert "network.enableNetworkPolicy is false" in answer["error"]
    assert not {"policies", "policy-source"} & set(daemon.conditions)


@pytest.mark.parametrize(
    ("more", "source"), [("", "files"), (", kubeconfig: /etc/headcni/kubeconfig", "kubernetes")]
)
def test_policies_come_from_the_api_server_if_there_is_one(tmp_path, more, source):
    daemon = whole(tmp_path, "enableNetworkPolicy: true, unknownPolicy: allow", more)
    shown = daemon.status()["policies"]
    assert (shown["source"], shown["unknown"], shown["since"]) == (source, "allow", 0.0)
    assert "not known yet" in daemon.conditions["policy-source"]()
    assert "not enforced" in daemon.conditions["policies"]()
    lines = in_words(daemon.status()).splitlines()
    assert f"network policies: 0 from {source}, not known yet, for 0 pod interfaces" in lines
