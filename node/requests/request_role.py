"""A role: what an engine does with dispatches, cancels, and the results of a step.

    Dispatch ─► filed ─► no ticket: engine.add, one a sample    step ─► stamps, logprobs, tokens
                    └──► ticket: _open_handoff                  Cancel, loss, error ─► end

A request that can fetch its prefix from another engine waits for that first. Everything runs on the
engine loop's thread; nothing blocks. This is what both roles have in common;
`prefill_node/role.py` and `decode_node/role.py` are the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ...core.errors import BatonError, Cancelled, DeadlineExceeded, PromiseRefused
from ...core.ports import Clock
from ...core.request.request import Request, Ticket
from ...core.request.timeline import Event
from ...core.request.token_ids import BlockHash
from ...engine.engine import Engine
from ...engine.scheduling.outputs import StepOutput, TokenOutput
from ...proto.v1 import node_pb2
from ..peers.peers import Peers
from .request_io import Entry, RequestIO
from .trials import Trials


@dataclass(slots=True)
class Handoff:
    """This engine's end of a hand-off. `samples` share it: the dispatch's request and its forks."""

    ticket: Ticket
    samples: Sequence[Request]
    # At the source, from Offered to ReleaseBlocks.
    num_offered_blocks: int = 0
    is_first_token_out: bool = False
    # At the puller, until its KV is here.
    block_hashes: Sequence[BlockHash] = ()  # of the known tokens' full blocks
    reserved_s: float | None = None  # when it got its blocks: the begin of a hand-off's time


class EngineRole(ABC):
    """An error of one request ends that request and is not raised. For an unexpected exception the
    loop calls `end`."""

    is_source: bool  # of hand-offs: computes prompts; otherwise decodes

    def __init__(self, engine: Engine, requests: RequestIO, peers: Peers, clock: Clock) -> None:
        self._engine, self._requests, self._peers, self._clock = engine, requests, peers, clock
        self._prefixes = peers.prefixes
        self._trials = Trials(requests, engine.num_outputs)
        self._handoffs: dict[str, Handoff] = {}  # open ones, by the key of the first sample
        self.counts = node_pb2.Counters()  # of hand-offs, since the engine's incarnation began

    def dispatch(self, gateway: str, dispatch: node_pb2.Dispatch) -> None:
        try:
            entry = self._requests.accept(gateway, dispatch)
        except BatonError as error:
            self._requests.refuse(gateway, dispatch, error)
            return
        begin = partial(self._begin, entry)
        try:
            self._check(entry)
            source = entry.request.prefix_source if self._has_prompt(entry) else None
            if source is None or not self._prefixes.begin(entry.request, source, begin):
                begin()
        except BatonError as error:
            self._fail_all(entry.samples, error)

    def _check(self, entry: Entry) -> None:
        """Raises BatonError if this engine cannot accept the request now."""
        if entry.request.is_on_trial:
            self._trials.admit(entry)
        promise, is_whole = self._engine.promise, entry.ticket is None
        decodes = is_whole or not self.is_source
        if promise.tbt_target_s is not None and entry.request.may_refuse and decodes:
            if is_whole and not promise.is_promising:
                raise PromiseRefused("this engine has no promise at present")
            promise.check(entry.request, self.num_coming)

    def _has_prompt(self, entry: Entry) -> bool:
        """Whether its prompt is computed here; otherwise its KV is pulled."""
        return self.is_source or entry.ticket is None

    def _begin(self, entry: Entry) -> None:
        """Start a request after its prefix has been fetched, or will not be."""
        try:
            if entry.ticket is not None:
                self._open_handoff(entry, entry.ticket)
            elif not entry.request.sampling.use_beam_search:
                for sample in filter(self._is_open, entry.samples):
                    self._engine.add(replace(sample, fork_ids=()))
            elif any(map(self._is_open, entry.samples)):
                self._engine.add(entry.request)  # one search for all samples
                self._abort_ended(entry.samples)
        except BatonError as error:
            self._fail_all(entry.samples, error)

    def _abort_ended(self, samples: Sequence[Request]) -> None:
        """Take the samples that have ended out of a beam search that has just begun."""
        for sample in samples:
            if not self._is_open(sample):
                self._engine.abort(sample.key)

    @property
    def num_coming(self) -> int:
        """Sequences that are accepted but not yet in the engine."""
        return sum(request.num_sequences for request in self._prefixes.requests)

    def end(self, key: str, error: BatonError | None) -> None:
        """End a request in any state and report `error` to its gateway; None: nothing to report.
        Unknown keys leave a tombstone."""
        entry = self._requests.end(key, error)
        if entry is not None:  # else it has ended, and a copy may still write to its blocks
            handoff = self._handoff_of(entry)
            if handoff is None:
                self._engine.abort(key)
            elif not self._is_wanted(handoff):
                self._cancel_handoff(handoff, error or Cancelled("the request was cancelled"))
        self._prefixes.forget(key, self._requests.entries)

    def _fail_all(self, samples: Sequence[Request], error: BatonError) -> None:
        for sample in samples:
            self.end(sample.key, error)

    def _is_open(self, sample: Request) -> bool:
        return sample.key in self._requests.entries

    def _is_wanted(self, handoff: Handoff) -> bool:
        """Whether any of its samples is still open."""
        return any(map(self._is_open, handoff.samples))

    def _handoff_of(self, entry: Entry) -> Handoff | None:
        """The open hand-off of a request, if it has one."""
        handoff = self._handoffs.get(entry.samples[0].key)
        return handoff if handoff is not None and handoff.samples is entry.samples else None

    def after_step(self, output: StepOutput) -> None:
        """Report a step's results: started requests, prompt logprobs, tokens, failures."""
        entries = self._requests.entries
        for key, cached_tokens in output.started.items():
            if entry := entries.get(key):
                self._started(entry, cached_tokens)
        for prompt in output.prompt_logprobs:
            self._requests.emit_prompt(prompt)
        for token in output.tokens:
            if entry := entries.get(token.key):
                self._on_token(entry, token)
        for chunk in output.chunks:
            is_of_beams = chunk.sampled is not None and chunk.sampled.candidates
            if is_of_beams and (entry := entries.get(chunk.key)):
                self._requests.queue_output(entry)  # reports that its prompt is computed
        for beam in output.beams:
            if entry := entries.get(beam.key):
                self._requests.emit_beam(entry, beam)
                self._requests.end(beam.key, None)
        for key, error in output.failed:
            self.end(key, error)

    def _started(self, entry: Entry, cached_tokens: int) -> None:
        if not self._has_prompt(entry):
            self._requests.stamp_started(entry, Event.DECODE_STARTED)
            if self._engine.promise.tbt_target_s is not None:
                self._requests.queue_output(entry)  # its first token is held until then
            return
        sharing = entry.samples if entry.ticket is not None else (entry.request,)
        for each in filter(None, (self._requests.entries.get(one.key) for one in sharing)):
            self._requests.stamp(each, Event.PREFILL_QUEUED, each.accepted_ns)
            self._requests.stamp_started(each, Event.PREFILL_STARTED)
            each.next_output.cached_tokens = cached_tokens

    def _on_token(self, entry: Entry, token: TokenOutput) -> None:
        num_known = len(entry.request.output_token_ids)
        if token.index == num_known:
            self._requests.stamp(entry, Event.FIRST_TOKEN)
        elif token.index == num_known + 1 and entry.ticket is not None:
            self._requests.stamp(entry, Event.FIRST_DECODE_ENDED)
        self._requests.emit(entry, token)
        if token.finish_reason is not None:
            self._requests.end(token.key, None)

    def tick(self) -> float:
        """Expire what is due; returns the next deadline (monotonic); inf: none."""
        for key in self._requests.overdue():
            self.end(key, DeadlineExceeded("the request's deadline passed"))
        return min(self._peers.tick(), self._requests.next_deadline_s())

    def pending(self) -> Iterable[Request]:
        """Requests, each with its forks, that have no blocks yet and are not in the engine."""
        return self._prefixes.requests

    def is_idle(self) -> bool:
        """Whether there is no request, lease or pull: the process may exit."""
        return not (self._requests.entries or self._handoffs) and self._peers.is_idle

    @abstractmethod
    def _open_handoff(self, entry: Entry, ticket: Ticket) -> None:
        """Open this engine's end of a request's hand-off. Raises BatonError: the request and its
        forks fail."""

    @abstractmethod
    def _cancel_handoff(self, handoff: Handoff, error: BatonError) -> None:
        """All samples have ended, the last one with `error`: give the hand-off up."""
