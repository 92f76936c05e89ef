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

from ...core.errors import BatonError, Cancelled, InvalidRequest, Unavailable
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
    """One request on this engine. From `stamps` on: what its next output reports."""

    request: Request
    gateway: str
    deadline_s: float  # monotonic
    ticket: Ticket | None
    accepted_ns: int = 0  # monotonic
    stamps: list[node_pb2.NodeEvent] = field(default_factory=list)
    cached_tokens: int | None = None
    transfer: node_pb2.TransferInfo | None = None  # of its hand-off

    @property
    def key(self) -> str:
        return self.request.key

    @property
    def is_quiet(self) -> bool:
        """Whether the next output has nothing to report but its tokens."""
        return not self.stamps and self.cached_tokens is None and self.transfer is None


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


class RequestIO:
    """Used by the engine loop's thread only. `send_to` sends to a gateway, given its name."""

    def __init__(
        self,
        send_to: Callable[[str, node_pb2.NodeMessage], None],
        clock: Clock,
        node_name: str,
        vocab_size: int,
    ) -> None:
        self.node_name = node_name
        self.is_draining = False
        self._entries: dict[str, Entry] = {}
        self._deadlines: list[tuple[float, str]] = []  # heap; keys of closed entries are skipped
        self._tombstones = Tombstones(clock)
        self._send_to = send_to
        self._steps = defaultdict[str, _Step](_Step)  # by gateway
        self._clock = clock
        self._vocab_size = vocab_size
        self._step_began_ns = 0

    def accept(self, gateway: str, dispatch: node_pb2.Dispatch) -> Entry | None:
        """File a dispatch and its forks. None: rejected, which is reported to the gateway."""
        try:
            return self._open(gateway, dispatch)
        except BatonError as error:
            self._refuse(gateway, dispatch, error)
            return None

    def refuses_new(self, gateway: str, dispatch: node_pb2.Dispatch) -> bool:
        """Whether the engine drains: the dispatch is then rejected, which is reported."""
        if self.is_draining:
            self._refuse(gateway, dispatch, Unavailable(f"{self.node_name} is draining"))
        return self.is_draining

    def _refuse(self, gateway: str, dispatch: node_pb2.Dispatch, error: BatonError) -> None:
        log.info("refused %s/%d: %s", dispatch.request_id, dispatch.attempt, error.message)
        for request_id in {dispatch.request_id, *dispatch.fork_request_ids}:
            output = node_pb2.RequestOutput(
                request_id=request_id, attempt=dispatch.attempt, error=codec.error_to_wire(error)
            )
            self._steps[gateway].outputs.append(output)

    def _open(self, gateway: str, dispatch: node_pb2.Dispatch) -> Entry:
        request = codec.request_from_wire(dispatch)
        known = np.frombuffer(dispatch.prompt_token_ids + dispatch.output_token_ids, "<u4")
        if known.max(initial=0) >= self._vocab_size:
            raise InvalidRequest(f"a token id is outside the vocabulary of {self._vocab_size}")
        deadline_s = self._clock.monotonic_s() + dispatch.deadline_remaining_us / 1e6
        ticket = None
        if dispatch.HasField("ticket"):
            ticket = Ticket(**codec.same_fields(dispatch.ticket, Ticket))
        now_ns = self._now_ns()
        entry = Entry(request, gateway, deadline_s, ticket, now_ns)
        forks = [Entry(fork, gateway, deadline_s, ticket, now_ns) for fork in request.forks]
        self.open(entry, *forks)
        return entry

    def open(self, *samples: Entry) -> None:
        """File a new request's samples, without those that have already ended here. Raises
        Cancelled if all have, InvalidRequest on a duplicate; nothing is filed then."""
        keys = [entry.key for entry in samples]
        for key in keys:
            if key in self._entries or keys.count(key) > 1:
                raise InvalidRequest(f"request {key} was dispatched twice")
        coming = [entry for entry in samples if not self._tombstones.get(entry.key)]
        if not coming:
            raise Cancelled(f"request {keys[0]} has already ended here")
        for entry in coming:
            self._entries[entry.key] = entry
            heapq.heappush(self._deadlines, (entry.deadline_s, entry.key))

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def get(self, key: str) -> Entry | None:
        return self._entries.get(key)

    @property
    def num_with_ticket(self) -> int:
        return sum(entry.ticket is not None for entry in self._entries.values())

    def knows(self, token_ids: Iterable[int]) -> bool:
        """Whether all are in the vocabulary."""
        return all(0 <= token_id < self._vocab_size for token_id in token_ids)

    def stamp(self, entry: Entry, event: Event, at_ns: int | None = None) -> None:
        """Record `event`, now or at the given time, for the request's next output."""
        at_ns = self._now_ns() if at_ns is None else at_ns
        entry.stamps.append(node_pb2.NodeEvent(event=event.value, monotonic_ns=at_ns))

    def begin_step(self) -> None:
        """A step is about to run: requests that start in it start now, but are reported later."""
        self._step_began_ns = self._now_ns()

    def stamp_started(self, entry: Entry, event: Event) -> None:
        """Record `event` at the begin of the step, or at the dispatch if that came later."""
        self.stamp(entry, event, max(self._step_began_ns, entry.accepted_ns))

    def _now_ns(self) -> int:
        return int(self._clock.monotonic_s() * 1e9)

    def queue_output(self, entry: Entry) -> node_pb2.RequestOutput:
        """Queue an output with the entry's pending stamps; the caller may add to it."""
        output = node_pb2.RequestOutput(
            request_id=entry.request.request_id,
            attempt=entry.request.attempt,
            events=entry.stamps,
            cached_tokens=entry.cached_tokens,
            transfer=entry.transfer,
        )
        entry.stamps.clear()
        entry.cached_tokens = entry.transfer = None
        self._steps[entry.gateway].outputs.append(output)
        return output

    def emit(self, entry: Entry, token: TokenOutput) -> None:
        """Queue one token, with the entry's pending stamps."""
        request = entry.request
        if token.finish_reason is None and request.sampling.logprobs is None and entry.is_quiet:
            plain = (request.request_id, request.attempt, token.index, token.token_id)
            self._steps[entry.gateway].tokens.append(plain)
            return
        output = self.queue_output(entry)
        output.first_index = token.index
        output.token_ids.append(token.token_id)
        output.finish_reason = codec.FINISH_TO_WIRE[token.finish_reason]
        if request.sampling.logprobs is not None:
            logprobs = TokenLogprobs(token.logprob, token.top)
            output.logprobs.append(codec.logprobs_to_wire(logprobs))

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
        if entry := self._entries.get(prompt.key):
            output = self.queue_output(entry)
            output.first_prompt_index = prompt.first_index
            output.prompt_logprobs.extend(map(codec.logprobs_to_wire, prompt.logprobs))

    def end(self, key: str, error: BatonError | None) -> Entry | None:
        """Close a request, report `error` if given, and leave a tombstone, also for a key that was
        never dispatched. None: the request was not open."""
        self._tombstones.add(key, _OVER)
        entry = self._entries.pop(key, None)
        if entry is not None and error is not None:
            if not isinstance(error, Cancelled):
                log.info("failed %s: %s", key, error.message)
            self.queue_output(entry).error.CopyFrom(codec.error_to_wire(error))
        return entry

    def forget_gateway(self, gateway: str) -> list[str]:
        """Drop the gateway's outputs; returns the keys of its open requests."""
        self._steps.pop(gateway, None)
        return [key for key, entry in self._entries.items() if entry.gateway == gateway]

    def overdue(self) -> list[str]:
        """Keys whose deadline has passed. Also removes old tombstones."""
        now = self._clock.monotonic_s()
        self._tombstones.purge()
        keys = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, key = heapq.heappop(self._deadlines)
            if key in self._entries:
                keys.append(key)
        return keys

    def next_deadline_s(self) -> float:
        """The earliest deadline of an open request (monotonic); inf: none."""
        while self._deadlines and self._deadlines[0][1] not in self._entries:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf
