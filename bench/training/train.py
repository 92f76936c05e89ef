"""Train the bundled models, `demo` and `demo-draft`, on the Python standard library.

    python bench/training/train.py                    # both models, a few minutes on one GPU
    python bench/training/train.py --model demo-draft # the draft again, from the demo in --out

Owns the corpus, the tokenizer, the network's size, the training loop and the report, in this order;
one file, so that it runs where Baton is not installed. It writes Hugging Face folders and measures
them through `transformers`; it knows nothing of the server that runs them.
"""

import argparse
import hashlib
import json
import math
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

MODELS = Path(__file__).resolve().parents[2] / "models"
VOCAB_SIZE = 4096
END, END_ID = "<|endoftext|>", 0  # a trainer numbers its special tokens first
PROMPTS = ("def read_file(path):", "class Queue:", "import os\n")

# --- corpus ---------------------------------------------------------------------------------------

HELD_OUT_SHARE = 0.025
SKIPPED_FOLDERS = {
    "site-packages",
    "encodings",
    "pydoc_data",
    "encoded_modules",
    "crashers",
    "data",
}


def read_corpus(root: Path) -> tuple[list[str], list[str]]:
    """Every Python file under root that people wrote for people: (train, held out).

    The split and the order come from a hash of the path, so they are the same on every machine and
    neighbours in the stream are unrelated files.
    """
    train: dict[bytes, str] = {}
    held_out: dict[bytes, str] = {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if SKIPPED_FOLDERS.isdisjoint(name.split("/")) and (text := readable(path.read_bytes())):
            digest = hashlib.sha256(name.encode()).digest()
            share = int.from_bytes(digest[:4]) / 2**32
            (held_out if share < HELD_OUT_SHARE else train)[digest] = text
    return [train[key] for key in sorted(train)], [held_out[key] for key in sorted(held_out)]


def readable(raw: bytes) -> str | None:
    """The text of a source file, or None for stubs, foreign encodings and tables of data."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return None
    words = sum(char.isalpha() or char.isspace() for char in text)
    if len(text) < 200 or words < 0.68 * len(text) or max(map(len, text.split("\n"))) > 1000:
        return None
    return text.replace("\r\n", "\n")


# --- tokenizer ------------------------------------------------------------------------------------

# A newline is a token of its own and indentation is one run, so a prompt may end after either one
# and still be cut as the training text was.
SPLIT = r"\r?\n|[ \t]{2,}|[^\s\p{L}\p{N}_]?[\p{L}_]+| [\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s"


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE: the 256 bytes are in the vocabulary, so every text round-trips exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """All texts in one row of ids, with END before, between and after them."""
    ids = [END_ID]
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        ids += [*encoding.ids, END_ID]
    return torch.tensor(ids, dtype=torch.int32)


# --- network --------------------------------------------------------------------------------------

CONTEXT = 2048
_SIZES_OF = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "intermediate_size",
)
SIZES = {"demo": (256, 6, 4, 2, 768), "demo-draft": (128, 4, 2, 1, 384)}


def new_model(name: str, dropout: float) -> LlamaForCausalLM:
    """Llama with tied embeddings; in training, dropout follows attention and MLP."""
    sizes: dict[str, Any] = dict(zip(_SIZES_OF, SIZES[name], strict=True))
    config = LlamaConfig(
        **sizes,
        vocab_size=VOCAB_SIZE,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=END_ID,
    )
    model = LlamaForCausalLM(config)

    def drop_out(module: nn.Module, _: object, out: Tensor) -> Tensor:
        return F.dropout(out, dropout, module.training)

    for layer in model.model.layers:
        for output in (layer.self_attn.o_proj, layer.mlp.down_proj):
            output.register_forward_hook(drop_out)
            # Projections into the residual stream are initialised with small weights.
            nn.init.normal_(output.weight, std=0.02 / math.sqrt(2 * config.num_hidden_layers))
    return model


# --- training -------------------------------------------------------------------------------------

SHORT_CONTEXT, SHORT_SHARE = 512, 0.6  # the first 60 % of the steps use short windows


@dataclass(frozen=True, slots=True)
class Data:
    """Token streams, [tokens] each, and where the training stream's unindented lines begin."""

    stream: Tensor
    held_out: Tensor
    tops: Tensor
    bytes_per_token: float


def top_level_starts(stream: Tensor, tokenizer: Tokenizer) -> Tensor:
    """Positions in the stream where an unindented line begins, ascending."""
    vocab = tokenizer.get_vocab()  # byte-level spelling: a newline is \u010a and a space \u0120
    breaks = torch.tensor([vocab["\u010a"], vocab[END]])
    blanks = torch.tensor([key for token, key in vocab.items() if token[0] in "\u0109\u010a\u0120"])
    return (torch.isin(stream[:-1], breaks) & ~torch.isin(stream[1:], blanks)).nonzero()[:, 0] + 1


def batches(
    stream: Tensor, tops: Tensor, context: int, tokens: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Windows [tokens / context, context + 1] of the stream for ever, each epoch cut anew.

    Where an unindented line is near, the window starts there: so do most prompts.
    """
    size, tops = tokens // context, tops[tops < len(stream) - context]
    while True:
        offset = int(torch.randint(context, (), generator=generator))
        starts = torch.arange(offset, len(stream) - context, context)
        snapped = tops[torch.searchsorted(tops, starts).clamp(max=len(tops) - 1)]
        starts = torch.where((snapped - starts).abs() < context // 4, snapped, starts)
        starts = starts[torch.randperm(len(starts), generator=generator)]
        for group in starts[: len(starts) // size * size].view(-1, size):
            yield stream[group[:, None] + torch.arange(context + 1)].long()


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """ids [batch, time] -> logits [batch, time, vocab]."""
    logits: Tensor = model(ids, use_cache=False).logits
    return logits


def loss_of(model: nn.Module, teacher: nn.Module | None, window: Tensor) -> Tensor:
    """Cross-entropy with the next token, or with the teacher's distribution over it."""
    logits = logits_of(model, window[:, :-1]).flatten(0, 1).float()  # [batch * context, vocab]
    if teacher is None:
        return F.cross_entropy(logits, window[:, 1:].flatten())
    with torch.no_grad():
        target = logits_of(teacher, window[:, :-1]).flatten(0, 1).float().softmax(-1)
    return F.cross_entropy(logits, target)


def make_optimizers(
    model: LlamaForCausalLM, args: argparse.Namespace
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    norms = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [
        {"params": [model.model.embed_tokens.weight], "weight_decay": args.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    fused = args.device == "cuda"
    return [
        torch.optim.Muon(
            matrices, lr=args.lr, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=fused),
    ]


def schedule(step: int, num_steps: int) -> float:
    """Share of the peak learning rate: warm up, hold, and fall to zero over the last 60 %."""
    return min((step + 1) / 100, 1.0, (num_steps - step) / (0.6 * num_steps))


def train(
    name: str, teacher: nn.Module | None, data: Data, args: argparse.Namespace
) -> LlamaForCausalLM:
    """A trained model with the weights of its best held-out loss."""
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    dropout = args.dropout if teacher is None else 0.0
    model: LlamaForCausalLM = new_model(name, dropout).to(args.device)
    optimizers = make_optimizers(model, args)
    compiled: Callable[..., Tensor] = loss_of
    if args.device == "cuda":
        compiled = torch.compile(loss_of, dynamic=False)
    steps_per_epoch = len(data.stream) // args.batch_tokens
    num_steps = max(2, round(args.epochs * steps_per_epoch))
    windows = {
        context: batches(data.stream, data.tops, context, args.batch_tokens, generator)
        for context in (SHORT_CONTEXT, CONTEXT)
    }
    best, best_state, begun = math.inf, {}, time.monotonic()
    for step in range(num_steps):
        context = SHORT_CONTEXT if step < SHORT_SHARE * num_steps else CONTEXT
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = args.lr * schedule(step, num_steps)
        window = next(windows[context]).to(args.device)
        with torch.autocast(args.device, torch.bfloat16):
            loss = compiled(model, teacher, window)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % (2 * steps_per_epoch) == 0 or step + 1 == num_steps:
            score = evaluate(model, data.held_out, context, args.device)
            if score < best:
                best, best_state = score, {k: v.clone() for k, v in model.state_dict().items()}
            speed = (step + 1) * args.batch_tokens / (time.monotonic() - begun)
            print(
                f"{name} epoch {(step + 1) / steps_per_epoch:5.1f}  context {context}  "
                f"loss {loss.item():.4f}  held out {score:.4f}  {speed / 1e6:.2f} M tokens/s"
            )
    model.load_state_dict(best_state)
    return model


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Tensor, context: int, device: str) -> float:
    """Mean loss on the held-out stream, cut into windows of context tokens."""
    model.eval()
    parts = torch.split(held_out.unfold(0, context + 1, context).long(), 16384 // context)
    with torch.autocast(device, torch.bfloat16):
        losses = [loss_of(model, None, part.to(device)) for part in parts]
    model.train()
    return float(torch.stack(losses).mean())


# --- folders --------------------------------------------------------------------------------------


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a Hugging Face model folder: two configs, bf16 weights and the tokenizer."""
    model.bfloat16().save_pretrained(folder)
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def load_saved(folder: Path, device: str, dtype: torch.dtype | str = "auto") -> Any:
    """Load a folder as its users do; as a teacher, in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval().requires_grad_(False).to(device)


# --- report ---------------------------------------------------------------------------------------


@torch.inference_mode()
def measure(folder: Path, data: Data, device: str) -> dict[str, float]:
    """Held-out perplexity of a saved folder through transformers, beside that of its demo.

    The acceptance is the expectation of speculative sampling, sum(min(p, q)), on held-out text.
    """
    model, target = load_saved(folder, device), load_saved(folder.parent / "demo", device)
    context = model.config.max_position_embeddings
    windows = data.held_out.unfold(0, context + 1, context)  # [windows, context + 1]
    total = torch.zeros(3, dtype=torch.float64)
    for part in torch.split(windows.long(), 8):
        ids = part.to(device)
        logits = model(ids[:, :-1]).logits.float()  # [batch, context, vocab]
        goal = target(ids[:, :-1]).logits.float()
        nll = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        agreed = (logits.argmax(-1) == goal.argmax(-1)).sum()
        accepted = torch.minimum(logits.softmax(-1), goal.softmax(-1)).sum()
        total += torch.stack([nll, agreed, accepted]).double().cpu()
    nll, agreed, accepted = (total / (len(windows) * context)).tolist()
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "safetensors_bytes": (folder / "model.safetensors").stat().st_size,
        "held_out_perplexity": round(math.exp(nll), 3),
        "held_out_bits_per_byte": round(nll / math.log(2) / data.bytes_per_token, 4),
        "top1_agreement_with_demo": round(agreed, 4),
        "acceptance_by_demo": round(accepted, 4),
    }


def print_samples(folder: Path, device: str) -> None:
    """Greedy and temperature 0.8 continuations of the prompts."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = load_saved(folder, device)
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(device)
        for is_sampled in (False, True):
            torch.manual_seed(0)
            chosen = {"temperature": 0.8, "top_k": 0} if is_sampled else {"temperature": 1.0}
            ids = model.generate(**inputs, max_new_tokens=160, do_sample=is_sampled, **chosen)
            title = f"{folder.name}, {'temperature 0.8' if is_sampled else 'greedy'}"
            print(f"--- {title} ---\n{tokenizer.decode(ids[0])}\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    parser.add_argument("--corpus", type=Path, default=stdlib, help="folder of Python files")
    parser.add_argument("--out", type=Path, default=MODELS, help="where the model folders go")
    parser.add_argument("--model", choices=[*SIZES, "all"], default="all")
    parser.add_argument("--epochs", type=float, default=24)
    parser.add_argument("--batch-tokens", type=int, default=32768, help="tokens a step")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--weight-decay", type=float, default=0.3)
    parser.add_argument("--dropout", type=float, default=0.15, help="of demo; the draft has none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    train_texts, held_out_texts = read_corpus(args.corpus)
    if args.model == "demo-draft":
        tokenizer = Tokenizer.from_file(str(args.out / "demo" / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(train_texts)
    stream, held_out = (token_stream(tokenizer, texts) for texts in (train_texts, held_out_texts))
    bytes_per_token = sum(len(text.encode()) for text in held_out_texts) / len(held_out)
    data = Data(stream, held_out, top_level_starts(stream, tokenizer), bytes_per_token)
    print(
        f"{len(train_texts)} files, {len(stream)} tokens; held out {len(held_out_texts)} files, "
        f"{len(held_out)} tokens, {bytes_per_token:.3f} bytes a token"
    )
    for name in SIZES if args.model == "all" else [args.model]:
        teacher = None
        if name == "demo-draft":
            teacher = load_saved(args.out / "demo", args.device, torch.float32)
        begun = time.monotonic()
        save(train(name, teacher, data, args), tokenizer, args.out / name)
        seconds = round(time.monotonic() - begun, 1)
        report = measure(args.out / name, data, args.device)
        print(f"{name} in {seconds} s: {json.dumps(report, indent=2)}")
        print_samples(args.out / name, args.device)


if __name__ == "__main__":
    main()
