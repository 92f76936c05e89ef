"""What the index needs of a message broker: a bulletin to all, questions to one, short-lived keys.

redis_link.py is the real one, tests have an in-memory one that loses and shuffles.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol


class IndexAway(Exception):
    """The broker did not answer. What was to be said or read is lost; try later."""


class PublisherLink(Protocol):
    """An engine's side."""

    async def publish(self, messages: Sequence[bytes]) -> None:
        """To all gateways, in order. Raises IndexAway: some may have arrived."""
        ...

    async def write_chunks(self, incarnation: str, chunks: Sequence[bytes]) -> None:
        """Put a snapshot's pieces where they can be read for a while, over the last one's.

        Raises IndexAway.
        """
        ...

    def questions(self, incarnation: str) -> AsyncGenerator[bytes]:
        """Yields whenever a gateway asks this engine for a snapshot; never ends, never raises."""
        ...


class FollowerLink(Protocol):
    """A gateway's side."""

    def messages(self) -> AsyncGenerator[bytes]:
        """What engines publish, as far as it arrives; never ends, never raises."""
        ...

    async def ask(self, incarnation: str) -> None:
        """Ask an engine for a snapshot. Raises IndexAway."""
        ...

    async def read_chunk(self, incarnation: str, index: int) -> bytes:
        """One piece of the last snapshot; empty if it is gone. Raises IndexAway."""
        ...
