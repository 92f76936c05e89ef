"""Python's garbage collector in a process that serves: it takes as little as it can."""

from __future__ import annotations

import gc
from collections.abc import Callable

# Objects between two collections of the youngest. Several a token live as long as their request, or
# for a step or two; to look for cycles among them every 700 objects takes a tenth of a host's time.
_NUM_YOUNG = 20_000


def settle() -> Callable[[], None]:
    """What is loaded by now stays: a collection that walked it would be a pause in all streams.
    What is returned undoes it."""
    was_frozen, thresholds = gc.get_freeze_count() > 0, gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NUM_YOUNG, 20, 20)

    def undo() -> None:
        if not was_frozen:  # what others keep out of collections stays out
            gc.unfreeze()
        gc.set_threshold(*thresholds)

    return undo
