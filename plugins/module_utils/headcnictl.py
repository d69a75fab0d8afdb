# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Ask headcnictl on a node."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from typing import Any

from . import node_config

COMMAND = os.path.join(node_config.RELEASE, "bin", "headcnictl")
MOST_TEXT = 600  # characters of an error
MOST_OUTPUT = 4 << 20  # characters of an answer as it was printed
UNKNOWN = 3  # the exit code of headcnictl if it cannot tell


class NoAnswerError(Exception):
    """headcnictl did not run to its end. The message says why."""


def ask(verb: str, *options: str, seconds: float) -> tuple[dict[str, Any], str]:
    """The answer, or the reason why there is none. Exit code 1 is an answer too: it says no."""
    try:
        done = _run([verb, "--json", *options], seconds)
    except NoAnswerError as problem:
        return {}, str(problem)
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


def printed(words: Sequence[str], seconds: float) -> tuple[int, str, str]:
    """The exit code, the output and the error text, as on the node itself."""
    try:
        done = _run(words, seconds)
    except NoAnswerError as problem:
        return UNKNOWN, "", f"headcnictl: {problem}\n"
    output = done.stdout
    if len(output) > MOST_OUTPUT:
        left_out = f"headcnictl: the answer has {len(output):,} characters: run this on the node\n"
        return UNKNOWN, "", left_out
    return done.returncode, output, done.stderr[-MOST_TEXT:]


def _run(words: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [COMMAND, *words],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise NoAnswerError("HeadCNI is not installed on this node: run site.yml") from None
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"headcnictl {words[0]} did not end in {seconds:.0f} s") from None
    except OSError as problem:
        raise NoAnswerError(f"{COMMAND} cannot be run: {problem.strerror}") from None
