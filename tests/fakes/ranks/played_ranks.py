"""The ranks of an engine as threads of this process: no start-up time, and all of the real code.

A rank's thread ends when its channel does. A rank that is killed while it waits for another stage
keeps waiting, since its death does not close what it waits for: its thread is abandoned.
"""

from __future__ import annotations

import socket
import threading

import pytest

from baton.engine.execution.runner import ModelRunner
from baton.engine.parallel import rank_processes, rank_worker
from baton.engine.parallel.rank_channel import RankChannel

_KILLED_S = 0.5


class PlayedProcess:
    """A thread in place of a Popen."""

    def __init__(self, channel: RankChannel) -> None:
        self.channel = channel
        self._runner: ModelRunner | None = None
        self._has_loaded = threading.Event()
        self._is_killed = False
        self._thread = threading.Thread(target=self._follow, name="played-rank", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        def keep(runner: ModelRunner, channel: RankChannel, here: object) -> rank_worker.Handlers:
            self._runner = runner
            self._has_loaded.set()
            return {}

        try:
            rank_worker.follow(self.channel, keep)
        except OSError:
            return  # rank 0 has ended
        finally:
            if self._runner is not None:
                self._runner.close()

    @property
    def runner(self) -> ModelRunner:
        """The rank's runner, once it is loaded."""
        assert self._has_loaded.wait(20)
        assert self._runner is not None
        return self._runner

    def wait(self, timeout_s: float) -> None:
        self._thread.join(_KILLED_S if self._is_killed else timeout_s)
        assert self._is_killed or not self._thread.is_alive(), "a played rank goes on"

    def kill(self) -> None:
        self._is_killed = True
        self.channel.close()


def play_ranks(monkeypatch: pytest.MonkeyPatch) -> list[PlayedProcess]:
    """Replace rank processes by threads; returns the list of started ranks, which grows."""
    started: list[PlayedProcess] = []

    def start(module: str) -> tuple[PlayedProcess, RankChannel]:
        ours, theirs = socket.socketpair()
        started.append(PlayedProcess(RankChannel(theirs)))
        return started[-1], RankChannel(ours)

    monkeypatch.setattr(rank_processes, "_start", start)
    return started
