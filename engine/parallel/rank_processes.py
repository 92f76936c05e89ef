"""Rank 0 starts the others: a process each, which lives no longer than its channel or rank 0.

    start_ranks ─► processes ─► configured, loading ─► (this rank loads) ─► connect ─► serve

Call it from a thread that lives as long as the engine: the kernel ends the processes with it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from ...core.config import EngineConfig
from ...core.process.children import bound_to_us
from ..execution.device import devices_of_ranks
from ..model.communicator import Communicator
from .loopback import make_store
from .rank_channel import RankChannel
from .rank_group import OnLost, RankGroup
from .torch_communicator import make_communicator

_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks of an engine as rank 0 sees them; alone it has no followers."""

    config: EngineConfig  # rank 0's own
    communicator: Communicator
    followers: RankGroup | None
    processes: tuple[subprocess.Popen[bytes], ...] = ()

    def kill(self) -> None:
        """End the other ranks at once, whatever they wait for."""
        self._end(at_once=True)

    def close(self) -> None:
        """End the other ranks and wait for their end; behind a loss they are not asked to."""
        self._end(at_once=self.followers is not None and self.followers.is_lost)

    def _end(self, *, at_once: bool) -> None:
        if self.followers is not None:
            self.followers.close()  # first: from now on it is no loss that they end
        for process in self.processes:
            if at_once:
                process.kill()
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start_ranks(
    config: EngineConfig, module: str, on_lost: OnLost, on_line: Callable[[str], None]
) -> Ranks:
    """Start what `config` has beside rank 0, each as `python -m module FD`. Raises StartupFailed.

    `on_lost` is called at most once, from another thread, when the engine cannot go on.
    """
    devices = devices_of_ranks(config)
    configs = [dataclasses.replace(config, device=device) for device in devices]
    if len(configs) == 1:
        return Ranks(configs[0], Communicator(), None)
    started = [_start(module) for _ in configs[1:]]
    followers = RankGroup(
        [channel for _, channel in started],
        config.rank_timeout_s,
        config.rank_start_timeout_s,
        on_lost,
        on_line,
        config.tensor_parallel_size,
    )
    processes = tuple(process for process, _ in started)
    try:
        store = make_store()
        settings = [
            {"engine": dataclasses.asdict(each), "rank": rank, "store_port": store.port}
            for rank, each in enumerate(configs)
        ]
        followers.configure([json.dumps(each).encode() for each in settings[1:]])
        communicator = make_communicator(configs[0], 0, store, followers.meet)
    except BaseException:  # a Ctrl-C too: nobody else would end the processes
        Ranks(configs[0], Communicator(), followers, processes).close()
        raise
    return Ranks(configs[0], communicator, followers, processes)


def _start(module: str) -> tuple[subprocess.Popen[bytes], RankChannel]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            # From its first moment on: a rank that hangs in its imports would be left behind.
            bound_to_us([sys.executable, "-m", module, str(theirs.fileno())], signal.SIGKILL),
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONSAFEPATH": "1"},
        )
    return process, RankChannel(ours)
