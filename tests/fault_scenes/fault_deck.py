"""The faults of a sweep: cards that name a role, a moment of a request, and the fault.

    prefill   kill at each chunk; pause; hang
    decode    kill at each token; pause; hang

A deck is shuffled, dealt to its end and shuffled again, so that every moment is covered.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from fault_scenes.breakages import LONG, NUM_CHUNKS, has_computed
from fault_scenes.faults import Scene, Stream

NUM_TOKENS = 24  # of a victim
PAUSE_S = 0.2  # too short to be noticed
TRIES = 3  # to hit a card's moment
HANG_S = 1.6  # beyond the gateway's limit of 1.2 s


@dataclass(frozen=True)
class Card:
    """`at`: the number of computed chunks, or of sent tokens, at which it strikes."""

    role: str
    what: str  # kill, pause, hang
    at: int


PREFILL_CARDS = (
    *(Card("prefill", "kill", chunk) for chunk in range(NUM_CHUNKS)),
    *(Card("prefill", what, chunk) for what in ("pause", "hang") for chunk in (1, 6)),
)
DECODE_CARDS = (
    *(Card("decode", "kill", token) for token in range(1, NUM_TOKENS)),
    *(Card("decode", what, token) for what in ("pause", "hang") for token in (1, 8, 20)),
)


def dealt(cards: tuple[Card, ...], chance: random.Random) -> Iterator[Card]:
    while True:
        yield from chance.sample(cards, len(cards))


class Striker:
    """Strikes a scene's cluster. Nodes whose engine was killed before restart late, so those die
    whole."""

    def __init__(self) -> None:
        self._tired_pids: set[int] = set()

    async def strike(self, scene: Scene, card: Card, *, may_kill_engine: bool) -> str | None:
        """Play the card on a new stream; returns what was done, or None if its moment was missed.

        With `may_kill_engine` only the engine is killed if its supervisor would restart it soon.
        """
        for _ in range(TRIES):
            if name := await _holder_of_victim(scene, card):
                return await self._strike(scene, card, name, may_kill_engine)
        return None

    async def _strike(self, scene: Scene, card: Card, name: str, may_kill_engine: bool) -> str:
        if card.what != "kill":
            await scene.pause(name, PAUSE_S if card.what == "pause" else HANG_S, "engine")
            return f"{card.role} {card.what}"
        pid = scene.cluster.processes[name].process.pid
        part = "engine" if may_kill_engine and pid not in self._tired_pids else "node"
        self._tired_pids.add(pid)
        scene.kill(name, part)
        return f"{card.role} {part} killed"


async def _holder_of_victim(scene: Scene, card: Card) -> str | None:
    """The node that has a new stream at the card's moment; None if the moment was missed."""
    if card.role == "prefill":
        stream = scene.ask(LONG, NUM_TOKENS)
        return await scene.holder_during(stream, "prefill", has_computed(card.at))
    stream = scene.ask(90, NUM_TOKENS + 2)
    await stream.reached(card.at)
    return await scene.holder_of("decode", stream)


async def leave(stream: Stream, num_tokens: int) -> None:
    """The client disconnects at that token."""
    await stream.reached(num_tokens)
    stream.generation.cancel()
