"""Uses of prctl(2): children that never outlive their parent, even when it is killed, and waits of
microseconds that end on time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29

# Run by an interpreter without site-packages (13 ms), which then becomes the command. Not a
# `preexec_fn`: that makes subprocess fork, and a fork beside gRPC's threads can fail in the child.
_BIND = f"""
import ctypes, os, sys
libc = ctypes.CDLL(None)
libc.prctl({_PR_SET_PDEATHSIG}, int(sys.argv[1]), 0, 0, 0)
libc.signal({int(signal.SIGPIPE)}, 0)  # as subprocess gives it: Python ignores it
if os.getppid() != int(sys.argv[2]):
    sys.exit("its parent has ended")
os.execvp(sys.argv[3], sys.argv[3:])
"""


def bound_to_us(command: Sequence[str], signal_number: signal.Signals) -> list[str]:
    """`command`, wrapped so that the kernel sends it the signal when this process ends.

    The kernel watches the thread that starts the child (prctl(2)): it must live as long as the
    process. A set-user-id program does not get the signal.
    """
    bind = [sys.executable, "-IS", "-c", _BIND, str(int(signal_number)), str(os.getpid())]
    return [*bind, *command]


def end_waits_on_time() -> None:
    """Minimise the timer slack of this thread and of those that it starts later: by default Linux
    may add 50 us to each wait, to wake several threads at once."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
