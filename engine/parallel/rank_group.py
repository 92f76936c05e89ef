"""Rank 0's view of the other ranks: sends orders, receives answers, detects their loss.

    engine thread ── send, order ──► all ranks, in the same order  (all run each step)
    watch thread  ◄─ answers, lines, failures; end of a channel; no progress for too long

A rank that fails, dies or hangs ends the engine: `on_lost` is called once, on the watch thread,
because the engine thread may wait for a device that never completes. A rank sends how many messages
it has handled, every BEAT_S: one whose count stands still while messages are pending is hung, and
one of another host that is silent has stopped or cannot be reached. Knows no process, only a
channel of each rank.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from ...core import errors
from ...core.errors import BatonError, EngineFailed, HostLost, StartupFailed
from .rank_channel import COUNTS, MessageKind, RankChannel, RankMessage

log = logging.getLogger(__name__)

_LOOKS_PER_TIMEOUT = 4
_LOOK_S = 0.1  # interval of checks for a lost rank while waiting for an answer
_LAST_MESSAGE_S = 2.0  # how long a failed step waits for the loss that caused it

BEAT_S = 0.2  # between two counts of a rank
_SILENT_S = 1.2  # without a count from another host

OnLost = Callable[[BatonError], None]
OnResult = Callable[[memoryview], None]


@dataclass(slots=True)
class _Order:
    """An order that some ranks have yet to answer."""

    on_done: Callable[[list[bytes]], None]
    answers: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class _Looked:
    """What is known of a rank: its COUNTS, since when it has handled no message though some were
    pending (`since_s`), and when its counts last changed (`moved_s`)."""

    counts: tuple[int, ...]
    since_s: float
    moved_s: float


class RankGroup:
    """Ranks 1 and up, by their channels. `on_line` gets lines for people; `stage_size`: number of
    ranks in each pipeline stage, rank 0 included; all ranks are one stage if None."""

    def __init__(
        self,
        channels: Sequence[RankChannel],
        timeout_s: float,
        start_timeout_s: float,
        on_lost: OnLost,
        on_line: Callable[[str], None],
        stage_size: int | None = None,
    ) -> None:
        self._stage_size = stage_size or 1 + len(channels)
        self._channels = dict(enumerate(channels, start=1))
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._on_lost, self._on_line = on_lost, on_line
        self._sending = threading.Lock()
        self._num_sent = self._num_orders = 0
        self._orders: dict[int, _Order] = {}
        self._error: BatonError | None = None
        self.explaining = Explaining(self)
        self._is_over = threading.Event()  # lost, or closed
        # Called with a step's result, on the watch thread; an engine of one stage has none.
        self.on_result: OnResult = lambda payload: None
        self._loaded = threading.Event()
        self._handles: list[bytes] = []  # of all ranks, once loaded
        self._starting: dict[int, float] = {}  # loading ranks, and when each last made progress
        now_s = time.monotonic()
        self._looked = {rank: _Looked((0, 0), now_s, now_s) for rank in self._channels}
        self._last_heartbeats: dict[
            int, float
        ] = {}  # last heartbeat of each serving rank of another host
        self._look_s = min(timeout_s, start_timeout_s) / _LOOKS_PER_TIMEOUT
        if any(channel.host for channel in channels):
            self._look_s = min(self._look_s, BEAT_S)
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC)
        for channel in channels:
            channel.set_timeout(timeout_s)
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._thread.start()

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank from 1 on; empty: this host."""
        return tuple(channel.host for channel in self._channels.values())

    # -- sending ----------------------------------------------------------------------------------

    def send(self, kind: MessageKind, payload: bytes = b"") -> None:
        """Send to all ranks, which handle messages in order. Raises EngineFailed."""
        self._send_to_all(dict.fromkeys(self._channels, payload), kind, 0, ())

    def order(
        self,
        kind: MessageKind,
        payloads: bytes | Sequence[bytes],
        on_done: Callable[[list[bytes]], None],
        fds: Sequence[int] = (),
    ) -> int:
        """As `send`, perhaps with a payload for each rank; returns the order's number.

        `on_done` gets the answers, on the watch thread; once a rank is lost it is not called.
        """
        with self._sending:
            self._num_orders += 1
            number = self._num_orders
            self._orders[number] = _Order(on_done)
        if isinstance(payloads, bytes):
            payloads = [payloads] * len(self._channels)
        self._send_to_all(dict(zip(self._channels, payloads, strict=True)), kind, number, fds)
        return number

    def order_and_wait(
        self, kind: MessageKind, payloads: bytes | Sequence[bytes], fds: Sequence[int] = ()
    ) -> tuple[int, list[bytes]]:
        """As `order`, but wait for the answers; on any thread but the watch thread.

        Raises the error by which a rank was lost, or EngineFailed after `close`.
        """
        found: list[bytes] = []
        is_done = threading.Event()

        def done(answers: list[bytes]) -> None:
            found.extend(answers)
            is_done.set()

        number = self.order(kind, payloads, done, fds)
        while not is_done.wait(_LOOK_S):
            if self._is_over.is_set():
                raise self._error or EngineFailed("the ranks have ended")
        return number, found

    def configure(self, payloads: Sequence[bytes]) -> None:
        """Let all ranks load the model; `meet` waits for them."""

        def loaded(handles: list[bytes]) -> None:
            self._handles = handles
            self._loaded.set()

        self._starting = dict.fromkeys(self._channels, time.monotonic())
        self.order(MessageKind.CONFIGURE, payloads, loaded)

    def meet(self, handle: bytes) -> list[bytes]:
        """Wait until all ranks have loaded, then let them connect: `torch_communicator.Meet`.

        Raises the error by which a rank was lost.
        """
        while not self._loaded.wait(_LOOK_S):
            self.check()
        handles = [handle, *self._handles]
        self._starting = dict.fromkeys(self._channels, time.monotonic())
        self.send(MessageKind.CONNECT, msgspec.msgpack.encode(handles))
        return handles

    @property
    def is_lost(self) -> bool:
        return self._error is not None

    def check(self) -> None:
        """Raise the error by which a rank was lost, if one was."""
        if self._error is not None:
            raise self._error

    def explain(self, error: Exception) -> Exception:
        """The cause of a failed step: the error by which a rank was lost, else `error`."""
        self._is_over.wait(_LAST_MESSAGE_S)
        return self._error or error

    def _send_to_all(
        self, payloads: dict[int, bytes], kind: MessageKind, order: int, fds: Sequence[int]
    ) -> None:
        self.check()
        try:
            with self._sending:
                self._num_sent += 1
                for rank, payload in payloads.items():
                    self._channels[rank].send(kind, payload, order=order, fds=fds)
        except OSError as error:
            lost = EngineFailed(f"{self._name(rank)} cannot be reached: {error}")
            raise self.explain(lost) from error

    # -- watching ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self._receive_all()
        except Exception as error:  # without this thread no loss would be detected
            log.exception("the watch over the ranks failed")
            self._lose(EngineFailed(f"{type(error).__name__}: {error}"))

    def _receive_all(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, channel in self._channels.items():
                selector.register(channel, selectors.EVENT_READ, rank)
            selector.register(self._wake, selectors.EVENT_READ)
            looked_s = time.monotonic()
            while not self._is_over.is_set():
                for key, _ in selector.select(self._look_s):
                    if key.data is not None:
                        self._receive(key.data)
                before_s, looked_s = looked_s, time.monotonic()
                if looked_s - before_s > self._look_s + BEAT_S:  # this process was paused
                    self._forgive(looked_s)
                self._look(looked_s)

    def _receive(self, rank: int) -> None:
        try:
            message = self._channels[rank].receive()
        except (OSError, ValueError) as error:
            self._lose(EngineFailed(f"{self._name(rank)} sent an invalid message: {error}"))
            return
        if message is None:
            self._lose(EngineFailed(f"{self._name(rank)} ended"))
            return
        if rank in self._starting and message.kind is not MessageKind.TAKEN:
            self._starting[rank] = time.monotonic()
        if message.kind is MessageKind.ANSWER:
            self._starting.pop(rank, None)  # loaded: waits for the other ranks
            self._answer(rank, message)
        elif message.kind is MessageKind.RESULT:
            self.on_result(message.payload)
        elif message.kind is MessageKind.LINE:
            self._on_line(f"{self._name(rank)}: {bytes(message.payload).decode()}")
        elif message.kind is MessageKind.TAKEN:
            looked, now_s = self._looked[rank], time.monotonic()
            counts = COUNTS.unpack(message.payload)
            if counts != looked.counts:
                looked.counts, looked.since_s, looked.moved_s = counts, now_s, now_s
                if rank in self._starting:
                    self._starting[rank] = now_s
            if counts[0] and self._channels[rank].host:
                self._last_heartbeats[rank] = (
                    now_s  # it serves: no long call holds its GIL any more
                )
        elif message.kind is MessageKind.FAILED:
            self._lose(_read_failure(self._name(rank), message))

    def _name(self, rank: int) -> str:
        host = self._channels[rank].host
        return f"rank {rank} on {host}" if host else f"rank {rank}"

    def _answer(self, rank: int, message: RankMessage) -> None:
        order = self._orders[message.order]
        order.answers[rank] = bytes(message.payload)
        if len(order.answers) == len(self._channels):
            del self._orders[message.order]
            order.on_done([order.answers[each] for each in self._channels])

    def _forgive(self, now_s: float) -> None:
        """Restart the timeouts of all ranks."""
        self._last_heartbeats.clear()
        for looked in self._looked.values():
            looked.since_s = now_s
        starting = self._starting
        starting.update(dict.fromkeys(starting, now_s))

    def _look(self, now_s: float) -> None:
        """Find a rank that has handled no message for too long though some are pending.

        A starting rank handles none, but reports progress unless it waits for other ranks. A stage
        may wait for the stages before: its timeout starts with their last message, and if several
        stages are stuck, the first one is to blame.
        """
        standing: list[tuple[int, float, int]] = []  # stage, since when, rank
        num_sent, starting = self._num_sent, self._starting
        for rank, looked in self._looked.items():
            stage, found = rank // self._stage_size, looked.counts[0]
            if found == 0 and now_s - starting.get(rank, now_s) > self._start_timeout_s:
                self._lose(_start_failure(rank, self._start_timeout_s))
            elif found in (0, num_sent):  # starting, or nothing is pending
                looked.since_s = now_s
            before = range(1, stage * self._stage_size)
            since_s = max([looked.since_s, *(self._looked[other].moved_s for other in before)])
            if now_s - since_s > self._timeout_s / 2:
                standing.append((stage, since_s, rank))
        for rank, last_s in self._last_heartbeats.items():
            if now_s - last_s > _SILENT_S:
                self._lose(HostLost(f"{self._name(rank)} has sent nothing for {_SILENT_S} s"))
        limit_s = self._timeout_s + BEAT_S  # a count may be that old
        if any(now_s - since_s > limit_s for _, since_s, _ in standing):
            _, since_s, rank = min(standing)
            self._lose(EngineFailed(f"rank {rank} has not answered for {now_s - since_s:.1f} s"))

    def _lose(self, error: BatonError) -> None:
        if not self._is_over.is_set():
            log.error("%s", error.message)
            self._error = error
            self._is_over.set()
            self._on_lost(error)

    def close(self) -> None:
        """Close all channels, which ends the ranks."""
        self._is_over.set()
        os.write(self._woken, b"\0")
        self._thread.join()
        for channel in self._channels.values():
            channel.close()
        os.close(self._wake)
        os.close(self._woken)


class Explaining:
    """Raises an EngineFailed of this rank's step as `RankGroup.explain` says."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, EngineFailed):
            raise self._ranks.explain(error) from error


def report_failure(channel: RankChannel, error: Exception, what: str) -> None:
    """Send the error that ends a rank to rank 0. Other errors than BatonError are logged, with
    the message `what`."""
    if not isinstance(error, BatonError):
        log.error(what, exc_info=error)
        error = EngineFailed(f"{type(error).__name__}: {error}")
    hint = error.hint if isinstance(error, StartupFailed) else ""
    fields = {"code": error.code, "message": error.message, "hint": hint}
    channel.send(MessageKind.FAILED, json.dumps(fields).encode())


@contextmanager
def reporting(channel: RankChannel, what: str) -> Iterator[None]:
    """Send an error of this thread to rank 0, as `report_failure`; it is not raised."""
    try:
        yield
    except OSError:
        return  # rank 0 is gone
    except Exception as error:  # nothing else would report it
        report_failure(channel, error, what)


def _start_failure(rank: int, timeout_s: float) -> StartupFailed:
    return StartupFailed(
        f"rank {rank} has made no progress in its start for {timeout_s:g} s",
        hint="a larger --rank-start-timeout-s, if it is only slow",
    )


def _read_failure(name: str, message: RankMessage) -> BatonError:
    fields = json.loads(bytes(message.payload))
    text = f"{name}: {fields['message']}"
    if fields["code"] == StartupFailed.code:
        return StartupFailed(text, hint=fields["hint"])
    return errors.from_code(fields["code"], text)
