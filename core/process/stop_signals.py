"""SIGTERM and SIGINT as events of the running loop: stop, and then hurry."""

from __future__ import annotations

import asyncio
import signal


class StopSignals:
    """A signal asks to stop, a second one to hurry; with `sigint_hurries` SIGINT asks for both."""

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
