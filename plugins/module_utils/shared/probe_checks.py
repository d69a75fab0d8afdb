# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a probe pod checks: other nodes, addresses outside, and the services of its cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import ip_address
from typing import Any, NamedTuple, TypeVar

from . import probe, probe_cluster, probe_conflist, probe_pod
from .localapi import LocalAPI

PING_SECONDS = 3.0
CLUSTER_PATIENCE = 4  # times the timeout
MOST_PLACES = 32
Item = TypeVar("Item")
Result = TypeVar("Result")
InPod = Callable[[Callable[[], Any]], Any]  # runs a function in the pod's network namespace


class Outside(NamedTuple):
    """A place outside of the cluster, with its addresses or the reason why there are none."""

    text: str  # as the operator wrote it
    place: probe.Place
    addresses: Sequence[str]
    problem: str


def path(target: Mapping[str, Any], api: str, until: float) -> dict[str, Any]:
    """Direct or relayed, to a node."""
    if not target["tailnet_addresses"]:
        return {"kind": probe.UNKNOWN, "through": "it has no tailnet address", "ms": None}
    asking = LocalAPI(api, PING_SECONDS)
    return probe.path(lambda: asking.ping(target["tailnet_addresses"][0]), until)


def places_outside(
    given: Sequence[str], api: str, option: str = "headcni_verify_outside"
) -> list[Outside]:
    if len(given) > MOST_PLACES:
        raise probe_pod.ProbeError(f"outside: {len(given)} places, expected at most {MOST_PLACES}")
    found = []
    for text in given:
        try:
            spot = probe.place(text if text != probe.HEADSCALE else headscale_url(api))
        except ValueError as problem:
            raise probe_pod.ProbeError(f"outside ({option}): {problem}") from None
        try:
            found.append(Outside(text, spot, probe.addresses_of(spot.host), ""))
        except OSError as problem:
            unknown = f"this node does not know the name {spot.host} ({problem.strerror})"
            found.append(Outside(text, spot, [], unknown))
    return found


def headscale_url(api: str) -> str:
    return str(LocalAPI(api).prefs().get("ControlURL") or "")


def outside(
    places: Sequence[Outside],
    versions: set[int],
    seconds: int,
    in_pod: InPod,
    option: str = "headcni_verify_outside",
) -> dict[str, Any]:
    """Every place that the operator named must answer. Headscale is only the default: if the node
    itself does not reach it either, the check is open, not failed."""
    answered: list[str] = []
    open_questions: list[str] = []
    wrong: list[str] = []
    for text, spot, addresses, said in places:
        own = [address for address in addresses if probe.is_own(address)]
        if text == probe.HEADSCALE and (own or said):
            why = said or f"Headscale ({spot.text}) runs on this node itself"
            open_questions.append(f"{why}: name something else by {option}")
            continue
        result = probe.outcome(False, said or "pods have no address of its family")
        usable = [address for address in addresses if ip_address(address).version in versions]
        if usable:
            result = in_pod(partial(probe.reach, usable, spot.port, seconds))
        if result["ok"]:
            answered.append(f"{spot.text} ({result['detail']})")
            continue
        by_node = probe.reach(usable, spot.port, 4) if usable else {"ok": False}
        if text == probe.HEADSCALE and not by_node["ok"]:
            open_questions.append(
                f"the node itself does not connect to Headscale ({spot.text}) without a proxy "
                f"either ({result['detail']}): name something else by {option}"
            )
            continue
        node_too = "the node itself does" if by_node["ok"] else "nor does the node itself"
        wrong.append(f"the pod does not reach {spot.text} ({result['detail']}), {node_too}")
    if wrong:
        return probe.outcome(False, "; ".join(wrong))
    if open_questions:
        return probe.outcome(None, "; ".join(open_questions))
    return probe.outcome(True, ", ".join(answered))


def cluster(given: Mapping[str, Any], conf: Mapping[str, Any], in_pod: InPod) -> dict[str, Any]:
    """Empty if no kubelet runs on this node."""
    ranges = probe_conflist.listed(probe_conflist.ours(conf).get("service_cidr"))
    known = probe_cluster.names(ranges)
    if known is None:
        return {}
    servers = given["cluster_dns"] or known.servers
    if not servers:
        unknown = "kubelet's configuration does not say who resolves names: name the cluster's "
        unknown += "DNS by headcni_verify_cluster_dns"
        return dict.fromkeys(("cluster_dns", "service"), probe.outcome(None, unknown))
    seconds = given["timeout"] * CLUSTER_PATIENCE
    name = f"kubernetes.default.svc.{known.domain}"
    resolved = in_pod(lambda: probe.resolve(name, servers, seconds))
    addresses = resolved.pop("addresses", None) or probe_cluster.kubernetes_service(ranges)
    if not addresses:
        service = probe.outcome(None, f"the address of {name} is not known without DNS")
    else:
        service = in_pod(lambda: probe.reach(addresses, 443, given["timeout"]))
    return {"cluster_dns": resolved, "service": service}


def at_once(
    work: Callable[[Item], Result], targets: Sequence[Item], most: int = 16
) -> list[Result]:
    """Do the work for all targets, `most` at a time."""
    with ThreadPoolExecutor(max_workers=most) as pool:
        return list(pool.map(work, targets))


def port(target: Mapping[str, Any], seconds: int) -> dict[str, Any]:
    if not target["host_port"]:
        return probe.outcome(None, "the conflist does not ask for portMappings")
    return probe.port(target["host_addresses"], target["host_port"], seconds)


def names(target: Mapping[str, Any], servers: Sequence[str], seconds: int) -> dict[str, Any]:
    if not servers:
        return probe.outcome(None, "pods have no nameserver of the tailnet's")
    if not target["tailnet_name"]:
        return probe.outcome(None, "the tailnet gives nodes no names")
    return probe.resolve(target["tailnet_name"], servers, seconds)
