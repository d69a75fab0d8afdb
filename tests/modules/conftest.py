"""Modules run for real, against a Headscale of their own on loopback."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from ansible_module import run
from headscale_server import VERSION, HeadscaleServer, Tailscaled


@dataclass
class At:
    """Modules at one server."""

    server: HeadscaleServer
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, name: str, /, check: bool = False, **arguments: Any) -> dict[str, Any]:
        given = {"url": self.server.url, "api_key": self.server.key, **self.options, **arguments}
        return run(f"headscale_{name}", check, **given)

    def twice(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        """As every task should be: predicted by check mode, done, and then nothing left to do."""
        predicted = self(name, check=True, **arguments)
        done = self(name, **arguments)
        again = self(name, **arguments)
        assert predicted["changed"] == done["changed"]
        assert predicted["diff"] == done["diff"]
        assert (again["changed"], again["diff"]["before"]) == (False, again["diff"]["after"])
        return done

    def tagged_key(self, tag: str, **options: Any) -> str:
        """A key for nodes with this tag. Before 0.28 it needs an owner, too."""
        if VERSION < (0, 28):
            if "ann" not in self.server.users:
                self.server.add_user("ann")
            options["user"] = "ann"
        return str(self("preauth_key", tags=[tag], **options)["key"])


@pytest.fixture(scope="session")
def headscale_home() -> Iterator[Path]:
    """Short: a unix socket's path may have 107 characters."""
    home = Path(tempfile.mkdtemp(prefix="hct-"))
    yield home
    shutil.rmtree(home)


@pytest.fixture(scope="session")
def headscale_session(headscale_home) -> Iterator[HeadscaleServer]:
    server = HeadscaleServer(headscale_home)
    try:
        server.start()
        server.key = server.make_key()
        yield server
    finally:
        server.stop()


@pytest.fixture
def headscale(headscale_session) -> Iterator[HeadscaleServer]:
    """With nobody in it."""
    headscale_session.forget()
    yield headscale_session


@pytest.fixture
def at(headscale) -> At:
    return At(headscale)


@pytest.fixture
def counted(monkeypatch) -> list[str]:
    """What the modules ask of Headscale, in order."""
    asked: list[str] = []
    ask = requests.Session.request

    def noted(self: Any, method: str, url: str, **how: Any) -> Any:
        asked.append(f"{method} {urlsplit(url).path}")
        return ask(self, method, url, **how)

    monkeypatch.setattr(requests.Session, "request", noted)
    return asked


@pytest.fixture
def tailscaleds(headscale_home) -> Iterator[Any]:
    """Start one more real node."""
    started: list[Tailscaled] = []

    def start() -> Tailscaled:
        one = Tailscaled(Path(tempfile.mkdtemp(prefix="ts-", dir=headscale_home)))
        started.append(one)
        one.start()
        return one

    yield start
    for one in started:
        one.stop()
        shutil.rmtree(one.home)
