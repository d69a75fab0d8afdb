"""The block for the tailnet in CoreDNS' ConfigMaps, at a real API server."""

from __future__ import annotations

import json

import pytest
from ansible_collections.headcni.mesh.plugins.modules import headcni_cluster_dns as module
from ansible_module import Failed, run
from api_server import serving

from lab import tools
from tests.unit.module_utils.test_corefile import EDITED, K3S, KUBEADM

pytestmark = pytest.mark.timeout(300)
DOMAIN = "mesh.example.org"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    assert not tools.missing([tools.KUBERNETES]), "run `make test-kube-api`, which builds it"
    with serving(tmp_path_factory.mktemp("api")) as made:
        yield made


class Cluster:
    """CoreDNS' ConfigMaps, and the module as site.yml runs it."""

    def __init__(self, server) -> None:
        self.server = server

    def dns(self, check: bool = False, **given):
        how = {"kubectl": [self.server.kubectl_program], "kubeconfig": str(self.server.admin)}
        return run("headcni_cluster_dns", check, **{"domain": DOMAIN, **how, **given})

    def have(self, name: str, **content: str) -> None:
        metadata = {"name": name, "namespace": "kube-system", "annotations": {"kept": "yes"}}
        made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": content}
        self.server.kubectl("apply", "-f", "-", given=made)

    def seen(self, name: str):
        """The data and what else is not the API server's own; None if there is no such object."""
        found = self.server.kubectl(
            "get", "configmap", name, "-n", "kube-system", "--ignore-not-found", "-o", "json"
        )
        if not found.strip():
            return None
        made = json.loads(found)
        return {**made, "metadata": {k: made["metadata"].get(k) for k in ("annotations", "labels")}}

    def data(self, name: str) -> dict[str, str]:
        return (self.seen(name) or {}).get("data") or {}


@pytest.fixture
def cluster(server):
    yield Cluster(server)
    server.kubectl("annotate", "namespace", "kube-system", f"{module.ANNOTATION}-")
    for name in ("coredns", "coredns-custom"):
        server.kubectl("delete", "configmap", name, "-n", "kube-system", "--ignore-not-found")


@pytest.mark.parametrize("text", [KUBEADM, EDITED + "\n"])
def test_a_corefile_gets_the_block_and_is_as_before_without_it(cluster, text):
    cluster.have("coredns", Corefile=text, other="kept")
    before = cluster.seen("coredns")
    predicted = cluster.dns(check=True)
    assert cluster.seen("coredns") == before
    made = cluster.dns()
    assert made["changed"] and predicted["diff"] == made["diff"]
    assert made["place"] == "coredns/Corefile"
    now = cluster.data("coredns")
    assert now["Corefile"] == made["diff"][0]["after"] and now["Corefile"].startswith(text)
    assert f"{DOMAIN}:53 100.64.0.0/10:53 fd7a:115c:a1e0::/48:53 {{" in now["Corefile"]
    assert cluster.seen("coredns-custom") is None
    assert not cluster.dns()["changed"] and not cluster.dns(check=True)["changed"]

    assert cluster.dns(check=True, state="absent")["changed"]
    assert cluster.data("coredns") == now
    assert cluster.dns(state="absent")["changed"]
    assert cluster.seen("coredns") == before
    assert not cluster.dns(state="absent")["changed"]


def test_k3s_gets_a_file_of_its_own_and_its_corefile_is_not_touched(cluster):
    cluster.have("coredns", Corefile=K3S)
    before = cluster.seen("coredns")
    assert cluster.dns(check=True)["changed"] and cluster.seen("coredns-custom") is None
    assert cluster.dns()["place"] == "coredns-custom/headcni.server"
    assert set(cluster.data("coredns-custom")) == {"headcni.server"}
    assert not cluster.dns()["changed"]
    assert cluster.dns(state="absent")["changed"]
    assert cluster.seen("coredns-custom") is None and cluster.seen("coredns") == before


def test_what_others_have_in_coredns_custom_stays(cluster):
    cluster.have("coredns", Corefile=K3S)
    cluster.have("coredns-custom", **{"corp.server": "corp.example {\n    whoami\n}\n"})
    before = cluster.seen("coredns-custom")
    cluster.dns()
    assert set(cluster.data("coredns-custom")) == {"headcni.server", "corp.server"}
    cluster.dns(state="absent")
    assert cluster.seen("coredns-custom") == before


def test_a_block_moves_when_the_corefile_begins_to_import(cluster):
    cluster.have("coredns", Corefile=KUBEADM)
    cluster.dns()
    with_import = "import /etc/coredns/custom/*.server\n" + cluster.data("coredns")["Corefile"]
    cluster.have("coredns", Corefile=with_import)
    assert cluster.dns()["place"] == "coredns-custom/headcni.server"
    assert "headcni" not in cluster.data("coredns")["Corefile"]


def test_a_zone_that_somebody_serves_is_refused_and_nothing_changes(cluster):
    cluster.have("coredns", Corefile=K3S)
    cluster.have("coredns-custom", **{"mine.server": f"{DOMAIN} {{\n    whoami\n}}\n"})
    with pytest.raises(Failed, match=f"another server block already serves {DOMAIN}:53"):
        cluster.dns()
    assert set(cluster.data("coredns-custom")) == {"mine.server"}


def test_a_change_that_somebody_makes_meanwhile_is_kept(cluster, monkeypatch):
    cluster.have("coredns", Corefile=KUBEADM)
    edited, planned = KUBEADM.replace("ttl 30", "ttl 5"), module.planned

    def slowly(*given):
        found = planned(*given)
        if "ttl 30" in cluster.data("coredns")["Corefile"]:
            cluster.have("coredns", Corefile=edited)
        return found

    monkeypatch.setattr(module, "planned", slowly)
    assert cluster.dns()["changed"]
    assert cluster.data("coredns")["Corefile"].startswith(edited)


def test_without_coredns_it_says_so_and_there_is_nothing_to_remove(cluster):
    with pytest.raises(Failed, match="set headcni_node_cluster_dns: false"):
        cluster.dns()
    assert not cluster.dns(state="absent")["changed"]


def test_a_corefile_that_is_not_read_again_is_a_warning(cluster):
    cluster.have("coredns", Corefile=KUBEADM.replace("    reload\n", ""))
    assert "CoreDNS must be restarted" in str(cluster.dns()["warnings"])


def test_coredns_must_be_allowed_to_reach_the_resolver(cluster):
    cluster.have("coredns", Corefile=KUBEADM)
    with pytest.raises(Failed, match=r"namespaces: \{kube-system: \['100.100.100.100:53'\]\}"):
        cluster.dns(tailnet_access="pods")
    assert cluster.data("coredns")["Corefile"] == KUBEADM
    annotated = ("annotate", "namespace", "kube-system", "--overwrite")
    cluster.server.kubectl(*annotated, f"{module.ANNOTATION}=100.100.100.100:53")
    assert cluster.dns(tailnet_access="pods")["changed"]
    with pytest.raises(Failed, match=r"namespaces\.kube-system: pods"):
        cluster.dns(tailnet_access="all", tailnet_access_namespaces={"kube-system": "pods"})


@pytest.mark.parametrize(
    ("access", "allowed"),
    [
        ("all", True),
        ("pods", False),
        ([], False),
        (["100.100.100.100"], True),
        (["100.64.0.0/10:53"], True),
        ("100.64.0.7:443, 100.100.100.100:50-60", True),
        (["100.100.100.100:53/udp"], False),
        (["100.100.100.100:53/udp", "100.100.100.100:53/tcp"], True),
        (["100.100.100.100:443", "not an address"], False),
        (["[fd7a:115c:a1e0::53]:53", "fd7a:115c:a1e0::/48"], False),
    ],
)
def test_who_may_reach_the_resolver(access, allowed):
    assert module.allows(access, "100.100.100.100") is allowed


def test_a_resolver_of_ipv6_is_asked_by_pods_that_have_nothing_else(cluster):
    cluster.have("coredns", Corefile=KUBEADM)
    cluster.dns(pod_cidrs=["fd00::/64"])
    assert "forward . fd7a:115c:a1e0::53\n" in cluster.data("coredns")["Corefile"]
    assert module.allows(["[fd7a:115c:a1e0::53]:53"], "fd7a:115c:a1e0::53")
    cluster.dns(pod_cidrs=["10.0.0.0/24", "fd00::/64"])
    assert "forward . 100.100.100.100\n" in cluster.data("coredns")["Corefile"]
