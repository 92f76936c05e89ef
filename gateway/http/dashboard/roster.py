"""Every engine that this gateway has seen, and what became of it.

    starting ──heartbeat──► ready ◄──► draining
        ▲                     │ link down
        └──────link up── unlinked ──out of the directory──► gone
An engine that is gone stays listed until it is back under its name, or for an hour: a page must
never lose one silently. Knows no requests and no sockets; `look` is called once a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ....core.membership import Member
from ....core.ports import Clock
from ...engines.engine_table import EngineTable

_FORGET_S = 3600.0
_MAX_GONE = 64
_OF_LOAD = ("free_blocks", "credit_blocks", "num_running", "num_waiting", "waiting_tokens")


@dataclass(slots=True)
class _Seen:
    """One incarnation of an engine; `restarts` counts those before it under the same name."""

    member: Member
    state: str
    since_unix_s: float
    restarts: int = 0


class EngineRoster:
    """`members`: every engine that is listed or linked (ClusterView.members)."""

    def __init__(
        self, table: EngineTable, members: Callable[[], Sequence[Member]], clock: Clock
    ) -> None:
        self._table = table
        self._members = members
        self._clock = clock
        self._seen: dict[str, _Seen] = {}

    def look(self) -> None:
        """Take over the state of the directory and the links."""
        now_unix_s = self._clock.unix_ns() / 1e9
        present = {member.incarnation: member for member in self._members()}
        for incarnation, member in present.items():
            self._seen.setdefault(incarnation, _Seen(member, "", now_unix_s))
        for incarnation, seen in self._seen.items():
            state = self._state(incarnation) if incarnation in present else "gone"
            if state != seen.state:
                seen.state, seen.since_unix_s = state, now_unix_s
        self._join_restarted()
        self._forget_old(now_unix_s)

    def rows(self) -> list[dict[str, Any]]:
        """For JSON, prefill engines first, each role by name."""
        order = sorted(
            self._seen.values(),
            key=lambda seen: (seen.member.role.value != "prefill", seen.member.name),
        )
        return [self._row(seen) for seen in order]

    def _state(self, incarnation: str) -> str:
        engine = self._table.engines.get(incarnation)
        if engine is None:
            return "unlinked"
        if engine.load is None:
            return "starting"
        return "draining" if engine.load.is_draining else "ready"

    def _row(self, seen: _Seen) -> dict[str, Any]:
        member = seen.member
        engine = self._table.engines.get(member.incarnation)
        load = engine.load if engine is not None else None
        return {
            "incarnation": member.incarnation,
            "name": member.name,
            "role": member.role.value,
            "address": member.address,
            "device": member.device,
            "state": seen.state,
            "since_unix_s": seen.since_unix_s,
            "restarts": seen.restarts,
            "block_size": member.block_size,
            "num_blocks": member.num_blocks,
            **{name: getattr(load, name, None) for name in _OF_LOAD},
            "links": sorted(load.links) if load is not None else [],
        }

    def _join_restarted(self) -> None:
        """An engine that is back under its name takes the place of what is gone."""
        alive = {
            (seen.member.role, seen.member.name): seen
            for seen in self._seen.values()
            if seen.state != "gone"
        }
        for incarnation, seen in list(self._seen.items()):
            successor = alive.get((seen.member.role, seen.member.name))
            if seen.state == "gone" and successor is not None:
                successor.restarts = max(successor.restarts, seen.restarts + 1)
                del self._seen[incarnation]

    def _forget_old(self, now_unix_s: float) -> None:
        gone = sorted(
            (seen for seen in self._seen.values() if seen.state == "gone"),
            key=lambda seen: -seen.since_unix_s,
        )
        for rank, seen in enumerate(gone):
            if rank >= _MAX_GONE or now_unix_s - seen.since_unix_s > _FORGET_S:
                del self._seen[seen.member.incarnation]
