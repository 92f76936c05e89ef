"""Process faults: each is a small function that starts requests and breaks something.

A fault asserts only its own conditions: how fast it was reported, or resources were freed. The
scene checks the streams.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from fault_scenes.fault_cluster import CHUNK_TOKENS
from fault_scenes.faults import BLOCK_SIZE, Ledger, Scene, until
from node_driver import CLUSTER, SECRET, NodeProcess, health, session
from patience import AT_ONCE_S, SOON_S

from baton.cluster.redis_client import RedisClient
from baton.cluster.redis_directory import RedisDirectory
from baton.cluster.secret import ClusterSecret
from baton.core.channels.admission import PULLER, dial
from baton.core.channels.frames import FrameBuffer, encode_payload
from baton.core.errors import Cancelled, EngineFailed, PermissionDenied, Unavailable
from baton.core.membership import Member, Role
from baton.core.request.constraint import Constraint, ConstraintKind
from baton.core.request.request import Request, Ticket
from baton.core.request.sampling_params import SamplingParams
from baton.kv_transfer.protocol.messages import Hello, Refused, decode, encode

NUM_CHUNKS = 8
NUM_NEIGHBOURS = 31
LONG = NUM_CHUNKS * CHUNK_TOKENS  # a prompt of about 100 ms
DEADLY = 1200  # tokens: a prompt that takes twice as long
PREFILLS, DECODES = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
_UNNOTICED_S = 1.0  # of silence; the gateway's limit is 1.2 s


# --- the progress of a request ------------------------------------------------------------------


def is_busy(ledger: Ledger) -> bool:
    return bool(ledger["requests"] or ledger["transfers"])


def has_computed(num_chunks: int) -> Callable[[Ledger], bool]:
    def holds(ledger: Ledger) -> bool:
        requests = ledger["requests"].values()
        return any(r["num_computed_tokens"] >= num_chunks * CHUNK_TOKENS for r in requests)

    return holds


def is_computing_long(killed: Collection[str]) -> Callable[[Ledger], bool]:
    """Whether the node, not killed yet, has computed less than half of the deadly prompt, so that a
    kill comes before its end. Others' prompts have less than two chunks."""

    def holds(ledger: Ledger) -> bool:
        counts = [r["num_computed_tokens"] for r in ledger.get("requests", {}).values()]
        is_computing = any(2 * CHUNK_TOKENS <= count < DEADLY // 2 for count in counts)
        return is_computing and ledger["node"] not in killed

    return holds


def waits_for(source: str) -> Callable[[Ledger], bool]:
    def holds(ledger: Ledger) -> bool:
        return source in [transfer.get("source") for transfer in ledger["transfers"].values()]

    return holds


# --- F1 to F6: kill -9 --------------------------------------------------------------------------


async def kill_prefill_before_its_first_chunk(part: str, scene: Scene) -> None:
    """One of two requests goes to the paused node, unless that is taken for lost."""
    waits, is_met = waits_for(scene.incarnation("prefill-0")), False
    while not is_met:
        with scene.stopped("prefill-0", "engine"):
            for stream in (scene.ask(LONG), scene.ask(LONG)):
                is_met = is_met or await scene.holder_during(stream, "decode", waits) is not None
            if is_met:
                scene.kill("prefill-0", part)


async def kill_prefill_at_chunk(chunk: int, part: str, scene: Scene) -> None:
    """Repeated if the kill came too late to cost an attempt."""
    for _ in range(8):
        stream = scene.ask(DEADLY)
        name = await scene.holder_during(stream, "prefill", has_computed(chunk))
        if name is None:
            continue
        scene.kill(name, part)
        await stream.end()
        if stream.result.attempts > 1:
            return
        await scene.heal()
    raise AssertionError("no kill at a chunk cost an attempt")


async def kill_prefill_before_the_pull(part: str, scene: Scene) -> None:
    """All KV is computed and the first token is sent, but both decode nodes are paused."""
    with scene.stopped("decode-0", "engine"), scene.stopped("decode-1", "engine"):
        await scene.ask(LONG).reached(1)
        scene.kill(await scene.holder("prefill", is_busy), part)


async def kill_prefill_after_the_pull(scene: Scene) -> None:
    """The stream continues. F8: the node reports at once that it is not ready, and restarts its
    engine."""
    stream = scene.ask(LONG, 60)
    name = await scene.holder("prefill", is_busy)
    async with health(scene.cluster.processes[name].address) as become:
        await become(True)
        await stream.reached(3)
        scene.kill(name, "engine")
        await become(False)
        told_s = time.time() - scene.broken_s
        await become(True)
    print(f"F8: not ready after {told_s * 1e3:.0f} ms")
    assert told_s < AT_ONCE_S


async def kill_decode_before_its_first_token(part: str, scene: Scene) -> None:
    """The source has sent token 0; the node that decodes the rest dies. The other decode node runs:
    on a busy machine a prefill may take longer than the heartbeat timeout."""
    stream = scene.ask(LONG)
    source = await scene.holder("prefill", has_computed(2))
    puller = await scene.puller_of(source)
    with scene.stopped(puller, "engine"):
        await stream.reached(1)
        scene.kill(puller, part)


async def kill_decode_during_the_prefill(part: str, scene: Scene) -> None:
    scene.ask(LONG)
    source = await scene.holder("prefill", has_computed(2))
    scene.kill(await scene.puller_of(source), part)


async def kill_decode_at_token(token: int, part: str, scene: Scene, num_left: int = 40) -> None:
    """Other streams run one slot before, at and after the same block edge."""
    lengths = [6 * BLOCK_SIZE + shift - token for shift in (0, -1, 1)]
    name = None
    while name is None:
        stream, *_ = [scene.ask(length, token + num_left) for length in lengths]
        await stream.reached(1)
        name = await scene.holder_of("decode", stream)
    await stream.reached(token)
    scene.kill(name, part)


async def kill_decode_of_a_constrained(scene: Scene) -> None:
    """The grammar's state is lost with the engine, and rebuilt from the tokens."""
    schema = json.dumps({"type": "array", "items": {"enum": [True, "x"]}, "minItems": 60})
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, schema)
    name = None
    while name is None:
        stream = scene.ask(60, 48, constraint=constraint, ignore_eos=False, temperature=1.0, seed=5)
        scene.ask(60, 48)
        await stream.reached(1)
        name = await scene.holder_of("decode", stream)
    await stream.reached(9)
    scene.kill(name, "node")


async def kill_engines_under_one_request(scene: Scene) -> None:
    """F37: each engine that computes the request dies, and no third one is tried; its neighbours
    survive."""
    killed: list[str] = []
    while len(killed) < 2:  # repeat if its prefill was missed
        killed = []
        stream = scene.ask(DEADLY, expected_error=EngineFailed)
        neighbours = [scene.ask() for _ in range(NUM_NEIGHBOURS)]
        while len(killed) < 2:
            name = await scene.holder_during(stream, "prefill", is_computing_long(killed))
            if name is None:
                stream.expected_error = None
                await asyncio.gather(*(one.end() for one in (stream, *neighbours)))
                break
            scene.kill(name, "engine")
            killed.append(name)
    await stream.end()
    for neighbour in neighbours:
        await neighbour.end()
    attempts = sorted(neighbour.result.attempts for neighbour in neighbours)
    took_s = time.time() - scene.broken_s
    print(f"F37: attempts of neighbours {attempts}, over {took_s:.2f} s after the second death")


async def kill_both_decodes(scene: Scene) -> None:
    """No decode node is left: a request that may wait continues when a node is back, the other
    fails."""
    waits = scene.ask(num_tokens=60)
    fails = scene.ask(num_tokens=60, gateway="gateway-1", expected_error=Unavailable)
    await asyncio.gather(waits.reached(2), fails.reached(2))
    for name in DECODES:
        scene.kill(name)
    began_s = time.monotonic()
    await fails.end()
    assert time.monotonic() - began_s < SOON_S
    scene.cluster.restart_dead()
    await waits.end()
    print(f"F6: {max(waits.result.times.gaps_s):.2f} s until a decode node was back")


async def kill_gateway(scene: Scene) -> None:
    """The nodes free the gateway's requests; its client is notified."""
    stream = scene.ask(num_tokens=1000, gateway="gateway-1", expected_error=Unavailable)
    await stream.reached(5)
    scene.kill("gateway-1")
    took_s = await scene.wait_idle()
    print(f"gateway killed: its requests freed in {took_s * 1e3:.0f} ms")
    assert took_s < SOON_S


# --- F9: paused and continued -------------------------------------------------------------------


async def pause_prefill(seconds: float, part: str, scene: Scene) -> None:
    scene.ask(LONG)
    await scene.pause(await scene.holder("prefill", has_computed(2)), seconds, part)


async def pause_decode(seconds: float, part: str, scene: Scene) -> None:
    stream = scene.ask(num_tokens=100)
    await stream.reached(5)
    name = await scene.holder_of("decode", stream)
    assert name is not None
    await scene.pause(name, seconds, part)


async def hang_decode_engine(scene: Scene) -> None:
    """The supervisor works and accepts streams, but no gateway uses the engine again."""
    stream = scene.ask(num_tokens=60)
    await stream.reached(5)
    name = await scene.holder_of("decode", stream)
    assert name is not None
    with scene.stopped(name, "engine"):
        await stream.end()
        others = [scene.ask() for _ in range(4)]
        for other in others:
            await other.end()
    assert [other.result.attempts for other in others] == [1, 1, 1, 1]


async def pause_gateway(seconds: float, scene: Scene) -> None:
    await scene.ask(num_tokens=60).reached(5)
    await scene.pause("gateway-0", seconds)


# --- F26, F30, F34, F42 -------------------------------------------------------------------------


async def send_crafted_tickets(scene: Scene) -> None:
    """F26: used, for another pair, for the wrong engine: all refused, and nothing is computed."""
    source, puller = scene.incarnation("prefill-0"), scene.incarnation("decode-0")
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    good = Ticket("a" * 32, source, puller)

    def request(number: int) -> Request:
        return Request(f"{number:032x}", 0, tuple(range(5, 45)), params)

    async with session(source) as to_source, session(puller) as to_puller:
        await to_source.dispatch(request(1), good)
        await to_puller.dispatch(request(1), good)
        await to_puller.until(lambda: _is_over(to_puller.received, request(1)))
        crafted = (
            (to_source, good),
            (to_puller, good),
            (to_source, Ticket("b" * 32, puller, source)),
            (to_puller, Ticket("c" * 32, source, scene.incarnation("decode-1"))),
            (to_source, Ticket("d" * 32, scene.incarnation("prefill-1"), puller)),
            (to_puller, Ticket("e" * 32, puller, source)),
        )
        for number, (to, ticket) in enumerate(crafted, 2):
            await to.dispatch(request(number), ticket)
            await to.until(lambda to=to, n=number: _is_over(to.received, request(n)))
            received = to.received[request(number).key]
            # "handoff_failed": the used ticket's Release may not have reached its source yet.
            assert received.error in ("unknown_transfer", "invalid_request", "handoff_failed")
            assert not received.tokens


def _is_over(received: dict[str, Any], request: Request) -> bool:
    return request.key in received and received[request.key].is_over


async def leave_before_the_prefill(scene: Scene) -> None:
    with scene.stopped("prefill-0", "engine"), scene.stopped("prefill-1", "engine"):
        stream = scene.ask(LONG, expected_error=Cancelled)
        await scene.holder("decode", is_busy)
        stream.generation.cancel()
    assert await scene.wait_idle() < SOON_S


async def leave_in_the_prefill(scene: Scene) -> None:
    stream = scene.ask(LONG, expected_error=Cancelled)
    await scene.holder("prefill", has_computed(2))
    stream.generation.cancel()
    assert await scene.wait_idle() < SOON_S


async def leave_before_the_pull(scene: Scene) -> None:
    """Repeated if the gateway noticed the silence before its dispatch, or nearly so."""
    for _ in range(8):
        with scene.stopped("decode-0", "engine"), scene.stopped("decode-1", "engine"):
            stream = scene.ask(LONG, expected_error=Cancelled)
            with suppress(TimeoutError):
                async with asyncio.timeout(_UNNOTICED_S):
                    await stream.reached(1)
            stream.generation.cancel()
            assert await scene.wait_idle(*PREFILLS) < SOON_S
        assert await scene.wait_idle() < SOON_S
        if stream.tokens:
            return
        await scene.heal()
    raise AssertionError("no prompt was computed in time")


async def leave_in_the_decode(scene: Scene) -> None:
    stream = scene.ask(num_tokens=1000, expected_error=Cancelled)
    await stream.reached(5)
    stream.generation.cancel()
    assert await scene.wait_idle() < SOON_S


async def take_ports(scene: Scene) -> None:
    """F34: a process whose port is taken reports it and exits; a node without a fixed address
    listens on another port."""
    launch = scene.cluster.launch
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        began_s = time.monotonic()
        ending = [
            launch("gateway-9", "--grpc-port", port, "--http-port", "0"),
            launch("decode-9", "--port", port, "--advertise", f"127.0.0.1:{port}"),
        ]
        moving = launch("decode-8", "--port", port)
        try:
            for process in ending:
                assert await asyncio.to_thread(process.wait) == 1
            print(f"F34: both ended in {time.monotonic() - began_s:.1f} s")
            assert not (await asyncio.to_thread(lambda: moving.address)).endswith(f":{port}")
        finally:
            for process in (*ending, moving):
                process.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(moving.wait) == 0
        for process in (*ending, moving):
            assert any(port in line for line in process.printed)


MISFITS = (  # name, flags, and the field with both sides' values, whichever side reports it
    ("prefill-8", ("--dtype", "bfloat16"), ("dtype: ", "'float32' ", "'bfloat16' ")),
    ("decode-9", ("--seed", "7"), ("model: ", " here", " there")),
)


async def join_with_other_makes(scene: Scene) -> None:
    """F42: KV of another type or of other weights, and other block sizes, are refused; the other
    pairs serve."""
    processes = scene.cluster.processes
    misfits = {name: scene.cluster.launch(name, *flags) for name, flags, _ in MISFITS}
    try:
        await asyncio.to_thread(lambda: [process.address for process in misfits.values()])

        async def are_refused() -> bool:
            return all(
                _has_said(puller, f"not linked to {source} ", *words)
                for name, _, words in MISFITS
                for puller, source in (
                    [(misfits[name], source) for source in PREFILLS]
                    if name.startswith("decode")
                    else [(processes[puller], name) for puller in DECODES]
                )
            )

        await until(are_refused, timeout_s=1.0)
        await _greet_as_another_make(scene)
        streams = [scene.ask() for _ in range(6)]
        for stream in streams:
            await stream.end()
            result = stream.result
            assert (result.prefill_node in PREFILLS, result.decode_node in DECODES) == (True, True)
        for name in DECODES:
            peers = (await scene.ledger(name))["peers"]
            assert {peers[scene.incarnation(source)] for source in PREFILLS} == {"ready"}
            assert len(peers) == len(PREFILLS) + len(DECODES) - 1
    finally:
        for process in misfits.values():
            process.process.send_signal(signal.SIGINT)
        for process in misfits.values():
            process.wait()


def _has_said(process: NodeProcess, *words: str) -> bool:
    return any(all(word in line for word in words) for line in process.printed)


async def _greet_as_another_make(scene: Scene) -> None:
    """A refused puller gets the reason in its last frame; an unlisted puller gets it at once."""
    source, puller = scene.incarnation("prefill-0"), "e" * 32
    hello = Hello(puller, {"block_size": "8"})
    key = ClusterSecret(SECRET).dialing_key
    ends = partial(asyncio.to_thread, dial, PULLER, key, listener=source, address=None)
    async with _announced(scene, puller):
        reader, writer = await asyncio.open_connection(sock=await ends(dialer=puller))
        writer.write(encode_payload(encode(hello)))
        frames = FrameBuffer()
        payloads: list[bytes] = []
        while data := await reader.read(65536):
            payloads += frames.cut(data)
        writer.close()
    refused = decode(payloads[-1])
    assert isinstance(refused, Refused) and refused.error.code == "fingerprint_mismatch"
    assert refused.error.message == "block_size: '16' here, '8' there"
    stranger = "d" * 32
    try:
        (await ends(dialer=stranger)).close()
    except PermissionDenied as error:
        assert error.message == f"engine {stranger} is not in the directory"
    else:
        raise AssertionError("a puller that nobody knows is listened to")


@asynccontextmanager
async def _announced(scene: Scene, incarnation: str) -> AsyncIterator[None]:
    """Meanwhile the directory lists an engine of this incarnation, which accepts no links."""
    directory = RedisDirectory(RedisClient(scene.cluster.redis.url, CLUSTER, ClusterSecret(SECRET)))
    member = Member(
        *(incarnation, Role.DECODE, "nobody", "127.0.0.1:1", "demo", "f", 512, 16, 64),
        engine_address="127.0.0.1:2",
        host_id="f" * 32,
    )
    await directory.announce(member, 5.0)
    try:
        yield
    finally:
        await directory.withdraw(incarnation)
        await directory.close()
