"""Clients that send the same prompts repeatedly, and expect the same outputs each time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

PROMPTS = tuple(f"Prompt {number} of those that never stop. " * 3 for number in range(4))
_PAUSE_S = 0.05


@dataclass
class SteadyLoad:
    """`ask` returns the output for a prompt, of any type; each prompt has its own client."""

    ask: Callable[[str], Awaitable[object]]
    expected: dict[str, object] = field(default_factory=dict)
    num_right: int = 0

    async def _repeat(self, prompt: str) -> None:
        while True:
            assert await self.ask(prompt) == self.expected[prompt]
            self.num_right += 1
            await asyncio.sleep(_PAUSE_S)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the clients within the block; raises any of their errors at its end."""
        self.expected = {prompt: await self.ask(prompt) for prompt in PROMPTS}
        calls = [asyncio.create_task(self._repeat(prompt)) for prompt in PROMPTS]
        try:
            yield
        finally:
            for call in calls:
                call.cancel()
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                if not isinstance(outcome, asyncio.CancelledError):
                    raise outcome

    async def progress(self) -> None:
        """Wait until there are as many new outputs as clients."""
        wanted = self.num_right + len(PROMPTS)
        async with asyncio.timeout(30):
            while self.num_right < wanted:  # noqa: ASYNC110
                await asyncio.sleep(_PAUSE_S)
