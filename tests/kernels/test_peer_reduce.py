"""All-reduces through shared memory: the ranks are processes with Triton's interpreter.

The ranks are forks of one process, since each would otherwise import torch and Triton anew.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpreterBuilder

from baton.core.request.sampling_params import SamplingParams
from baton.kernels.layers.ops import Ops
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
from baton.kernels.sampling.sample_spec import SampleSpec
from baton.kernels.sampling.sampling import sample
from baton.kernels.sampling.sampling_triton import VocabularyPart, sample_unfiltered

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
    """The residual stream of 3 rows and the norm's weights, the same on all ranks."""
    generator = torch.Generator().manual_seed(9)
    return torch.randn(3, 500, generator=generator), torch.rand(500, generator=generator)


WISHES = [
    SampleSpec(SamplingParams(temperature=temperature), key)
    for key, temperature in enumerate((0.0, 1.0, 0.7))
]


def all_logits() -> torch.Tensor:
    """Logits of 3 rows over a vocabulary of 4501, with ties between ranks."""
    logits = torch.randn(3, 4501, generator=torch.Generator().manual_seed(4))
    logits[0, [2300, 4500]] = 9.0
    return logits


def sample_part(exchange: Exchange) -> list[torch.Tensor]:
    """Token ids and log-probabilities from a rank with its part of the logits."""
    size, rank = exchange.num_ranks, exchange.rank
    padded = torch.nn.functional.pad(all_logits(), (0, -4501 % size), value=99.0)
    part = VocabularyPart(rank, size, 4501, lambda x: peer_sum(x, exchange, in_parts=False))
    temperatures = torch.tensor([wish.params.temperature for wish in WISHES])
    keys = torch.tensor([wish.key for wish in WISHES])
    token_ids, logprobs = torch.zeros(3, dtype=torch.int64), torch.zeros(3)
    sample_unfiltered(padded.chunk(size, 1)[rank], temperatures, keys, token_ids, logprobs, part)
    return [token_ids, logprobs]


def send(x: torch.Tensor, maps: list[torch.Tensor], rank: int, *, in_parts: bool) -> None:
    """Write x [rows, dim], float32 without minus zeros, where a GEMM that sends its output
    would."""
    turns = maps[rank][:SLOTS_AT].view(torch.int32).view(MAX_PROGRAMS, -1)[:, 0]
    pitch = 1024 // len(maps) if in_parts else 0
    for row, values in enumerate(x):
        slot = (int(turns[row]) * MAX_PROGRAMS + row) * MAX_RANKS + rank
        for target, memory in enumerate(maps):
            sent = values[target * pitch :][: pitch or None]
            at = (SLOTS_AT + slot * MAX_ROW_BYTES) // 4
            memory.view(torch.float32)[at : at + len(sent)] = sent


@contextlib.contextmanager
def waiting_politely() -> Iterator[None]:
    """Ranks that wait for a peer poll its memory: here with a pause, so that the peer can run."""
    load = InterpreterBuilder.create_masked_load

    def load_with_pause(
        builder: Any, ptrs: Any, mask: Any, other: Any, cache: Any, is_volatile: bool
    ) -> Any:
        if is_volatile:
            time.sleep(0.0002)
        return load(builder, ptrs, mask, other, cache, is_volatile)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", load_with_pause)
        yield


@waiting_politely()
def run_rank(rank: int, fds: list[int]) -> list[torch.Tensor]:
    """All sums as one rank; the exchange memory of all ranks is in shared files."""
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
        found += [normed, residual.clone()]  # each adds to the residual of the one before
    return found + sample_part(exchange)


def run_ranks(fds: list[int], folder: str) -> None:
    """Run each rank as a fork of this process, which has no threads; results go to files."""
    pids = []
    for rank in range(len(fds)):
        if (pid := os.fork()) == 0:
            found = [x.float().tolist() for x in run_rank(rank, fds)]
            (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        assert os.waitpid(pid, 0)[1] == 0


def check_sums(found: list[torch.Tensor], size: int) -> None:
    """Check the kernels' results for SUMS, and the sums that are normed; `found` is in float32."""
    for number, mine in enumerate(found[: len(SUMS)]):
        total = inputs(0)[number].float()
        for rank in range(1, size):
            total += inputs(rank)[number].float()
        assert torch.equal(mine, total.to(SUMS[number][1]).float())
    residual, weight = norm_inputs()
    summand = found[1].view(3, 500)
    for normed, after in zip(found[len(SUMS) :: 2], found[len(SUMS) + 1 :: 2], strict=True):
        residual = residual + summand
        assert torch.equal(after, residual)
        torch.testing.assert_close(normed, Ops().rms_norm(residual, weight, 1e-5))


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_all_ranks_get_the_sum_in_their_order(size: int, tmp_path: Path) -> None:
    fds = [os.memfd_create(f"exchange-{rank}") for rank in range(size)]
    for fd in fds:
        os.ftruncate(fd, EXCHANGE_BYTES)
        prepare_exchange(torch.frombuffer(mmap.mmap(fd, EXCHANGE_BYTES), dtype=torch.uint8))
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); import conftest\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"import test_peer_reduce; test_peer_reduce.run_ranks({fds}, sys.argv[1])"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    subprocess.run(command, pass_fds=fds, timeout=100, check=True)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    ours, *others = [[torch.tensor(values) for values in each] for each in found]
    check_sums(ours[:-2], size)
    token_ids, logprobs = sample(all_logits(), WISHES)
    assert ours[-2].tolist() == token_ids.tolist() and token_ids[0] == 2300
    torch.testing.assert_close(ours[-1], logprobs, rtol=1e-5, atol=1e-5)
    for theirs in others:
        assert all(map(torch.equal, ours, theirs))
    for fd in fds:
        os.close(fd)
