"""Labels of pods without Kubernetes: from CNI_ARGS and annotations."""

from __future__ import annotations

import pytest

from headcni.errors import INVALID_CONFIG, CniError
from headcni.ipam.config import ANNOTATIONS, POD_LABELS
from headcni.pod_labels import ANNOTATION, of_call


def annotated(text: object) -> dict:
    return {ANNOTATIONS: {ANNOTATION: text}}


def test_both_places_give_labels_and_cni_args_win():
    given = {POD_LABELS: "app=web, example.com/tier=front,empty="}
    assert of_call(given, annotated("app=db,team=a")) == {
        "app": "web",
        "example.com/tier": "front",
        "empty": "",
        "team": "a",
    }


@pytest.mark.parametrize("runtime", [{}, {ANNOTATIONS: None}, {ANNOTATIONS: {}}, annotated("")])
def test_most_pods_have_none(runtime):
    assert of_call({"K8S_POD_NAME": "web"}, runtime) == {}


@pytest.mark.parametrize(
    "text",
    ["app", "=web", "app=a b", "-a=b", "a=" + "b" * 64, "a=b," * 3000, "a/b/c=d", 7, ["a=b"]],
)
def test_what_is_no_label_is_refused_with_its_place(text):
    with pytest.raises(CniError) as raised:
        of_call({}, annotated(text))
    assert raised.value.code == INVALID_CONFIG and ANNOTATION in str(raised.value)
    assert "app=web,tier=front" in str(raised.value) and len(str(raised.value)) < 500


def test_there_are_at_most_so_many():
    with pytest.raises(CniError, match="65 labels"):
        of_call({POD_LABELS: ",".join(f"k{number}=v" for number in range(65))}, {})
