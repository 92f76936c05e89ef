"""The check of constraints on the output."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from ...constraints.grammars import MAX_CHOICES, Grammars
from ...core.errors import InvalidRequest, Overloaded
from ...core.request.constraint import Constraint, ConstraintKind
from ...proto.v1 import common_pb2
from ..text.library_failures import refuse

_MAX_WAITING = 64


class ConstraintCheck:
    """Compiles constraints on a thread, before any token is computed. Use from the event loop. The
    number that waits is bounded, as is the compiler's work: an endless grammar is refused.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="constraints")
        self._num_waiting = 0

    @property
    def refusal(self) -> str | None:
        """Why outputs of this model cannot be constrained, or None."""
        return self._grammars.refusal

    async def check(self, constraint: Constraint, refusal: str | None = None) -> None:
        """`refusal`: why no constraint is possible now. Raises InvalidRequest, Overloaded."""
        if (refusal := refusal or self.refusal) is not None:
            raise InvalidRequest(refusal, "constraint", "unsupported_parameter")
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
        try:
            self._grammars.compile(constraint)
        except BaseException as error:
            refuse(error, "the constraint cannot be used", "constraint")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def check_constraint(constraint: Constraint, wire: common_pb2.SamplingParams) -> None:
    """Raises InvalidRequest. Whether it compiles is checked by ConstraintCheck."""
    if wire.ignore_eos:
        message = "ignore_eos cannot go with a constraint: EOS ends what matches"
        raise InvalidRequest(message, "ignore_eos", "invalid_value")
    if constraint.kind is ConstraintKind.CHOICE:
        values = wire.choice.values
        if len(values) > MAX_CHOICES:
            message = f"constraint has more than {MAX_CHOICES} choices"
            raise InvalidRequest(message, "constraint", "array_too_long")
        if not values or not all(values):
            message = "constraint must have choices, and none of them empty"
            raise InvalidRequest(message, "constraint", "invalid_schema")
    elif not constraint.source:
        raise InvalidRequest("constraint is empty", "constraint", "invalid_schema")
