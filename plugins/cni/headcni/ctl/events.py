"""``headcnictl events``: pods' networks as they come and go."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, Dict

from ..errors import CniError
from ..settings import control_path
from . import node
from .daemon_client import asked
from .main import OK, CannotTell


def arguments(parser: argparse.ArgumentParser) -> None:
    node.with_config(parser)
    parser.add_argument("--follow", "-f", action="store_true", help="and go on, until ^C")


def run(args: argparse.Namespace) -> int:
    question = "events follow" if args.follow else "events"
    try:
        with asked(question, control_path(node.load(args))) as answers:
            for event in answers:
                line = json.dumps(event, ensure_ascii=False) if args.json else _in_words(event)
                print(line, flush=True)
    except KeyboardInterrupt:
        return OK
    except CniError as problem:
        raise CannotTell(str(problem)) from None
    if args.follow:
        raise CannotTell("headcni-daemon has ended")
    return OK


def _in_words(event: Dict[str, Any]) -> str:
    if event["type"] == "lost":
        return f"… {event['count']} events were too fast to be shown"
    at = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    who = "/".join(filter(None, (event.get("namespace"), event.get("pod"))))
    words = [at, event["type"], who or event.get("container_id", "")[:12]]
    words += [f"{key}={','.join(event[key])}" for key in ("pod_ip", "gateway") if event.get(key)]
    words += [f"{key}={event[key]}" for key in ("interface", "host_interface") if event.get(key)]
    if event.get("reason"):
        words.append(f": {event['reason']}")
    return " ".join(words)
