"""A role: a policy over one engine, what to do with dispatches, peers and the results of a step.

    Dispatch ─► filed ─► local: engine.add, one a sample    step ─► stamps, prompt's scores, tokens
                    └──► with a ticket: _take_up            Cancel, loss, error ─► _end

A prompt whose prefix another engine has waits for that first. All of it runs on the engine loop's
thread and none of it blocks. Here is what the roles have in common; `prefill_node/role.py` and
`decode_node/role.py` are the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...core.errors import BatonError, DeadlineExceeded, InvalidRequest, PromiseRefused
from ...core.ports import Clock
from ...core.request.request import Request, Ticket
from ...core.request.timeline import Event
from ...engine.engine import Engine
from ...engine.scheduling.outputs import StepOutput, TokenOutput
from ...kv_transfer.protocol.events import Tick
from ...proto.v1 import node_pb2
from ..channels.engine_channels import Link
from ..channels.mailboxes import Kind, Outbox
from ..peers.puller_side import PullerSide
from ..peers.source_side import SourceSide
from .request_io import Entry, RequestIO
from .trials import Trials


@dataclass(frozen=True, slots=True)
class Vitals:
    """The role's part of a heartbeat: what the engine itself cannot know."""

    num_pending: int = 0  # requests that the engine has not seen yet
    pending: tuple[Request, ...] = ()  # those of them that have no blocks, each with its forks
    links: tuple[node_pb2.PeerLink, ...] = ()
    counters: node_pb2.Counters = field(default_factory=node_pb2.Counters)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What a role is built from: everything that its engine process has made.

    `block_bytes`: of all ranks.
    """

    engine: Engine
    requests: RequestIO
    outbox: Outbox
    source: SourceSide
    puller: PullerSide
    clock: Clock
    fingerprint: str
    block_bytes: int


class EngineRole(ABC):
    """Never raises because of one request: it fails that request. What it raises all the same, the
    loop turns into `fail`."""

    ticket_work: node_pb2.Work  # that this role does with a ticket

    def __init__(self, parts: EngineParts) -> None:
        self._engine = parts.engine
        self._request_io = parts.requests
        self._source = parts.source
        self._puller = parts.puller
        self._clock = parts.clock
        self._trials = Trials(parts.requests.book, parts.engine.num_outputs)

    def dispatch(self, gateway: str, dispatch: node_pb2.Dispatch) -> None:
        entry = self._request_io.accept(gateway, dispatch)
        if entry is None:
            return
        samples = (entry.request, *entry.request.forks)
        try:
            self._admit(entry, samples, dispatch.work)
        except BatonError as error:
            self._fail_all(samples, error)

    def _admit(self, entry: Entry, samples: Sequence[Request], work: node_pb2.Work) -> None:
        if entry.request.is_on_trial:
            self._trials.admit(entry)
        promise, may_refuse = self._engine.promise, entry.request.may_refuse
        if promise.tbt_target_s is not None and may_refuse and work != node_pb2.WORK_PREFILL:
            if work == node_pb2.WORK_LOCAL and not promise.is_promising:
                raise PromiseRefused("this engine promises nothing now")
            promise.check(entry.request, self._num_coming)
        is_half = work == self.ticket_work and entry.ticket is not None
        if work != node_pb2.WORK_LOCAL and not is_half:
            name = node_pb2.Work.Name(self.ticket_work)
            raise InvalidRequest(f"this engine takes WORK_LOCAL, or {name} with a ticket")
        has_prompt = work != node_pb2.WORK_DECODE
        if has_prompt and self._puller.fetch(
            entry.request, lambda: self._begin_behind_prefix(entry, samples)
        ):
            return
        self._begin_work(entry, samples)

    def _begin_behind_prefix(self, entry: Entry, samples: Sequence[Request]) -> None:
        """The prefix is here, or will not come."""
        try:
            self._begin_work(entry, samples)
        except BatonError as error:
            self._fail_all(samples, error)

    def _begin_work(self, entry: Entry, samples: Sequence[Request]) -> None:
        if entry.ticket is not None:
            self._take_up(entry, entry.ticket, samples)
            return
        if entry.request.sampling.use_beam_search:
            self._begin_search(entry, samples)
            return
        for sample in samples:
            if self._request_io.book.get(sample.key) is not None:
                self._engine.add(replace(sample, fork_ids=()))

    def _begin_search(self, entry: Entry, samples: Sequence[Request]) -> None:
        """One of all samples that are not over."""
        is_over = [self._request_io.book.get(sample.key) is None for sample in samples]
        if all(is_over):
            return
        self._engine.add(entry.request)
        for sample, over in zip(samples, is_over, strict=True):
            if over:
                self._engine.abort(sample.key)

    @property
    def _num_coming(self) -> int:
        """Requests that will decode here, and that the engine does not have yet."""
        return len(self._puller.fetches.requests)

    def cancel(self, key: str) -> None:
        """The gateway wants no more of it; not answered. Unknown keys leave a tombstone."""
        self._end(key, None)
        self._puller.forget(key, self._is_open)

    def fail(self, key: str, error: BatonError) -> None:
        """End a request in any state and report to its gateway why."""
        self._end(key, error)
        self._puller.forget(key, self._is_open)

    def _fail_all(self, samples: Sequence[Request], error: BatonError) -> None:
        for sample in samples:
            self.fail(sample.key, error)

    def _is_open(self, key: str) -> bool:
        return self._request_io.book.get(key) is not None

    def gateway_lost(self, gateway: str) -> None:
        for key in self._request_io.forget_gateway(gateway):
            self.cancel(key)

    def side_of(self, link: Link) -> SourceSide | PullerSide:
        """Whom a peer's link, its messages and its end are for."""
        return self._puller if link.kind is Kind.SOURCE else self._source

    @abstractmethod
    def after_step(self, output: StepOutput) -> None: ...

    def _report_step(self, output: StepOutput) -> None:
        """What a step brought for gateways: what began in it, prompts' scores, tokens."""
        for key, cached_tokens in output.started.items():
            if entry := self._request_io.book.get(key):
                event = self._start_of(entry)
                if event is Event.PREFILL_STARTED:
                    self._request_io.stamp_accepted(entry, Event.PREFILL_QUEUED)
                    entry.cached_tokens = cached_tokens
                self._request_io.stamp_started(entry, event)
        for prompt in output.prompt_logprobs:
            self._request_io.emit_prompt(prompt)
        for token in output.tokens:
            self._on_token(token)
        for chunk in output.chunks:
            if chunk.first is not None and (entry := self._request_io.book.get(chunk.key)):
                self._request_io.emit_progress(entry)  # its prompt is computed
        for beam in output.beams:
            if entry := self._request_io.book.get(beam.key):
                self._request_io.emit_beam(entry, beam)
                self._request_io.end(beam.key, None)

    def tick(self) -> float | None:
        """Expire what is due; returns the next deadline on the monotonic clock."""
        book = self._request_io.book
        for key in book.overdue():
            self.fail(key, DeadlineExceeded("the request's deadline passed"))
        for side in (self._source, self._puller):
            due_s = side.machine.next_deadline()
            if due_s is not None and due_s <= self._clock.monotonic_s():
                side.feed(Tick())
        sides = (self._source.machine.next_deadline(), self._puller.machine.next_deadline())
        deadlines = (*sides, book.next_deadline_s())
        return min((d for d in deadlines if d is not None), default=None)

    def poll(self) -> bool:
        """Called often, also while a step is on the device: looks at what changes without a
        message.

        Returns whether there is something to watch: then it is called again within a moment.
        Begins the pulls of what sources have finished.
        """
        return self._puller.windows.poll()

    @abstractmethod
    def vitals(self) -> Vitals: ...

    def _vitals(self, counters: node_pb2.Counters, handed: Sequence[Request] = ()) -> Vitals:
        """With what waits for a prefix. `handed`: what waits for KV, of which `counters` are."""
        counters.MergeFrom(self._puller.fetches.counts)
        pending = (*handed, *self._puller.fetches.requests)
        return Vitals(
            num_pending=sum(request.num_sequences for request in pending),
            pending=pending,
            links=self._puller.windows.links(),
            counters=counters,
        )

    def is_idle(self) -> bool:
        """No request, no lease, no pull: the process may end without loss."""
        return not self._request_io.book and self._source.is_idle and self._puller.is_idle

    def ledger(self) -> dict[str, object]:
        """Blocks, requests and transfers as JSON: what `baton fsck` and the tests look at."""
        name = {"node": self._request_io.node_name}
        return (
            name
            | self._engine.ledger()
            | _both(self._source.machine.ledger(), self._puller.machine.ledger())
        )

    @abstractmethod
    def _take_up(self, entry: Entry, ticket: Ticket, samples: Sequence[Request]) -> None:
        """Take up the hand-off's end of a request. Raises BatonError: it fails, with its forks."""

    @abstractmethod
    def _end(self, key: str, error: BatonError | None) -> None:
        """End a request in any state; with an error it is reported to its gateway."""

    @abstractmethod
    def _start_of(self, entry: Entry) -> Event:
        """What it is called when the engine begins with a request."""

    @abstractmethod
    def _on_token(self, token: TokenOutput) -> None: ...


def _both(source: dict[str, Any], puller: dict[str, Any]) -> dict[str, object]:
    """The ledgers of both sides: their transfers, their peers, and how many are over."""
    return {name: source[name] | puller[name] for name in ("transfers", "peers")} | {
        "num_tombstones": source["num_tombstones"] + puller["num_tombstones"]
    }
