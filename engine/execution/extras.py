"""What few requests get beside their tokens: further samples, alternatives, candidates of beams and
scores of the prompt.

They are computed after the ordinary sampling, from the same logits, for the rows that need them,
and are copied to the host with the step's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...core.request.request import TokenLogprobs
from ...kernels.sampling.sampling import sample, token_logprobs
from ...kernels.sampling.top_logprobs import Candidate, candidates, top_logprobs
from ...kernels.upload import upload_numbers
from .batch import SampledToken, StepBatch

Compute = Callable[[Tensor, slice], tuple[Tensor, ...]]  # from whole logits, of a part of the rows
_MAX_ROWS = 64  # processed at once: a whole chunk's logits would not fit beside the pool


@dataclass(frozen=True, slots=True)
class _PromptPart:
    """The slice whose results are rows [first, first + num_rows) of the prompt tokens' results."""

    slice_index: int
    first: int
    num_rows: int
    num_top: int


@dataclass(frozen=True, slots=True)
class Extras:
    """Tensors in host memory that are written once the step has completed."""

    forks: list[int]  # rows, one entry a further sample
    tops: list[tuple[int, int]]  # (row, number of alternatives)
    prompt: list[_PromptPart]
    fork_tokens: tuple[Tensor, ...] | None  # ids, logprobs [forks]
    top_tokens: tuple[Tensor, ...] | None  # ids, logprobs [tops, most]
    prompt_tokens: tuple[Tensor, ...] | None  # logprobs [rows]; ids, logprobs of tops
    beams: list[tuple[int, int]]  # (row, number of candidates)
    candidates: tuple[Tensor, ...] | None  # ids, scores, logprobs [beams, most]

    def add_to(self, tokens: list[SampledToken]) -> None:
        """Complete the sampled tokens, parallel to the rows; call once the step has completed."""
        if self.top_tokens is not None:
            ids, logprobs = (part.tolist() for part in self.top_tokens)
            for place, (row, num_top) in enumerate(self.tops):
                top = tuple(zip(ids[place][:num_top], logprobs[place][:num_top], strict=True))
                tokens[row] = tokens[row]._replace(top=top)
        if self.fork_tokens is not None:
            ids, logprobs = (part.tolist() for part in self.fork_tokens)
            for row, token_id, logprob in zip(self.forks, ids, logprobs, strict=True):
                one = tokens[row]
                fork = SampledToken(token_id, logprob, one.top)
                tokens[row] = one._replace(forks=(*one.forks, fork))

        if self.candidates is not None:
            columns = [part.tolist() for part in self.candidates]
            for place, (row, most) in enumerate(self.beams):
                found = tuple(map(Candidate, *(column[place][:most] for column in columns)))
                tokens[row] = tokens[row]._replace(candidates=found)

    def prompt_logprobs(self) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Scores of `prompt_targets`, by slice; call once the step has completed."""
        if self.prompt_tokens is None:
            return {}
        logprobs, top_ids, tops = (part.tolist() for part in self.prompt_tokens)

        def one(row: int, num_top: int) -> TokenLogprobs:
            pairs = zip(top_ids[row][:num_top], tops[row][:num_top], strict=True)
            return TokenLogprobs(logprobs[row], tuple(pairs))

        return {
            part.slice_index: tuple(
                one(row, part.num_top) for row in range(part.first, part.first + part.num_rows)
            )
            for part in self.prompt
        }


def compute_extras(
    batch: StepBatch,
    logits: Tensor | None,
    hidden: Tensor | None,
    project: Callable[[Tensor], Tensor],
    gather: Callable[[Tensor], Tensor],
) -> Extras:
    """The extras of a batch that has any. `logits`: this rank's, of its rows; None without rows.

    `hidden` [tokens, hidden] of all slices (None: no slice has `prompt_targets`). `project` makes
    whole logits [n, vocab] of its rows, `gather` of rows of `logits`. Does not wait for the device.
    """
    alternatives = [(row, batch.spec(row)) for row in batch.alternatives]
    forks = [row for row, spec in alternatives for _ in spec.fork_keys]
    tops = [(row, n) for row, spec in alternatives if (n := spec.params.logprobs)]
    beams = [(row, n) for row, spec in alternatives if (n := spec.num_candidates)]

    def whole(wanted: Sequence[int]) -> Tensor:
        assert logits is not None
        return gather(logits.index_select(0, upload_numbers(wanted, logits.device)))

    def of_rows(rows: Sequence[int], compute: Compute) -> tuple[Tensor, ...] | None:
        """What `compute` gives for the rows, some at a time; None without rows."""
        return _joined([compute(whole(rows[p]), p) for p in _parts(len(rows))]) if rows else None

    again = [spec._replace(key=key) for _, spec in alternatives for key in spec.fork_keys]
    most_tops, most_candidates = (max((n for _, n in each), default=0) for each in (tops, beams))
    specs = [batch.spec(row) for row, _ in beams]
    fork_tokens = of_rows(forks, lambda logits, p: sample(logits, again[p]))
    top_tokens = of_rows(
        [row for row, _ in tops], lambda logits, p: top_logprobs(logits, most_tops)
    )
    found = of_rows(
        [row for row, _ in beams], lambda logits, p: candidates(logits, specs[p], most_candidates)
    )
    parts, prompt_tokens = _score_prompts(batch, hidden, project)
    return Extras(forks, tops, parts, fork_tokens, top_tokens, prompt_tokens, beams, found)


def _score_prompts(
    batch: StepBatch,
    hidden: Tensor | None,
    project: Callable[[Tensor], Tensor],
) -> tuple[list[_PromptPart], tuple[Tensor, ...] | None]:
    first_other = len(batch.decodes)
    alternatives = [i for i, piece in enumerate(batch.others, first_other) if piece.prompt_targets]
    if not alternatives:
        return [], None
    assert hidden is not None, "a step of decodes has no prompt"
    begins = np.cumsum([0, *batch.query_lens]).tolist()
    parts: list[_PromptPart] = []
    rows: list[int] = []
    targets: list[int] = []
    for index in alternatives:
        piece = batch.others[index - first_other]
        num_top = piece.num_prompt_top
        parts.append(_PromptPart(index, len(rows), len(piece.prompt_targets), num_top))
        first = begins[index] + piece.first_prompt_target
        rows += range(first, first + len(piece.prompt_targets))
        targets += piece.prompt_targets
    most = max(part.num_top for part in parts)
    scores = []
    for part in _parts(len(rows)):
        wanted = upload_numbers(targets[part], hidden.device)
        logits = project(hidden.index_select(0, upload_numbers(rows[part], hidden.device)))
        scores.append((token_logprobs(logits, wanted), *top_logprobs(logits, most)))
    return parts, _joined(scores)


def _parts(num_rows: int) -> list[slice]:
    return [slice(start, start + _MAX_ROWS) for start in range(0, num_rows, _MAX_ROWS)]


def _joined(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """One tensor of each kind in host memory. Does not wait: copies from a GPU go to pinned memory,
    which is valid once the step has completed."""
    whole = (torch.cat(kind) for kind in zip(*parts, strict=True))
    return tuple(_pinned_copy(tensor) if tensor.is_cuda else tensor for tensor in whole)


def _pinned_copy(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
