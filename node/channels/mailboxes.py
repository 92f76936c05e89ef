"""Both ends of a turn of the engine loop: what it waits for, and what it sends.

    other threads ── put ──► items, bell ──┐
    supervisor, peers, listener ── watch ──┴─► Inbox.receive ──► items, on the loop's thread
    a step's outputs ── Outbox ──► gateways, at the turn's end

No thread stands between a socket and the loop: to wake one up takes longer than to handle most
messages. All outputs of a step for one gateway travel in one message. Knows no request's state.
"""

from __future__ import annotations

import math
import os
import select
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ...core.channels.channel import Channel, FrameSocket
from ...proto.v1 import node_pb2


@dataclass(slots=True)
class _Step:
    """What a step has for one gateway. Tokens: request id, attempt, index, token id."""

    outputs: list[node_pb2.RequestOutput] = field(default_factory=list)
    tokens: list[tuple[str, int, int, int]] = field(default_factory=list)

    def message(self) -> node_pb2.StepOutputs:
        if not self.tokens:
            return node_pb2.StepOutputs(outputs=self.outputs)
        request_ids, attempts, indices, token_ids = zip(*self.tokens, strict=True)
        tokens = node_pb2.PlainTokens(
            request_ids=request_ids, attempts=attempts, indices=indices, token_ids=token_ids
        )
        return node_pb2.StepOutputs(outputs=self.outputs, tokens=tokens)


class Outbox:
    """Belongs to the engine loop's thread. `send_to`: for a gateway, by its name."""

    def __init__(self, send_to: Callable[[str, node_pb2.NodeMessage], None]) -> None:
        self._send_to = send_to
        self._steps: dict[str, _Step] = {}  # by gateway

    def to_gateway(self, gateway: str, output: node_pb2.RequestOutput) -> None:
        """Queue one request's output for this gateway."""
        self._step(gateway).outputs.append(output)

    def token_to_gateway(
        self, gateway: str, request_id: str, attempt: int, index: int, token_id: int
    ) -> None:
        """The same for an output that is one token and nothing else."""
        self._step(gateway).tokens.append((request_id, attempt, index, token_id))

    def _step(self, gateway: str) -> _Step:
        if (step := self._steps.get(gateway)) is None:
            step = self._steps[gateway] = _Step()
        return step

    def forget_gateway(self, gateway: str) -> None:
        """It is gone."""
        self._steps.pop(gateway, None)

    def flush(self) -> None:
        """Send what is queued."""
        steps, self._steps = self._steps, {}
        for gateway, step in steps.items():
            self._send_to(gateway, node_pb2.NodeMessage(outputs=step.message()))


T = TypeVar("T")

_SHORT_S = 0.02  # epoll rounds up to whole milliseconds; a wait this short is timed exactly


class Inbox(Generic[T]):
    """`put` is for any thread; all else belongs to the one that receives."""

    def __init__(self) -> None:
        """Make it early: `select` wants a small file descriptor."""
        self._items: deque[T] = deque()
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._sources: dict[int, Callable[[], Iterable[T]]] = {}
        self._writers: set[int] = set()  # watched for room to write, too

    def put(self, item: T) -> None:
        self._items.append(item)
        os.eventfd_write(self._bell, 1)

    def watch(self, socket: Channel | FrameSocket, read: Callable[[], Iterable[T]]) -> None:
        """From now on `read` is called for items when there is something to do at the socket."""
        self._sources[socket.fileno()] = read
        self._epoll.register(socket.fileno(), select.EPOLLIN)

    def watch_writes(self, socket: Channel | FrameSocket, is_wanted: bool) -> None:
        """Whether room to write is something to do at a watched socket."""
        fd = socket.fileno()
        if is_wanted != (fd in self._writers):
            self._writers ^= {fd}
            self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if is_wanted else 0))

    def forget(self, socket: Channel | FrameSocket) -> None:
        """Before a watched socket is closed."""
        del self._sources[socket.fileno()]
        self._writers.discard(socket.fileno())
        self._epoll.unregister(socket.fileno())

    def receive(self, timeout_s: float) -> list[T]:
        """All items that are there; waits at most `timeout_s` for the first."""
        if 0 < timeout_s < _SHORT_S:
            select.select([self._epoll], [], [], timeout_s)
            timeout_s = 0
        items: list[T] = []
        for fd, _ in self._epoll.poll(None if timeout_s == math.inf else timeout_s):
            if fd == self._bell:
                os.eventfd_read(fd)  # first: what is put behind the last item rings anew
                while self._items:
                    items.append(self._items.popleft())
            elif (read := self._sources.get(fd)) is not None:
                items.extend(read())
        return items

    def close(self) -> None:
        """Nobody puts any more. What is watched stays its owner's."""
        self._epoll.close()
        os.close(self._bell)
