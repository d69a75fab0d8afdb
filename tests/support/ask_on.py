"""On a machine of the lab: ask each URL ten times a second until told to end, and say what came
of it."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
import urllib.request

ended = threading.Event()
counted: dict[str, dict[str, float]] = {}


def ask(url: str) -> None:
    found = counted[url] = {"asked": 0, "lost": 0, "gap": 0.0}
    answered = time.monotonic()
    while not ended.is_set():
        began = time.monotonic()
        found["asked"] += 1
        try:
            with urllib.request.urlopen(url, timeout=1) as answer:
                answer.read()
            found["gap"] = max(found["gap"], time.monotonic() - answered)
            answered = time.monotonic()
        except OSError:
            found["lost"] += 1
            found["gap"] = max(found["gap"], time.monotonic() - answered)
        ended.wait(max(0.0, began + 0.1 - time.monotonic()))


def main() -> None:
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: ended.set())
    askers = [threading.Thread(target=ask, args=(url,)) for url in sys.argv[1:]]
    for one in askers:
        one.start()
    ended.wait()
    for one in askers:
        one.join()
    print(json.dumps(counted))


if __name__ == "__main__":
    main()
