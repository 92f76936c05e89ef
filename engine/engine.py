"""One engine as nodes see it: requests in, tokens out, one step at a time.

    step()  =  schedule -> launch on the runner -> collect -> postprocess

    runner that runs ahead (a GPU):    step n     schedule n | launch n | collect n-1, postprocess
                                       device     | n-1 ................. | n ................
The host schedules n without knowing the tokens of n-1: it takes each sequence to go on, and lets
the device fill in the token. A sequence that ended with n-1 loses what n computes for it, nothing
else. Where drafts pay (speculation/) it waits instead, and launches n behind the tokens of n-1.
Of a pipeline several steps are in flight (steps_in_flight.py), each of other sequences.

Joins scheduler, block tables and runner; judges when a request ends (EOS, stop ids, lengths), and
measures what steps of prompts take. Owns no tensor and speaks to no other process. Everything
happens on the caller's thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Row
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from ..constraints.grammars import Grammars
from ..core.errors import (
    BatonError,
    EngineFailed,
    HandoffFailed,
    InvalidRequest,
    PromiseRefused,
)
from ..core.ports import Clock, SystemClock
from ..core.request.request import FinishReason, Request
from ..core.request.token_ids import BlockHash, root_hash
from ..core.step_cost import StepCost, StepShape
from .beams.beam_search import BeamSearches
from .engine_ledger import check_owners, engine_ledger
from .execution.batch import LaunchedStep, Runner, SampledToken
from .execution.constraints import Constraints, Mask
from .first_steps import measure_first_steps
from .kv.block_pool import BlockPool, BlockRef, Fence
from .kv.generations import Generations
from .kv.host_blocks import HostBlocks
from .kv.host_copies import HostCopier
from .kv.host_tier import HostCounts, HostTier
from .kv.lent_prefixes import BorrowedPrefix, LentPrefixes
from .kv.limits import EngineLimits
from .kv.prefix_cache import CacheObserver, PrefixCache
from .lora.adapter_room import AdapterRoom, refuse_adapter
from .scheduling.admission import OutputLengthEstimator
from .scheduling.block_tables import BlockTables, StepFence
from .scheduling.outputs import (
    ChunkDone,
    Load,
    Reservation,
    SpeculationCounts,
    StepOutput,
    StepOutputBuilder,
    TokenOutput,
    Totals,
)
from .scheduling.schedule import ScheduledSequence, step_shape
from .scheduling.scheduler import Scheduler
from .scheduling.sequence import Sequence, SequenceState, finish_reason
from .scheduling.step_cost_estimator import StepCostEstimator
from .scheduling.step_record import StepRecord
from .scheduling.step_slices import constrained_masks, launch_slice, launched_chunks
from .speculation.proposer import Proposer
from .speculation.speculator import Speculator
from .steps_in_flight import StepsInFlight

Meanwhile: TypeAlias = Callable[[], bool]

_EARLY = 0.05  # of an estimated step: what comes behind it is launched so much before its end


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    """A launched step: its results are parallel to `scheduled`."""

    scheduled: list[ScheduledSequence]
    fence: StepFence
    launched: LaunchedStep
    shape: StepShape
    launched_s: float
    launching_s: float  # how long the launch took
    promise_s: float | None
    has_drafts: bool

    def index_of(self) -> dict[Sequence, int]:
        return {one.sequence: index for index, one in enumerate(self.scheduled)}


class Engine:
    """`pool` is public: transports open fences on the blocks that they fill."""

    def __init__(
        self,
        runner: Runner,
        limits: EngineLimits,
        generations: Generations,
        *,
        fingerprint: str,
        eos_token_ids: Collection[int],
        enable_prefix_caching: bool = True,
        cache_observer: CacheObserver | None = None,
        estimator: OutputLengthEstimator | None = None,
        grammars: Grammars | None = None,
        clock: Clock | None = None,
        host_copier: HostCopier | None = None,
        adapters: AdapterRoom[Sequence] | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        """Without `grammars` no request may have a constraint, without `adapters` none a LoRA
        adapter; `host_copier`: to host memory, where the prefix cache goes on; `proposer`:
        speculation by its drafts."""
        self.adapters = adapters
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks, generations)
        self._runner = runner
        self._fingerprint = fingerprint
        self._eos_token_ids = frozenset(eos_token_ids)
        self._estimator = estimator or OutputLengthEstimator()
        self._constraints = None if grammars is None else Constraints(grammars)
        self._step_costs = StepCostEstimator()
        if not enable_prefix_caching:
            host_copier = None
        host_blocks = None if host_copier is None else HostBlocks()
        cache = PrefixCache(
            self.pool, is_enabled=enable_prefix_caching, observer=cache_observer, host=host_blocks
        )
        self._host: HostTier | None = None
        if host_copier is not None and host_blocks is not None:
            self._host = HostTier(
                host_copier,
                host_blocks,
                self.pool,
                cache,
                generations,
                self._step_costs.estimate,
                limits.block_size,
            )
        self._tables = BlockTables(self.pool, cache, generations, limits.block_size, self._host)
        self._lent = LentPrefixes(self.pool, cache)
        self._generations = generations
        self._step_record = StepRecord()
        self.count_experts: Callable[[], tuple[int, ...]] = tuple  # see Totals.expert_tokens
        self.num_expert_ranks = 1  # that have experts whole, each as many
        self._scheduler = Scheduler(
            limits, self.pool, self._tables, self._estimator, self._step_costs
        )
        self._sequences: dict[str, Sequence] = {}
        self._beams = BeamSearches(
            self._scheduler, self._sequences, runner, eos_token_ids, self._estimator.observe
        )
        self._num_arrivals = 0
        self._num_prompts = 0  # of them, those to compute here
        self._num_refusals = 0
        self._clock = clock or SystemClock()
        self._speculator: Speculator | None = None
        if proposer is not None:
            self._speculator = Speculator(
                proposer,
                limits,
                self._step_costs,
                self._constraints,
                self._eos_token_ids,
                self._clock,
                runs_ahead=runner.runs_ahead,
            )
        self._last_shape = StepShape()
        self._collected_s = 0.0  # when the last step was
        self._in_flight: _StepInFlight | None = None
        self._pipeline: StepsInFlight[_StepInFlight] | None = None
        if limits.num_stages > 1:
            self._pipeline = StepsInFlight(limits.num_stages)
        self._stalled_at: int | None = None  # `opportunities` when there was nothing to schedule
        self._refused: tuple[str, int] | None = None  # the last reservation that did not fit, when

    # -- requests in ------------------------------------------------------------------------------

    def add(self, request: Request, *, hold: bool = False) -> None:
        """Queue a request; with `hold`, stop behind its first token and keep its KV.

        A first token that ends the request ends a held one too, and its blocks are given back. Its
        forks' first tokens are output under their own keys: of a held request that is all of them,
        else each goes on as a request of its own. Until then, they end with it. A search of beams
        outputs each of its requests whole at its end; a held one brings what another begins with.
        Raises InvalidRequest and its kin: never servable here.
        """
        sequence = self._new_sequence(request, SequenceState.WAITING, is_held=hold)
        self._sequences[request.key] = sequence
        self._beams.file(sequence)
        if request.adapter is None or self.adapters is None or self.adapters.enter(sequence):
            self._scheduler.add(sequence)
        self._num_prompts += 1
        self._stalled_at = None

    def check_promise(self, request: Request, num_coming: int = 0) -> None:
        """Raises PromiseRefused if steps of all that will decode here, this request and
        `num_coming` others beside, would break the promise by themselves. Where one alone would,
        or nothing is measured or promised, it makes no difference."""
        cost, promise_s = self._step_costs.estimate(), self._scheduler.promise_s
        if cost is None or promise_s is None:
            return
        if own_ms := request.sampling.tbt_target_ms:
            own_s, least_s = own_ms / 1000, (self.tbt_target_s or 0.0) / 2
            num_stages = self.limits.num_stages
            promise_s = max(min(promise_s, own_s / num_stages), least_s / num_stages)
        shape = self._scheduler.step_with(request, num_coming)
        alone = StepShape(num_decodes=1, keys=request.num_known_tokens)
        if cost.seconds(shape) > promise_s >= cost.seconds(alone):
            self._num_refusals += 1
            raise PromiseRefused(
                f"a step of {shape.num_decodes} decodes takes longer than {promise_s * 1e3:.1f} ms"
            )

    def reserve(
        self, request: Request, block_hashes: Collection[BlockHash] = ()
    ) -> Reservation | None:
        """Blocks for the known tokens and the first one to come, or None: not now.

        `block_hashes`: of its first full blocks, if the caller has computed them. Ask again after a
        step, a release or an abort; keeping the order of arrival is the caller's duty. Raises
        InvalidRequest and its kin like `add`.
        """
        if self._refused == (request.key, self._scheduler.opportunities):
            return None
        sequence = self._new_sequence(request, SequenceState.RESERVED)
        sequence.know_hashes(block_hashes)
        if request.adapter is not None and self.adapters and not self.adapters.take(sequence):
            return None
        if not self._scheduler.reserve(sequence):
            self._leave_adapter(sequence)
            self._refused = (request.key, self._scheduler.opportunities)
            return None
        self._sequences[request.key] = sequence
        self._beams.file(sequence)
        return Reservation(
            request.key,
            tuple(sequence.block_ids),
            num_cached_blocks=sequence.num_stored_blocks,
            num_known_blocks=self.limits.blocks_for(sequence.num_tokens),
        )

    def start(self, reservation: Reservation, token_id: int) -> None:
        """The KV of all known tokens is in place, and `token_id` follows them: go on from there.

        The token was streamed already and is not output again. Raises HandoffFailed if it ends the
        request: there would have been nothing to hand over; the reservation stays as it was.
        """
        sequence = self._sequences[reservation.key]
        num_outputs = sequence.num_outputs + 1
        if self._finish_reason(sequence.request, token_id, num_outputs) is not None:
            raise HandoffFailed(f"{reservation.key} ended with its first token: no hand-off")
        sequence.token_ids.append(token_id)
        sequence.forks = ()
        self._scheduler.start(sequence)
        self._stalled_at = None

    def start_beams(self, reservation: Reservation, first: SampledToken) -> None:
        """As `start` for a search: `first` has the candidates behind the known tokens."""
        sequence = self._sequences[reservation.key]
        self._scheduler.start(sequence)
        self._beams.found(sequence, first)
        self._stalled_at = None

    def fork(self, reservation: Reservation, request: Request, token_id: int) -> None:
        """As `start`, for a further sample of the reservation's prompt; call before `start`.

        Full blocks are shared, a partial last one is copied. Never lacks memory: where there is no
        room, the sample waits and is computed anew, as if preempted.
        """
        parent = self._sequences[reservation.key]
        num_outputs = len(request.output_token_ids) + 1
        if self._finish_reason(request, token_id, num_outputs) is not None:
            raise HandoffFailed(f"{request.key} ended with its first token: no hand-off")
        self._fork(parent, request, token_id)

    # -- prefixes from and for other engines ------------------------------------------------------

    def lend(self, block_hashes: Row[BlockHash]) -> tuple[Fence, tuple[BlockRef, ...]] | None:
        """Hold the cached blocks of these hashes, which are computed, for somebody who copies them;
        None if one is missing, or if what runs here will need the memory. See `give_back`."""
        block_ids = self._lent.match(block_hashes)
        if len(block_ids) < len(block_hashes) or not self._has_room(block_ids, 0):
            return None
        columns = enumerate(zip(block_ids, block_hashes, strict=True))
        refs = tuple(
            BlockRef(index, block_id, self._generations.read(block_id), each)
            for index, (block_id, each) in columns
        )
        return self._lent.lend(block_ids), refs

    def give_back(self, lent: Fence) -> None:
        """Nobody copies what was lent any more."""
        self._lent.give_back(lent)

    def borrow(self, block_hashes: Row[BlockHash]) -> BorrowedPrefix | None:
        """Room for the blocks of these hashes, to be filled by a copy, all or none; None if what
        runs here will need the memory, or if all are here. See `keep_prefix` and `drop_prefix`."""
        cached = self._lent.match(block_hashes)
        num_fresh = len(block_hashes) - len(cached)
        if not num_fresh or not self._has_room(cached, num_fresh):
            return None
        return self._lent.borrow(block_hashes)

    def _has_room(self, cached: Row[int], num_fresh: int) -> bool:
        """Whether these can be held, and so many more, beside the peak of all that has blocks."""
        num_taken = self._lent.num_unheld(cached) + num_fresh + self._lent.num_blocks
        return num_taken <= self._scheduler.room_beside_running()

    def keep_prefix(self, prefix: BorrowedPrefix) -> None:
        """The copy has filled them: they are in the prefix cache, for the next step to use."""
        self._lent.keep(prefix)
        self._lent.drop(prefix)

    def drop_prefix(self, prefix: BorrowedPrefix) -> None:
        """The copy failed, and nothing writes to them any more."""
        self._lent.drop(prefix)

    # -- requests out -----------------------------------------------------------------------------

    def drop(self, reservation: Reservation) -> None:
        """Give a reservation up. Blocks that a pull still writes to need a fence of their own.

        A reservation that was aborted before is no error.
        """
        sequence = self._sequences.get(reservation.key)
        if sequence is not None and sequence.state is SequenceState.RESERVED:
            self._end(sequence)

    def abort(self, key: str) -> None:
        """End a request in any state, a held one too, without an output; unknown keys are no error.
        A search goes on for as long as one of its requests does.

        If a step that touches its blocks is in flight, they stay fenced until that has completed.
        """
        sequence = self._sequences.get(key)
        if not self._beams.abort(key) and sequence is not None:
            self._end(sequence)

    def measure_first_steps(self, budget_s: float) -> float:
        """See first_steps.py. Before the first request; returns the seconds that it took."""
        assert not self._sequences, "their blocks would be overwritten"
        return measure_first_steps(self._runner, self.limits, self._step_costs, budget_s)

    # -- stepping ---------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step could do anything: False also while all that is left waits for memory."""
        if self._in_flight is not None or (self._host is not None and self._host.has_work):
            return True
        if self._pipeline:
            return True
        is_stalled = self._stalled_at == self._scheduler.opportunities
        return bool(self._scheduler.running or self._scheduler.waiting) and not is_stalled

    def step(self, meanwhile: Meanwhile | None = None) -> StepOutput:
        """Launch one batch and collect one: the same, or the one before if the runner runs ahead.

        `meanwhile` is called again and again while the batch to be collected is on the device. It
        waits a moment for something to do and returns whether there was; it may do all to this
        engine that may be done between two steps. What comes then while no batch is behind that
        one is launched behind it. A batch behind long prompts is not launched before they are
        nearly done: what comes meanwhile, of a caller who is due first, need not wait for it.

        Empty if there is nothing to do. What the runner raises (EngineFailed) goes through, and the
        engine is of no use after it.
        """
        if self._pipeline is not None:
            return self._step_pipeline(self._pipeline, meanwhile)
        output = StepOutputBuilder()
        previous, self._in_flight = self._in_flight, None
        must_wait = previous is not None and self._must_wait(previous)
        due_s = -math.inf if meanwhile is None else self._launch_due_s(previous)
        if must_wait:
            due_s = math.inf
        step, has_tried = None, self._clock.monotonic_s() >= due_s
        if has_tried:
            step = self._launch(previous, output)
        if previous is not None:
            while meanwhile is not None and not previous.launched.has_completed():
                has_news = meanwhile() | self._poll_host()
                is_due = step is None and self._clock.monotonic_s() >= due_s
                if is_due and (has_news or not has_tried):
                    has_tried = True
                    step = self._launch(previous, output)
            self._collect(previous, output)
            if must_wait:
                step = self._launch(None, output, is_waited_for=True)
        elif step is None:
            self._stalled_at = self._scheduler.opportunities
            if meanwhile is not None and self._host is not None and self._host.has_work:
                meanwhile()
        if step is not None and not self._runner.runs_ahead:
            self._collect(step, output)
        else:
            self._in_flight = step
        return output.build()

    def _step_pipeline(
        self, steps: StepsInFlight[_StepInFlight], meanwhile: Meanwhile | None
    ) -> StepOutput:
        """Launch as many batches as have room in the pipeline, and collect the oldest."""
        output = StepOutputBuilder()
        watch = None if meanwhile is None else lambda: meanwhile() | self._poll_host()
        collect = partial(self._collect, output=output)
        if not steps.advance(lambda: self._launch(None, output), collect, watch):
            self._stalled_at = self._scheduler.opportunities
            if meanwhile is not None and self._host is not None and self._host.has_work:
                meanwhile()
        return output.build()

    def _launch_due_s(self, previous: _StepInFlight | None) -> float:
        """When to launch what comes behind `previous`: it takes time, and the estimate may err."""
        if previous is None or previous.shape.num_decodes:
            return -math.inf
        lasts_s = self._step_costs.expected_s(previous.shape)
        if lasts_s is None:
            return -math.inf
        began_s = max(previous.launched_s, self._collected_s)
        return began_s + (1 - _EARLY) * lasts_s - previous.launching_s

    def _must_wait(self, previous: _StepInFlight) -> bool:
        """Whether the step behind `previous` cannot be planned before that has completed."""
        if self._speculator is None:
            return False
        return previous.has_drafts or self._speculator.is_due(self._scheduler)

    def _launch(
        self,
        previous: _StepInFlight | None,
        output: StepOutputBuilder,
        *,
        is_waited_for: bool = False,
    ) -> _StepInFlight | None:
        """Schedule and launch a step behind `previous`; None if there is nothing to do.

        `is_waited_for`: the one before has just been collected, for this one to have drafts.
        """
        self._poll_host()
        if self._beams:
            self._beams.advance(output)
        if previous is None and self._speculator is not None:
            self._speculator.draft(self._scheduler, self._last_shape)
        schedule = self._scheduler.schedule()
        for sequence, error in schedule.failed:
            self._fail(sequence, error, output)
        if not schedule.scheduled:
            return None
        indices = {} if previous is None else previous.index_of()
        masks = self._masks(schedule.scheduled, output)
        planned = [one for one in schedule.scheduled if one.sequence.key in self._sequences]
        if not planned:
            # All have failed: there may be room for others.
            return self._launch(previous, output, is_waited_for=is_waited_for)
        fresh = [one.sequence for one in planned if not one.sequence.has_started]
        for sequence in fresh:
            sequence.has_started = True
            keys = self._beams.keys_of(sequence)
            output.started |= dict.fromkeys(keys, sequence.num_cached_tokens)
        shape = step_shape(planned)
        eos = self._eos_token_ids
        batch = [launch_slice(one, indices, masks.get(one.sequence, ()), eos) for one in planned]
        fence = self._tables.open_step(scheduled.sequence for scheduled in planned)
        launched_s = self._clock.monotonic_s()
        launched = self._runner.launch(batch)
        took_s = self._clock.monotonic_s() - launched_s
        has_drafts = False
        if self._speculator is not None:
            has_drafts = self._speculator.settle()
            if is_waited_for:  # the device had nothing to do meanwhile
                launched_s += took_s
                self._speculator.waited(launched_s - self._collected_s)
        promise_s = self._scheduler.promise_s if shape.num_decodes else None
        step = _StepInFlight(
            planned, fence, launched, shape, launched_s, took_s, promise_s, has_drafts
        )
        self._last_shape = shape
        for scheduled in planned:
            if scheduled.num_scheduled_tokens > 1:
                self._tables.prepare_store(scheduled.sequence)
        for sequence in fresh:
            self._tables.store(sequence)  # what was pulled: no sooner, its first step would wait
        if step.launched.number:
            output.launched += launched_chunks(planned, step.launched.number)
        return step

    def _poll_host(self) -> bool:
        """Take note of what was copied to or from host memory; whether a prompt can go on."""
        if self._host is None or not self._host.poll():
            return False
        self._scheduler.finish_loads()
        self._stalled_at = None
        return True

    def _masks(
        self, planned: list[ScheduledSequence], output: StepOutputBuilder
    ) -> Mapping[Sequence, Row[Mask]]:
        """Which tokens those may be given that are constrained; what cannot go on ends here."""
        found: dict[Sequence, Row[Mask]] = {}
        if self._constraints is None:
            return found
        for sequence, masks in constrained_masks(self._constraints, planned).items():
            if isinstance(masks, InvalidRequest):
                self._fail(sequence, masks, output)
            else:
                found[sequence] = masks
        return found

    def _collect(self, step: _StepInFlight, output: StepOutputBuilder) -> None:
        results = step.launched.collect()
        prompts = step.launched.prompt_logprobs()
        step.fence.close()
        self._measure(step)
        for index, (scheduled, sampled) in enumerate(zip(step.scheduled, results, strict=True)):
            # One that was aborted or preempted in flight, or ended late, is not among them.
            if scheduled.sequence in step.fence.sequences:
                output.tell_prompt(scheduled.sequence, prompts.get(index, ()))
                self._advance(scheduled, sampled, output)
        if self._beams and self._beams.advance(output):
            self._stalled_at = None

    def _measure(self, step: _StepInFlight) -> None:
        """A step begins when it is launched, or when the one before it ends."""
        began_s = max(step.launched_s, self._collected_s)
        self._collected_s = self._clock.monotonic_s()
        took_s = self._collected_s - began_s
        self._step_costs.observe(step.shape, took_s)
        self._step_record.observe(step.shape, took_s, step.promise_s)
        if self._speculator is not None and step.shape.num_decodes:
            self._speculator.passed(step.shape, took_s, has_drafts=step.has_drafts)

    def _advance(
        self, scheduled: ScheduledSequence, sampled: SampledToken | None, output: StepOutputBuilder
    ) -> None:
        """Account for one sequence's part of a completed step."""
        sequence = scheduled.sequence
        if sequence.draft_token_ids and sampled is not None and self._speculator is not None:
            tokens = self._speculator.accepted_tokens(sequence, sampled)
            self._step_record.num_decode_tokens -= scheduled.num_scheduled_tokens - len(tokens)
            for token in tokens:
                if sequence.state is not SequenceState.ENDED:
                    self._advance_by(sequence, 1, token, output)
        else:
            self._advance_by(sequence, scheduled.num_scheduled_tokens, sampled, output)

    def _advance_by(
        self,
        sequence: Sequence,
        num_tokens: int,
        sampled: SampledToken | None,
        output: StepOutputBuilder,
    ) -> None:
        """So many of its tokens are computed, and the token behind them is sampled, if any is."""
        if sampled is not None and math.isnan(sampled.logprob):
            self._fail(sequence, EngineFailed("the model's logits are not numbers"), output)
            return
        sequence.num_computed_tokens += num_tokens
        self._tables.store(sequence)
        reason = first = None
        if sampled is not None and sequence.num_candidates:
            first = sampled
            if sequence.is_held:
                self._scheduler.hold(sequence)
            elif not self._beams.found(sequence, sampled):
                first = None
        elif sampled is not None:
            reason = self._append(sequence, sampled, output)
        if first is not None or (sequence.is_held and reason is None):
            num_tokens, is_last = sequence.num_computed_tokens, sampled is not None
            output.chunks.append(ChunkDone(sequence.key, num_tokens, is_last, first))

    def _append(
        self, sequence: Sequence, sampled: SampledToken, output: StepOutputBuilder
    ) -> FinishReason | None:
        """Output a token, and end or hold its sequence if that was its last one here."""
        sequence.num_awaited_tokens -= not sequence.is_held
        reason = self._output(sequence.request, sequence.num_outputs, sampled, output)
        fork_reasons = [
            self._fork_off(sequence, fork, token, output)
            for fork, token in zip(sequence.forks, sampled.forks, strict=True)
        ]
        sequence.forks = ()
        sequence.token_ids.append(sampled.token_id)
        if sequence.is_held and None in fork_reasons:
            reason = None
        if reason is not None:
            self._estimator.observe(sequence.num_outputs)
            self._end(sequence)
        elif sequence.is_held:
            self._scheduler.hold(sequence)
        return reason

    def _fork_off(
        self, parent: Sequence, request: Request, sampled: SampledToken, output: StepOutputBuilder
    ) -> FinishReason | None:
        """Output a further sample's first token, and let it go on unless its KV is held."""
        reason = self._output(request, parent.num_outputs, sampled, output)
        if reason is None and not parent.is_held:
            self._fork(parent, request, sampled.token_id)
        return reason

    def _output(
        self, request: Request, index: int, sampled: SampledToken, output: StepOutputBuilder
    ) -> FinishReason | None:
        reason = self._finish_reason(request, sampled.token_id, index + 1)
        token = TokenOutput(
            request.key, index, sampled.token_id, sampled.logprob, reason, sampled.top
        )
        output.tokens.append(token)
        return reason

    def _fork(self, parent: Sequence, request: Request, token_id: int) -> None:
        """A new sequence behind all of the parent's known tokens."""
        child = Sequence(request, parent.arrival, False, parent.root_hash)
        child.token_ids.append(token_id)
        child.has_started = parent.has_started
        child.next_prompt_logprob = len(request.prompt_token_ids)
        if parent.constrained is not None:
            child.constrained = parent.constrained.another()
        if request.adapter is not None and self.adapters is not None:
            has_slot = self.adapters.take(child)
            assert has_slot, "its parent's"
        assert child.key not in self._sequences and child.num_tokens == parent.num_tokens + 1
        self._sequences[child.key] = child
        copies = self._scheduler.fork(parent, child)
        if copies:
            self._runner.copy_blocks(copies)
        self._stalled_at = None

    # -- looking in -------------------------------------------------------------------------------

    def load(self, pending: Iterable[Request] = ()) -> Load:
        """`pending`: requests that will come, but are not here yet."""
        scheduler = self._scheduler
        held_blocks = scheduler.num_held_blocks
        waiting = scheduler.waiting_tokens()
        parked = [] if self.adapters is None else self.adapters.parked
        for sequence in parked:
            waiting[sequence.request.caller_id] += sequence.num_tokens
        return Load(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(scheduler.loading) + len(parked),
            waiting_tokens=waiting.total(),
            free_blocks=self.pool.num_available,
            credit_blocks=max(0, self.limits.held_blocks_limit - held_blocks),
            held_blocks=held_blocks,
            room_blocks=scheduler.room_blocks(pending),
            output_tokens=self._estimator.expected,
            waiting_by_caller=waiting,
            decodes=scheduler.decodes(),
        )

    def totals(self) -> Totals:
        return Totals(
            num_preemptions=self._scheduler.num_preemptions,
            prefix_query_tokens=self._tables.num_queried_tokens,
            prefix_hit_tokens=self._tables.num_hit_tokens,
            num_prompts=self._num_prompts,
            num_prompt_tokens=self._step_record.num_prompt_tokens,
            num_decode_tokens=self._step_record.num_decode_tokens,
            num_promised_steps=self._step_record.num_promised_steps,
            num_kept_steps=self._step_record.num_kept_steps,
            num_refusals=self._num_refusals,
            expert_tokens=self.count_experts(),
            num_swaps=self._scheduler.num_swaps,
            host_hit_tokens=self._tables.num_host_hit_tokens,
            host=HostCounts() if self._host is None else self._host.counts,
            speculation=self._speculator.counts if self._speculator else SpeculationCounts(),
        )

    @property
    def decode_step_p99_s(self) -> float | None:
        """How long the last steps with decodes took, 99th percentile; None: there were none."""
        return self._step_record.p99_s

    @property
    def has_prompts(self) -> bool:
        """Whether tokens of prompts wait, or are being computed."""
        return bool(self._scheduler.waiting) or self._scheduler.has_prefills

    def step_cost(self) -> StepCost | None:
        """By the steps that were computed so far; None: too few."""
        return self._step_costs.estimate()

    @property
    def step_cost_error(self) -> float | None:
        """How far the last steps were from that, relative, 90th percentile; None: too few."""
        return self._step_costs.relative_error

    @property
    def tbt_target_s(self) -> float | None:
        """What steps with decodes in them take at most, if prompts can be cut for it; None: prompts
        are computed as fast as may be."""
        return self._scheduler.tbt_target_s

    @tbt_target_s.setter
    def tbt_target_s(self, seconds: float | None) -> None:
        self._scheduler.tbt_target_s = seconds

    @property
    def is_promising(self) -> bool:
        """Whether what comes is promised its target too; what decodes was, and is kept to it."""
        return self._scheduler.is_promising

    @is_promising.setter
    def is_promising(self, is_promising: bool) -> None:
        self._scheduler.is_promising = is_promising

    @property
    def promise_s(self) -> float | None:
        """That target, or the strictest of the requests that run, if that is less. None: no target,
        or one that was withdrawn, and of those it was promised to none decodes any more."""
        return self._scheduler.promise_s

    def block_refs(self, key: str, first: int, last: int) -> list[BlockRef]:
        """Logical blocks [first, last) of a request that holds blocks (else KeyError).

        A block has a hash once a step is launched that fills it.
        """
        return self._tables.refs(self._sequences[key], first, last)

    def ledger(self) -> dict[str, object]:
        """Who holds what, JSON-able, for people and for tests."""
        return engine_ledger(self.pool, self._scheduler, self._sequences.values())

    def check_integrity(self) -> None:
        """Raise AssertionError if a reference is nobody's: requests, reservations, fences."""
        check_owners(self.pool, self._sequences.values())

    # -- inside -----------------------------------------------------------------------------------

    def _new_sequence(
        self, request: Request, state: SequenceState, *, is_held: bool = False
    ) -> Sequence:
        if request.key in self._sequences:
            raise InvalidRequest(f"{request.key} is here already")
        self.limits.check(request)
        if request.adapter is not None:
            if self.adapters is None:
                raise refuse_adapter()
            self.adapters.check(request.adapter)
            if request.sampling.use_beam_search:
                raise InvalidRequest("beam search with a LoRA adapter", "use_beam_search")
        self._num_arrivals += 1
        root = root_hash(self._fingerprint, request.cache_salt, request.adapter_digest)
        sequence = Sequence(request, self._num_arrivals, is_held, root, state=state)
        if request.sampling.use_beam_search:
            if not is_held:
                self.limits.check_beams(request)
            self._beams.begin(sequence, self.limits.max_outputs(request))
        constraint = request.sampling.constraint
        if constraint is not None:
            if self._constraints is None:
                raise InvalidRequest("constraints are not taken", code="unsupported_parameter")
            sequence.constrained = self._constraints.begin(constraint)
        if state is SequenceState.RESERVED:  # told where they are computed
            sequence.next_prompt_logprob = len(request.prompt_token_ids)
        return sequence

    def _finish_reason(
        self, request: Request, token_id: int, num_outputs: int
    ) -> FinishReason | None:
        return finish_reason(
            request,
            token_id,
            num_outputs,
            eos_token_ids=self._eos_token_ids,
            max_model_len=self.limits.max_model_len,
        )

    def _end(self, sequence: Sequence) -> None:
        if (search := self._beams.of(sequence)) is not None:
            self._beams.end(search)
            return
        del self._sequences[sequence.key]
        if not self._leave_adapter(sequence):
            self._scheduler.remove(sequence)

    def _leave_adapter(self, sequence: Sequence) -> bool:
        """It needs its adapter no more, which may let others begin. Whether it waited for it."""
        if self.adapters is None or sequence.request.adapter is None:
            return False
        was_parked = self.adapters.leave(sequence)
        for other in self.adapters.unpark():
            self._scheduler.add(other)
            self._stalled_at = None
        return was_parked

    def _fail(self, sequence: Sequence, error: BatonError, output: StepOutputBuilder) -> None:
        """End it with an error, if the scheduler has not ended it yet."""
        if (search := self._beams.of(sequence)) is not None:
            self._beams.fail(search, error, output)
            return
        output.fail(sequence, error)
        del self._sequences[sequence.key]
        was_parked = self._leave_adapter(sequence)
        if sequence.state is not SequenceState.ENDED and not was_parked:
            self._scheduler.remove(sequence)
