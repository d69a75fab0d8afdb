"""What is said when Kubernetes is not there, or says no. Real clusters are in tests/k8s."""

from __future__ import annotations

import pytest
from ansible_module import Failed, run


@pytest.fixture
def kubectl(tmp_path):
    """A kubectl that does what it is told in shell."""

    def make(script: str) -> dict[str, object]:
        program, kubeconfig = tmp_path / "kubectl", tmp_path / "kubeconfig"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        kubeconfig.write_text("")
        return {"kubectl": [str(program)], "kubeconfig": str(kubeconfig)}

    return make


CLUSTER = """case "$*" in *"config view"*) cat <<END
{"current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "k"}}],
 "clusters": [{"name": "k", "cluster": {"server": "https://192.0.2.1:6443"}}],
 "users": [{"name": "u", "user": {"client-key-data": "c2VjcmV0"}}]}
END
exit;; esac
"""


def test_a_node_that_has_not_joined_is_told_so_and_kubectl_is_not_needed(tmp_path):
    said = run("headcni_kubernetes_info", kubeconfig=str(tmp_path / "none"), kubectl=["none"])
    assert (said["joined"], said["pod_cidrs"]) == (False, [])
    assert str(tmp_path / "none") in said["problem"]


def test_a_server_that_does_not_answer_is_an_error_with_its_words(kubectl):
    asked = kubectl(
        CLUSTER + "echo 'connection refused - did you specify the right host?' >&2; exit 1"
    )
    with pytest.raises(
        Failed, match=r"which pod CIDR there has: connection refused.*headcni_node_name"
    ):
        run("headcni_kubernetes_info", name="there", timeout=1, **asked)


def test_a_node_that_kubernetes_calls_otherwise_is_an_error(kubectl):
    with pytest.raises(Failed, match=r"which pod CIDR there has: it knows no such node"):
        run("headcni_kubernetes_info", name="there", timeout=1, **kubectl(CLUSTER))


def test_a_node_without_a_cidr_is_a_problem_and_the_kubelets_key_is_not_returned(kubectl):
    asked = kubectl(CLUSTER + """echo '{"spec": {}}'""")
    said = run("headcni_kubernetes_info", name="there", timeout=1, **asked)
    assert said["joined"] and "gave it no pod CIDR" in said["problem"]
    assert said["cluster"] == {"server": "https://192.0.2.1:6443"}
    assert "c2VjcmV0" not in str(said)


def test_an_administrator_who_may_not_is_an_error_with_the_servers_words(kubectl):
    asked = kubectl("echo 'Error from server (Forbidden): no' >&2; exit 1")
    with pytest.raises(Failed, match=r"Error from server \(Forbidden\): no"):
        run("headcni_kubernetes_identity", nodes=["one"], manifest="{}", **asked)
