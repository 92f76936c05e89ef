"""The sequences of an engine, by request key: how they are created (queued or forked), what the
tokens of a step change (a sequence continues, forks, is held or ends), and how they are removed.
Plans no step."""

from __future__ import annotations

from collections.abc import Collection, Container
from collections.abc import Sequence as Row
from functools import partial
from math import isnan

from ..core.errors import BatonError, EngineFailed, HandoffFailed, InvalidRequest
from ..core.request.request import FinishReason, Request
from ..core.request.token_ids import BlockHash, block_hashes, root_hash
from .beams.beam_search import BeamSearch, BeamSearches
from .engine_parts import EngineParts
from .execution.batch import SampledToken
from .kv.block_pool import BlockRefs, Reservation
from .lora.adapter_room import check_adapter
from .scheduling.forks import child_of
from .scheduling.outputs import ChunkOutput, StepOutput, TokenOutput
from .scheduling.sequence import Sequence, SequenceState

_token_output = partial(tuple.__new__, TokenOutput)  # a step makes hundreds


class LiveSequences:
    """The sequences of one engine; the base of Engine, which runs the steps."""

    def __init__(self, parts: EngineParts) -> None:
        self.limits = parts.limits
        self.adapters = parts.adapters
        self.by_key: dict[str, Sequence] = {}
        of_engine = (parts.scheduler, self.by_key, parts.runner, parts.eos_token_ids)
        self.beams = BeamSearches(*of_engine, parts.output_lengths.observe)
        self._parts = parts
        self._runner = parts.runner
        self._scheduler = parts.scheduler
        self._tables = parts.tables
        self._eos_token_ids = parts.eos_token_ids
        self._totals = parts.totals
        self._num_arrivals = 0

    # -- requests in ------------------------------------------------------------------------------

    def add(self, request: Request, *, hold: bool = False) -> None:
        """Queue a request; with `hold`, stop after its first token and keep its KV.

        If the first token ends the request, its blocks are released, held or not. The first tokens
        of its forks are output under the forks' keys; unless the request is held, each fork then
        continues as a request of its own. Before that, forks end with the request. A beam search
        outputs each of its requests whole, at its end; a held one outputs the candidates that a
        search elsewhere begins with. Raises InvalidRequest and related errors for a request that
        this engine can never serve.
        """
        self._queue(self._create(request, SequenceState.WAITING, is_held=hold))
        self._totals.num_prompts += 1

    def block_hashes(self, request: Request, num_tokens: int | None = None) -> list[BlockHash]:
        """Hashes of the full blocks of its known tokens, or of the first `num_tokens` of them."""
        tokens = request.known_token_ids[:num_tokens]
        return block_hashes(self._root_of(request), tokens, self.limits.block_size)

    def reserve(self, request: Request, block_hashes: Collection[BlockHash] = ()) -> None:
        """Queue a request whose KV is pulled from another engine; it waits for blocks (see
        `next_reservation`).

        `block_hashes`: of its first full blocks, if the caller has computed them. Raises the errors
        of `add`.
        """
        sequence = self._create(request, SequenceState.COMING)
        sequence.hashes = [*block_hashes]
        self._queue(sequence)

    def next_reservation(self) -> Reservation | None:
        """Allocate blocks for the next request of `reserve`: for its known tokens and one more.
        None if it does not fit now; call again after a step, a release or an abort."""
        sequence = self._scheduler.reserve()
        if sequence is None:
            return None
        return Reservation(
            sequence.key,
            tuple(sequence.block_ids),
            num_cached_blocks=sequence.num_stored_blocks,
            num_known_blocks=self.limits.blocks_for(sequence.num_tokens),
        )

    def lacks_drafts(self, reservation: Reservation, first: int | None) -> None:
        """Note, before `start`, from which block on the pulled KV lacks the draft model's."""
        self._tables.lacks_drafts(self.by_key[reservation.key], first)

    def start(self, reservation: Reservation, token_id: int, fork: Request | None = None) -> None:
        """Decode from `token_id` on, which follows the known tokens; their KV is in place.

        The token was streamed already and is not output again. Raises HandoffFailed if it ends the
        request, as there would have been nothing to hand over; the reservation is kept.

        With `fork`, which comes first, a further sample of the prompt starts instead: it shares the
        full blocks and copies a partial last one. Where there is no room, it waits and is
        recomputed like a preempted sequence.
        """
        sequence = self.by_key[reservation.key]
        request = fork or sequence.request
        num_outputs = len(request.output_token_ids) + 1
        if self._finish_reason(request, token_id, num_outputs) is not None:
            raise HandoffFailed(f"{request.key} ended with its first token: no hand-off")
        if fork is not None:
            self._fork(sequence, fork, token_id)
            return
        sequence.token_ids.append(token_id)
        sequence.forks = ()
        self._scheduler.start(sequence)

    # -- requests out -----------------------------------------------------------------------------

    def drop(self, reservation: Reservation) -> None:
        """Release a reservation, once no pull writes to its blocks; a second call does nothing."""
        sequence = self.by_key.get(reservation.key)
        if sequence is not None and sequence.state is SequenceState.RESERVED:
            self._end(sequence)

    def abort(self, key: str) -> None:
        """End a request, held or not, without an output. Unknown keys are ignored, and so are
        reservations until `drop`, as a pull may write to their blocks. A beam search ends with the
        last of its requests.

        If a step that touches its blocks is in flight, they stay fenced until that has completed.
        """
        search = self.beams.by_key.get(key)
        sequence = self.by_key.get(key) if search is None else search.members[0]
        if sequence is None or sequence.state is SequenceState.RESERVED:
            return
        if search is None:
            self._end(sequence)
        else:
            self.beams.abort(key)

    # -- creation ---------------------------------------------------------------------------------

    def _create(self, request: Request, state: SequenceState, *, is_held: bool = False) -> Sequence:
        """A new sequence that is not queued yet. Raises the errors of `add`."""
        if request.key in self.by_key:
            raise InvalidRequest(f"{request.key} is here already")
        self.limits.check(request)
        if request.adapter is not None:
            check_adapter(self.adapters, request, request.adapter)
        self._num_arrivals += 1
        root = self._root_of(request)
        sequence = Sequence(request, self._num_arrivals, is_held, root, state=state)
        if request.sampling.use_beam_search:
            self.beams.begin(sequence, self.limits)
        constraint = request.sampling.constraint
        if constraint is not None:
            if self._parts.constraints is None:
                raise InvalidRequest("constraints are not taken", code="unsupported_parameter")
            sequence.constrained = self._parts.constraints.begin(constraint)
        if state is SequenceState.COMING:  # the prefill engine reports them
            sequence.next_prompt_logprob = len(request.prompt_token_ids)
        return sequence

    def _root_of(self, request: Request) -> BlockHash:
        return root_hash(self._parts.fingerprint, request.cache_salt, request.adapter_digest)

    def _queue(self, sequence: Sequence) -> None:
        """File the sequence under its key, or the keys of its search, and let it wait for its
        adapter, then in the scheduler's queue."""
        self.by_key[sequence.key] = sequence
        if isinstance(sequence.group, BeamSearch):
            self.beams.file(sequence.group)
        adapter = sequence.request.adapter
        if adapter is None or self.adapters is None or self.adapters.enter(sequence):
            self._scheduler.add(sequence)

    def _fork(self, parent: Sequence, request: Request, token_id: int) -> None:
        """Let a further sample of the parent's prompt decode as a sequence of its own."""
        child = child_of(parent, request, token_id)
        if parent.constrained is not None:
            child.constrained = parent.constrained.another()
        if request.adapter is not None and self.adapters is not None:
            has_slot = self.adapters.take(child)
            assert has_slot, "the parent has one"
        assert child.key not in self.by_key
        self.by_key[child.key] = child
        copies = self._scheduler.forks.fork(parent, child)
        if copies:
            self._runner.copy_blocks(copies)

    # -- tokens of a completed step ---------------------------------------------------------------

    def _advance_clear(
        self,
        clear: Row[Sequence],
        sampled: Row[SampledToken | None],
        live: Container[Sequence],
        output: StepOutput,
    ) -> None:
        """`_advance` for all clear decodes that are still `live`, with the common case in line: a
        token that does not end the request."""
        eos, store, emit = self._eos_token_ids, self._tables.store, output.tokens.append
        for sequence, token in zip(clear, sampled, strict=True):
            if sequence not in live:
                continue
            assert token is not None
            token_id, logprob, top, *_ = token
            if token_id in eos or sequence.sampling.stop_token_ids or isnan(logprob):
                self._advance(sequence, 1, token, output)
                continue
            token_ids = sequence.token_ids
            index = len(token_ids) - sequence.num_prompt_tokens
            emit(_token_output((sequence.key, index, token_id, logprob, None, top)))
            token_ids.append(token_id)
            sequence.num_awaited_tokens -= 1
            sequence.num_computed_tokens += 1
            store(sequence)

    def _advance(
        self, sequence: Sequence, num_tokens: int, sampled: SampledToken | None, output: StepOutput
    ) -> None:
        """Account for one sequence's part of a completed step: `num_tokens` more are computed, and
        `sampled` follows them, if a token was sampled."""
        if sampled is not None and isnan(sampled.logprob):
            self._fail(sequence, EngineFailed("the model's logits are not numbers"), output)
            return
        sequence.num_computed_tokens += num_tokens
        self._tables.store(sequence)
        is_chunk = sequence.is_held
        if sampled is not None and sequence.num_candidates:
            if is_chunk:
                self._hold(sequence)
            else:
                is_chunk = self.beams.found(sequence, sampled)
        elif sampled is not None:
            is_chunk = self._append(sequence, sampled, output) and is_chunk
        if is_chunk:
            num_tokens, is_last = sequence.num_computed_tokens, sampled is not None
            output.chunks.append(ChunkOutput(sequence.key, num_tokens, is_last, sampled))

    def _append(self, sequence: Sequence, sampled: SampledToken, output: StepOutput) -> bool:
        """Output a token, and with the first one those of the forks. Returns whether the sequence
        continues, or its KV is held for one of them."""
        is_held, index = sequence.is_held, sequence.num_outputs
        sequence.num_awaited_tokens -= not is_held
        goes_on = self._output(sequence.request, index, sampled, output)
        for fork, token in zip(sequence.forks, sampled.forks, strict=True):
            if self._output(fork, index, token, output):
                if is_held:
                    goes_on = True
                else:
                    self._fork(sequence, fork, token.token_id)
        sequence.forks = ()
        sequence.token_ids.append(sampled.token_id)
        if not goes_on:
            self._parts.output_lengths.observe(sequence.num_outputs)
            self._end(sequence)
        elif is_held:
            self._hold(sequence)
        return goes_on

    def _output(
        self, request: Request, index: int, sampled: SampledToken, output: StepOutput
    ) -> bool:
        """Output a request's token; returns whether the request continues."""
        token_id, logprob, top, *_ = sampled
        reason = self._finish_reason(request, token_id, index + 1)
        output.tokens.append(TokenOutput(request.key, index, token_id, logprob, reason, top))
        return reason is None

    # -- the end ----------------------------------------------------------------------------------

    def _finish_reason(
        self, request: Request, token_id: int, num_outputs: int
    ) -> FinishReason | None:
        """Why the request ends with this token, its output number `num_outputs` (from 1); None if
        it continues. Stop strings are found by the gateway, which has the text."""
        sampling = request.sampling
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        if token_id in self._eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP
        is_full = len(request.prompt_token_ids) + num_outputs >= self.limits.max_model_len
        return FinishReason.LENGTH if is_full or num_outputs >= sampling.max_tokens else None

    def _end(self, sequence: Sequence) -> None:
        """Remove the sequence, or its whole search, and release what it holds."""
        if isinstance(search := sequence.group, BeamSearch):
            self.beams.end(search)
            return
        del self.by_key[sequence.key]
        was_parked = self._leave_adapter(sequence)
        if sequence.state is not SequenceState.ENDED and not was_parked:
            self._scheduler.remove(sequence)

    def _hold(self, sequence: Sequence) -> None:
        """Keep the KV of a computed sequence; no further step needs its adapter."""
        self._scheduler.queues.hold(sequence)
        self._leave_adapter(sequence)

    def _leave_adapter(self, sequence: Sequence) -> bool:
        """Release its adapter slot, which may let other sequences begin. Returns whether it still
        waited for one."""
        if self.adapters is None or sequence.request.adapter is None:
            return False
        was_parked = self.adapters.leave(sequence)
        self.unpark()
        return was_parked

    def unpark(self) -> None:
        """Queue the sequences that waited for their adapter and have a slot with it now."""
        if self.adapters is not None:
            for other in self.adapters.unpark():
                self._scheduler.add(other)

    def _fail(self, sequence: Sequence, error: BatonError, output: StepOutput) -> None:
        """End the sequence with an error; the scheduler may have removed it already. Samples that
        are not sequences of their own yet fail with it: of a held search, all of them."""
        if isinstance(search := sequence.group, BeamSearch):
            self.beams.fail(search, error, output)
            return
        forks = sequence.request.forks if sequence.num_candidates else sequence.forks
        output.failed += [(each.key, error) for each in (sequence.request, *forks)]
        self._end(sequence)

    # -- queries ----------------------------------------------------------------------------------

    def block_refs(self, key: str, first: int, last: int) -> BlockRefs:
        """Logical blocks [first, last) of a request that holds blocks (else KeyError).

        A block has a hash once a step that fills it is launched.
        """
        return self._tables.refs(self.by_key[key], first, last)

    def first_undrafted(self, key: str) -> int | None:
        """The first computed block of a request (which must hold blocks) that lacks the draft
        model's KV; None if all have it."""
        sequence = self.by_key[key]
        num_tokens = sequence.num_drafted_tokens
        is_whole = num_tokens >= sequence.num_computed_tokens
        return None if is_whole else num_tokens // self.limits.block_size

    def num_outputs(self, key: str) -> int:
        """Output tokens of a request so far; 0 if it has no sequence in this engine."""
        sequence = self.by_key.get(key)
        return 0 if sequence is None else sequence.num_outputs
