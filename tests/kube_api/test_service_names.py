"""Annotated services at a real API server."""

from __future__ import annotations

import pytest
from ansible_module import Failed, run
from api_server import serving

from lab import tools

pytestmark = pytest.mark.timeout(300)
ZONE = "svc.mesh.example.org"
NAME = {"headcni.dev/tailnet-name": "true"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    assert not tools.missing([tools.KUBERNETES]), "run `make test-kube-api`, which builds it"
    with serving(tmp_path_factory.mktemp("api")) as made:
        yield made


def service(name: str, annotations=None, **spec):
    metadata = {"name": name, "namespace": "default", "annotations": annotations or {}}
    given = {"ports": [{"port": 80}], "selector": {"app": name}, **spec}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": given}


def read(server, **given):
    how = {"kubectl": [server.kubectl_program], "kubeconfig": str(server.admin)}
    return run("headcni_service_names_info", **{"zone": ZONE, **how, **given})


def test_annotated_services_have_records_and_others_have_none(server):
    assert read(server)["records"] == []
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "db-1",
            "namespace": "default",
            "labels": {"kubernetes.io/service-name": "db"},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["10.56.1.9"], "hostname": "db-0"}],
    }
    items = [
        service("web", NAME, clusterIP="10.96.7.7"),
        service("quiet"),
        service("db", NAME, clusterIP="None"),
        endpoints,
    ]
    server.kubectl("apply", "-f", "-", given={"apiVersion": "v1", "kind": "List", "items": items})
    found = read(server)
    assert (found["changed"], found["problems"]) == (False, [])
    assert found["records"] == [
        {"name": f"db-0.db.default.{ZONE}", "type": "A", "value": "10.56.1.9"},
        {"name": f"db.default.{ZONE}", "type": "A", "value": "10.56.1.9"},
        {"name": f"web.default.{ZONE}", "type": "A", "value": "10.96.7.7"},
    ]
    server.kubectl("annotate", "service", "web", "headcni.dev/tailnet-name-")
    server.kubectl("delete", "service", "db")
    assert read(server)["records"] == []


def test_an_api_server_that_does_not_answer_is_an_error_and_not_an_empty_list(server, tmp_path):
    (tmp_path / "nowhere").write_text(
        server.admin.read_text().replace(server.url, "https://127.0.0.1:1")
    )
    with pytest.raises(Failed, match="Kubernetes, asked with"):
        read(server, kubeconfig=str(tmp_path / "nowhere"))


def test_a_zone_that_is_none_is_refused(server):
    with pytest.raises(Failed, match="zone: 'a b', expected a domain"):
        read(server, zone="a b")
