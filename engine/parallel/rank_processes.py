"""Rank 0 starts the others: a process each, which lives no longer than its channel or rank 0. Those
of other hosts come by themselves.

    start_ranks ─► processes ─► configured, loading ─► (this rank loads) ─► connect ─► serve

Call it from a thread that lives as long as the engine: the kernel ends the processes with it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...core.engine_config import EngineConfig
from ...core.errors import BatonError, StartupFailed
from ...core.process.children import bound_to_us
from ..execution.device import devices_of_ranks
from ..hosts.head import ClusterTrust, JoinedRank, gather
from ..hosts.joining import HostSettings
from ..hosts.tcp_stages import StageLink
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
    processes: tuple[subprocess.Popen[bytes], ...] = ()  # of this host

    @property
    def hosts(self) -> tuple[str, ...]:
        """Where each rank is, rank 0's first; empty: on rank 0's host."""
        return ("",) if self.followers is None else ("", *self.followers.hosts)

    @property
    def is_one_lost(self) -> bool:
        return self.followers is not None and self.followers.is_lost

    def explain(self, error: BaseException) -> None:
        """Rank 0 failed to start: wait a moment for the loss that it may have failed over."""
        if self.followers is not None and isinstance(error, BatonError | RuntimeError):
            self.followers.explain(error)

    def kill(self) -> None:
        """End the other ranks at once, whatever they wait for."""
        self._end(at_once=True)

    def close(self) -> None:
        """End the other ranks and wait for their end; behind a loss, or where nothing leads them
        yet, they are not asked to."""
        self._end(at_once=self.followers is None or self.is_one_lost)

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
    config: EngineConfig,
    module: str,
    on_lost: OnLost,
    on_line: Callable[[str], None],
    trust: ClusterTrust | None = None,
) -> Ranks:
    """Start what `config` has beside rank 0 on this host, each as `python -m module FD`; with
    --nnodes wait for those of the other hosts, by `trust`. Raises StartupFailed.

    `on_lost` is called at most once, from another thread, when the engine cannot go on.
    """
    devices = devices_of_ranks(config)
    configs = [dataclasses.replace(config, device=device) for device in devices]
    if config.num_ranks == 1:
        return Ranks(configs[0], Communicator(), None)
    joined: dict[int, JoinedRank] = {}
    if config.nnodes > 1:
        if trust is None:
            raise StartupFailed("--nnodes above 1 is for launch_prefill and launch_decode")
        joined = gather(trust, on_line)
    processes: tuple[subprocess.Popen[bytes], ...] = ()
    channels = [RankChannel(each.connection, each.host) for _, each in sorted(joined.items())]
    followers = None
    try:
        for _ in configs[1:]:
            process, channel = _start(module)
            channels.insert(len(processes), channel)  # before those of other hosts
            processes = (*processes, process)
        followers = RankGroup(
            channels,
            config.rank_timeout_s,
            config.rank_start_timeout_s,
            on_lost,
            on_line,
            config.tensor_parallel_size,
        )
        store, link = make_store(), None
        common: dict[str, Any] = {"store_port": store.port}
        if trust is not None and joined:
            key = secrets.token_bytes(32)
            host = config.master_addr or ""
            here = HostSettings(host, config.model, config.device, None, trust.tls, store.port)
            link = StageLink(0, config.tensor_parallel_size, host, key, trust.tls)
            common |= {"stage_key": key.hex(), "here": dataclasses.asdict(here)}
        configs += [configs[0]] * len(joined)  # each has its own device
        settings = [
            {"engine": dataclasses.asdict(each), "rank": rank, **common}
            for rank, each in enumerate(configs)
        ]
        followers.configure([json.dumps(each).encode() for each in settings[1:]])
        communicator = make_communicator(configs[0], 0, store, followers.meet, link)
    except BaseException:  # a Ctrl-C too: nobody else would end the processes
        Ranks(configs[0], Communicator(), followers, processes).close()
        for channel in channels:
            channel.close()
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
