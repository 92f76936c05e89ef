"""A linked source and puller under all faults that Hypothesis generates, over real bytes.

The invariants of each step are asserted in fakes/handoff/handoff_world.py: blocks released and
reservations dropped exactly once, never during a copy; each intent ends once; no wrong byte is ever
attached.
"""

from __future__ import annotations

import copy

import pytest
from effort import examples
from fakes.handoff.handoff_world import (
    BLOCK_BYTES,
    LEASE_S,
    MAX_PROMPT_BLOCKS,
    NUM_POOL_BLOCKS,
    World,
    withdrawn,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

SMALL = st.integers(0, 3)
RARELY = st.sampled_from([False] * 9 + [True])


class Handoff(RuleBasedStateMachine):
    """Each rule is one action of the outside world."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.world.run()  # the pair is ready

    # ---- requests

    @rule(
        num_blocks=st.integers(1, MAX_PROMPT_BLOCKS),
        first=st.sampled_from(["source", "puller"]),
        is_complete=st.sampled_from([True, True, True, False]),
    )
    def dispatch(self, num_blocks: int, first: str, is_complete: bool) -> None:
        """Either side may receive a request first; `complete_dispatch` may send it to the other."""
        prompt = self.world.new_prompt(num_blocks)
        if first == "source" or is_complete:
            self.world.source.offer(prompt)
        if first == "puller" or is_complete:
            self.world.puller.intend(prompt)
        self.world.carry()

    @rule(
        num_blocks=st.integers(2, MAX_PROMPT_BLOCKS),
        is_full=st.sampled_from([False, False, True]),
        num_bytes=st.integers(0, 2 * BLOCK_BYTES),
    )
    def copy_begins(self, num_blocks: int, is_full: bool, num_bytes: int) -> None:
        """A shortcut to the interesting states: a copy in flight, or a queue for memory."""
        world = self.world
        world.exchange()
        prompt = world.new_prompt(num_blocks)
        if not world.source.offer(prompt):
            return
        world.puller.intend(prompt)
        world.exchange()
        world.source.compute(prompt, num_blocks - 1)
        world.exchange()
        world.puller.answer_reserve(0, is_full=is_full)
        pull = world.puller.pulls.get((prompt.transfer_id, 0))
        for _ in range(num_bytes):
            if pull is not None and pull.is_in_flight:
                pull.advance(1)
        world.carry()

    @precondition(lambda self: self.world.prompts)
    @rule(data=st.data())
    def complete_dispatch(self, data: st.DataObject) -> None:
        prompt = data.draw(st.sampled_from(self.world.prompts))
        source, puller = self.world.source, self.world.puller
        if prompt.key not in source.held and prompt.key not in source.ends:
            source.offer(prompt)
        if prompt.transfer_id not in puller.prompts:
            puller.intend(prompt)
        self.world.carry()

    @precondition(lambda self: self.world.source.num_computed)
    @rule(data=st.data(), num_blocks=st.integers(1, MAX_PROMPT_BLOCKS), is_doubled=RARELY)
    def compute(self, data: st.DataObject, num_blocks: int, is_doubled: bool) -> None:
        computing = [
            p for p in self.world.prompts if p.transfer_id in self.world.source.num_computed
        ]
        self.world.source.compute(data.draw(st.sampled_from(computing)), num_blocks)
        self.world.carry()
        if is_doubled:
            self.world.double(self.world.puller, len(self.world.puller.inbox) - 1)

    @precondition(lambda self: self.world.prompts)
    @rule(data=st.data(), is_at_puller=st.booleans(), happens=RARELY)
    def cancel(self, data: st.DataObject, is_at_puller: bool, happens: bool) -> None:
        if not happens:
            return
        prompt = data.draw(st.sampled_from(self.world.prompts))
        if is_at_puller:
            self.world.puller.cancel(prompt)
        else:
            self.world.source.feed(withdrawn(prompt))
        self.world.carry()

    # ---- the network

    @rule()
    def exchange(self) -> None:
        self.world.exchange()

    @rule(is_source=st.booleans())
    def deliver(self, is_source: bool) -> None:
        self.world.deliver(self.world.source if is_source else self.world.puller)

    @rule(is_source=st.booleans(), index=SMALL, happens=RARELY)
    def deliver_out_of_order(self, is_source: bool, index: int, happens: bool) -> None:
        if happens:
            self.world.deliver(self.world.source if is_source else self.world.puller, index)

    @rule(is_source=st.booleans(), index=SMALL)
    def double(self, is_source: bool, index: int) -> None:
        self.world.double(self.world.source if is_source else self.world.puller, index)

    @rule(num_kept=SMALL, is_short=st.booleans(), happens=RARELY)
    def unlink(self, num_kept: int, is_short: bool, happens: bool) -> None:
        if happens:
            self.world.unlink(num_kept)
            if is_short:
                self.world.link()

    @rule(happens=RARELY)
    def replace_link(self, happens: bool) -> None:
        if happens:
            self.world.replace_link()

    @precondition(lambda self: not self.world.is_linked)
    @rule()
    def link(self) -> None:
        self.world.link()

    @rule(is_good=st.sampled_from([True, True, True, False]))
    def answer_opening(self, is_good: bool) -> None:
        self.world.puller.answer_opening(is_good=is_good)
        self.world.carry()

    # ---- memory

    @rule(num_cached_blocks=SMALL, is_full=RARELY)
    def answer_reserve(self, num_cached_blocks: int, is_full: bool) -> None:
        self.world.puller.answer_reserve(num_cached_blocks, is_full=is_full)
        self.world.carry()

    @precondition(lambda self: self.world.puller.pulls)
    @rule(data=st.data(), num_bytes=st.sampled_from([1, 4, 8, 100]))
    def copy(self, data: st.DataObject, num_bytes: int) -> None:
        pull = data.draw(st.sampled_from(sorted(self.world.puller.pulls)))
        self.world.puller.pulls[pull].advance(num_bytes)

    @rule(block_id=st.integers(0, NUM_POOL_BLOCKS - 1))
    def rewrite(self, block_id: int) -> None:
        if block_id in self.world.source.free:
            self.world.source.rewrite(block_id)

    @precondition(lambda self: self.world.source.held)
    @rule(data=st.data(), happens=RARELY)
    def rewrite_what_is_held(self, data: st.DataObject, happens: bool) -> None:
        """A broken engine overwrites held blocks: even then no wrong byte may be attached."""
        if happens:
            owner = data.draw(st.sampled_from(sorted(self.world.source.held)))
            self.world.source.rewrite(self.world.source.held[owner][0])

    @precondition(lambda self: self.world.puller.pulls)
    @rule(data=st.data(), fault=st.sampled_from(["cancel", "rewrite", "unlink", "kill", "jump"]))
    def fault_under_a_copy(self, data: st.DataObject, fault: str) -> None:
        world = self.world
        transfer_id, _ = data.draw(st.sampled_from(sorted(world.puller.pulls)))
        prompt = world.puller.prompts[transfer_id]
        if fault == "cancel":
            world.puller.cancel(prompt)
        elif fault == "rewrite":
            for block_id in world.source.held.get(prompt.key, []):
                world.source.rewrite(block_id)
        elif fault == "unlink":
            world.unlink(data.draw(SMALL))
        elif fault == "kill":
            world.restart_source()
        else:
            world.tick(LEASE_S)
        world.carry()

    # ---- time and failures

    @rule(seconds=st.sampled_from([0.1, 0.5, LEASE_S / 3]))
    def wait(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(seconds=st.sampled_from([LEASE_S, 31.0, 61.0]), happens=RARELY)
    def jump(self, seconds: float, happens: bool) -> None:
        if happens:
            self.world.tick(seconds)

    @rule(is_source=st.booleans(), happens=RARELY)
    def kill(self, is_source: bool, happens: bool) -> None:
        if happens and is_source:
            self.world.restart_source()
        elif happens:
            self.world.restart_puller()

    @rule(happens=RARELY)
    def run(self, happens: bool) -> None:
        if happens:
            self.world.run()

    def teardown(self) -> None:
        self.world.settle()


_quick = examples(120, 500, stateful_step_count=40, suppress_health_check=list(HealthCheck))
TestHandoff = Handoff.TestCase
TestHandoff.settings = _quick


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestHandoffLong(Handoff.TestCase):
    settings = settings(_quick, max_examples=5_000, stateful_step_count=80)


def finished(world: World) -> list[str]:
    return list(world.puller.ends.values())


@pytest.mark.parametrize("num_cached_blocks", [0, 2, 3])
def test_without_faults_everything_completes(num_cached_blocks: int) -> None:
    world = World()
    for _ in range(10):
        prompt = world.new_prompt(4)
        world.source.offer(prompt)
        world.puller.intend(prompt)
        world.carry()
        for _ in range(4):
            world.run(num_cached_blocks=num_cached_blocks)
            world.source.compute(prompt, 1)
            world.carry()
        world.run(num_cached_blocks=num_cached_blocks)
    assert finished(world) == ["complete"] * 10
    assert set(world.source.ends.values()) == {None}
    world.settle()


def test_a_rewrite_at_every_byte_of_a_copy_is_never_attached() -> None:
    ends = set()
    for num_bytes in range(17):
        for block in range(2):
            world = World()
            prompt = world.new_prompt(2)
            world.source.offer(prompt)
            world.puller.intend(prompt)
            world.carry()
            world.run()
            world.source.compute(prompt, 2)
            world.carry()
            world.deliver(world.puller)
            world.puller.answer_reserve(0)
            pull = world.puller.pulls[prompt.transfer_id, 0]
            for _ in range(num_bytes):
                if world.puller.pulls:
                    pull.advance(1)
            world.source.rewrite(world.source.held[prompt.key][block])
            world.run()
            ends.add((num_bytes, block, *finished(world)))
            world.settle()
    assert all(end == "stale_blocks" for num_bytes, block, end in ends if num_bytes < 8 * block + 8)
    assert {end for _, _, end in ends} == {"stale_blocks", "complete"}


@pytest.mark.parametrize("victim", ["source", "puller"])
@pytest.mark.parametrize("num_steps", range(12))
def test_a_kill_at_every_step_leaves_nothing(victim: str, num_steps: int) -> None:
    world = World()
    world.run()
    prompt = world.new_prompt(3)
    steps = [
        lambda: world.puller.intend(prompt),
        lambda: world.source.offer(prompt),
        lambda: world.deliver(world.source),
        lambda: world.source.compute(prompt, 1),
        lambda: world.deliver(world.puller),
        lambda: world.puller.answer_reserve(0),
        lambda: world.puller.pulls[prompt.transfer_id, 0].advance(4),
        lambda: world.source.compute(prompt, 2),
        lambda: world.deliver(world.puller),
        lambda: world.puller.pulls[prompt.transfer_id, 0].finish(),
        lambda: world.deliver(world.puller),
        lambda: world.puller.pulls[prompt.transfer_id, 1].finish(),
    ]
    for step in steps[:num_steps]:
        step()
        world.carry()
    is_all_announced = num_steps >= 9
    if victim == "source":
        world.restart_source()
        expected = "complete" if is_all_announced else "node_lost"
        world.link()
        world.run()
        if num_steps:
            assert finished(world) == [expected]
    else:
        world.restart_puller()
        world.link()
        world.run()
        assert not world.source.held
    world.settle()


def test_a_copied_world_goes_its_own_way() -> None:
    world = World()
    world.run()
    prompt = world.new_prompt(2)
    world.source.offer(prompt)
    world.puller.intend(prompt)
    world.carry()
    world.run()
    world.source.compute(prompt, 1)
    world.carry()
    world.deliver(world.puller)
    world.puller.answer_reserve(0)
    other = copy.deepcopy(world)
    other.source.compute(prompt, 1)
    other.carry()
    other.run()
    assert finished(other) == ["complete"]
    assert finished(world) == []
    world.settle()
    other.settle()
