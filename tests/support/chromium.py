"""A headless Chromium, driven over its debugging pipe: no other program or package is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PROGRAM = "chromium"
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--remote-debugging-pipe", "--hide-scrollbars"),
)
SECONDS = 60.0
WATCHED = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")


class Chromium:
    """One page at a time. `said` has everything that the page wrote to the console, every error and
    every request for another address than its own."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._left, self._number, self._session = b"", 0, ""
        self._loaded = False
        self.said: list[str] = []
        self.requests: list[str] = []

    def open(self, page: Path, width: int = 1280, height: int = 900, theme: str = "light") -> None:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = ""
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network", "DOM", "Accessibility"):
            self.ask(f"{domain}.enable")
        self.size(width, height)
        self.media(theme=theme)
        self.said, self.requests, self._loaded = [], [], False
        self.ask("Page.navigate", url=page.as_uri())
        until = time.monotonic() + SECONDS
        while not self._loaded:
            self._event(until)

    def size(self, width: int, height: int) -> None:
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def media(self, theme: str = "light", media: str = "") -> None:
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.ask("Emulation.setEmulatedMedia", media=media, features=features)

    def value(self, expression: str) -> Any:
        found = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            self.ask(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                text=text if kind == "keyDown" else "",
            )

    def picture(self, whole: bool = True) -> bytes:
        shot = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])

    def picture_of(self, left: float, top: float, width: float, height: float) -> bytes:
        clip = {"x": left, "y": top, "width": width, "height": height, "scale": 1}
        shot = self.ask(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip
        )
        return base64.b64decode(shot["data"])

    def whole_picture(self) -> bytes:
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        return self.picture_of(0, 0, size["width"], min(size["height"], 12000))

    def pdf(self) -> bytes:
        return base64.b64decode(self.ask("Page.printToPDF", printBackground=True)["data"])

    def accessible(self) -> list[tuple[str, str]]:
        """Role and name of everything that a screen reader is told about."""
        nodes = self.ask("Accessibility.getFullAXTree")["nodes"]
        return [
            (node.get("role", {}).get("value", ""), node.get("name", {}).get("value", ""))
            for node in nodes
            if not node.get("ignored")
        ]

    def ask(self, method: str, **given: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": given}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + SECONDS
        while True:
            answer = self._event(until)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _event(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._left:
            ready = select.select([self._read], [], [], max(0.0, until - time.monotonic()))[0]
            assert ready, f"Chromium did not answer in {SECONDS:.0f} s"
            more = os.read(self._read, 1 << 20)
            assert more, "Chromium has ended"
            self._left += more
        first, _unused, self._left = self._left.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        method, params = message.get("method", ""), message.get("params", {})
        if method in WATCHED:
            self.said.append(json.dumps(params)[:500])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded = True
        return message


@contextmanager
def chromium() -> Iterator[Chromium]:
    program = shutil.which(PROGRAM)
    assert program, "there is no chromium: make test-report installs it"
    to_read, to_write = os.pipe(), os.pipe()
    folder = tempfile.mkdtemp(prefix="headcni-chromium-")

    def hand_over() -> None:
        """Chromium reads from descriptor 3 and writes to 4."""
        reading, writing = os.dup(to_read[0]), os.dup(to_write[1])
        os.dup2(reading, 3)
        os.dup2(writing, 4)

    process = subprocess.Popen(
        [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        close_fds=False,
        preexec_fn=hand_over,
        start_new_session=True,
    )
    try:
        os.close(to_read[0])
        os.close(to_write[1])
        yield Chromium(to_read[1], to_write[0])
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait(10)
        os.close(to_read[1])
        os.close(to_write[0])
        shutil.rmtree(folder, ignore_errors=True)
