"""Records of a run in `*.npz` files, which hold plain arrays only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from baton.loadgen.records import Record


def save(path: Path, records: Sequence[Record]) -> None:
    """Write all records as arrays; `token_s` of all records is concatenated."""
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
    """The records of all generators, by due time."""
    return sorted((record for part in parts for record in part), key=lambda record: record.due_s)
