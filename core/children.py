"""Child processes that never outlive their parent, even when it is killed."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def dies_with_parent(signal_number: signal.Signals) -> Callable[[], None]:
    """A `preexec_fn` for subprocess: the kernel sends the child this signal when we end.

    The signal follows the thread that forks (prctl(2)), so start children from a thread that lives
    as long as the process. A child that execs a set-user-id program loses it.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def ask_kernel() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)

    return ask_kernel
