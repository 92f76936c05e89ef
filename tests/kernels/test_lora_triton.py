"""The LoRA kernels against the reference: interpreted without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from baton.kernels.lora import lora_triton
from baton.kernels.lora.lora import (
    BLOCK_ROWS,
    NO_SLOT,
    Int32s,
    Place,
    RowGroups,
    TorchAdapters,
    num_blocks,
)
from baton.kernels.lora.lora_triton import TritonAdapters

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if HAS_GPU else [torch.float32]
RANKS = (1, 5, 8)

MIXTURES = {
    "one row": [1],
    "nobody": [NO_SLOT] * 3,
    "one adapter over a block": [2] * (BLOCK_ROWS + 1),
    "all, shuffled": [2, NO_SLOT, 0, 1, 0, NO_SLOT, 2, 2, 1],
}
PLACES = {
    "three projections": Place(3, 3 + 3 * 70, 70, (130, 20, 20)),
    "one projection": Place(0, 40, 40, (65,)),
}


def adapters(kind: type[TorchAdapters] | type[TritonAdapters], bank: torch.Tensor) -> TorchAdapters:
    made = kind(bank) if kind is TorchAdapters else TritonAdapters(bank, 64)
    for slot, rank in enumerate(RANKS):
        made.set_rank(slot, rank)
    return made  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("slots", MIXTURES.values(), ids=MIXTURES)
def test_each_row_gets_what_its_adapter_adds(
    slots: list[int], place: Place, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    of_rows: Int32s = np.array(slots, np.int32)
    bank = torch.randn(len(RANKS), max(RANKS), place.outputs_at + sum(place.parts)).to(dtype)
    x, y = (torch.randn(len(slots), n).to(dtype) for n in (place.num_inputs, sum(place.parts)))
    expected, found = y.clone(), y.to(DEVICE)
    reference = adapters(TorchAdapters, bank)
    reference.plan(of_rows)
    reference.expand(expected, reference.shrink(x, place), place)
    ours = adapters(TritonAdapters, bank.to(DEVICE))
    ours.plan(of_rows)
    ours.expand(found, ours.shrink(x.to(DEVICE), place), place)
    limit = 3e-6 if dtype == torch.float32 else 2e-2
    difference = (found.cpu().double() - expected.double()).norm() / expected.double().norm()
    assert difference < limit, f"{difference:.2e}"
    without = of_rows == NO_SLOT
    assert torch.equal(found.cpu()[without], y[without]), "no adapter: not a bit"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", MIXTURES.values(), ids=MIXTURES)
def test_gated_products_of_all_rows(slots: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    place = Place(0, 2 * 70, 70, (90, 90))
    bank = torch.randn(len(RANKS), max(RANKS), place.outputs_at + sum(place.parts)).to(dtype)
    x, y = (
        (torch.randn(len(slots), n) / 9).to(dtype) for n in (place.num_inputs, sum(place.parts))
    )
    of_rows: Int32s = np.array(slots, np.int32)
    reference, ours = adapters(TorchAdapters, bank), adapters(TritonAdapters, bank.to(DEVICE))
    for each in (reference, ours):
        each.plan(of_rows)
    expected = reference.expand_gated(y.clone(), reference.shrink(x, place), place)
    x, y = x.to(DEVICE), y.to(DEVICE)
    found = ours.expand_gated(y, ours.shrink(x, place), place)
    limit = 3e-6 if dtype == torch.float32 else 2e-2
    difference = (found.cpu().double() - expected.double()).norm() / expected.double().norm()
    assert difference < limit, f"{difference:.2e}"


@pytest.mark.skipif(HAS_GPU, reason="interprets what waits for the product in front")
def test_shrink_writes_nothing_before_the_product_in_front_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The shrink kernel overlaps the GEMM before it and waits before its first write: its output
    may be memory that the GEMM still uses and torch has freed."""
    place = Place(0, 40, 40, (65,))
    bank = torch.randn(len(RANKS), max(RANKS), 105)
    ours = adapters(TritonAdapters, bank)
    ours.plan(np.array([2], np.int32))
    given: list[torch.Tensor] = []

    def empty(*shape: object, **options: object) -> torch.Tensor:
        given.append(torch.zeros(*shape, **options))  # type: ignore[arg-type]
        return given[-1]

    def wait(_: object) -> None:
        assert not given[0].any(), "the product still uses it"
        given[0].fill_(torch.nan)

    monkeypatch.setattr(lora_triton, "wait_for_previous", wait)
    monkeypatch.setattr(torch, "empty", empty)
    assert ours.shrink(torch.randn(1, 40), place).isfinite().all()


def test_rows_are_in_blocks_of_one_adapter() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        slots = random.integers(-1, 4, random.integers(1, 70)).astype(np.int32)
        groups = RowGroups.of(slots, 4)
        assert groups.blocks.shape == (3, num_blocks(len(slots), 4))
        seen: list[int] = []
        for slot, first, end in groups.blocks.T:
            assert 0 <= end - first <= BLOCK_ROWS and (first < end or slot == NO_SLOT)
            rows = groups.rows[first:end]
            assert (slots[rows] == slot).all()
            seen += rows.tolist()
        assert sorted(seen) == list(range(len(slots)))


@pytest.mark.skipif(not HAS_GPU, reason="captures CUDA graphs")
def test_a_graph_is_replayed_over_any_mixture() -> None:
    torch.manual_seed(0)
    place = Place(0, 64, 64, (96,))
    bank = torch.randn(3, 8, 160, device="cuda", dtype=torch.bfloat16)
    x, y = (
        torch.randn(24, 64, device="cuda").bfloat16(),
        torch.zeros(24, 96, device="cuda").bfloat16(),
    )
    ours, reference = adapters(TritonAdapters, bank), adapters(TorchAdapters, bank.cpu())
    ours.plan(np.full(24, NO_SLOT, np.int32))
    ours.expand(y, ours.shrink(x, place), place)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.expand(y, ours.shrink(x, place), place)
    random = np.random.default_rng(1)
    for _ in range(3):
        slots = random.integers(-1, 3, 24).astype(np.int32)
        expected = torch.zeros(24, 96).bfloat16()
        reference.plan(slots)
        reference.expand(expected, reference.shrink(x.cpu(), place), place)
        y.zero_()
        ours.plan(slots)
        graph.replay()
        assert (y.cpu().float() - expected.float()).norm() < 2e-2 * expected.float().norm()
