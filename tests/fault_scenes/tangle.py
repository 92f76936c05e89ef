"""A proxy between two processes that duplicates, delays and drops frames.

    gateway ══ TCP ══► Tangle ══► engine
    puller  ══ TCP ══► Tangle ══► source

TCP itself neither duplicates nor reorders, so these are faults that a bug in a channel would cause.
The proxy parses the start of a channel and one message, the source's Hello: `on_data_port` receives
the data port in it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from baton.core.channels.admission import PULLER
from baton.core.channels.frames import LENGTH_BYTES, decode_length, encode_payload
from baton.core.channels.handshake import ANSWER_BYTES, CHALLENGE_BYTES, OPENING_BYTES, Opening
from baton.kv_transfer.protocol.messages import Hello, decode

DOUBLE, SWAP, LOSE = "double", "swap", "lose"


class Tangle:
    """A proxy in front of an engine that announces `address`; `target` is the engine's own address.

    `mishaps`: by direction, such as `("puller", "back")`, the share of frames for each kind of
    mishap. `counts`: the applied mishaps. The beginning of a channel passes unchanged: the
    handshake, and each side's first message. So do empty frames, which carry no message.
    """

    def __init__(
        self, seed: int, on_data_port: Callable[[int], object] = lambda port: None
    ) -> None:
        self.mishaps: dict[tuple[str, str], dict[str, float]] = {}
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.address = self.target = ""
        self._on_data_port = on_data_port
        self._random = random.Random(seed)
        self._relays: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Tangle:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relay = asyncio.ensure_future(self._relay(reader, writer))
        self._relays.add(relay)
        relay.add_done_callback(self._relays.discard)

    async def _relay(self, near: asyncio.StreamReader, to_near: asyncio.StreamWriter) -> None:
        host, _, port = self.target.rpartition(":")
        writers = [to_near]
        with suppress(OSError, asyncio.IncompleteReadError):
            try:
                far, to_far = await asyncio.open_connection(host, int(port))
                writers.append(to_far)
                opening = await _pass(near, to_far, OPENING_BYTES)
                await _pass(far, to_near, CHALLENGE_BYTES)
                await _pass(near, to_far, ANSWER_BYTES)
                to_near.write(encode_payload(await _frame(far)))  # the verdict
                purpose = Opening.unpack(opening).purpose.decode()
                onwards = asyncio.create_task(self._pass_on(near, to_far, (purpose, "on")))
                back = asyncio.create_task(self._pass_on(far, to_near, (purpose, "back")))
                try:
                    await asyncio.wait((onwards, back), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in (onwards, back):
                        way.cancel()
                    await asyncio.gather(onwards, back, return_exceptions=True)
            finally:
                for writer in writers:
                    writer.close()

    async def _pass_on(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, way: tuple[str, str]
    ) -> None:
        """Forward the frames of one direction, with mishaps."""
        async for payload in self._tangled(_frames(source), way):
            if way == (PULLER.decode(), "back") and payload:
                self._look(payload)
            target.write(encode_payload(payload))
            await target.drain()

    async def _tangled(
        self, payloads: AsyncIterator[bytes], way: tuple[str, str]
    ) -> AsyncIterator[bytes]:
        held: bytes | None = None
        is_first = True
        async for payload in payloads:
            mishap = self._draw(way) if payload and not is_first else None
            is_first = is_first and not payload
            if mishap == SWAP and held is None:
                held = payload
                continue
            if mishap != LOSE:
                yield payload
            if mishap == DOUBLE:
                yield payload
            if held is not None:
                yield held
                held = None

    def _draw(self, way: tuple[str, str]) -> str | None:
        """The mishap of the next frame of this direction, or None."""
        left = self._random.random()
        for kind, share in self.mishaps.get(way, {}).items():
            if left < share:
                self.counts[*way, kind] += 1
                return kind
            left -= share
        return None

    def _look(self, payload: bytes) -> None:
        message = decode(payload)
        if isinstance(message, Hello) and message.access is not None:
            self._on_data_port(message.access.port)


async def _pass(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, num_bytes: int
) -> bytes:
    data = await source.readexactly(num_bytes)
    target.write(data)
    return data


async def _frame(source: asyncio.StreamReader) -> bytes:
    return await source.readexactly(decode_length(await source.readexactly(LENGTH_BYTES)))


async def _frames(source: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Frames until the stream ends."""
    with suppress(asyncio.IncompleteReadError, OSError):
        while True:
            yield await _frame(source)
