"""The beam searches of an engine: the sequences that compute beams, and how they change after each
step.

    step n      beam 0  beam 1  beam 2      each has its candidates: all wait
                 │ │      │        x        beam_group.py decides
    step n + 1   0 2      1                 the first child continues in its parent's place, further
                                            ones fork, a parent without child releases its blocks

A fork shares its parent's full blocks and copies the partial last block, so a step copies at most
one block per beam. A search whose sequences are not all in one step waits for the last of them.
Preempted sequences resume as described in scheduler.py, from the tokens of their beams.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field, replace

from ...core.errors import BatonError, InvalidRequest, PromptTooLarge
from ...core.request.request import Request
from ..execution.batch import SampledToken
from ..execution.runner_protocols import Runner
from ..kv.block_pool import Reservation
from ..kv.limits import EngineLimits
from ..scheduling.forks import child_of
from ..scheduling.outputs import FinishedBeam, StepOutput
from ..scheduling.scheduler import Scheduler
from ..scheduling.sequence import Sequence, SequenceGroup, SequenceState
from .beam_group import BeamGroup, BeamRules, num_candidates


@dataclass(slots=True, eq=False)
class BeamSearch(SequenceGroup):
    """One search. `wanted`: the keys that are not cancelled. The first key gets hypothesis number
    `sample_index` of the request."""

    request: Request = field(kw_only=True)
    beams: BeamGroup = field(kw_only=True)
    wanted: set[str] = field(init=False)
    found: dict[Sequence, SampledToken] = field(default_factory=dict)  # candidates by beam
    num_forks: int = 0

    def __post_init__(self) -> None:
        self.wanted = set(self.keys)

    @property
    def is_ready(self) -> bool:
        """Whether every beam has its candidates."""
        return all(self.has_found(one) for one in self.members)

    def has_found(self, one: Sequence) -> bool:
        is_computed = one.num_computed_tokens == one.num_tokens
        return one.state is SequenceState.RUNNING and is_computed and one in self.found


@dataclass(slots=True)
class BeamSearches:
    """The searches of one engine, whose `sequences` it updates; `by_key` has each search under all
    keys of its requests. `_on_end(num_outputs)` is called when a search finishes."""

    _scheduler: Scheduler
    _sequences: MutableMapping[str, Sequence]
    _runner: Runner
    _eos_token_ids: frozenset[int]
    _on_end: Callable[[int], None]
    by_key: dict[str, BeamSearch] = field(default_factory=dict)
    _due: list[BeamSearch] = field(default_factory=list)  # with new candidates since `advance`

    def begin(self, sequence: Sequence, limits: EngineLimits) -> None:
        """Make the new sequence of a beam search request the first of its search; a held sequence
        only computes the first candidates of a search on another engine. Raises InvalidRequest if
        the search cannot begin here."""
        request, sampling = sequence.request, sequence.request.sampling
        if not sequence.is_held:
            _check(request, limits)
        stop_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids |= self._eos_token_ids
        rules = BeamRules.of(sampling, limits.max_outputs(request), stop_ids)
        sequence.num_candidates = num_candidates(rules.width, len(stop_ids))
        sequence.forks = ()
        if not sequence.is_held:
            keys = (request.key, *(fork.key for fork in request.forks))
            beams = BeamGroup(rules)
            sequence.group = BeamSearch(rules.width, keys, [sequence], request=request, beams=beams)

    def file(self, search: BeamSearch) -> None:
        """Register a search under its requests' keys, once its first sequence is queued."""
        self.by_key |= dict.fromkeys(search.keys, search)

    def abort(self, key: str) -> None:
        """Cancel one of the requests; the search ends with the last one."""
        search = self.by_key[key]
        search.wanted.discard(key)
        if not search.wanted:
            self.end(search)

    def fail(self, search: BeamSearch, error: BatonError, output: StepOutput) -> None:
        """End the search with an error for all its requests."""
        output.failed += [(key, error) for key in search.keys if key in search.wanted]
        self.end(search)

    def end(self, search: BeamSearch) -> None:
        """Remove the search and release what it holds."""
        for key in search.keys:
            del self.by_key[key]
        for sequence in search.members:
            self._remove(sequence)
        search.members = []

    def _remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.key]
        if sequence.state is not SequenceState.ENDED:
            self._scheduler.remove(sequence)

    # -- steps ------------------------------------------------------------------------------------

    def start(self, reservation: Reservation, first: SampledToken) -> None:
        """`LiveSequences.start` of a search; `first`: the candidates behind the known tokens."""
        sequence = self._sequences[reservation.key]
        self._scheduler.start(sequence)
        self.found(sequence, first)

    def found(self, sequence: Sequence, sampled: SampledToken) -> bool:
        """Record the candidates that may follow a beam's tokens. Returns whether they begin the
        search."""
        search = sequence.group
        assert isinstance(search, BeamSearch)
        search.found[sequence] = sampled
        self._due.append(search)
        return not search.is_forked

    def advance(self, output: StepOutput) -> bool:
        """Continue the searches whose beams all have their candidates; returns whether any had new
        ones."""
        due, self._due = dict.fromkeys(self._due), []
        ready = [search for search in due if search.members and self._has_all(search, output)]
        copies: list[tuple[int, int]] = []
        for search in ready:
            copies += self._advance(search, output)
        if copies:
            self._runner.copy_blocks(copies)
        return bool(due)

    def _has_all(self, search: BeamSearch, output: StepOutput) -> bool:
        """Whether the search can continue; sequences parked behind its first one run again."""
        leader, *others = search.members
        parked = [one for one in others if one.state is SequenceState.PARKED]
        if parked and search.has_found(leader):
            if not all(self._scheduler.forks.rejoin(one, leader) for one in parked):
                self._crowd_out(search, output)
            return False
        return search.is_ready

    def _advance(self, search: BeamSearch, output: StepOutput) -> list[tuple[int, int]]:
        """Advance by one token; returns blocks (source, target) to copy before the next step."""
        parents = search.members
        beams = search.beams.advance([search.found[one] for one in parents])
        search.found.clear()
        if not beams:
            self._finish(search, output)
            return []
        search.is_forked = True
        heirs = {beam.parent: beam for beam in reversed(beams)}  # each parent's first child
        for index, sequence in enumerate(parents):
            if index not in heirs:
                self._remove(sequence)
        copies, members = list[tuple[int, int]](), list[Sequence]()
        for beam in beams:
            parent = parents[beam.parent]
            if heirs[beam.parent] is beam:
                members.append(parent)
                continue
            child = self._child(search, parent, beam.token_id)
            self._sequences[child.key] = child
            copies += self._scheduler.forks.fork(parent, child)
            members.append(child)
        for parent_index, beam in heirs.items():
            parents[parent_index].token_ids.append(beam.token_id)
        search.members = members
        if any(one.state is SequenceState.PARKED for one in members):
            self._crowd_out(search, output)
            return []
        return copies

    def _child(self, search: BeamSearch, parent: Sequence, token_id: int) -> Sequence:
        """A further sequence that continues the parent's tokens."""
        search.num_forks += 1
        request_id = f"{search.request.request_id}.{search.num_forks}"
        request = replace(search.request, request_id=request_id, fork_ids=())
        child = child_of(parent, request, token_id)
        child.has_started = True  # the search is reported once, with its first sequence
        child.num_candidates, child.group = parent.num_candidates, search
        return child

    def _crowd_out(self, search: BeamSearch, output: StepOutput) -> None:
        """Preempt a search whose sequences do not all fit beside others; fail it if the whole pool
        has no room for them. It stays out until other requests release blocks."""
        if self._scheduler.forks.has_all(search):
            error = PromptTooLarge(f"the pool has no room for all {len(search.members)} beams")
            self.fail(search, error, output)
        else:
            self._scheduler.preemption.preempt_group(search)
            queues = self._scheduler.queues
            queues.refuse_head(queues.waiting)

    def _finish(self, search: BeamSearch, output: StepOutput) -> None:
        first = search.request.sample_index
        best = search.beams.best(first + len(search.keys))
        for key, hypothesis in zip(search.keys, best[first:], strict=False):
            if key in search.wanted:
                token_ids, logprobs = hypothesis.tokens()
                reason = hypothesis.finish_reason
                output.beams.append(FinishedBeam(key, token_ids, logprobs, reason))
        for key in search.keys[max(0, len(best) - first) :]:
            if key in search.wanted:
                error = InvalidRequest(f"there are only {len(best)} outputs to choose from", "n")
                output.failed.append((key, error))
        self._on_end(len(output.beams[-1].token_ids) if output.beams else 0)
        self.end(search)


def _check(request: Request, limits: EngineLimits) -> None:
    """Raise InvalidRequest if the engine has no room for the beams of the request."""
    width = request.num_sequences
    if width > limits.max_num_seqs:
        raise InvalidRequest(
            f"best_of {width} is more than the {limits.max_num_seqs} sequences of a step",
            "best_of",
        )
    limits.check_fits(request.num_known_tokens + 1 + (width - 1) * limits.block_size)
