"""Rank 0's end of the other ranks: sends their orders, receives answers, notices their loss.

    engine thread ── send, order ──► all ranks, in one order      (what a step does, all do)
    watch thread  ◄─ answers, lines, failures; end of a channel; no progress for too long

A rank that fails, dies or hangs takes the engine down: `on_lost` is called once, on the watch
thread, because the engine's own may be waiting on a device that will never be done. Ranks of other
hosts say a few times a second that they live: who is silent has stopped or cannot be reached. Knows
no process: a channel is all there is of a rank.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from ...core import errors
from ...core.errors import BatonError, EngineFailed, HostLost, StartupFailed
from .rank_channel import MessageKind, RankChannel, RankMessage

log = logging.getLogger(__name__)

_LOOKS_PER_TIMEOUT = 4
_LOOK_S = 0.1  # how often who waits for an answer looks whether there can be one
_LAST_MESSAGE_S = 2.0  # how long a loss may take to be noticed once a step has failed over it

# Of a rank of another host, and how often it is looked for that.
SILENT_S, BEAT_S = 1.2, 0.2

_WORD_BYTES = 8

OnLost = Callable[[BatonError], None]
OnResult = Callable[[memoryview], None]


def _ignore(payload: memoryview) -> None:
    """Of an engine of one stage, whose rank 0 has all results itself."""


class RankProgress:
    """How many messages each rank has taken: a shared page that ranks write and rank 0 watches, one
    uint64 for each rank from 1 on.

    A rank that stands still while there is something to take is hung; to look costs no message a
    step. `fd` may be passed to the other ranks.
    """

    def __init__(self, fd: int, num_ranks: int) -> None:
        """Map `fd`, which becomes this object's."""
        self.fd = fd
        self._memory = mmap.mmap(fd, num_ranks * _WORD_BYTES)
        # An aligned 8-byte store is never seen half done.
        self._counts = memoryview(self._memory).cast("Q")

    @classmethod
    def create(cls, num_ranks: int) -> RankProgress:
        fd = os.memfd_create("baton-ranks", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_ranks * _WORD_BYTES)
        return cls(fd, num_ranks)

    def add(self, rank: int) -> None:
        """One more message was taken by `rank`, which alone writes its count."""
        self._counts[rank - 1] += 1

    def set(self, rank: int, num_taken: int) -> None:
        """What a rank of another host says of itself."""
        self._counts[rank - 1] = num_taken

    def read(self, rank: int) -> int:
        return self._counts[rank - 1]

    def close(self) -> None:
        self._counts.release()
        self._memory.close()
        os.close(self.fd)


@dataclass(slots=True)
class _Order:
    """What all ranks have yet to answer."""

    on_done: Callable[[list[bytes]], None]
    answers: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class _Looked:
    """How many messages a rank had taken at the last look, since when it has taken none of those
    that it could, and when it last took one."""

    num_taken: int
    since_s: float
    moved_s: float


class RankGroup:
    """Ranks 1 and up, by their channels. `on_line` gets lines for people; `stage_size`: ranks of
    each stage of a pipeline, rank 0 counted; all are one stage unless given."""

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
        self._is_over = threading.Event()  # lost, or closed
        self.on_result: OnResult = _ignore  # a step's; on the watch thread
        self._loaded = threading.Event()
        self._handles: list[bytes] = []  # once loaded
        self._starting: dict[int, float] = {}  # who loads yet, and when it last came further
        self._progress = RankProgress.create(len(channels))
        now_s = time.monotonic()
        self._looked = {rank: _Looked(0, now_s, now_s) for rank in self._channels}
        self._heard: dict[int, float] = {}  # when a rank of another host, which serves, last spoke
        self._look_s = min(timeout_s, start_timeout_s) / _LOOKS_PER_TIMEOUT
        if any(channel.host for channel in channels):
            self._look_s = min(self._look_s, BEAT_S)
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC)
        for channel in channels:
            channel.set_timeout(timeout_s)
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._thread.start()

    @property
    def num_ranks(self) -> int:
        """How many there are beside rank 0."""
        return len(self._channels)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Of each of them; empty: this one."""
        return tuple(channel.host for channel in self._channels.values())

    # -- sending ----------------------------------------------------------------------------------

    def send(self, kind: MessageKind, payload: bytes = b"") -> None:
        """All ranks do this, behind all that was sent before. Raises EngineFailed."""
        self._send_to_all(dict.fromkeys(self._channels, payload), kind, 0, ())

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See Runner; it is done before whatever is sent next."""
        self.send(MessageKind.COPY_BLOCKS, np.array(pairs, np.int64).T.tobytes())

    def order(
        self,
        kind: MessageKind,
        payloads: Sequence[bytes],
        on_done: Callable[[list[bytes]], None],
        fds: Sequence[int] = (),
    ) -> int:
        """As `send`, each rank its own payload; `on_done` gets the answers on the watch thread.

        Returns the order's number. There is no answer once a rank is lost.
        """
        with self._sending:
            self._num_orders += 1
            number = self._num_orders
            self._orders[number] = _Order(on_done)
        self._send_to_all(dict(zip(self._channels, payloads, strict=True)), kind, number, fds)
        return number

    def order_and_wait(
        self, kind: MessageKind, payloads: Sequence[bytes], fds: Sequence[int] = ()
    ) -> tuple[int, list[bytes]]:
        """As `order`, but wait for the answers; from any thread but the watch's.

        Raises what a rank was lost by, or EngineFailed once they are let go.
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
        """Start all ranks loading; `meet` waits for them."""

        def loaded(handles: list[bytes]) -> None:
            self._handles = handles
            self._loaded.set()

        self._starting = dict.fromkeys(self._channels, time.monotonic())
        self.order(MessageKind.CONFIGURE, payloads, loaded, [self._progress.fd])

    def meet(self, handle: bytes) -> list[bytes]:
        """Wait until all ranks are loaded, and let them connect: `torch_communicator.Meet`.

        Raises what a rank was lost by.
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
        """Raise what a rank was lost by, if one was."""
        if self._error is not None:
            raise self._error

    def explain(self, error: Exception) -> Exception:
        """Why a step failed: what a rank was lost by, if that was it, else `error`."""
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
        except Exception as error:  # nobody would notice a loss any more
            log.exception("the watch over the ranks ends")
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
                if looked_s - before_s > self._look_s + BEAT_S:  # we stood still ourselves
                    self._forgive(looked_s)
                self._look(looked_s)

    def _receive(self, rank: int) -> None:
        try:
            message = self._channels[rank].receive()
        except (OSError, ValueError) as error:
            self._lose(EngineFailed(f"{self._name(rank)} is not understood: {error}"))
            return
        if message is None:
            self._lose(EngineFailed(f"{self._name(rank)} ended"))
            return
        if rank in self._starting and message.kind is not MessageKind.TAKEN:
            self._starting[rank] = time.monotonic()
        if message.kind is MessageKind.ANSWER:
            self._starting.pop(rank, None)  # loaded: it waits for the others
            self._answer(rank, message)
        elif message.kind is MessageKind.RESULT:
            self.on_result(message.payload)
        elif message.kind is MessageKind.LINE:
            self._on_line(f"{self._name(rank)}: {bytes(message.payload).decode()}")
        elif message.kind is MessageKind.TAKEN:
            num_taken = int.from_bytes(message.payload, "little")
            self._progress.set(rank, num_taken)
            if num_taken:  # it serves: nothing keeps its interpreter for long any more
                self._heard[rank] = time.monotonic()
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
        """Count the silence of all ranks anew."""
        self._heard.clear()
        for looked in self._looked.values():
            looked.since_s = now_s
        starting = self._starting
        starting.update(dict.fromkeys(starting, now_s))

    def _look(self, now_s: float) -> None:
        """Find a rank that has taken nothing for too long, though there is something to take.

        Until it serves it takes nothing, but shows signs of life where it does not wait for others.
        A stage may wait for the one before: it has its time from that one's last step on, and of
        those that stand still the first is to blame.
        """
        standing: list[tuple[int, float, int]] = []  # stage, since when, rank
        num_sent, starting = self._num_sent, self._starting
        for rank, looked in self._looked.items():
            stage = rank // self._stage_size
            found = self._progress.read(rank)
            if found != looked.num_taken:
                looked.num_taken, looked.moved_s = found, now_s
                looked.since_s = now_s
            if found == 0 and now_s - starting.get(rank, now_s) > self._start_timeout_s:
                self._lose(_start_failure(rank, self._start_timeout_s))
            elif found in (0, num_sent):  # it has nothing to take
                looked.since_s = now_s
            before = range(1, stage * self._stage_size)
            since_s = max([looked.since_s, *(self._looked[other].moved_s for other in before)])
            if now_s - since_s > self._timeout_s / 2:
                standing.append((stage, since_s, rank))
        for rank, heard_s in self._heard.items():
            if now_s - heard_s > SILENT_S:
                self._lose(HostLost(f"{self._name(rank)} says nothing for {SILENT_S} s"))
        if any(now_s - since_s > self._timeout_s for _, since_s, _ in standing):
            _, since_s, rank = min(standing)
            self._lose(EngineFailed(f"rank {rank} has not answered for {now_s - since_s:.1f} s"))

    def _lose(self, error: BatonError) -> None:
        if not self._is_over.is_set():
            log.error("%s", error.message)
            self._error = error
            self._is_over.set()
            self._on_lost(error)

    def close(self) -> None:
        """Let all ranks end."""
        self._is_over.set()
        os.write(self._woken, b"\0")
        self._thread.join()
        for channel in self._channels.values():
            channel.close()
        self._progress.close()
        os.close(self._wake)
        os.close(self._woken)


def report_failure(channel: RankChannel, error: Exception, what: str) -> None:
    """Of a rank, to rank 0: what it ends by. `what` is logged of an error that is none of ours."""
    if not isinstance(error, BatonError):
        log.error(what, exc_info=error)
        error = EngineFailed(f"{type(error).__name__}: {error}")
    hint = error.hint if isinstance(error, StartupFailed) else ""
    fields = {"code": error.code, "message": error.message, "hint": hint}
    channel.send(MessageKind.FAILED, json.dumps(fields).encode())


def _start_failure(rank: int, timeout_s: float) -> StartupFailed:
    return StartupFailed(
        f"rank {rank} has come no further in its start for {timeout_s:g} s",
        hint="if it is only slow, a larger --rank-start-timeout-s",
    )


def _read_failure(name: str, message: RankMessage) -> BatonError:
    fields = json.loads(bytes(message.payload))
    text = f"{name}: {fields['message']}"
    if fields["code"] == StartupFailed.code:
        return StartupFailed(text, hint=fields["hint"])
    return errors.from_code(fields["code"], text)
