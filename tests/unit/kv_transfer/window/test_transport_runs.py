"""What `cuda_ipc` computes before it uses a GPU: pieces of copies, descriptions, the choice of
transport.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from fakes.access import access
from fakes.handoff import block_pairs
from fakes.handoff.block_pairs import BlockPair, BlockRef, packed
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import HandoffFailed
from baton.engine.kv.cuda_memory import find_runs
from baton.engine.kv.generations import GenerationsReader, SharedGenerations
from baton.kv_transfer.export.pool_address import CudaMemory, PoolDescription, PoolPart
from baton.kv_transfer.ranks.ranked import pack_pull, unpack_pull
from baton.kv_transfer.window.block_pairs import BlockPairs

SOURCE = "5" * 32
ON_GPU = CudaMemory(bytes(range(16)), bytes(range(64)))


def pairs_of(*ids: tuple[int, int]) -> list[BlockPair]:
    return [BlockPair(BlockRef(source, 0), destination) for source, destination in ids]


def runs_of(*ids: tuple[int, int]) -> list[tuple[int, int, int]]:
    runs = find_runs(block_pairs.join(*pairs_of(*ids)).ids)
    rows = (runs.sources, runs.destinations, runs.lengths)
    return [tuple(row) for row in zip(*(row.tolist() for row in rows), strict=True)]


def test_neighbours_at_both_ends_become_one_piece() -> None:
    assert runs_of((7, 2), (8, 3), (9, 4), (4, 5), (5, 9)) == [(7, 2, 3), (4, 5, 1), (5, 9, 1)]
    assert runs_of((7, 2)) == [(7, 2, 1)]
    assert runs_of((7, 3), (6, 2)) == [(7, 3, 1), (6, 2, 1)]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1))
def test_pieces_are_the_copy_and_cannot_be_joined(ids: list[tuple[int, int]]) -> None:
    runs = runs_of(*ids)
    unrolled = [(s + i, d + i) for s, d, length in runs for i in range(length)]
    assert unrolled == ids
    for (source, destination, length), following in itertools.pairwise(runs):
        assert following[:2] != (source + length, destination + length)


def test_columns_are_what_the_pairs_say() -> None:
    refs = [BlockRef(7, 2**63 + 1), BlockRef(4, 0)]
    pairs = BlockPairs.join(packed(refs), (3, 9))
    assert pairs.ids.tolist() == [[7, 4], [3, 9]]
    assert pairs.generations.tolist() == [2**63 + 1, 0]
    assert len(pairs) == 2
    assert block_pairs.split(pairs) == [BlockPair(refs[0], 3), BlockPair(refs[1], 9)]
    again = block_pairs.join(*block_pairs.split(pairs))
    assert (again.ids == pairs.ids).all() and (again.generations == pairs.generations).all()
    assert block_pairs.split(pairs[1:]) == [BlockPair(refs[1], 9)]
    assert pairs[:1].ids.flags.c_contiguous


def test_pairs_reach_another_rank() -> None:
    pairs = block_pairs.join(BlockPair(BlockRef(7, 2**63 + 1), 3), BlockPair(BlockRef(4), 9))
    window, unpacked = unpack_pull(memoryview(pack_pull(5, pairs)))
    assert (window, block_pairs.split(unpacked)) == (5, block_pairs.split(pairs))
    assert unpacked.ids.flags.writeable and unpacked.ids.flags.c_contiguous  # as torch requires


def test_generations_match_if_those_of_all_blocks_do() -> None:
    page = SharedGenerations(6, SOURCE)
    page.bump([2, 4, 4])
    reader = GenerationsReader(page.fd, 6, SOURCE)
    ids, drawn = np.array([4, 1, 2]), np.array([page.read(4), 0, page.read(2)], np.uint64)
    assert reader.match(ids, drawn)
    page.bump([1])
    assert not reader.match(ids, drawn) and reader.match(ids[::2], drawn[::2])
    reader.close()
    page.close()


@pytest.mark.parametrize("cuda", [None, ON_GPU], ids=["host", "gpu"])
def test_a_description_survives_the_socket(cuda: CudaMemory | None) -> None:
    description = PoolDescription(SOURCE, 2 << 20, 1000, cuda)
    assert PoolDescription.unpack(description.pack()) == description
    assert description.num_fds == (2 if cuda is None else 1)


def test_a_description_lists_the_pools_of_all_ranks() -> None:
    parts = (PoolPart(SOURCE, (0, 4), (0, 2)), PoolPart("9" * 32, (4, 4), (0, 2)))
    description = PoolDescription("9" * 32, 4096, 10, ON_GPU, parts)
    packed = description.pack()
    assert PoolDescription.unpack(packed) == description
    assert (description.incarnation, description.engine) == ("9" * 32, SOURCE)
    for cut in (1, 20, 40):
        with pytest.raises(HandoffFailed):
            PoolDescription.unpack(packed[:-cut])


@given(st.binary(max_size=200))
def test_junk_is_no_description(junk: bytes) -> None:
    with pytest.raises(HandoffFailed):
        PoolDescription.unpack(junk)


@pytest.mark.parametrize("cut", [1, 40, 41, 79, 81, 119])
def test_a_cut_description_is_refused(cut: int) -> None:
    with pytest.raises(HandoffFailed):
        PoolDescription.unpack(PoolDescription(SOURCE, 4096, 10, ON_GPU).pack()[:-cut])


def test_another_pool_than_asked_for_is_named() -> None:
    description = PoolDescription(SOURCE, 4096, 10)
    description.require(SOURCE, 4096)
    with pytest.raises(HandoffFailed, match=SOURCE):
        description.require("6" * 32, 4096)
    with pytest.raises(HandoffFailed, match="4096 bytes there, 8192 here"):
        description.require(SOURCE, 8192)


@pytest.mark.parametrize(
    ("kernel", "engine", "chosen"),
    [(371, 351, "copy-engine"), (371, 78, "kernel"), (20, 30, "copy-engine")],
)
def test_copy_engines_are_taken_unless_the_kernel_clearly_wins(
    kernel: float, engine: float, chosen: str
) -> None:
    pytest.importorskip("triton")
    from baton.kv_transfer.cuda_ipc.cuda_ipc_copy import choose

    names = ["kernel", "copy-engine"]
    assert names[choose(names, [kernel, engine])] == chosen
    assert choose(["kernel"], [kernel]) == 0


@pytest.mark.parametrize(
    ("transport", "copy"),
    [("CudaIpcTransport", "KernelCopy"), ("CudaStagedTransport", "StagedCopy")],
)
def test_memory_is_unmapped_if_no_way_to_copy_can_be_made(
    monkeypatch: pytest.MonkeyPatch, transport: str, copy: str
) -> None:
    pytest.importorskip("triton")
    import torch

    from baton.kv_transfer.cuda_ipc import cuda_ipc

    closed: list[int] = []
    mapping = SimpleNamespace(address=7, close=lambda: closed.append(7))
    generations = SharedGenerations(4, SOURCE)
    description = PoolDescription(SOURCE, 64, 4, ON_GPU)

    class Broken:
        name = "broken"

        def __init__(self, *_: object) -> None:
            raise MemoryError("no room for block ids")

    for name, fake in (
        ("received", lambda *_: nullcontext((description, [generations.fd]))),
        ("map_memory", lambda *_: mapping),
        ("find_gpu", lambda _: torch.device("cpu")),
        ("require_peer_access", lambda *_: None),
        (copy, Broken),
    ):
        monkeypatch.setattr(cuda_ipc, name, fake)
    tensor, layout = torch.zeros(4, 64, dtype=torch.uint8), SimpleNamespace(num_layers=1)
    kv = SimpleNamespace(tensor=tensor, block_bytes=64, layout=layout)
    opened = getattr(cuda_ipc, transport)(kv)
    with pytest.raises(MemoryError, match="no room"):
        opened.connect(access(SOURCE))
    assert closed == [7]
    generations.close()
