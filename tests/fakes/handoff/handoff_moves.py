"""One hand-off as a state, and all transitions of the state.

    State = source side x puller side x what is on the wire x time x dispatches x faults so far

A side depends only on itself, so each of its moves is computed once, by the production code, and
cached; a transition of the state combines cached moves. Knows no bounds: `own_actions` need neither
fault nor time, `faults` are possible errors, `calm` does what will happen anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from baton.kv_transfer.protocol.messages import Refused

from ..object_graphs import forked, frozen
from .handoff_sides import NUM_BLOCKS, Attempt, Memory, PullerSide, SourceSide, mapped

Side: TypeAlias = SourceSide | PullerSide
Action: TypeAlias = tuple[Any, ...]  # its name, then its arguments
LINKED, LOST, MESSAGE = "linked", "lost", "message"

FAULTS = frozenset(
    {
        "break",  # the stream, with all messages on it
        "replace",  # the stream, before either side noticed that the old one broke
        "crash",  # of either side; it comes back at once with a new incarnation
        "double",  # the first message or notice on the wire is delivered twice
        "swap",  # the second is delivered before the first
        "lost dispatch",  # one side never receives an attempt
        "cancel",  # by the gateway at either side, before or after the dispatch arrived
        "rewrite",  # of all blocks of the source that are free at this moment
        "stranger",  # a peer without a ticket sends every possible message to either side
    }
)
_HARMLESS = frozenset({"double", "rewrite", "stranger"})  # must not even fail a transfer


class State(NamedTuple):
    source: int  # the number of a side in the search
    puller: int
    to_source: tuple[Action, ...]  # (kind, sender's incarnation, message's number)
    to_puller: tuple[Action, ...]
    is_linked: bool
    now_s: float
    dead: tuple[tuple[str, Memory], ...]  # memory of dead sources that is still mapped
    attempts: tuple[Attempt, ...]
    offers: tuple[int, ...]  # dispatches on their way to the source, by attempt
    intents: tuple[int, ...]  # ... to the puller
    completed: frozenset[int]
    is_disturbed: bool  # an event happened that may fail a transfer
    num_faults: int  # so far
    num_advances: int


@dataclass(frozen=True, slots=True)
class _Move:
    """The effect of one call on one side."""

    side: int
    sent: tuple[tuple[str, int] | None, ...]  # (receiver, message); None: it closes the stream
    done: tuple[tuple[str, int], ...]


class Moves:
    """All sides reached, numbered, and the effect of each call on each of them."""

    def __init__(self, *, launches: bool = False, sees_steps: bool = False) -> None:
        self._launches = launches
        self._sees_steps = sees_steps
        self.sides: list[Side] = []
        self._numbers: dict[Any, int] = {}
        self._messages: list[Any] = []
        self._message_numbers: dict[Any, int] = {}
        self._moves: dict[Action, _Move] = {}
        self._memory: dict[int, Memory] = {}

    def first_state(self) -> State:
        """The pair is ready, and the first attempt is dispatched."""
        source = self._number(SourceSide(f"{1:032x}", launches=self._launches))
        puller = self._number(PullerSide(f"{2:032x}", sees_steps=self._sees_steps))
        state = State(source, puller, (), (), False, 0.0, (), (), (), (), frozenset(), False, 0, 0)
        state = self._linked(state)
        while state.to_source or state.to_puller or self.puller(state).openings:
            state = self.calm(state)
        return self._dispatched(state)

    # ---- sides

    def source(self, state: State) -> SourceSide:
        return self.sides[state.source]  # type: ignore[return-value]

    def puller(self, state: State) -> PullerSide:
        return self.sides[state.puller]  # type: ignore[return-value]

    def _number(self, side: Side) -> int:
        key = frozen(side)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.sides)
            self.sides.append(side)
            if isinstance(side, SourceSide):
                self._memory[number] = side.snapshot()
        return number

    def _message_number(self, message: Any) -> int:
        key = frozen(message)
        number = self._message_numbers.get(key)
        if number is None:
            number = self._message_numbers[key] = len(self._messages)
            self._messages.append(message)
        return number

    def _move(self, number: int, now_s: float, call: Action) -> _Move:
        key = (number, now_s, call)
        move = self._moves.get(key)
        if move is None:
            move = self._moves[key] = self._compute_move(number, now_s, call)
        return move

    def _compute_move(self, number: int, now_s: float, call: Action) -> _Move:
        side = forked(self.sides[number])
        side.clock._now_s = now_s  # equal sides are reached at many times
        name, *arguments = call
        if name == "hear":
            arguments[1] = self._messages[arguments[1]]
        getattr(side, name)(*arguments)
        side.tidy()
        sent = tuple(
            None if isinstance(message, Refused) else (peer, self._message_number(message))
            for peer, message in ((each.incarnation, each.message) for each in side.outbox)
        )
        done = tuple(side.done)
        side.outbox.clear()
        side.done.clear()
        return _Move(self._number(side), sent, done)

    def _at_source(self, state: State, *call: Any) -> State:
        move = self._move(state.source, state.now_s, call)
        for _, attempt in move.done:
            is_over = attempt in state.completed or self.puller(state).gave_up(attempt)
            assert is_over, "released what the puller has not got"
        incarnation = self.source(state).incarnation
        state = state._replace(source=move.side)
        return self._carry(state, move, incarnation, self.puller(state).incarnation)

    def _at_puller(self, state: State, *call: Any) -> State:
        move = self._move(state.puller, state.now_s, call)
        for how, attempt in move.done:
            if how == "completed":
                state = state._replace(completed=state.completed | {attempt})
            else:
                assert state.is_disturbed, "failed although nothing happened to it"
        incarnation = self.puller(state).incarnation
        state = self._forget_memory(state._replace(puller=move.side))
        return self._carry(state, move, incarnation, self.source(state).incarnation)

    def _carry(self, state: State, move: _Move, sender: str, receiver: str) -> State:
        """Put the sent messages on the wire, if there is a stream and it leads to their
        receiver."""
        is_source = sender == self.source(state).incarnation
        for sent in move.sent:
            if sent is None:
                state = self._broken(state)
            elif state.is_linked and sent[0] == receiver:
                event = (MESSAGE, sender, sent[1])
                if is_source:
                    state = state._replace(to_puller=(*state.to_puller, event))
                else:
                    state = state._replace(to_source=(*state.to_source, event))
        return state

    # ---- the wire

    def _linked(self, state: State) -> State:
        """A new stream. Each side is notified after everything already queued for it."""
        return state._replace(
            is_linked=True,
            to_source=(*state.to_source, (LINKED, self.puller(state).incarnation, 0)),
            to_puller=(*state.to_puller, (LINKED, self.source(state).incarnation, 0)),
        )

    def _broken(self, state: State) -> State:
        """The stream ends; each side is notified after everything already queued for it."""
        if not state.is_linked:
            return state
        return state._replace(
            is_linked=False,
            to_source=(*state.to_source, (LOST, self.puller(state).incarnation, 0)),
            to_puller=(*state.to_puller, (LOST, self.source(state).incarnation, 0)),
        )

    def _cut(self, state: State) -> State:
        """Drop all undelivered messages. (Messages that arrive before the cut are
        delivered by earlier actions.)"""
        return state._replace(
            to_source=tuple(e for e in state.to_source if e[0] is not MESSAGE),
            to_puller=tuple(e for e in state.to_puller if e[0] is not MESSAGE),
        )

    def _heard(self, state: State, is_source: bool, index: int, *, stays: bool = False) -> State:
        queue = state.to_source if is_source else state.to_puller
        kind, sender, number = queue[index]
        if not stays:
            queue = queue[:index] + queue[index + 1 :]
        state = state._replace(to_source=queue) if is_source else state._replace(to_puller=queue)
        call = {LINKED: ("link", sender), LOST: ("lose", sender), MESSAGE: ("hear", sender, number)}
        if is_source:
            return self._at_source(state, *call[kind])
        return self._at_puller(state, *call[kind])

    # ---- what can happen

    def own_actions(self, state: State) -> Iterator[Action]:
        """The actions that need no fault and no time."""
        source, puller = self.source(state), self.puller(state)
        if state.to_source:
            yield ("source hears",)
        if state.to_puller:
            yield ("puller hears",)
        if puller.openings:
            yield ("window opens",)
        for pull in puller.pulls:
            yield ("copy", *pull)
        if puller.reports:
            yield ("pull is reported",)
        for number in state.intents:
            yield ("intend", number)
        if source.pool.num_available == NUM_BLOCKS - 2:
            for number in state.offers:
                yield ("offer", number)
        for name, (incarnation, early) in puller.early.items():
            if self._memory_of(state, incarnation).num_steps >= early.step:
                yield ("begin", *name)
        for transfer_id in source.num_computed:
            yield ("compute" if source.has_launched(transfer_id) else "launch", transfer_id)
        for name, side in (("source ticks", source), ("puller ticks", puller)):
            if side.machine.next_deadline_s() <= state.now_s:
                yield (name,)

    def faults(self, state: State) -> Iterator[Action]:
        if state.is_linked:
            yield ("break",)
            yield ("replace",)
        for name, queue in (("source", state.to_source), ("puller", state.to_puller)):
            yield ("crash", name)
            if queue:
                yield ("double", name)
            if len(queue) > 1 and queue[0] != queue[1]:
                yield ("swap", name)
            for attempt in state.attempts:
                yield ("cancel", name, attempt.number)
        for name, numbers in (("source", state.offers), ("puller", state.intents)):
            for number in numbers:
                yield ("lost dispatch", name, number)
        if self.source(state).pool.num_available:
            yield ("rewrite",)
        for attempt in state.attempts:
            # Before the dispatch a source cannot know the owner of a transfer; its id is a secret.
            if attempt.transfer_id in self.source(state).over_s:
                yield ("stranger", "source", attempt.transfer_id)
            yield ("stranger", "puller", attempt.transfer_id)

    def after(self, state: State, action: Action) -> State:
        name = action[0]
        match name:
            case "source hears" | "puller hears":
                return self._heard(state, name == "source hears", 0)
            case "window opens":
                return self._at_puller(state, "open_window")
            case "copy":
                return self._copied(state, action[1:])
            case "pull is reported":
                return self._at_puller(state, "report")
            case "intend":
                state = state._replace(intents=_without(state.intents, action[1]))
                return self._at_puller(state, "intend", state.attempts[action[1] - 1])
            case "offer":
                state = state._replace(offers=_without(state.offers, action[1]))
                return self._at_source(state, "offer", state.attempts[action[1] - 1])
            case "compute" | "launch":
                return self._at_source(state, name, action[1])
            case "begin":
                return self._at_puller(state, "begin", action[1:])
            case "source ticks":
                return self._at_source(state, "tick")
            case "puller ticks":
                return self._at_puller(state, "tick")
            case "link":
                return self._linked(state)
            case "dispatch":
                return self._dispatched(state)
            case "advance":
                return self._advanced(state)._replace(num_advances=state.num_advances + 1)
            case _:
                is_disturbed = state.is_disturbed or name not in _HARMLESS
                num_faults = state.num_faults + 1
                state = state._replace(num_faults=num_faults, is_disturbed=is_disturbed)
                return self._after_fault(state, action)

    def _after_fault(self, state: State, action: Action) -> State:
        match action:
            case ("break",):
                return self._broken(self._cut(state))
            case ("replace",):
                return self._linked(self._cut(state))
            case ("crash", name):
                return self._crashed(state, is_source=name == "source")
            case ("double", name):
                return self._heard(state, name == "source", 0, stays=True)
            case ("swap", name):
                return self._heard(state, name == "source", 1)
            case ("lost dispatch", "source", number):
                return state._replace(offers=_without(state.offers, number))
            case ("lost dispatch", _, number):
                return state._replace(intents=_without(state.intents, number))
            case ("cancel", "source", number):
                return self._at_source(state, "withdraw", state.attempts[number - 1])
            case ("cancel", _, number):
                return self._at_puller(state, "cancel", state.attempts[number - 1])
            case ("stranger", "source", transfer_id):
                return self._at_source(state, "hear_stranger", transfer_id)
            case ("stranger", _, transfer_id):
                return self._at_puller(state, "hear_stranger", transfer_id)
            case _:
                assert action == ("rewrite",)
                return self._at_source(state, "rewrite")

    def _dispatched(self, state: State) -> State:
        """Dispatch the gateway's next attempt, with a new transfer, to both current sides."""
        number = len(state.attempts) + 1
        sides = self.source(state).incarnation, self.puller(state).incarnation
        return state._replace(
            attempts=(*state.attempts, Attempt(number, *sides)),
            offers=(*state.offers, number),
            intents=(*state.intents, number),
        )

    def _copied(self, state: State, pull: tuple[str, int]) -> State:
        source, _ = self.puller(state).pulls[pull]
        return self._at_puller(state, "copy", pull, self._memory_of(state, source))

    def _memory_of(self, state: State, source: str) -> Memory:
        is_alive = source == self.source(state).incarnation
        return self._memory[state.source] if is_alive else dict(state.dead)[source]

    def _crashed(self, state: State, *, is_source: bool) -> State:
        """A side loses all its state and restarts at once. A mapping of a dead source's memory
        stays."""
        state = self._broken(self._cut(state))
        old = self.source(state) if is_source else self.puller(state)
        incarnation = f"{int(old.incarnation, 16) + 2:032x}"
        if is_source:
            memory = (old.incarnation, self._memory[state.source])
            new = self._number(SourceSide(incarnation, launches=self._launches))
            state = state._replace(source=new, to_source=(), dead=(*state.dead, memory))
            return self._forget_memory(state)
        new = self._number(PullerSide(incarnation, sees_steps=self._sees_steps))
        return self._forget_memory(state._replace(puller=new, to_puller=()))

    def _forget_memory(self, state: State) -> State:
        if not state.dead:
            return state
        alive = mapped(self.puller(state))
        return state._replace(dead=tuple(each for each in state.dead if each[0] in alive))

    # ---- time

    def next_deadline_s(self, state: State) -> float | None:
        """Deadlines that are due already wait for their side's tick, not for time."""
        sides = (self.source(state), self.puller(state))
        dues_s = [side.machine.next_deadline_s() for side in sides]
        return min((d for d in dues_s if state.now_s < d < math.inf), default=None)

    def _advanced(self, state: State) -> State:
        due_s = self.next_deadline_s(state)
        assert due_s is not None
        return state._replace(now_s=due_s, is_disturbed=True)

    def calm(self, state: State) -> State:
        """The next event that happens without faults; the same state if there is none."""
        action = next(self.own_actions(state), None)
        if action is not None:
            return self.after(state, action)
        if not state.is_linked:
            return self._linked(state)
        if self.next_deadline_s(state) is not None:
            return self._advanced(state)
        after = state._replace(now_s=state.now_s + 31.0)  # tombstones have no deadline of their own
        after = self._at_puller(self._at_source(after, "tick"), "tick")
        is_over = (after.source, after.puller) == (state.source, state.puller)
        return state if is_over else after


def _without(numbers: tuple[int, ...], number: int) -> tuple[int, ...]:
    return tuple(each for each in numbers if each != number)
