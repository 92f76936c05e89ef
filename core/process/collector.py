"""Python's garbage collector in a process that serves: it takes as little as it can."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from itertools import takewhile
from operator import ge

# Objects between two collections of the youngest. Several a token live as long as their request, or
# for a step or two; to look for cycles among them every 700 objects takes a tenth of a host's time.
_NUM_YOUNG = 20_000
# To look through that many, and to free what they are, is a pause of some 10 ms. Of so many it is
# less than one, where a process waits for something else anyway. To look through the oldest, which
# may be a million, takes 100 ms: that is done as seldom as by the thresholds.
_NUM_AT_A_TIME, _NUM_TIMES = 1_000, (20, 400)


class _Settings:
    """Of the process, as the first who settled found them."""

    lock = threading.Lock()
    num_settled = 0
    has_frozen = False  # what nobody had before
    thresholds = gc.get_threshold()


def settle(*, keeps_all: bool = True, collects_some: bool = False) -> Callable[[], None]:
    """What is loaded by now stays: a collection that walked it would be a pause in all streams.
    Without `keeps_all`, in a process that is not ours, collections are seldom, and that is all.
    `collects_some`: of a process that calls that; its collections of the younger generations are
    smaller ones, and so many more come before one of the oldest, whoever asks for that.

    Returns what ends that: once all who settled have ended it, all is as the first one found it.
    """
    now = _Settings
    if keeps_all:
        gc.collect()  # not under the lock: what is collected may have settled, and end that
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
            if is_last and now.has_frozen:  # what others keep out of collections stays out
                gc.unfreeze()

    return unsettle


def collect_some() -> None:
    """Collect now, if enough is new for it: for a thread that has nothing else to do. One that is
    called often enough has no other collections. An older generation's turn comes as by Python's
    own rule, after so many collections of the next younger one."""
    num_young, *num_times = gc.get_count()
    if num_young >= _NUM_AT_A_TIME:
        gc.collect(sum(1 for _ in takewhile(bool, map(ge, num_times, _NUM_TIMES))))
