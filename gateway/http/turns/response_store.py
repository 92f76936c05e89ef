"""Stored responses by id: the conversation for `previous_response_id`, and the answer itself.

    tenant ── put(id, ...) ──► [oldest ... newest] ── messages(id), body(id) ──► of this tenant
Bounded in bytes over all tenants: when full, the tenant with the most bytes loses its oldest.
Kept only in this process's memory: not shared with other gateways, and lost at a restart.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ....core.errors import ResponseNotFound
from ....core.ports import Clock
from ..chat.messages import Message

_ENTRY_BYTES = 512  # of each entry, beside its JSON


@dataclass(frozen=True, slots=True)
class _Entry:
    messages: bytes  # JSON
    body: bytes  # JSON of the answer
    expires_s: float

    @property
    def num_bytes(self) -> int:
        return len(self.messages) + len(self.body) + _ENTRY_BYTES


@dataclass(slots=True)
class ResponseStore:
    """`_max_bytes`: of all entries together; `_ttl_s`: how long each entry is kept at most."""

    _clock: Clock
    _max_bytes: int
    _ttl_s: float
    _of_tenant: dict[str, OrderedDict[str, _Entry]] = field(default_factory=dict)
    _bytes_of: dict[str, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The size of all entries, at most `_max_bytes`."""
        return sum(self._bytes_of.values())

    def put(self, tenant: str, response_id: str, messages: Sequence[Message], body: bytes) -> None:
        """Keep a response, unless it is larger than the whole store."""
        now_s = self._clock.monotonic_s()
        self._drop_expired(now_s)
        entry = _Entry(json.dumps(messages).encode(), body, now_s + self._ttl_s)
        if entry.num_bytes > self._max_bytes:
            return
        while self.num_bytes + entry.num_bytes > self._max_bytes:
            self._drop_oldest(max(self._bytes_of, key=lambda name: self._bytes_of[name]))
        self._of_tenant.setdefault(tenant, OrderedDict())[response_id] = entry
        self._bytes_of[tenant] = self._bytes_of.get(tenant, 0) + entry.num_bytes

    def messages(self, tenant: str, response_id: str) -> list[Message]:
        """The whole conversation, the answer last. Raises ResponseNotFound, the same for other
        tenants' ids, expired ids and unknown ids."""
        found: list[Message] = json.loads(self._entry(tenant, response_id).messages)
        return found

    def body(self, tenant: str, response_id: str) -> bytes:
        """The answer as it was sent, in JSON. Raises ResponseNotFound."""
        return self._entry(tenant, response_id).body

    def delete(self, tenant: str, response_id: str) -> None:
        """Delete a response, but not those that continue it. Raises ResponseNotFound."""
        entry = self._entry(tenant, response_id)
        del self._of_tenant[tenant][response_id]
        self._uncount(tenant, entry)

    def _entry(self, tenant: str, response_id: str) -> _Entry:
        self._drop_expired(self._clock.monotonic_s())
        entry = self._of_tenant.get(tenant, OrderedDict()).get(response_id)
        if entry is None:
            raise ResponseNotFound(
                f"no response {response_id[:64]!r} is kept here: it expired, was not stored, or "
                "another gateway has it; send the whole conversation as input",
                param="previous_response_id",
            )
        return entry

    def _drop_expired(self, now_s: float) -> None:
        for tenant in list(self._of_tenant):
            while (kept := self._of_tenant.get(tenant)) and (
                next(iter(kept.values())).expires_s <= now_s
            ):
                self._drop_oldest(tenant)

    def _drop_oldest(self, tenant: str) -> None:
        _, entry = self._of_tenant[tenant].popitem(last=False)
        self._uncount(tenant, entry)

    def _uncount(self, tenant: str, entry: _Entry) -> None:
        self._bytes_of[tenant] -= entry.num_bytes
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant], self._bytes_of[tenant]
