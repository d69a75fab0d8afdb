"""``python3 -m headcni.settings > config.schema.json``: write the JSON Schema for editors."""

from __future__ import annotations

import json

from .schema import schema

if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
