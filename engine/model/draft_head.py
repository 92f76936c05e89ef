"""Draft heads: a decoder layer that reads the model's hidden state of a token, and the next token.

EAGLE-3 (Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test"), with the weight names of its published checkpoints:

    the model's layers  ─ inputs of three ─► fc ─┐         ┌───────────── for the next draft
    the next token ─► embedding ─► norm ─┐       ▼ state   │
                                         └► [ embed, norm(state) ] ─► attention ─► MLP ─► state
                                                                            norm ─► lm_head ─► d2t

Multi-token prediction (MTP), as MiMo publishes it with the model:

    the model's last norm ─► norm ─┐                      ┌───── for the next draft
    the next token ─► embedding ─► norm ─► input_proj ─► layer ─► norm ─► the model's LM head

At position p a head reads the state of p and token p + 1, and drafts token p + 2. After the last
known token it reads its own state. Knows no file and no step. What each head has:

    fuse       `Decoder.kept` of a step [tokens, features] -> states [tokens, hidden]
    forward    the next states [tokens, hidden], from `states` [tokens, hidden], their positions
               [tokens], and the tokens that follow them; may overwrite `states`
    logits     [rows, hidden] -> [rows, the model's vocabulary]; -inf for tokens never drafted
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.attention.attention import AttentionBackend
from .construction.decoder import make_attention, make_layer
from .construction.layers import all_outputs, make_embedding, make_linear, make_mlp, make_norm
from .layers import Embedding, Linear, RMSNorm
from .model_config import ModelConfig
from .rotary import make_rotary_embedding
from .weights.placement import Placement


class Eagle3Head:
    """An EAGLE-3 head, with its own `config`. Its LM head has `num_drafted` ids; id i is the
    model's id i + offsets[i]; the loader fills `offsets`. `embed`, `lm_head`: those of the model;
    None: the head has its own. `targets`: all float tensors that a checkpoint must have."""

    def __init__(
        self,
        config: ModelConfig,
        placement: Placement,
        *,
        num_features: int,
        num_drafted: int,
        embed: Embedding | None,
        lm_head: Embedding | None,
        has_normed_residual: bool,
    ) -> None:
        self.hidden_size = hidden = config.hidden_size
        eps = config.rms_norm_eps
        self._vocab_size, self._has_normed_residual = config.vocab_size, has_normed_residual
        placement = placement.of_model()
        self.targets = placement.targets
        self._embed = embed or make_embedding("embed_tokens", config.vocab_size, hidden, placement)
        self._lm_head = lm_head or make_embedding(
            "lm_head", num_drafted, hidden, placement, is_head=True
        )
        self._fc = make_linear(Linear, [all_outputs("fc", hidden)], num_features, placement)

        def norm(name: str) -> RMSNorm:
            return make_norm(name, hidden, eps, placement)

        self._input_norm = norm("midlayer.input_layernorm")
        self._hidden_norm = norm("midlayer.hidden_norm")
        self._post_attention_norm = norm("midlayer.post_attention_layernorm")
        self._norm = norm("norm")
        self._attention = make_attention(0, "midlayer.self_attn", config, placement, 2 * hidden)
        inner, has_bias = config.intermediate_size, config.has_mlp_bias
        self._mlp = make_mlp("midlayer.mlp", hidden, inner, placement, has_bias=has_bias)
        self._rotary = make_rotary_embedding(config.rope, config.head_dim, placement.device)
        self.offsets = torch.zeros(num_drafted, dtype=torch.int64, device=placement.device)

    def fuse(self, features: Tensor) -> Tensor:
        return self._fc(features)

    def forward(
        self, token_ids: Tensor, states: Tensor, positions: Tensor, attention: AttentionBackend
    ) -> Tensor:
        embedded, normed = self._input_norm(self._embed(token_ids)), self._hidden_norm(states)
        assert isinstance(embedded, Tensor) and isinstance(normed, Tensor)
        both = torch.cat([embedded, normed], dim=-1)
        residual = normed if self._has_normed_residual else states
        attended = self._attention(both, self._rotary(positions), attention)
        x = self._mlp(self._post_attention_norm.add(attended, residual))
        self._norm.add(x, residual)  # only the sum is needed
        return residual

    def logits(self, states: Tensor) -> Tensor:
        normed = self._norm(states)
        assert isinstance(normed, Tensor)
        drafted = self._lm_head.project(normed)
        num_drafted = len(self.offsets)
        if num_drafted == self._vocab_size:
            return drafted
        ids = torch.arange(num_drafted, device=states.device) + self.offsets
        return drafted.new_full((len(states), self._vocab_size), -torch.inf).index_copy_(
            1, ids, drafted
        )


class MtpHead:
    """An MTP head, whose weight names begin with `prefix`. It uses the model's embedding and LM
    head. `targets`: the tensors that a checkpoint must have beside the model's."""

    def __init__(
        self,
        config: ModelConfig,
        placement: Placement,
        prefix: str,
        *,
        embed: Embedding,
        lm_head: Embedding,
    ) -> None:
        self.hidden_size = hidden = config.hidden_size
        eps, placement = config.rms_norm_eps, placement.of_model()
        self.targets = placement.targets
        self._embed, self._lm_head = embed, lm_head
        self._token_norm, self._hidden_norm, self._final_norm = (
            make_norm(f"{prefix}.{name}_layernorm", hidden, eps, placement)
            for name in ("token", "hidden", "final")
        )
        outputs = [all_outputs(f"{prefix}.input_proj", hidden)]
        self._input = make_linear(Linear, outputs, 2 * hidden, placement)
        self._layer = make_layer(0, 0, config, placement, None, prefix)
        self._rotary = make_rotary_embedding(config.rope, config.head_dim, placement.device)

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def forward(
        self, token_ids: Tensor, states: Tensor, positions: Tensor, attention: AttentionBackend
    ) -> Tensor:
        # At position 0 the head was trained with a zero embedding.
        tokens = self._embed(token_ids).masked_fill((positions == 0)[:, None], 0)
        embedded, normed = self._token_norm(tokens), self._hidden_norm(states)
        assert isinstance(embedded, Tensor) and isinstance(normed, Tensor)
        residual = self._input(torch.cat([normed, embedded], dim=-1))
        x = self._layer(None, residual, self._rotary(positions), attention)
        found = self._final_norm.add(x, residual)
        assert isinstance(found, Tensor)
        return found

    def logits(self, states: Tensor) -> Tensor:
        return self._lm_head.project(states)


Head = Eagle3Head | MtpHead
