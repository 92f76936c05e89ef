"""A gateway's page over synthetic traffic: real window, roster, feed and routes, no engines.

Minutes of history exist at once, since the traffic is counted on a clock of its own. `python
tests/browser/synthetic.py PORT` serves it, for work on the page.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from aiohttp import web

from baton.core.errors import BatonError, EngineFailed, RateLimited
from baton.core.membership import Member, Role
from baton.core.ports import Clock
from baton.core.request.request import FinishReason
from baton.core.request.sampling_params import SamplingParams
from baton.core.request.timeline import Event, Stamp
from baton.core.request.token_ids import BlockHash, column
from baton.gateway.engines.engine_table import EngineTable
from baton.gateway.engines.linked_engine import LinkedEngine
from baton.gateway.engines.prompt_router import PromptRouter
from baton.gateway.engines.reported_load import ReportedLoad
from baton.gateway.http.dashboard.routes import add_dashboard
from baton.gateway.http.dashboard.snapshot import EngineRoster, SnapshotFeed
from baton.gateway.request.engine_link import Avoid, Demand, MustWait, TransferSummary
from baton.gateway.request.output_chunk import OutputChunk, RequestResult
from baton.gateway.security.caller import Caller
from baton.gateway.telemetry.call_counts import CallCounts
from baton.gateway.telemetry.call_feed import CallFeed
from baton.gateway.telemetry.calls.call_record import CallRecord
from baton.gateway.telemetry.calls.slo import SloTargets
from baton.gateway.telemetry.metrics.metric_store import MetricStore
from baton.gateway.telemetry.window.window import TelemetryWindow
from baton.gateway.validation.validation import ValidatedRequest
from baton.prefix_index.mirror import PrefixMirror
from baton.prefix_index.pages import Contents
from baton.proto.v1 import node_pb2
from baton.proto.v1.node_pb2 import Counters

BLOCK_BYTES = 2 << 20
_REQUEST = ValidatedRequest(column((1,)), SamplingParams(), "")


def running_s() -> float:
    """More than an hour before this machine's boot, so that earlier traffic counts too."""
    return time.monotonic() + 10_000


class TravelClock(Clock):
    """Real time, unless `at_s` is set."""

    def __init__(self) -> None:
        self.at_s: float | None = None
        self._offset_s = time.time() - running_s()

    def monotonic_s(self) -> float:
        return running_s() if self.at_s is None else self.at_s

    def unix_ns(self) -> int:
        return round((self.monotonic_s() + self._offset_s) * 1e9)


class SyntheticGateway:
    """`members` may be changed at any time; the page should show it."""

    def __init__(
        self, *, tenant: str = "acme", model: str = "Qwen3-8B", scale: float = 1.0
    ) -> None:
        self.clock = TravelClock()
        self.clock.at_s = running_s() - 3700
        self.window = TelemetryWindow(self.clock)
        targets, store = SloTargets(0.5, 0.05), MetricStore("baton_", model)
        self.calls = CallFeed(self.clock, CallCounts(targets), self.window, store)
        self.clock.at_s = None
        self.table = EngineTable(PrefixMirror(self.clock))
        self.members: dict[str, Member] = {}
        self.model, self.tenant, self.scale = model, tenant, scale
        self._random = random.Random(7)
        self._num_calls = 0
        self.num_gateways, self.is_shared = 1, True
        roster = EngineRoster(self.table, lambda: [*self.members.values()], lambda _: False)
        self.feed = SnapshotFeed(self.window, roster, self._about, targets, self.clock, self._scope)

    def _about(self) -> dict[str, Any]:
        return {"model": self.model, "version": "0.1.0", "is_ready": True, "is_draining": False}

    def _scope(self) -> dict[str, Any]:
        """Returns data like `WindowShare.scope`."""
        own = {"gateway": "0" * 32, "is_own": True, "name": "host-a:8000", "num_running": 3}
        figures = {"began_per_s": 3.1, "output_tokens_per_s": 340.0}
        state = {"version": "0.1.0", "is_ready": True, "is_draining": False}
        rows = [own | figures | state]
        for index in range(1, self.num_gateways):
            other = {"gateway": f"{index:032x}", "is_own": False, "name": f"host-b:{8000 + index}"}
            rows.append(rows[0] | other)
        alone_s = None if self.is_shared else time.time() - 75
        return {
            "is_shared": self.is_shared,
            "alone_since_unix_s": alone_s,
            "gateways": rows if self.is_shared else rows[:1],
        }

    def add_engine(self, name: str, role: Role, links: frozenset[str] = frozenset()) -> Member:
        incarnation = f"{self._random.getrandbits(128):032x}"
        address = f"10.0.0.7:{50100 + len(self.members)}"
        device = f"cuda:{len(self.members)}"
        member = Member(
            *(incarnation, role, name, address, self.model, "f" * 16, 131072, 16, 24_576),
            device=device,
        )
        self.members[incarnation] = member
        free = self._random.randrange(4_000, 22_000)
        is_prefill = role is Role.PREFILL
        running, waiting = (2, 1) if is_prefill else (self._random.randrange(20, 60), 0)
        load = ReportedLoad(running, waiting, 9_216 * waiting, free, 9_800, False, links)
        welcome = node_pb2.Welcome(block_bytes=2 << 20)
        engine = LinkedEngine(member, None, load, welcome)  # type: ignore[arg-type]
        self.table.add(engine)  # nothing is sent
        self._cache(incarnation, num_blocks=self._random.randrange(800, 2_000))
        return member

    def _cache(self, incarnation: str, num_blocks: int) -> None:
        """In addition to blocks on the device, a quarter as many are only in host memory."""
        hashes = [BlockHash(self._random.randbytes(16)) for _ in range(num_blocks * 5 // 4)]
        in_host = set(hashes[num_blocks:])
        contents = Contents(incarnation, 1, 1, num_blocks, len(in_host), 0)
        copy = self.table.mirror.copies[contents.incarnation]
        copy.install(contents, set(hashes), in_host, self.clock.monotonic_s())

    def add_usual_engines(self) -> None:
        sources = [self.add_engine(f"prefill-0.{i}", Role.PREFILL) for i in range(2)]
        links = frozenset(member.incarnation for member in sources)
        for i in range(2):
            self.add_engine(f"decode-0.{i}", Role.DECODE, links)

    def lose(self, name: str) -> None:
        """An engine dies: its link is down and the directory no longer lists it."""
        for incarnation, member in list(self.members.items()):
            if member.name == name:
                self.table.remove(incarnation)
                del self.members[incarnation]

    # --- traffic ----------------------------------------------------------------------------------

    def call(self, arrived_s: float) -> list[tuple[float, Any]]:
        """One call as (time, action) pairs from its arrival to its end."""
        draw, scale = self._random, self.scale
        self._num_calls += 1
        prompt = int(min(60_000, draw.lognormvariate(7.6, 0.9)))
        cached = int(prompt * draw.choice((0, 0, 0.2, 0.6, 0.8))) // 16 * 16
        num_tokens = max(2, int(min(900, draw.lognormvariate(4.6, 0.6))))
        queue_s = draw.expovariate(1 / 0.006) * scale
        prefill_s = ((prompt - cached) * 22e-6 + 0.012) * scale
        transfer_s, admit_s = draw.uniform(0.5e-3, 3e-3) * scale, draw.uniform(0.2e-3, 2e-3) * scale
        fate = draw.random()
        record = CallRecord(
            call_id=f"{draw.getrandbits(128):032x}",
            request=ValidatedRequest(column(bytes(prompt)), SamplingParams(), ""),
            caller=Caller(self.tenant, frozenset(), draw.choice(("http", "grpc"))),
            model=self.model,
            arrived_s=arrived_s,
            arrived_unix_ns=round((arrived_s + time.time() - running_s()) * 1e9),
        )
        if fate < 0.01:
            return [(arrived_s, lambda: self.calls.call_refused(record.caller, RateLimited("no")))]
        stamps = [0.0, 4e-4 * scale]
        for spent_s in (queue_s, prefill_s, 1e-4 * scale, transfer_s, admit_s):
            stamps.append(stamps[-1] + spent_s)
        steps: list[tuple[float, Any]] = [(arrived_s, lambda: self.calls.call_began(record))]
        at_s = arrived_s + stamps[3] + 3e-4 * scale
        steps.append((at_s, lambda: self._deliver(record, 0)))
        at_s = arrived_s + stamps[6]
        for index in range(1, num_tokens):
            at_s += max(2e-3, draw.gauss(9.5e-3, 8e-4)) * scale
            at_s += scale * 0.05 if draw.random() < 0.002 else 0
            steps.append((at_s, lambda index=index: self._deliver(record, index)))
            if fate < 0.02 and index > num_tokens // 2:
                break
        error = EngineFailed("gone") if fate < 0.02 else None
        nodes = (f"prefill-0.{self._num_calls % 2}", f"decode-0.{self._num_calls // 2 % 2}")
        result = self._result(record, nodes, stamps, num_tokens, cached)
        steps.append((at_s + 1e-4, lambda: self._end(record, result, error)))
        return steps

    def _result(
        self,
        record: CallRecord,
        nodes: tuple[str, str],
        stamps: list[float],
        num_tokens: int,
        cached: int,
    ) -> RequestResult:
        events = (
            *(Event.ARRIVED, Event.ROUTED, Event.PREFILL_STARTED, Event.FIRST_TOKEN),
            *(Event.TRANSFER_STARTED, Event.TRANSFER_ENDED, Event.DECODE_STARTED),
        )
        where = ["gateway", "gateway", *[nodes[0]] * 2, *[nodes[1]] * 3]
        timeline = [
            Stamp(event, record.arrived_unix_ns + round(at_s * 1e9), node)
            for event, at_s, node in zip(events, stamps, where, strict=True)
        ]
        num_bytes = math.ceil(record.prompt_tokens / 16) * BLOCK_BYTES
        reason = self._random.choice((FinishReason.STOP, FinishReason.LENGTH))
        transfer = TransferSummary(num_bytes, cached // 4, "cuda_ipc")
        usage = (record.prompt_tokens, num_tokens, cached, *nodes)
        return RequestResult(reason, None, *usage, transfer, 1, 0, tuple(timeline))

    def _deliver(self, record: CallRecord, index: int) -> None:
        self.calls.chunk_delivered(record, OutputChunk("", (1,), index))

    def _end(self, record: CallRecord, result: RequestResult, error: BatonError | None) -> None:
        record.error = error
        if error is None:
            last = Stamp(Event.FINISHED, self.clock.unix_ns(), result.decode_node or "")
            record.results[0] = replace(result, timeline=(*result.timeline, last))
        self.calls.call_ended(record)

    def live_through(self, seconds: float, rps: float) -> None:
        """Generate the traffic of the last `seconds` at once."""
        now_s = running_s()
        steps = []
        at_s = now_s - seconds
        while at_s < now_s:
            load = 0.7 + 0.5 * math.sin(at_s / 40)
            at_s += self._random.expovariate(rps * load)
            steps += self.call(at_s)
        for when_s, act in sorted(steps, key=lambda step: step[0]):
            if when_s < now_s:
                self.clock.at_s = when_s
                act()
        self.clock.at_s = None

    async def keep_calling(self, rps: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            now_s = running_s()
            for when_s, act in self.call(now_s):
                loop.call_at(loop.time() + when_s - now_s, act)
            for engine in self.table.engines.values():
                self._drift(engine)
            with contextlib.suppress(BatonError, MustWait):
                num_tokens = self._random.choice((300, 2000, 9000))
                router = PromptRouter(self.table, _REQUEST)
                router.choose(Demand(num_tokens), avoid=Avoid(), fingerprint=None)
            await asyncio.sleep(self._random.expovariate(rps))

    def _drift(self, engine: LinkedEngine) -> None:
        load = engine.load
        free = min(22_000, max(600, load.free_blocks + self._random.randrange(-90, 91)))
        is_prefill = engine.member.role is Role.PREFILL
        running = min(64 if not is_prefill else 4, max(1, load.num_running + self._drawn()))
        waiting = min(6, max(0, load.num_waiting + self._drawn())) if is_prefill else 0
        credit = load.credit_blocks
        engine.receive_heartbeat(
            ReportedLoad(
                *(running, waiting, 4_000 * waiting, free, credit, False, load.links),
                counters=self._counted(load.counters),
            )
        )
        if engine.name != "prefill-0.0":  # it makes no promise
            self._promise(engine, load.counters)

    def _counted(self, before: Counters) -> Counters:
        """Count one more prompt: half of it cached, a quarter of that in host memory."""
        counters = Counters()
        counters.CopyFrom(before)
        counters.prefix_query_tokens += 3_200
        counters.prefix_hit_tokens += 1_600
        counters.host_hit_tokens += 400
        counters.fetched_blocks += 5
        return counters

    def _promise(self, engine: LinkedEngine, before: Counters) -> None:
        """Count forty steps, nearly all of which keep the promise."""
        counters = engine.load.counters
        counters.num_promised_steps = before.num_promised_steps + 40
        counters.num_kept_steps = before.num_kept_steps + 40 - (self._random.random() < 0.3)
        engine.receive_heartbeat(replace(engine.load, tbt_target_s=0.025, decode_step_p99_s=0.0247))

    def _drawn(self) -> int:
        return self._random.choice((-1, 0, 0, 0, 1))

    def app(self, rps: float | None = None) -> web.Application:
        """An application with traffic of `rps` requests per second, or none."""

        async def calling(_: web.Application) -> AsyncIterator[None]:
            task = asyncio.create_task(self.keep_calling(rps)) if rps else None
            yield
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

        app = web.Application()
        add_dashboard(app, self.feed)
        app.cleanup_ctx.append(calling)
        return app


if __name__ == "__main__":
    gateway = SyntheticGateway()
    gateway.add_usual_engines()
    if "empty" not in sys.argv:
        gateway.live_through(300, 8)
    app = gateway.app(None if "empty" in sys.argv else 8)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), shutdown_timeout=0.2)
