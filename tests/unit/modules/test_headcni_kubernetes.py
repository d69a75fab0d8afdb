"""What is said when Kubernetes is not there, or says no. Real clusters are in tests/k8s."""

from __future__ import annotations

import sys

import pytest
from ansible_collections.headcni.mesh.plugins.modules import headcni_kubernetes_identity
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


IDENTITIES = """#!{python}
# A kubectl with secrets in a folder. It notes each call, and gives a secret its token when it is
# listed after it was made: the controller manager takes a moment, too.
import base64, json, sys
from pathlib import Path

folder = Path("{folder}")
words = [one for one in sys.argv[1:] if not one.startswith(("--kubeconfig", "--request-timeout"))]
with (folder / "calls").open("a") as calls:
    calls.write(" ".join(words) + "\\n")
secrets = folder / "secrets"
secrets.mkdir(exist_ok=True)
given = "" if sys.stdin.isatty() else sys.stdin.read()
if words[0] == "get":
    if words[1:2] == ["secret"] and "-l" in words:
        found = [json.loads(one.read_text()) for one in sorted(secrets.iterdir())]
        print(json.dumps({{"items": found}}))
        for one in found if {gives_tokens} else []:
            token = base64.b64encode(f"token of {{one['metadata']['name']}}".encode()).decode()
            one["data"] = {{"token": token}}
            (secrets / one["metadata"]["name"]).write_text(json.dumps(one))
    else:
        sys.exit("one secret at a time is asked for")
elif given.startswith("kind: manifest"):
    print("serviceaccount/headcni-node unchanged" if words[0] == "apply" else "")
elif words[0] == "apply":
    for one in json.loads(given)["items"]:
        (secrets / one["metadata"]["name"]).write_text(json.dumps(one))
        print(f"secret/{{one['metadata']['name']}} created")
elif words[0] == "delete":
    for one in words[1:]:
        if one.startswith("secret/"):
            (secrets / one.partition("/")[2]).unlink(missing_ok=True)
"""


class Cluster:
    """An API server that counts what it is asked. What a real one makes of it is in tests/k8s."""

    def __init__(self, folder, gives_tokens: bool = True) -> None:
        self.folder = folder
        program = folder / "kubectl"
        program.write_text(
            IDENTITIES.format(python=sys.executable, folder=folder, gives_tokens=gives_tokens)
        )
        program.chmod(0o755)

    def __call__(self, nodes, check: bool = False, **given):
        kubectl = {"kubectl": [str(self.folder / "kubectl")], "kubeconfig": "/none"}
        given = {**kubectl, "manifest": "kind: manifest", **given}
        return run("headcni_kubernetes_identity", check, nodes=nodes, **given)

    def calls(self) -> list[str]:
        """Those since the last time."""
        path = self.folder / "calls"
        found = path.read_text().splitlines()
        path.write_text("")
        return found

    def secrets(self) -> set[str]:
        return {one.name for one in (self.folder / "secrets").iterdir()}


def test_identities_of_many_nodes_take_one_list_call(tmp_path):
    cluster = Cluster(tmp_path)
    nodes = [f"node{number}" for number in range(30)]
    assert cluster(nodes, check=True)["tokens"] == {}
    cluster.calls()
    made = cluster(nodes)
    assert made["changed"]
    assert made["tokens"] == {name: f"token of headcni-node-{name}" for name in nodes}
    # The manifest, what there is, what was missing, and twice until the tokens are there.
    assert [one.split()[0] for one in cluster.calls()] == ["apply", "get", "apply", "get", "get"]
    again = cluster(nodes)
    assert (again["changed"], again["tokens"]) == (False, made["tokens"])
    assert [one.split()[0] for one in cluster.calls()] == ["apply", "get"]


def test_a_node_that_comes_later_gets_a_token_and_the_others_keep_theirs(tmp_path):
    cluster = Cluster(tmp_path)
    cluster(["one"])
    made = cluster(["one", "two"])
    assert made["diff"]["after"] == "secret/headcni-node-two created\n"
    assert set(made["tokens"]) == {"one", "two"}


def test_a_token_that_does_not_come_is_an_error_with_the_nodes_secret(tmp_path, monkeypatch):
    monkeypatch.setattr(headcni_kubernetes_identity, "TOKEN_SECONDS", 1)
    with pytest.raises(Failed, match=r"headcni-node-one has no token after 1 s: is the controller"):
        Cluster(tmp_path, gives_tokens=False)(["one"])


def test_identities_of_many_nodes_are_taken_back_by_one_list_call(tmp_path):
    cluster = Cluster(tmp_path)
    nodes = [f"node{number}" for number in range(30)]
    cluster([*nodes, "stays"])
    cluster.calls()
    gone = cluster(nodes, state="absent")
    assert gone["changed"] and cluster.secrets() == {"headcni-node-stays"}
    assert [one.split()[0] for one in cluster.calls()] == ["get", "delete"]
    cluster(["stays"], state="absent")
    assert cluster.calls()[-1].startswith("delete -f -")  # with the last one, the manifest


def test_a_thousand_nodes_fit_into_no_longer_a_command_than_a_hundred(tmp_path):
    """Each call of kubectl has a time limit, and so has the length of a command."""
    cluster = Cluster(tmp_path)
    nodes = [f"node{number:04}" for number in range(1000)]
    assert len(cluster(nodes)["tokens"]) == 1000
    cluster(nodes, state="absent")
    assert cluster.secrets() == set()
    assert max(map(len, cluster.calls())) < 100 * len("secret/headcni-node-node0000 ") + 100
