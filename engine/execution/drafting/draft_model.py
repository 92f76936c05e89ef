"""A small model that drafts for the engine's model, on the same ranks and in the same KV pool.

    layers of a block   [ 0 .. of the engine's model .. n | n .. of the draft model .. )

So block tables, prefix cache, host memory, hand-off and peers include the KV of both. Checks that
the two models fit together and loads the draft model; its steps are in draft_steps.py.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from ....core.engine_config import EngineConfig
from ....core.errors import StartupFailed
from ....core.model_dir import resolve_model_dir
from ...kv.kv_memory import KvLayout
from ...model.decoder import Decoder
from ...model.draft_head import Head
from ...model.fingerprint import model_hash
from ...model.model_config import ModelConfig, read_model_config
from ...model.sharding import check_divisible, heads_of_rank
from ...model.stages import LayerRange
from ...model.weights.placement import Placement
from ..device import choose_placement
from ..model_loading import load_model


class DraftModel:
    """One rank's part of the model that `--speculative-config` names."""

    kind = "draft model"

    def __init__(
        self, config: EngineConfig, model_dir: Path, target: ModelConfig, placement: Placement
    ) -> None:
        """Check that the model can draft for `target`, the model in `model_dir`, placed by
        `placement`. Raises StartupFailed."""
        assert config.speculation is not None
        named = config.speculation.model
        self._config = config
        self._dir = model_dir if named is None else resolve_model_dir(named)
        self.config = own = self._read_config()
        ranks = placement.communicator
        check_divisible(own, ranks.size)
        self.heads = heads_of_rank(own, ranks.rank, ranks.size)
        self._kv_heads = heads_of_rank(target, ranks.rank, ranks.size).num_kv_heads
        self._check_vocabulary(model_dir, target)
        self._check_heads(target)
        self._placement = dataclasses.replace(
            self._choose_placement(placement),
            layers_in_front=target.num_layers,
            pool_kv_heads=self._kv_heads,
        )

    def _choose_placement(self, target: Placement) -> Placement:
        """The placement of its weights, chosen as for a model on its own."""
        own = choose_placement(self._config, self.config, target.communicator)
        return dataclasses.replace(own, dtype=target.dtype, has_expert_parallel=False)

    def _read_config(self) -> ModelConfig:
        return read_model_config(self._dir)

    @property
    def attention_config(self) -> ModelConfig:
        """The config of an attention backend over the whole pool: its own, its windows preceded by
        None for each layer of the target."""
        windows = (None,) * self._placement.layers_in_front + self.config.windows
        return dataclasses.replace(self.config, windows=windows)

    def beside(self, layout: KvLayout) -> KvLayout:
        """The layout of blocks that hold the KV of both models."""
        return dataclasses.replace(layout, num_layers=layout.num_layers + self.config.num_layers)

    def load_beside(
        self, target: Decoder, notes: list[str]
    ) -> tuple[Decoder | Head, dict[str, str]]:
        """Load the model; returns it and its part of the engine's fingerprint. Appends lines for
        people to `notes`. Raises StartupFailed."""
        own, found = self.config, list[str]()
        layers = LayerRange(0, own.num_layers, own.num_layers)
        model, identity = load_model(
            self._config, self._dir, own, layers, self._placement, None, found
        )
        notes += [f"draft model: {note}" for note in found]
        return model, {"draft_model": model_hash(own, identity)}

    def _check_vocabulary(self, model_dir: Path, target: ModelConfig) -> None:
        """Check that token ids mean the same in both models. Raises StartupFailed."""
        here, size = f"the {self.kind} {self._dir}", self.config.vocab_size
        if size != target.vocab_size:
            raise StartupFailed(
                f"{here} has a vocab_size of {size}, the model one of {target.vocab_size}"
            )
        vocabularies = [_vocabulary(folder / "tokenizer.json") for folder in (self._dir, model_dir)]
        if None not in vocabularies and vocabularies[0] != vocabularies[1]:
            raise StartupFailed(f"{here} has another vocabulary in its tokenizer.json")

    def _check_heads(self, target: ModelConfig) -> None:
        """Check that its KV fits into blocks laid out for the target. Raises StartupFailed."""
        own, here = self.config, f"the {self.kind} {self._dir}"
        if own.head_dim != target.head_dim:
            raise StartupFailed(
                f"{here} has a head_dim of {own.head_dim}, the model one of {target.head_dim}: "
                "their KV is stored in the same blocks"
            )
        if self._kv_heads % self.heads.num_kv_heads or self.heads.num_heads % self._kv_heads:
            raise StartupFailed(
                f"{here} has {own.num_heads} heads with num_key_value_heads of {own.num_kv_heads}, "
                f"which cannot be stored as the model's {target.num_kv_heads}"
            )


def _vocabulary(path: Path) -> object:
    """The vocabulary in a tokenizer.json, in the file's form; None if there is none."""
    try:
        model = json.loads(path.read_text(encoding="utf-8"))["model"]
        return model["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
