"""Labels of a pod on a node without Kubernetes: from CNI_ARGS or from an annotation.

Both have the form `app=web,tier=front`. Kubernetes' own labels come from its API server instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .errors import INVALID_CONFIG, CniError, shortened
from .ipam.config import ANNOTATIONS, POD_LABELS

ANNOTATION = "headcni.dev/labels"
MOST = 64
LONGEST = 8192  # characters of all labels together
LONGEST_SHOWN = 80

_KEY = r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?\Z"
_VALUE = r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?\Z"
_EXPECTED = "labels as Kubernetes has them, such as app=web,tier=front"


def of_call(args: Mapping[str, str], runtime_config: Mapping[str, Any]) -> dict[str, str]:
    """The labels in CNI_ARGS and in the annotations of an ADD. CNI_ARGS has precedence."""
    annotations = runtime_config.get(ANNOTATIONS)
    annotated = annotations.get(ANNOTATION) if isinstance(annotations, Mapping) else None
    return {
        **(parse(annotated, f"the annotation {ANNOTATION}") if annotated else {}),
        **parse(args.get(POD_LABELS, ""), f"{POD_LABELS} in CNI_ARGS"),
    }


def parse(text: object, where: str) -> dict[str, str]:
    """Labels in their text form; an error names the first that is wrong."""
    if not isinstance(text, str) or len(text) > LONGEST:
        raise _wrong(where, text, f"{_EXPECTED}, of at most {LONGEST} characters")
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, sign, value = (piece.strip() for piece in part.partition("="))
        if not sign or not re.match(_KEY, key) or not re.match(_VALUE, value):
            raise _wrong(where, part, _EXPECTED)
        found[key] = value
    if len(found) > MOST:
        raise _wrong(where, f"{len(found)} labels", f"at most {MOST}")
    return found


def _wrong(where: str, value: object, expected: str) -> CniError:
    shown = shortened(str(value), LONGEST_SHOWN)
    return CniError(INVALID_CONFIG, f"{where} is {shown!r}", f"expected {expected}")
