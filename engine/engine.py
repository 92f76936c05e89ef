"""One engine as nodes see it: requests in, tokens out, one step at a time.

    step()  =  schedule -> launch on the runner -> collect -> postprocess

What its parts are has engine_builder.py, and what a step is stepper.py. Owns no tensor and speaks
to no other process. Everything happens on the caller's thread.
"""

from __future__ import annotations

from collections.abc import Collection

from ..core.errors import HandoffFailed
from ..core.ports import Clock
from ..core.request.request import Request
from ..core.request.token_ids import BlockHash
from .engine_stats import EngineStats
from .execution.batch import Runner, SampledToken
from .first_steps import measure_first_steps
from .kv.block_pool import BlockPool, BlockRefs, Reservation
from .kv.lent_prefixes import LentPrefixes
from .kv.limits import EngineLimits
from .live_sequences import LiveSequences
from .lora.adapter_room import AdapterRoom
from .scheduling.block_tables import BlockTables
from .scheduling.costs.step_cost_estimator import StepCostEstimator, StepRecord
from .scheduling.outputs import StepOutput
from .scheduling.scheduler import Scheduler
from .scheduling.sequence import Sequence, SequenceState
from .stepper import Meanwhile, Stepper


class Engine:
    """`pool`: transports open fences on the blocks that they fill; `prefixes`: from and for other
    engines; `promise`: how long steps with decodes take at most; `stats`: what it tells of itself.
    """

    def __init__(
        self,
        runner: Runner,
        limits: EngineLimits,
        pool: BlockPool,
        tables: BlockTables,
        scheduler: Scheduler,
        sequences: LiveSequences,
        stepper: Stepper,
        *,
        adapters: AdapterRoom[Sequence] | None,
        prefixes: LentPrefixes,
        stats: EngineStats,
        step_costs: StepCostEstimator,
        step_record: StepRecord,
        clock: Clock,
    ) -> None:
        self.limits = limits
        self.pool = pool
        self.adapters = adapters
        self.prefixes = prefixes
        self.promise = scheduler.promise
        self.stats = stats
        self._runner = runner
        self._tables = tables
        self._scheduler = scheduler
        self._sequences = sequences
        self._stepper = stepper
        self._step_costs = step_costs
        self._step_record = step_record
        self._clock = clock
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
        sequence = self._sequences.create(request, SequenceState.WAITING, is_held=hold)
        self._sequences.keep(sequence)
        if request.adapter is None or self.adapters is None or self.adapters.enter(sequence):
            self._scheduler.add(sequence)
        self._step_record.num_prompts += 1

    def block_hashes(self, request: Request, num_tokens: int | None = None) -> list[BlockHash]:
        """Of the full blocks of its known tokens, or of the first `num_tokens` of them."""
        return self._sequences.block_hashes(request, num_tokens)

    def reserve(
        self, request: Request, block_hashes: Collection[BlockHash] = ()
    ) -> Reservation | None:
        """Blocks for the known tokens and the first one to come, or None: not now.

        `block_hashes`: of its first full blocks, if the caller has computed them. Ask again after a
        step, a release or an abort; keeping the order of arrival is the caller's duty. Raises
        InvalidRequest and its kin like `add`.
        """
        if self._refused == (request.key, self._scheduler.queues.opportunities):
            return None
        sequence = self._sequences.create(request, SequenceState.RESERVED)
        sequence.hashes = [*block_hashes]
        if request.adapter is not None and self.adapters and not self.adapters.reserve(sequence):
            return None
        if not self._scheduler.reserve(sequence):
            self._sequences.leave_adapter(sequence)
            self._refused = (request.key, self._scheduler.queues.opportunities)
            return None
        self._sequences.keep(sequence)
        return Reservation(
            request.key,
            tuple(sequence.block_ids),
            num_cached_blocks=sequence.num_stored_blocks,
            num_known_blocks=self.limits.blocks_for(sequence.num_tokens),
        )

    def lacks_slot(self, request: Request) -> bool:
        """Whether `reserve` would return None for want of the request's adapter in a slot."""
        if request.adapter is None or self.adapters is None:
            return False
        return self.adapters.lacks_slot(request.adapter)

    def unpark(self) -> None:
        """An adapter has come into host memory: those go on that waited for it."""
        self._sequences.unpark()

    def lacks_drafts(self, reservation: Reservation, first: int | None) -> None:
        """Before `start`: block number `first` came without the draft model's KV, if one did."""
        self._tables.lacks_drafts(self._sequences.by_key[reservation.key], first)

    def start(self, reservation: Reservation, token_id: int) -> None:
        """The KV of all known tokens is in place, and `token_id` follows them: go on from there.

        The token was streamed already and is not output again. Raises HandoffFailed if it ends the
        request: there would have been nothing to hand over; the reservation stays as it was.
        """
        sequence = self._sequences.by_key[reservation.key]
        num_outputs = sequence.num_outputs + 1
        if self._sequences.finish_reason(sequence.request, token_id, num_outputs) is not None:
            raise HandoffFailed(f"{reservation.key} ended with its first token: no hand-off")
        sequence.token_ids.append(token_id)
        sequence.forks = ()
        self._scheduler.start(sequence)

    def start_beams(self, reservation: Reservation, first: SampledToken) -> None:
        """As `start` for a search: `first` has the candidates behind the known tokens."""
        sequence = self._sequences.by_key[reservation.key]
        self._scheduler.start(sequence)
        self._sequences.beams.found(sequence, first)

    def fork(self, reservation: Reservation, request: Request, token_id: int) -> None:
        """As `start`, for a further sample of the reservation's prompt; call before `start`.

        Full blocks are shared, a partial last one is copied. Never lacks memory: where there is no
        room, the sample waits and is computed anew, as if preempted.
        """
        parent = self._sequences.by_key[reservation.key]
        num_outputs = len(request.output_token_ids) + 1
        if self._sequences.finish_reason(request, token_id, num_outputs) is not None:
            raise HandoffFailed(f"{request.key} ended with its first token: no hand-off")
        self._sequences.fork(parent, request, token_id)

    # -- requests out -----------------------------------------------------------------------------

    def drop(self, reservation: Reservation) -> None:
        """Give a reservation up; twice is no error. No pull writes to its blocks any more."""
        sequence = self._sequences.by_key.get(reservation.key)
        if sequence is not None and sequence.state is SequenceState.RESERVED:
            self._sequences.end(sequence)

    def abort(self, key: str) -> None:
        """End a request, a held one too, without an output; unknown keys are no error, and what is
        reserved stays so until `drop`: a pull may write to it. A search goes on for as long as one
        of its requests does.

        If a step that touches its blocks is in flight, they stay fenced until that has completed.
        """
        sequence = self._sequences.by_key.get(key)
        if key in self._sequences.beams.by_key:
            self._sequences.beams.abort(key)
        elif sequence is not None and sequence.state is not SequenceState.RESERVED:
            self._sequences.end(sequence)

    def measure_first_steps(self, budget_s: float) -> float:
        """See first_steps.py. Before the first request; returns the seconds that it took."""
        assert not self._sequences.by_key, "their blocks would be overwritten"
        costs, clock = self._step_costs, self._clock
        return measure_first_steps(self._runner, self.limits, costs, budget_s, clock)

    # -- stepping ---------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step could do anything: False also while all that is left waits for memory."""
        return self._stepper.has_work

    def step(self, meanwhile: Meanwhile | None = None) -> StepOutput:
        """Launch one batch and collect one: the same, or the one before if the runner runs ahead.

        `meanwhile` is called again and again while the batch to be collected is on the device. It
        waits a moment for something to do and returns whether there was; it may do all to this
        engine that may be done between two steps. What comes then while no batch is behind that
        one is launched behind it. Where it is known how long the one in front takes, a batch is not
        launched before that is nearly done: what comes meanwhile need not wait for it.

        Empty if there is nothing to do. What the runner raises (EngineFailed) goes through, and the
        engine is of no use after it.
        """
        return self._stepper.step(meanwhile)

    # -- looking in -------------------------------------------------------------------------------

    @property
    def has_prompts(self) -> bool:
        """Whether tokens of prompts wait, for an adapter too, or are being computed."""
        queues = self._scheduler.queues
        return bool(queues.parked or queues.waiting) or queues.has_prefills

    def block_refs(self, key: str, first: int, last: int) -> BlockRefs:
        """Logical blocks [first, last) of a request that holds blocks (else KeyError).

        A block has a hash once a step is launched that fills it.
        """
        return self._tables.refs(self._sequences.by_key[key], first, last)

    def first_undrafted(self, key: str) -> int | None:
        """Of the computed blocks of a request that holds blocks: which lacks the draft model's KV,
        the first one; None: none."""
        sequence = self._sequences.by_key[key]
        num_tokens = sequence.num_drafted_tokens
        is_whole = num_tokens >= sequence.num_computed_tokens
        return None if is_whole else num_tokens // self.limits.block_size

    def num_outputs(self, key: str) -> int:
        """Tokens behind a request's prompt, so far; 0 if it has no sequence here."""
        sequence = self._sequences.by_key.get(key)
        return 0 if sequence is None else sequence.num_outputs
