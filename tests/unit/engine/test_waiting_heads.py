"""The first waiting request is served first, whatever else arrives: hand-offs of other engines,
held KV, or requests in front of it that fail.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from engines.integrity import check_integrity
from fakes.clock import TickingClock
from fakes.runner import FakeRunner

from baton.core.errors import PromptTooLarge
from baton.core.request.request import Adapter, Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.kv.block_pool import NUM_RESERVED_BLOCKS
from baton.engine.kv.generations import Generations
from baton.engine.kv.limits import EngineLimits
from baton.engine.lora.adapter_files import HostAdapter
from baton.engine.lora.adapter_room import AdapterRoom

BLOCK_SIZE, VOCAB_SIZE = 4, 50


class Copies:
    """Adapter copies that do nothing."""

    def keep(self, adapter: HostAdapter) -> None: ...

    def forget(self, adapter: HostAdapter) -> None: ...

    def drop(self, digest: str) -> None: ...

    def load(self, slot: int, digest: str) -> None: ...


def engine_of(capacity: int, *, runs_ahead: bool = False, **limits: int) -> Engine:
    """An engine with one adapter slot, for adapters `a` and `b`."""
    num_blocks = capacity + NUM_RESERVED_BLOCKS
    room: AdapterRoom[object] = AdapterRoom(Copies(), 1, 4)  # type: ignore[type-var]
    for digest in "ab":
        room.keep(HostAdapter(digest, torch.zeros(1, 1)))
    return Engine(
        EngineParts(
            FakeRunner(num_blocks, BLOCK_SIZE, vocab_size=VOCAB_SIZE, runs_ahead=runs_ahead),
            EngineLimits(num_blocks, BLOCK_SIZE, 200, **{"max_num_batched_tokens": 16} | limits),
            Generations(num_blocks),
            fingerprint="fake",
            eos_token_ids={7},
            clock=TickingClock(),
            adapters=room,
        )
    )


def request(
    name: str, num_tokens: int, adapter: str = "", *, first: int = 1, **sampling: object
) -> Request:
    """A request of `num_tokens` tokens, from `first` on."""
    params = SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | sampling))  # type: ignore[arg-type]
    one = Request(name, 0, tuple(first + i % 40 for i in range(num_tokens)), params)
    return dataclasses.replace(one, adapter=Adapter("n", adapter, "/p")) if adapter else one


def take_over(engine: Engine, name: str, adapter: str = "") -> bool:
    """Take over a hand-off whose KV arrives at once; false if no blocks are free."""
    one = request(name, 4, adapter, max_tokens=4)
    engine.reserve(one)
    if (reservation := engine.next_reservation()) is None:
        engine.abort(one.key)
        return False
    source = engine_of(50)
    source.add(one, hold=True)
    tokens = [token for _ in range(3) for token in source.step().tokens]
    known = reservation.num_cached_blocks, reservation.num_known_blocks
    refs = source.block_refs(one.key, *known)
    for theirs, ours in zip(refs.block_ids, reservation.block_ids[slice(*known)], strict=True):
        content = source._runner.read_block(int(theirs))  # type: ignore[attr-defined]
        engine._runner.write_block(ours, content)  # type: ignore[attr-defined]
    engine.start(reservation, tokens[0].token_id)
    return True


def tokens_of(engine: Engine, names: set[str], adapter: str = "") -> set[str]:
    """Those of the requests that output a token within 60 steps, while hand-offs arrive."""
    seen: set[str] = set()
    hand_offs = (f"h{number}" for number in itertools.count())
    for _ in range(60):
        seen |= {token.key for token in engine.step().tokens}
        while engine.stats.load().num_running < 6 and take_over(engine, next(hand_offs), adapter):
            pass
    return {name for name in names if f"{name}/0" in seen}


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_hand_offs_leave_the_first_that_waits_a_slot(runs_ahead: bool) -> None:
    engine = engine_of(200, max_num_seqs=2, runs_ahead=runs_ahead)
    assert take_over(engine, "x") and take_over(engine, "y")
    engine.add(request("local", 3, max_tokens=2))
    assert tokens_of(engine, {"local"}) == {"local"}


def test_hand_offs_do_not_pass_who_waits_for_an_adapter() -> None:
    engine = engine_of(200, max_num_seqs=8)
    assert take_over(engine, "x", "a")
    engine.add(request("other", 3, "b", max_tokens=2))
    engine.add(request("late", 3, "a", max_tokens=2))
    assert tokens_of(engine, {"other", "late"}, "a") == {"other", "late"}


def reserved(engine: Engine) -> list[str]:
    """Keys of the requests that get their blocks at this time."""
    return [reservation.key for reservation in iter(engine.next_reservation, None)]


def test_hand_offs_without_an_adapter_pass_those_that_wait_for_one() -> None:
    engine = engine_of(200, max_num_seqs=8)
    assert take_over(engine, "x", "a")
    for name, adapter in (("two", "b"), ("base", ""), ("three", "a"), ("other base", "")):
        engine.reserve(request(name, 4, adapter, max_tokens=4))
    assert reserved(engine) == ["base/0", "other base/0"], "an adapter's request passes no other's"
    assert engine.adapters is not None and len(engine.adapters.parked) == 2
    load = engine.stats.load()
    assert (load.num_waiting, load.waiting_tokens) == (0, 0), "nothing of theirs is to be computed"
    engine.reserve(request("late base", 4, max_tokens=4))
    while engine.has_work:
        engine.step()
    assert reserved(engine) == ["late base/0", "two/0"]
    engine.abort("two/0")  # a pull may still write to its blocks
    assert reserved(engine) == []
    engine.abort("three/0")
    assert "three/0" not in engine.by_key and "two/0" in engine.by_key
    check_integrity(engine)


def test_a_hand_off_that_has_its_adapter_and_lacks_memory_is_passed_by_nobody() -> None:
    engine = engine_of(8, max_num_seqs=8)
    engine.reserve(request("runs", 12, max_tokens=2))
    assert reserved(engine) == ["runs/0"]
    engine.reserve(request("large", 16, "a", max_tokens=2))
    engine.reserve(request("small", 3, max_tokens=2))
    assert reserved(engine) == []
    engine.abort("large/0")
    assert reserved(engine) == ["small/0"]
    check_integrity(engine)


def test_a_hand_off_with_an_adapter_has_its_turn_where_local_ones_always_wait() -> None:
    engine = engine_of(200, max_num_seqs=8)
    names = (f"local{number}" for number in itertools.count())
    for _ in range(2):
        engine.add(request(next(names), 3, "b", max_tokens=4))
    engine.reserve(request("handed", 4, "a", max_tokens=4))
    for _ in range(30):
        while engine.stats.load().num_waiting < 2:
            engine.add(request(next(names), 3, "b", max_tokens=4))
        engine.step()
        if reserved(engine) == ["handed/0"]:
            return
    raise AssertionError("local requests went before it again and again")


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_one_that_fails_alone_makes_room_for_who_waited_for_its_adapter(runs_ahead: bool) -> None:
    engine = engine_of(4, runs_ahead=runs_ahead)
    engine.add(request("long", 3, "a", max_tokens=100))
    engine.add(request("parked", 3, "b", max_tokens=2))
    failed, seen = [], []
    for _ in range(100):
        if not engine.has_work:
            break
        output = engine.step()
        failed += [type(error) for _, error in output.failed]
        seen += [token.key for token in output.tokens if token.key == "parked/0"]
    assert failed == [PromptTooLarge] and seen == ["parked/0"] * 2


def test_a_prompt_that_waits_for_its_adapter_is_one_that_waits() -> None:
    """A prompt that waits for its adapter counts as waiting at once, until it is aborted."""
    engine = engine_of(100)
    engine.add(request("decode", 3, "a", max_tokens=100))
    engine.step()
    assert not engine.stats.has_prompts and not engine.stats.load().waiting_tokens
    engine.add(request("parked", 5, "b"))
    assert engine.stats.has_prompts and engine.stats.load().waiting_tokens == 5
    engine.abort("parked/0")
    assert not engine.stats.has_prompts and not engine.stats.load().waiting_tokens


def test_prefixes_that_are_fetched_leave_the_first_that_waits_its_room() -> None:
    """A stream of fetched prefixes does not take the blocks that the first waiting request needs.
    Each prefix is dropped once the next one has its blocks."""
    engine = engine_of(12)
    engine.add(request("running", 15, max_tokens=8))
    engine.step()
    engine.add(request("head", 35, first=9, max_tokens=4))
    hashes = [engine.block_hashes(request("fetched", 17, first=first)) for first in (20, 30)]
    seen, before = set[str](), None
    for number in range(30):
        prefix = engine.prefixes.borrow(hashes[number % 2])
        if before is not None:
            engine.prefixes.drop(before)
        before = prefix
        seen |= {token.key for token in engine.step().tokens}
    assert "head/0" in seen


def test_a_search_without_room_beside_held_kv_waits() -> None:
    """A beam search that does not fit beside held KV waits, as it would be preempted in
    every step."""
    engine = engine_of(14, max_num_batched_tokens=64)
    engine.add(request("held", 31, first=9, max_tokens=4), hold=True)
    for _ in range(3):
        engine.step()
    engine.add(request("beams", 15, max_tokens=12, use_beam_search=True, best_of=4))
    for _ in range(20):
        engine.step()
    assert engine.stats.totals().num_preemptions == 0
    engine.abort("held/0")
    found = [beam for _ in range(60) if engine.has_work for beam in engine.step().beams]
    assert found and not engine.has_work


def test_a_search_that_waits_counts_with_all_its_beams() -> None:
    engine = engine_of(200)
    engine.add(request("beams", 5, max_tokens=12, use_beam_search=True, best_of=8))
    shape = engine._scheduler.promise.step_with(request("probe", 3), 0)
    assert shape.num_decodes == 9
