"""A foreign process, usually of another user of the host. It knows addresses and methods, but no
secret.

`intruder` starts it and sends it orders. It runs only `PROGRAM`, which imports gRPC and no code of
ours, and then switches to that user, who may lack the rights to read our files.
"""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

PROGRAM = r'''
import asyncio, collections, concurrent.futures.thread, encodings.idna, encodings.latin_1, json, os
import socket, sys, traceback
import grpc, grpc.aio

other = int(sys.argv[1])
os.setgroups([])
os.setresgid(other, other, other)
os.setresuid(other, other, other)
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.so_reuseport", 0))
recorded, servers, seats = [], [], []


async def say(address, method, messages, wait_s=5.0, ends=True):
    """One call; how it ended, and all that came of it."""
    received, metadata = [], []
    async with grpc.aio.insecure_channel(address, OPTIONS) as channel:
        call = channel.stream_stream(method)(timeout=wait_s)
        try:
            for message in messages:
                await call.write(bytes.fromhex(message))
            if ends:
                await call.done_writing()
            while (came := await call.read()) is not grpc.aio.EOF:
                received.append(came.hex())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        code, details = await call.code(), await call.details()
        metadata = [f"{k}={v!r}" for k, v in (await call.trailing_metadata() or ())]
    return {"code": code.name, "details": details, "metadata": metadata, "received": received}


class Anything(grpc.GenericRpcHandler):
    """Takes every call, notes all that comes, answers a challenge of its own, or relays."""

    def __init__(self, challenge, relay_to):
        self.challenge, self.relay_to = bytes.fromhex(challenge), relay_to

    def service(self, details):
        note = {"method": details.method, "messages": [], "forwarded": None}
        note["metadata"] = [f"{k}={v!r}" for k, v in details.invocation_metadata]
        recorded.append(note)
        # Every second one of a method; the others get a challenge.
        relays = sum(each.get("method") == details.method for each in recorded) % 2 == 0

        async def take(requests, context):
            async for message in requests:
                note["messages"].append(message.hex())
                if relays:
                    note["forwarded"] = await say(
                        self.relay_to, details.method, note["messages"], ends=False, wait_s=3.0
                    )
                    for came in note["forwarded"]["received"]:
                        await context.write(bytes.fromhex(came))
                else:
                    await context.write(self.challenge)

        return grpc.stream_stream_rpc_method_handler(take)


async def listen(port, challenge, relay_to):
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((Anything(challenge, relay_to),))
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    servers.append(server)
    return bound


async def notes():
    return recorded


async def deaf():
    for server in servers:
        await server.stop(None)
    servers.clear()
    for seat in seats:
        seat.close()
    seats.clear()
    return recorded


async def flood(address, method, message, per_s, for_s):
    """Calls at this rate over several connections; half of them say something, once."""
    codes, loop = collections.Counter(), asyncio.get_running_loop()
    channels = [grpc.aio.insecure_channel(address, OPTIONS) for _ in range(8)]

    async def stranger(number):
        call = channels[number % 8].stream_stream(method)(timeout=20)
        try:
            if number % 2:
                await call.write(bytes.fromhex(message))
            await call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        codes[(await call.code()).name] += 1

    began_s, calls = loop.time(), []
    while (now_s := loop.time() - began_s) < for_s:
        calls += [asyncio.create_task(stranger(n)) for n in range(len(calls), int(now_s * per_s))]
        await asyncio.sleep(0.01)
    await asyncio.gather(*calls)
    for channel in channels:
        await channel.close()
    return codes


async def connect(where):
    """To a port of this host, or to a name of the abstract namespace."""
    if isinstance(where, int):
        return await asyncio.open_connection("127.0.0.1", where)
    local = socket.socket(socket.AF_UNIX)
    local.setblocking(False)
    await asyncio.get_running_loop().sock_connect(local, "\0" + where)
    return await asyncio.open_unix_connection(sock=local)


async def knock(where, payloads, wait_s=4.0):
    """All that comes of these words, and how it ended: "" if it has not."""
    received, writer, how = b"", None, ""
    try:
        async with asyncio.timeout(wait_s):
            reader, writer = await connect(where)
            for words in payloads:
                writer.write(bytes.fromhex(words))
            while data := await reader.read(65536):
                received += data
        how = "end"
    except TimeoutError:
        pass
    except OSError as error:
        how = type(error).__name__
    if writer is not None:
        writer.close()
    return {"received": received.hex(), "how": how}


async def pester(where, words, per_s, for_s):
    """Connections at this rate; half of them say something. How each ended."""
    loop = asyncio.get_running_loop()
    began_s, knocks = loop.time(), []
    while (now_s := loop.time() - began_s) < for_s:
        for number in range(len(knocks), int(now_s * per_s)):
            payloads = [words] if number % 2 else []
            knocks.append(asyncio.create_task(knock(where, payloads, wait_s=8.0)))
        await asyncio.sleep(0.01)
    ends = await asyncio.gather(*knocks)
    received = [end["received"] for end in ends if end["received"]]
    return {"how": collections.Counter(end["how"] for end in ends), "received": received}


async def sit(where, challenge, relay_to):
    """Take every connection there, note all that comes; every second one is passed on."""
    async def take(reader, writer):
        note = {"where": where, "payload": "", "forwarded": None}
        recorded.append(note)
        relays = sum(each.get("where") == where for each in recorded) % 2 == 0
        try:
            async with asyncio.timeout(3.0):
                while data := await reader.read(65536):
                    note["payload"] += data.hex()
                    if relays:
                        note["forwarded"] = await knock(relay_to, [note["payload"]], wait_s=2.5)
                        writer.write(bytes.fromhex(note["forwarded"]["received"]))
                    else:
                        writer.write(bytes.fromhex(challenge))
        except (TimeoutError, OSError):
            pass
        writer.close()

    while True:
        try:
            if isinstance(where, int):
                seats.append(await asyncio.start_server(take, "127.0.0.1", where))
            else:
                local = socket.socket(socket.AF_UNIX)
                local.bind("\0" + where)
                seats.append(await asyncio.start_unix_server(take, sock=local))
            return
        except OSError:  # who had it dies just now
            await asyncio.sleep(0.01)


async def look(path):
    try:
        with open(path, "rb") as file:
            return file.read().decode("latin-1")
    except OSError as error:
        return type(error).__name__


async def main():
    loop = asyncio.get_running_loop()
    print("ready", flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        print(json.dumps(await globals()[order.pop("do")](**order)), flush=True)


asyncio.run(main())
'''


@dataclass
class Intruder:
    """Executes one order at a time; any thread may send it."""

    process: subprocess.Popen[str]

    def do(self, what: str, **how: Any) -> Any:
        """Send an order (a function's name in PROGRAM) and wait for its result."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": what, **how}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@contextmanager
def intruder(user: str = "nobody") -> Iterator[Intruder]:
    """Start it as this user: for root only."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(pwd.getpwnam(user).pw_uid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        env={"PATH": os.defpath, "PYTHONSAFEPATH": "1", "GRPC_VERBOSITY": "NONE"},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield Intruder(process)
        finally:
            process.kill()
