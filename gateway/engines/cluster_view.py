"""The cluster as this gateway sees it: follows the directory and keeps a link to every engine.

The directory lists the engines to connect to; the stream of a link shows whether its engine lives.
So an engine that is no longer listed is used until its stream ends, and one that is listed but
cannot be reached is tried again, with back-off.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from ...cluster.secret import ClusterSecret
from ...cluster.tls import ClusterTls
from ...core.errors import Unavailable
from ...core.membership import Directory, Member
from ...core.ports import Clock
from ...core.process.event_loop import keep_running
from ...core.request.sampling_params import SamplingParams
from ...core.request.token_ids import column
from ...prefix_index.prefix_sources import NOTHING_CACHED
from ...proto.v1 import node_pb2
from ..request.engine_link import Avoid, Demand, MustWait
from ..request.session_table import SessionTable
from ..validation.validation import ValidatedRequest
from .engine_connection import EngineConnection, Receive
from .engine_table import EngineTable
from .linked_engine import LinkedEngine
from .prompt_router import PromptRouter
from .reported_load import ReportedLoad

log = logging.getLogger(__name__)

_REPORT_S = 0.1  # at most so often, where only loads have changed
_RETRY_MIN_S = 0.05
_RETRY_MAX_S = 2.0
_ANY = ValidatedRequest(column((0,)), SamplingParams(), "")


@dataclass(eq=False)
class ClusterView:
    """`run` follows the directory until cancelled; `close` ends all links.

    `_on_change`: called when engines, links, roles or loads have changed, before sessions see it;
    `_on_linked`: called for each engine once it is linked.
    """

    _directory: Directory
    _model: str
    _secret: ClusterSecret
    _clock: Clock
    _table: EngineTable
    _sessions: SessionTable
    _on_change: Callable[[], None]
    _silence_s: float
    _on_linked: Callable[[LinkedEngine], None]
    _tls: ClusterTls | None = None
    _listed: dict[str, Member] = field(default_factory=dict)
    _foreign: set[str] = field(default_factory=set)
    _reported_s: float = -_REPORT_S
    _report_timer: asyncio.TimerHandle | None = None
    _keepers: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _links: dict[str, EngineConnection] = field(default_factory=dict)  # and attempts
    _last_reasons: dict[str, str] = field(default_factory=dict)  # why there is no link, as logged

    def members(self) -> list[Member]:
        """Every engine of this model that is listed or linked, by role and name."""
        linked = {i: engine.member for i, engine in self._table.engines.items()}
        every = (self._listed | linked).values()
        return sorted(every, key=lambda m: (m.role.value, m.name, m.incarnation))

    def is_starting(self, incarnation: str) -> bool:
        """Whether the engine has sent its Welcome, and no heartbeat yet."""
        return incarnation in self._links and self._links[incarnation].is_starting

    async def run(self) -> None:
        """Follow the directory."""
        watch = self._directory.watch()
        try:
            async for members in watch:
                self._list(members)
                for incarnation in self._listed.keys() - self._keepers.keys():
                    self._keepers[incarnation] = asyncio.create_task(self._keep(incarnation))
        finally:
            if isinstance(watch, AsyncGenerator):
                await watch.aclose()

    def _list(self, members: Sequence[Member]) -> None:
        """Take over the engines of our model from the directory."""
        self._listed = {m.incarnation: m for m in members if m.model == self._model}
        for member in members:
            if member.model != self._model and member.incarnation not in self._foreign:
                log.warning(
                    "engine %s serves %r, this gateway %r: ignored",
                    *(member.name, member.model, self._model),
                )
        self._foreign = {m.incarnation for m in members if m.model != self._model}

    async def close(self) -> None:
        """End all links, as if their engines were lost."""
        self._cancel_report()
        keepers = list(self._keepers.values())
        for keeper in keepers:
            keeper.cancel()
        if keepers:
            await asyncio.wait(keepers)

    async def _keep(self, incarnation: str) -> None:
        """Keep a link to this engine for as long as the directory lists it or the link lives."""
        try:
            await keep_running("the link with an engine", lambda: self._keep_linked(incarnation))
        finally:
            del self._keepers[incarnation]
            self._links.pop(incarnation, None)
            self._last_reasons.pop(incarnation, None)

    async def _keep_linked(self, incarnation: str) -> None:
        delay_s = _RETRY_MIN_S
        while member := self._listed.get(incarnation):
            link = self._links[incarnation] = EngineConnection(
                member, self._secret, self, self._clock, self._silence_s, self._tls
            )
            began_s = self._clock.monotonic_s()
            reason = await link.run()
            if reason != self._last_reasons.get(incarnation):
                log.warning("engine %s at %s: %s", member.name, member.address, reason)
            self._last_reasons[incarnation] = reason
            if self._clock.monotonic_s() - began_s > _RETRY_MAX_S:
                delay_s = _RETRY_MIN_S  # the link was up for a while
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _RETRY_MAX_S)

    # -- engine_connection.ConnectionEvents --------------------------------------------------------

    def linked(
        self, link: EngineConnection, welcome: node_pb2.Welcome, load: ReportedLoad
    ) -> Receive:
        member = link.member
        log.info("linked to %s engine %s at %s", member.role.value, member.name, member.address)
        self._last_reasons.pop(member.incarnation, None)
        engine = LinkedEngine(member, link, load, welcome, self._clock, self._sessions)
        self._table.add(engine)
        self._on_linked(engine)
        self._report(is_load_only=False)
        return engine.receive

    def heartbeat(self, link: EngineConnection, load: ReportedLoad) -> None:
        engine = self._table.engines[link.member.incarnation]
        before, now_s = engine.load, self._clock.monotonic_s()
        engine.receive_heartbeat(load)
        is_same = _serves(before) == _serves(load)
        due_s = self._reported_s + _REPORT_S
        if not is_same or now_s >= due_s:
            self._report(is_load_only=is_same)
        elif self._report_timer is None:  # heartbeats are frequent: one report for several
            loop = asyncio.get_running_loop()
            self._report_timer = loop.call_later(due_s - now_s, self._report)

    def ended(self, link: EngineConnection) -> None:
        """Remove the engine at once: what was sent now would count as lost with its process."""
        self._table.remove(link.member.incarnation)

    def lost(self, link: EngineConnection, reason: str, *, has_died: bool) -> None:
        self.ended(link)
        self._sessions.engine_lost(link.member.incarnation, has_died=has_died)
        self._report(is_load_only=False)

    def _report(self, *, is_load_only: bool = True) -> None:
        self._cancel_report()
        self._reported_s = self._clock.monotonic_s()
        self._on_change()
        self._sessions.cluster_changed(is_load_only=is_load_only)

    def _cancel_report(self) -> None:
        if self._report_timer is not None:
            self._report_timer.cancel()
            self._report_timer = None


def _serves(load: ReportedLoad) -> tuple[object, ...]:
    """What decides which requests an engine can serve, apart from its load."""
    return load.links, load.is_draining, load.takes_whole


def why_not_ready(table: EngineTable) -> str:
    """Why no request could be served now; empty if one could."""
    router, demand, avoid = PromptRouter(table, _ANY), Demand(1), Avoid()
    try:
        router.plan(router.states(demand, avoid, NOTHING_CACHED), demand, avoid, None)
    except Unavailable as error:
        return error.message
    except MustWait:
        pass  # a cluster that is busy is ready
    return ""
