"""Prompts that this gateway has sent to be computed, and that no engine lists as cached yet.

    sent ─► first token ─► its engine publishes it ─► the prefix index has it
    └────────── here, and LINGER_S more ──────────┘

So requests that begin together with the same new prompt find each other: an engine that is about
to compute a prefix will have it when the next one's turn comes. Prompts are compared as they are,
those alone that begin with the same block; nothing is hashed for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ...core.ports import Clock
from ...core.request.token_ids import NUM_BYTES, pack
from .engine_account import Key

LINGER_S = 0.3  # from a first token until the index has its prompt
_MOST_ALIKE = 8  # that are compared with a prompt: the last ones

_Kind = tuple[str, str, bytes]  # fingerprint, salt, first block: what prompts must have in common
_Place = tuple[str, Key]  # incarnation, request


@dataclass(slots=True, eq=False)
class PromptsInFlight:
    """One gateway's."""

    clock: Clock
    _kinds: dict[_Place, _Kind] = field(default_factory=dict)
    _prompts: dict[_Kind, OrderedDict[_Place, memoryview]] = field(default_factory=dict)
    _answered: OrderedDict[_Place, float] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._kinds)

    def sent(
        self, place: _Place, fingerprint: str, salt: str, token_ids: Sequence[int], block_size: int
    ) -> None:
        """A prompt goes to an engine to be computed; one shorter than a block is no matter."""
        self._forget_old()
        if len(token_ids) >= block_size:
            packed = memoryview(pack(token_ids))
            kind = (fingerprint, salt, bytes(packed[: NUM_BYTES * block_size]))
            self._kinds[place] = kind
            self._prompts.setdefault(kind, OrderedDict())[place] = packed

    def ended(self, place: _Place, *, is_computed: bool) -> None:
        """It has its first token, or will not be computed."""
        if place in self._kinds and is_computed:
            self._answered[place] = self.clock.monotonic_s() + LINGER_S
        elif place in self._kinds:
            self._drop(place)

    def engine_lost(self, incarnation: str) -> None:
        for place in [place for place in self._kinds if place[0] == incarnation]:
            self._drop(place)

    def common_blocks(
        self, fingerprint: str, salt: str, token_ids: Sequence[int], block_size: int
    ) -> Mapping[str, int]:
        """How many first blocks of a prompt each engine is about to have, by incarnation."""
        self._forget_old()
        if not self._prompts or len(token_ids) < block_size:
            return {}
        first = pack(token_ids[:block_size])
        alike = self._prompts.get((fingerprint, salt, first))
        if not alike:
            return {}
        packed, found = memoryview(pack(token_ids)), dict[str, int]()
        for (incarnation, _), other in islice(reversed(alike.items()), _MOST_ALIKE):
            count = _common(packed, other, NUM_BYTES * block_size)
            found[incarnation] = max(count, found.get(incarnation, 0))
        return found

    def _forget_old(self) -> None:
        now_s = self.clock.monotonic_s()
        while self._answered:
            place, until_s = next(iter(self._answered.items()))
            if until_s > now_s:
                return
            self._drop(place)

    def _drop(self, place: _Place) -> None:
        self._answered.pop(place, None)
        kind = self._kinds.pop(place)
        del self._prompts[kind][place]
        if not self._prompts[kind]:
            del self._prompts[kind]


def _common(one: memoryview, other: memoryview, num_bytes: int) -> int:
    """How many blocks of `num_bytes` both begin with; the first is the same."""
    low, high = 1, min(len(one), len(other)) // num_bytes
    while low < high:
        middle = (low + high + 1) // 2
        part = slice(low * num_bytes, middle * num_bytes)
        if one[part] == other[part]:
            low = middle
        else:
            high = middle - 1
    return low
