"""Host time of constrained outputs: compiling a grammar, accepting a token, the masks of a step.

The bound of a mask is reading and writing it once; all other time is spent on computing it.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from baton.constraints.grammars import Grammars
from baton.core.request.constraint import Constraint, ConstraintKind
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.constraints import Constraints, Sample
from baton.kernels.sampling.logit_adjustment import adjust_logits
from baton.kernels.sampling.sample_spec import SampleSpec

from ..floors.figures import ROOT, Figure, repeat_s, time_s

_NUM_SAMPLES = 64
_LARGE_VOCAB = 128_000
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_OUTPUT = '{"name": "Ada Lovelace, Countess", "age": 36, "tags": ["first", "analytical engine"]}'


def measure() -> list[Figure]:
    """Figures for the bundled model's 4,096 ids and for an artificial vocabulary of 128,000."""
    with tempfile.TemporaryDirectory() as folder:
        large = _write_large_tokenizer(Path(folder))
        small = _of_vocabulary(ROOT / "models" / "demo", 4096, 0)
        return [*small, *_of_vocabulary(large, _LARGE_VOCAB, 0)]


def _of_vocabulary(model_dir: Path, vocab_size: int, eos_id: int) -> list[Figure]:
    grammars = Grammars(model_dir, vocab_size, [eos_id])
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    output = tokenizer.encode(_OUTPUT, add_special_tokens=False).ids
    load_ms = time_s(lambda: grammars.compile(_schema(0))) * 1e3  # includes loading the tokenizer
    compile_ms = tuple(time_s(lambda i=i: grammars.compile(_schema(i))) * 1e3 for i in range(1, 20))
    alone_us = _walk_us(grammars, output, 1)
    together_us = _walk_us(grammars, output, _NUM_SAMPLES)
    mask = np.zeros(-(-vocab_size // 32), np.int32)
    bound_us = min(repeat_s(lambda: mask.copy().any(), 50)) * 1e6
    name = f"of {vocab_size:,} ids"
    return [
        Figure(f"first constraint, tokenizer and all, {name}", "ms", (load_ms,)),
        Figure(f"compile a small schema, {name}", "ms", compile_ms),
        Figure(f"token and mask, one sample, {name}", "us", alone_us, bound_us, "copy it"),
        Figure(
            f"tokens and masks, {_NUM_SAMPLES} samples, {name}",
            "us",
            together_us,
            _NUM_SAMPLES * bound_us,
            "copy them",
        ),
        _apply(vocab_size, name),
    ]


def _schema(index: int) -> Constraint:
    schema = _PERSON | {"description": f"number {index}"}
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


def _walk_us(grammars: Grammars, output: list[int], num_samples: int) -> tuple[float, ...]:
    """Microseconds per output step for a batch of samples that share one constraint."""
    constraints = Constraints(grammars)
    one = constraints.begin(_schema(0))
    followers = [one, *(one.another() for _ in range(num_samples - 1))]
    times = []
    for end in range(len(output) + 1):
        samples: list[Sample] = [(follower, output[:end], ()) for follower in followers]
        times.append(time_s(lambda samples=samples: constraints.masks(samples)) * 1e6)
    return tuple(times)


def _apply(vocab_size: int, name: str) -> Figure:
    """The time to apply masks in the sampler on this CPU."""
    logits = torch.zeros(_NUM_SAMPLES, vocab_size)
    mask = np.full(-(-vocab_size // 32), 0x55555555, np.int32)
    specs = [SampleSpec(SamplingParams(), 0, allowed=mask)] * _NUM_SAMPLES
    samples = repeat_s(lambda: adjust_logits(logits, specs), 9)
    bound = min(repeat_s(lambda: logits.clone(), 9))
    return Figure(
        f"apply {_NUM_SAMPLES} masks to logits on the CPU, {name}",
        "us",
        tuple(seconds * 1e6 for seconds in samples),
        bound * 1e6,
        "copy the logits",
    )


def _write_large_tokenizer(folder: Path) -> Path:
    """Write a byte-level BPE with words made of syllables, as long as those of real
    vocabularies."""
    rng = random.Random(0)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<end>", *letters])}
    merges: list[tuple[str, str]] = []
    known = [letter for letter in letters if letter.isascii() and letter.isalpha()] + ["Ġ"]
    while len(vocabulary) < _LARGE_VOCAB:
        left, right = rng.choice(known), rng.choice(known)
        joined = left + right
        if len(joined) <= 12 and "Ġ" not in right and joined not in vocabulary:
            vocabulary[joined] = len(vocabulary)
            merges.append((left, right))
            known.append(joined)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
