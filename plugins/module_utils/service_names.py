# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Names in the tailnet for services of Kubernetes, as records of Headscale.

A service's owner decides whether it has a name, and never which: NAME.NAMESPACE.ZONE. So nobody can
take the name of a service in another namespace, or of a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from ipaddress import ip_address
from typing import Any, NamedTuple, Tuple

ANNOTATION = "headcni.dev/tailnet-name"
MOST_RECORDS = 1000  # Headscale sends all of them to every device
MOST_HEADLESS = 100  # each needs a request of its own
MOST_ADDRESSES = 16  # of one name
MOST_HOST_NAMES = 100  # records of the pods of one service
MOST_PROBLEMS = 5  # of one service
LONGEST_NAME = 253
_TYPES = {4: "A", 6: "AAAA"}


class Record(NamedTuple):
    """An entry of Headscale's file."""

    name: str
    type: str
    value: str

    def as_dict(self) -> dict[str, str]:
        return self._asdict()


class Found(NamedTuple):
    """The records of all services, and why other services have none."""

    records: Tuple[Record, ...]
    problems: Tuple[str, ...]


def record(name: str, address: str) -> Record:
    return Record(name, _TYPES[ip_address(address).version], address)


def named(services: Iterable[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The services that want a name, and what is wrong with others."""
    wanted, problems = [], []
    for service in services:
        metadata = service["metadata"]
        value = (metadata.get("annotations") or {}).get(ANNOTATION)
        if value is None or value == "false" or metadata.get("deletionTimestamp"):
            continue
        if value != "true":
            problems.append(
                f"{_path(service)}: the annotation {ANNOTATION} is {str(value)[:40]!r}, "
                "expected 'true' or 'false'"
            )
        elif service["spec"].get("type") == "ExternalName":
            problems.append(
                f"{_path(service)}: a service of type ExternalName has no address, and Headscale "
                "knows no aliases"
            )
        else:
            wanted.append(service)
    return wanted, problems


def records(
    services: Iterable[Mapping[str, Any]],
    zone: str,
    slices_of: Callable[[str, str], Sequence[Mapping[str, Any]]],
) -> Found:
    """`slices_of` reads the EndpointSlices of a service by its namespace and name."""
    wanted, problems = named(services)
    found: set[Record] = set()
    headless = 0
    for service in wanted:
        name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
        base = f"{name}.{namespace}.{zone}"
        if len(base) > LONGEST_NAME:
            problems.append(f"{_path(service)}: its name would have {len(base)} characters")
            continue
        addresses = _cluster_ips(service["spec"])
        if addresses != ["None"]:
            found |= {record(base, address) for address in addresses}
            continue
        headless += 1
        if headless > MOST_HEADLESS:
            raise ValueError(f"more than {MOST_HEADLESS} services without a cluster IP want a name")
        of_pods, wrong = _of_pods(base, slices_of(namespace, name))
        found |= of_pods
        problems += (f"{_path(service)}: {problem}" for problem in wrong)
    if len(found) > MOST_RECORDS:
        raise ValueError(
            f"the annotated services have {len(found)} records, at most {MOST_RECORDS} are "
            f"possible: remove the annotation {ANNOTATION} from some of them"
        )
    return Found(tuple(sorted(found, key=_order)), tuple(problems))


def _of_pods(base: str, slices: Iterable[Mapping[str, Any]]) -> tuple[set[Record], list[str]]:
    """A service without a cluster IP has the addresses of its ready pods, and a pod with a host
    name, as those of a StatefulSet have, a name of its own. Whoever may write EndpointSlices
    writes what is in them; mistakes of one service do not take the names of others."""
    all_of: dict[str, set[Record]] = {"A": set(), "AAAA": set()}
    own: set[Record] = set()
    problems: list[str] = []
    for endpoint in (one for part in slices for one in part.get("endpoints") or ()):
        if (endpoint.get("conditions") or {}).get("ready") is False:
            continue
        for address in endpoint.get("addresses") or ():
            try:
                made = record(base, address)
            except ValueError:
                problems.append(f"the endpoint {str(address)[:40]!r} is not an IP address")
                continue
            all_of[made.type].add(made)
            name = f"{endpoint.get('hostname') or ''}.{base}"
            if name.startswith("."):
                continue
            if len(name) > LONGEST_NAME:
                problems.append(f"the name of a pod would have {len(name)} characters")
                continue
            own.add(record(name, address))
    kept = {one for those in all_of.values() for one in sorted(those, key=_order)[:MOST_ADDRESSES]}
    if any(len(those) > MOST_ADDRESSES for those in all_of.values()):
        problems.append(
            f"more than {MOST_ADDRESSES} pods; its name has the first {MOST_ADDRESSES} of each "
            "family"
        )
    if len(own) > MOST_HOST_NAMES:
        problems.append(f"more than {MOST_HOST_NAMES} host names; the first of them have records")
        own = {*sorted(own, key=_order)[:MOST_HOST_NAMES]}
    return kept | own, list(dict.fromkeys(problems))[:MOST_PROBLEMS]


def _cluster_ips(spec: Mapping[str, Any]) -> list[str]:
    """Empty while the API server has assigned none."""
    found = spec.get("clusterIPs") or [spec.get("clusterIP")]
    return [str(address) for address in found if address]


def _order(one: Record) -> tuple[str, str, int]:
    return one.name, one.type, int(ip_address(one.value))


def _path(service: Mapping[str, Any]) -> str:
    return f"{service['metadata']['namespace']}/{service['metadata']['name']}"
