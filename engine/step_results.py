"""What the tokens of a step do to their sequences: they go on, fork, are held or end."""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Row
from functools import partial
from math import isnan

from ..core.errors import EngineFailed
from ..core.request.request import FinishReason, Request
from .execution.batch import SampledToken
from .live_sequences import LiveSequences
from .scheduling.block_tables import BlockTables
from .scheduling.costs.step_cost_estimator import StepRecord
from .scheduling.outputs import ChunkOutput, StepOutput, TokenOutput
from .scheduling.scheduler import Scheduler
from .scheduling.sequence import Sequence, SequenceState
from .speculation.speculator import Speculator

_token_output = partial(tuple.__new__, TokenOutput)  # a step makes hundreds


class StepResults:
    """Judges when a request ends (EOS, stop ids, lengths), and fills the step's output."""

    def __init__(
        self,
        sequences: LiveSequences,
        scheduler: Scheduler,
        tables: BlockTables,
        step_record: StepRecord,
        speculator: Speculator | None,
    ) -> None:
        self._sequences = sequences
        self._scheduler = scheduler
        self._tables = tables
        self._step_record = step_record
        self._speculator = speculator

    def advance_clear(
        self,
        clear: Row[Sequence],
        sampled: Row[SampledToken | None],
        here: Container[Sequence],
        output: StepOutput,
    ) -> None:
        """As `advance`, of the decodes that were clear, as far as they are still `here`: the tokens
        of few are anything but the next."""
        eos, store, tell = self._sequences.eos_token_ids, self._tables.store, output.tokens.append
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
        if sequence.draft_token_ids and sampled is not None and self._speculator is not None:
            tokens = self._speculator.accepted_tokens(sequence, sampled)  # it has no drafts now
            num_output = 0
            for token in tokens:
                if sequence.state is SequenceState.ENDED:
                    break  # nobody gets those behind
                self.advance(sequence, 1, token, output)
                num_output += 1
            self._step_record.num_decode_tokens -= num_tokens - num_output
            self._speculator.count_accepted(min(num_output, len(tokens) - 1))
            return
        if sampled is not None and isnan(sampled.logprob):
            self._sequences.fail(
                sequence, EngineFailed("the model's logits are not numbers"), output
            )
            return
        sequence.num_computed_tokens += num_tokens
        self._tables.store(sequence)
        reason = first = None
        if sampled is not None and sequence.num_candidates:
            first = sampled
            if sequence.is_held:
                self._sequences.hold(sequence)
            elif not self._sequences.beams.found(sequence, sampled):
                first = None
        elif sampled is not None:
            reason = self._append(sequence, sampled, output)
        if first is not None or (sequence.is_held and reason is None):
            num_tokens, is_last = sequence.num_computed_tokens, sampled is not None
            output.chunks.append(ChunkOutput(sequence.key, num_tokens, is_last, first))

    def _append(
        self, sequence: Sequence, sampled: SampledToken, output: StepOutput
    ) -> FinishReason | None:
        """Output a token, and end or hold its sequence if that was its last one here."""
        is_held, token_ids, token_id = sequence.is_held, sequence.token_ids, sampled.token_id
        sequence.num_awaited_tokens -= not is_held
        index = len(token_ids) - sequence.num_prompt_tokens
        reason = self._sequences.finish_reason(sequence.request, token_id, index + 1)
        values = (sequence.key, index, token_id, sampled.logprob, reason, sampled.top)
        output.tokens.append(_token_output(values))
        if sequence.forks:
            fork_reasons = [
                self._fork_off(sequence, fork, token, output)
                for fork, token in zip(sequence.forks, sampled.forks, strict=True)
            ]
            sequence.forks = ()
            if is_held and None in fork_reasons:
                reason = None
        token_ids.append(token_id)
        if reason is not None:
            self._sequences.finish(sequence)
        elif is_held:
            self._sequences.hold(sequence)
        return reason

    def _fork_off(
        self, parent: Sequence, request: Request, sampled: SampledToken, output: StepOutput
    ) -> FinishReason | None:
        """Output a further sample's first token, and let it go on unless its KV is held."""
        index, token_id = parent.num_outputs, sampled.token_id
        reason = self._sequences.finish_reason(request, token_id, index + 1)
        values = (request.key, index, token_id, sampled.logprob, reason, sampled.top)
        output.tokens.append(_token_output(values))
        if reason is None and not parent.is_held:
            self._sequences.fork(parent, request, token_id)
        return reason
