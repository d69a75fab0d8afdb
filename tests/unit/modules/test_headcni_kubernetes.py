"""What is said when Kubernetes is not there, or says no. Real clusters are in tests/k8s."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import kube_server
import pytest
from ansible_collections.headcni.mesh.plugins.module_utils.shared import bearer_token
from ansible_collections.headcni.mesh.plugins.modules import (
    headcni_kubernetes_identity as identity,
)
from ansible_collections.headcni.mesh.plugins.modules.headcni_kubernetes_identity import KINDS, RBAC
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
# A kubectl with objects in a file, as kind/name. It notes each call.
import fcntl, json, sys
from pathlib import Path

sys.path.insert(0, "{support}")
folder = Path("{folder}")
words = [one for one in sys.argv[1:] if not one.startswith(("--kubeconfig", "--request-timeout"))]
with (folder / "calls").open("a") as calls:
    calls.write(" ".join(words) + "\\n")
lock = (folder / "lock").open("w")
fcntl.flock(lock, fcntl.LOCK_EX)
path = folder / "objects"
objects = set(path.read_text().split()) if path.exists() else set()
given = "" if sys.stdin.isatty() else sys.stdin.read()
RBAC = ".rbac.authorization.k8s.io"


def named(one):
    kind = one["kind"].lower()
    return kind + (RBAC if "role" in kind else "") + "/" + one["metadata"]["name"]


if words[0] == "get":
    assert words[-2:] == ["-o", "name"] and "-l" in words, "no secret is to be read"
    labelled = {{one for one in objects if one.partition("/")[2] not in ("", "headcni-node")}}
    print("\\n".join(sorted(labelled)))
elif words[:2] == ["create", "--raw"]:
    from kube_server import jwt
    account = words[2].split("/")[6]
    assert "serviceaccount/" + account in objects, account
    asked = json.loads(given)
    assert asked["kind"] == "TokenRequest"
    subject = "system:serviceaccount:kube-system:" + account
    print(json.dumps({answer}))
elif given.startswith("kind: manifest"):
    print("clusterrole/headcni-node unchanged" if words[0] == "apply" else "")
elif words[0] == "apply":
    objects |= {{named(one) for one in json.loads(given)["items"]}}
elif words[0] == "delete":
    names = {{named(one) for one in json.loads(given)["items"]}} if given else set(words[1:])
    for one in sorted(names & objects):
        print(one, "deleted")
    objects -= names if not any(one.startswith("--dry") for one in words) else set()
path.write_text("\\n".join(objects))
"""
GIVES_TOKENS = '{"status": {"token": jwt(1, 1 + asked["spec"]["expirationSeconds"], subject)}}'
SUPPORT = Path(kube_server.__file__).parent
OLD = ("serviceaccount/headcni-node", f"clusterrolebinding.{RBAC}/headcni-node")


class Cluster:
    """An API server that counts what it is asked. What a real one makes of it is in tests/k8s."""

    def __init__(self, folder, answer: str = GIVES_TOKENS) -> None:
        self.folder = folder
        program = folder / "kubectl"
        program.write_text(
            IDENTITIES.format(python=sys.executable, folder=folder, answer=answer, support=SUPPORT)
        )
        program.chmod(0o755)

    def __call__(self, nodes, check: bool = False, **given):
        kubectl = {"kubectl": [str(self.folder / "kubectl")], "kubeconfig": "/none"}
        given = {**kubectl, "manifest": "kind: manifest", **given}
        return run("headcni_kubernetes_identity", check, nodes=nodes, **given)

    def has(self, *names: str) -> None:
        (self.folder / "objects").write_text("\n".join({*self.objects(), *names}))

    def calls(self) -> list[str]:
        """The verbs and options since the last time."""
        path = self.folder / "calls"
        found = path.read_text().splitlines()
        path.write_text("")
        return found

    def objects(self) -> set[str]:
        path = self.folder / "objects"
        return set(path.read_text().split()) if path.exists() else set()


def of_node(name: str) -> set[str]:
    return {f"{kind}/headcni-node-{name}" for kind in KINDS}


def test_identities_of_many_nodes_take_one_list_call(tmp_path):
    cluster = Cluster(tmp_path)
    nodes = [f"node{number}" for number in range(6)]
    predicted = cluster(nodes, check=True)
    assert predicted["tokens"] == {} and predicted["renewed"] == nodes and predicted["changed"]
    assert cluster.objects() == set()
    cluster.calls()
    made = cluster(nodes)
    assert made["changed"] and made["diff"] == predicted["diff"]
    for name in nodes:
        token = bearer_token.read(made["tokens"][name])
        assert (token.account, token.lifetime) == (f"headcni-node-{name}", 90 * 86400)
    verbs = [one.split()[0] for one in cluster.calls()]
    assert verbs == ["apply", "get", "apply", *["create"] * len(nodes)]
    again = cluster(nodes)
    assert (again["changed"], again["tokens"], again["renewed"]) == (False, {}, [])
    assert [one.split()[0] for one in cluster.calls()] == ["apply", "get"]


def test_a_node_may_ask_for_tokens_of_its_own_account_and_of_no_other():
    given = {"account": "headcni-node", "namespace": "kube-system"}
    account, role, here, everywhere = identity.new_objects_of(given, "headcni-node-one")
    assert account["automountServiceAccountToken"] is False
    assert role["rules"] == [
        {
            "apiGroups": [""],
            "resources": ["serviceaccounts/token"],
            "resourceNames": ["headcni-node-one"],
            "verbs": ["create"],
        }
    ]
    for one in (here, everywhere):
        assert [subject["name"] for subject in one["subjects"]] == ["headcni-node-one"]


def of_policies(name: str) -> str:
    return f"clusterrolebinding.{RBAC}/headcni-node:policies:{name}"


def test_only_nodes_with_policies_may_watch_them_and_only_as_long_as_they_have_them(tmp_path):
    cluster = Cluster(tmp_path)
    cluster(["one", "two"], policies_for=["two", "unknown"])
    policies = of_policies("two")
    assert {one for one in cluster.objects() if "policies" in one} == {policies}
    assert not cluster(["one", "two"], policies_for=["two"])["changed"]
    assert not cluster(["one"])["changed"], "a run for other nodes leaves it alone"
    predicted = cluster(["one", "two"], check=True)
    assert predicted["changed"] and policies in cluster.objects()
    assert predicted["diff"] == {"before": f"{policies}\n", "after": ""}
    assert cluster(["one", "two"])["changed"]
    assert cluster.objects() == of_node("one") | of_node("two")


def test_the_permission_for_policies_goes_with_the_node(tmp_path):
    cluster = Cluster(tmp_path)
    cluster(["one", "two"], policies_for=["one", "two"])
    cluster(["one"], state="absent")
    assert cluster.objects() == of_node("two") | {of_policies("two")}


def test_only_nodes_that_need_a_token_get_one(tmp_path):
    cluster = Cluster(tmp_path)
    cluster(["one", "two"])
    made = cluster(["one", "two"], tokens_for=["two", "unknown"], lifetime="12h")
    assert set(made["tokens"]) == {"two"} and made["changed"]
    assert bearer_token.read(made["tokens"]["two"]).lifetime == 12 * 3600
    assert made["diff"]["after"] == "token of headcni-node-two created\n"


def test_a_node_whose_account_is_new_gets_a_token_although_it_has_one(tmp_path):
    """That one was of an account that was deleted, and is worth nothing."""
    cluster = Cluster(tmp_path)
    cluster(["one", "two"])
    (tmp_path / "objects").write_text("\n".join(cluster.objects() - of_node("one")))
    assert set(cluster(["one", "two"])["tokens"]) == {"one"}


def test_a_node_that_lacks_a_binding_gets_it_and_keeps_its_token(tmp_path):
    cluster = Cluster(tmp_path)
    cluster(["one"])
    lost = f"rolebinding.{RBAC}/headcni-node-one"
    (tmp_path / "objects").write_text("\n".join(cluster.objects() - {lost}))
    made = cluster(["one"])
    assert (made["tokens"], made["diff"]["after"]) == ({}, f"{lost} created\n")
    assert lost in cluster.objects()


def test_a_secret_of_an_earlier_version_stays_until_the_node_has_switched(tmp_path):
    cluster = Cluster(tmp_path)
    cluster.has("secret/headcni-node-one", "secret/headcni-node-two", *OLD)
    made = cluster(["one", "two"])
    assert made["old"] == ["one", "two"] and "secret/headcni-node-one" in cluster.objects()
    assert cluster(["one"], check=True, state="switched")["changed"]
    assert "secret/headcni-node-one" in cluster.objects()
    # The account that they had together serves the other one still.
    gone = cluster(["one"], state="switched")
    assert gone["diff"]["before"] == "secret/headcni-node-one\n"
    assert {"secret/headcni-node-two", *OLD} <= cluster.objects()
    assert cluster(["two"], state="switched")["changed"]
    assert cluster.objects() == of_node("one") | of_node("two")
    assert cluster(["one", "two"])["old"] == []
    assert not cluster(["one", "two"], state="switched")["changed"]


def test_an_answer_without_a_token_is_an_error_with_the_account(tmp_path):
    with pytest.raises(Failed, match=r"serviceaccounts/headcni-node-one/token has no token"):
        Cluster(tmp_path, "{}")(["one"])


@pytest.mark.parametrize("wrong", ["1m", "9999h", "90d", "", "2160", "x" * 1000])
@pytest.mark.parametrize("module", ["headcni_kubernetes_identity", "headcni_kubernetes_info"])
def test_a_lifetime_that_makes_no_sense_is_an_error_that_says_what_does(tmp_path, wrong, module):
    given = {"nodes": ["one"], "manifest": "{}", "lifetime": wrong}
    if module.endswith("info"):
        given = {"token_lifetime": wrong}
    with pytest.raises(Failed, match=r"must be from 10m to 8760h, such as 2160h") as told:
        run(module, kubectl=["true"], kubeconfig=str(tmp_path / "none"), **given)
    assert len(str(told.value)) < 300


def test_identities_of_many_nodes_are_taken_back_by_one_list_call(tmp_path):
    cluster = Cluster(tmp_path)
    nodes = [f"node{number}" for number in range(6)]
    cluster([*nodes, "stays"])
    cluster.has("secret/headcni-node-node1")
    cluster.calls()
    gone = cluster(nodes, state="absent")
    assert gone["changed"] and cluster.objects() == of_node("stays")
    assert [one.split()[0] for one in cluster.calls()] == ["get", "delete"]
    cluster.has(*OLD)
    cluster(["stays"], state="absent")
    assert [one.split()[0] for one in cluster.calls()] == ["get", *["delete"] * 3]
    assert cluster.objects() == set()  # with the last one, the manifest and what all had together


def test_a_thousand_nodes_fit_into_no_longer_a_command_than_a_hundred(tmp_path):
    """Each call of kubectl has a time limit, and so has the length of a command."""
    cluster = Cluster(tmp_path)
    nodes = [f"node{number:04}" for number in range(1000)]
    cluster.has(*(one for name in nodes for one in of_node(name)))
    assert not cluster(nodes)["changed"]
    cluster(nodes, state="absent")
    assert cluster.objects() == set()
    assert max(map(len, cluster.calls())) < 100 * len("secret/headcni-node-node0000 ") + 1000


class Daemons:
    """What a node has, and a kubectl that accepts its token or does not."""

    def __init__(self, folder, kubectl) -> None:
        self.kubeconfig, self.file = folder / "daemon.kubeconfig", folder / "token"
        self.kubeconfig.write_text(json.dumps({"tokenFile": str(self.file)}))
        self.kubectl, self.refuses = kubectl, ""

    def give(
        self, since_days: float, until_days: float, account: str = "headcni-node-here"
    ) -> None:
        now, day = time.time(), 86400
        subject = f"system:serviceaccount:kube-system:{account}"
        made = kube_server.jwt(now - since_days * day, now + until_days * day, subject)
        self.file.write_text(made)

    def __call__(self, **given):
        script = CLUSTER
        if self.refuses:
            script += (
                f"""case "$*" in *{self.kubeconfig}*) echo '{self.refuses}' >&2; exit 1;; esac\n"""
            )
        script += """echo '{"spec": {"podCIDRs": ["10.42.1.0/24"]}}'"""
        found = run(
            "headcni_kubernetes_info",
            name="here",
            daemon_kubeconfig=str(self.kubeconfig),
            token_file=str(self.file),
            **self.kubectl(script),
            **given,
        )["token"]
        assert found["needed"] == bool(found["reason"])
        return found["reason"]


@pytest.fixture
def daemons(tmp_path, kubectl):
    return Daemons(tmp_path, kubectl)


def test_a_token_that_is_good_for_long_is_left_alone(daemons):
    daemons.give(0, 90)
    assert daemons() == ""
    daemons.give(59, 31)  # a third is left
    assert daemons() == ""


def test_a_token_that_is_about_to_expire_or_has_expired_is_to_be_renewed(daemons):
    daemons.give(61, 29)
    assert "has not renewed its token" in daemons()
    daemons.give(91, -1)
    assert "expired on" in daemons()


def test_a_node_without_a_token_that_expires_is_to_get_one(daemons):
    assert "no token that expires" in daemons()
    daemons.file.write_text("opaque")
    assert "no token that expires" in daemons()
    daemons.give(0, 90)
    daemons.kubeconfig.write_text('{"token": "of an earlier version"}')
    assert "no token that expires" in daemons()


def test_a_token_of_another_account_or_of_a_longer_life_is_to_be_replaced(daemons):
    daemons.give(0, 90, "headcni-node-elsewhere")
    assert "is of headcni-node-elsewhere, not of headcni-node-here" in daemons()
    daemons.give(0, 90)
    assert "lives longer than it should" in daemons(token_lifetime="24h")


def test_a_token_that_the_api_server_does_not_accept_is_to_be_replaced(daemons):
    daemons.give(0, 90)
    daemons.refuses = "error: You must be logged in to the server (Unauthorized)"
    assert "does not accept" in daemons()
    # What is no answer about the token does not make a new one.
    daemons.refuses = "Error from server (Forbidden): nodes is forbidden"
    assert daemons() == ""
