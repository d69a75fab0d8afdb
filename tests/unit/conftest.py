"""The collection can be imported by its name, as Ansible does it."""

from __future__ import annotations

import sys

from lab_command import CHECKOUT

sys.path.insert(0, str(CHECKOUT / "collections"))
