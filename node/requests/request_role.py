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
from typing import Generic, TypeVar

from ...core.errors import BatonError, Cancelled, DeadlineExceeded, PromiseRefused
from ...core.ports import Clock
from ...core.request.request import Request, Ticket
from ...core.request.timeline import Event
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


H = TypeVar("H", bound=Handoff)


class EngineRole(ABC, Generic[H]):
    """An error of one request ends that request and is not raised. For an unexpected exception the
    loop calls `end`."""

    is_source: bool  # of hand-offs: computes prompts; otherwise decodes

    def __init__(self, engine: Engine, requests: RequestIO, peers: Peers, clock: Clock) -> None:
        self._engine, self._requests, self._peers, self._clock = engine, requests, peers, clock
        self._prefixes = peers.prefixes
        self._trials = Trials(requests, engine.num_outputs)
        self._handoffs: dict[str, H] = {}  # open ones, by the key of each sample
        self.counts = node_pb2.Counters()  # of hand-offs, since the engine's incarnation began

    def dispatch(self, gateway: str, dispatch: node_pb2.Dispatch) -> None:
        entry = self._requests.accept(gateway, dispatch)
        if entry is None:
            return
        samples = (entry.request, *entry.request.forks)
        begin = partial(self._begin, entry, samples)
        try:
            self._check(entry)
            source = entry.request.prefix_source if self._has_prompt(entry) else None
            if source is None or not self._prefixes.begin(entry.request, source, begin):
                begin()
        except BatonError as error:
            self._fail_all(samples, error)

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

    def _begin(self, entry: Entry, samples: Sequence[Request]) -> None:
        """Start a request after its prefix has been fetched, or will not be."""
        try:
            if entry.ticket is not None:
                self._open_handoff(entry, entry.ticket, samples)
            elif entry.request.sampling.use_beam_search:
                self._begin_search(entry, samples)
            else:
                for sample in filter(self._is_open, samples):
                    self._engine.add(replace(sample, fork_ids=()))
        except BatonError as error:
            self._fail_all(samples, error)

    def _begin_search(self, entry: Entry, samples: Sequence[Request]) -> None:
        """Start one beam search for all samples that are still open."""
        over = [sample for sample in samples if not self._is_open(sample)]
        if len(over) < len(samples):
            self._engine.add(entry.request)
            for sample in over:
                self._engine.abort(sample.key)

    @property
    def num_coming(self) -> int:
        """Sequences that are accepted but not yet in the engine."""
        return sum(request.num_sequences for request in self._prefixes.requests)

    def end(self, key: str, error: BatonError | None) -> None:
        """End a request in any state and report `error` to its gateway; None: nothing to report.
        Unknown keys leave a tombstone."""
        entry = self._requests.end(key, error)
        handoff = self._handoffs.get(key)
        if handoff is None:
            if entry is not None:  # else it has ended, and a copy may still write to its blocks
                self._engine.abort(key)
        elif not self._is_wanted(handoff):
            self._cancel_handoff(handoff, error or Cancelled("the request was cancelled"))
        self._prefixes.forget(key, self._requests)

    def _fail_all(self, samples: Sequence[Request], error: BatonError) -> None:
        for sample in samples:
            self.end(sample.key, error)

    def _is_open(self, sample: Request) -> bool:
        return sample.key in self._requests

    def _is_wanted(self, handoff: H) -> bool:
        """Whether any of its samples is still open."""
        return any(map(self._is_open, handoff.samples))

    def _remove_handoff(self, handoff: H) -> None:
        for sample in handoff.samples:
            del self._handoffs[sample.key]

    def after_step(self, output: StepOutput) -> None:
        """Report a step's results: started requests, prompt logprobs, tokens, failures."""
        for key, cached_tokens in output.started.items():
            if entry := self._requests.get(key):
                if not self._has_prompt(entry):
                    self._requests.stamp_started(entry, Event.DECODE_STARTED)
                    if self._engine.promise.tbt_target_s is not None:
                        self._requests.queue_output(entry)  # its first token is held until then
                    continue
                self._prompt_started(entry, cached_tokens)
                for fork in entry.request.forks if entry.ticket is not None else ():
                    if each := self._requests.get(fork.key):  # shares the prompt
                        self._prompt_started(each, cached_tokens)
        for prompt in output.prompt_logprobs:
            self._requests.emit_prompt(prompt)
        for token in output.tokens:
            self._on_token(token)
        for chunk in output.chunks:
            is_of_beams = chunk.sampled is not None and chunk.sampled.candidates
            if is_of_beams and (entry := self._requests.get(chunk.key)):
                self._requests.queue_output(entry)  # reports that its prompt is computed
        for beam in output.beams:
            if entry := self._requests.get(beam.key):
                self._requests.emit_beam(entry, beam)
                self._requests.end(beam.key, None)
        for key, error in output.failed:
            self.end(key, error)

    def _prompt_started(self, entry: Entry, cached_tokens: int) -> None:
        self._requests.stamp(entry, Event.PREFILL_QUEUED, entry.accepted_ns)
        self._requests.stamp_started(entry, Event.PREFILL_STARTED)
        entry.cached_tokens = cached_tokens

    def _on_token(self, token: TokenOutput) -> None:
        entry = self._requests.get(token.key)
        if entry is None:
            return
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
        return not (self._requests or self._handoffs) and self._peers.is_idle

    @abstractmethod
    def _open_handoff(self, entry: Entry, ticket: Ticket, samples: Sequence[Request]) -> None:
        """Open this engine's end of a request's hand-off. Raises BatonError: the request and its
        forks fail."""

    @abstractmethod
    def _cancel_handoff(self, handoff: H, error: BatonError) -> None:
        """All samples have ended, the last one with `error`: give the hand-off up."""
