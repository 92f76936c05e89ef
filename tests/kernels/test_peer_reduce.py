"""Sums over ranks through shared memory: processes, each with Triton's interpreter."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from baton.kernels.norm import rms_norm
from baton.kernels.peer_reduce_triton import (
    EXCHANGE_BYTES,
    MAX_PROGRAMS,
    MAX_RANKS,
    MAX_ROW_BYTES,
    SLOTS_AT,
    Exchange,
    peer_add_rms_norm,
    peer_sum,
    prepare_exchange,
)
from baton.kernels.sampling import RowSampling, sample
from baton.kernels.sampling_triton import VocabularyPart, sample_unfiltered

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the real thing")

# (elements, type, in parts): fewer than a program's, ragged, several programs; sizes alternate.
SUMS = [
    (5, torch.float32, False),
    (1500, torch.float32, True),
    (1100, torch.float16, False),
    (5, torch.float32, True),
]


def inputs(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(n, generator=generator).to(dtype) for n, dtype, _ in SUMS]


def norm_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream of 3 rows and the norm's weights: the same on all ranks."""
    generator = torch.Generator().manual_seed(9)
    return torch.randn(3, 500, generator=generator), torch.rand(500, generator=generator)


WISHES = [RowSampling(temperature, None, 1.0, key) for key, temperature in enumerate((0, 1.0, 0.7))]


def all_logits() -> torch.Tensor:
    """Of 3 rows over a vocabulary of 4501, with equals on both ranks."""
    logits = torch.randn(3, 4501, generator=torch.Generator().manual_seed(4))
    logits[0, [2300, 4500]] = 9.0
    return logits


def sample_part(exchange: Exchange) -> list[torch.Tensor]:
    """Token ids and log-probabilities by a rank that has its part of the logits."""
    size, rank = exchange.num_ranks, exchange.rank
    padded = torch.nn.functional.pad(all_logits(), (0, -4501 % size), value=99.0)
    part = VocabularyPart(rank, size, 4501, lambda x: peer_sum(x, exchange, in_parts=False))
    temperatures = torch.tensor([wish.temperature for wish in WISHES])
    keys = torch.tensor([wish.key for wish in WISHES])
    token_ids, logprobs = torch.zeros(3, dtype=torch.int64), torch.zeros(3)
    sample_unfiltered(padded.chunk(size, 1)[rank], temperatures, keys, token_ids, logprobs, part)
    return [token_ids, logprobs]


def send(x: torch.Tensor, maps: list[torch.Tensor], rank: int, *, in_parts: bool) -> None:
    """What a product that sends itself leaves where: x [rows, dim] float32, without minus zeros."""
    turns = maps[rank][:SLOTS_AT].view(torch.int32).view(MAX_PROGRAMS, -1)[:, 0]
    pitch = 1024 // len(maps) if in_parts else 0
    for row, values in enumerate(x):
        slot = (int(turns[row]) * MAX_PROGRAMS + row) * MAX_RANKS + rank
        for target, memory in enumerate(maps):
            sent = values[target * pitch :][: pitch or None]
            at = (SLOTS_AT + slot * MAX_ROW_BYTES) // 4
            memory.view(torch.float32)[at : at + len(sent)] = sent


def run_rank(rank: int, fds: list[int]) -> list[torch.Tensor]:
    """All sums as one rank; its exchange memory and the peer's are shared files."""
    maps = [torch.frombuffer(mmap.mmap(fd, EXCHANGE_BYTES), dtype=torch.uint8) for fd in fds]
    exchange = Exchange(torch.tensor([memory.data_ptr() for memory in maps]), rank)
    found = [
        peer_sum(x, exchange, in_parts=in_parts)
        for x, (_, _, in_parts) in zip(inputs(rank), SUMS, strict=True)
    ]
    x, (residual, weight) = inputs(rank)[1].view(3, 500), norm_inputs()
    for is_sent, in_parts in ((False, False), (False, True), (True, True), (True, False)):
        if is_sent:
            send(x, maps, rank, in_parts=in_parts)
        summand = None if is_sent else x
        normed = peer_add_rms_norm(summand, residual, weight, 1e-5, exchange, in_parts=in_parts)
        found += [normed, residual.clone()]  # each adds to what the one before left
    return found + sample_part(exchange)


def check_sums(found: list[torch.Tensor], size: int) -> None:
    """What the kernels made of SUMS, and of sums that are normed."""
    for number, mine in enumerate(found[: len(SUMS)]):
        total = inputs(0)[number].float()
        for rank in range(1, size):
            total += inputs(rank)[number].float()
        assert torch.equal(mine, total.to(mine.dtype))
    residual, weight = norm_inputs()
    summand = found[1].view(3, 500)
    for normed, after in zip(found[len(SUMS) :: 2], found[len(SUMS) + 1 :: 2], strict=True):
        residual = residual + summand
        assert torch.equal(after, residual)
        torch.testing.assert_close(normed, rms_norm(residual, weight, 1e-5))


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_get_the_sum_in_their_order(size: int) -> None:
    fds = [os.memfd_create(f"exchange-{rank}") for rank in range(size)]
    for fd in fds:
        os.ftruncate(fd, EXCHANGE_BYTES)
        prepare_exchange(torch.frombuffer(mmap.mmap(fd, EXCHANGE_BYTES), dtype=torch.uint8))
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); import conftest\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import test_peer_reduce as t, torch\n"
        f"found = t.run_rank(int(sys.argv[1]), {fds})\n"
        "print(t.json.dumps([x.float().tolist() for x in found]))"
    )
    with contextlib.ExitStack() as stack:
        peers = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", program, str(rank)],
                    stdout=subprocess.PIPE,
                    pass_fds=fds,
                    text=True,
                )
            )
            for rank in range(1, size)
        ]
        for peer in peers:
            stack.callback(peer.kill)
        ours = run_rank(0, fds)
        outputs = [peer.communicate(timeout=60)[0] for peer in peers]
    check_sums(ours[:-2], size)
    token_ids, logprobs = sample(all_logits(), WISHES)
    assert ours[-2].tolist() == token_ids.tolist() and token_ids[0] == 2300
    torch.testing.assert_close(ours[-1], logprobs, rtol=1e-5, atol=1e-5)
    for output in outputs:
        theirs = [torch.tensor(values) for values in json.loads(output)]
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine.float(), other)
    for fd in fds:
        os.close(fd)
