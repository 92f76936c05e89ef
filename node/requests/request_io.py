"""The open requests of an engine: their gateways, deadlines and outputs.

Decodes and files dispatches, writes tokens and errors as RequestOutputs, stamps timelines. All
outputs of a step for one gateway are sent in one message. An entry is opened by a dispatch and
closed by any end of the request on this engine. A closed key leaves a tombstone for 30 s, as does a
cancel that arrives before its dispatch: a late dispatch is rejected instead of running for nobody.
Knows no block, and never calls the engine.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from ...core.errors import BatonError, Cancelled, InvalidRequest
from ...core.ports import Clock
from ...core.request.request import Request, Ticket, TokenLogprobs
from ...core.request.timeline import Event
from ...engine.scheduling.outputs import FinishedBeam, PromptLogprobs, TokenOutput
from ...kv_transfer.protocol.handoff_side import Tombstones
from ...proto import codec
from ...proto.v1 import node_pb2

log = logging.getLogger(__name__)

_OVER = Cancelled("the request has ended here")


@dataclass(slots=True, eq=False)
class Entry:
    """One request on this engine. `samples`: all requests of its dispatch."""

    request: Request
    gateway: str
    deadline_s: float  # monotonic
    ticket: Ticket | None
    samples: tuple[Request, ...] = ()
    accepted_ns: int = 0  # monotonic
    pending: node_pb2.RequestOutput | None = None  # None: nothing to report but its tokens

    @property
    def key(self) -> str:
        return self.request.key

    @property
    def next_output(self) -> node_pb2.RequestOutput:
        """What the next output will report; the caller may add to it."""
        if self.pending is None:
            request_id, attempt = self.request.request_id, self.request.attempt
            self.pending = node_pb2.RequestOutput(request_id=request_id, attempt=attempt)
        return self.pending


@dataclass(slots=True)
class _Step:
    """A step's outputs for one gateway. `tokens`: outputs of one token and nothing else, as
    (request id, attempt, index, token id)."""

    outputs: list[node_pb2.RequestOutput] = field(default_factory=list)
    tokens: list[tuple[str, int, int, int]] = field(default_factory=list)

    def message(self) -> node_pb2.StepOutputs:
        if not self.tokens:
            return node_pb2.StepOutputs(outputs=self.outputs)
        request_ids, attempts, indices, token_ids = zip(*self.tokens, strict=True)
        tokens = node_pb2.PlainTokens(
            request_ids=request_ids, attempts=attempts, indices=indices, token_ids=token_ids
        )
        return node_pb2.StepOutputs(outputs=self.outputs, tokens=tokens)


@dataclass(eq=False)
class RequestIO:
    """Used by the engine loop's thread only. `_send_to` sends to a gateway, given its name;
    `entries`: the open requests, by key."""

    _send_to: Callable[[str, node_pb2.NodeMessage], None]
    _clock: Clock
    node_name: str
    _vocab_size: int
    is_draining: bool = False
    entries: dict[str, Entry] = field(default_factory=dict)
    _deadlines: list[tuple[float, str]] = field(default_factory=list)  # heap; also closed entries'
    _steps: dict[str, _Step] = field(default_factory=lambda: defaultdict(_Step))  # by gateway
    _step_began_ns: int = 0

    def __post_init__(self) -> None:
        self._tombstones = Tombstones(self._clock)

    def refuse(self, gateway: str, dispatch: node_pb2.Dispatch, error: BatonError) -> None:
        """Report that a dispatch is rejected."""
        log.info("refused %s/%d: %s", dispatch.request_id, dispatch.attempt, error.message)
        for request_id in {dispatch.request_id, *dispatch.fork_request_ids}:
            output = node_pb2.RequestOutput(
                request_id=request_id, attempt=dispatch.attempt, error=codec.error_to_wire(error)
            )
            self._steps[gateway].outputs.append(output)

    def accept(self, gateway: str, dispatch: node_pb2.Dispatch) -> Entry:
        """File a dispatch and its forks. Raises BatonError; nothing is filed then."""
        request = codec.request_from_wire(dispatch)
        known = np.frombuffer(dispatch.prompt_token_ids + dispatch.output_token_ids, "<u4")
        if known.max(initial=0) >= self._vocab_size:
            raise InvalidRequest(f"a token id is outside the vocabulary of {self._vocab_size}")
        deadline_s = self._clock.monotonic_s() + dispatch.deadline_remaining_us / 1e6
        ticket = None
        if dispatch.HasField("ticket"):
            ticket = Ticket(**codec.same_fields(dispatch.ticket, Ticket))
        samples = (request, *request.forks)
        of_all = (gateway, deadline_s, ticket, samples, self._now_ns())
        entries = [Entry(sample, *of_all) for sample in samples]
        self.open(*entries)
        return entries[0]

    def open(self, *samples: Entry) -> None:
        """File a new request's samples, without those that have already ended here. Raises
        Cancelled if all have, InvalidRequest on a duplicate; nothing is filed then."""
        keys = [entry.key for entry in samples]
        for key in keys:
            if key in self.entries or keys.count(key) > 1:
                raise InvalidRequest(f"request {key} was dispatched twice")
        coming = [entry for entry in samples if not self._tombstones.get(entry.key)]
        if not coming:
            raise Cancelled(f"request {keys[0]} has already ended here")
        for entry in coming:
            self.entries[entry.key] = entry
            heapq.heappush(self._deadlines, (entry.deadline_s, entry.key))

    def knows(self, token_ids: Iterable[int]) -> bool:
        """Whether all are in the vocabulary."""
        return all(0 <= token_id < self._vocab_size for token_id in token_ids)

    def stamp(self, entry: Entry, event: Event, at_ns: int | None = None) -> None:
        """Record `event`, now or at the given time, for the request's next output."""
        at_ns = self._now_ns() if at_ns is None else at_ns
        entry.next_output.events.add(event=event.value, monotonic_ns=at_ns)

    def begin_step(self) -> None:
        """A step is about to run: requests that start in it start now, but are reported later."""
        self._step_began_ns = self._now_ns()

    def stamp_started(self, entry: Entry, event: Event) -> None:
        """Record `event` at the begin of the step, or at the dispatch if that came later."""
        self.stamp(entry, event, max(self._step_began_ns, entry.accepted_ns))

    def _now_ns(self) -> int:
        return int(self._clock.monotonic_s() * 1e9)

    def queue_output(self, entry: Entry) -> node_pb2.RequestOutput:
        """Queue the entry's next output; the caller may add to it."""
        output, entry.pending = entry.next_output, None
        self._steps[entry.gateway].outputs.append(output)
        return output

    def emit(self, entry: Entry, token: TokenOutput) -> None:
        """Queue one token, with what is pending."""
        request = entry.request
        is_plain = token.finish_reason is None and request.sampling.logprobs is None
        if is_plain and entry.pending is None:
            plain = (request.request_id, request.attempt, token.index, token.token_id)
            self._steps[entry.gateway].tokens.append(plain)
            return
        output = self.queue_output(entry)
        output.first_index = token.index
        output.token_ids.append(token.token_id)
        output.finish_reason = codec.FINISH_TO_WIRE[token.finish_reason]
        if request.sampling.logprobs is not None:
            output.logprobs.append(codec.logprobs_to_wire(TokenLogprobs(token.logprob, token.top)))

    def flush(self) -> None:
        """Send what is queued."""
        steps, self._steps = self._steps, defaultdict(_Step)
        for gateway, step in steps.items():
            self._send_to(gateway, node_pb2.NodeMessage(outputs=step.message()))

    def emit_beam(self, entry: Entry, beam: FinishedBeam) -> None:
        """Queue the complete output of one beam."""
        output = self.queue_output(entry)
        output.token_ids.extend(beam.token_ids)
        output.finish_reason = codec.FINISH_TO_WIRE[beam.finish_reason]
        if entry.request.sampling.logprobs is not None:
            output.logprobs.extend(map(codec.logprobs_to_wire, beam.logprobs))

    def emit_prompt(self, prompt: PromptLogprobs) -> None:
        """Queue prompt logprobs, if the request is still open."""
        if entry := self.entries.get(prompt.key):
            output = self.queue_output(entry)
            output.first_prompt_index = prompt.first_index
            output.prompt_logprobs.extend(map(codec.logprobs_to_wire, prompt.logprobs))

    def end(self, key: str, error: BatonError | None) -> Entry | None:
        """Close a request, report `error` if given, and leave a tombstone, also for a key that was
        never dispatched. None: the request was not open."""
        self._tombstones.add(key, _OVER)
        entry = self.entries.pop(key, None)
        if entry is not None and error is not None:
            if not isinstance(error, Cancelled):
                log.info("failed %s: %s", key, error.message)
            self.queue_output(entry).error.CopyFrom(codec.error_to_wire(error))
        return entry

    def forget_gateway(self, gateway: str) -> list[str]:
        """Drop the gateway's outputs; returns the keys of its open requests."""
        self._steps.pop(gateway, None)
        return [key for key, entry in self.entries.items() if entry.gateway == gateway]

    def overdue(self) -> list[str]:
        """Keys whose deadline has passed. Also removes old tombstones."""
        self._tombstones.purge()
        now_s, keys = self._clock.monotonic_s(), []
        while self.next_deadline_s() <= now_s:
            keys.append(heapq.heappop(self._deadlines)[1])
        return keys

    def next_deadline_s(self) -> float:
        """The earliest deadline of an open request (monotonic); inf: none."""
        while self._deadlines and self._deadlines[0][1] not in self.entries:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf
