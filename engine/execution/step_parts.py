"""What steps on either device share: the batch as arrays, and extras of few requests.

Further samples, alternatives, beams' candidates and the prompt's scores are computed behind the
ordinary sampling, from the same logits, for those rows alone; they come to the host with the step's
own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...core.request.request import TokenLogprobs
from ...kernels.attention.attention import AttentionMetadata
from ...kernels.sampling.sample_spec import SampleSpec
from ...kernels.sampling.sampling import candidates, sample, token_logprobs, top_logprobs
from ...kernels.upload import upload
from ..kv.block_pool import PADDING_BLOCK
from ..lora.rank_adapters import RankAdapters
from .batch import Candidate, SampledToken, SequenceSlice

Int64s = NDArray[np.int64]
WholeLogits = Callable[[Sequence[int]], Tensor]  # of some of the rows

# BLAS multiplies a single row by another routine, whose sums round differently: with this second
# row a decode alone gives bit for bit what it gives in a batch.
PADDING_SLICE = SequenceSlice(token_ids=(0,), start=0, block_table=(PADDING_BLOCK,), sample=None)

_MAX_ROWS = 64  # worked on at once: a whole chunk's logits would not fit beside the pool


def padded(batch: Sequence[SequenceSlice]) -> Sequence[SequenceSlice]:
    """With a slice behind it that is nobody's, if it is a single row."""
    is_alone = len(batch) == 1 and batch[0].num_scheduled_tokens == 1
    return (*batch, PADDING_SLICE) if is_alone else batch


def flatten(batch: Sequence[SequenceSlice], block_size: int) -> Int64s:
    """[3, tokens] int64: token ids, positions, slots (block_id * block_size + offset)."""
    lens = [len(piece.token_ids) for piece in batch]
    arrays = np.empty((3, sum(lens)), np.int64)
    token_ids, positions, slots = arrays
    first = next((index for index, n in enumerate(lens) if n > 1), len(batch))
    if first:  # the decodes before the first chunk, all at once
        singles, mine = batch[:first], slice(first)
        token_ids[mine] = [piece.token_ids[0] for piece in singles]
        positions[mine] = [piece.start for piece in singles]
        blocks = np.array([piece.block_table[piece.start // block_size] for piece in singles])
        slots[mine] = blocks * block_size + positions[mine] % block_size
    if first < len(batch):
        _flatten_chunks(batch[first:], lens[first:], arrays[:, first:], block_size)
    return arrays


def _flatten_chunks(
    chunks: Sequence[SequenceSlice], lens: Sequence[int], arrays: Int64s, block_size: int
) -> None:
    """The same of several tokens each, all at once too: decodes with drafts are many."""
    token_ids, positions, slots = arrays
    blocks: list[int] = []
    block_offsets = []  # from a position's block to its place in `blocks`
    for piece, n in zip(chunks, lens, strict=True):
        first, last = piece.start // block_size, (piece.start + n - 1) // block_size
        block_offsets.append(len(blocks) - first)
        blocks += piece.block_table[first : last + 1]
    num_tokens = token_ids.shape[0]
    token_ids[:] = np.fromiter(
        itertools.chain.from_iterable(piece.token_ids for piece in chunks), np.int64, num_tokens
    )
    counts = np.array(lens)
    begins = np.array([piece.start for piece in chunks]) - (np.cumsum(counts) - counts)
    positions[:] = np.arange(num_tokens) + np.repeat(begins, counts)
    places = positions // block_size + np.repeat(block_offsets, counts)
    slots[:] = np.array(blocks)[places] * block_size + positions % block_size


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Where a step samples, as parallel lists: a slice with drafts has several rows, one by one."""

    slices: list[int]
    tokens: list[int]  # of the step
    specs: list[SampleSpec]

    @classmethod
    def of(cls, batch: Sequence[SequenceSlice]) -> SampledRows:
        found, end = cls([], [], []), 0
        for index, piece in enumerate(batch):
            end += len(piece.token_ids)
            if piece.sample is None:
                continue
            drafts = piece.draft_samples
            if drafts:
                found.slices.extend([index] * len(drafts))
                found.tokens.extend(range(end - 1 - len(drafts), end - 1))
                found.specs.extend(drafts)
            found.slices.append(index)
            found.tokens.append(end - 1)
            found.specs.append(piece.sample)
        return found

    def results(self, num_slices: int, tokens: Sequence[SampledToken]) -> list[SampledToken | None]:
        """`tokens` of the rows, by slice."""
        if self.slices == [*range(num_slices)]:
            return [*tokens]
        results: list[SampledToken | None] = [None] * num_slices
        for index, token in zip(self.slices, tokens, strict=True):
            if (before := results[index]) is not None:
                at_drafts = (*before.at_drafts, before._replace(at_drafts=()))
                token = token._replace(at_drafts=at_drafts)
            results[index] = token
        return results


def sampling_arrays(specs: Sequence[SampleSpec]) -> Int64s:
    """[2, rows]: keys, and the bits of the temperatures in float64."""
    keys = np.array([spec.key for spec in specs], np.uint64)
    temperatures = np.array([spec.params.temperature for spec in specs], np.float64)
    return np.stack([keys.view(np.int64), temperatures.view(np.int64)])


def decode_arrays(
    batch: Sequence[SequenceSlice], block_size: int, specs: Sequence[SampleSpec]
) -> Int64s:
    """[5, rows]: what `flatten` and `sampling_arrays` give. Rows behind `specs` are padding, and
    greedy."""
    flat = flatten(batch, block_size)
    arrays = np.zeros((5, flat.shape[1]), np.int64)
    arrays[:3] = flat
    arrays[3:, : len(specs)] = sampling_arrays(specs)
    return arrays


def metadata_of(
    batch: Sequence[SequenceSlice],
    slots: Tensor,
    *,
    is_graph: bool = False,
    graph_decodes: int | None = None,
) -> AttentionMetadata:
    """What attention plans a step by; `slots` [tokens] lie on the device."""
    return AttentionMetadata(
        query_lens=[len(piece.token_ids) for piece in batch],
        seq_lens=[piece.start + len(piece.token_ids) for piece in batch],
        block_tables=[piece.block_table for piece in batch],
        slot_mapping=slots,
        is_graph=is_graph,
        graph_decodes=graph_decodes,
        num_decode_slices=num_decodes(batch),
    )


def num_decodes(batch: Sequence[SequenceSlice]) -> int:
    """Slices at the beginning that are decodes: one token, and drafts behind it."""
    for index, piece in enumerate(batch):
        if len(piece.token_ids) != 1 + len(piece.draft_samples):
            return index
    return len(batch)


def is_decode(batch: Sequence[SequenceSlice]) -> bool:
    """Decodes alone, all of which sample."""
    samples = all(piece.sample is not None for piece in batch)
    return samples and num_decodes(batch) == len(batch)


def has_drafts(batch: Sequence[SequenceSlice]) -> bool:
    return any(piece.draft_samples for piece in batch)


def awaited_tokens(batch: Sequence[SequenceSlice]) -> Int64s:
    """[2, tokens]: which of the batch's tokens are awaited, and where among the samples of the step
    before they will be."""
    places, sources, end = list[int](), list[int](), 0
    for piece in batch:
        end += piece.num_scheduled_tokens
        if piece.follows is not None:
            num_awaited = 1 + len(piece.draft_samples)
            places += range(end - num_awaited, end)
            sources += range(piece.follows, piece.follows + num_awaited)
    return np.array([places, sources], np.int64)


def plan_adapters(
    adapters: RankAdapters | None, batch: Sequence[SequenceSlice], num_rows: int
) -> bool:
    """Let the next step of so many rows compute with its slices' adapters; whether it has any."""
    if adapters is None:
        return False
    slots = [piece.adapter_slot for piece in batch]
    if all(slot is None for slot in slots):
        adapters.rest()
        return False
    adapters.plan((piece.num_scheduled_tokens for piece in batch), slots, num_rows)
    return True


@dataclass(frozen=True, slots=True)
class _PromptPart:
    """Rows [first, first + num_rows) of the prompt tokens' results belong to the slice."""

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
        """Complete the sampled tokens, which are parallel to the rows. The step has completed."""
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
        """By slice, of its `prompt_targets`. The step has completed."""
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
    batch: Sequence[SequenceSlice],
    rows: SampledRows,
    logits: Tensor | None,
    hidden: Tensor | None,
    project: Callable[[Tensor], Tensor],
    gather: Callable[[Tensor], Tensor],
) -> Extras | None:
    """`logits`: this rank's of the `rows`; None where there are none.

    `hidden` [tokens, hidden] of all slices (None: none asks for its prompt). `project` makes whole
    logits [n, vocab] of rows of it, `gather` of rows of `logits`. None if nobody asks for anything;
    waits for nothing.
    """
    forks = [row for row, spec in enumerate(rows.specs) for _ in spec.fork_keys]
    tops = [(row, n) for row, spec in enumerate(rows.specs) if (n := spec.params.logprobs)]
    beams = [(row, n) for row, spec in enumerate(rows.specs) if (n := spec.num_candidates)]
    prompt = [index for index, piece in enumerate(batch) if piece.prompt_targets]
    if not (forks or tops or beams or prompt):
        return None

    def whole(wanted: Sequence[int]) -> Tensor:
        assert logits is not None
        return gather(logits.index_select(0, _index(wanted, logits.device)))

    fork_tokens = top_tokens = found = None
    if forks:
        fork_tokens = _sample_forks(rows.specs, forks, whole)
    if tops:
        top_tokens = _find_tops([row for row, _ in tops], whole, max(n for _, n in tops))
    if beams:
        places = [row for row, _ in beams]
        found = _find_candidates(places, [rows.specs[row] for row in places], whole)
    parts, prompt_tokens = _score_prompts(batch, prompt, hidden, project)
    return Extras(
        forks,
        tops,
        parts,
        fork_tokens,
        top_tokens,
        prompt_tokens,
        beams,
        found,
    )


def _sample_forks(
    specs: list[SampleSpec], rows: list[int], whole: WholeLogits
) -> tuple[Tensor, ...]:
    """Sample `rows` (one entry a fork) again, each under its own key."""
    wanted = [spec._replace(key=key) for spec in specs for key in spec.fork_keys]
    parts = [sample(whole(rows[part]), wanted[part]) for part in _parts(len(rows))]
    return _joined(parts)


def _find_tops(rows: list[int], whole: WholeLogits, most: int) -> tuple[Tensor, ...]:
    """The `most` likeliest of each of the rows."""
    parts = [top_logprobs(whole(rows[part]), most) for part in _parts(len(rows))]
    return _joined(parts)


def _find_candidates(
    rows: list[int], specs: list[SampleSpec], whole: WholeLogits
) -> tuple[Tensor, ...]:
    """The likeliest tokens of each of the rows, by what its spec makes of the logits."""
    most = max(spec.num_candidates for spec in specs)
    parts = [candidates(whole(rows[p]), specs[p], most) for p in _parts(len(rows))]
    return _joined(parts)


def _score_prompts(
    batch: Sequence[SequenceSlice],
    asking: list[int],
    hidden: Tensor | None,
    project: Callable[[Tensor], Tensor],
) -> tuple[list[_PromptPart], tuple[Tensor, ...] | None]:
    if not asking:
        return [], None
    assert hidden is not None, "a step of decodes has no prompt"
    begins = np.cumsum([0, *(piece.num_scheduled_tokens for piece in batch)]).tolist()
    parts: list[_PromptPart] = []
    rows: list[int] = []
    targets: list[int] = []
    for index in asking:
        piece = batch[index]
        num_top = piece.num_prompt_top
        parts.append(_PromptPart(index, len(rows), len(piece.prompt_targets), num_top))
        first = begins[index] + piece.first_prompt_target
        rows += range(first, first + len(piece.prompt_targets))
        targets += piece.prompt_targets
    most = max(part.num_top for part in parts)
    scores = []
    for part in _parts(len(rows)):
        wanted = _index(targets[part], hidden.device)
        logits = project(hidden.index_select(0, _index(rows[part], hidden.device)))
        scores.append((token_logprobs(logits, wanted), *top_logprobs(logits, most)))
    return parts, _joined(scores)


def _parts(num_rows: int) -> list[slice]:
    return [slice(start, start + _MAX_ROWS) for start in range(0, num_rows, _MAX_ROWS)]


def _joined(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """One tensor of each kind, on its way to the host."""
    return _to_host(*(torch.cat(kind) for kind in zip(*parts, strict=True)))


def _index(values: Sequence[int], device: torch.device) -> Tensor:
    return upload(np.array(values, np.int64), device)


def _to_host(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Without waiting: a GPU's go to pinned memory, which is valid once the step has completed."""
    return tuple(_pinned_copy(tensor) if tensor.is_cuda else tensor for tensor in tensors)


def _pinned_copy(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
