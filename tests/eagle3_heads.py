"""EAGLE-3 heads for small models: the formula in plain torch, trained for seconds, written as
published checkpoints are."""

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
KEPT = (1, 2, 3)  # whose inputs the head reads
DRAFTED = tuple(id for id in range(VOCAB) if id % 16 != 15)  # its vocabulary
EPS, THETA = 1e-6, 10_000.0


def write_target(folder: Path) -> PreTrainedModel:
    """A model whose next token depends on the last few."""
    return write_checkpoint(
        folder,
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


class ReferenceHead(nn.Module):
    """Without any cache: each draft computes all positions."""

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
        """[..., tokens, hidden] of both -> the states behind."""
        both = torch.cat([self._norm(embedded, 0), self._norm(states, 1)], -1)
        q, k, v = (_heads(part(both)) for part in (self.q, self.k, self.v))
        q, k = _rotated(q), _rotated(k)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, -3) for part in (k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        states = states + self.o(attended.transpose(-3, -2).flatten(-2))
        normed = self._norm(states, 2)
        return states + self.down(functional.silu(self.gate(normed)) * self.up(normed))

    def logits(self, states: Tensor) -> Tensor:
        """Of DRAFTED."""
        return self.head(self._norm(states, 3))

    def _norm(self, x: Tensor, which: int) -> Tensor:
        return functional.rms_norm(x, (HIDDEN,), self.norms[which], EPS)

    def drafts(self, model: PreTrainedModel, tokens: Sequence[int], most: int) -> list[int]:
        """Greedy ones behind `tokens`."""
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
    """[..., heads, tokens, dim], the halves turned against each other."""
    frequencies = THETA ** (-torch.arange(0, DIM, 2) / DIM)
    angles = torch.arange(x.shape[-2])[:, None] * frequencies
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def trained_head(model: PreTrainedModel, num_steps: int = 250) -> ReferenceHead:
    """Of greedy continuations: it drafts several of them rightly."""
    head, draw = ReferenceHead(), torch.Generator().manual_seed(1)
    prompts = torch.randint(3, VOCAB, (48, 8), generator=draw)
    texts = model.generate(
        prompts, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    with torch.no_grad():
        read = features(model, texts)
        embedded = model.get_input_embeddings()(texts)[:, 1:-1]
    place = {token: index for index, token in enumerate(DRAFTED)}
    goals = texts[:, 2:].clone().apply_(lambda token: place.get(token, -100))
    optimizer = torch.optim.Adam(head.parameters(), 3e-3)
    for _ in range(num_steps):
        states, loss = head.fc(read[:, :-2]), torch.zeros(())
        for _ in range(2):  # what it reads of itself, too
            behind = head.behind(embedded, states)
            loss = loss + functional.cross_entropy(head.logits(behind).transpose(1, 2), goals)
            states = torch.cat([states[:, :1], behind[:, :-1]], 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.eval().requires_grad_(False)


def head_config() -> dict[str, object]:
    """config.json as published ones have it."""
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
    """By their published names; the embedding is the model's."""
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
