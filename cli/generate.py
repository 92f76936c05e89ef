"""`baton generate`: one process, no roles, no hand-off. The baseline, and the tests' oracle."""

from __future__ import annotations

import asyncio
import sys
import time

from ..core.engine_config import EngineConfig
from ..core.ports import SystemEntropy
from ..core.process.event_loop import interruptible
from ..core.request.request import SAMPLING, Request, SamplingParams
from ..gateway.text.tokenizer_file import load_tokenizer


async def run(
    config: EngineConfig, prompts: list[str], *, max_tokens: int, temperature: float, seed: int
) -> int:
    """Continue every prompt in one continuous batch and print them with the time it took.

    Raises InvalidRequest, StartupFailed.
    """
    wanted = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    sampling = SamplingParams(
        **{name: SAMPLING[name].kind.check(value, name, 0) for name, value in wanted.items()}
    )

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with interruptible():
        from ..engine.local import LocalEngine  # takes long, too

        local = LocalEngine.load(config, report)
    tokenizer = load_tokenizer(local.model_dir, local.runner.eos_token_ids)
    requests = [
        Request(SystemEntropy().new_id(), 0, await tokenizer.encode(prompt), sampling)
        for prompt in prompts
    ]
    began_s = time.monotonic()
    outputs: dict[str, list[int]] = {}
    for _ in local.generating(requests, outputs):
        await asyncio.sleep(0)  # Ctrl-C ends it between two steps
    took_s = time.monotonic() - began_s
    for prompt, request in zip(prompts, requests, strict=True):
        print(prompt + await tokenizer.decode(outputs[request.key]))
    num_tokens = sum(len(tokens) for tokens in outputs.values())
    report(f"{num_tokens} tokens in {took_s:.2f} s")
    return 0
