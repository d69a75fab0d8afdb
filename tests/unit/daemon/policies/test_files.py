"""Policies from files: what is read, and that a mistake changes nothing."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from patience import until

from headcni.daemon.policies import files
from headcni.daemon.policies.files import PolicyFiles

DENY = """
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: deny, namespace: shop}
spec: {podSelector: {}, policyTypes: [Ingress]}
"""
ALLOW_WEB = """
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: allow-web, namespace: shop}
spec:
  podSelector: {matchLabels: {app: db}}
  ingress: [{from: [{podSelector: {matchLabels: {app: web}}}], ports: [{port: 5432}]}]
"""
SHOP = "apiVersion: v1\nkind: Namespace\nmetadata: {name: shop, labels: {team: a}}\n"
REMOTE = """
apiVersion: v1
kind: Pod
metadata: {name: web-2, namespace: shop, labels: {app: web}}
status: {podIPs: [{ip: 10.244.2.7}, {ip: "fd44:0:0:2::7"}]}
"""
BOMB = "  a0: &a0 [x]\n" + "".join(
    f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
MERGES = "  a0: &a0 {x: 1}\n" + "".join(
    f"  a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 10)
)
MISTAKE = DENY.replace("podSelector: {}", "podSelektor: {}")


class Folder:
    def __init__(self, root: Path) -> None:
        self.policies, self.labels = root / "policies", root / "pod-labels.yaml"
        self.kept = root / "kept.json"
        self.policies.mkdir()
        self.files = self.opened()

    def opened(self) -> PolicyFiles:
        return PolicyFiles(str(self.kept), str(self.policies.parent), settled=0)

    def write(self, name: str, text: str) -> Path:
        path = self.policies / name
        fresh = path.with_name(".new")
        fresh.write_text(text)
        fresh.rename(path)
        return path


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def names(folder: Folder) -> set[str]:
    assert folder.files.declared is not None
    return {name for _namespace, name in folder.files.declared.policies}


def test_policies_namespaces_and_pods_are_read_from_all_files(folder):
    folder.write("a.yaml", f"{DENY}---\n{SHOP}---\n")
    folder.write(
        "b.yml",
        f"kind: List\nitems:\n- {json.dumps({'kind': 'Namespace', 'metadata': {'name': 'bank'}})}",
    )
    folder.write("c.json", json.dumps({"kind": "Namespace", "metadata": {"name": "lab"}}))
    folder.write("d.yaml", REMOTE)
    folder.write("notes.txt", "not read")
    folder.write(".hidden.yaml", "not read")
    assert folder.files.look() and folder.files.problems == ()
    declared = folder.files.declared
    assert names(folder) == {"deny"} and set(declared.namespaces) == {"shop", "bank", "lab"}
    assert declared.namespaces["shop"].labels["team"] == "a"
    remote = declared.pods["shop", "web-2"]
    assert [str(one) for one in remote.addresses] == ["10.244.2.7", "fd44:0:0:2::7"]
    assert not folder.files.look(), "nothing has changed"


def test_no_folder_means_no_policies(folder):
    folder.policies.rmdir()
    assert folder.files.look()
    assert folder.files.declared.policies == {}


def test_a_new_a_changed_and_a_deleted_file_are_noticed(folder):
    assert folder.files.look() and names(folder) == set()
    path = folder.write("a.yaml", DENY)
    assert folder.files.look() and names(folder) == {"deny"}
    folder.write("a.yaml", ALLOW_WEB)
    assert folder.files.look() and names(folder) == {"allow-web"}
    path.unlink()
    assert folder.files.look() and names(folder) == set()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MISTAKE, "podSelector?"),
        ("kind: [", "wrong.yaml, line"),
        ("a: 1\na: 2\n", "found duplicate key"),
        (
            "kind: Deployment\nmetadata: {name: a}",
            "'Deployment', expected NetworkPolicy, Namespace",
        ),
        ("just text", "kind is missing"),
        ("kind: List\nitems: no", "expected a list"),
        (f"{SHOP}---\n---\n{MISTAKE}", "document 3"),
        (DENY.replace("v1", "v1beta1"), "networking.k8s.io/v1"),
        (ALLOW_WEB.replace("5432", "70000"), "1 to 65535"),
        ("\udc80", "not YAML"),
        ("x" * (files.LARGEST_FILE + 1), "more than 1 MiB"),
        ("&a [" + "*a, " * 10 + "]", "with its aliases"),
        (SHOP + "status: &a [*a]\n", "with its aliases"),
        (SHOP + "status:\n" + BOMB, "with its aliases"),
        (SHOP + "status:\n" + MERGES, "with its aliases"),
        (SHOP + "status: [&a " + "x" * 100_000 + ", " + "*a, " * 20 + "]", "with its aliases"),
        (SHOP + "status: {? [a, b] : c}\n", "expected texts as keys"),
        ("[" * 5000, "not YAML"),
    ],
)
def test_a_mistake_is_named_with_its_file_and_what_was_in_force_stays(folder, text, said):
    folder.write("a.yaml", DENY)
    folder.files.look()
    before = folder.files.declared
    path = folder.policies / "wrong.yaml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    (folder.policies / "z.yaml").write_text(ALLOW_WEB)
    assert not folder.files.look()
    (problem,) = folder.files.problems
    assert said in problem and str(path) in problem and len(problem) < 1100
    assert folder.files.declared is before, "nor does a good file beside it change anything"
    path.unlink()
    assert folder.files.look() and folder.files.problems == ()
    assert names(folder) == {"deny", "allow-web"}


def test_the_same_policy_in_two_files_is_a_mistake(folder):
    first, second = folder.write("a.yaml", DENY), folder.write("b.yaml", DENY)
    folder.files.look()
    (problem,) = folder.files.problems
    assert "shop/deny is also in" in problem and str(first) in problem and str(second) in problem


def test_after_a_restart_with_a_wrong_file_the_last_good_ones_are_in_force(folder):
    folder.write("a.yaml", f"{DENY}---\n{REMOTE}")
    folder.labels.write_text("shop/web-*: {app: web}")
    folder.files.look()
    good = folder.files.declared
    folder.write("a.yaml", MISTAKE)
    folder.files = folder.opened()
    assert folder.files.look()
    assert folder.files.declared == good and folder.files.problems
    assert oct(folder.kept.stat().st_mode)[-3:] == "600"


def test_a_wrong_file_and_no_earlier_one_leaves_it_open_what_is_declared(folder):
    folder.write("a.yaml", MISTAKE)
    assert not folder.files.look()
    assert folder.files.declared is None and folder.files.problems
    folder.kept.write_text('{"objects": [["x", 3]]')
    folder.files = folder.opened()
    assert not folder.files.look() and folder.files.declared is None


def test_a_file_that_others_may_change_is_refused(folder):
    path = folder.write("a.yaml", DENY)
    path.chmod(0o666)
    folder.files.look()
    (problem,) = folder.files.problems
    assert "may be changed by others" in problem and "0644" in problem
    path.chmod(0o644)
    assert folder.files.look() and names(folder) == {"deny"}


def test_aliases_of_a_reasonable_size_are_read(folder):
    twice = (
        f"kind: List\nitems:\n- &p {json.dumps({'kind': 'Namespace', 'metadata': {'name': 'a'}})}"
    )
    folder.write("a.yaml", twice + "\n- {<<: *p, metadata: {name: b}}\n")
    assert folder.files.look() and folder.files.problems == ()
    assert set(folder.files.declared.namespaces) == {"a", "b"}


def test_a_folder_that_others_may_change_is_refused(folder):
    folder.write("a.yaml", DENY)
    folder.files.look()
    folder.policies.chmod(0o777)
    folder.write("b.yaml", ALLOW_WEB)
    assert not folder.files.look() and names(folder) == {"deny"}
    (problem,) = folder.files.problems
    assert "may be changed by others" in problem and "0755" in problem
    folder.policies.chmod(0o755)
    assert folder.files.look() and names(folder) == {"deny", "allow-web"}


@pytest.mark.parametrize("target", ["nowhere.yaml", "b.yaml"])
def test_a_link_that_leads_nowhere_is_a_mistake(folder, target):
    path = folder.write("b.yaml", DENY)
    folder.files.look()
    path.unlink()
    path.symlink_to(folder.policies / target)
    assert not folder.files.look() and names(folder) == {"deny"}
    (problem,) = folder.files.problems
    assert f"{path} cannot be read" in problem


def test_a_file_is_read_when_nobody_has_written_to_it_for_a_moment(folder):
    """The first half of a file may be without a mistake, and say something else."""
    folder.write("a.yaml", DENY)
    folder.files.look()
    patient = PolicyFiles(str(folder.kept), str(folder.policies.parent), settled=0.4)
    with (folder.policies / "b.yaml").open("w") as file:
        for line in f"{ALLOW_WEB}---\n{SHOP}".splitlines():
            file.write(f"{line}\n")
            file.flush()
            assert not patient.look() and patient.declared is None
            time.sleep(0.05)
    until(patient.look)
    assert set(patient.declared.policies) == {("shop", "deny"), ("shop", "allow-web")}
    assert "shop" in patient.declared.namespaces and patient.problems == ()


def test_a_deleted_file_counts_when_no_other_has_taken_its_place_for_a_moment(folder):
    path = folder.write("a.yaml", DENY)
    patient = PolicyFiles(str(folder.kept), str(folder.policies.parent), settled=0.2)
    until(patient.look)
    path.unlink()
    assert not patient.look()
    folder.write("a.yaml", DENY)
    assert not patient.look()
    until(patient.look)
    assert set(patient.declared.policies) == {("shop", "deny")}


def test_a_clock_that_is_behind_only_delays_the_files(folder):
    path = folder.write("a.yaml", DENY)
    os.utime(path, (time.time() + 9999,) * 2)
    patient = PolicyFiles(str(folder.kept), str(folder.policies.parent), settled=0.2)
    assert not patient.look()
    until(patient.look)


def test_what_is_no_file_is_refused_without_waiting_for_it(folder):
    os.mkfifo(folder.policies / "a.yaml")
    folder.files.look()
    (problem,) = folder.files.problems
    assert "is no file" in problem


def test_the_mapping_file_gives_labels_by_pattern(folder):
    folder.labels.write_text("shop/web-*: {app: web}\n'*/*': {tier: all}\n")
    assert folder.files.look()
    assert folder.files.declared.labels == (
        ("shop/web-*", {"app": "web"}),
        ("*/*", {"tier": "all"}),
    )


@pytest.mark.parametrize(
    "text",
    ["web: {app: web}", "shop/web: [app]", "shop/web: {app: 3}", "[shop]", "Shop/web: {app: web}"],
)
def test_a_mistake_in_the_mapping_file_changes_nothing_either(folder, text):
    folder.write("a.yaml", DENY)
    folder.files.look()
    folder.labels.write_text(text)
    assert not folder.files.look() and names(folder) == {"deny"}
    (problem,) = folder.files.problems
    assert str(folder.labels) in problem


def test_the_number_of_problems_that_are_shown_is_bounded(folder):
    for number in range(files.PROBLEMS_NAMED + 5):
        folder.write(f"{number}.yaml", MISTAKE)
    folder.files.look()
    assert len(folder.files.problems) == files.PROBLEMS_NAMED + 1
    assert folder.files.problems[-1] == "and 5 more mistakes"
