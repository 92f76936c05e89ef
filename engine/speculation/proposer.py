"""What guesses the tokens to come. A guess that is wrong costs time, and changes no token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Context(NamedTuple):
    """A sequence that is to be continued: its request's key, prompt and output so far, and for how
    many drafts there is room, at least one."""

    key: str
    token_ids: Sequence[int]
    max_drafts: int


class Proposer(Protocol):
    """Belongs to one engine, and is called on its thread, between two steps."""

    @property
    def max_drafts(self) -> int:
        """Of a sequence in one step, at least 1."""
        ...

    def propose(self, contexts: Sequence[Context]) -> list[Sequence[int]]:
        """Drafts for each context, in their order: none to `max_drafts` token ids. The token ids of
        contexts must not be kept."""
        ...
