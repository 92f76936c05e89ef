"""An engine's speculation: which sequences have drafts in the next step, how many, and which were
accepted.

    step()   draft ─► schedule ─► launch ............... collect ─► verify
             └ needs all tokens, so it must wait for the step in flight. A runner that runs ahead
               waits if drafts are worth it, and else launches the next step without drafts

A draft is accepted if it equals the token that the target model samples at its position with that
position's key, so outputs are the same as without drafts. The token after the last accepted draft
is sampled in the same step; the KV of rejected drafts is overwritten by the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as Row
from dataclasses import replace
from typing import TypeAlias

from ...core.errors import InvalidRequest
from ...core.ports import Clock
from ...core.step_cost import StepCost
from ...core.step_shape import StepShape
from ..execution.batch import SampledToken
from ..execution.constraints import Constraints
from ..kv.limits import EngineLimits
from ..scheduling.costs.step_cost_estimator import StepCostEstimator
from ..scheduling.outputs import SpeculationCounts
from ..scheduling.pipeline_share import decodes_of_step
from ..scheduling.queues import Queues
from ..scheduling.sequence import Sequence, SequenceState
from .acceptance import Acceptance, AcceptanceRate, Mean
from .lengths import Lengths, best_lengths
from .proposer import Context, Proposer

MakeRoom: TypeAlias = Callable[[Sequence, int], bool]

_PROBE_SHARE = 0.01  # of the time, for probes: drafts that are not expected to pay
_FIRST_GAIN = 1.5
_LONGEST_PROBE_S, _LEAST_PROBE = 0.1, 0.02  # the latter as a share of a step


class Speculator:
    """The speculation of one engine; `runs_ahead`: whether its runner does."""

    def __init__(
        self,
        proposer: Proposer,
        limits: EngineLimits,
        costs: StepCostEstimator,
        constraints: Constraints | None,
        eos_token_ids: Collection[int],
        clock: Clock,
        *,
        runs_ahead: bool,
    ) -> None:
        most = proposer.max_drafts
        self._proposer, self._most, self._runs_ahead = proposer, most, runs_ahead
        self._limits, self._costs, self._clock = limits, costs, clock
        self._constraints = constraints
        self._eos_token_ids = eos_token_ids
        self._acceptance = Acceptance(most)
        self._tallies: dict[str, AcceptanceRate] = {}
        self._drafted: list[Sequence] = []
        self._last_shape = StepShape()  # an estimate of the next step's prompts
        self._gain = Mean(_FIRST_GAIN)
        self._wait_s = Mean()
        self._draft_s = Mean()  # per draft of the longest sequence, if drafts take steps
        self._drafting_s = 0.0  # time of drafting for the next step
        self._late_s = {False: Mean(), True: Mean()}  # seconds beyond the estimate; key: had drafts
        self._spare_s = 0.0  # time left for probes
        self._num_probes = 0
        self._num_drafts = self._num_draft_tokens = 0
        self._accepted = [0] * most

    # -- before a step ----------------------------------------------------------------------------

    def is_due(self, queues: Queues) -> bool:
        """Whether the next step should have drafts, even if it must wait for the step in flight."""
        if not any(map(_may_have_drafts, queues.running)):
            return False
        return self._gain.value > 1 or self._spare_s >= max(self._wait_s.value, 1e-6)

    def draft(self, queues: Queues, make_room: MakeRoom) -> None:
        """Give sequences the drafts that are expected to pay; no step is in flight. `make_room`:
        Preemption's, for drafts whose KV is computed."""
        if not self.is_due(queues):
            return
        began_s = self._clock.monotonic_s()
        drafting = [one for one in queues.running if _may_have_drafts(one)]
        with_room = [(one, room) for one in drafting if (room := self._room(one))]
        if not with_room:
            return
        sequences, rooms = zip(*with_room, strict=True)
        self._know(sequences)
        if self._proposer.takes_steps:
            wanted = self._lengths(queues, sequences, rooms)
            chosen = zip(sequences, wanted, strict=True)
            found = self._propose(Context(one, n) for one, n in chosen if n and make_room(one, n))
        else:
            found = self._propose(map(Context, sequences, rooms))
            counts = [len(drafts) for _, drafts in found]
            lengths = self._lengths(queues, sequences, counts)
            pairs = zip(found, lengths, strict=True)
            found = [(one, drafts[:length]) for (one, drafts), length in pairs]
        for sequence, drafts in found:
            if drafts:
                sequence.draft_token_ids, sequence.num_clear_tokens = drafts, 0
                self._drafted.append(sequence)
        if not self._runs_ahead:
            self.waited(self._clock.monotonic_s() - began_s)

    def _propose(self, contexts: Iterable[Context]) -> list[tuple[Sequence, Row[int]]]:
        """The drafts of each context, without those that the grammar rejects."""
        asked = [*contexts]
        if not asked:
            return []
        began_s = self._clock.monotonic_s()
        proposed = self._proposer.propose(asked)
        if self._proposer.takes_steps:
            self._drafting_s = self._clock.monotonic_s() - began_s
            self._draft_s.observe(self._drafting_s / max(one.max_drafts for one in asked))
        pairs = zip(asked, proposed, strict=True)
        return [(one.sequence, self._fitting(one.sequence, drafts)) for one, drafts in pairs]

    def settle(self, shape: StepShape) -> bool:
        """Record that a step of this shape is launched; returns whether it has drafts. Drafts of
        sequences that are not in the step are dropped."""
        self._last_shape = shape
        has_drafts = False
        for sequence in self._drafted:
            if not sequence.num_awaited_tokens:
                sequence.draft_token_ids = ()
            has_drafts |= len(sequence.draft_token_ids) > 0
        self._drafted = []
        return has_drafts

    def waited(self, seconds: float) -> None:
        """Record the time that a step was delayed to have drafts."""
        seconds, self._drafting_s = max(0.0, seconds - self._drafting_s), 0.0
        self._wait_s.observe(min(seconds, _LONGEST_PROBE_S))

    # -- after a step -----------------------------------------------------------------------------

    def passed(self, shape: StepShape, seconds: float, *, has_drafts: bool) -> None:
        """Record the time of a step with decodes; a share of the time may be spent on probes."""
        self._spare_s = min(self._spare_s + _PROBE_SHARE * seconds, _LONGEST_PROBE_S)
        cost = self._costs.estimate()
        if cost is not None and not shape.num_prompt_tokens:
            expected_s = cost.seconds(shape)
            late_s = min(seconds, 2 * expected_s) - expected_s
            self._late_s[has_drafts].observe(late_s)

    @property
    def _overhead_s(self) -> float:
        """The cost of drafts beside their rows: waiting, and how much more steps with drafts exceed
        their expected time than steps without."""
        return self._wait_s.value + max(0.0, self._late_s[True].value - self._late_s[False].value)

    def accepted_tokens(self, sequence: Sequence, sampled: SampledToken) -> Iterator[SampledToken]:
        """The tokens that a step adds to a sequence: its accepted drafts, and the one after them.
        Those behind a token that ends the sequence are discarded.

        Rolls the sequence back to these tokens: they are awaited, and no drafts are left.
        """
        drafts, sequence.draft_token_ids = sequence.draft_token_ids, ()
        tokens = []
        for draft, token in zip(drafts, sampled.at_drafts, strict=True):
            tokens.append(token)
            if token.token_id != draft:
                break
        else:
            tokens.append(sampled)
        num_accepted = len(tokens) - 1
        sequence.num_awaited_tokens = len(tokens)
        sequence.num_launched_tokens = sequence.num_computed_tokens + len(tokens)
        self._num_drafts += 1
        self._num_draft_tokens += len(drafts)
        own = self._tallies.setdefault(sequence.key, AcceptanceRate())
        self._acceptance.observe(own, len(drafts), num_accepted)
        for position, token in enumerate(tokens):
            if sequence.state is SequenceState.ENDED:
                return
            if position < num_accepted:
                self._accepted[position] += 1
            yield token

    @property
    def counts(self) -> SpeculationCounts:
        return SpeculationCounts(self._num_drafts, self._num_draft_tokens, tuple(self._accepted))

    # -- internal ---------------------------------------------------------------------------------

    def _room(self, sequence: Sequence) -> int:
        """How many drafts fit in the sequence's output, with one token after them."""
        num_left = self._limits.max_outputs(sequence.request) - sequence.num_outputs
        return min(self._most, num_left - 1)

    def _know(self, sequences: Row[Sequence]) -> None:
        """Keep the tallies of these sequences only."""
        kept = {one.key: self._tallies.get(one.key) or AcceptanceRate() for one in sequences}
        for tally in kept.values():
            tally.fade()
        self._tallies = kept

    def _fitting(self, sequence: Sequence, drafts: Row[int]) -> Row[int]:
        """The drafts that the sequence's grammar allows, if it has one, up to the first EOS."""
        if self._constraints is None or sequence.constrained is None or not drafts:
            return drafts
        end = next((i for i, one in enumerate(drafts) if one in self._eos_token_ids), len(drafts))
        outputs = sequence.token_ids[sequence.num_prompt_tokens :]
        sample = (sequence.constrained, outputs, drafts[:end])
        try:
            return drafts[: self._constraints.num_fitting(sample)]
        except InvalidRequest:  # the sequence fails in this step
            return ()

    def _lengths(self, queues: Queues, sequences: Row[Sequence], num_drafts: Row[int]) -> Row[int]:
        """How many of the `num_drafts` drafts of each sequence to verify."""
        decodes = decodes_of_step(queues.running, self._limits.num_stages)
        most = max(0, self._limits.max_num_batched_tokens - decodes.num_decodes)
        tallies = [self._tallies[one.key] for one in sequences]
        chances = self._acceptance.chances(tallies, num_drafts)
        cost = self._costs.estimate()
        if cost is None:
            lengths, left = [], most
            for count in num_drafts:
                lengths.append(min(left, count))
                left -= lengths[-1]
            return lengths
        beside = decodes
        if queues.has_prefills or queues.waiting:
            last = self._last_shape
            prompts = (last.num_prompt_tokens, last.pairs)
            beside = StepShape(*prompts, decodes.num_decodes, decodes.keys)
        draft_s = self._draft_s.value
        found = best_lengths(chances, beside, cost, self._overhead_s, most, draft_s)
        self._gain.observe(found.gain)
        if any(found.num_drafts):
            if found.gain < 1:
                self._spare_s -= found.extra_s
            return found.num_drafts
        self._spare_s -= self._wait_s.value
        return self._probe(found, num_drafts, beside, cost)

    def _probe(
        self, found: Lengths, num_drafts: Row[int], beside: StepShape, cost: StepCost
    ) -> Row[int]:
        """Occasionally verify the drafts of one sequence while no drafts are expected to pay."""
        lengths = found.num_drafts
        candidates = [index for index, count in enumerate(num_drafts) if count]
        if not candidates:
            return lengths
        index = candidates[self._num_probes % len(candidates)]
        step_s, count = cost.seconds(beside), num_drafts[index]
        longer = replace(beside, num_decodes=beside.num_decodes + count)
        extra_s = max(cost.seconds(longer) - step_s, _LEAST_PROBE * step_s)
        extra_s += count * self._draft_s.value
        if self._spare_s >= extra_s:
            self._num_probes += 1
            self._spare_s -= extra_s
            lengths[index] = count
        return lengths


def _may_have_drafts(sequence: Sequence) -> bool:
    """Whether the sequence decodes, and its request allows drafts."""
    if not sequence.request.sampling.speculative or not sequence.awaits_tokens:
        return False  # held sequences and beams await no token
    return sequence.state is SequenceState.RUNNING and not sequence.is_prefilling
