"""Reference continuations by transformers; near-ties of the top two logits are reported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

# Two float32 implementations of a tiny model differ by about 1e-5 in a logit.
NEAR_TIE = 1e-4


class GreedyOracle:
    """Greedy continuations in float32, verified by the logits of all tokens at once; where these
    differ, by transformers' own `generate`."""

    def __init__(self, model_dir: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def continuation(self, prompt_ids: Sequence[int], n: int) -> list[int]:
        """`n` tokens, or fewer if EOS, which is then the last one, comes first."""
        ids = torch.tensor([list(prompt_ids)])
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=n,
                do_sample=False,
                pad_token_id=0,
            )
        return [int(token) for token in out[0, len(prompt_ids) :]]

    def logprobs(self, ids: Sequence[int]) -> list[float]:
        """The log-probability of each token but the first, given those before it."""
        with torch.inference_mode():
            scores = self._model(torch.tensor([list(ids)])).logits[0].log_softmax(-1)
        return [float(scores[place, token]) for place, token in enumerate(ids[1:])]

    def check(self, prompt_ids: Sequence[int], got: Sequence[int], n: int) -> None:
        """Fail unless `got` is the reference; a first difference at a near-tie is printed."""
        if self._is_continuation(prompt_ids, got, n):
            return
        want = self.continuation(prompt_ids, n)
        if list(got) == want:
            return
        first = next(
            (i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b),
            min(len(got), len(want)),
        )
        gap = self._top_two_gap([*prompt_ids, *want[:first]])
        where = f"prompt of {len(prompt_ids)}, token {first}: top-two gap {gap:.2e}"
        if gap < NEAR_TIE:
            print(f"near-tie: {where}")
            return
        raise AssertionError(f"{where}\n got {list(got)}\nwant {want}")

    def _is_continuation(self, prompt_ids: Sequence[int], got: Sequence[int], n: int) -> bool:
        """Whether each token is the likeliest after those before it, with one forward pass."""
        eos = self._model.generation_config.eos_token_id
        is_eos = [token in (eos if isinstance(eos, list) else [eos]) for token in got]
        if len(got) > n or any(is_eos[:-1]) or (len(got) < n and not any(is_eos)):
            return False
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt_ids, *got]])).logits[0]
        return logits[len(prompt_ids) - 1 : -1].argmax(-1).tolist() == list(got)

    def _top_two_gap(self, ids: Sequence[int]) -> float:
        with torch.inference_mode():
            logits = self._model(torch.tensor([list(ids)])).logits[0, -1]
        first, second = logits.topk(2).values.tolist()
        return float(first - second)
