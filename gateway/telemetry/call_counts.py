"""Adds calls to a Tally: how many there were, how fast their tokens came, how they ended."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from ...core.errors import Cancelled
from ...core.request.timeline import Event
from ..request.output_chunk import RequestResult
from .calls.call_record import CallRecord
from .calls.ended_call import EndedCall, between_s, ended_call
from .calls.slo import SloTargets
from .metrics import metric_table as table
from .metrics.metric_store import OTHER
from .metrics.tally import Tally

MAX_TENANTS = 100
NOBODY = "anonymous"  # without API keys
_PHASES = (  # as vLLM defines them, as far as that fits two nodes
    (table.QUEUE, Event.ARRIVED, Event.PREFILL_STARTED),
    (table.PREFILL, Event.PREFILL_STARTED, Event.FIRST_TOKEN),
    (table.DECODE, Event.FIRST_TOKEN, Event.FINISHED),
    (table.INFERENCE, Event.PREFILL_STARTED, Event.FINISHED),
)


@dataclass(slots=True)
class Noted:
    """Events that no tally has yet."""

    refused: Counter[str] = field(default_factory=Counter)  # by the error's code
    lookups_s: list[float] = field(default_factory=list)  # of the calls that began
    prompt_tokens: int = 0
    num_firsts: int = 0  # samples' first deliveries
    gaps_s: list[float] = field(default_factory=list)  # before all further deliveries
    coalesced_tokens: int = 0
    ttfts_s: list[float] = field(default_factory=list)
    handoff_gaps_s: list[float] = field(default_factory=list)
    ended: list[CallRecord] = field(default_factory=list)


class CallCounts:
    """The counting of one gateway, from `noted` into `tally`. Its first MAX_TENANTS tenants have
    labels."""

    def __init__(self, targets: SloTargets) -> None:
        self.noted = Noted()
        self.tally = Tally()
        self._targets = targets
        self._tenants: set[str] = set()

    def count(self, noted: Noted) -> None:
        """Add all but the calls that ended."""
        tally = self.tally
        for code, number in noted.refused.items():
            tally.count(table.REJECTIONS, number, code)
        if noted.lookups_s:
            tally.count(table.BEGAN, len(noted.lookups_s))
            tally.count(table.PROMPT_TOKENS, noted.prompt_tokens)
        if num_deliveries := noted.num_firsts + len(noted.gaps_s):
            tally.count(table.OUTPUT_TOKENS, num_deliveries + noted.coalesced_tokens)
            tally.count(table.COALESCED_TOKENS, noted.coalesced_tokens)
        tally.observe_all(table.LOOKUP, noted.lookups_s)
        tally.observe_all(table.TTFT, noted.ttfts_s)
        tally.observe_all(table.INTER_TOKEN, noted.gaps_s)
        tally.observe_all(table.HANDOFF_GAP, noted.handoff_gaps_s)

    def count_ended(self, record: CallRecord) -> None:
        tally, call = self.tally, ended_call(record)
        tally.ended.append(call)
        if call.is_finished:
            _count_finished(tally, record.results.get(0), call)
        else:
            tally.count(table.FAILURES, 1, call.outcome)
        tally.observe_all(table.TPOT, record.tpots_s)
        if not isinstance(record.error, Cancelled):
            worst_s = max(record.first_tokens_s, default=math.inf) - record.arrived_s
            judged = (call.is_finished, worst_s, call.max_gap_s)
            tally.judged.add(judged)
            tally.count(table.SLO_JUDGED)
            tally.count(table.SLO_GOOD, self._targets.are_met(judged))
        tenant = self._tenant(record.caller.tenant or NOBODY)
        tally.count(table.TENANT_REQUESTS, 1, tenant)
        tally.count(table.TENANT_TOKENS, call.prompt_tokens, tenant, "prompt")
        tally.count(table.TENANT_TOKENS, call.output_tokens, tenant, "generation")

    def _tenant(self, name: str) -> str:
        """The label of a tenant; tenants beyond MAX_TENANTS share one."""
        if name not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            return OTHER
        self._tenants.add(name)
        return name


def _count_finished(tally: Tally, first: RequestResult | None, call: EndedCall) -> None:
    tally.count(table.SUCCESSES, 1, call.outcome)
    tally.count(table.RETRIES, max(0, call.attempts - 1))
    tally.count(table.CACHED_TOKENS, call.cached_tokens)
    tally.observe(table.E2E, call.e2e_s)
    tally.count(table.FINISHED_PROMPT_TOKENS, call.prompt_tokens)
    tally.observe(table.PROMPT_LENGTH, call.prompt_tokens)
    tally.observe(table.OUTPUT_LENGTH, call.output_tokens)
    for stage, seconds in call.stages.items():
        tally.observe(table.STAGE, seconds, stage)
    if transfer := call.transfer:
        edge = (transfer.transport, transfer.source, transfer.puller)
        tally.observe(table.KV_SECONDS, transfer.seconds, *edge)
        tally.count(table.KV_BYTES, transfer.num_bytes, *edge)
        tally.count(table.PULLER_CACHED_TOKENS, transfer.puller_cached_tokens)
    if first is not None:
        # Of several attempts, the first time of each event: the queue of a retry is not part of the
        # time to the first token.
        times = {stamp.event: stamp.unix_ns for stamp in reversed(first.timeline)}
        for metric, begin, end in _PHASES:
            if (spent_s := between_s(times, begin, end)) is not None:
                tally.observe(metric, spent_s)
