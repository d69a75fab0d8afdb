"""The JSON Schema of the configuration file, and a description of each key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING
from typing import Any, Dict, Tuple

from .keys import as_in_file, fields_of, file_name, walk
from .kinds import Kind
from .sections import DaemonConfig


def schema() -> Dict[str, Any]:
    """The JSON Schema in ``config.schema.json``, for editors."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "HeadCNI daemon configuration",
        **_schema_of(DaemonConfig),
    }


def described() -> Iterator[Tuple[str, str, Any, bool]]:
    """Path, meaning and default of each key, and whether SIGHUP changes it."""
    for path, declared, default in walk(DaemonConfig(), ""):
        yield path, declared.metadata["about"], as_in_file(default), declared.metadata["live"]


def _schema_of(of: Any) -> Dict[str, Any]:
    properties = {}
    for declared in fields_of(of):
        about = {"description": declared.metadata["about"]}
        if declared.default_factory is not MISSING:
            properties[file_name(declared)] = {**about, **_schema_of(declared.default_factory)}
        else:
            kind: Kind = declared.metadata["kind"]
            properties[file_name(declared)] = {
                **about,
                "default": as_in_file(declared.default),
                **kind.schema,
            }
    return {
        "type": ["object", "null"],
        "properties": properties,
        "patternProperties": {"^(_|x-)": {}},
        "additionalProperties": False,
    }
