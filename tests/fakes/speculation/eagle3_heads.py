"""EAGLE-3 heads for small models: the formula in plain torch, accurate by construction, written
like published checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from checkpoints import write_checkpoint
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

VOCAB, HIDDEN, HEADS, KV_HEADS, DIM, INNER = 64, 48, 4, 2, 16, 96
CODE = 32  # dimensions of an embedding that distinguish tokens; the last one is 1
KEPT = (1, 2, 3)  # layers whose inputs the head reads
DRAFTED = tuple(id for id in range(VOCAB) if id % 16 != 15)  # the head's vocabulary
EPS, THETA = 1e-6, 10_000.0


def write_target(folder: Path, architecture: str = "LlamaForCausalLM") -> PreTrainedModel:
    """A model in which each token has a usual next token, which other tokens change now and
    then."""
    model = write_checkpoint(
        folder,
        architecture=architecture,
        seed=3,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        initializer_range=0.12,
    )
    codes, usual = codes_of_tokens(), usual_tokens()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.4)
        embedding = model.get_input_embeddings().weight
        embedding.zero_()[:, :CODE] = codes
        embedding[:, -1] = 1.0
        model.get_output_embeddings().weight[usual, :CODE] += codes
    model.save_pretrained(folder)
    return model


def codes_of_tokens() -> Tensor:
    """[vocabulary, CODE] of 1 and -1."""
    draw = torch.Generator().manual_seed(7)
    return torch.randint(0, 2, (VOCAB, CODE), generator=draw) * 2.0 - 1.0


def usual_tokens() -> Tensor:
    """[vocabulary]: the usual next token."""
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(8))


class ReferenceHead(nn.Module):
    """A head without a cache: each draft computes all positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)

        def linear(outputs: int, inputs: int) -> nn.Linear:
            made = nn.Linear(inputs, outputs, bias=False)
            nn.init.normal_(made.weight, 0.0, inputs**-0.5)
            return made

        self.fc = linear(HIDDEN, 3 * HIDDEN)
        self.q, self.k, self.v = (
            linear(heads * DIM, 2 * HIDDEN) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        self.o = linear(HIDDEN, HEADS * DIM)
        self.gate, self.up = linear(INNER, HIDDEN), linear(INNER, HIDDEN)
        self.down = linear(HIDDEN, INNER)
        self.head = linear(len(DRAFTED), HIDDEN)
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(HIDDEN)) for _ in range(4)])

    def behind(self, embedded: Tensor, states: Tensor) -> Tensor:
        """[..., tokens, hidden] of both -> the states after the layer."""
        both = torch.cat([self._norm(embedded, 0), self._norm(states, 1)], -1)
        q, k, v = (_heads(part(both)) for part in (self.q, self.k, self.v))
        q, k = _rotated(q), _rotated(k)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, -3) for part in (k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        states = states + self.o(attended.transpose(-3, -2).flatten(-2))
        normed = self._norm(states, 2)
        return states + self.down(functional.silu(self.gate(normed)) * self.up(normed))

    def logits(self, states: Tensor) -> Tensor:
        """Logits over DRAFTED."""
        return self.head(self._norm(states, 3))

    def _norm(self, x: Tensor, which: int) -> Tensor:
        return functional.rms_norm(x, (HIDDEN,), self.norms[which], EPS)

    def drafts(self, model: PreTrainedModel, tokens: Sequence[int], most: int) -> list[int]:
        """Greedy drafts after `tokens`."""
        with torch.inference_mode():
            embed = model.get_input_embeddings()
            states, found = self.fc(features(model, torch.tensor([tokens])))[0, :-1], [*tokens]
            for _ in range(most):
                following = embed(torch.tensor(found[1:]))
                last = self.behind(following, states)[-1:]
                found.append(DRAFTED[int(self.logits(last).argmax())])
                states = torch.cat([states, last])
            return found[len(tokens) :]


def features(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """[batch, tokens] -> [batch, tokens, 3 * hidden]"""
    found = model(tokens, output_hidden_states=True).hidden_states
    return torch.cat([found[layer] for layer in KEPT], -1)


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, DIM)).transpose(-3, -2)


def _rotated(x: Tensor) -> Tensor:
    """RoPE on [..., heads, tokens, dim], with rotated halves."""
    frequencies = THETA ** (-torch.arange(0, DIM, 2) / DIM)
    angles = torch.arange(x.shape[-2])[:, None] * frequencies
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def make_head() -> ReferenceHead:
    """It attends mostly to its own position, and predicts the usual next tokens; all else is
    noise."""
    head, codes = ReferenceHead(), codes_of_tokens()
    with torch.no_grad():
        for part in (head.fc, head.q, head.k, head.v, head.o, head.down, head.head):
            part.weight.mul_(0.2)
        for part in (head.q, head.k):  # equal vectors: RoPE makes near positions similar
            part.weight.unflatten(0, (-1, DIM))[:, :3, HIDDEN - 1] += 5.0
        half = torch.eye(DIM)
        for index in range(KV_HEADS):
            code = slice(index * DIM, (index + 1) * DIM)
            head.v.weight[code, code] += half
            first = index * HEADS // KV_HEADS * DIM
            head.o.weight[code, first : first + DIM] += 2 * half
        before = usual_tokens().argsort()
        head.head.weight[:, :CODE] += codes[before[list(DRAFTED)]]
    return head.eval().requires_grad_(False)


def head_config() -> dict[str, object]:
    """config.json as in published checkpoints."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "draft_vocab_size": len(DRAFTED),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in KEPT]},
    }


def head_tensors(head: ReferenceHead) -> dict[str, Tensor]:
    """The tensors by their published names; the embedding is the model's."""
    linears = {
        "fc": head.fc,
        "lm_head": head.head,
        **{f"midlayer.self_attn.{name}_proj": getattr(head, name) for name in "qkvo"},
        **{f"midlayer.mlp.{name}_proj": getattr(head, name) for name in ("gate", "up", "down")},
    }
    names = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    norms = [*(f"midlayer.{name}" for name in names), "norm"]
    found = {f"{name}.weight": part.weight.detach() for name, part in linears.items()}
    found |= {f"{n}.weight": w.detach() for n, w in zip(norms, head.norms, strict=True)}
    found["d2t"] = torch.tensor(DRAFTED) - torch.arange(len(DRAFTED))
    found["t2d"] = torch.tensor([id in DRAFTED for id in range(VOCAB)])
    return found


def write_head(
    folder: Path, tensors: dict[str, Tensor], config: dict[str, object] | None = None
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or head_config()))
    save_file(
        {name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors"
    )
