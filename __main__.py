"""Console scripts, and `python -m baton`, the `baton` command where that is not on the PATH.

What they run is imported when they are called, for an interrupt meanwhile to end them quietly.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from importlib import import_module
from typing import Any

_AGAIN_S = 0.01
_STDOUT = 1  # the descriptor


def main() -> int:
    return _call(".cli.main", "main")


def launch_gateway() -> int:
    return _call(".cli.launch", "gateway")


def launch_prefill() -> int:
    return _call(".cli.launch", "prefill")


def launch_decode() -> int:
    return _call(".cli.launch", "decode")


def _call(module: str, name: str) -> int:
    sys.unraisablehook = _interrupt_again
    try:
        code: int = getattr(import_module(module, "baton"), name)()
        print(end="", flush=True)
    except KeyboardInterrupt:
        return 130
    except RuntimeError as error:  # as Python 3.11 passes on what a class's __set_name__ raises
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        return 130
    except BrokenPipeError:
        if not _has_no_reader(_STDOUT):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)  # for what is unwritten
        return 141  # as by SIGPIPE
    return code


def _has_no_reader(descriptor: int) -> bool:
    """Whether it is a pipe into what has ended, as `head` does."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _interrupt_again(unraisable: Any) -> None:
    """Ctrl-C in a callback, as imports have many, where Python drops what is raised: once more,
    when that is over."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        threading.Timer(_AGAIN_S, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    sys.exit(main())
