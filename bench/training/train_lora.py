"""Train `demo-stubs`, the LoRA adapter that ships with the bundled model: functions become stubs, a
docstring and `raise NotImplementedError`. A demonstration of adapters, and nothing more.

    python bench/training/train_lora.py --out FOLDER          some seconds on a CPU

Rank 2, on the attention's output projections alone, in PEFT's files.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaForCausalLM

MODELS = Path(__file__).resolve().parents[2] / "models"
RANK, ALPHA = 2, 8
STEPS, BATCH, LEARNING_RATE = 60, 8, 1.5e-2
STUB = '    """Not written yet."""\n    raise NotImplementedError\n\n\n'

VERBS = [
    "read",
    "write",
    "open",
    "close",
    "load",
    "parse",
    "find",
    "make",
    "get",
    "set",
    "add",
    "remove",
    "check",
    "copy",
    "send",
    "run",
]
NOUNS = [
    "file",
    "path",
    "line",
    "name",
    "value",
    "node",
    "item",
    "key",
    "list",
    "table",
    "text",
    "data",
    "index",
    "module",
    "block",
]


class LoraLinear(nn.Module):
    """A frozen projection plus the adapter's product."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.base(x)
        return product + (x @ self.a.t()) @ self.b.t() * (ALPHA / RANK)


def example(chance: random.Random) -> str:
    """One or two stubs."""

    def function() -> str:
        name = f"{chance.choice(VERBS)}_{chance.choice(NOUNS)}"
        names = chance.sample(NOUNS, chance.randrange(3))
        return f"def {name}({', '.join(names)}):\n{STUB}"

    return "".join(function() for _ in range(2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="the adapter's folder")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    chance = random.Random(0)
    tokenizer = Tokenizer.from_file(str(MODELS / "demo" / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(MODELS / "demo", dtype=torch.float32)
    model.requires_grad_(False)
    added = []
    for layer in model.model.layers:
        layer.self_attn.o_proj = LoraLinear(layer.self_attn.o_proj)
        added.append(layer.self_attn.o_proj)
    optimizer = torch.optim.AdamW([p for one in added for p in (one.a, one.b)], LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(STEPS):
        rows = [tokenizer.encode(example(chance)).ids for _ in range(BATCH)]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        targets = torch.tensor([row + [-100] * (longest - len(row)) for row in rows])
        logits = model(ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    write(arguments.out, added)


def write(folder: Path, added: list[LoraLinear]) -> None:
    """Write PEFT's two files."""
    folder.mkdir(exist_ok=True)
    tensors = {}
    for index, one in enumerate(added):
        name = f"base_model.model.model.layers.{index}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = one.a.detach().bfloat16().contiguous()
        tensors[f"{name}.lora_B.weight"] = one.b.detach().bfloat16().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "base_model_name_or_path": "demo",
        "bias": "none",
        "lora_alpha": ALPHA,
        "peft_type": "LORA",
        "r": RANK,
        "target_modules": ["o_proj"],
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
