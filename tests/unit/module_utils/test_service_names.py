"""Which records services get. A real API server is in tests/kube_api, real names in tests/k8s."""

from __future__ import annotations

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import service_names
from ansible_collections.headcni.mesh.plugins.module_utils.service_names import (
    ANNOTATION,
    MOST_ADDRESSES,
    MOST_RECORDS,
)

ZONE = "svc.mesh.example.org"


def service(name="web", value="true", **spec):
    given = {"clusterIPs": ["10.96.0.7"], **spec}
    annotations = {ANNOTATION: value} if value else None
    return {
        "metadata": {"name": name, "namespace": "shop", "annotations": annotations},
        "spec": given,
    }


def endpoint(*addresses, **more):
    return {"addresses": list(addresses), "conditions": {"ready": True}, **more}


def found(*services, slices=()):
    asked = []

    def slices_of(namespace, name):
        asked.append((namespace, name))
        return [{"endpoints": list(slices)}]

    result = service_names.records(services, ZONE, slices_of)
    return [tuple(one) for one in result.records], list(result.problems), asked


def test_a_service_has_its_cluster_ips_under_its_own_name():
    made = service(clusterIPs=["10.96.0.7", "fd96::7"])
    assert found(made) == (
        [(f"web.shop.{ZONE}", "A", "10.96.0.7"), (f"web.shop.{ZONE}", "AAAA", "fd96::7")],
        [],
        [],
    )


@pytest.mark.parametrize("value", [None, "false"])
def test_without_the_annotation_there_is_no_name(value):
    assert found(service(value=value)) == ([], [], [])


def test_a_value_that_is_no_answer_is_reported_and_can_choose_no_name():
    records, problems, _unused = found(service(value="node1.mesh.example.org"))
    assert records == []
    assert "shop/web" in problems[0] and "expected 'true' or 'false'" in problems[0]


def test_an_alias_is_reported():
    records, problems, _unused = found(service(type="ExternalName", clusterIPs=None))
    assert records == [] and "knows no aliases" in problems[0]


def test_a_service_that_waits_for_its_address_or_is_being_deleted_has_none_yet():
    leaving = service()
    leaving["metadata"]["deletionTimestamp"] = "2026-11-18T00:00:00Z"
    assert found(service(clusterIPs=None, clusterIP=""), leaving) == ([], [], [])


def test_a_headless_service_has_its_ready_pods_and_their_host_names():
    records, problems, asked = found(
        service("db", clusterIPs=["None"]),
        slices=[
            endpoint("10.56.1.9", hostname="db-1"),
            endpoint("10.56.1.10", "fd56::10"),
            endpoint("10.56.1.11", conditions={"ready": False}),
        ],
    )
    assert asked == [("shop", "db")] and problems == []
    assert records == [
        (f"db-1.db.shop.{ZONE}", "A", "10.56.1.9"),
        (f"db.shop.{ZONE}", "A", "10.56.1.9"),
        (f"db.shop.{ZONE}", "A", "10.56.1.10"),
        (f"db.shop.{ZONE}", "AAAA", "fd56::10"),
    ]


def test_endpoints_without_an_address_leave_the_names_of_all_others():
    headless, other = service("db", clusterIPs=["None"]), service("web")
    slices = [endpoint("a.example", "10.1.0.1"), endpoint("b.example", hostname="db-0")]
    records, problems, _unused = found(headless, other, slices=slices)
    assert [(one[0].split(".")[0], one[2]) for one in records] == [
        *(("db", "10.1.0.1"), ("web", "10.96.0.7"))
    ]
    assert problems == [
        "shop/db: the endpoint 'a.example' is not an IP address",
        "shop/db: the endpoint 'b.example' is not an IP address",
    ]


def test_one_service_cannot_use_up_the_records_of_all():
    pods = [endpoint(f"10.1.{n // 250}.{n % 250}", hostname=f"db-{n}") for n in range(2000)]
    records, problems, _unused = found(service("db", clusterIPs=["None"]), slices=pods)
    assert len(records) == MOST_ADDRESSES + service_names.MOST_HOST_NAMES
    assert len(problems) == 2 and "host names" in problems[1]


def test_a_name_that_is_too_long_leaves_the_names_of_all_others():
    zone = ".".join(["z" * 60] * 4)
    made = service_names.records([service("w" * 63), service()], zone, lambda *_unused: [])
    assert [one.name.split(".")[0] for one in made.records] == ["web"]
    assert "would have" in made.problems[0]
    headless = service(clusterIPs=["None"])
    pods = [{"endpoints": [endpoint("10.1.0.1", hostname="h" * 63)]}]
    made = service_names.records([headless], zone, lambda *_unused: pods)
    assert len(made.records) == 1 and "the name of a pod would have" in made.problems[0]


def test_pods_that_end_or_are_not_ready_have_no_name_in_any_slice():
    def conditions(**said):
        return {"conditions": said}

    pods = [
        endpoint("10.1.0.1"),
        endpoint("10.1.0.2", **conditions(ready=False, serving=True, terminating=True)),
        endpoint("10.1.0.3", **conditions(ready=False)),
        endpoint("10.1.0.4", **conditions()),
        {"addresses": ["fd01::5"]},
        {"addresses": None, "conditions": None},
    ]
    parts = [{"endpoints": pods[:3]}, {"endpoints": pods[2:]}, {"endpoints": None}, {}]
    made = service_names.records([service(clusterIPs=["None"])], ZONE, lambda *_unused: parts)
    assert [one.value for one in made.records] == ["10.1.0.1", "10.1.0.4", "fd01::5"]


def test_a_name_has_a_bounded_number_of_addresses():
    pods = [endpoint(f"10.56.1.{number}") for number in range(1, MOST_ADDRESSES + 2)]
    records, problems, _unused = found(service(clusterIPs=["None"]), slices=pods)
    assert len(records) == MOST_ADDRESSES and "more than 16 pods" in problems[0]


def test_more_records_than_headscale_should_send_are_refused():
    many = [service(f"web-{number}") for number in range(MOST_RECORDS + 1)]
    assert len(found(*many[1:])[0]) == MOST_RECORDS
    with pytest.raises(ValueError, match="have 1001 records, at most 1000"):
        found(*many)


def test_more_headless_services_than_are_read_are_refused():
    many = [service(f"db-{number}", clusterIPs=["None"]) for number in range(101)]
    with pytest.raises(ValueError, match="more than 100 services"):
        found(*many)
