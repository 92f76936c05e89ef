"""An engine over a fake runner with host memory behind its pool, and a disk behind that, driven by
a test; its tokens are compared with an oracle's. Copies are torn (host_copier.py), so the use of an
overwritten block would show.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engines.integrity import check_integrity

from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.core.request.token_ids import BlockHash, Tier, block_hashes, root_hash
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.kv.block_pool import NUM_RESERVED_BLOCKS
from baton.engine.kv.disk.disk_file import slot_bytes_of
from baton.engine.kv.generations import Generations
from baton.engine.kv.host_tier import BlockLoad
from baton.engine.kv.limits import EngineLimits
from baton.engine.scheduling.admission import OutputLengthEstimator
from baton.engine.speculation.draft_model import DraftModelProposer

from ..clock import TickingClock
from ..runner import FakeRunner, expected_tokens
from ..speculation.drafting_runner import DraftingRunner
from .disk import Fault, MemoryFile, PlayedDisk
from .host_copier import FakeCopier

BLOCK_SIZE = 4
VOCAB_SIZE = 50


class Optimist(OutputLengthEstimator):
    """Expects no growth: memory runs out, and requests are preempted."""

    def estimate(self, num_generated: int, max_tokens: int) -> int:
        return 1


class Observer:
    """Checks the events for an index: each is consistent with the ones before."""

    def __init__(self) -> None:
        self.tiers: dict[BlockHash, Tier] = {}

    def moved(self, block_hashes: list[BlockHash], was: Tier, now: Tier) -> None:
        assert was is not now
        for block_hash in block_hashes:
            assert self.tiers.pop(block_hash, Tier.NOWHERE) is was
            if now is not Tier.NOWHERE:
                self.tiers[block_hash] = now


@dataclass
class Rig:
    """An engine of `capacity` blocks over a fake runner, with `num_host` blocks of host memory and
    `num_disk` disk slots, whose thread does 0 to 3 jobs between two polls. A draft model, if any,
    drafts for half of the requests."""

    capacity: int = 12
    num_host: int = 40
    num_disk: int = 0
    draw_fault: Callable[[], Fault] = lambda: Fault.NONE
    runs_ahead: bool = False
    has_draft_model: bool = False
    budget: int = 64
    num_looks: range = range(3)
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        num_blocks = self.capacity + NUM_RESERVED_BLOCKS
        kind = {"vocab_size": VOCAB_SIZE, "runs_ahead": self.runs_ahead, "num_looks": 1}
        proposer = None
        if self.has_draft_model:
            runner: FakeRunner = DraftingRunner(num_blocks, BLOCK_SIZE, rate=0.8, **kind)
            proposer = DraftModelProposer(runner, 4)  # type: ignore[arg-type]
        else:
            runner = FakeRunner(num_blocks, BLOCK_SIZE, **kind)  # type: ignore[arg-type]
        self.copier = FakeCopier(runner, self.num_host, lambda: self.rng.choice(self.num_looks))
        self.observer = Observer()
        self.disk: PlayedDisk | None = None
        if self.num_disk:
            size = self.copier.block_bytes
            self.file = MemoryFile(self.num_disk * slot_bytes_of(size), self.draw_fault)
            view = self.copier.memory.view
            self.disk = PlayedDisk(self.file, self.num_disk, size, view, self.draw_jobs)
        self.engine = Engine(
            EngineParts(
                runner,
                EngineLimits(num_blocks, BLOCK_SIZE, 200, max_num_batched_tokens=self.budget),
                Generations(num_blocks),
                fingerprint="f",
                eos_token_ids=(),
                estimator=Optimist(),
                clock=TickingClock(),
                cache_observer=self.observer,
                host_copier=self.copier,
                disk=self.disk,
                proposer=proposer,
            )
        )
        self.num_shared = 0  # blocks that were already being loaded for others
        self.watch_loads()
        self.tokens: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.cached: dict[str, int] = {}

    def draw_jobs(self) -> int:
        return self.rng.randrange(4)

    def watch_loads(self) -> None:
        assert self.engine._host is not None
        load = self.engine._host.load

        def watched(*args: Any) -> BlockLoad:
            started = load(*args)
            self.num_shared += started.num_shared
            return started

        self.engine._host.load = watched  # type: ignore[method-assign]

    def hashes(self, prompt: list[int]) -> list[BlockHash]:
        return block_hashes(root_hash("f"), prompt, BLOCK_SIZE)

    def add(self, prompt: list[int], max_tokens: int = 1, *, hold: bool = False) -> str:
        is_drafted = self.has_draft_model and self.rng.random() < 0.5
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=max_tokens, speculative=is_drafted
        )
        request = Request(f"r{len(self.requests)}", 0, tuple(prompt), params)
        self.engine.add(request, hold=hold)
        self.requests[request.key], self.tokens[request.key] = request, []
        return request.key

    def step(self) -> None:
        output = self.engine.step()
        assert not output.failed
        self.cached.update(output.started)
        for token in output.tokens:
            self.tokens[token.key].append(token.token_id)

    def run(self) -> None:
        for _ in range(3000):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("no end")

    def serve(self, prompt: list[int], max_tokens: int = 1) -> int:
        """Serve and check its tokens; returns how many were cached."""
        key = self.add(prompt, max_tokens)
        self.run()
        self.check(key)
        self.settle()
        return self.cached[key]

    def check(self, key: str) -> None:
        request = self.requests[key]
        expected = expected_tokens(
            request.prompt_token_ids, request.sampling.max_tokens, vocab_size=VOCAB_SIZE
        )
        found = self.tokens[key]
        assert found == expected[: len(found)]

    def settle(self) -> None:
        """Let all copies end: an engine polls them when it has a step to launch."""
        for _ in range(60):
            self.engine.poll_host()

    @property
    def totals(self) -> Counter[str]:
        totals = self.engine.stats.totals()
        return Counter(
            swaps=totals.num_swaps,
            host_hits=totals.host_hit_tokens,
            preemptions=totals.num_preemptions,
            lost=totals.host.num_lost_blocks,
            shared=self.num_shared,
            disk_hits=totals.disk.num_hit_blocks,
            disk_failures=totals.disk.num_failures,
            accepted=sum(totals.speculation.accepted),
        )


PROMPT = [1, 2, 3, 4] * 5  # five blocks


def fill(rig: Rig) -> None:
    """Evict everything that the device has cached."""
    rig.serve([9] * (4 * rig.capacity - 1))


def play(
    seed: int,
    *,
    num_disk: int = 0,
    faults: Sequence[Fault] = (Fault.NONE,),
    has_draft_model: bool = False,
) -> Counter[str]:
    """One random schedule: chats that share prefixes, aborts, holds; ends with an idle engine. With
    a draft model chats continue after their outputs."""
    rng = random.Random(seed)
    rig = Rig(
        capacity=rng.randrange(11, 20),
        num_host=rng.choice([8, 12] if num_disk else [0, 3, 8, 40]),
        num_disk=num_disk,
        draw_fault=lambda: rng.choice(faults),
        runs_ahead=rng.random() < 0.5,
        has_draft_model=has_draft_model,
        budget=rng.choice([4, 16, 64]),
        num_looks=range(rng.choice([1, 3, 12])),
        rng=rng,
    )
    chats = [[rng.randrange(3) for _ in range(rng.randrange(1, 24))] for _ in range(4)]
    held: list[str] = []
    for _ in range(rng.randrange(20, 60) if num_disk else rng.randrange(4, 30)):
        match rng.randrange(6):
            case 0 | 1:
                chat = rng.choice(chats)
                if len(chat) > 26:
                    del chat[rng.randrange(1, 20) :]
                is_held = rng.random() < 0.2
                key = rig.add([*chat], rng.randrange(1, 12), hold=is_held)
                held += [key] * is_held
                if rng.random() < 0.3:
                    rig.add([*chat, rng.randrange(3)], rng.randrange(1, 12))
                if has_draft_model:
                    chat += expected_tokens(chat, rng.randrange(9), vocab_size=VOCAB_SIZE)
                chat += [rng.randrange(3) for _ in range(rng.randrange(6))]
            case 2:
                if rig.requests:
                    rig.engine.abort(rng.choice([*rig.requests]))
            case _:
                for _ in range(rng.randrange(1, 8)):
                    if rig.engine.has_work:
                        rig.step()
        check_integrity(rig.engine)
    for _ in range(4000):
        if rig.engine.has_work:
            rig.step()
        elif held:
            rig.engine.abort(held.pop())
        else:
            break
    for key in rig.requests:
        rig.check(key)
    rig.settle()
    host = rig.engine._host
    assert host is not None and not host.num_writing
    assert host._blocks.num_free + len(host._blocks) == host._blocks.num_blocks
    check_integrity(rig.engine)
    assert rig.engine.pool.counts.held == 0 and not rig.engine.pool.open_fences
    assert rig.engine.stats.ledger()["requests"] == {}
    check_observer(rig)
    return rig.totals


def check_observer(rig: Rig) -> None:
    """The index has the blocks on the device, and those in host memory only."""
    assert rig.engine._host is not None
    cache, blocks = rig.engine._tables._cache, rig.engine._host._blocks
    expected = dict.fromkeys(blocks._block_of, Tier.HOST)
    assert rig.observer.tiers == expected | dict.fromkeys(cache._block_of, Tier.DEVICE)
