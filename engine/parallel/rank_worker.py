"""A rank other than 0: a process that runs the steps and orders of rank 0; it schedules nothing.

    configure ─► weights ─► connect ─► pool, graphs ─► steps, copies, orders ... ─► rank 0 is gone

`python -m baton.engine.parallel.rank_worker FD` is a rank of an engine without KV transfer; nodes
have their own main, with more orders. Errors are sent to rank 0, which ends the engine. A rank of
another host takes the settings of its host (HostSettings, JSON) as a second argument.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping

import msgspec
import numpy as np
from torch._C import _distributed_c10d as c10d

from ...core import flags
from ...core.engine_config import EngineConfig
from ..execution.device import devices_of_ranks
from ..execution.runner import ModelRunner
from ..execution.runner_protocols import LaunchedStep
from ..hosts.joining import HostSettings
from ..hosts.tcp_stages import StageLink
from .loopback import connect_store, make_store
from .parallel_runner import decode
from .pipeline_runner import ResultSender
from .rank_channel import COUNTS, MessageKind, RankChannel, RankMessage
from .rank_group import BEAT_S, report_failure
from .ranked_adapters import AdapterOrders
from .ranked_copies import HostOrders
from .torch_communicator import make_communicator

log = logging.getLogger(__name__)

Handlers = Mapping[MessageKind, Callable[[RankMessage], None]]
BuildHandlers = Callable[[ModelRunner, RankChannel, HostSettings | None], Handlers]

_NUM_START_MESSAGES = 2  # configure, connect


def main(build_handlers: BuildHandlers = lambda runner, channel, here: {}) -> int:
    """Run until rank 0 is gone; returns the exit code. `build_handlers` makes further handlers."""
    for number in (signal.SIGINT, signal.SIGTERM):  # for the supervisor, which ends rank 0
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    here = None
    if len(sys.argv) > 2:
        here = msgspec.json.decode(sys.argv[2], type=HostSettings)
    channel = RankChannel(
        socket.socket(fileno=int(sys.argv[1])), "" if here is None else "rank 0's"
    )
    try:
        follow(channel, build_handlers, here)
    except OSError as error:
        log.warning("the connection to rank 0 ended: %s", error)
    return 0


def follow(
    channel: RankChannel, build_handlers: BuildHandlers, here: HostSettings | None = None
) -> None:
    """Run a rank until rank 0 closes `channel`; errors are sent to rank 0. `here`: only for a rank
    that is not on rank 0's host."""
    try:
        _follow(channel, build_handlers, here)
    except ConnectionError:
        raise
    except Exception as error:
        report_failure(channel, error, "the rank ends")
    finally:
        channel.close()


def _follow(channel: RankChannel, build_handlers: BuildHandlers, here: HostSettings | None) -> None:
    first = channel.receive()
    if first is None:
        return
    assert first.kind is MessageKind.CONFIGURE
    settings = json.loads(bytes(first.payload))
    config, rank = flags.from_json(EngineConfig, settings["engine"]), settings["rank"]
    beats = Beats(channel)
    if here is not None:
        config = here.of_this_host(config)
        devices = devices_of_ranks(config)
        config = dataclasses.replace(config, device=devices[rank % len(devices)])
    if here is None and "here" in settings:
        here = msgspec.convert(settings["here"], HostSettings)
    link = None
    if here is not None:
        key = bytes.fromhex(settings["stage_key"])
        link = StageLink(rank, config.tensor_parallel_size, here.host, key, here.tls)
    store = connect_store(settings["store_port"]) if here is None else _store_on(here)

    def meet(handle: bytes) -> list[bytes]:
        channel.answer(first.order, handle)
        message = channel.receive()
        if message is None:
            raise ConnectionError("rank 0 did not start")
        assert message.kind is MessageKind.CONNECT
        return msgspec.msgpack.decode(message.payload, type=list[bytes])

    communicator = make_communicator(config, rank, store, meet, link)
    runner = ModelRunner(config, beats.loaded, communicator)
    for note in runner.startup_notes:
        channel.send(MessageKind.LINE, note.encode())
    handlers = {**build_handlers(runner, channel, here)}
    if runner.host_copier is not None:
        host = HostOrders(runner.host_copier, channel)
        handlers |= {MessageKind.HOST_MEMORY: host.pin, MessageKind.COPY_HOST: host.copy}
    if runner.adapters is not None:
        handlers[MessageKind.ADAPTER] = AdapterOrders(runner.adapters, channel).run
    # The ranks of the last stage sample the same tokens: the first of them sends the results.
    num_before = (config.pipeline_parallel_size - 1) * config.tensor_parallel_size
    results = ResultSender(channel) if rank == num_before else None
    try:
        _serve(channel, runner, handlers, beats, results)
    finally:
        beats.close()


def _store_on(here: HostSettings) -> c10d.Store:
    """The store of the ranks of this host; unused, and so local, where each rank is a stage."""
    if here.store_fd is not None:
        return make_store(here.store_fd)
    return connect_store(here.store_port) if here.store_port else c10d.HashStore()


class Beats:
    """Sends rank 0 the rank's COUNTS every BEAT_S."""

    def __init__(self, channel: RankChannel) -> None:
        self._channel = channel
        self.num_taken = self._num_bytes = 0
        self._is_over = threading.Event()
        threading.Thread(target=self._run, name="beats", daemon=True).start()

    def loaded(self, num_bytes: int, total_bytes: int) -> None:
        self._num_bytes = num_bytes

    def send(self) -> None:
        self._channel.send(MessageKind.TAKEN, COUNTS.pack(self.num_taken, self._num_bytes))

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # rank 0 is gone
            while not self._is_over.wait(BEAT_S):
                self.send()

    def close(self) -> None:
        self._is_over.set()


def _serve(
    channel: RankChannel,
    runner: ModelRunner,
    handlers: Handlers,
    beats: Beats,
    results: ResultSender | None = None,
) -> None:
    """Handle messages in order until the channel ends; `beats` counts them."""
    beats.num_taken = _NUM_START_MESSAGES
    beats.send()  # at once: until rank 0 has it, a rank that hangs seems to be starting
    previous: LaunchedStep | None = None
    while (message := channel.receive()) is not None:
        match message.kind:
            case MessageKind.STEP:
                launched = runner.launch(decode(message.payload))
                if results is not None:
                    results.add(launched)
                elif previous is not None:
                    previous.collect()  # has completed, or will soon
                previous = launched
            case MessageKind.DRAFT:
                runner.draft(decode(message.payload))
            case MessageKind.COPY_BLOCKS:
                pairs = np.frombuffer(message.payload, np.int64).reshape(2, -1)
                runner.copy_blocks(list(zip(*pairs.tolist(), strict=True)))
            case kind:
                handlers[kind](message)
        for fd in message.fds:
            os.close(fd)
        beats.num_taken += 1


if __name__ == "__main__":
    os._exit(main())  # without cleanup, which nothing here needs
