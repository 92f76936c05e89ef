"""One source's pool behind a network: requests blocks, and trusts them after the source's verdict.

    start_pull ─► the window's thread: request ─► carrier receives ─► verdict OK? ─► commit
                                          ▲             │ damaged: once more
                                          └── connect ◄─┤ the connection broke
                                                        └ silence: the pull fails
The source looks at the generations behind its last byte, since they cannot be seen from here. What
was requested on a connection that broke is requested anew, all of it; what has been committed is
not. A carrier that takes long to connect fails the pull instead, and the next one connects. A pull
that is cancelled ends behind a request, or soon with the connection.
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
_MEASURED_S = 0.01  # beside which a request's own latency is little
_TRIES = 2  # a block that is damaged on the way is requested once more
_CANCELLED_S = 0.3  # for the rest of a request: its blocks are nobody's until then


class _CalledOff(HandoffFailed):
    """The pull was cancelled, and the rest of its request would take long."""


class _WantedDeadline(Deadline):
    """It has passed, too, once its pull has been cancelled for `_CANCELLED_S`."""

    def __init__(self, seconds: float, pull: Pull) -> None:
        super().__init__(seconds)
        self._pull = pull
        self._called_off_s = math.inf

    def remaining_s(self) -> float:
        if self._pull.is_cancelled:
            now_s = time.monotonic()
            self._called_off_s = min(self._called_off_s, now_s + _CANCELLED_S)
            if now_s >= self._called_off_s:
                raise _CalledOff("the pull was cancelled")
        return super().remaining_s()


class Carrier(Protocol):
    """How blocks travel, at this end. Belongs to the window's thread."""

    transport: str
    max_request_blocks: int
    connects_quickly: bool

    def connect(self, deadline: Deadline | None = None) -> DataClient:
        """Reach the source anew, quickly by `deadline`. Raises HandoffFailed."""
        ...

    def receive(
        self, client: DataClient, num_blocks: int, block_ids: Ids | None, deadline: Deadline
    ) -> bool:
        """Take in the blocks of a request, for these of ours; None: to be looked at alone.

        False if they were damaged on the way. Raises HandoffFailed.
        """
        ...

    def commit(self, block_ids: Ids) -> None:
        """The verdict was good: see that they lie in the pool."""
        ...

    def first_piece(self) -> bytes:
        """The first block's, of those that were received to be looked at."""
        ...

    def hang_up(self) -> None:
        """The connection is over: nothing may come of it any more."""
        ...


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
        """GB/s of the canary block, many times over, once it is found to be right.

        Requests grow until one takes long: a carrier that is quick would be taken for a slow one
        by its latency, or by the first transfer of a size.
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
            num_at_once = max(1, len(pairs) // 2)  # the next, if this one breaks
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
        """Nothing comes of a connection on which something went wrong; returns where another one
        may do better, and else raises HandoffFailed."""
        try:
            yield
        except ConnectionBroken as error:
            self._hang_up()
            if self._is_closed or not self._carrier.connects_quickly:
                raise
            try:
                recovery.pause(error)
            except ConnectionBroken:
                self._failed_s = time.monotonic()
                raise
        except _CalledOff:  # as we wanted: the source is not lost
            self._hang_up()
        except Exception:
            self._hang_up()
            self._failed_s = time.monotonic()
            raise

    def let_go(self) -> None:
        self._hang_up()

    def _request(
        self,
        recovery: Recovery,
        source_ids: Ids,
        generations: Generations,
        block_ids: Ids | None,
        pull: Pull | None = None,
    ) -> PullOutcome:
        """Request blocks until they are not damaged, or twice. Raises HandoffFailed."""
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
                deadline = _WantedDeadline(within_s, pull)
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

    def _hang_up(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
            self._carrier.hang_up()
