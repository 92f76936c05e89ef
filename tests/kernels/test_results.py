"""A step's tokens to the host."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.results_triton import write_results


@pytest.mark.parametrize("num_rows", [0, 1, 127, 128, 300])
def test_the_first_rows_are_written_and_nothing_else(num_rows: int) -> None:
    token_ids = torch.randint(0, 2**40, (400,))
    logprobs = torch.randn(400)
    written = torch.full((400,), -1), torch.full((400,), 7.0)
    write_results(token_ids, logprobs, *(each[:num_rows] for each in written))
    assert torch.equal(written[0][:num_rows], token_ids[:num_rows])
    assert torch.equal(written[1][:num_rows], logprobs[:num_rows])
    assert (written[0][num_rows:] == -1).all() and (written[1][num_rows:] == 7.0).all()
