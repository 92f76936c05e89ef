"""All observers of calls as one: what one of them raises harms neither the call nor the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from ....core.errors import BatonError
from ...request.output_chunk import OutputChunk
from ...security.tenancy import Caller
from .call_records import CallObserver, CallRecord
from .token_gaps import TokenGaps

log = logging.getLogger(__name__)


class Observers:
    """A `CallObserver`. A kind of failure is logged once: chunks come by thousands.

    A single token behind a sample's second, as nearly all chunks are, is told to `gaps` alone.
    """

    def __init__(self, observers: Sequence[CallObserver], gaps: TokenGaps) -> None:
        self._observers = tuple(observers)
        self._gaps = gaps
        self._logged: set[tuple[type, type]] = set()

    def call_refused(self, caller: Caller, error: BatonError) -> None:
        self._tell(lambda observer: observer.call_refused(caller, error))

    def call_began(self, record: CallRecord) -> None:
        self._tell(lambda observer: observer.call_began(record))

    def chunk_delivered(self, record: CallRecord, chunk: OutputChunk, now_s: float) -> None:
        times = record.token_times[chunk.sample_index]
        if len(chunk.token_ids) == 1 and len(times) > 2:
            try:
                self._gaps.add(now_s - times[-2][0], now_s)
            except Exception as error:
                self._failed(self._gaps, error)
        else:
            self._tell(partial(_tell_chunk, record, chunk, now_s))

    def call_ended(self, record: CallRecord) -> None:
        self._tell(lambda observer: observer.call_ended(record))

    def _tell(self, what: Callable[[CallObserver], None]) -> None:
        for observer in self._observers:
            try:
                what(observer)
            except Exception as error:
                self._failed(observer, error)

    def _failed(self, observer: object, error: Exception) -> None:
        """It has a bug, and the call goes on."""
        kind = (type(observer), type(error))
        if kind not in self._logged:
            self._logged.add(kind)
            log.error("%s failed; it is not logged again", kind[0].__name__, exc_info=error)


def _tell_chunk(
    record: CallRecord, chunk: OutputChunk, now_s: float, observer: CallObserver
) -> None:
    observer.chunk_delivered(record, chunk, now_s)
