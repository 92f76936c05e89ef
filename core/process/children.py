"""What prctl(2) does for us: children that never outlive their parent, even when it is killed, and
waits of microseconds that end on time.
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
    """The command as a child of this process: the kernel sends it the signal when we end.

    The signal follows the thread that starts the child (prctl(2)): it must live as long as the
    process. A command that is a set-user-id program loses it.
    """
    bind = [sys.executable, "-IS", "-c", _BIND, str(int(signal_number)), str(os.getpid())]
    return [*bind, *command]


def end_waits_on_time() -> None:
    """Of this thread and those that it starts from now on: else Linux may add 50 us to each, so as
    to wake several threads at once."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
