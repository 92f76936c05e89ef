"""How a request reaches a system under test. Every driver counts tokens the same way; none keeps
time: that is the generator's, on one clock.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Content = Sequence[int] | str | Sequence[Mapping[str, Any]]  # token ids, a text, a chat's messages


class DriverError(Exception):
    """The system did not serve a request."""


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """The system's own count of a request's tokens; None: it does not count them."""

    num_prompt_tokens: int | None
    num_output_tokens: int | None


class Driver(Protocol):
    """One connection to the system, for any number of requests at a time."""

    def stream(self, content: Content, num_tokens: int) -> AsyncGenerator[int | TokenUsage, None]:
        """Ask for `num_tokens` tokens; yields how many came, as they come, and at the end the
        system's count of them, where it gives one.

        Raises DriverError. Closing the iterator early cancels the request.
        """
        ...
