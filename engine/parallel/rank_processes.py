"""Rank 0 starts a process for each other rank of its host, which ends with its channel or rank 0.
Ranks of other hosts connect by themselves.

    start_ranks ─► processes ─► configured, loading ─► (this rank loads) ─► connect ─► serve

Call start_ranks from a thread that lives as long as the engine: the kernel kills the processes when
that thread ends.
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
    """All ranks of an engine, held by rank 0; `followers` is None if there is only rank 0."""

    config: EngineConfig  # rank 0's, with its own device
    communicator: Communicator
    followers: RankGroup | None
    processes: tuple[subprocess.Popen[bytes], ...] = ()  # of the ranks on this host

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank from rank 0 on; empty: rank 0's host."""
        return ("",) if self.followers is None else ("", *self.followers.hosts)

    @property
    def is_one_lost(self) -> bool:
        return self.followers is not None and self.followers.is_lost

    def explain(self, error: BaseException) -> None:
        """Rank 0 failed to start with `error`: wait a moment for the loss that may be its cause."""
        if self.followers is not None and isinstance(error, BatonError | RuntimeError):
            self.followers.explain(error)

    def kill(self) -> None:
        """End the other ranks at once: kill those of this host, close the channels of all."""
        self._end(at_once=True)

    def close(self) -> None:
        """End the other ranks and wait for their processes, which are killed if a rank was lost or
        there is no RankGroup yet."""
        self._end(at_once=self.followers is None or self.is_one_lost)

    def _end(self, *, at_once: bool) -> None:
        if self.followers is not None:
            self.followers.close()  # first: the end of a rank is no loss once closed
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
    """Start the other ranks of this host, each as `python -m module FD`; with --nnodes, wait for
    the ranks of the other hosts, which `trust` admits. Raises StartupFailed.

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
            channels.insert(len(processes), channel)  # before the ranks of other hosts
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
        configs += [configs[0]] * len(joined)  # a rank of another host sets its own device
        settings = [
            {"engine": dataclasses.asdict(each), "rank": rank, **common}
            for rank, each in enumerate(configs)
        ]
        followers.configure([json.dumps(each).encode() for each in settings[1:]])
        communicator = make_communicator(configs[0], 0, store, followers.meet, link)
    except BaseException:  # a Ctrl-C too: nothing else would end the processes
        Ranks(configs[0], Communicator(), followers, processes).close()
        for channel in channels:
            channel.close()
        raise
    return Ranks(configs[0], communicator, followers, processes)


def _start(module: str) -> tuple[subprocess.Popen[bytes], RankChannel]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            # Bound from its start: a rank that hangs in its imports would outlive rank 0.
            bound_to_us([sys.executable, "-m", module, str(theirs.fileno())], signal.SIGKILL),
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONSAFEPATH": "1"},
        )
    return process, RankChannel(ours)
