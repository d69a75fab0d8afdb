"""A page for each module of the collection, from what ansible-doc says."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from role_readme import markdown

CHECKOUT = Path(__file__).resolve().parents[2]
COLLECTION = "headcni.mesh"


def pages() -> dict[str, str]:
    """The text of each module's page, by the module's name."""
    names = sorted(path.stem for path in (CHECKOUT / "plugins/modules").glob("*.py"))
    done = subprocess.run(
        [CHECKOUT / ".venv/bin/ansible-doc", "--json", *(f"{COLLECTION}.{name}" for name in names)],
        cwd=CHECKOUT,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(CHECKOUT / "collections")},
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    found = json.loads(done.stdout)
    return {name: page(found[f"{COLLECTION}.{name}"]) for name in names}


def page(known: Mapping[str, Any]) -> str:
    doc = known["doc"]
    lines = [f"# {doc['module']}", "", f"{markdown(doc['short_description'])}.", ""]
    lines += [*_paragraphs(doc["description"])]
    if doc.get("notes"):
        lines += ["## Notes", "", *(f"- {markdown(note)}" for note in doc["notes"]), ""]
    lines += ["## Options", "", *_table(doc.get("options") or {})]
    if known.get("examples"):
        lines += ["## Examples", "", "```yaml", known["examples"].strip("\n"), "```", ""]
    if known.get("return"):
        lines += ["## Return values", "", *_table(known["return"])]
    return "\n".join(lines)


def _paragraphs(given: Any) -> Iterator[str]:
    for text in [given] if isinstance(given, str) else given:
        yield from (markdown(text), "")


def _table(options: Mapping[str, Any]) -> list[str]:
    rows = [f"| {name} | {kind} | {text} |" for name, kind, text in _rows(options, "")]
    return ["| name | type | meaning |", "| --- | --- | --- |", *rows, ""]


def _rows(options: Mapping[str, Any], above: str) -> Iterator[tuple[str, str, str]]:
    """One row for each option, and below it one for each of its suboptions."""
    for name, spec in options.items():
        texts = spec.get("description") or ""
        text = " ".join(_paragraphs(texts)).strip()
        if spec.get("choices"):
            text += f" One of {', '.join(f'`{one}`' for one in spec['choices'])}."
        if spec.get("default") is not None:
            text += f" Default: `{json.dumps(spec['default'])}`."
        if spec.get("returned"):
            text += f" Returned: {markdown(spec['returned'])}."
        kind = spec.get("type", "str")
        if spec.get("elements"):
            kind += f" of {spec['elements']}"
        if spec.get("required"):
            kind += ", required"
        yield f"`{above}{name}`", kind, " ".join(text.split()).replace("|", "\\|")
        inside = spec.get("suboptions") or spec.get("contains") or {}
        yield from _rows(inside, f"{above}{name}.")
