"""The engine's one scheduler: which sequences run in the next step, and how many tokens of each.

Each step has one token budget: first the decodes take from it, then the next chunks of running
prefills, then admissions, which are fair between callers (core/fair_queue.py) and first come, first
served within each. It mixes prefill and decode freely; the roles of engines are policies elsewhere.
schedule.py has a diagram of what shares a step.

A waiting prompt passes the next chunk of a long prompt whose caller was served more, if it ends in
this step, or needs several but is much shorter. The long prompt gets what is left of the budget, or
nothing beside small prompts. In the following step nothing passes it.

Memory:

- an admission takes all blocks of the known tokens at once, if it fits by the estimated peak; if
  not, it stays the head of the queue, and nothing passes it;
- the same holds for a request whose KV is pulled from another engine: these have their own queue,
  and have to fit beside the head of the waiting queue;
- drafts of a decode use blocks that are free, and preempt nothing;
- an admission whose prefix is in host memory is loading, outside of the steps, while it is copied;
- a decode takes a block when it crosses into one. If there is none, a half-computed prompt is
  preempted, since no stream waits for its next token, or else the latest arrival: its tokens are
  kept, its KV is swapped to host memory or recomputed later, whichever is faster. The oldest is
  never preempted, so something always makes progress;
- a held sequence takes all the blocks that it will ever need at admission, and is never preempted;
- the beams of a search are admitted by what all of them need, and preempted together: the first one
  comes back through the queue, and the others then share their common blocks with it.

With a target for the time between tokens (`tbt_target_s`), the prompt tokens beside decodes are
limited to those that keep the step as short, by the measured cost of steps.

Knows no runner and no clock.
"""

from __future__ import annotations

from ..kv.block_pool import BlockPool
from ..kv.host_tier import HostMatch
from ..kv.limits import EngineLimits
from .admission import Admission, OutputLengthEstimator
from .block_tables import BlockTables
from .costs.step_cost_estimator import StepCostEstimator
from .forks import Forks
from .peak_blocks import Footprint
from .pipeline_share import PipelineShare
from .preemption import Preemption
from .queues import Queues
from .schedule import Schedule
from .sequence import Sequence, SequenceState
from .step_promise import StepPromise

# A prompt that takes several steps passes one that has this many times its tokens left.
_MUCH_SHORTER = 4


class Scheduler:
    """Sequences enter by `add` and leave by `remove`."""

    def __init__(
        self,
        limits: EngineLimits,
        pool: BlockPool,
        tables: BlockTables,
        estimator: OutputLengthEstimator,
        step_costs: StepCostEstimator,
    ) -> None:
        self.queues = Queues(limits, pool)
        self.promise = StepPromise(limits, self.queues, step_costs)
        self.pipeline: PipelineShare | None = None
        if limits.num_stages > 1:
            self.pipeline = PipelineShare(limits, self.queues, step_costs)
        self.preemption = Preemption(limits, tables, self.queues)
        self.forks = Forks(limits, pool, tables, self.queues, self.preemption)
        self.admission = Admission(limits, estimator)
        self._limits = limits
        self._tables = tables
        self._is_long_due = False  # the last step left a long prompt out for others

    def add(self, sequence: Sequence) -> None:
        """Queue the sequence behind all others of its caller."""
        queue, num_tokens = self.queues.coming, sequence.num_tokens
        if sequence.state is not SequenceState.COMING:
            queue, (_, _, num_tokens) = self.queues.waiting, self._tables.find(sequence)
            self.queues.stalled_at = None
        queue.add(sequence, sequence.request.caller_id, num_tokens)

    def reserve(self) -> Sequence | None:
        """Allocate blocks for all slots of the next sequence whose KV is pulled; None: not now.

        The head of the waiting queue goes first: the sequence has to fit beside it.
        """
        sequence = self.queues.next_to_reserve
        if sequence is None:
            return None
        matched = self._tables.match(sequence, sequence.num_tokens)
        others = self.admission.footprints(self.queues.owners_and_head())
        if not self._try_admit(sequence, matched, [], others):
            self.queues.refuse_head(self.queues.coming)
            return None
        self.queues.coming.pop()
        sequence.state = SequenceState.RESERVED
        self.queues.reserved.append(sequence)
        if self._tables.host is not None:
            self._tables.host.write(sequence)  # its cached blocks have a second use
        return sequence

    def start(self, sequence: Sequence) -> None:
        """The KV of all known tokens but the last is in place: decode from here.

        The first beam of a search has that of all tokens, and waits until its beams are chosen.
        """
        self.queues.reserved.remove(sequence)
        num_computed_tokens = sequence.num_tokens - (sequence.group is None)
        sequence.num_computed_tokens = sequence.num_prefill_tokens = num_computed_tokens
        sequence.num_launched_tokens = sequence.num_computed_tokens
        self.queues.run(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove the sequence, whatever its state, and free its blocks."""
        self.queues.remove(sequence)
        self._tables.end(sequence)

    def schedule(self) -> Schedule:
        """Plan a step; sequences that are not in it wait for budget or memory."""
        limits = self._limits
        schedule = Schedule(
            num_budget_tokens=limits.max_num_batched_tokens,
            num_spare_tokens=limits.num_spare_tokens,
            num_chunk_tokens=limits.prefill_chunk_tokens,
            num_last_tokens=limits.last_chunk_tokens,
            num_small_tokens=0 if self._is_long_due else limits.small_step_tokens,
        )
        may_pass, self._is_long_due = not self._is_long_due, False
        self._plan_decodes(schedule)
        if self.promise.tbt_target_s is not None and not schedule.is_empty:
            self.promise.keep(schedule)
        if self.pipeline is not None:
            self.pipeline.limit_prompts(schedule)
        self._plan_prefills(schedule, may_pass=may_pass)
        if not self._is_long_due:
            self._admit_waiting(schedule)
        if self.pipeline is not None:
            self.pipeline.observe(schedule)
        return schedule

    def _plan_decodes(self, schedule: Schedule) -> None:
        """One token of each running sequence, and its drafts. Of hundreds nearly all are clear (see
        Sequence); only the others are checked one by one."""
        running = self.queues.running
        most = None if self.pipeline is None else self.pipeline.num_decodes
        for sequence in [s for s in running if s.num_launched_tokens >= s.num_clear_tokens]:
            if schedule.num_budget_tokens == 0 or len(schedule.others) == most:
                break
            self._plan_decode(sequence, schedule)
        clear = [s for s in running if s.num_launched_tokens < s.num_clear_tokens]
        if most is not None:
            clear = [s for s in clear if not s.num_awaited_tokens]
            clear = clear[: most - len(schedule.others)]
        schedule.take_clear(clear)

    def _plan_decode(self, sequence: Sequence, schedule: Schedule) -> None:
        """Make a sequence clear, for this step at least, or take it into the step. The properties
        of the sequence are inlined, since some sequences come here in each step."""
        num_launched, limits = sequence.num_launched_tokens, self._limits
        is_prefilling = num_launched < sequence.num_prefill_tokens
        if is_prefilling or sequence.state is not SequenceState.RUNNING:
            return  # still a prefill, or preempted by a sequence before it
        num_awaited, needs_history = sequence.num_awaited_tokens, sequence.needs_history
        if num_awaited and (limits.num_stages > 1 or needs_history or sequence.draft_token_ids):
            return  # needs the token that a step in flight samples
        num_tokens = len(sequence.token_ids) + num_awaited
        num_left = min(sequence.most_tokens, limits.max_model_len) - num_tokens
        if num_left <= 0:
            return  # a step in flight computes its last token
        if sequence.draft_token_ids:
            self.preemption.fit_drafts(sequence, schedule)
            num_tokens += len(sequence.draft_token_ids)
        num_tokens -= num_launched
        if not num_tokens:
            return  # held after its first token
        has_room = sequence.group is None and self._tables.grow(sequence)
        if not has_room and not self.preemption.make_room(sequence, schedule):
            return
        if num_tokens > 1 or num_left == 1 or sequence.group is not None:
            schedule.take(sequence, num_tokens)
        else:
            num_slots = len(sequence.block_ids) * limits.block_size
            most = 1 if needs_history else num_left - 1
            sequence.num_clear_tokens = min(num_slots, num_launched + most)

    def _plan_prefills(self, schedule: Schedule, *, may_pass: bool) -> None:
        """The next chunks of running prefills, each after the waiting prompts that pass it."""
        is_passed = False
        running = self.queues.running
        prefills = [s for s in running if s.num_launched_tokens < s.num_prefill_tokens]
        prefills.sort(key=lambda sequence: sequence.is_passing is not may_pass)
        for sequence in prefills:
            num_before = len(schedule.others)
            if may_pass:
                self._admit_waiting(schedule, before=sequence)
            is_passed |= len(schedule.others) > num_before
            num_tokens, caller_id = sequence.num_unlaunched_tokens, sequence.request.caller_id
            is_stretching = is_passed and schedule.would_stretch(caller_id, num_tokens)
            self._keep_behind(schedule, sequence.num_launched_tokens)
            if schedule.num_budget_tokens and not is_stretching:
                schedule.plan(sequence, is_in_queue=self._is_in_queue(sequence))
                is_passed |= sequence.is_passing
            else:
                self._is_long_due |= is_passed

    def _keep_behind(self, schedule: Schedule, context: int) -> None:
        """Cut the step further for a prompt with more context than those it was cut for."""
        if schedule.is_cut_for_less(context):
            self.promise.keep_behind(schedule, context)

    def _is_in_queue(self, sequence: Sequence) -> bool:
        """Whether other prompts wait, or another one is being computed."""
        if not self._limits.prefill_chunk_tokens:
            return False  # nothing depends on it
        others = (other for other in self.queues.running if other is not sequence)
        return bool(self.queues.waiting) or any(other.has_prefill_in_flight for other in others)

    def _admit_waiting(self, schedule: Schedule, *, before: Sequence | None = None) -> None:
        """Admit from the head of the queue on; only what may go `before` a running prefill."""
        beside: list[Footprint] | None = None  # of all that have blocks
        while schedule.num_budget_tokens:
            sequence = self.queues.next_to_admit
            if sequence is None:
                return
            is_too_long = self._limits.blocks_for(sequence.num_slots) > self._limits.capacity
            if is_too_long and self.preemption.has_outgrown_pool(sequence, schedule):
                beside = None
                continue
            if before is not None and not self._may_pass(sequence, before, num_tokens=1):
                return  # known before the prefix cache is searched
            matched, in_host, num_tokens = self._tables.find(sequence)
            if not self._may_begin(sequence, num_tokens, schedule, before):
                return
            if beside is None:
                beside = self.admission.footprints(self.queues.owners())
            coming = [] if in_host is None else in_host.coming
            if not self._try_admit(sequence, matched, coming, beside):
                self.queues.refuse_head(self.queues.waiting)
                return
            self.queues.waiting.pop(num_tokens)
            sequence.is_passing = before is not None
            self._begin(sequence, in_host, schedule)
            beside += self.admission.footprints([sequence])

    def _may_begin(
        self, sequence: Sequence, num_tokens: int, schedule: Schedule, before: Sequence | None
    ) -> bool:
        """Whether a waiting prompt with `num_tokens` to compute begins in this step (`before` a
        running prefill). If small prompts of others would wait for it, it begins the next step."""
        if schedule.would_stretch(sequence.request.caller_id, num_tokens):
            if before is None:
                self._is_long_due = True
                self.queues.waiting.pin_head()
            return False
        context = sequence.num_tokens - num_tokens
        if before is None:
            self._keep_behind(schedule, context)
            return schedule.should_begin(num_tokens)
        if not self._may_pass(sequence, before, num_tokens):
            return False
        can_end = schedule.can_end(num_tokens)
        if can_end and schedule.is_cut_for_less(context):
            can_end = num_tokens <= self.promise.room_behind(schedule, context)
        is_shorter = _MUCH_SHORTER * num_tokens <= before.num_unlaunched_tokens
        return can_end or (is_shorter and not schedule.num_prompt_tokens)

    def _may_pass(self, sequence: Sequence, prefill: Sequence, num_tokens: int) -> bool:
        """Whether a waiting prompt with `num_tokens` to compute goes before a running prefill.

        Its caller must be served no more with it than the other, which was charged for its whole
        prompt.
        """
        caller_id, other_id = sequence.request.caller_id, prefill.request.caller_id
        if caller_id == other_id or num_tokens >= prefill.num_unlaunched_tokens:
            return False
        served = self.queues.waiting.served
        return served(caller_id) + num_tokens <= served(other_id)

    def _try_admit(
        self, sequence: Sequence, matched: list[int], coming: list[int], beside: list[Footprint]
    ) -> bool:
        admission, shared = self.admission, matched + coming
        if sequence.is_held and not admission.has_credit(sequence, shared, self.queues.holders()):
            return False
        fits = admission.fits(sequence, shared, beside)
        if not fits or not self._tables.allocate(sequence, matched, coming):
            return False
        if sequence.group is not None:
            self.queues.groups.append(sequence.group)
        return True

    def _begin(self, sequence: Sequence, in_host: HostMatch | None, schedule: Schedule) -> None:
        """Run an admitted prompt, or first load the blocks that host memory has of it."""
        host = self._tables.host
        sequence.num_prefill_tokens = sequence.num_tokens
        if host is not None and in_host is not None:
            sequence.state = SequenceState.LOADING
            self.queues.loading[sequence] = host.load(sequence, in_host)
        else:
            self.queues.run(sequence)
            self._keep_behind(schedule, sequence.num_launched_tokens)
            schedule.plan(sequence, is_in_queue=self._is_in_queue(sequence))
        if host is not None:
            host.write(sequence)  # its cached blocks have a second use
