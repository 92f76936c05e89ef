"""Python's garbage collector in a serving process: settings that keep its pauses short and few."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from itertools import takewhile
from operator import ge

# Allocations between two collections of the youngest generation. Several objects per token live as
# long as their request, or for a step or two; to search them for cycles every 700 allocations takes
# a tenth of the host's time.
_NUM_YOUNG = 20_000
# To search _NUM_YOUNG objects and free them is a pause of some 10 ms; for _NUM_AT_A_TIME it is less
# than 1 ms, when the process waits for something else anyway. To search the oldest generation, with
# perhaps a million objects, takes 100 ms: this is as rare as with the thresholds.
_NUM_AT_A_TIME, _NUM_TIMES = 1_000, (20, 400)


class _Settings:
    """The process's settings before the first `settle`."""

    lock = threading.Lock()
    num_settled = 0
    has_frozen = False  # `settle` froze objects, and nothing was frozen before
    thresholds = gc.get_threshold()


def settle(*, keeps_all: bool = True, collects_some: bool = False) -> Callable[[], None]:
    """Exclude the objects so far from collections: traversing them would pause all streams.
    Without `keeps_all`, for a process that is not Baton's, collections only become rarer.
    `collects_some`: the process calls `collect_some`. Its collections of the younger generations
    are smaller, so more of them come before one of the oldest, whatever triggers it.

    Returns a function that undoes this: once all callers have called theirs, the settings are as
    before the first call.
    """
    now = _Settings
    if keeps_all:
        gc.collect()  # not under the lock: a collected object may call its `unsettle`
    with now.lock:
        if not now.num_settled:
            now.thresholds, now.has_frozen = gc.get_threshold(), False
        now.num_settled += 1
        if keeps_all:
            now.has_frozen |= not gc.get_freeze_count()
            gc.freeze()
        gc.set_threshold(_NUM_YOUNG, *(_NUM_TIMES if collects_some else (20, 20)))
    is_settled = True

    def unsettle() -> None:
        nonlocal is_settled
        with now.lock:
            now.num_settled -= is_settled
            is_last = is_settled and not now.num_settled
            is_settled = False
            if is_last:
                gc.set_threshold(*now.thresholds)
            if is_last and now.has_frozen:  # objects that others froze stay frozen
                gc.unfreeze()

    return unsettle


def collect_some() -> None:
    """Collect now, if there are enough new objects: for a thread that is idle. If it is called
    often enough, there are no other collections. As by Python's own rule, an older generation is
    collected after a number of collections of the next younger one."""
    num_young, *num_times = gc.get_count()
    if num_young >= _NUM_AT_A_TIME:
        gc.collect(sum(1 for _ in takewhile(bool, map(ge, num_times, _NUM_TIMES))))
