"""Browser sessions: after the login a browser has a cookie in place of the key, for some hours.

    cookie = expiry . reference of the key . tag of both

Reference and tag are HMACs with a secret of this gateway, or of those that share a port, so a
cookie reveals nothing about the key. The gateway stores nothing: a cookie ends by its expiry, with
its key, or with that secret. Its only scope is `metrics`, so a page that misuses it can change
nothing."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import replace

from ...core.errors import Unauthenticated
from ...core.ports import Clock
from .accepted_keys import AcceptedKeys
from .caller import METRICS, Caller
from .key_file import ApiKey

COOKIE = "baton_session"
SESSION_S = 12 * 3600
_MAX_COOKIE_CHARS = 256


class BrowserSessions:
    """Makes and checks cookies. Times are of the monotonic clock, which all processes of a host
    share."""

    def __init__(self, keys: AcceptedKeys, clock: Clock, secret: bytes | None = None) -> None:
        self._keys = keys
        self._clock = clock
        self._secret = secret or secrets.token_bytes(32)

    def open(self, key: str) -> str:
        """A cookie for a key; raises Unauthenticated, PermissionDenied."""
        found = self._keys.key(key)
        found.caller.check_scope(METRICS)
        until = str(int(self._clock.monotonic_s() + SESSION_S))
        text = f"{until}.{self._reference(found)}"
        return f"{text}.{self._tag(text)}"

    def caller(self, cookie: str) -> Caller:
        """The caller with this cookie; raises Unauthenticated."""
        text, _, tag = cookie.rpartition(".")
        if len(cookie) > _MAX_COOKIE_CHARS or not hmac.compare_digest(
            tag.encode("utf-8", "surrogatepass"), self._tag(text).encode()
        ):
            raise Unauthenticated("the session is over: log in again")
        until, _, reference = text.partition(".")
        if self._clock.monotonic_s() >= int(until):
            raise Unauthenticated("the session is over: log in again")
        key = self._keys.find(lambda key: hmac.compare_digest(self._reference(key), reference))
        return replace(key.caller, front="http", scopes=key.caller.scopes & {METRICS})

    def _reference(self, key: ApiKey) -> str:
        return hmac.digest(self._secret, b"reference" + key.digest, "sha256").hex()

    def _tag(self, text: str) -> str:
        message = b"tag" + text.encode("utf-8", "surrogatepass")
        return hmac.digest(self._secret, message, "sha256").hex()
