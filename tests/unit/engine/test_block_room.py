"""Free blocks compared with the estimated peak of all sequences, including shared blocks and future
forks.
"""

from __future__ import annotations

import pytest

from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.core.request.token_ids import root_hash
from baton.engine.block_room import BlockRoom
from baton.engine.kv.block_pool import BlockPool
from baton.engine.kv.generations import Generations
from baton.engine.kv.limits import EngineLimits
from baton.engine.scheduling.admission import Admission, OutputLengthEstimator
from baton.engine.scheduling.queues import Queues
from baton.engine.scheduling.sequence import Sequence


def new_sequence(num_tokens: int, max_tokens: int) -> Sequence:
    request = Request("r", 0, (7,) * num_tokens, SamplingParams(max_tokens=max_tokens))
    return Sequence(request, arrival=0, is_held=False, root_hash=root_hash("m"))


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(102, Generations(102))


@pytest.fixture
def room(pool: BlockPool) -> BlockRoom:
    limits = EngineLimits(num_blocks=102, block_size=4, max_model_len=1000)
    queues = Queues(limits, pool)
    return BlockRoom(limits, Admission(limits, OutputLengthEstimator()), queues, pool)


def test_room_is_what_the_peak_of_all_leaves(room: BlockRoom, pool: BlockPool) -> None:
    one = new_sequence(8, 9)  # 16 slots at its peak
    one.block_ids = [2, 3]
    other = new_sequence(8, 1)
    other.block_ids = [2, 3]
    assert room.beside([], []) == 100
    assert pool.allocate(2) == [2, 3]
    assert room.beside([one], []) == 96
    assert room.beside([one], [one.request]) == 92
    assert room.beside([one, new_sequence(300, 1)], []) == 100 - 2 - 75
    full = new_sequence(290, 1)
    assert room.beside([one, other, full], []) == 100 - 2 - 73, "what is shared counts once"
    assert room.beside([one, *[full] * 1000], []) == 0
    assert room.beside([], iter([full.request] * 2)) == 0


def test_room_for_forks_is_what_they_do_not_share(room: BlockRoom) -> None:
    request = Request("a", 0, (1,) * 10, SamplingParams(max_tokens=9), fork_ids=("b", "c"))
    alone, all_three = Request("a", 0, (1,) * 10, SamplingParams(max_tokens=9)), request
    assert room.beside([], [alone]) == 100 - 5  # 10 + 8 tokens
    assert room.beside([], [all_three]) == 100 - 5 - 2 * 3  # 2 full blocks are shared
    waiting = Sequence(request, 0, False, root_hash("m"))
    assert room.beside([waiting], []) == 100 - 5 - 2 * 3
