"""How a request reaches a system under test. Every driver counts tokens the same way; none keeps
time: that is the generator's, on one clock.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol


class DriverError(Exception):
    """The system did not serve a request."""


class Driver(Protocol):
    """One connection to the system, for any number of requests at a time."""

    def stream(self, prompt_ids: Sequence[int], num_tokens: int) -> AsyncIterator[int]:
        """Ask for exactly `num_tokens` tokens, greedily; yields how many came, as they come.

        Raises DriverError. Closing the iterator early cancels the request.
        """
        ...
