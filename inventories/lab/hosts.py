#!/usr/bin/env python3
"""The embedded lab as an Ansible inventory. Run `make up` first."""

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent.parent

sys.exit(
    subprocess.run(
        [sys.executable, "-m", "lab", "inventory"], cwd=CHECKOUT, timeout=60, check=False
    ).returncode
)
