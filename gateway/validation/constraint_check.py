"""Whether a constraint can be used, judged on a thread before anybody computes a token for it.

Bounded in number, and in time by what the compiler takes: an endless grammar is refused, not tried.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from ...constraints.grammars import Grammars
from ...core.errors import InvalidRequest, Overloaded, refusing
from ...core.request.constraint import Constraint

_MAX_WAITING = 64


class ConstraintCheck:
    """Belongs to the event loop."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="constraints")
        self._num_waiting = 0

    @property
    def refusal(self) -> str | None:
        """Why this model's outputs cannot be constrained by anybody here, or None."""
        return self._grammars.refusal

    async def check(self, constraint: Constraint) -> None:
        """Raises InvalidRequest saying what is wrong with it, Overloaded."""
        if self.refusal is not None:
            raise unsupported(self.refusal)
        if self._grammars.is_kept(constraint):
            return
        if self._num_waiting >= _MAX_WAITING:
            raise Overloaded("too many new constraints at once")
        self._num_waiting += 1
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._pool, self._compile, constraint)
        finally:
            self._num_waiting -= 1

    def _compile(self, constraint: Constraint) -> None:
        with refusing("the constraint cannot be used", "constraint"):
            self._grammars.compile(constraint)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def unsupported(reason: str) -> InvalidRequest:
    """What a request with a constraint is refused with where there are none."""
    return InvalidRequest(reason, "constraint", "unsupported_parameter")
