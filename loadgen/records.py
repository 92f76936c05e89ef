"""What a run keeps: for every request when it was due, sent, and when each token came. Raw times,
so that any figure can be computed later, from `*.npz` files that hold plain arrays only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..core.metrics import TokenTimes


@dataclass(slots=True)
class Record:
    """One request. Times are seconds from the run's start; `error` is empty if nothing failed."""

    group: str
    due_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    sent_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    error: str = ""
    is_cut_off: bool = False  # it still ran at the end of the run

    @property
    def times(self) -> TokenTimes:
        return TokenTimes(self.sent_s, tuple(self.token_s))

    @property
    def lag_s(self) -> float:
        """How late the generator itself was."""
        return self.sent_s - self.due_s

    def count_as(self, num_prompt_tokens: int | None, num_output_tokens: int | None) -> None:
        """Take over the server's count at the end of a request.

        Where pieces of several tokens were counted as one, the tokens are spread evenly over the
        pieces, the last one on the last.
        """
        if num_prompt_tokens is not None:
            self.num_prompt_tokens = num_prompt_tokens
        num_pieces, num_tokens = len(self.token_s), num_output_tokens
        if not num_tokens or not num_pieces or num_tokens == num_pieces:
            return
        last_s = self.token_s[-1]
        self.token_s = [self.token_s[i * num_pieces // num_tokens] for i in range(num_tokens)]
        self.token_s[-1] = last_s


def save(path: Path, records: Sequence[Record]) -> None:
    """Write all records as arrays; `token_s` of all, one after the other."""
    np.savez_compressed(
        path,
        group=np.array([r.group for r in records], np.str_),
        due_s=np.array([r.due_s for r in records]),
        sent_s=np.array([r.sent_s for r in records]),
        num_prompt_tokens=np.array([r.num_prompt_tokens for r in records], np.int64),
        num_output_tokens=np.array([r.num_output_tokens for r in records], np.int64),
        num_tokens=np.array([len(r.token_s) for r in records], np.int64),
        token_s=np.array([t for r in records for t in r.token_s]),
        error=np.array([r.error for r in records], np.str_),
        is_cut_off=np.array([r.is_cut_off for r in records], np.bool_),
    )


def load(path: Path) -> list[Record]:
    """The reverse of `save`."""
    with np.load(path, allow_pickle=False) as arrays:
        ends = np.cumsum(arrays["num_tokens"])
        token_s = np.split(arrays["token_s"], ends[:-1]) if len(ends) else []
        columns = zip(
            *(
                arrays[name].tolist()
                for name in ("group", "due_s", "num_prompt_tokens", "num_output_tokens", "sent_s")
            ),
            token_s,
            arrays["error"].tolist(),
            arrays["is_cut_off"].tolist(),
            strict=True,
        )
        return [
            Record(group, due_s, num_prompt, num_output, sent_s, times.tolist(), error, is_cut_off)
            for group, due_s, num_prompt, num_output, sent_s, times, error, is_cut_off in columns
        ]


def merge(parts: Iterable[Sequence[Record]]) -> list[Record]:
    """All generators' records, as they were due."""
    return sorted((record for part in parts for record in part), key=lambda record: record.due_s)
