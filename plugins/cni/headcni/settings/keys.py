"""The keys of the configuration: their declaration, their names in the file, and their values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import Field, field, fields, is_dataclass
from typing import Any, Dict, Tuple

from .kinds import Accesses, Kind


def key(default: Any, kind: Kind, about: str, *, name: str = "", live: bool = False) -> Any:
    """A key of the file. ``live``: SIGHUP changes it. The name is the field's in camelCase."""
    return field(  # pylint: disable=invalid-field-call
        default=default, metadata={"kind": kind, "about": about, "name": name, "live": live}
    )


def section(about: str, name: str = "") -> Dict[str, Any]:
    """The metadata of a section: what it is for."""
    return {"about": about, "name": name}


def fields_of(of: Any) -> Tuple[Field[Any], ...]:
    return fields(of)


def file_name(field: Field[Any]) -> str:
    """The name in the file."""
    if field.metadata["name"]:
        return str(field.metadata["name"])
    first, *others = field.name.split("_")
    return first + "".join(part.capitalize() for part in others)


def walk(config: Any, path: str) -> Iterator[Tuple[str, Field[Any], Any]]:
    for declared in fields_of(config):
        where = f"{path}.{file_name(declared)}" if path else file_name(declared)
        value = getattr(config, declared.name)
        if is_dataclass(value):
            yield from walk(value, where)
        else:
            yield where, declared, value


def as_dict(config: Any) -> Dict[str, Any]:
    """By the file's own keys, for JSON. ``parse`` can read it again."""
    return {
        name: as_dict(value) if is_dataclass(value) else as_in_file(value)
        for name, value in (
            (file_name(field), getattr(config, field.name)) for field in fields(config)
        )
    }


def as_in_file(value: Any) -> Any:
    """The value as it would be written in the file."""
    if isinstance(value, Accesses):
        return dict(value)
    if isinstance(value, tuple):
        return [as_in_file(declared) for declared in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, (str, int, float, bool)) else str(value)


def shown(value: Any) -> str:
    plain = as_in_file(value)
    return json.dumps(plain if plain != [] else "")
