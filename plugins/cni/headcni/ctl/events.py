"""``headcnictl events``: pods' networks as they come and go."""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Deque, Dict

from ..errors import CniError
from ..settings import control_path
from . import node
from .daemon_client import asked
from .main import OK, CannotTell

LOST = "lost"
REMEMBERED = 512  # events that a daemon may tell again, which keeps 256
RETRY_SECONDS = 1.0
CONNECT_SECONDS = 5.0


def arguments(parser: argparse.ArgumentParser) -> None:
    node.with_config(parser)
    parser.add_argument(
        "--follow",
        "-f",
        action="store_true",
        help="and go on until ^C, also with the daemon's successor",
    )


def run(args: argparse.Namespace) -> int:
    path = control_path(node.load(args))
    try:
        for event in _followed(path) if args.follow else _kept(path):
            line = json.dumps(event, ensure_ascii=False) if args.json else _in_words(event)
            print(line, flush=True)
    except KeyboardInterrupt:
        return OK
    except CniError as problem:
        raise CannotTell(str(problem)) from None
    return OK


def _kept(path: str) -> Iterator[Dict[str, Any]]:
    with asked("events", path) as answers:
        yield from answers


def _followed(path: str) -> Iterator[Dict[str, Any]]:
    """What has happened and what happens, without end. If the daemon ends, its successor is
    followed. The first one must answer."""
    seen: Deque[str] = deque(maxlen=REMEMBERED)
    answered = False
    while True:
        try:
            with asked("events follow", path) as answers:
                if answered:
                    _note("headcni-daemon answers again")
                for event in answers:
                    answered = True
                    text = json.dumps(event, sort_keys=True)
                    if text not in seen:
                        yield event
                    if event["type"] != LOST:
                        seen.append(text)
                answered = True
        except socket.timeout:
            pass  # it hangs: even without events there is a sign of life every few seconds
        except CniError:
            if not answered:
                raise
        _note("headcni-daemon has ended: waiting for the next one, until ^C")
        time.sleep(RETRY_SECONDS)  # one that is about to end may still listen
        while not _listens(path):
            time.sleep(RETRY_SECONDS)


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as caller:
        caller.settimeout(CONNECT_SECONDS)
        return caller.connect_ex(path) == 0


def _note(text: str) -> None:
    print(f"headcnictl: {text}", file=sys.stderr, flush=True)


def _in_words(event: Dict[str, Any]) -> str:
    if event["type"] == LOST:
        return f"… {event['count']} events were too fast to be shown"
    at = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    who = "/".join(filter(None, (event.get("namespace"), event.get("pod"))))
    words = [at, event["type"], who or event.get("container_id", "")[:12]]
    words += [f"{key}={','.join(event[key])}" for key in ("pod_ip", "gateway") if event.get(key)]
    words += [f"{key}={event[key]}" for key in ("interface", "host_interface") if event.get(key)]
    if event.get("reason"):
        words.append(f": {event['reason']}")
    return " ".join(words)
