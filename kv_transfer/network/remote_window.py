"""One source's pool over a network: requests blocks, and uses them after the source's verdict.

    start_pull ─► the window's thread: request ─► carrier receives ─► verdict OK? ─► commit
                                          ▲             │ damaged: once more
                                          └── connect ◄─┤ the connection broke
                                                        └ silence: the pull fails
The source checks the generations after its last byte, since the puller cannot read them. A request
on a connection that broke is repeated as a whole; what was committed is not requested again. With a
carrier that takes long to connect the pull fails instead, and the next pull connects. A cancelled
pull ends after the current request, or soon, together with the connection.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from ...core.errors import HandoffFailed
from ...engine.kv.block_pool import CANARY_BLOCK
from ..window.block_pairs import Generations, Ids
from ..window.block_pieces import BlockCut
from ..window.threaded_window import Pull, PullThread
from ..window.transport import PullOutcome
from .data_client import DataClient, seconds_for
from .stream import ConnectionBroken, Deadline, Recovery

_log = logging.getLogger(__name__)

_MEASURED_BYTES, _MOST_MEASURED_BYTES = 8 << 20, 64 << 20
_MEASURED_S = 0.01  # compared to which a request's latency is small
_TRIES = 2  # a damaged block is requested once more
_CANCELLED_S = 0.3  # for the rest of a request, whose blocks stay reserved until then


class _Cancelled(HandoffFailed):
    """The pull was cancelled, and the rest of its request would take too long."""


class _CancellableDeadline(Deadline):
    """Also passes `_CANCELLED_S` after its pull was cancelled."""

    def __init__(self, seconds: float, pull: Pull) -> None:
        super().__init__(seconds)
        self._pull = pull
        self._ends_s = math.inf

    def remaining_s(self) -> float:
        if self._pull.is_cancelled:
            now_s = time.monotonic()
            self._ends_s = min(self._ends_s, now_s + _CANCELLED_S)
            if now_s >= self._ends_s:
                raise _Cancelled("the pull was cancelled")
        return super().remaining_s()


class Carrier(Protocol):
    """Receives blocks at the puller's end. Used by the window's thread only."""

    transport: str
    max_request_blocks: int
    connects_quickly: bool

    def connect(self, deadline: Deadline | None = None) -> DataClient:
        """Connect to the source again, by `deadline`. Raises HandoffFailed."""

    def receive(
        self, client: DataClient, num_blocks: int, block_ids: Ids | None, deadline: Deadline
    ) -> bool:
        """Receive the blocks of a request for these local blocks; None: only for `first_piece`.

        Returns False if they were damaged. Raises HandoffFailed.
        """

    def commit(self, block_ids: Ids) -> None:
        """The verdict was OK: make sure that the blocks are in the pool."""

    def first_piece(self) -> bytes:
        """The first block's piece, after `receive` without ids."""

    def hang_up(self) -> None:
        """End the connection: nothing may be received on it any more."""


class RemoteWindow(PullThread):
    """A source's pool, and the thread that requests its blocks."""

    def __init__(self, incarnation: str, carrier: Carrier, cut: BlockCut) -> None:
        """Connect, check the canary, measure. Raises HandoffFailed."""
        self.transport = carrier.transport
        self._incarnation = incarnation
        self._carrier = carrier
        self._cut = cut
        self._client: DataClient | None = None
        self._failed_s = -math.inf  # when a pull last ended without a verdict
        recovery, is_open = Recovery(), False
        while not is_open:
            with self._hanging_up(recovery):
                self.gbytes_per_s = self._check_and_measure(recovery)
                is_open = True
        super().__init__(incarnation)

    def _check_and_measure(self, recovery: Recovery) -> float:
        """Check the canary block, then measure GB/s of requests that repeat it.

        Requests grow until one takes `_MEASURED_S`, so that latency, or the first transfer of a
        size, does not make a fast carrier look slow.
        """

        def request(num_blocks: int) -> PullOutcome:
            ids = np.full(num_blocks, CANARY_BLOCK)
            return self._request(recovery, ids, np.zeros(num_blocks, np.uint64), None)

        if request(1) is not PullOutcome.OK:
            raise HandoffFailed("the canary block cannot be read")
        self._cut.require_canary(self._carrier.first_piece(), self._incarnation)
        piece_bytes = self._cut.piece_bytes
        best, num_bytes, took_s = 0.0, _MEASURED_BYTES, 0.0
        while took_s < _MEASURED_S and num_bytes <= _MOST_MEASURED_BYTES:
            num_blocks = max(1, num_bytes // piece_bytes)
            num_blocks = min(num_blocks, self._carrier.max_request_blocks)
            begin_s = time.perf_counter()
            request(num_blocks)
            took_s = time.perf_counter() - begin_s
            best = max(best, num_blocks * piece_bytes / took_s / 1e9)
            num_bytes *= 2
        return best

    def copy_blocks(self, pull: Pull) -> PullOutcome:
        if pull.started_s < self._failed_s:
            raise HandoffFailed("the source was lost while the pull waited")
        most = num_at_once = self._carrier.max_request_blocks
        begin, recovery = 0, Recovery()
        while begin < len(pull.pairs):
            if pull.is_cancelled:
                return PullOutcome.CANCELLED
            pairs = pull.pairs[begin : begin + num_at_once]
            num_at_once = max(1, len(pairs) // 2)  # of the next request, if this one breaks
            with self._hanging_up(recovery):
                outcome = self._request(
                    recovery, pairs.ids[0], pairs.generations, pairs.ids[1], pull
                )
                if outcome is not PullOutcome.OK:
                    return outcome
                begin += len(pairs)
                num_at_once, recovery = min(most, 4 * num_at_once), Recovery()
        return PullOutcome.OK

    @contextlib.contextmanager
    def _hanging_up(self, recovery: Recovery) -> Iterator[None]:
        """End the connection if the body raises. Returns if a new connection may succeed, otherwise
        raises HandoffFailed."""
        try:
            yield
        except ConnectionBroken as error:
            self.release()
            if self._is_closed or not self._carrier.connects_quickly:
                raise
            try:
                recovery.pause(error)
            except ConnectionBroken:
                self._failed_s = time.monotonic()
                raise
        except _Cancelled:  # requested by the puller: the source is not lost
            self.release()
        except Exception:
            self.release()
            self._failed_s = time.monotonic()
            raise

    def _request(
        self,
        recovery: Recovery,
        source_ids: Ids,
        generations: Generations,
        block_ids: Ids | None,
        pull: Pull | None = None,
    ) -> PullOutcome:
        """Request blocks, at most `_TRIES` times if they are damaged. Raises HandoffFailed."""
        for _ in range(_TRIES):
            if self._client is None:
                if self._is_closed:
                    raise HandoffFailed("the link to the source is lost")
                self._client = self._carrier.connect(recovery.deadline)
            client, num_blocks = self._client, len(source_ids)
            if (refusal := client.request(source_ids, generations)) is not None:
                return refusal
            within_s, deadline = seconds_for(num_blocks * self._cut.piece_bytes), None
            if pull is not None and self._carrier.connects_quickly:
                deadline = _CancellableDeadline(within_s, pull)
            is_intact = self._carrier.receive(
                client, num_blocks, block_ids, deadline or Deadline(within_s)
            )
            if (outcome := client.verdict()) is not PullOutcome.OK:
                return outcome
            if is_intact:
                if block_ids is not None:
                    self._carrier.commit(block_ids)
                return PullOutcome.OK
            _log.warning("blocks of %s were damaged on the way", self._incarnation)
        return PullOutcome.FAILED

    def release(self) -> None:
        """Close the connection, if there is one; the next request opens another."""
        if self._client is not None:
            self._client.close()
            self._client = None
            self._carrier.hang_up()
