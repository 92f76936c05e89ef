"""Draft heads: checks that a head fits the engine's model, and loads it (steps: head_steps.py).
`make_draft_model` chooses between the draft model and the heads by `--speculative-config`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from ....core.engine_config import EngineConfig
from ....core.errors import StartupFailed
from ....core.model_dir import read_json
from ....core.speculative_config import DRAFT_MODEL, MTP, NGRAM
from ...model.config_fields import Fields
from ...model.decoder import Decoder
from ...model.draft_head import Eagle3Head, Head, MtpHead
from ...model.fingerprint import model_hash
from ...model.model_config import ARCHITECTURES, ModelConfig, read_model_config
from ...model.weights.checkpoint import load_weights, read_integers, tensor_names
from ...model.weights.placement import Placement
from ...model.weights.weight_files import weights_identity
from .draft_model import DraftModel

_ARCHITECTURES = {"LlamaForCausalLMEagle3": ARCHITECTURES["LlamaForCausalLM"]}
_NUM_KEPT = 3  # number of the model's layers whose inputs the head reads
_IDS, _OF_THE_MODEL = "d2t", "t2d"  # draft to target ids; the inverse, which is not used


class HeadModel(DraftModel):
    """One rank's part of the EAGLE-3 head that `--speculative-config` names."""

    kind = "draft head"

    def __init__(
        self, config: EngineConfig, model_dir: Path, target: ModelConfig, placement: Placement
    ) -> None:
        assert config.speculation is not None
        method = config.speculation.method
        if config.load_format == "dummy":
            raise StartupFailed(f'--load-format dummy is not for "method": "{method}"')
        super().__init__(config, model_dir, target, placement)
        self._check_fields(target)

    def _choose_placement(self, target: Placement) -> Placement:
        return dataclasses.replace(target, quantization=None, stays_quantised=False)

    def _check_fields(self, target: ModelConfig) -> None:
        own = self._fields
        if self.config.num_layers != 1:
            raise own.error(f"num_hidden_layers is {self.config.num_layers}, a head has 1")
        if self.config.quantization is not None:
            raise own.error("quantization_config is not supported for draft heads")
        if self.config.has_tied_embeddings:
            raise own.error("tie_word_embeddings is not supported for draft heads")
        hidden = own.positive("target_hidden_size", self.config.hidden_size)
        if hidden != target.hidden_size:
            name = "hidden_size" if own.get("target_hidden_size") is None else "target_hidden_size"
            raise own.error(f"{name} is {hidden}, the model's hidden_size {target.hidden_size}")
        self._num_features = _NUM_KEPT * hidden
        self._num_drafted = own.positive("draft_vocab_size", target.vocab_size)
        if self._num_drafted > target.vocab_size:
            raise own.error(f"draft_vocab_size is above the model's {target.vocab_size}")
        self._kept = self._kept_layers(target.num_layers)

    def _read_config(self) -> ModelConfig:
        path = self._dir / "config.json"
        self._fields = Fields(path, read_json(path))
        return read_model_config(self._dir, known=_ARCHITECTURES)

    def _kept_layers(self, num_layers: int) -> tuple[int, ...]:
        """The model's layers whose inputs the head reads. The config field has the layers before
        them, whose outputs these are."""
        section, name = self._fields.section("eagle_config"), "eagle_aux_hidden_state_layer_ids"
        if not section.flag("use_aux_hidden_state", True):
            raise self._fields.error("use_aux_hidden_state is false, which is not supported")
        found = tuple(layer + 1 for layer in section.counts(name))
        found = found or (2, num_layers // 2, num_layers - 3)
        is_fit = len(set(found)) == _NUM_KEPT and all(0 < layer < num_layers for layer in found)
        if not is_fit:
            layers = [layer - 1 for layer in found]
            raise self._fields.error(
                f"{name} is {layers}, not {_NUM_KEPT} of the model's {num_layers} layers but "
                "the last"
            )
        return found

    def load_beside(self, target: Decoder, notes: list[str]) -> tuple[Head, dict[str, str]]:
        """Load the head, and make `target` keep the layer inputs that it reads. See DraftModel."""
        names = tensor_names(self._dir)
        shares_embed = "embed_tokens.weight" not in names
        if shares_embed and self.config.hidden_size != self._num_features // _NUM_KEPT:
            raise StartupFailed(f"{self._dir} lacks the tensor embed_tokens.weight")
        is_whole = self._num_drafted == self.config.vocab_size
        shares_head = shares_embed and is_whole and "lm_head.weight" not in names

        is_normed = self._fields.flag("norm_before_residual")
        found = Eagle3Head(
            self.config,
            self._placement,
            num_features=self._num_features,
            num_drafted=self._num_drafted,
            embed=target.embed if shares_embed else None,
            lm_head=target.lm_head if shares_head else None,
            has_normed_residual=is_normed,
        )
        load_weights(self._dir, found.targets, ignored=frozenset((_IDS, _OF_THE_MODEL)))
        if _IDS in names or not is_whole:
            found.offsets.copy_(self._read_offsets())
        target.kept_layers = self._kept
        notes.append(f"draft head: reads the inputs of layers {self._kept}")
        identity = f"{weights_identity(self._dir)} {self._kept} {is_normed}"
        return found, {"draft_model": model_hash(self.config, identity)}

    def _read_offsets(self) -> torch.Tensor:
        size, most = self._num_drafted, self.config.vocab_size
        offsets = read_integers(self._dir, _IDS, size, most)
        ids = torch.arange(size) + offsets
        if (ids < 0).any() or (ids >= most).any() or len(set(ids.tolist())) < size:
            raise StartupFailed(f"{self._dir}: {_IDS} has invalid or duplicate ids")
        return offsets


class MtpModel(HeadModel):
    """One rank's part of the MTP head in the model's own checkpoint."""

    def _read_config(self) -> ModelConfig:
        config = read_model_config(self._dir)
        prefix = ARCHITECTURES[config.architecture].mtp_prefix
        if prefix is None:
            known = [name for name, row in ARCHITECTURES.items() if row.mtp_prefix]
            raise StartupFailed(
                f'--speculative-config: {config.architecture} has no head for "method": "{MTP}"',
                hint=f"supported are: {', '.join(known)}",
            )
        self._prefix = prefix
        return dataclasses.replace(config, num_layers=1, windows=(None,))

    def _check_fields(self, target: ModelConfig) -> None:
        if target.quantization is not None:
            raise StartupFailed(f"{self._dir}: quantised draft heads are not supported")

    def load_beside(self, target: Decoder, notes: list[str]) -> tuple[Head, dict[str, str]]:

        shared = {"embed": target.embed, "lm_head": target.lm_head}
        found = MtpHead(self.config, self._placement, self._prefix, **shared)
        names = tensor_names(self._dir)
        others = frozenset(name for name in names if not name.startswith(f"{self._prefix}."))
        load_weights(self._dir, found.targets, ignored=others)
        return found, {"draft_model": model_hash(self.config, weights_identity(self._dir))}


def make_draft_model(
    config: EngineConfig, model_dir: Path, target: ModelConfig, placement: Placement
) -> DraftModel | None:
    """The draft model or head of `config`, or None."""
    method = NGRAM if config.speculation is None else config.speculation.method
    if method == NGRAM:
        return None
    kind = {DRAFT_MODEL: DraftModel, MTP: MtpModel}.get(method, HeadModel)
    return kind(config, model_dir, target, placement)
