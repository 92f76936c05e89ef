"""Network faults between a source and its pullers: bytes vanish, connections are reset.

prefill-9, "near" ══ Tangle ══ WireProxy ══► decode-9, "far"        the pair that breaks
       ║      ╚════════ unix socket ════════► decode-8, "beside"    a healthy pair
       ╚═ data port ══════════ WireProxy ══► decode-9               "front": gateway-9 reaches all

Blocks are transferred by `--kv-transport tcp`. decode-9 sees the source as on another host, at
another address of this one, where proxies listen: one for each of the source's data ports.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial

from deployments import free_port
from fakes.node.wire_proxy import BACK, ON, WireProxy
from fault_scenes.faults import Scene, Stream, until
from fault_scenes.introductions import Introductions
from fault_scenes.tangle import Tangle
from node_driver import NodeProcess, ledgers, wait_idle

from baton.client import AsyncClient

CLUSTERS = ("near", "far", "beside", "front")
ELSEWHERE = "127.0.0.2"
LEASE_S = 3.0
LIVENESS_S = 1.5
PROMPTS = (150, 330, 60, 500, 220, 410, 90, 280)  # tokens: 0.5 to 4 MB of KV
RESET_EVERY_S = 1 / 7.5


@dataclass
class Network:
    """Two pairs, and the wires of one of them."""

    client: AsyncClient
    nodes: dict[str, str]  # address by name
    control: WireProxy
    data: dict[int, WireProxy] = field(default_factory=dict)  # by port

    def lose(self, ways: frozenset[str]) -> None:
        """From this moment on drop all bytes of these directions between source and puller."""
        for wire in (self.control, *self.data.values()):
            wire.lost = ways


async def break_a_pair_in_every_way(scene: Scene) -> None:
    """F11, F12, F16: one direction, the other, both; and repeated resets under load."""
    async with network(scene) as net:
        for ways in ({ON, BACK}, {BACK}, {ON}):
            await _part(scene, net, frozenset(ways))
        await _reset_data_connections(scene, net, seconds=20.0)


async def _part(scene: Scene, net: Network, ways: frozenset[str]) -> None:
    """Two nodes, reachable by all others, lose one or both directions between them in the middle of
    hand-offs; requests continue on the other pair."""
    first = await _ask(scene, net)
    assert {stream.result.decode_node for stream in first} == {"decode-8", "decode-9"}
    wires = [*net.data.values()]
    for wire in wires:  # within a body: the rest of the response is lost
        wire.lose_after(700_000, BACK, ways)
    streams = [scene.ask(n, 12, client=net.client) for n in PROMPTS]

    async def is_lost() -> bool:
        return any(wire.lost for wire in wires)

    await until(is_lost)
    net.lose(ways)
    scene.broken_s = time.time()
    for stream in streams:
        await stream.end()
    hit = [stream for stream in streams if stream.result.attempts > 1]
    assert hit
    assert {stream.result.attempts for stream in hit} == {2}
    found_s = max(map(scene.found_s, hit))
    took_s = await _idle_s(net)
    print(f"{sorted(ways)} lost: {len(hit)} streams went on within {found_s:.2f} s")
    print(f"     all ledgers clean {took_s:.2f} s after their ends")
    assert found_s < LIVENESS_S + 0.6  # including the new dispatch, on a busy machine
    assert took_s < LEASE_S
    net.lose(frozenset())
    await until(partial(_is_linked, net, 2))


async def _reset_data_connections(scene: Scene, net: Network, seconds: float) -> None:
    """A reset within any part of a chunk costs no attempt.

    Resets happen every MB, and then for some seconds 7.5 times a second.
    """
    (wire,) = net.data.values()
    num_resets = wire.num_resets
    wire.cut_every(1_000_000, BACK)
    for stream in await _ask(scene, net):
        assert stream.result.attempts == 1
    wire.cut_every(1 << 60, BACK)
    assert wire.num_resets > num_resets + 2
    until_s = time.monotonic() + seconds
    resetting = asyncio.create_task(_reset(wire, until_s))
    num_streams, num_resets = 0, wire.num_resets
    while time.monotonic() < until_s:
        for stream in await _ask(scene, net):
            assert stream.result.attempts == 1
            num_streams += 1
    await resetting
    num_resets = wire.num_resets - num_resets
    print(f"F16: and {num_streams} more streams under {num_resets} resets, 7.5 a second")
    await _idle_s(net)
    (ledger,) = await ledgers(net.nodes["decode-9"])
    assert "ready" in ledger["peers"].values()


async def _reset(wire: WireProxy, until_s: float) -> None:
    while time.monotonic() < until_s:
        await asyncio.sleep(RESET_EVERY_S)
        wire.reset_all()


async def _ask(scene: Scene, net: Network) -> list[Stream]:
    """Send requests of some chunks each at once; returns when they are over."""
    streams = [scene.ask(n, 12, client=net.client) for n in PROMPTS]
    for stream in streams:
        await stream.end()
    return streams


async def _idle_s(net: Network) -> float:
    """Seconds until no node holds any request or transfer."""
    began_s = time.monotonic()
    await wait_idle(*net.nodes.values(), timeout_s=2 * LEASE_S)
    return time.monotonic() - began_s


async def _is_linked(net: Network, num_links: int) -> bool:
    found = (await net.client.model_info()).nodes
    return sum(len(node.links) for node in found) == num_links


@asynccontextmanager
async def network(scene: Scene) -> AsyncIterator[Network]:
    """Start the four processes, each in a cluster of its own, and announce them to each other."""
    launch = scene.cluster.launch
    tcp = ("--kv-transport", "tcp")
    processes: list[NodeProcess] = []
    wires: dict[int, WireProxy] = {}
    try:
        async with AsyncExitStack() as stack:

            def stand_before(port: int) -> None:
                if port and port not in wires:
                    proxy = WireProxy(port, ELSEWHERE, port)
                    wires[port] = stack.enter_context(closing(proxy))

            known = Introductions(scene.cluster.redis.url, stack)
            near, far, beside, front = map(known.flags, CLUSTERS)
            tangle = await stack.enter_async_context(Tangle(0, stand_before))
            tangle.target = f"127.0.0.1:{(port := free_port())}"
            tangle_port = int(tangle.address.rpartition(":")[2])
            control = stack.enter_context(closing(WireProxy(tangle_port, ELSEWHERE)))
            elsewhere = f"{ELSEWHERE}:{control.port}"
            reached = ("--engine-port", f"{port}", "--advertise-engine", elsewhere)
            lease = ("--lease-s", f"{LEASE_S}")
            processes += (
                launch("prefill-9", *near, *tcp, *reached, *lease),
                launch("decode-9", *far, *tcp),
                launch("decode-8", *beside, *tcp),
                launch("gateway-9", *front),
            )
            source = await known.newcomer("near")
            pullers = [await known.newcomer(name) for name in ("far", "beside")]
            for puller in pullers:
                await known.show(puller, "near", "front")
            await known.show_elsewhere(source, "far")
            beside_it = dataclasses.replace(source, engine_address=tangle.target)
            await known.show(beside_it, "beside", "front")
            address = await asyncio.to_thread(lambda: processes[-1].address)
            client = await stack.enter_async_context(AsyncClient(address))
            names = ("prefill-9", "decode-9", "decode-8")
            nodes = {name: process.address for name, process in zip(names, processes)}  # noqa: B905
            net = Network(client, nodes, control, wires)
            await until(partial(_is_linked, net, 2))
            yield net
    finally:
        for process in processes:
            process.process.send_signal(signal.SIGINT)
        for process in processes:
            await asyncio.to_thread(process.wait)
