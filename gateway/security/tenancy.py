"""Tenants of a gateway that requires API keys: their limits and their part of the prefix cache.

    admitted ──► charge(prompt + all it may generate) ──► used_tokens = what it was ──► left
    a request,   or RateLimited                           the difference is given back
    one of those
    at once

A limit per minute is a token bucket that holds one minute's worth. Each gateway counts by itself,
also if several share a port.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...core.channels.token_bucket import TokenBucket
from ...core.errors import RateLimited
from ...core.ports import Clock
from ...core.request.token_ids import TAG_DIGITS
from .caller import Caller

_MINUTE_S = 60.0
_SALT_DIGITS = 32
_TOO_MANY_AT_ONCE_S = 1.0  # a guess: the end of running requests is not known


@dataclass(slots=True)
class _Usage:
    """The usage of one tenant. There is a bucket for each limit that is set."""

    num_running: int = 0
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None


@dataclass(slots=True)
class TenantAdmission:
    """One request of a tenant. `used_tokens`: of the charged ones, those that it used."""

    _tokens: TokenBucket | None
    _clock: Clock
    _charged_tokens: int = 0
    used_tokens: int = 0

    def charge(self, num_tokens: int) -> None:
        """Charge for the prompt and all that may be generated; raises RateLimited."""
        now_s = self._clock.monotonic_s()
        if self._tokens is not None:
            _check(self._tokens, num_tokens, now_s, "tokens per minute")
            self._tokens.spend(num_tokens, now_s)
            self._charged_tokens = num_tokens

    def settle(self) -> None:
        """Give back the unused tokens at the end of the request."""
        if self._tokens is not None:
            now_s = self._clock.monotonic_s()
            self._tokens.spend(self.used_tokens - self._charged_tokens, now_s)


def salt_of_tenant(salt_key: bytes, tenant: str) -> str:
    """The prefix of the salts of all the tenant's prompts."""
    return _keyed(salt_key, f"tenant {tenant}")[:TAG_DIGITS]


def _keyed(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


@dataclass(slots=True)
class Tenancy:
    """`salt_key`: the key of the salts, the same in all gateways; nodes do not need it.

    `shares_prefixes`: tenants may hit each other's cached prefixes.
    """

    clock: Clock
    salt_key: bytes
    shares_prefixes: bool = False
    _usage: dict[str, _Usage] = field(default_factory=dict)

    def check(self, caller: Caller) -> None:
        """Raises RateLimited if `admitted` would; spends nothing."""
        usage = self._usage_of(caller)
        now_s = self.clock.monotonic_s()
        most = caller.limits.max_concurrent_requests
        if most is not None and usage.num_running >= most:
            raise RateLimited(
                f"limit reached: {most} requests at once", retry_after_s=_TOO_MANY_AT_ONCE_S
            )
        if usage.tokens is not None:
            _check(usage.tokens, 1, now_s, "tokens per minute")
        if usage.requests is not None:
            _check(usage.requests, 1, now_s, "requests per minute")

    @contextmanager
    def admitted(self, caller: Caller) -> Iterator[TenantAdmission]:
        """Admit a request of this caller for the duration of the block. Raises RateLimited before
        the request is parsed."""
        self.check(caller)
        usage = self._usage[caller.tenant]
        if usage.requests is not None:
            usage.requests.spend(1, self.clock.monotonic_s())
        admission = TenantAdmission(usage.tokens, self.clock)
        usage.num_running += 1
        try:
            yield admission
        finally:
            usage.num_running -= 1
            admission.settle()

    def cache_salt(self, caller: Caller, requested: str) -> str:
        """The salt of the hashes of a prompt's blocks; all requests with an empty salt share
        blocks.

        `requested`: the client's own salt, which narrows the sharing. It is hashed with a key, so
        that no client can name the salt of another. All salts of a tenant have the same prefix,
        which shows the owner of a block in the index.
        """
        tenant = caller.tenant if requested or not self.shares_prefixes else ""
        if not tenant and not requested:
            return ""
        rest = _keyed(self.salt_key, f"{len(tenant)}:{tenant}{requested}")[:_SALT_DIGITS]
        return salt_of_tenant(self.salt_key, tenant) + rest

    def _usage_of(self, caller: Caller) -> _Usage:
        """The usage of the caller's tenant, with its current limits: the key file may have
        changed."""
        usage = self._usage.setdefault(caller.tenant, _Usage())
        usage.requests = self._bucket(usage.requests, caller.limits.requests_per_minute)
        usage.tokens = self._bucket(usage.tokens, caller.limits.tokens_per_minute)
        return usage

    def _bucket(self, bucket: TokenBucket | None, per_minute: int | None) -> TokenBucket | None:
        if per_minute is None:
            return None
        if bucket is None:
            return TokenBucket(per_minute, _MINUTE_S, self.clock.monotonic_s())
        bucket.size = per_minute  # the key file may have changed
        return bucket


def _check(bucket: TokenBucket, cost: int, now_s: float, what: str) -> None:
    if wait_s := bucket.wait_s(cost, now_s):
        raise RateLimited(f"limit reached: {what}", retry_after_s=wait_s)
