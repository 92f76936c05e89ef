"""The table of nano-vllm's workload."""

from __future__ import annotations

from .results import RESULTS, load, number, table

_NAME = "offline"


def offline() -> str:
    """A row for each engine and model that was measured."""
    if not (RESULTS / f"{_NAME}.json").exists():
        return "Not measured yet.\n"
    found = sorted(load(_NAME)["rows"], key=lambda row: (row["model"], row["engine"]))
    rows = [
        (
            *(row["model"], row["engine"], str(row["num_seqs"])),
            *(f"{row['prompt_tokens']:,}", f"{row['output_tokens']:,}"),
            number(row["tokens_per_s"]),
            *(number(row.get(name), "ms") for name in ("host_ms", "step_ms")),
            f"{row['commit']}, {row['date']}",
        )
        for row in found
    ]
    head = (
        *("model", "engine", "sequences", "prompt tokens", "output tokens", "tokens/s"),
        *("host, full step", "full step", "measured"),
    )
    commands = "\n".join(f"`{row['command']}`  " for row in found)
    return f"{table(head, rows)}\n{commands}\n"
