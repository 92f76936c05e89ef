"""Every reachable state of one hand-off, for a bounded number of faults.

Breadth first: the first violation that the search finds has the shortest sequence of moves, which
it reports. From every reached state, everything that happens without further faults is executed: it
must lead to a final state in which nothing is left.
"""

from __future__ import annotations

import gc
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from .handoff_moves import FAULTS, Action, Moves, State

_MAX_CALM_STEPS = 500


@dataclass(frozen=True, slots=True)
class Bounds:
    """Up to `faults` faults of these kinds in one sequence of moves, each possibly more than once;
    the clock advances to the next deadline up to `advances` times.

    The gateway dispatches up to `attempts` times: the next one at any moment, or, unless
    `is_impatient`, once the previous one has ended at one side at least. If `launches`, the source
    announces chunks when they are launched, to a puller that `sees_steps`.
    """

    faults: int
    advances: int
    attempts: int = 2
    is_impatient: bool = True
    kinds: frozenset[str] = FAULTS
    launches: bool = False
    sees_steps: bool = False


class Violation(AssertionError):
    """What went wrong, and the shortest sequence of moves that leads there."""


@dataclass(frozen=True, slots=True)
class Found:
    """The statistics of a search without a violation."""

    num_states: int
    num_transitions: int
    num_sides: int  # different states of a source or a puller
    depth: int
    num_final_states: int
    ends: Counter[tuple[str, ...]]  # how the attempts' intents ended, by number of final states
    transfer_states: frozenset[str]  # all states of a transfer of either side
    seconds: float


class Search:
    """One search; `run` once."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._moves = Moves(launches=bounds.launches, sees_steps=bounds.sees_steps)
        self._story: dict[State, tuple[State, Action] | None] = {}  # the first path to each state
        self._is_calmed: set[State] = set()
        self._ends: Counter[tuple[str, ...]] = Counter()

    def run(self) -> Found:
        """Raises Violation."""
        gc.disable()  # all objects are kept: garbage collection would take half the time
        try:
            return self._run()
        finally:
            gc.enable()

    def _run(self) -> Found:
        start_s = time.perf_counter()
        first = self._moves.first_state()
        self._story[first] = None
        frontier, depth, num_transitions = deque([first]), 0, 0
        while frontier:
            following: deque[State] = deque()
            for state in frontier:
                self._check_calm(state)
                for action in self._actions(state):
                    num_transitions += 1
                    after = self._take(state, action)
                    if after not in self._story:
                        self._story[after] = (state, action)
                        following.append(after)
            frontier = following
            depth += bool(frontier)
        return Found(
            num_states=len(self._story),
            num_transitions=num_transitions,
            num_sides=len(self._moves.sides),
            depth=depth,
            num_final_states=sum(self._ends.values()),
            ends=self._ends,
            transfer_states=frozenset(
                s for side in self._moves.sides for s in side.transfer_states()
            ),
            seconds=time.perf_counter() - start_s,
        )

    def _actions(self, state: State) -> Iterator[Action]:
        yield from self._moves.own_actions(state)
        if not state.is_linked:
            yield ("link",)
        if len(state.attempts) < self._bounds.attempts and self._may_dispatch(state):
            yield ("dispatch",)
        if (
            state.num_advances < self._bounds.advances
            and self._moves.next_deadline_s(state) is not None
        ):
            yield ("advance",)
        if state.num_faults < self._bounds.faults:
            yield from (
                fault for fault in self._moves.faults(state) if fault[0] in self._bounds.kinds
            )

    def _may_dispatch(self, state: State) -> bool:
        source, puller = self._moves.source(state), self._moves.puller(state)
        last = state.attempts[-1]
        return (
            self._bounds.is_impatient
            or (last.source, last.puller) != (source.incarnation, puller.incarnation)
            or source.over_s.get(last.transfer_id) is not None
            or puller.ends.get(last.transfer_id) is not None
        )

    def _take(self, state: State, action: Action) -> State:
        try:
            return self._moves.after(state, action)
        except AssertionError as error:
            raise Violation(error, [*self._story_of(state), action]) from error

    def _check_calm(self, state: State) -> None:
        """Liveness: without more faults every transfer ends, and nothing is left."""
        way: list[State] = []
        after = state
        try:
            while after not in self._is_calmed:
                way.append(after)
                assert len(way) < _MAX_CALM_STEPS, "it never comes to rest"
                following = self._moves.calm(after)
                if following == after:
                    self._check_final(after)
                    break
                after = following
        except AssertionError as error:
            story = [*self._story_of(state), ("then calm", len(way), "steps")]
            raise Violation(error, story) from error
        self._is_calmed.update(way)

    def _check_final(self, state: State) -> None:
        source, puller = self._moves.source(state), self._moves.puller(state)
        source.assert_nothing_left()
        puller.assert_nothing_left()
        assert not state.offers and not state.intents
        self._ends[tuple(str(end) for end in puller.ends.values())] += 1

    def _story_of(self, state: State) -> list[Action]:
        actions: list[Action] = []
        step = self._story.get(state)
        while step is not None:
            state, action = step
            actions.append(action)
            step = self._story[state]
        return actions[::-1]
