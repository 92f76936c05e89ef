"""Executes steps: flattens a batch, runs the model, samples. Owns weights, KV pool and sampler.

    slices -> token ids, positions, slots -> model over the paged pool -> rows that sample -> tokens

Knows no request and no schedule: what is computed together is the scheduler's choice, and a
slice's token must not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.config import EngineConfig
from ..core.errors import EngineFailed, StartupFailed
from ..core.model_dir import eos_token_ids, resolve_model_dir
from ..kernels.attention import AttentionMetadata
from ..kernels.attention_torch import TorchAttention
from ..kernels.kv_blocks import copy_blocks
from ..kernels.sampling import RowSampling, sample
from .batch import SampledToken, SampleSpec, SequenceSlice
from .block_pool import CANARY_BLOCK, PADDING_BLOCK
from .canary import canary_bytes
from .checkpoint import OnProgress, fill_dummy_weights, load_weights, weights_identity
from .device import choose_placement
from .fingerprint import fingerprint_fields
from .kv_memory import CpuKvMemory, KvLayout, choose_num_blocks
from .llama import Llama
from .model_config import ModelConfig, read_model_config

# BLAS multiplies a single row by another routine, whose sums round differently: with this second
# row a decode alone gives bit for bit what it gives in a batch.
_PADDING_SLICE = SequenceSlice(token_ids=(0,), start=0, block_table=(PADDING_BLOCK,), sample=None)


class ModelRunner:
    """A `batch.Runner` of one rank."""

    def __init__(self, config: EngineConfig, on_progress: OnProgress | None = None) -> None:
        """Load the model and take the KV memory; raises StartupFailed."""
        torch.set_num_threads(config.num_threads or 1)
        self._placement = choose_placement(config)
        self.model_dir = resolve_model_dir(config.model)
        self.model_config = read_model_config(self.model_dir)
        self.eos_token_ids = eos_token_ids(self.model_dir)
        self.max_model_len = _choose_max_model_len(config, self.model_config)
        layout = KvLayout(
            num_layers=self.model_config.num_layers,
            num_kv_heads=self.model_config.num_kv_heads,
            block_size=config.block_size,
            head_dim=self.model_config.head_dim,
            dtype=self._placement.dtype,
        )
        num_blocks = choose_num_blocks(config, layout, self.max_model_len)
        self._model = Llama(self.model_config, self._placement)
        weights = self._load(config, on_progress)
        self.fingerprint = fingerprint_fields(self.model_config, weights, layout)
        self.kv = CpuKvMemory(layout, num_blocks)
        self._attention = TorchAttention(self.kv.tensor)

    def _load(self, config: EngineConfig, on_progress: OnProgress | None) -> str:
        """Fill the weights; returns what identifies them."""
        targets = dict(self._model.targets())
        if config.load_format == "dummy":
            std = self.model_config.initializer_range
            fill_dummy_weights(targets, std=std, seed=config.seed, on_progress=on_progress)
            return f"dummy:{config.seed}"
        is_tied = self.model_config.has_tied_embeddings
        ignored = frozenset({"lm_head.weight"}) if is_tied else frozenset()
        load_weights(self.model_dir, targets, ignored=ignored, on_progress=on_progress)
        return weights_identity(self.model_dir)

    def execute(self, batch: Sequence[SequenceSlice]) -> list[SampledToken | None]:
        """Run one step: see `batch.Runner`."""
        if not batch:
            return []
        try:
            with torch.inference_mode():
                return self._execute(batch)
        except RuntimeError as error:  # torch's: out of memory, device lost
            raise EngineFailed(f"the step failed: {error}") from error

    def _execute(self, batch: Sequence[SequenceSlice]) -> list[SampledToken | None]:
        hidden = self._forward(batch)
        results: list[SampledToken | None] = [None] * len(batch)
        rows, specs, last = [], [], -1
        for index, piece in enumerate(batch):
            last += piece.num_scheduled_tokens
            if piece.sample is not None:
                rows.append((index, last))
                specs.append(piece.sample)
        if rows:
            logits = self._logits(hidden, [row for _, row in rows])
            token_ids, logprobs = sample(logits, [_row_sampling(spec) for spec in specs])
            tokens = zip(token_ids.tolist(), logprobs.tolist(), strict=True)
            for (index, _), (token_id, logprob) in zip(rows, tokens, strict=True):
                results[index] = SampledToken(token_id, logprob)
        return results

    def _forward(self, batch: Sequence[SequenceSlice]) -> Tensor:
        """Hidden states [tokens, hidden], perhaps with a padding row at the end."""
        if len(batch) == 1 and batch[0].num_scheduled_tokens == 1:
            batch = (*batch, _PADDING_SLICE)
        token_ids: list[int] = []
        positions: list[int] = []
        for piece in batch:
            token_ids += piece.token_ids
            positions += range(piece.start, piece.start + piece.num_scheduled_tokens)
        self._attention.plan(
            AttentionMetadata(
                query_lens=[piece.num_scheduled_tokens for piece in batch],
                seq_lens=[piece.start + piece.num_scheduled_tokens for piece in batch],
                block_tables=[piece.block_table for piece in batch],
                slot_mapping=self._tensor(slot_mapping(batch, self.kv.layout.block_size)),
            )
        )
        return self._model.forward(
            self._tensor(token_ids), self._tensor(positions), self._attention
        )

    def _logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """Logits [len(rows), vocab]; a single row is computed twice, as in `_PADDING_SLICE`."""
        index = rows if len(rows) > 1 else rows * 2
        return self._model.logits(hidden.index_select(0, self._tensor(index)))[: len(rows)]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, target) within the pool; no target may repeat."""
        sources, targets = zip(*pairs, strict=True) if pairs else ((), ())
        copy_blocks(self.kv.tensor, self._tensor(sources), self._tensor(targets))

    def write_canary(self, incarnation: str) -> None:
        """Fill the canary block, so that a puller can tell whether it reads this pool rightly."""
        pattern = bytearray(canary_bytes(incarnation, self.kv.block_bytes))
        block = self.kv.tensor[CANARY_BLOCK].view(torch.uint8)
        block.copy_(torch.frombuffer(pattern, dtype=torch.uint8).view(block.shape))

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._placement.device)


def slot_mapping(batch: Sequence[SequenceSlice], block_size: int) -> list[int]:
    """The slot (block_id * block_size + offset) of every token of a step."""
    return [
        piece.block_table[position // block_size] * block_size + position % block_size
        for piece in batch
        for position in range(piece.start, piece.start + piece.num_scheduled_tokens)
    ]


def _row_sampling(spec: SampleSpec) -> RowSampling:
    params = spec.params
    return RowSampling(params.temperature, params.top_k, params.top_p, spec.key)


def _choose_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    if config.max_model_len is None:
        return longest
    if not 0 < config.max_model_len <= longest:
        raise StartupFailed(
            f"--max-model-len {config.max_model_len}: the model's context has {longest} tokens"
        )
    return config.max_model_len
