"""The engine with a disk tier behind its host memory: whatever is written, read, damaged or late,
the tokens are the oracle's, and a prompt is read only if that takes less time than computing it.
"""

from __future__ import annotations

from collections import Counter

import pytest
from effort import number
from engines.integrity import check_integrity
from fakes.gateway.step_costs import linear_cost
from fakes.tiers.disk import Fault
from fakes.tiers.tiered_engine import PROMPT, Rig, fill, play

from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.kv.host_copies import CopyCost

LONG = [*PROMPT, 5, 6, 7, 8]  # six blocks
EIGHT_B_TOKEN_BYTES = 131_072  # 32 layers, 8 heads of 128, bfloat16


@pytest.fixture
def reading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read or copy is estimated to pay, whatever its measured cost."""
    monkeypatch.setattr(CopyCost, "pays", lambda self, num_bytes, *others: num_bytes > 0)


def on_disk(**options: object) -> Rig:
    """A rig with the blocks of LONG on disk, and neither on the device nor in host memory."""
    rig = Rig(num_host=24, num_disk=100, **options)  # type: ignore[arg-type]
    rig.serve([*LONG, 3])
    for n in range(20, 28):
        rig.serve([n] * 24)
    disk, blocks = rig.engine._host.disk, rig.engine._host._blocks
    assert len(disk.match(rig.hashes(LONG), ())) == 6 and not blocks.match(rig.hashes(LONG))
    return rig


@pytest.mark.usefixtures("reading_pays")
def test_what_left_host_memory_comes_back() -> None:
    rig = on_disk()
    assert rig.serve([*LONG, 9], 3) == 24
    assert rig.totals["disk_hits"] == 6 and rig.totals["host_hits"] == 24
    fill(rig)
    assert rig.serve([*LONG, 9], 3) == 24, "it is in host memory now"
    assert rig.totals["disk_hits"] == 6
    check_integrity(rig.engine)


@pytest.mark.usefixtures("reading_pays")
def test_behind_device_and_host_memory_the_disk_goes_on() -> None:
    rig = on_disk()
    hashes = rig.hashes(LONG)
    rig.serve([*LONG[:8], 1])  # two blocks are read back to host memory
    fill(rig)
    assert len(rig.engine._host._blocks.match(hashes)) == 2
    assert rig.serve([*LONG, 9]) == 24
    assert rig.totals["disk_hits"] == 6
    assert len(rig.engine._host._blocks.families(hashes)) == 1, "what is read goes on behind it"


@pytest.mark.usefixtures("reading_pays")
def test_what_is_computed_while_it_is_read_is_not_there_twice() -> None:
    """Blocks computed by another request while they are read from disk are not stored twice. That
    request wants prompt log-probabilities, so it bypasses the prefix cache."""
    rig = on_disk(capacity=20)
    rig.disk.draw = lambda: 0
    reader = rig.add([*LONG, 9])
    rig.step()
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    rig.engine.add(Request("p", 0, (*LONG, 8), params))
    rig.tokens["p/0"] = []
    for _ in range(20):
        rig.step()
    assert rig.tokens["p/0"] and not rig.tokens[reader]
    rig.disk.draw = lambda: 1
    rig.run()
    rig.check(reader)
    assert rig.cached[reader] == 24


@pytest.mark.usefixtures("reading_pays")
def test_others_run_and_two_that_begin_alike_wait_for_one_read() -> None:
    rig = on_disk()
    rig.draw_jobs = rig.disk.draw = lambda: 0
    slow = [rig.add([*LONG, last]) for last in (7, 8)]
    rig.step()
    quick = rig.add([5, 6, 7], 2)
    for _ in range(5):
        rig.step()
    assert len(rig.tokens[quick]) == 2 and not any(rig.tokens[key] for key in slow)
    rig.disk.draw = lambda: 1
    rig.run()
    for key in slow:
        rig.check(key)
        assert rig.cached[key] == 24
    assert rig.totals["disk_hits"] == 6 and rig.totals["shared"] == 6


@pytest.mark.usefixtures("reading_pays")
def test_a_read_behind_its_deadline_is_computed_and_its_memory_stays_the_threads() -> None:
    rig = on_disk()
    rig.disk.draw = lambda: 0
    num_free = rig.engine._host._blocks.num_free
    key = rig.add([*LONG, 9], 3)
    rig.step()
    assert rig.engine._host._blocks.num_free <= max(0, num_free - 6) or num_free < 6
    rig.engine._clock.advance(60.0)
    rig.run()
    rig.check(key)
    assert rig.cached[key] == 0 and rig.totals["disk_hits"] == 0
    disk, blocks = rig.engine._host.disk, rig.engine._host._blocks
    assert disk.room == 0, "nothing is read while it hangs"
    assert blocks.num_free + len(blocks) < blocks.num_blocks
    assert not rig.engine.pool.open_fences
    rig.disk.draw = lambda: 9
    rig.settle()
    assert blocks.num_free + len(blocks) == blocks.num_blocks and disk.room
    rig.serve([*LONG, 9])


@pytest.mark.usefixtures("reading_pays")
def test_an_aborted_prompts_read_ends_and_leaves_nothing_held() -> None:
    rig = on_disk()
    rig.disk.draw = lambda: 0
    key = rig.add([*LONG, 9])
    rig.step()
    rig.engine.abort(key)
    check_integrity(rig.engine)
    rig.disk.draw = lambda: 1
    rig.run()
    rig.settle()
    assert rig.engine.pool.counts.held == 0 and not rig.engine.pool.open_fences


@pytest.mark.usefixtures("reading_pays")
@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.SHORT, Fault.DAMAGE])
def test_what_cannot_be_read_is_computed_and_dropped(
    fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    rig = on_disk()
    hashes, num_reads = rig.hashes(LONG), 0

    def third_read() -> Fault:
        nonlocal num_reads
        num_reads += 1
        return fault if num_reads == 3 else Fault.NONE

    rig.file.draw = third_read
    assert rig.serve([*LONG, 9], 3) == 8
    assert rig.totals["disk_failures"] == 1 and rig.totals["disk_hits"] == 2
    assert len(rig.engine._host.disk.match(hashes[2:], ())) == 0
    assert "a block is dropped" in caplog.text


def test_tokens_are_the_same_in_any_schedule(reading_pays: None) -> None:
    totals: Counter[str] = Counter()
    for seed in range(number(50, 150)):
        totals += play(seed, num_disk=(6, 30)[seed % 2])
    assert totals["disk_hits"] > 50 and not totals["disk_failures"], totals


def test_tokens_are_the_same_whatever_fails(reading_pays: None) -> None:
    totals: Counter[str] = Counter()
    faults = [*Fault, *[Fault.NONE] * 20]
    for seed in range(number(50, 150)):
        totals += play(seed, num_disk=30, faults=faults)
    assert totals["disk_hits"] > 20 and totals["disk_failures"] > 50, totals


# -- the cost rule --------------------------------------------------------------------------------


@pytest.mark.parametrize(("gbytes_per_s", "num_read"), [(7.0, 6), (4.0, 0)])
def test_a_prompt_is_read_where_that_takes_less(gbytes_per_s: float, num_read: int) -> None:
    """A prompt is read if the measured disk rate beats prefill: at 24.7 us a token (an 8B model on
    one GPU) both take the same time at 5.3 GB/s. Rates are scaled to the small blocks of this test.
    """
    rig = on_disk()
    token_bytes = rig.disk.block_bytes / 4
    scale = token_bytes / EIGHT_B_TOKEN_BYTES / 10_000  # slowed, so that latency is negligible
    disk, host = rig.engine._host.disk, rig.engine._host
    disk.cost = CopyCost()
    disk.cost.observe(10**9, 10**9 / (gbytes_per_s * 1e9 * scale))
    host.cost = CopyCost()
    host.cost.observe(10**9, 10**9 / (50e9 * scale))
    host._step_cost = lambda: linear_cost(0.0, 24.7e-6 * 10_000)
    rig.disk.block_s = rig.disk.block_bytes / (gbytes_per_s * 1e9 * scale)
    rig.serve([*LONG, 9])
    assert rig.totals["disk_hits"] == num_read


def test_an_unmeasured_disk_is_not_read() -> None:
    rig = on_disk()
    rig.engine._host.disk.cost = CopyCost()
    assert rig.serve([*LONG, 9]) == 0
