"""The engine with host memory behind its block pool: whatever is evicted, loaded or lost on the
way, the tokens are the oracle's. Copies are torn (fakes/tiers/host_copier.py), so the use of an
overwritten block would show.
"""

from __future__ import annotations

from collections import Counter

import pytest
from effort import number
from engines.integrity import check_integrity
from fakes.gateway.step_costs import linear_cost
from fakes.tiers.tiered_engine import PROMPT, Rig, fill, play

from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.kv import host_tier
from baton.engine.kv.host_copies import CopyCost, Direction


@pytest.fixture(autouse=True)
def copying_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy is estimated to pay, whatever its measured cost."""
    monkeypatch.setattr(CopyCost, "pays", lambda self, num_bytes, *others: num_bytes > 0)


def test_what_was_evicted_comes_back() -> None:
    rig = Rig()
    assert rig.serve(PROMPT, 3) == 0
    fill(rig)
    assert rig.serve([*PROMPT, 7, 8], 3) == 20
    assert rig.totals["host_hits"] == 20
    rig.settle()
    check_integrity(rig.engine)
    assert not rig.engine.pool.open_fences


def test_the_last_token_is_always_computed() -> None:
    rig = Rig()
    rig.serve(PROMPT)
    fill(rig)
    assert rig.serve(PROMPT) == 16


def test_behind_cached_blocks_host_memory_goes_on() -> None:
    rig = Rig()
    rig.serve([*PROMPT, 5, 5, 5, 5])
    rig.serve([8] * 36)  # nine of twelve blocks: the chain's end is evicted, its beginning stays
    key = rig.add([*PROMPT, 5, 5, 5, 5, 6])
    rig.run()
    rig.check(key)
    assert rig.cached[key] == 24 and 0 < rig.totals["host_hits"] < 24


def test_a_second_use_goes_to_host_memory_while_both_run() -> None:
    rig = Rig(capacity=30)
    first = rig.add(PROMPT, 40)
    rig.step()
    rig.add([*PROMPT, 3], 40)
    rig.step()
    rig.step()
    assert rig.copier.num_copied[Direction.OUT] == 5
    rig.run()
    rig.check(first)


def test_others_go_on_while_blocks_come() -> None:
    rig = Rig(capacity=20, num_looks=range(2, 3))
    rig.serve(PROMPT)
    rig.serve([9] * 72)
    rig.num_looks = range(50, 51)
    slow = rig.add([*PROMPT, 7])
    rig.step()
    assert rig.engine.stats.load().num_running == 0 and rig.engine.stats.has_prompts
    quick = rig.add([5, 6, 7], 2)
    for _ in range(4):
        rig.step()
    assert len(rig.tokens[quick]) == 2 and not rig.tokens[slow]
    assert rig.engine.stats.load().waiting_tokens == 1  # the rest is being copied
    rig.run()
    rig.check(slow)
    assert rig.cached[slow] == 20


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_an_aborted_loads_blocks_are_free_when_its_copy_has_ended(runs_ahead: bool) -> None:
    rig = Rig(runs_ahead=runs_ahead)
    rig.serve(PROMPT)
    fill(rig)
    rig.num_looks = range(20, 21)
    key = rig.add([*PROMPT, 7])
    rig.step()
    rig.step()
    rig.engine.abort(key)
    check_integrity(rig.engine)
    assert rig.engine.pool.counts.held == 5 and rig.engine.has_work  # fenced
    known = dict(rig.observer.tiers)
    rig.run()
    assert rig.engine.pool.counts.held == 0 and rig.observer.tiers == known
    assert rig.serve([*PROMPT, 7]) == 20


def loading_rig(capacity: int = 30) -> Rig:
    """A rig with PROMPT and one block behind it in host memory alone; copies take 20 polls."""
    rig = Rig(capacity=capacity)
    rig.serve([*PROMPT, 5, 5, 5, 5])
    fill(rig)
    rig.num_looks = range(20, 21)
    return rig


def test_two_that_begin_alike_are_copied_once() -> None:
    rig = loading_rig()
    keys = [rig.add([*PROMPT, 7]), rig.add([*PROMPT, 8])]
    rig.step()
    rig.step()
    assert rig.engine.stats.load().num_waiting == 2 and rig.engine.stats.load().waiting_tokens == 2
    assert rig.engine.pool.counts.held == 5 + 2
    rig.run()
    for key in keys:
        rig.check(key)
        assert rig.cached[key] == 20
    assert rig.copier.num_copied[Direction.IN] == 5 and rig.num_shared == 5
    check_integrity(rig.engine)


def test_behind_what_comes_for_another_host_memory_goes_on() -> None:
    rig = loading_rig()
    short = rig.add([*PROMPT, 7])
    rig.step()
    long = [rig.add([*PROMPT, 5, 5, 5, 5, last]) for last in (6, 7)]
    rig.run()
    for key in (short, *long):
        rig.check(key)
    assert rig.copier.num_copied[Direction.IN] == 6 and rig.num_shared == 5 + 6
    assert rig.cached[short] == 20 and [rig.cached[key] for key in long] == [24, 24]


def test_one_that_shares_only_the_beginning() -> None:
    rig = loading_rig()
    keys = [rig.add([*PROMPT, 7]), rig.add([*PROMPT[:12], 8])]
    rig.run()
    for key in keys:
        rig.check(key)
    assert rig.copier.num_copied[Direction.IN] == 5 and rig.cached[keys[1]] == 12


def test_a_copy_outlives_the_one_it_was_begun_for() -> None:
    rig = loading_rig()
    first, second = rig.add([*PROMPT, 7]), rig.add([*PROMPT, 8])
    rig.step()
    known = dict(rig.observer.tiers)
    rig.engine.abort(first)
    check_integrity(rig.engine)
    assert rig.observer.tiers == known, "what is being copied cannot be seen"
    rig.run()
    rig.check(second)
    assert rig.cached[second] == 20 and rig.copier.num_copied[Direction.IN] == 5


def test_a_copy_that_nobody_waits_for_any_more_is_not_seen() -> None:
    rig = loading_rig()
    keys = [rig.add([*PROMPT, 7]), rig.add([*PROMPT, 8])]
    rig.step()
    known = dict(rig.observer.tiers)
    for key in keys:
        rig.engine.abort(key)
    rig.run()
    assert rig.observer.tiers == known and rig.engine.pool.counts.held == 0
    third = rig.add([*PROMPT, 9])
    rig.run()
    rig.check(third)
    assert rig.copier.num_copied[Direction.IN] == 10 and rig.cached[third] == 20


def test_of_two_that_wait_for_a_lost_block_one_computes_it_in_its_own() -> None:
    rig = loading_rig()
    keys = [rig.add([*PROMPT, 7], 4), rig.add([*PROMPT, 8], 4)]
    rig.step()
    blocks = rig.engine._host._blocks
    load, shared = rig.engine._scheduler.queues.loading.values()
    assert not load.num_shared and shared.num_shared == 5
    [lost] = blocks.match(rig.hashes(PROMPT))[4:]
    while lost not in blocks.take(1):
        pass
    rig.copier.memory[lost] = bytes(rig.copier.block_bytes)
    rig.run()
    for key in keys:
        rig.check(key)
    assert rig.totals["lost"] and rig.cached[keys[0]] == 16
    check_integrity(rig.engine)


def test_host_blocks_that_are_evicted_during_a_load_are_computed() -> None:
    rig = Rig()
    rig.serve(PROMPT)
    fill(rig)
    assert rig.engine._host is not None
    blocks = rig.engine._host._blocks
    rig.num_looks = range(10, 11)
    key = rig.add([*PROMPT, 7])
    for _ in range(5):
        if rig.engine._scheduler.queues.loading:
            break
        rig.step()
    [load] = rig.engine._scheduler.queues.loading.values()
    host_blocks = load.parts[0][0].host_blocks
    last = host_blocks[-1]
    taken: list[int] = []
    while last not in taken:  # the least recently used family first, and its last block first
        taken += blocks.take(1)
    evicted = taken[-1]
    assert host_blocks[-2] not in taken
    rig.copier.memory[evicted] = bytes(rig.copier.block_bytes)
    rig.run()
    rig.check(key)
    assert rig.cached[key] == 4 * (len(host_blocks) - 1)
    assert rig.totals["lost"] > 0


def test_a_block_that_is_rewritten_on_its_way_out_is_not_entered() -> None:
    rig = Rig(num_looks=range(500, 501))
    for prompt in (PROMPT, [9] * (4 * rig.capacity - 1)):  # the second takes all blocks
        key = rig.add(prompt)
        while not rig.tokens[key]:
            rig.step()
    assert not len(rig.engine._host._blocks)  # the copy out of PROMPT's blocks has not ended
    rig.num_looks = range(1)
    for _ in range(1500):
        rig.engine.poll_host()
    assert rig.totals["lost"] > 0
    assert rig.serve([*PROMPT, 7]) < 20


def test_room_is_made_for_the_copies_of_one_look_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long chain displaces many short ones over several steps, not all at its end."""
    monkeypatch.setattr(host_tier, "SLICE_BLOCKS", 2)
    rig = Rig(capacity=40, num_host=20, num_looks=range(1))
    for n in range(20):
        rig.serve([n] * 4)
    assert len(rig.engine._host._blocks) == 20
    key, num_displaced = rig.add([30] * 65), list[int]()
    while rig.engine.has_work:
        in_host = {*rig.engine._host._blocks._block_of}
        rig.step()
        num_displaced.append(len(in_host - rig.engine._host._blocks._block_of.keys()))
    rig.check(key)
    assert sum(num_displaced) == 16 and max(num_displaced) == 2 * host_tier.MOST_COPIES


def test_a_preempted_request_is_swapped() -> None:
    rig = Rig(capacity=12, num_host=60, num_looks=range(1))
    keys = [rig.add([n] * 9, 30) for n in range(3)]
    rig.run()
    for key in keys:
        rig.check(key)
        assert len(rig.tokens[key]) == 30
    totals = rig.totals
    assert totals["preemptions"] and totals["swaps"] and totals["host_hits"]


def test_swapping_is_all_or_nothing() -> None:
    rig = Rig(capacity=12, num_host=2)
    keys = [rig.add([n] * 9, 30) for n in range(3)]
    rig.run()
    for key in keys:
        rig.check(key)
    assert rig.totals["preemptions"] and not rig.totals["swaps"]


def test_without_host_memory_all_is_as_before() -> None:
    rig = Rig(num_host=0)
    rig.serve(PROMPT)
    fill(rig)
    assert rig.serve([*PROMPT, 7]) == 0


def test_memory_that_is_pinned_later_is_used_then() -> None:
    rig = Rig()
    rig.copier.num_blocks = 0
    rig.serve(PROMPT)
    fill(rig)
    assert rig.serve([*PROMPT, 7]) == 0
    rig.copier.num_blocks = 40
    rig.serve([*PROMPT, 8])
    fill(rig)
    assert rig.serve([*PROMPT, 9]) == 20


def test_while_only_blocks_are_waited_for_a_step_lets_others_act() -> None:
    rig = Rig()
    rig.serve(PROMPT)
    fill(rig)
    rig.num_looks = range(20, 21)
    key = rig.add([*PROMPT, 7])
    calls = 0

    def meanwhile() -> bool:
        nonlocal calls
        calls += 1
        if calls == 3:
            rig.add([5, 6], 1)
        return False

    num_steps = 0
    while rig.engine.has_work:
        output = rig.engine.step(meanwhile)
        num_steps += 1
        for token in output.tokens:
            rig.tokens[token.key].append(token.token_id)
    assert 10 < calls <= num_steps + 4
    assert all(rig.tokens.values())
    rig.check(key)


def test_prompt_logprobs_are_computed() -> None:
    rig = Rig()
    rig.serve(PROMPT)
    fill(rig)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    rig.engine.add(Request("p", 0, tuple(PROMPT), params))
    rig.tokens["p/0"] = []
    rig.run()
    assert rig.cached["p/0"] == 0


# -- thousands of schedules -----------------------------------------------------------------------


def test_tokens_are_the_same_in_any_schedule() -> None:
    totals: Counter[str] = Counter()
    for seed in range(400):
        totals += play(seed)
    assert all(totals[each] > 20 for each in ("swaps", "host_hits", "lost", "shared")), totals


def test_a_draft_models_kv_that_is_missing_is_never_read() -> None:
    """Blocks stored without the draft model's KV are never read by it: that KV is recomputed, also
    while blocks are evicted, written to disk and loaded again."""
    totals: Counter[str] = Counter()
    for seed in range(number(80, 400)):
        totals += play(seed, num_disk=(0, 30)[seed % 2], has_draft_model=True)
    assert all(totals[each] > 20 for each in ("swaps", "host_hits", "accepted")), totals


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tokens_are_the_same_in_thousands_of_schedules() -> None:
    for seed in range(1000, 6000):
        play(seed)


# -- the cost rule --------------------------------------------------------------------------------


def test_with_the_rule_as_it_is_tokens_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    totals = sum((play(seed) for seed in range(number(30, 60))), Counter[str]())
    assert totals["host_hits"], "steps take the fake clock's milliseconds, copies less"


def test_copying_pays_where_it_takes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    cost, step_cost = CopyCost(), linear_cost(0.01, 1e-4)
    assert cost.pays(1 << 30, 100, 0, None), "nothing is measured yet"
    assert cost.pays(1 << 40, 100, 0, step_cost), "no copy is measured yet"
    cost.observe(1 << 30, 0.02)
    for num_tokens in (1, 100, 10_000):
        compute_s = 0.01 + 1e-4 * num_tokens
        num_bytes = int((compute_s - 0.0005) / 0.02 * (1 << 30))
        assert cost.pays(int(num_bytes * 0.99), num_tokens, 0, step_cost)
        assert not cost.pays(int(num_bytes * 1.01), num_tokens, 0, step_cost)
