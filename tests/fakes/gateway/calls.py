"""Calls that are reported without a front door, on a fake clock."""

from __future__ import annotations

from fakes.clock import FakeClock

from baton.core.errors import BatonError
from baton.core.ports import Clock
from baton.core.request.request import FinishReason
from baton.core.request.sampling_params import RequestOptions, SamplingParams
from baton.core.request.timeline import Event, Stamp
from baton.core.request.token_ids import column
from baton.gateway.admission.loop_pacing import LoopPacing
from baton.gateway.admission.running_call import RunningCall
from baton.gateway.request.engine_link import TransferSummary
from baton.gateway.request.output_chunk import OutputChunk, RequestResult
from baton.gateway.security.caller import SCOPES, Caller
from baton.gateway.telemetry.call_counts import CallCounts
from baton.gateway.telemetry.call_feed import CallFeed, OnEnded
from baton.gateway.telemetry.calls.call_record import CallRecord
from baton.gateway.telemetry.calls.slo import SloTargets
from baton.gateway.telemetry.metrics.metric_store import MetricStore
from baton.gateway.telemetry.window.window import TelemetryWindow
from baton.gateway.validation.validation import ValidatedRequest

# The time stamp of each stage's end, after arrival.
STAMPS_S = (
    (Event.ARRIVED, 0.0, "gateway"),
    (Event.ROUTED, 0.001, "gateway"),
    (Event.PREFILL_QUEUED, 0.002, "p"),
    (Event.HANDOFF_QUEUED, 0.003, "d"),
    (Event.PREFILL_STARTED, 0.011, "p"),
    (Event.TRANSFER_STARTED, 0.02, "d"),
    (Event.FIRST_TOKEN, 0.111, "p"),
    (Event.TRANSFER_ENDED, 0.115, "d"),
    (Event.DECODE_STARTED, 0.116, "d"),
    (Event.FIRST_DECODE_ENDED, 0.123, "d"),
    (Event.FINISHED, 0.5, "gateway"),
)


def timeline(arrived_ns: int) -> tuple[Stamp, ...]:
    """The timeline of a call of one attempt, by STAMPS_S."""
    return tuple(Stamp(e, arrived_ns + round(s * 1e9), node) for e, s, node in STAMPS_S)


def feed_of(clock: Clock, *on_ended: OnEnded, window: TelemetryWindow | None = None) -> CallFeed:
    """A feed that counts into its own stores, for tests that need only one part."""
    store = MetricStore("baton_", "demo")
    targets = SloTargets(ttft_slo_s=0.5, tbt_slo_s=0.05)
    return CallFeed(
        clock, CallCounts(targets), window or TelemetryWindow(clock), store, (), on_ended
    )


def record_of(clock: Clock, num_samples: int = 1) -> CallRecord:
    """The record of a call that has just arrived."""
    return CallRecord(
        call_id="",
        request=ValidatedRequest(column((1,)), SamplingParams(), "", RequestOptions(n=num_samples)),
        caller=Caller("", SCOPES, "grpc"),
        model="demo",
        arrived_s=clock.monotonic_s(),
        arrived_unix_ns=clock.unix_ns(),
    )


class RanCall(RunningCall):
    """A call without sessions: `delivered` holds its chunks, `num_failures` counts its failures."""

    def __init__(self, num_samples: int = 1, max_tokens: int = 4) -> None:
        self.delivered: list[OutputChunk] = []
        self.num_failures = 0
        record = record_of(FakeClock(), num_samples)
        super().__init__(record, self._deliver, self._fail, LoopPacing(), max_tokens)
        self._stream = self.chunks()

    async def next(self) -> OutputChunk:
        """The next of `chunks`."""
        return await anext(self._stream)

    def _deliver(self, record: CallRecord, chunk: OutputChunk) -> None:
        assert record is self.record
        self.delivered.append(chunk)

    def _fail(self) -> None:
        self.num_failures += 1


class PlayedCall:
    """One call; each method is an event at the clock's current time."""

    def __init__(
        self,
        clock: FakeClock,
        feed: CallFeed,
        *,
        num_samples: int = 1,
        prompt_tokens: int = 7,
        tenant: str = "",
    ) -> None:
        self._feed = feed
        self._next_index = [0] * num_samples
        self.record = CallRecord(
            call_id=f"{id(self):032x}",
            request=ValidatedRequest(
                column(bytes(prompt_tokens)),
                SamplingParams(max_tokens=9, temperature=0.5),
                "",
                RequestOptions(n=num_samples),
            ),
            caller=Caller(tenant, SCOPES, "grpc"),
            model="demo",
            arrived_s=clock.monotonic_s(),
            arrived_unix_ns=clock.unix_ns(),
        )
        feed.call_began(self.record)

    def deliver(
        self, num_tokens: int, sample: int = 0, result: RequestResult | None = None
    ) -> None:
        chunk = OutputChunk("x", (5,) * num_tokens, self._next_index[sample], result, sample)
        self._next_index[sample] += num_tokens
        self._feed.chunk_delivered(self.record, chunk)

    def finish(self, *, cached_tokens: int = 0, attempts: int = 1) -> None:
        """The last chunks, without tokens, and the end of the call."""
        for sample in range(len(self._next_index)):
            self.deliver(0, sample, self.result(sample, cached_tokens, attempts))
        self.end(None)

    def result(self, sample: int, cached_tokens: int, attempts: int) -> RequestResult:
        return RequestResult(
            finish_reason=FinishReason.LENGTH,
            matched_stop=None,
            prompt_tokens=self.record.prompt_tokens,
            completion_tokens=self._next_index[sample],
            cached_tokens=cached_tokens,
            prefill_node="p",
            decode_node="d",
            transfer=TransferSummary(1000, 16, "shm"),
            attempts=attempts,
            seed=0,
            timeline=timeline(self.record.arrived_unix_ns),
        )

    def end(self, error: BatonError | None) -> None:
        self.record.error = error
        self._feed.call_ended(self.record)
