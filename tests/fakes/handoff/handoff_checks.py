"""Short scenarios, each for one guarantee of the hand-off or of the engine under it.

A check raises AssertionError if its guarantee is broken. The exhaustive search is the strongest of
them; the others cover what the search does not model: other prompts, a queue of several, clocks
that jump, threads that copy, steps in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from engines.integrity import check_integrity
from fakes.handoff import block_pairs
from fakes.handoff.block_pairs import BlockPair, BlockRef
from fakes.handoff.memory_transport import MemoryPool, MemoryTransport

from baton.core.errors import HandoffFailed
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.kv.block_pool import NUM_RESERVED_BLOCKS, BlockPool, BlockRefs
from baton.engine.kv.generations import Generations
from baton.engine.kv.limits import EngineLimits
from baton.engine.kv.prefix_cache import PrefixCache
from baton.kv_transfer.export.pool_address import PoolDescription
from baton.kv_transfer.protocol.events import (
    ChunkReady,
    Complete,
    Failed,
    Intended,
    Offered,
    OpenWindow,
    PeerLinked,
    PeerMessage,
    PullEnded,
    PullerEvent,
    ReleaseBlocks,
    Reserve,
    Send,
    StartPull,
    Tick,
    WindowOpened,
)
from baton.kv_transfer.protocol.messages import Attach, HandoffState, Manifest, Renew
from baton.kv_transfer.protocol.puller import Puller
from baton.kv_transfer.protocol.source import Source
from baton.kv_transfer.shm.shm_window import ShmWindow
from baton.kv_transfer.window.block_pieces import BlockCut
from baton.kv_transfer.window.threaded_window import Pull
from baton.kv_transfer.window.transport import PullOutcome
from baton.node.peers.windows import Windows

from ..clock import FakeClock
from ..host_pool import HostPool
from ..node.node_world import NodeWorld, request
from ..runner import GREEDY, FakeRunner, expected_tokens
from .handoff import PULLER, SOURCE, hello, only, prompt_hashes, refs, ticket
from .handoff_search import Bounds, Search

LEASE_S = 9.0
BLOCK_SIZE = 4
HASHES = prompt_hashes(7)  # a full block and a partial one
STATE = HandoffState(first_token_id=42)


def search(
    *kinds: str, advances: int = 0, launches: bool = False, sees_steps: bool = False
) -> None:
    """No sequence of moves with these faults violates an invariant."""
    reported = {"launches": launches, "sees_steps": sees_steps}
    Search(Bounds(len(kinds), advances, 1, kinds=frozenset(kinds), **reported)).run()


# ---- blocks of steps in flight


def what_a_step_writes_is_not_copied_before() -> None:
    world = NodeWorld(counts_steps=True)
    world.link()
    world.settle()
    one = request(1, 19)
    world.hand_off(one)
    for _ in range(10):  # copies take no time: any early copy is seen
        world.turn(world.prefill)
        world.turn(world.decode)
        for pull in [pull for window in world.windows for pull in window.pulls]:
            pull.finish()
    world.settle()
    assert world.tokens(one) == expected_tokens(one.prompt_token_ids, one.sampling.max_tokens)


def what_waits_for_a_step_can_be_cancelled() -> None:
    pools = [MemoryPool(4, 8), MemoryPool(4, 8)]
    pools[0].num_steps = 1
    posted: list[Callable[[], None]] = []
    transport = MemoryTransport(pools[1], {SOURCE: pools[0]})
    events: list[PullerEvent] = []
    windows = Windows(transport.open, posted.append, events.append, lambda run: run())
    windows.open(OpenWindow(SOURCE))
    posted.pop()()
    events.clear()
    pair = BlockPair(BlockRef(2, 0), 3)
    windows.pulls.start(StartPull("t", 0, SOURCE, block_pairs.join(pair), step=2))
    windows.pulls.poll()
    assert windows.pulls.are_waiting and len(windows.pulls) == 1 and not posted
    windows.pulls.cancel("t")
    for run in posted:
        run()
    ended = [PullEnded("t", 0, PullOutcome.CANCELLED)]
    assert events == ended and not windows.pulls, "the reservation is kept"


# ---- leases


class JumpingClock(FakeClock):
    """Its wall time is set back by an hour whenever it advances."""

    def unix_ns(self) -> int:
        return super().unix_ns() - int(self.monotonic_s() * 3600e9)


def matched_source(clock: FakeClock) -> Source:
    source = Source(hello(SOURCE), clock, LEASE_S)
    source.handle(PeerLinked(PULLER))
    source.handle(PeerMessage(PULLER, hello(PULLER)))
    return source


def held(source: Source, number: int, deadline_s: float) -> None:
    """Compute a prompt of two blocks, which waits for its puller."""
    source.handle(Offered(ticket(number), f"key{number}", deadline_s))
    transfer_id = ticket(number).transfer_id
    source.handle(PeerMessage(PULLER, Attach(transfer_id)))
    source.handle(ChunkReady(transfer_id, refs(HASHES, 0, 2), 7, STATE))


def lease_ends_whatever_wall_time_does() -> None:
    clock = JumpingClock()
    source = matched_source(clock)
    held(source, 1, deadline_s=1e12)
    clock.advance(LEASE_S)
    assert any(isinstance(e, ReleaseBlocks) for e in source.handle(Tick())), "the lease goes on"


def lease_ends_at_the_deadline() -> None:
    clock = FakeClock()
    source = matched_source(clock)
    held(source, 1, deadline_s=2 * LEASE_S)
    effects: list[object] = []
    for _ in range(6):
        clock.advance(LEASE_S / 2)
        effects += source.handle(PeerMessage(PULLER, Renew((ticket(1).transfer_id,))))
        effects += source.handle(Tick())
    releases = [e for e in effects if isinstance(e, ReleaseBlocks)]
    assert len(releases) == 1, "blocks are kept past the request's deadline"


def a_waiting_puller_renews() -> None:
    clock = FakeClock()
    puller = matched_puller(clock)
    announced(puller, 1)
    renewals = []
    for _ in range(9):
        clock.advance(LEASE_S / 3)
        renewals += [e for e in puller.handle(Tick()) if Send(SOURCE, Renew(_ids(1))) == e]
    assert len(renewals) == 9, "the source would take its blocks back"


def a_ticket_is_good_for_one_request() -> None:
    source = matched_source(FakeClock())
    source.handle(Offered(ticket(1), "first", 600.0))
    effects = source.handle(Offered(ticket(1), "second", 600.0))
    refused = [e.key for e in effects if isinstance(e, ReleaseBlocks)]
    assert refused == ["second"], "the first one's blocks are lost"


# ---- the puller


def matched_puller(clock: FakeClock) -> Puller:
    puller = Puller(hello(PULLER), clock, LEASE_S)
    puller.handle(PeerLinked(SOURCE))
    puller.handle(PeerMessage(SOURCE, hello(SOURCE)))
    puller.handle(WindowOpened(SOURCE))
    return puller


def announced(puller: Puller, number: int, blocks: BlockRefs | None = None) -> list[object]:
    """Deliver the transfer's first manifest."""
    transfer_id = ticket(number).transfer_id
    puller.handle(Intended(ticket(number), f"key{number}", HASHES, 2, 600.0))
    manifest = Manifest(transfer_id, 0, blocks or refs(HASHES, 0, 1), LEASE_S)
    return [*puller.handle(PeerMessage(SOURCE, manifest))]


def nobody_overtakes() -> None:
    engine, params = new_engine(capacity=6), SamplingParams(max_tokens=2, temperature=0.0)
    engine.reserve(Request("runs", 0, (3,) * 8, params))
    assert engine.next_reservation() is not None
    engine.reserve(Request("large", 0, (4,) * 16, params, caller_id=1))
    assert engine.next_reservation() is None
    engine.reserve(Request("small", 0, (5,) * 2, params, caller_id=2))
    assert engine.next_reservation() is None, "a later one has room before the first"


def another_prompt_s_blocks_are_refused() -> None:
    puller = matched_puller(FakeClock())
    effects = announced(puller, 1, refs(prompt_hashes(7, seed=1), 0, 1))
    assert not any(isinstance(e, (Reserve, StartPull, Complete)) for e in effects), "pulled"
    assert isinstance(only(effects, Failed).error, HandoffFailed)


def _ids(number: int) -> tuple[str]:
    return (ticket(number).transfer_id,)


# ---- the copy over shared memory


class _RewrittenBefore:
    """A destination block whose copy begins just after the source block was rewritten."""

    def __init__(self, pool: HostPool, block_id: int) -> None:
        self._pool = pool
        self._block_id = block_id
        self._data = np.zeros((1, pool.block_bytes // 8), dtype=np.uint64)

    def __setitem__(self, key: Any, source: Any) -> None:
        self._pool.generations.bump([self._block_id])
        self._pool.block(self._block_id)[:] = b"\xee" * self._pool.block_bytes
        self._data[key] = source

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._data


def shm_rejects_what_is_rewritten_under_it() -> None:
    pool = HostPool("5" * 32, num_blocks=4, block_bytes=64)
    fds = (pool.fd, pool.generations.fd)
    whole = BlockCut.of(None, 64)
    window = ShmWindow(PoolDescription(pool.incarnation, 64, 4), fds, pool, whole)
    try:
        window._destination = [_RewrittenBefore(pool, 2)]  # type: ignore[assignment]
        pair = BlockPair(BlockRef(2, pool.generations.read(2)), 0)
        outcome = window.copy_blocks(Pull(block_pairs.join(pair), lambda outcome: None))
        assert outcome is PullOutcome.STALE, f"somebody else's bytes were taken: {outcome}"
    finally:
        window.close()
        window.join()
        pool.close()


# ---- the engine under it


def new_engine(*, runs_ahead: bool = False, capacity: int = 12) -> Engine:
    num_blocks = capacity + NUM_RESERVED_BLOCKS
    return Engine(
        EngineParts(
            FakeRunner(num_blocks, BLOCK_SIZE, runs_ahead=runs_ahead),
            EngineLimits(num_blocks, BLOCK_SIZE, max_model_len=40),
            Generations(num_blocks),
            fingerprint="toy",
            eos_token_ids=(),
        )
    )


def generate(engine: Engine, name: str, prompt: Sequence[int], num_tokens: int = 3) -> list[int]:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    engine.add(Request(name, 0, tuple(prompt), params))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [t.token_id for t in engine.step().tokens if t.key == f"{name}/0"]
    check_integrity(engine)
    return tokens


def prompts_that_share_blocks_get_their_own_tokens() -> None:
    """Whole prompts twice (a multiple of the block size), and the middle of one as the start of
    another."""
    engine = new_engine()
    first, second, third = [1, 1, 1, 1, 5, 5, 5, 5], [2, 2, 2, 2, 5, 5, 5, 5], [5, 5, 5, 5, 7, 7]
    for name, prompt in enumerate((first, first, second, [*first, 9], third, second)):
        found = generate(engine, str(name), prompt)
        assert found == expected_tokens(prompt, 3, params=GREEDY), f"{prompt}: {found}"


def an_aborted_step_keeps_its_blocks() -> None:
    """The step in flight still writes to the blocks of the request that was aborted during it."""
    engine = new_engine(runs_ahead=True, capacity=4)
    params = SamplingParams(max_tokens=3, temperature=0.0)
    engine.add(Request("aborted", 0, (3,) * 8, params))
    engine.step()
    engine.abort("aborted/0")
    assert engine.pool.num_available < 4, "blocks are free while a step writes to them"
    assert generate(engine, "next", (4,) * 9) == expected_tokens((4,) * 9, 3)


def a_chain_with_a_hole_ends_at_it() -> None:
    pool = BlockPool(8, Generations(8))
    cache = PrefixCache(pool)
    hashes = prompt_hashes(3 * BLOCK_SIZE)
    first, third = pool.allocate(2) or []
    cache.store([hashes[0]], [first])
    cache.store([hashes[2]], [third])
    assert cache.match(hashes) == [first], "a block is used without those before it"
