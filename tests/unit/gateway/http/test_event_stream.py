"""A stream of events whose reader stops and then continues."""

from __future__ import annotations

import asyncio

from aiohttp import web

from baton.gateway.http.protocol.event_stream import BURST, Burst, EventStream

EVENT = f"data: {'x' * 4096}\n\n"
_MOST_EVENTS = 8192  # 32 MiB: more than sockets buffer


async def test_there_is_room_until_the_reader_stops_and_once_it_reads_on() -> None:
    rooms: list[bool] = []
    has_stopped = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        stream = EventStream(request)
        rooms.append(stream.has_room)  # the response's headers are not sent yet
        await stream.send(EVENT)
        rooms.append(stream.has_room)
        for _ in range(_MOST_EVENTS):
            if stream.has_room:
                stream.send_now(EVENT)
                await asyncio.sleep(0)
        rooms.append(stream.has_room)
        has_stopped.set()
        await stream.send(EVENT)  # blocks until the client reads
        rooms.append(stream.has_room)
        return await stream.end()

    app = web.Application()
    app[BURST] = Burst()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    [port] = [address[1] for address in runner.addresses]
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    async with asyncio.timeout(20):
        await has_stopped.wait()
        await _read_to_end(reader)
    writer.close()
    await runner.cleanup()
    assert rooms == [False, True, False, True]


async def _read_to_end(reader: asyncio.StreamReader) -> None:
    last = b""
    while not last.endswith(b"0\r\n\r\n"):
        data = await reader.read(1 << 16)
        assert data, "it was cut off"
        last = (last + data)[-16:]
