"""Prompts that this gateway has dispatched, and that the prefix index does not list yet.

    sent ─► first token ─► its engine publishes it ─► the prefix index has it
    └───── kept here, until LINGER_S later ───────┘

With them, requests that come at the same time with the same new prefix are sent to one engine: it
will have computed the prefix when the next one's turn comes. Prompts with the same first block are
compared token by token, without hashing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ...core.ports import Clock
from ...core.request.token_ids import NUM_BYTES, pack

LINGER_S = 0.3  # from a first token until the index has its prompt
_MOST_ALIKE = 8  # prompts that are compared with a new one: the last ones

_Kind = tuple[str, str, bytes]  # fingerprint, salt, first block: equal where we compare


@dataclass(slots=True, eq=False)
class SentPrompt:
    """A prompt in flight, on the engine of this incarnation."""

    engine: str
    kind: _Kind
    packed: memoryview


@dataclass(slots=True, eq=False)
class PromptsInFlight:
    """All of one gateway. `num_index_hits`: prompts so far with cached tokens by the index;
    `num_stale_hits`: those of them whose engine had fewer."""

    clock: Clock
    num_index_hits: int = 0
    num_stale_hits: int = 0
    _prompts: dict[_Kind, dict[SentPrompt, None]] = field(default_factory=dict)
    _answered: deque[tuple[float, SentPrompt]] = field(default_factory=deque)  # kept until, prompt

    def sent(
        self, engine: str, fingerprint: str, salt: str, token_ids: Sequence[int], block_size: int
    ) -> SentPrompt:
        """Add a prompt of at least one block that is dispatched to an engine."""
        self._forget_old()
        packed = memoryview(pack(token_ids))
        kind = (fingerprint, salt, bytes(packed[: NUM_BYTES * block_size]))
        prompt = SentPrompt(engine, kind, packed)
        self._prompts.setdefault(kind, {})[prompt] = None
        return prompt

    def ended(self, prompt: SentPrompt, *, is_computed: bool) -> None:
        """The prompt has its first token, or will not be computed."""
        if is_computed:
            self._answered.append((self.clock.monotonic_s() + LINGER_S, prompt))
        else:
            self._drop(prompt)

    def engine_lost(self, incarnation: str) -> None:
        for prompt in [prompt for alike in self._prompts.values() for prompt in alike]:
            if prompt.engine == incarnation:
                self._drop(prompt)

    def common_blocks(
        self, fingerprint: str, salt: str, token_ids: Sequence[int], block_size: int
    ) -> Mapping[str, int]:
        """By incarnation, how many first blocks of a prompt each engine will have soon."""
        self._forget_old()
        if not self._prompts or len(token_ids) < block_size:
            return {}
        first = pack(token_ids[:block_size])
        alike = self._prompts.get((fingerprint, salt, first))
        if not alike:
            return {}
        packed, found = memoryview(pack(token_ids)), dict[str, int]()
        for other in islice(reversed(alike), _MOST_ALIKE):
            count = _common(packed, other.packed, NUM_BYTES * block_size)
            found[other.engine] = max(count, found.get(other.engine, 0))
        return found

    def _forget_old(self) -> None:
        now_s = self.clock.monotonic_s()
        while self._answered and self._answered[0][0] <= now_s:
            self._drop(self._answered.popleft()[1])

    def _drop(self, prompt: SentPrompt) -> None:
        """No error if it was dropped before, when its engine was lost."""
        if (alike := self._prompts.get(prompt.kind)) is not None:
            alike.pop(prompt, None)
            if not alike:
                del self._prompts[prompt.kind]


def _common(one: memoryview, other: memoryview, num_bytes: int) -> int:
    """How many first blocks of `num_bytes` are equal; the first one is."""
    low, high = 1, min(len(one), len(other)) // num_bytes
    while low < high:
        middle = (low + high + 1) // 2
        part = slice(low * num_bytes, middle * num_bytes)
        if one[part] == other[part]:
            low = middle
        else:
            high = middle - 1
    return low
