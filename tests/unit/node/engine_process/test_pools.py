"""How the pools of an engine's ranks are named and described to others."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.clock import FakeEntropy

from baton.engine.model.stages import LayerRange
from baton.kv_transfer.window.block_pieces import BlockCut, pieces_of
from baton.node.engine_process.pools import pool_parts

NUM_LAYERS, NUM_KV_HEADS, HEAD_BYTES = 3, 4, 16


def parts_of(size: int, ends: list[int], num_drafting: int = 0) -> Any:
    stages = [LayerRange(*each, NUM_LAYERS) for each in itertools.pairwise([0, *ends])]
    layout = SimpleNamespace(num_layers=len(stages[0]) + num_drafting)
    model = SimpleNamespace(num_heads=8, num_kv_heads=NUM_KV_HEADS)
    runner: Any = SimpleNamespace(
        model_config=model, kv=SimpleNamespace(layout=layout), stages=stages, layers=stages[0]
    )
    hosts = [""] * size * len(stages)
    return pool_parts(runner, size, "a" * 32, FakeEntropy(1), hosts)


def test_each_rank_of_each_stage_has_a_pool() -> None:
    parts = parts_of(2, [1, 3])
    assert parts[0].pool == "a" * 32 and len({part.pool for part in parts}) == 4
    assert [part.heads for part in parts] == [(0, 2), (2, 2)] * 2
    assert [part.layers for part in parts] == [(0, 1)] * 2 + [(1, 2)] * 2


@pytest.mark.parametrize(("there", "here"), [(1, 2), (2, 1), (4, 2)])
def test_a_draft_model_s_layers_are_pulled_with_the_model_s(there: int, here: int) -> None:
    sources, ours = (parts_of(size, [NUM_LAYERS], num_drafting=2) for size in (there, here))
    row_bytes = 2 * (NUM_LAYERS + 2) * HEAD_BYTES
    for rank, mine in enumerate(ours):
        block_bytes, num_bytes = row_bytes * mine.heads[1], 0
        for piece in pieces_of(sources, mine, rank):
            cut = BlockCut.of(piece, block_bytes)
            assert cut.source_block_bytes == row_bytes * sources[piece.source_rank].heads[1]
            num_bytes += cut.piece_bytes
        assert num_bytes == block_bytes
