"""`baton generate`: one process, no roles, no hand-off. The baseline, and the tests' oracle."""

from __future__ import annotations

import asyncio
import sys
import time

from ..core.engine_config import EngineConfig
from ..core.errors import InvalidRequest
from ..core.ports import Entropy
from ..core.process.event_loop import interruptible
from ..core.request.request import Request
from ..core.request.sampling_params import SAMPLING, SamplingParams
from ..gateway.text.tokenizer_file import load_tokenizer


async def run(
    config: EngineConfig, prompts: list[str], *, max_tokens: int, temperature: float, seed: int
) -> int:
    """Continue every prompt in one continuous batch and print them with the time it took.

    A prompt that cannot be served is reported and left out: then the exit code is 1. Raises
    InvalidRequest for the sampling parameters of all, StartupFailed.
    """
    wanted = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    sampling = SamplingParams(
        **{name: SAMPLING[name].kind.check(value, name, 0) for name, value in wanted.items()}
    )

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with interruptible():
        from ..engine.local import LocalEngine  # a long import

        local = LocalEngine.load(config, report)
    tokenizer = load_tokenizer(local.model_dir, local.runner.eos_token_ids)
    limits, vocab_size = local.engine.limits, local.runner.model_config.vocab_size
    requests: dict[int, Request] = {}  # by the prompt's number
    for number, prompt in enumerate(prompts, start=1):
        try:
            token_ids = await tokenizer.encode(prompt)
            if (largest := max(token_ids, default=0)) >= vocab_size:
                message = f"it has token {largest}; the vocabulary has {vocab_size} ids"
                raise InvalidRequest(message, "prompt", "invalid_token_id")
            request = Request(Entropy().new_id(), 0, token_ids, sampling)
            limits.check(request)
            requests[number] = request
        except InvalidRequest as error:
            report(f"error: prompt {number}: {error.message}")
    began_s = time.monotonic()
    outputs: dict[str, list[int]] = {}
    for _ in local.generating([*requests.values()], outputs):
        await asyncio.sleep(0)  # Ctrl-C ends it between two steps
    took_s = time.monotonic() - began_s
    for number, request in requests.items():
        output = outputs[request.key]
        print(prompts[number - 1] + await tokenizer.decode(output))
        if len(output) < max_tokens and output[-1] not in local.runner.eos_token_ids:
            report(f"prompt {number}: the context of {limits.max_model_len} tokens is full")
    num_tokens = sum(len(tokens) for tokens in outputs.values())
    report(f"{num_tokens} tokens in {took_s:.2f} s")
    return 0 if len(requests) == len(prompts) else 1
