"""A model of Qwen2's shape with a head for multi-token prediction, in the format of MiMo, and the
head's drafts computed with transformers' layer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from .eagle3_heads import HIDDEN, write_target

PREFIX = "model.mtp_layers.0"
NORMS = ("token", "hidden", "final")


class ReferenceMtp:
    """A head without a cache: each draft computes all positions."""

    def __init__(self, model: PreTrainedModel, layer: Qwen2DecoderLayer) -> None:
        self.model, self.layer = model, layer
        self.norms = {name: torch.rand(HIDDEN) + 0.5 for name in NORMS}
        self.input = torch.randn(HIDDEN, 2 * HIDDEN) * 0.25
        self.input[:, HIDDEN:] += torch.eye(HIDDEN)  # the token determines the next one

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, (HIDDEN,), self.norms[name], self.model.config.rms_norm_eps)

    def drafts(self, tokens: Sequence[int], most: int) -> list[int]:
        """Greedy drafts after `tokens`."""
        decoder, found = self.model.model, [*tokens]
        with torch.inference_mode():
            states = decoder(torch.tensor([tokens])).last_hidden_state[:, :-1]
            for _ in range(most):
                embedded = decoder.embed_tokens(torch.tensor([found[1:]]))
                embedded[:, 0] = 0
                both = [self._norm(states, "hidden"), self._norm(embedded, "token")]
                x = torch.cat(both, -1) @ self.input.T
                positions = torch.arange(x.shape[1])[None]
                rope = decoder.rotary_emb(x, positions)
                mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1)[None, None]
                x = self.layer(x, attention_mask=mask, position_embeddings=rope)
                last = self._norm(x[:, -1:], "final")
                found.append(int(self.model.lm_head(last).argmax()))
                states = torch.cat([states, last], 1)
        return found[len(tokens) :]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by their published names."""
        found = {f"{PREFIX}.{name}": one.detach() for name, one in self.layer.named_parameters()}
        found |= {f"{PREFIX}.{name}_layernorm.weight": one for name, one in self.norms.items()}
        return found | {f"{PREFIX}.input_proj.weight": self.input}


def write_model_with_head(folder: Path, attention: float = 1.0) -> ReferenceMtp:
    """`attention`: a factor on the output of the head's attention."""
    model = write_target(folder, "Qwen2ForCausalLM")
    torch.manual_seed(4)
    layer = Qwen2DecoderLayer(model.config, 0).eval()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(1.0 if weight.shape == (HIDDEN,) else 0.0, 0.12)
        layer.self_attn.o_proj.weight.mul_(attention)
    head = ReferenceMtp(model, layer)
    add_tensors(folder, head.tensors())
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    config |= {"auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    return head


def add_tensors(folder: Path, tensors: dict[str, Tensor], without: str | None = None) -> None:
    path = folder / "model.safetensors"
    found = load_file(path) | {name: one.contiguous() for name, one in tensors.items()}
    found.pop(without or "", None)
    save_file(found, path)
