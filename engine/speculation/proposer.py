"""What guesses the tokens to come. A guess that is wrong costs time, and changes no token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..scheduling.sequence import Sequence as EngineSequence


class Context(NamedTuple):
    """A sequence that is to be continued, and how many drafts are wanted, at least one."""

    sequence: EngineSequence
    max_drafts: int

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and output so far."""
        return self.sequence.token_ids


class Proposer(Protocol):
    """Belongs to one engine, and is called on its thread, between two steps."""

    @property
    def max_drafts(self) -> int:
        """Of a sequence in one step, at least 1."""
        ...

    @property
    def takes_steps(self) -> bool:
        """Whether each further draft takes a step of the device, so that how many are wanted is
        better known before, and the block tables must have room for all. If not, all that can be
        found are asked for."""
        ...

    def propose(self, contexts: Sequence[Context]) -> list[Sequence[int]]:
        """Drafts for each context, in their order: none to `max_drafts` token ids. The token ids of
        contexts must not be kept."""
        ...
