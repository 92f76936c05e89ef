"""Which sequences run in the next step, and how many tokens of each: the engine's one scheduler.

One token budget for all: first the decodes, then the next chunks of running prefills, then
admissions, which are fair between callers (core/fair_queue.py) and first come, first served within
each. Roles are policies over it elsewhere; it does prefill and decode in any mixture. What shares a
step is drawn in schedule.py.

A prompt goes before the next chunk of a long one of a caller that has had more, if it ends in the
step; the long one takes what is left, or nothing beside small prompts. In the next step nobody goes
before it.

Memory:

- an admission takes all blocks of the known tokens at once, if the peak estimate says that it fits;
  if not, it stays the head of the queue, and nobody passes it;
- drafts of a decode have what is left, and preempt nobody;
- an admission whose prompt goes on in host memory waits apart while that is copied;
- a decode takes a block when it crosses into one; if there is none, a prompt that is half computed
  is preempted, which nobody's stream waits for, or else the latest arrival (tokens kept, KV swapped
  to host memory or recomputed later, whichever takes less), never the oldest, so that something
  always gets on;
- a held sequence takes all it will ever need at admission, and is never preempted;
- the beams of a search are admitted by what all of them need, and preempted as one: the first comes
  back through the queue, the others behind it share what they have in common with it.

With a promise to its decodes (`tbt_target_s`) a step has no more tokens of prompts than leave it as
short, by the measured cost of steps.

Knows no runner and no clock.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, MutableSequence
from itertools import chain

from ...core.errors import PromptTooLarge
from ...core.fair_queue import FairQueue
from ...core.request.request import Request
from ...core.step_cost import LEAST_PROMPT_TOKENS, StepShape
from ..kv.block_pool import BlockPool
from ..kv.host_tier import Load
from ..kv.limits import EngineLimits
from .admission import Admission, OutputLengthEstimator, distinct_blocks
from .block_tables import BlockTables
from .schedule import Schedule, ScheduledSequence, step_shape
from .sequence import Sequence, SequenceGroup, SequenceState
from .step_cost_estimator import StepCostEstimator


class Scheduler:
    """Owns the queues. Sequences come in by `add` or `reserve` and leave by `remove`."""

    def __init__(
        self,
        limits: EngineLimits,
        pool: BlockPool,
        tables: BlockTables,
        estimator: OutputLengthEstimator,
        step_costs: StepCostEstimator,
    ) -> None:
        self.tbt_target_s: float | None = None  # see Engine
        self.is_promising = True
        self._step_costs = step_costs
        self._limits = limits
        self._pool = pool
        self._tables = tables
        self._admission = Admission(limits, estimator)
        self.waiting: FairQueue[Sequence] = FairQueue()
        self.running: list[Sequence] = []  # by arrival
        self.loading: dict[Sequence, Load] = {}
        self.reserved: list[Sequence] = []
        self.held: list[Sequence] = []  # computed, waiting to be released
        self.groups: list[SequenceGroup] = []  # whose first member has blocks
        self.num_preemptions = 0
        self.num_swaps = 0  # of them, those whose KV went to host memory
        self._num_holds = 0
        self._refused_at: int | None = None  # `opportunities` when the head did not fit
        self._is_long_due = False  # a long prompt had nothing of the last step because of others

    @property
    def opportunities(self) -> int:
        """Moves whenever blocks or a place among the running may have become free."""
        return self._pool.num_releases + self._num_holds

    @property
    def num_held_blocks(self) -> int:
        """Blocks that wait to be pulled, or will: shared ones count once."""
        return len(distinct_blocks(self._holders()))

    def add(self, sequence: Sequence) -> None:
        """Queue it up behind all others of its caller."""
        caller_id = sequence.request.caller_id
        self.waiting.add(sequence, caller_id, self._tables.num_to_compute(sequence))

    def reserve(self, sequence: Sequence) -> bool:
        """Take blocks for all slots of a new RESERVED sequence, or nothing: whether it fits.

        The head of the waiting queue goes first: only what fits beside it is given away.
        """
        assert sequence.state is SequenceState.RESERVED
        matched = self._tables.match(sequence, sequence.num_tokens)
        head = self.waiting.head
        others = self._owners() if head is None else chain(self._owners(), [head])
        if not self._has_slot(sequence) or not self._admission.fits(sequence, matched, others):
            return False
        if not self._tables.take(sequence, matched):
            return False
        self.reserved.append(sequence)
        self._take_in(sequence.group)
        self._tables.write(sequence)  # a second use of what was matched
        return True

    def start(self, sequence: Sequence) -> None:
        """The KV of all known tokens but the last is in place: decode from here.

        Of a search's first member it is all of them: it stands until the beams behind are known.
        """
        self.reserved.remove(sequence)
        num_computed_tokens = sequence.num_tokens - (sequence.group is None)
        sequence.num_computed_tokens = sequence.num_prefill_tokens = num_computed_tokens
        sequence.num_launched_tokens = sequence.num_computed_tokens
        self._run(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> list[tuple[int, int]]:
        """Let a new sequence decode from where all of the parent's known tokens are computed.

        Its own first token is already in `token_ids`. Returns blocks (source, target) to copy
        before anything else is done. Where there is no room it waits like a preempted one, and
        finds the full blocks in the prefix cache; one of a group is parked.
        """
        child.num_computed_tokens = child.num_prefill_tokens = child.num_tokens - 1
        child.num_launched_tokens = child.num_computed_tokens
        child.state = SequenceState.RUNNING
        has_slot = child.group is not None or self._has_slot()  # a group's are kept for it
        copies = self._tables.fork(parent, child) if has_slot else None
        if copies is None:
            child.num_computed_tokens = child.num_launched_tokens = 0
            child.state = SequenceState.PARKED
            if child.group is None:
                child.state = SequenceState.WAITING
                self._come_back(child)
            return []
        self._run(child)
        return copies

    def rejoin(self, parked: Sequence, leader: Sequence) -> bool:
        """Let a parked member of a group compute what its blocks lack, behind those that are cached
        or the leader's, whose tokens are all computed; False if there is no room."""
        matched = self._tables.match(parked, parked.num_tokens - 1)
        common = self._tables.common(leader, parked)
        if not self._tables.take(parked, max(matched, common, key=len)):
            return False
        parked.num_prefill_tokens = parked.num_tokens
        self._run(parked)
        return True

    def preempt_group(self, group: SequenceGroup) -> None:
        """Take all blocks of the group: its first member waits for its turn, the others for it."""
        for sequence in group.members:
            if sequence.state is SequenceState.RUNNING:
                self._take_blocks(sequence)
            sequence.state = SequenceState.PARKED
        self.groups.remove(group)
        leader = group.members[0]
        leader.state = SequenceState.WAITING
        self._come_back(leader)
        self.num_preemptions += 1

    def has_all(self, group: SequenceGroup) -> bool:
        """Whether nothing else has blocks: then none will be released for the group."""
        return self._pool.num_available + len(distinct_blocks(group.members)) == (
            self._limits.capacity
        )

    def hold(self, sequence: Sequence) -> None:
        """The held sequence is computed: it no longer runs, and keeps its blocks."""
        self.running.remove(sequence)
        sequence.state = SequenceState.HELD
        self.held.append(sequence)
        self._num_holds += 1

    def remove(self, sequence: Sequence) -> None:
        """Forget the sequence, whatever its state, and give its blocks back."""
        queues: dict[SequenceState, MutableSequence[Sequence] | FairQueue[Sequence]] = {
            SequenceState.WAITING: self.waiting,
            SequenceState.RUNNING: self.running,
            SequenceState.RESERVED: self.reserved,
            SequenceState.HELD: self.held,
        }
        if sequence.state is SequenceState.LOADING:
            del self.loading[sequence]
        elif sequence.state is not SequenceState.PARKED:
            queues[sequence.state].remove(sequence)
        sequence.state = SequenceState.ENDED
        self._tables.write(sequence)
        self._tables.give_back(sequence)
        if (group := sequence.group) in self.groups and group is not None and group.has_ended:
            self.groups.remove(group)

    def finish_loads(self) -> None:
        """Let those run whose blocks have come from host memory; what has not come is computed."""
        ended = [(one, n) for one, load in self.loading.items() if (n := load.num_good) is not None]
        for sequence, num_blocks in ended:
            del self.loading[sequence]
            self._tables.loaded(sequence, num_blocks)
            self._run(sequence)

    def schedule(self) -> Schedule:
        """Plan a step; sequences that are not in it wait for budget or memory."""
        limits = self._limits
        schedule = Schedule(
            limits.max_num_batched_tokens,
            limits.num_spare_tokens,
            limits.prefill_chunk_tokens,
            limits.last_chunk_tokens,
            0 if self._is_long_due else limits.small_step_tokens,
        )
        may_pass, self._is_long_due = not self._is_long_due, False
        for sequence in [*self.running]:
            if schedule.num_budget_tokens == 0:
                break
            if sequence.state is not SequenceState.RUNNING or sequence.is_prefilling:
                continue  # preempted by one before it, or not yet its turn
            if sequence.needs_last_token or self._awaits_its_end(sequence):
                continue
            if sequence.draft_token_ids:
                self._fit_drafts(sequence, schedule)
            if self._make_room(sequence, schedule):
                schedule.plan(sequence)
        if self.tbt_target_s is not None and schedule.scheduled:
            self._keep_promise(schedule)
        self._plan_prefills(schedule, may_pass=may_pass)
        if not self._is_long_due:
            self._admit_waiting(schedule)
        return schedule

    @property
    def promise_s(self) -> float | None:
        """What a step with decodes takes at most: its own target, or the strictest of those that
        decode, but no less than half of its own: one request shall not hold up all prompts. None:
        no target, or it was withdrawn, and nobody decodes to whom it was promised."""
        if self.tbt_target_s is None:
            return None
        if not self.is_promising and all(one.is_held for one in self.running):
            return None
        targets_ms = (one.request.sampling.tbt_target_ms for one in self.running)
        strictest_s = min([self.tbt_target_s, *(ms / 1000 for ms in targets_ms if ms)])
        return max(strictest_s, self.tbt_target_s / 2)

    def _keep_promise(self, schedule: Schedule) -> None:
        """Cut what the step has room for, beside its decodes, to what can be computed in time."""
        prefills = [one for one in self.running if one.is_prefilling]
        if not prefills and not self.waiting:
            return
        cost, promise_s = self._step_costs.estimate(), self.promise_s
        num_tokens = LEAST_PROMPT_TOKENS
        if cost is not None and promise_s is not None:
            context = prefills[0].num_launched_tokens if prefills else 0
            most = max(schedule.num_budget_tokens, schedule.num_chunk_tokens)
            beside = step_shape(schedule.scheduled)
            promise_s /= self._step_costs.overrun
            num_tokens = cost.promised_tokens(promise_s, beside, context, most)
            unpadded = self._limits.unpadded_rows(num_tokens + beside.num_decodes)
            num_tokens = max(unpadded - beside.num_decodes, min(num_tokens, LEAST_PROMPT_TOKENS))
        schedule.limit_prompts(num_tokens)

    def decodes(self) -> StepShape:
        """A step of all that decode, and nothing else."""
        return step_shape(
            ScheduledSequence(one, 1) for one in self.running if not one.is_prefilling
        )

    def step_with(self, request: Request, num_coming: int) -> StepShape:
        """A step of all that will decode here once their prompts are computed, with this request,
        its forks, and `num_coming` more like it that the engine does not have yet."""
        others = chain(self.waiting, self.loading, self.running)
        lengths = [one.num_tokens for one in others if not one.is_held]
        num_more = request.num_sequences + num_coming
        keys = sum(lengths) + num_more * request.num_known_tokens
        return StepShape(num_decodes=len(lengths) + num_more, keys=keys)

    @property
    def has_prefills(self) -> bool:
        """Whether a prompt that runs is not computed whole."""
        computed = (one.num_computed_tokens >= one.num_prefill_tokens for one in self.running)
        return bool(self.loading) or not all(computed)

    def waiting_tokens(self) -> Counter[int]:
        """Prompt tokens that are not computed yet, those of steps in flight too, by caller id.

        Of waiting prompts those that the prefix cache held when they came are left out.
        """
        waiting = Counter(self.waiting.waiting_tokens())
        for sequence in self.running:
            num_tokens = sequence.num_prefill_tokens - sequence.num_computed_tokens
            if num_tokens > 0:
                waiting[sequence.request.caller_id] += num_tokens
        for sequence, load in self.loading.items():
            num_loaded = len(load.host_blocks) * self._limits.block_size
            num_tokens = sequence.num_tokens - sequence.num_computed_tokens - num_loaded
            waiting[sequence.request.caller_id] += num_tokens
        return waiting

    def room_blocks(self, pending: Iterable[Request]) -> int:
        """Blocks beside the estimated peak of all that is here, and of requests that are not."""
        num_held_blocks = self._pool.counts.held
        return self._admission.room(chain(self._owners(), self.waiting), pending, num_held_blocks)

    def room_beside_running(self) -> int:
        """Blocks beside the estimated peak of all that has blocks."""
        return self._admission.room(self._owners(), (), self._pool.counts.held)

    def _plan_prefills(self, schedule: Schedule, *, may_pass: bool) -> None:
        """The next chunks of running prefills, and before each the waiting prompts that pass it."""
        is_passed = False
        for sequence in [one for one in self.running if one.is_prefilling]:
            num_before = len(schedule.scheduled)
            if may_pass:
                self._admit_waiting(schedule, before=sequence)
            is_passed |= len(schedule.scheduled) > num_before
            num_tokens, caller_id = sequence.num_unlaunched_tokens, sequence.request.caller_id
            is_stretching = is_passed and schedule.would_stretch(caller_id, num_tokens)
            if schedule.num_budget_tokens and not is_stretching:
                schedule.plan(sequence, is_in_queue=self._is_in_queue(sequence))
            else:
                self._is_long_due |= is_passed

    def _is_in_queue(self, sequence: Sequence) -> bool:
        """Whether other prompts wait, or another one is still being computed."""
        if not self._limits.prefill_chunk_tokens:
            return False  # it makes no difference
        others = (other for other in self.running if other is not sequence)
        return bool(self.waiting) or any(other.has_prefill_in_flight for other in others)

    def _awaits_its_end(self, sequence: Sequence) -> bool:
        """Whether a step in flight computes the last token that it can have here."""
        if sequence.num_unlaunched_tokens == 0:
            return True  # held behind its first token
        num_outputs = sequence.num_outputs + sequence.num_awaited_tokens
        return num_outputs >= self._limits.max_outputs(sequence.request)

    def make_room_for_drafts(self, sequence: Sequence, num_drafts: int) -> bool:
        """Slots for all its tokens and so many drafts, which it does not have yet, if there are
        any without preempting anybody."""
        sequence.draft_token_ids = (0,) * num_drafts
        has_room = self._tables.grow(sequence)
        sequence.draft_token_ids = ()
        return has_room

    def _fit_drafts(self, sequence: Sequence, schedule: Schedule) -> None:
        """Leave as many drafts as have room in the step; none, rather than preempt anybody."""
        drafts = sequence.draft_token_ids
        sequence.draft_token_ids = drafts[: schedule.num_budget_tokens - 1]
        if not self._tables.grow(sequence):
            sequence.draft_token_ids = ()

    def _make_room(self, sequence: Sequence, schedule: Schedule) -> bool:
        """Slots for all its tokens, preempting others if need be; False: not in this step."""
        if self._tables.has_room(sequence):
            return True  # as of most decodes in most steps
        if self._has_outgrown_pool(sequence, schedule):
            return False
        while not self._tables.grow(sequence):
            victim = self._next_victim()
            if victim is None:
                return False  # the rest is held, reserved or fenced, and will be released
            self._preempt(victim)
            if victim.group is not None:
                schedule.drop_preempted()
            if sequence.state is not SequenceState.RUNNING:
                return False
        return True

    def _admit_waiting(self, schedule: Schedule, *, before: Sequence | None = None) -> None:
        """Admit from the head of the queue on; only what may go `before` a running prefill."""
        while schedule.num_budget_tokens:
            sequence = self.waiting.head
            if sequence is None or not self._has_slot(sequence):
                return
            if self._refused_at == self.opportunities:
                return
            if self._has_outgrown_pool(sequence, schedule):
                continue
            if before is not None and not self._may_pass(sequence, before, num_tokens=1):
                return  # as far as can be told without a look into the prefix cache
            # At least one token must be computed, or there would be no logits to sample from.
            matched = self._tables.match(sequence, sequence.num_tokens - 1)
            in_host = self._tables.match_host(sequence, sequence.num_tokens - 1, len(matched))
            num_matched = len(matched) + len(in_host)
            num_tokens = sequence.num_tokens - num_matched * self._limits.block_size
            if schedule.would_stretch(sequence.request.caller_id, num_tokens):
                if before is None:
                    self._is_long_due = True
                    self.waiting.pin_head()  # it begins the next step, whoever comes
                return
            if before is None:
                may_begin = schedule.should_begin(num_tokens)
            else:
                is_passing = self._may_pass(sequence, before, num_tokens)
                may_begin = is_passing and schedule.can_end(num_tokens)
            if not may_begin:
                return
            if not self._try_admit(sequence, matched):
                self.waiting.pin_head()
                self._refused_at = self.opportunities
                return
            self.waiting.pop(num_tokens)
            self._take_in(sequence.group)
            sequence.num_prefill_tokens = sequence.num_tokens
            if in_host:
                sequence.state = SequenceState.LOADING
                self.loading[sequence] = self._tables.load(sequence, in_host)
            else:
                self._run(sequence)
                schedule.plan(sequence, is_in_queue=self._is_in_queue(sequence))
            if matched:
                self._tables.write(sequence)  # their second use

    def _may_pass(self, sequence: Sequence, prefill: Sequence, num_tokens: int) -> bool:
        """Whether a waiting prompt with so many tokens to compute goes before a running prefill.

        Its caller will have had no more than the other, who was charged for all of his prompt.
        """
        caller_id, other_id = sequence.request.caller_id, prefill.request.caller_id
        if caller_id == other_id or num_tokens >= prefill.num_unlaunched_tokens:
            return False
        served = self.waiting.served
        return served(caller_id) + num_tokens <= served(other_id)

    def _try_admit(self, sequence: Sequence, matched: list[int]) -> bool:
        admission = self._admission
        if sequence.is_held and not admission.has_credit(sequence, matched, self._holders()):
            return False
        if not admission.fits(sequence, matched, self._owners()):
            return False
        return self._tables.take(sequence, matched)

    def _owners(self) -> Iterator[Sequence]:
        """All that have blocks."""
        yield from self.running
        yield from self.loading
        yield from self.reserved
        yield from self.held

    def _holders(self) -> Iterator[Sequence]:
        yield from self.held
        yield from (s for s in chain(self.running, self.loading) if s.is_held)

    def _has_slot(self, sequence: Sequence | None = None) -> bool:
        """Whether one more may run, this one with its group."""
        num_seqs = len(self.running) + len(self.loading) + len(self.reserved)
        num_seqs += sum(group.num_absent for group in self.groups)
        if sequence is not None and sequence.group is not None:
            num_seqs += sequence.group.num_absent
        return num_seqs < self._limits.max_num_seqs

    def _take_in(self, group: SequenceGroup | None) -> None:
        """Its first member has got blocks."""
        if group is not None:
            self.groups.append(group)

    def _run(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.RUNNING
        bisect.insort(self.running, sequence, key=lambda s: s.arrival)

    def _has_outgrown_pool(self, sequence: Sequence, schedule: Schedule) -> bool:
        """Take it out if the whole pool could not hold its tokens any more.

        An awaited token may end it: it is judged once that is known.
        """
        try:
            self._limits.check_fits(sequence.num_slots)
            if sequence.group is not None and sequence.state is SequenceState.RUNNING:
                self._check_fits_group(sequence.group)
        except PromptTooLarge as error:
            if sequence.group is not None:
                for member in sequence.group.members:
                    self.remove(member)
                schedule.drop_preempted()
            elif not sequence.num_awaited_tokens:
                self.remove(sequence)
            else:
                return True
            schedule.failed.append((sequence, error))
            return True
        return False

    def _next_victim(self) -> Sequence | None:
        """Not the oldest nor its beams, and nothing held: the latest prompt that is half computed,
        or the latest arrival. A prompt that was preempted once has aged: it counts as what decodes
        does."""
        preemptible = [one for one in self.running if not one.is_held]
        if not preemptible:
            return None
        group = preemptible[0].group
        others = [one for one in preemptible[1:] if one.group is None or one.group is not group]
        victims = [one for one in others if one.is_young_prompt] or others
        return victims[-1] if victims else None

    def _check_fits_group(self, group: SequenceGroup) -> None:
        """Raise PromptTooLarge if the whole pool could not hold all its sequences' slots."""
        fresh = [self._limits.blocks_for(s.num_slots) - len(s.block_ids) for s in group.members]
        num_blocks = len(distinct_blocks(group.members)) + sum(fresh)
        if num_blocks > self._limits.capacity:
            raise PromptTooLarge(
                f"{len(fresh)} beams need {num_blocks} KV blocks; the pool has "
                f"{self._limits.capacity}"
            )

    def _preempt(self, sequence: Sequence) -> None:
        if sequence.group is not None:
            self.preempt_group(sequence.group)
            return
        self._take_blocks(sequence)
        sequence.state = SequenceState.WAITING
        self._come_back(sequence)
        self.num_preemptions += 1

    def _take_blocks(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._tables.store(sequence)  # what was pulled for it may not be there yet
        self.num_swaps += self._tables.swap_out(sequence)
        self._tables.give_back(sequence)
        sequence.was_preempted = True

    def _come_back(self, sequence: Sequence) -> None:
        """Queue it up before all others: it has been served, and its caller charged."""
        caller_id = sequence.request.caller_id
        self.waiting.add_first(sequence, caller_id, self._tables.num_to_compute(sequence))
        self._refused_at = None  # it is the head now
