"""The contract of transports (shared memory, GPUs, a network) and the choice of one.

A transport opens a window onto one source's pool; a window copies blocks into the local pool in the
background. Knows no transfer, no lease and no message.

    connect(source) ──► PoolWindow ── start_pull(pairs) ──► PullHandle
                                               └── on_done(outcome), exactly once
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

from ...core.errors import HandoffFailed
from .block_pairs import BlockPairs
from .block_pieces import BlockPiece
from .network_address import RemotePool

_log = logging.getLogger(__name__)


class PullOutcome(enum.Enum):
    """How a pull ended, the worst last. Only after OK may its destination blocks be read."""

    OK = "ok"
    CANCELLED = "cancelled"
    STALE = "stale"  # a generation differed before or after the copy
    FAILED = "failed"  # the copy differs from its source, or the transport broke


def worst(outcomes: Iterable[PullOutcome]) -> PullOutcome:
    """The outcome of a pull in several parts."""
    return max(outcomes, key=tuple(PullOutcome).index)


def failure(source: str, error: Exception) -> PullOutcome:
    """The outcome of a pull that ends with `error`, which is logged. To be caught whatever it is: a
    pull that never reports would keep its reservation for ever."""
    is_ours = not isinstance(error, HandoffFailed)
    # As a text: a log record that somebody keeps must not keep the frames, which use the memory.
    _log.error("a pull from source %s broke: %s", source, str(error), exc_info=is_ours)
    return PullOutcome.FAILED


class PullHandle(Protocol):
    """One pull in flight."""

    def cancel(self) -> None:
        """End the pull early. It still reports, and may still report OK."""


Starter: TypeAlias = Callable[[Callable[[PullOutcome], None]], PullHandle]


class PoolWindow(Protocol):
    """Access of this process to one source's pool, canary checked, until `close`.

    `gbytes_per_s`: measured when the window was opened.
    """

    transport: str
    gbytes_per_s: float

    @property
    def num_steps(self) -> int | None:
        """How many of the source's steps have written their KV; None, as by default: it cannot be
        read."""
        return None

    def start_pull(self, pairs: BlockPairs, on_done: Callable[[PullOutcome], None]) -> PullHandle:
        """Copy all pairs, one at least; each generation is checked before and after its copy.

        Returns at once. `on_done` is called exactly once, from a thread of the window; until then
        the destination blocks may be written and must stay fenced.
        """

    def prepare(self, pairs: BlockPairs) -> Starter:
        """Do the part of `start_pull` that is possible before the blocks are written. The caller
        calls the result with `on_done` once they are, or never. For windows with `num_steps`.

        The default prepares nothing. Raises HandoffFailed.
        """
        return partial(self.start_pull, pairs)

    def close(self) -> None:
        """Accept no more pulls. Accepted pulls end and report, then the memory is unmapped."""


class Transport(Protocol):
    """One way to reach a source's pool."""

    @property
    def name(self) -> str: ...

    def connect(self, source: RemotePool, piece: BlockPiece | None = None) -> PoolWindow:
        """Open this pool, to copy `piece` of each of its blocks (None: whole blocks).

        Raises HandoffFailed with the reason.
        """


def open_window(
    transports: Sequence[Transport], source: RemotePool, piece: BlockPiece | None = None
) -> PoolWindow:
    """The window of the first transport that connects; `transports` are ordered, best first.

    Each that does not connect is logged. Raises HandoffFailed that names all with their reasons.
    """
    reasons = []
    for transport in transports:
        try:
            return transport.connect(source, piece)
        except HandoffFailed as error:
            _log.warning("source %s: no %s: %s", source.name, transport.name, error.message)
            reasons.append(f"{transport.name}: {error.message}")
        except Exception as error:
            # Without a result the caller would wait for ever.
            _log.exception("source %s: no %s", source.name, transport.name)
            reasons.append(f"{transport.name}: {type(error).__name__}: {error}")
    tried = "; ".join(reasons) or "none is configured"
    raise HandoffFailed(f"no transport reaches source {source.name}: {tried}")
