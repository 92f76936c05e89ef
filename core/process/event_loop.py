"""The event loop of a process: which one it is, what it keeps running, the signals that stop it,
whether it still turns.

    parent  LoopWatch ── a memfd of 8 bytes, by number in the environment ──► child  show_turns()

The child moves a counter, its parent reads it, and counts its own looks, not seconds: one that was
stopped itself, and goes on, has looked no more often than its child could count. A child that has
not begun to count, since it starts or loads, is not taken for hung. Who kills and who starts again
is the parent's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

HUNG_S = 2.0  # of a gateway: its callers wait meanwhile

AGAIN_S = 1.0  # until what broke begins again

_VARIABLE = "BATON_LOOP_WATCH_FD"
_NAME = "baton-loop-watch"
_TURN_S = 0.1
_NUM_BYTES = 8


def run(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Like asyncio.run, of what `start` gives; it is called before there is a loop."""
    _open_standard_streams()
    main = start()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)


def _open_standard_streams() -> None:
    """Those with which nobody started us, as /dev/null: else what is opened next has their numbers,
    and uvloop, which closes none of these, aborts."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # at `fd`: the lowest


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """None: asyncio's default."""
    try:
        import uvloop  # optional: the extra `fast`
    except ImportError:
        return None
    return uvloop.new_event_loop


async def keep_running(what: str, run: Callable[[], Awaitable[None]]) -> None:
    """Until it returns or is cancelled. What it raises is a bug of ours: logged, once for each kind
    and place, and no reason to do without it for good."""
    logged: set[str] = set()
    while True:
        try:
            return await run()
        except Exception as error:
            kind = _kind_and_place(error)
            if kind not in logged:
                logged.add(kind)
                log.exception("%s broke, and begins again", what)
        await asyncio.sleep(AGAIN_S)


def _kind_and_place(error: Exception) -> str:
    """Of a group, as a TaskGroup raises it, those of the first in it."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error)} {traceback.extract_tb(error.__traceback__, -1)}"


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end at once what takes long on the main thread, of a coroutine too: a loop cancels
    its main task instead, which is noticed behind that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class StopSignals:
    """SIGTERM and SIGINT: the first means stop, the second hurry; with `sigint_hurries` SIGINT
    means both.
    """

    def __init__(self, *, sigint_hurries: bool = False) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self._sigint_hurries = sigint_hurries
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._receive, number)

    def _receive(self, number: signal.Signals) -> None:
        if self.stop.is_set() or (self._sigint_hurries and number == signal.SIGINT):
            self.hurry.set()
        self.stop.set()


class LoopWatch:
    """The parent's end for one child. Pass `fd` to it, and `environment`."""

    def __init__(self, hung_s: float = HUNG_S) -> None:
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        self.environment = {_VARIABLE: str(self.fd)}
        self._max_silent_looks = round(hung_s / _TURN_S) - 1
        self.hung_s = hung_s

    async def until_hung(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Return once the child has counted, and then not for `hung_s`."""
        last, num_silent = b"", 0
        while num_silent < self._max_silent_looks:
            await sleep(_TURN_S)
            count = os.pread(self.fd, _NUM_BYTES, 0)
            num_silent = num_silent + 1 if count and count == last else 0
            last = count

    def close(self) -> None:
        """Harmless when it is closed already."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> LoopWatch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


async def show_turns() -> None:
    """The child's end: count until cancelled. Returns at once where no parent watches."""
    fd = _watched_fd()
    if fd is None:
        return
    num_turns = 0
    while True:
        num_turns += 1
        os.pwrite(fd, num_turns.to_bytes(_NUM_BYTES, "little"), 0)
        await asyncio.sleep(_TURN_S)


def _watched_fd() -> int | None:
    """What the parent passed, once; a number that was inherited without its file is nothing."""
    number = os.environ.pop(_VARIABLE, "")
    with contextlib.suppress(OSError):
        if number.isdecimal() and f"memfd:{_NAME}" in os.readlink(f"/proc/self/fd/{number}"):
            return int(number)
    return None
