# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Ask headcnictl on a node, in JSON."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from . import node_config

COMMAND = os.path.join(node_config.RELEASE, "bin", "headcnictl")
MOST_TEXT = 600  # characters of an error


def ask(verb: str, *options: str, seconds: float) -> tuple[dict[str, Any], str]:
    """The answer, or the reason why there is none. Exit code 1 is an answer too: it says no."""
    try:
        done = subprocess.run(
            [COMMAND, verb, "--json", *options],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        return {}, "HeadCNI is not installed on this node: run site.yml"
    except subprocess.TimeoutExpired:
        return {}, f"headcnictl {verb} did not end in {seconds:.0f} s"
    except OSError as problem:
        return {}, f"{COMMAND} cannot be run: {problem.strerror}"
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        said = done.stderr.strip() or f"headcnictl {verb} printed nothing"
        return {}, said[-MOST_TEXT:]
    if "error" in answer:
        return {}, str(answer["error"])[:MOST_TEXT]
    return answer, ""
