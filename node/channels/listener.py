"""Where processes of an engine's host connect to it: strangers, until one has proven who it is.

What a stranger sends is a question of fixed length and nothing else; 64 of them may be silent.
Nothing here waits. The engine loop's thread alone is here.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

from ...core.channels.direct_channel import ChannelBroken, DirectChannel
from ...core.channels.direct_question import PURPOSE, QUESTION_BYTES, Question
from ...core.channels.framing import MAX_FRAME_BYTES, BrokenStream
from ...core.channels.same_host import require_same_user, socket_address
from ...core.errors import HandoffFailed, StartupFailed
from ...core.pace import Pace
from .inbox import Inbox
from .watched_channel import DirectReady, WatchedChannel

log = logging.getLogger(__name__)

_MAX_PER_S = 10  # connections that are taken in, once there was a crowd
MAX_STRANGERS = 64  # connections that have not said who they are; the eldest goes first
_BACKLOG = 64

Admit = Callable[[Question, WatchedChannel], bool]


class Reception:
    """`listen` opens it. `admit` takes over the channel of one that may have it, or says False."""

    def __init__(self, incarnation: str, inbox: Inbox[Any], admit: Admit) -> None:
        self._incarnation = incarnation
        self._inbox = inbox
        self._admit = admit
        self._listener: socket.socket | None = None
        self._is_watched = False
        self._pace = Pace(_MAX_PER_S, 4 * MAX_STRANGERS)
        self._strangers: dict[WatchedChannel, None] = {}  # eldest first

    @property
    def is_open(self) -> bool:
        return self._listener is not None

    def listen(self) -> None:
        """Let processes of this host connect. Raises StartupFailed."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(socket_address(self._incarnation, PURPOSE))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise StartupFailed(f"cannot listen for processes of this host: {error}") from error
        self._listener = listener
        self._watch(listener)

    def close(self) -> None:
        for stranger in [*self._strangers]:
            self._turn_away(stranger)
        self._stop_listening()

    def _take_in(self) -> tuple[()]:
        """Take in whoever connects, as a stranger."""
        while self._listener is not None:
            if wait_s := self._pace.wait_s():
                self._pause(self._listener, wait_s)
                break
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                break
            except OSError as error:  # out of descriptors: those who wait are to use their links
                log.warning("takes in no more direct channels: %s", error)
                self._stop_listening()
                break
            self._pace.take()
            try:
                require_same_user(connection)
            except HandoffFailed as error:
                log.debug("refused a direct channel: %s", error.message)
                connection.close()
                continue
            self._add_stranger(connection)
        return ()

    def _pause(self, listener: socket.socket, wait_s: float) -> None:
        """Who connects meanwhile waits in the kernel: strangers must not take the loop's time."""
        self._inbox.forget(listener)
        self._is_watched = False
        again = threading.Timer(wait_s, self._inbox.put, (DirectReady(self._go_on),))
        again.daemon = True
        again.start()

    def _go_on(self) -> tuple[()]:
        if self._listener is not None:
            self._watch(self._listener)
        return ()

    def _watch(self, listener: socket.socket) -> None:
        ready = (DirectReady(self._take_in),)
        self._inbox.watch(listener, lambda: ready)
        self._is_watched = True

    def _stop_listening(self) -> None:
        if self._listener is not None:
            if self._is_watched:
                self._inbox.forget(self._listener)
            self._listener.close()
            self._listener = None

    def _add_stranger(self, connection: socket.socket) -> None:
        if len(self._strangers) >= MAX_STRANGERS:
            self._turn_away(next(iter(self._strangers)))
        channel = DirectChannel(connection, QUESTION_BYTES, MAX_FRAME_BYTES)
        stranger = WatchedChannel(channel, self._inbox)
        self._strangers[stranger] = None
        stranger.on_ready(lambda: self._hear(stranger))

    def _hear(self, stranger: WatchedChannel) -> tuple[()]:
        """Hear who a stranger is, once it has said so."""
        if stranger.is_closed:
            return ()
        try:
            payloads, is_over = stranger.receive()
        except (BrokenStream, ChannelBroken):
            payloads, is_over = [], True
        if not payloads and not is_over:
            return ()
        question = Question.unpack(payloads[0]) if len(payloads) == 1 and not is_over else None
        is_ours = question is not None and question.engine == self._incarnation
        if question is not None and is_ours and self._admit(question, stranger):
            del self._strangers[stranger]
        else:
            log.warning("refused a direct channel: it is nobody's who is linked")
            self._turn_away(stranger)
        return ()

    def _turn_away(self, stranger: WatchedChannel) -> None:
        del self._strangers[stranger]
        stranger.close()
