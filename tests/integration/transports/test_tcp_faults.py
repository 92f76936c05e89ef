"""`tcp` when the network breaks: transfers resume after resets, silent connections time out."""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fakes.access import ENGINE_KEY, access
from fakes.handoff import block_pairs
from fakes.handoff.block_pairs import BlockPair, BlockRef
from fakes.host_pool import HostPool
from fakes.node.wire_proxy import BACK, ON, WireProxy

from baton.cli.host.certs import make_certificates
from baton.cluster.tls import role_name
from baton.core.channels.engine_tls import EngineTls
from baton.core.channels.handshake import ANSWER_BYTES, CHALLENGE_BYTES, OPENING_BYTES
from baton.engine.kv.block_pool import NUM_RESERVED_BLOCKS
from baton.engine.kv.generations import GenerationsReader
from baton.kv_transfer.export.pool_address import PoolDescription
from baton.kv_transfer.network import data_wire as wire
from baton.kv_transfer.network.data_client import describe_remote
from baton.kv_transfer.network.data_server import DataServer, ServedPool
from baton.kv_transfer.network.remote_window import RemoteWindow
from baton.kv_transfer.network.tcp import HostBlockBytes, TcpOutlet, TcpTransport
from baton.kv_transfer.window.block_pairs import BlockPairs, Ids
from baton.kv_transfer.window.network_address import RemotePool
from baton.kv_transfer.window.transport import PullOutcome

SOURCE, PULLER = "5" * 32, "9" * 32
BLOCK_BYTES, NUM_BLOCKS = 1536, 40
CHUNK_BLOCKS = 2  # per request
SOURCE_IDS = (5, 2, 9, 14, 30, 7)
LIVENESS_S = 1.5  # a silent peer is detected by then
RESUME_S = 0.5

# Header bytes on a connection by direction: of the opening, then of one request.
OPENING = {
    ON: OPENING_BYTES + ANSWER_BYTES + wire.TERMS_BYTES,
    BACK: CHALLENGE_BYTES + wire.LENGTH_BYTES,
}
REQUEST = {
    ON: wire.REQUEST_BYTES + CHUNK_BLOCKS * wire.BYTES_PER_BLOCK,
    BACK: 3 * wire.FRAME_BYTES + CHUNK_BLOCKS * BLOCK_BYTES,
}


@dataclass
class World:
    """A source behind a proxy, and the puller's pool."""

    source: HostPool
    ours: HostPool
    server: DataServer
    proxy: WireProxy
    tls: tuple[EngineTls, EngineTls] | None = None  # the source's, the puller's
    num_reads: int = 0
    committed: list[int] = field(default_factory=list)  # our blocks, in order of writes

    def remote(self) -> RemotePool:
        return access(SOURCE, self.proxy.port, is_elsewhere=True)

    @contextlib.contextmanager
    def window(self) -> Iterator[RemoteWindow]:
        committed = self.committed

        class Noted(HostBlockBytes):
            def write(self, block_ids: Ids, data: np.ndarray) -> None:
                committed.extend(block_ids.tolist())
                super().write(block_ids, data)

        transport = TcpTransport(
            lambda cut: Noted(self.ours, cut),
            BLOCK_BYTES,
            anywhere=False,
            **({} if self.tls is None else {"wrap": self.tls[1].puller_wrap()}),
        )
        window = transport.connect(self.remote())
        window._carrier.max_request_blocks = CHUNK_BLOCKS
        try:
            yield window
        finally:
            window.close()
            window.join()

    @contextlib.contextmanager
    def beside(self) -> Iterator[World]:
        """Another puller of the same source, behind a proxy of its own."""
        ours, proxy = HostPool(PULLER, 12, BLOCK_BYTES), WireProxy(self.server.port)
        self.server._addresses.append(f"127.0.0.1:{proxy.port}")
        yield World(self.source, ours, self.server, proxy)
        proxy.close()
        ours.close()

    def pairs(self) -> BlockPairs:
        """The pairs of three requests."""
        return block_pairs.join(
            *(
                BlockPair(BlockRef(each, self.source.generations.read(each)), 2 + i)
                for i, each in enumerate(SOURCE_IDS)
            )
        )

    def check_pulled(self) -> None:
        """Check that every block was pulled, and written once, in order."""
        for i, each in enumerate(SOURCE_IDS):
            assert self.ours.block(2 + i) == self.source.block(each)
        assert self.committed == [2 + i for i in range(len(SOURCE_IDS))]

    def forget(self) -> None:
        self.committed.clear()
        for i in range(len(SOURCE_IDS)):
            self.ours.block(2 + i)[:] = bytes(BLOCK_BYTES)


@contextlib.contextmanager
def running(tls: tuple[EngineTls, EngineTls] | None = None) -> Iterator[World]:
    """A source that accepts connections at any rate: they break here by the hundred."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baton.core.channels.accept_thread.BURST", 10_000)
        yield from served(tls)


def served(tls: tuple[EngineTls, EngineTls] | None) -> Iterator[World]:
    source, ours = HostPool(SOURCE, NUM_BLOCKS, BLOCK_BYTES), HostPool(PULLER, 12, BLOCK_BYTES)
    rng = np.random.default_rng(3)
    for block_id in range(NUM_RESERVED_BLOCKS, NUM_BLOCKS):
        source.block(block_id)[:] = rng.bytes(BLOCK_BYTES)
    outlet = partial(TcpOutlet, lambda cut: HostBlockBytes(source, cut))
    wrapped = {} if tls is None else {"wrap": tls[0].source_wrap()}
    server = DataServer("127.0.0.1", ["127.0.0.1"], {wire.Mode.BYTES: outlet}, **wrapped)
    reader = GenerationsReader(source.generations.fd, NUM_BLOCKS, SOURCE)
    server.start(ServedPool(PoolDescription(SOURCE, BLOCK_BYTES, NUM_BLOCKS), reader, ENGINE_KEY))
    proxy = WireProxy(server.port)
    server._addresses.append(f"127.0.0.1:{proxy.port}")
    yield World(source, ours, server, proxy, tls)
    proxy.close()
    server.close()
    until_s = time.monotonic() + 3
    while any(thread.name == "newcomer" for thread in threading.enumerate()):
        assert time.monotonic() < until_s, "a thread is left"
        time.sleep(0.005)
    reader.close()
    source.close()
    ours.close()


@pytest.fixture
def world() -> Iterator[World]:
    with running() as found:
        yield found


def begin(window: RemoteWindow, pairs: BlockPairs) -> queue.SimpleQueue[PullOutcome]:
    done: queue.SimpleQueue[PullOutcome] = queue.SimpleQueue()
    window.start_pull(pairs, done.put)
    return done


def pull(window: RemoteWindow, pairs: BlockPairs) -> tuple[PullOutcome, float]:
    """The outcome of a pull, and its duration."""
    began_s = time.monotonic()
    outcome = begin(window, pairs).get(timeout=10)
    return outcome, time.monotonic() - began_s


# --- resets -------------------------------------------------------------------------------------


def cuts() -> list[tuple[str, int]]:
    """Cuts after each byte of every header of a request and its response, and at 50 offsets in the
    blocks; in the first chunk or the second."""
    chance = random.Random(16)
    first_body = 2 * wire.FRAME_BYTES
    end = REQUEST[BACK] - wire.FRAME_BYTES
    body = chance.sample(range(first_body, end), 50)
    back = [*range(first_body + 1), *range(end, REQUEST[BACK] + 1), *body]
    on = range(1, REQUEST[ON] + 1)
    found = [(BACK, offset) for offset in back] + [(ON, offset) for offset in on]
    return [(way, i % 2 * REQUEST[way] + offset) for i, (way, offset) in enumerate(found)]


def test_a_reset_at_any_byte_goes_on_at_the_chunk_that_was_not_taken(world: World) -> None:
    with world.window() as window:
        for way, offset in cuts():
            world.forget()
            num_before = world.proxy.num_connections
            world.proxy.cut_after(offset, way)
            outcome, took_s = pull(window, world.pairs())
            assert outcome is PullOutcome.OK, (way, offset)
            assert took_s < RESUME_S, (way, offset)
            assert world.proxy.has_cut
            assert world.proxy.num_connections <= num_before + 1
            world.check_pulled()


def test_a_reset_at_any_byte_of_the_opening_goes_on(world: World) -> None:
    """A pull survives resets at any byte of the opening, even if the new connection breaks too."""
    with world.window() as window:
        for way in (ON, BACK):
            for offset in range(1, OPENING[way] + 1):
                world.forget()
                world.proxy.reset_all()
                world.proxy.cut_after(offset, way)
                outcome, took_s = pull(window, world.pairs())
                assert (outcome, took_s < RESUME_S) == (PullOutcome.OK, True), (way, offset)
                world.check_pulled()


def test_a_window_opens_over_a_connection_that_is_reset(world: World) -> None:
    for offset in (3, 60, 70, 140, 300):
        world.proxy.cut_after(offset, BACK)
        with world.window() as window:
            assert pull(window, world.pairs())[0] is PullOutcome.OK
    world.proxy.cut_after(10, BACK)
    assert describe_remote(world.remote()).num_blocks == NUM_BLOCKS


def test_a_rewrite_between_two_connections_is_stale(world: World) -> None:
    """The verdict is made again for a request that is repeated after a reset."""
    with world.window() as window:
        pairs = world.pairs()
        world.proxy.cut_after(REQUEST[BACK] + 200, BACK)
        rewritten = threading.Event()
        introduce = window._carrier.connect

        def connect(*arguments: object) -> object:
            world.source.generations.bump([SOURCE_IDS[2]])
            rewritten.set()
            return introduce(*arguments)

        window._carrier.connect = connect
        assert pull(window, pairs)[0] is PullOutcome.STALE
        assert rewritten.is_set()
        assert world.committed == [2, 3]
        assert not any(world.ours.block(4))


def test_a_connection_that_always_breaks_is_given_up_in_time(world: World) -> None:
    with world.window() as window:
        world.proxy.resets_all = True
        world.proxy.reset_all()
        outcome, took_s = pull(window, world.pairs())
        assert outcome is PullOutcome.FAILED
        assert took_s < LIVENESS_S
        assert 3 < world.proxy.num_connections < 40
        world.proxy.resets_all = False
        assert pull(window, world.pairs())[0] is PullOutcome.OK


def test_progress_counts_resets_anew(world: World) -> None:
    """A pull with progress survives more resets than one chunk would."""
    with world.window() as window:
        window._carrier.max_request_blocks = 1
        ids = [2 + i % 8 for i in range(60)]
        generation = world.source.generations.read
        pairs = block_pairs.join(*(BlockPair(BlockRef(i, generation(i)), 3) for i in ids))
        world.proxy.cut_every(2 * BLOCK_BYTES, BACK)
        assert pull(window, pairs)[0] is PullOutcome.OK
        assert world.committed == [3] * 60
        assert world.proxy.num_resets > 20


def test_a_source_that_is_gone_is_given_up_at_once(world: World) -> None:
    with world.window() as window:
        world.proxy.close()
        outcome, took_s = pull(window, world.pairs())
        assert outcome is PullOutcome.FAILED
        assert took_s < 0.2


def test_a_closed_window_does_not_connect_again(world: World) -> None:
    """A closed window opens no connection after the loss of its link, though pulls on their way may
    succeed."""
    with world.window() as window:
        world.proxy.lost = frozenset({BACK})
        waiting = [begin(window, world.pairs()) for _ in range(2)]
        window.close()
        num_before = world.proxy.num_connections
        world.proxy.reset_all()  # while data is held back, or it might complete
        world.proxy.lost = frozenset()
        outcomes = [done.get(timeout=LIVENESS_S) for done in waiting]
        assert outcomes == [PullOutcome.FAILED] * 2
        assert world.proxy.num_connections == num_before


# --- silence ------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [None, 500, 3 * REQUEST[BACK] - 4], ids=str)
def test_silence_ends_every_pull_that_waits(world: World, offset: int | None) -> None:
    """Silence before the request, after it, in a body or in the last verdict ends the pull; the
    next one succeeds."""
    ways = [{BACK}, {ON}, {ON, BACK}]  # all at once, as each takes its time
    with contextlib.ExitStack() as stack:
        worlds = [stack.enter_context(world.beside()) for _ in ways]
        windows = [stack.enter_context(world.window()) for world in worlds]
        with ThreadPoolExecutor() as threads:
            list(threads.map(fall_silent, worlds, windows, ways, [offset] * len(ways)))


def fall_silent(world: World, window: RemoteWindow, lost: set[str], offset: int | None) -> None:
    if offset is None:
        world.proxy.lost = frozenset(lost)
    else:
        world.proxy.lose_after(offset, BACK, frozenset(lost))
    began_s = time.monotonic()
    waiting = [begin(window, world.pairs()) for _ in range(3)]
    outcomes = [done.get(timeout=10) for done in waiting]
    assert outcomes[1:] == [PullOutcome.FAILED] * 2, lost
    has_come_whole = offset is not None and offset > 2 * REQUEST[BACK] and lost == {ON}
    assert outcomes[0] is (PullOutcome.OK if has_come_whole else PullOutcome.FAILED), lost
    assert time.monotonic() - began_s < LIVENESS_S, lost
    world.proxy.lost = frozenset()
    world.committed.clear()
    assert pull(window, world.pairs())[0] is PullOutcome.OK, lost
    world.check_pulled()


def test_a_slow_source_is_waited_for_as_long_as_something_comes(world: World) -> None:
    world.proxy.at_once_bytes = BLOCK_BYTES // 4  # of new connections
    with world.window() as window:
        world.proxy.delay_s = 0.06
        outcome, took_s = pull(window, world.pairs())
        assert outcome is PullOutcome.OK
        assert took_s > 1.2


def test_a_cancelled_pull_does_not_wait_for_a_slow_source(world: World) -> None:
    """The cancelled pull's blocks stay reserved until it ends; pulls queued after it continue."""
    world.proxy.at_once_bytes = BLOCK_BYTES // 16  # of new connections
    with world.window() as window:
        world.proxy.delay_s = 0.15
        outcomes: queue.Queue[PullOutcome] = queue.Queue()
        slow = window.start_pull(world.pairs(), outcomes.put)
        window.start_pull(world.pairs(), outcomes.put)
        time.sleep(0.2)
        began_s = time.monotonic()
        slow.cancel()
        assert outcomes.get(timeout=10) is PullOutcome.CANCELLED
        assert time.monotonic() - began_s < 1.0
        assert not world.committed
        world.proxy.delay_s = 0.0
        assert outcomes.get(timeout=10) is PullOutcome.OK
        world.check_pulled()


# --- TLS ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineTls, EngineTls]:
    folder: Path = tmp_path_factory.mktemp("certs")
    make_certificates(folder)

    def of(role: str) -> EngineTls:
        ca, chain, key = (str(folder / name) for name in ("ca.crt", f"{role}.crt", f"{role}.key"))
        return EngineTls(ca, chain, key, *map(role_name, ("gateway", "prefill", "decode")))

    return of("prefill"), of("decode")


def test_with_tls_resets_go_on_and_silence_ends(certificates: tuple[EngineTls, EngineTls]) -> None:
    chance = random.Random(16)
    with running(certificates) as world, world.window() as window:
        for offset in [*range(1, 30, 3), *chance.sample(range(30, 3 * REQUEST[BACK]), 10)]:
            world.forget()
            world.proxy.cut_after(offset, BACK)
            outcome, took_s = pull(window, world.pairs())
            assert (outcome, took_s < RESUME_S) == (PullOutcome.OK, True), offset
            world.check_pulled()
        world.proxy.reset_all()
        for offset in range(1, 3000, 211):  # within the handshake
            world.forget()
            world.proxy.cut_after(offset, BACK)
            world.proxy.reset_all()
            outcome, took_s = pull(window, world.pairs())
            assert (outcome, took_s < RESUME_S) == (PullOutcome.OK, True), offset
        world.proxy.lost = frozenset({BACK})
        outcome, took_s = pull(window, world.pairs())
        assert (outcome, took_s < LIVENESS_S) == (PullOutcome.FAILED, True)
