"""The direct channel from a gateway to an engine of its host, on the event loop.

    NodeLink ── send ──► channel ──► engine      tried before the link counts; the stream stays for
             ◄─ hear ───         ◄──             Welcome, heartbeats and the engine's end
Sending never waits: what the engine does not read is kept, up to a limit. What came before the end
of the channel is heard before `over` is set.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from google.protobuf.message import DecodeError

from ...core.channels.direct_channel import ChannelBroken, DirectChannel
from ...core.channels.direct_question import ACCEPTED, Asker, Question, ask
from ...core.channels.framing import MAX_CHUNKS, MAX_FRAME_BYTES, MAX_RELAYED_BYTES, BrokenStream
from ...core.channels.same_host import host_id
from ...core.errors import HandoffFailed
from ...proto.v1 import node_pb2

log = logging.getLogger(__name__)

ACCEPT_TIMEOUT_S = 1.0  # an engine takes two steps to accept
_CHUNKS_AT_ONCE = 1  # some ten steps: they are written to clients before more are read
MAX_UNSENT_BYTES = 4 * MAX_FRAME_BYTES  # many long prompts; an engine that hangs is noticed earlier


async def open_direct(welcome: node_pb2.Welcome) -> DirectChannel | None:
    """A channel that the engine has accepted; None: messages are to go over the stream.

    Raises nothing of the world's.
    """
    try:
        return await _open(welcome.incarnation, welcome.direct)
    except (HandoffFailed, ChannelBroken, OSError) as error:  # TimeoutError and BrokenStream too
        reason = str(error) or f"it did not accept a direct channel in {ACCEPT_TIMEOUT_S:g} s"
        log.info("speaks with engine %s over its node: %s", welcome.name, reason)
        return None


async def _open(incarnation: str, offer: node_pb2.DirectOffer) -> DirectChannel:
    if not offer.token:
        raise HandoffFailed("it offers no direct channel")
    if offer.host_id != host_id():
        raise HandoffFailed("it is on another host")
    channel = ask(Question(Asker.GATEWAY, incarnation, offer.gateway, offer.token))
    try:
        async with asyncio.timeout(ACCEPT_TIMEOUT_S):
            answer = await _answer(channel)
        if answer != [ACCEPTED]:
            raise HandoffFailed("it did not accept a direct channel")
    except BaseException:  # a cancel too: nobody else would close it
        channel.close()
        raise
    return channel


async def _answer(channel: DirectChannel) -> list[bytes]:
    """What the engine says first; nothing, if it hangs up."""
    loop = asyncio.get_running_loop()
    while True:
        ready = loop.create_future()
        loop.add_reader(channel.fileno(), _set, ready)
        try:
            await ready
        finally:
            loop.remove_reader(channel.fileno())
        payloads, is_over = channel.receive()
        if is_over:
            return []
        if payloads:
            return payloads


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


class DirectWay:
    """An accepted channel. Belongs to the event loop; whoever makes it closes it."""

    def __init__(
        self, channel: DirectChannel, hear: Callable[[node_pb2.NodeMessage], None]
    ) -> None:
        """Owns the channel. `hear` gets each message, in order, from the event loop."""
        channel.allow(MAX_RELAYED_BYTES, MAX_UNSENT_BYTES)
        self._channel = channel
        self._hear = hear
        self._loop = asyncio.get_running_loop()
        self._is_writing = False
        self.over: asyncio.Future[str] = self._loop.create_future()  # why nothing more will come
        self._loop.add_reader(channel.fileno(), self._read)

    def send(self, message: node_pb2.GatewayMessage) -> None:
        """Never waits and never raises; where the channel is over, it goes nowhere."""
        if not self._channel.is_closed:
            try:
                self._channel.send(message.SerializeToString())
                self._watch_writes()
            except ChannelBroken as error:
                self._end(str(error))

    def close(self, reason: str = "closed by the gateway") -> None:
        """The engine takes it for the gateway's end. A second time does nothing."""
        if not self._channel.is_closed:
            self._loop.remove_reader(self._channel.fileno())
            self._loop.remove_writer(self._channel.fileno())
            self._channel.close()
            self._loop.call_soon(self.over.set_result, reason)  # behind what is still to be heard

    def refuse(self, reason: str) -> None:
        """End it: what the engine says is of no use."""
        log.warning("an engine's direct channel is closed: %s", reason)
        self.close(reason)

    def _read(self, max_chunks: int = _CHUNKS_AT_ONCE) -> None:
        """Pass on what has come: each message by itself, so that one costs no other."""
        try:
            payloads, is_over = self._channel.receive(max_chunks)
            for payload in payloads:
                self._loop.call_soon(self._hear, node_pb2.NodeMessage.FromString(payload))
        except (BrokenStream, DecodeError) as error:
            self.refuse(f"it is not understood: {error}")
            return
        if is_over:
            self.close("its direct channel ended")

    def _write(self) -> None:
        try:
            self._channel.flush()
            self._watch_writes()
        except ChannelBroken as error:
            self._end(str(error))

    def _watch_writes(self) -> None:
        if self._channel.has_unsent != self._is_writing:
            self._is_writing = self._channel.has_unsent
            if self._is_writing:
                self._loop.add_writer(self._channel.fileno(), self._write)
            else:
                self._loop.remove_writer(self._channel.fileno())

    def _end(self, reason: str) -> None:
        """Nothing more can be said; what the engine said before is still there to read."""
        self._read(MAX_CHUNKS)
        self.close(f"its direct channel broke: {reason}")
