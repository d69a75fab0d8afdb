"""The daemon's own token for Kubernetes, renewed long before it expires.

site.yml gives a node its first token. Each later token is requested with the previous one, so a
node that is off for the whole lifetime needs site.yml again. Only the file that site.yml made is
written: the operator's own kubeconfig or token is not ours to renew.
"""

from __future__ import annotations

import os
import random
import time
from typing import Callable, Optional

from ...log import Log
from ...periodic import Periodic
from ...shared import bearer_token
from ...shared.bearer_token import BearerToken
from .access import Access
from .client import KubeClient
from .errors import REFUSED, KubeError

LOOK_SECONDS = 60.0  # between looks, because site.yml may write another token
LONGEST_PAUSE = 3600.0
STOP_SECONDS = 5.0
RUN_SITE = "run site.yml for this node"

log = Log("kubernetes-token")


class TokenKeeper:
    """Renews from start() to stop(), once."""

    def __init__(
        self,
        client: KubeClient,
        source: Callable[[], Access],
        lifetime: float,
        *,
        path: str = "",
        on_failure: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client, self._source = client, source
        self._lifetime, self._path = lifetime, path or bearer_token.FILE
        self._on_failure, self._clock = on_failure, clock
        self._token: Optional[BearerToken] = None
        self._failures, self._failure, self._retry_at = 0, "", 0.0
        self._told = ""
        self._loop = Periodic("kubernetes-token", self.look, LOOK_SECONDS)

    def start(self) -> None:
        self._loop.start()

    def stop(self) -> None:
        self._loop.stop(STOP_SECONDS, cancel=self._client.cancel)

    def is_alive(self) -> bool:
        return self._loop.is_alive()

    @property
    def expires(self) -> float:
        """Seconds since 1970; 0 if the token never expires, or is not ours to renew."""
        return self._token.expires if self._token is not None else 0.0

    def trouble(self) -> str:
        """What the operator should act on; empty if all is well."""
        token, now = self._token, self._clock()
        if token is None or not token.expires:
            return ""
        until = bearer_token.date(token.expires)
        if token.has_expired(now):
            return f"the token for Kubernetes expired on {until}: {RUN_SITE}"
        if self._failure:
            return (
                f"the token for Kubernetes expires on {until} and was not renewed: {self._failure}"
            )
        if now >= token.late_at:
            return f"the token for Kubernetes expires on {until} and was not renewed yet"
        return ""

    def look(self) -> float:
        """Renew the token if it is due. Returns the seconds until the next look."""
        try:
            self._token = self._read()
        except KubeError as problem:  # the watch of pods logs the same
            log.debug("the token cannot be read", problem=problem)
            self._token = None
        token, now = self._token, self._clock()
        if token is None or not token.expires:
            return LOOK_SECONDS
        if now < token.renew_at:
            self._failures, self._failure, self._retry_at = 0, "", 0.0
        elif (
            not 0 < self._retry_at - now <= 2 * LONGEST_PAUSE
        ):  # the last case: the clock was set back
            self._attempt(token, now)
        self._tell()
        ahead = [at - self._clock() for at in (token.renew_at, self._retry_at)]
        return min([LOOK_SECONDS, *(wait for wait in ahead if wait > 0)])

    def _read(self) -> Optional[BearerToken]:
        access = self._source()
        return bearer_token.read(access.bearer()) if access.token_file == self._path else None

    def _attempt(self, token: BearerToken, now: float) -> None:
        try:
            self._token = self._renew(token)
        except (KubeError, OSError) as problem:
            self._failures += 1
            self._failure = str(problem)
            self._retry_at = now + self._pause(token.lifetime)
            self._on_failure()
            return
        self._failures, self._failure, self._retry_at = 0, "", 0.0
        log.info("renewed", until=bearer_token.date(self.expires))

    def _pause(self, lifetime: float) -> float:
        """From a minute up to an hour; less for a token that lives for minutes."""
        longest = min(LONGEST_PAUSE, lifetime / 20)
        pause = min(LOOK_SECONDS, lifetime / 60) * 2.0 ** min(self._failures - 1, 12)
        return min(pause, longest) * random.uniform(0.8, 1.2)  # noqa: S311

    def _renew(self, token: BearerToken) -> BearerToken:
        text = self._client.new_token(token.namespace, token.account, int(self._lifetime))
        fresh = bearer_token.read(text)
        if fresh is None or fresh[:2] != token[:2] or not fresh.expires:
            raise KubeError(REFUSED, "the API server's new token is not one of this account's")
        _write(self._path, text)
        if fresh.renew_at <= self._clock():
            hint = "compare this node's clock with the server's"
            raise KubeError(REFUSED, "a new token would have to be renewed at once", hint)
        return fresh

    def _tell(self) -> None:
        """Log a problem when it changes."""
        said = self.trouble()
        if said and said != self._told:
            log.warn(said)
        self._told = said


def _write(path: str, text: str) -> None:
    """Write the file completely or not at all, and never readable by others."""
    fresh = f"{path}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(fresh, flags, 0o600), "w", encoding="ascii") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
