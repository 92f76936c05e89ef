"""Sources of draft tokens. A wrong draft costs time, but changes no output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..scheduling.sequence import Sequence as EngineSequence


class Context(NamedTuple):
    """A sequence to draft for, and how many drafts at most (1 or more)."""

    sequence: EngineSequence
    max_drafts: int

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and output so far."""
        return self.sequence.token_ids


class Proposer(Protocol):
    """The source of one engine's drafts, called on its thread between two steps."""

    @property
    def max_drafts(self) -> int:
        """The most drafts of a sequence in one step, at least 1."""
        ...

    @property
    def takes_steps(self) -> bool:
        """Whether each further draft takes a step of the device. Then their number is chosen first,
        and the block tables have room for all; else as many as can be found are requested."""
        ...

    def propose(self, contexts: Sequence[Context]) -> list[Sequence[int]]:
        """For each context, in order, up to `max_drafts` token ids. Must not keep the contexts'
        token ids."""
        ...
