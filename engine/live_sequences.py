"""The sequences of an engine by their requests' keys: how each comes to be, what a step's tokens do
to it (it goes on, forks, is held or ends), and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from collections.abc import Sequence as Row
from functools import partial
from math import isnan

from ..core.errors import BatonError, EngineFailed, InvalidRequest
from ..core.request.request import FinishReason, Request
from ..core.request.token_ids import BlockHash, block_hashes, root_hash
from .beams.beam_search import BeamSearch, BeamSearches
from .execution.batch import Runner, SampledToken
from .execution.constraints import Constraints, Mask, within
from .kv.limits import EngineLimits
from .lora.adapter_room import AdapterRoom, refuse_adapter
from .scheduling.block_tables import BlockTables
from .scheduling.outputs import ChunkOutput, StepOutput, TokenOutput
from .scheduling.schedule import Schedule
from .scheduling.scheduler import Scheduler
from .scheduling.sequence import Sequence, SequenceState

_token_output = partial(tuple.__new__, TokenOutput)  # a step makes hundreds


class LiveSequences:
    """`on_end(num_outputs)`: one ended by itself."""

    def __init__(
        self,
        runner: Runner,
        limits: EngineLimits,
        scheduler: Scheduler,
        tables: BlockTables,
        adapters: AdapterRoom[Sequence] | None,
        constraints: Constraints | None,
        *,
        fingerprint: str,
        eos_token_ids: Collection[int],
        on_end: Callable[[int], None],
    ) -> None:
        self.by_key: dict[str, Sequence] = {}
        self.eos_token_ids = frozenset(eos_token_ids)
        self.beams = BeamSearches(scheduler, self.by_key, runner, eos_token_ids, on_end)
        self._runner = runner
        self._limits = limits
        self._scheduler = scheduler
        self._tables = tables
        self._adapters = adapters
        self._constraints = constraints
        self._fingerprint = fingerprint
        self._on_end = on_end
        self._num_arrivals = 0

    def create(self, request: Request, state: SequenceState, *, is_held: bool = False) -> Sequence:
        """A new one, to be `keep`t once it has its place. Raises InvalidRequest and its kin."""
        if request.key in self.by_key:
            raise InvalidRequest(f"{request.key} is here already")
        self._limits.check(request)
        if request.adapter is not None:
            if self._adapters is None:
                raise refuse_adapter()
            self._adapters.check(request.adapter)
            if request.sampling.use_beam_search:
                raise InvalidRequest("beam search with a LoRA adapter", "use_beam_search")
        self._num_arrivals += 1
        root = self._root_of(request)
        sequence = Sequence(request, self._num_arrivals, is_held, root, state=state)
        if request.sampling.use_beam_search:
            if not is_held:
                self._limits.check_beams(request)
            self.beams.begin(sequence, self._limits.max_outputs(request))
        constraint = request.sampling.constraint
        if constraint is not None:
            if self._constraints is None:
                raise InvalidRequest("constraints are not taken", code="unsupported_parameter")
            sequence.constrained = self._constraints.begin(constraint)
        if state is SequenceState.RESERVED:  # told where they are computed
            sequence.next_prompt_logprob = len(request.prompt_token_ids)
        return sequence

    def _root_of(self, request: Request) -> BlockHash:
        return root_hash(self._fingerprint, request.cache_salt, request.adapter_digest)

    def block_hashes(self, request: Request, num_tokens: int | None) -> list[BlockHash]:
        """See Engine."""
        tokens = request.known_token_ids[:num_tokens]
        return block_hashes(self._root_of(request), tokens, self._limits.block_size)

    def keep(self, sequence: Sequence) -> None:
        """It has its place: found by its key from here on, or those of its search."""
        self.by_key[sequence.key] = sequence
        if sequence.group is not None:
            self.beams.file(sequence)

    def keys_of(self, sequence: Sequence) -> tuple[str, ...]:
        """Of all requests that a sequence is for."""
        search = self._search_of(sequence)
        return (sequence.key,) if search is None else search.keys

    def _search_of(self, sequence: Sequence) -> BeamSearch | None:
        return None if sequence.group is None else self.beams.of(sequence)

    def fork(self, parent: Sequence, request: Request, token_id: int) -> None:
        """A new sequence behind all of the parent's known tokens."""
        child = Sequence(request, parent.arrival, False, parent.root_hash)
        child.token_ids.append(token_id)
        child.has_started = parent.has_started
        child.next_prompt_logprob = len(request.prompt_token_ids)
        if parent.constrained is not None:
            child.constrained = parent.constrained.another()
        if request.adapter is not None and self._adapters is not None:
            has_slot = self._adapters.take(child)
            assert has_slot, "its parent's"
        assert child.key not in self.by_key and child.num_tokens == parent.num_tokens + 1
        self.by_key[child.key] = child
        copies = self._scheduler.forks.fork(parent, child)
        if copies:
            self._runner.copy_blocks(copies)

    def masks(self, schedule: Schedule, output: StepOutput) -> Mapping[Sequence, Row[Mask]]:
        """Which tokens those may be given that may not have all; what cannot go on ends here, and
        drafts that a grammar cannot be followed behind are left out."""
        found: dict[Sequence, Row[Mask]] = {}
        sampled = [*schedule.clear, *(one.sequence for one in schedule.others if one.samples)]
        masked = [one for one in sampled if one.is_masked]
        if not masked:
            return found
        for one in masked:
            if one.allowed is not None:
                found[one] = [one.allowed] * (1 + len(one.draft_token_ids))
        samples = [(one, one.constrained) for one in masked if one.constrained is not None]
        if self._constraints is None or not samples:
            return found
        masks = self._constraints.masks(
            [(c, s.output_token_ids, s.draft_token_ids) for s, c in samples]
        )
        for (sequence, _), mask in zip(samples, masks, strict=True):
            if sequence.allowed is not None and not isinstance(mask, InvalidRequest):
                mask = within(mask, sequence.allowed)
            if isinstance(mask, InvalidRequest):
                self.fail(sequence, mask, output)
                continue
            found[sequence] = mask
            if len(mask) <= len(sequence.draft_token_ids):
                sequence.draft_token_ids = sequence.draft_token_ids[: len(mask) - 1]
                schedule.fit_drafts()
        return found

    # -- what a step's tokens do ------------------------------------------------------------------

    def advance_clear(
        self,
        clear: Row[Sequence],
        sampled: Row[SampledToken | None],
        here: Container[Sequence],
        output: StepOutput,
    ) -> None:
        """As `advance`, of the decodes that were clear, as far as they are still `here`: the tokens
        of few are anything but the next."""
        eos, store, tell = self.eos_token_ids, self._tables.store, output.tokens.append
        for sequence, token in zip(clear, sampled, strict=True):
            if sequence not in here:
                continue
            assert token is not None
            token_id, logprob, top, *_ = token
            if token_id in eos or sequence.sampling.stop_token_ids or isnan(logprob):
                self.advance(sequence, 1, token, output)
                continue
            token_ids = sequence.token_ids
            index = len(token_ids) - sequence.num_prompt_tokens
            tell(_token_output((sequence.key, index, token_id, logprob, None, top)))
            token_ids.append(token_id)
            sequence.num_awaited_tokens -= 1
            sequence.num_computed_tokens += 1
            store(sequence)

    def advance(
        self,
        sequence: Sequence,
        num_tokens: int,
        sampled: SampledToken | None,
        output: StepOutput,
    ) -> None:
        """Account for one sequence's part of a completed step: so many of its tokens are computed,
        and the token behind them is sampled, if any is."""
        if sampled is not None and isnan(sampled.logprob):
            self.fail(sequence, EngineFailed("the model's logits are not numbers"), output)
            return
        sequence.num_computed_tokens += num_tokens
        self._tables.store(sequence)
        goes_on, first = True, None
        if sampled is not None and sequence.num_candidates:
            if sequence.is_held:
                self.hold(sequence)
            if sequence.is_held or self.beams.found(sequence, sampled):
                first = sampled
        elif sampled is not None:
            goes_on = self._append(sequence, sampled, output)
        if first is not None or (sequence.is_held and goes_on):
            num_tokens, is_last = sequence.num_computed_tokens, sampled is not None
            output.chunks.append(ChunkOutput(sequence.key, num_tokens, is_last, first))

    def _append(self, sequence: Sequence, sampled: SampledToken, output: StepOutput) -> bool:
        """Output a token, and with the first one those of its forks; whether it goes on, or its KV
        is held for any of them."""
        is_held, index = sequence.is_held, sequence.num_outputs
        sequence.num_awaited_tokens -= not is_held
        goes_on = self._tell(sequence.request, index, sampled, output)
        for fork, token in zip(sequence.forks, sampled.forks, strict=True):
            if self._tell(fork, index, token, output):
                if is_held:
                    goes_on = True
                else:
                    self.fork(sequence, fork, token.token_id)
        sequence.forks = ()
        sequence.token_ids.append(sampled.token_id)
        if not goes_on:
            self._on_end(sequence.num_outputs)
            self.end(sequence)
        elif is_held:
            self.hold(sequence)
        return goes_on

    def _tell(
        self, request: Request, index: int, sampled: SampledToken, output: StepOutput
    ) -> bool:
        """Output a request's token; whether the request goes on behind it."""
        token_id, logprob, top, *_ = sampled
        reason = self.finish_reason(request, token_id, index + 1)
        output.tokens.append(TokenOutput(request.key, index, token_id, logprob, reason, top))
        return reason is None

    # -- how it ends ------------------------------------------------------------------------------

    def finish_reason(
        self, request: Request, token_id: int, num_outputs: int
    ) -> FinishReason | None:
        """Why the request ends with this token, output number `num_outputs` (from 1); None: it goes
        on. Stop strings are not judged here: the gateway knows text."""
        sampling = request.sampling
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        if token_id in self.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP
        is_full = len(request.prompt_token_ids) + num_outputs >= self._limits.max_model_len
        return FinishReason.LENGTH if is_full or num_outputs >= sampling.max_tokens else None

    def end(self, sequence: Sequence) -> None:
        """Give back all that it has, and its search."""
        if (search := self._search_of(sequence)) is not None:
            self.beams.end(search)
            return
        del self.by_key[sequence.key]
        if not self.leave_adapter(sequence):
            self._scheduler.remove(sequence)

    def hold(self, sequence: Sequence) -> None:
        """It is computed and keeps its KV: no step needs its adapter any more."""
        self._scheduler.queues.hold(sequence)
        self.leave_adapter(sequence)

    def leave_adapter(self, sequence: Sequence) -> bool:
        """It needs its adapter no more, which may let others begin. Whether it waited for it."""
        if self._adapters is None or sequence.request.adapter is None:
            return False
        was_parked = self._adapters.leave(sequence)
        self.unpark()
        return was_parked

    def unpark(self) -> None:
        """Let those begin that have a slot with their adapter now."""
        if self._adapters is not None:
            for other in self._adapters.unpark():
                self._scheduler.add(other)

    def fail(self, sequence: Sequence, error: BatonError, output: StepOutput) -> None:
        """End it with an error, if the scheduler has not ended it yet."""
        if (search := self._search_of(sequence)) is not None:
            self.beams.fail(search, error, output)
            return
        output.fail(sequence, error)
        del self.by_key[sequence.key]
        was_parked = self.leave_adapter(sequence)
        if sequence.state is not SequenceState.ENDED and not was_parked:
            self._scheduler.remove(sequence)
