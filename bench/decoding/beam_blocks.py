"""KV blocks that the beams of a search share, and the blocks that its reorderings copy.

    python -m baton.bench.decoding.beam_blocks

The bundled model runs on a CPU through the real engine; blocks are counted in its block tables.
"saved" is the share of blocks saved against beams without sharing: the figure of Kwon et al. 2023,
"Efficient Memory Management for LLM Serving with PagedAttention", section 6.3 (37.6 % to 55.2 % for
widths 2 to 6 on Alpaca, 44.3 % to 66.3 % on ShareGPT). "copied" are the blocks copied in the steps
of a search, beside those that a reordering without sharing would copy: all blocks of each beam that
does not continue in its own place.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from baton.core.engine_config import EngineConfig
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.local import LocalEngine
from baton.engine.scheduling.sequence import Sequence

from ..floors.figures import ROOT, command_line, commit, machine

WIDTHS = (2, 4, 6, 8)
LENGTHS = ((19, 58), (161, 338), (600, 60))  # means of Alpaca and ShareGPT; a long prompt
_NUM_PROMPTS = 2
_BLOCK_SIZE = 16


class Counted:
    """Counts the block tables after each step, and the copies of blocks."""

    def __init__(self, local: LocalEngine) -> None:
        self._engine = local.engine
        self._copy_blocks = local.runner.copy_blocks
        local.runner.copy_blocks = self._copy  # type: ignore[method-assign]
        self.num_held = self.num_unshared = 0  # summed over steps
        self.num_copied = self.num_moved = 0
        self._before: dict[str, list[int]] = {}

    def _copy(self, pairs: Any) -> None:
        self.num_copied += len(pairs)
        self._copy_blocks(pairs)

    def look(self) -> None:
        """Count after a step."""
        beams: list[Sequence] = list(self._engine.by_key.values())
        tables = {beam.key: beam.block_ids for beam in beams}
        self.num_held += len({block for table in tables.values() for block in table})
        self.num_unshared += sum(map(len, tables.values()))
        if self._before:
            new = [table for key, table in tables.items() if key not in self._before]
            self.num_moved += sum(map(len, new))
        self._before = {key: [*table] for key, table in tables.items()}


def measure(local: LocalEngine, text: list[int], width: int, lengths: tuple[int, int]) -> Any:
    num_prompt, num_output = lengths
    counted = Counted(local)
    for index in range(_NUM_PROMPTS):
        first = index * num_prompt
        params = SamplingParams(
            use_beam_search=True,
            best_of=width,
            temperature=0.0,
            max_tokens=num_output,
            ignore_eos=True,
        )
        prompt = tuple(text[first : first + num_prompt])
        local.engine.add(Request(f"{width}-{num_prompt}-{index}", 0, prompt, params))
        while local.engine.has_work:
            local.engine.step()
            counted.look()
    local.runner.copy_blocks = counted._copy_blocks  # type: ignore[method-assign]
    num_steps = _NUM_PROMPTS * num_output
    return {
        "width": width,
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "saved": 1 - counted.num_held / counted.num_unshared,
        "copied_per_step": counted.num_copied / num_steps,
        "copied_without_sharing_per_step": counted.num_moved / num_steps,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=str(ROOT / "bench" / "results" / "beam_blocks.json"))
    out = Path(parser.parse_args().out)
    from tokenizers import Tokenizer

    config = EngineConfig(device="cpu", cpu_kv_bytes=256 << 20, block_size=_BLOCK_SIZE)
    local = LocalEngine.load(config, print)
    tokenizer = Tokenizer.from_file(str(local.model_dir / "tokenizer.json"))
    text = list(tokenizer.encode((ROOT / "engine" / "engine.py").read_text()).ids)
    rows = []
    for lengths in LENGTHS:
        for width in WIDTHS:
            rows.append(measure(local, text, width, lengths))
            print(rows[-1])
    local.close()
    result = {
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "command": command_line("decoding.beam_blocks", sys.argv[1:]),
        "block_size": _BLOCK_SIZE,
        "rows": rows,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
