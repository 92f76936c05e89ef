"""Which adapter has which slot, which requests wait, and which adapters leave host memory; copies
are recorded, not executed.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
import torch
from engines.integrity import check_integrity
from fakes.runner import FakeRunner

from baton.core.errors import InvalidRequest, Overloaded, Unavailable
from baton.core.request.request import Adapter, Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.kv.generations import Generations
from baton.engine.kv.limits import EngineLimits
from baton.engine.lora.adapter_files import HostAdapter
from baton.engine.lora.adapter_room import AdapterRoom
from baton.engine.scheduling.sequence import Sequence


@dataclass(eq=False)
class User:
    request: Request
    adapter_slot: int | None = None


@dataclass
class Copies:
    """`lora.adapter_room.Adapters` that records the contents of host memory and the slots."""

    host: set[str] = field(default_factory=set)
    slots: dict[int, str] = field(default_factory=dict)
    forgotten: list[str] = field(default_factory=list)
    num_loads: int = 0

    def keep(self, adapter: HostAdapter) -> None:
        self.host.add(adapter.digest)

    def forget(self, adapter: HostAdapter) -> None:
        self.forgotten.append(adapter.digest)

    def drop(self, digest: str) -> None:
        self.host.remove(digest)

    def load(self, slot: int, digest: str) -> None:
        assert digest in self.host, "a copy from where nothing is"
        self.slots[slot] = digest
        self.num_loads += 1


def user(digest: str, number: int = 0) -> User:
    adapter = Adapter(f"name-{digest}", digest, "/path")
    return User(Request(f"{number:032x}", 0, [1], SamplingParams(), adapter=adapter))


def host(digest: str) -> HostAdapter:
    return HostAdapter(digest, torch.zeros(1, 1))


def room_with(
    *digests: str, max_loras: int = 1, max_host: int = 4
) -> tuple[Copies, AdapterRoom[User]]:
    copies = Copies()
    room = AdapterRoom[User](copies, max_loras, max_host)
    for digest in digests:
        room.keep(host(digest))
    return copies, room


def test_one_slot_is_shared_by_users_of_one_adapter() -> None:
    copies, room = room_with("a", "b")
    first, second, other = user("a"), user("a"), user("b")
    assert room.enter(first) and room.enter(second) and not room.enter(other)
    assert (first.adapter_slot, other.adapter_slot, copies.num_loads) == (0, None, 1)
    assert (room.running_names, room.waiting_names) == (["name-a"], ["name-b"])
    assert not room.leave(first) and not room.unpark(), "the second still has it"
    assert not room.leave(second) and room.unpark() == [other]
    assert copies.slots == {0: "b"}


def test_nobody_passes_who_is_parked() -> None:
    _, room = room_with("a", "b")
    runs, waits, late = user("a"), user("b"), user("a")
    assert room.enter(runs) and not room.enter(waits)
    assert not room.enter(late), "its adapter has a slot, but another waits for that"
    assert [*room.parked] == [waits, late]
    room.leave(runs)
    assert room.unpark() == [waits], "the third one's adapter has lost its slot"
    room.leave(waits)
    assert room.unpark() == [late]


def test_who_is_parked_may_leave() -> None:
    _, room = room_with("a", "b")
    runs, waits = user("a"), user("b")
    room.enter(runs), room.enter(waits)
    assert room.leave(waits) and not room.parked
    assert not room.leave(user("b")), "who never came was not parked"


def test_the_slot_used_longest_ago_is_given_up() -> None:
    copies, room = room_with("a", "b", "c", max_loras=2)
    for digest in "ab":
        one = user(digest)
        room.enter(one), room.leave(one)
    assert copies.slots == {0: "a", 1: "b"}
    again = user("a")
    room.enter(again), room.leave(again)
    assert copies.num_loads == 2, "it was still there"
    room.enter(user("c"))
    assert copies.slots == {0: "a", 1: "c"}


def test_host_memory_gives_up_what_was_used_longest_ago_and_is_in_no_use() -> None:
    copies, room = room_with("a", "b", "c", max_host=3)
    runs, parked = user("a"), user("b")
    room.enter(runs), room.enter(parked)
    room.keep(host("d"))
    assert copies.host == {"a", "b", "d"}, "a slot has `a`, and `b` is waited for"
    second = user("d")
    room.enter(second)
    with pytest.raises(Overloaded, match="--max-cpu-loras"):
        room.keep(host("e"))
    assert not room.has_room_for("e") and room.has_room_for("d")
    assert copies.forgotten == ["e"], "nobody will ask for what was read"
    room.keep(host("d"))  # it is in host memory already
    room.leave(second)
    room.keep(host("e"))
    assert copies.host == {"a", "b", "e"} and not room.has("d")
    assert sorted(room.digests) == ["a", "b", "e"]
    with pytest.raises(Unavailable, match="name-d"):
        room.check(Adapter("name-d", "d", "/path"))


def test_who_is_next_has_room_in_host_memory_whatever_others_wait_for() -> None:
    copies, room = room_with("a", "b", max_host=2)
    wanted: list[str] = []
    room.fetch = lambda adapter: wanted.append(adapter.digest)
    runs, first, second, third = user("a"), user("c"), user("b"), user("a", 1)
    room.enter(runs)
    assert not any(room.enter(one) for one in (first, second, third)) and not wanted
    with pytest.raises(Overloaded):
        room.keep(host("d"))
    room.leave(runs)
    for one, digest in ((first, "c"), (second, "b"), (third, "a")):
        assert not room.unpark() and wanted[-1] == digest, "a slot is free, and its adapter comes"
        room.keep(host(digest))
        assert room.unpark() == [one] and copies.slots == {0: digest}
        room.leave(one)
    assert not room.parked and len(copies.host) == 2


def test_one_that_cannot_be_fetched_is_refused_to_who_waits_or_asks_next() -> None:
    _, room = room_with("a", max_host=1)
    wanted: list[str] = []
    room.fetch = lambda adapter: wanted.append(adapter.digest)
    waits, asks = user("b"), user("c")
    assert not room.enter(waits) and wanted == ["b"]
    assert waits.request.adapter is not None and asks.request.adapter is not None
    assert room.refuse(waits.request.adapter) == [waits]
    room.leave(waits)
    assert not room.enter(asks) and wanted == ["b", "c"]
    room.leave(asks)
    assert not room.refuse(asks.request.adapter), "the next one is told why, once"
    with pytest.raises(Unavailable, match="name-c"):
        room.check(asks.request.adapter)
    room.check(asks.request.adapter)


def test_a_slot_needs_no_copy_of_what_it_has() -> None:
    copies, room = room_with("a", max_host=1)
    room.fetch = lambda adapter: pytest.fail("it is in its slot")
    first, second = user("a"), user("a", 1)
    room.enter(first), room.leave(first)
    room.keep(host("b"))
    assert copies.host == {"b"} and room.enter(second) and copies.num_loads == 1


@pytest.mark.parametrize("seed", range(20))
def test_random_users(seed: int) -> None:
    """With random users, a slot has one adapter, that of its users, and all users are served."""
    draw, max_loras = random.Random(seed), 1 + seed % 3
    digests = "abcdef"
    copies, room = room_with(*digests, max_loras=max_loras, max_host=len(digests))
    running: list[User] = []
    num_served, num_entered = 0, 300
    for number in range(num_entered):
        one = user(draw.choice(digests), number)
        if room.enter(one):
            running.append(one)
        for _ in range(draw.choice((0, 1, 1, 2))):
            if running:
                room.leave(running.pop(draw.randrange(len(running))))
                num_served += 1
                running += room.unpark()
        used = {one.adapter_slot: one.request.adapter_digest for one in running}
        assert all(
            copies.slots[slot] == digest for slot, digest in used.items() if slot is not None
        )
        by_slot = Counter((one.adapter_slot, one.request.adapter_digest) for one in running)
        assert len(by_slot) == len(used) <= max_loras
    while running:
        room.leave(running.pop())
        num_served += 1
        running += room.unpark()
    assert num_served == num_entered and not room.parked


def engine_with(room: AdapterRoom[Sequence], *digests: str) -> Engine:
    """An engine with these adapters in host memory."""
    for digest in digests:
        room.keep(host(digest))
    return Engine(
        EngineParts(
            FakeRunner(32, 4),
            EngineLimits(32, 4, max_model_len=64),
            Generations(32),
            fingerprint="fake",
            eos_token_ids=(),
            adapters=room,
        )
    )


def test_what_is_held_needs_no_slot() -> None:
    """A held request occupies no adapter slot: its puller may come late or never, and requests with
    other adapters are computed meanwhile."""
    copies = Copies()
    room = AdapterRoom[Sequence](copies, 1, 4)
    engine = engine_with(room, "a", "b")
    held, other = user("a", 1).request, user("b", 2).request
    engine.add(held, hold=True)
    engine.add(other)
    tokens: list[str] = []
    while engine.has_work:
        tokens += [token.key for token in engine.step().tokens]
    assert tokens == [held.key, *[other.key] * 16] and copies.slots == {0: "b"}
    assert engine.block_refs(held.key, 0, 1).block_ids, "it keeps its KV"
    engine.abort(held.key)
    check_integrity(engine)
    assert not room.running_names and engine.pool.counts.held == 0


def test_a_beam_search_has_no_adapter() -> None:
    engine = engine_with(AdapterRoom[Sequence](Copies(), 1, 4), "a")
    beams = SamplingParams(temperature=0.0, use_beam_search=True, best_of=2)
    with pytest.raises(InvalidRequest, match="beam search with a LoRA adapter"):
        engine.add(replace(user("a", 1).request, sampling=beams))
    with pytest.raises(Unavailable):
        engine.add(replace(user("b", 2).request, sampling=beams))
    assert not engine.has_work


@pytest.mark.parametrize("hold", [False, True])
def test_what_waits_for_a_slot_is_among_the_decodes_that_a_promise_counts(*, hold: bool) -> None:
    """A request waiting for a slot counts as a decode, unless it will decode elsewhere."""
    room = AdapterRoom[Sequence](Copies(), 1, 4)
    engine = engine_with(room, "a", "b")
    engine.add(user("a", 1).request)
    engine.add(user("b", 2).request, hold=hold)
    assert len(room.parked) == 1
    probe = Request("c", 0, (1, 2, 3), SamplingParams())
    assert engine.promise.step_with(probe, 0).num_decodes == (2 if hold else 3)
    engine.abort(f"{1:032x}/0")
    assert not room.parked
    assert engine.promise.step_with(probe, 0).num_decodes == (1 if hold else 2), "counted once"
