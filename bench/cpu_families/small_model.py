"""Steps of the bundled model on a CPU through the real engine, beside the CPU's limits."""

from __future__ import annotations

import torch

from baton.core.engine_config import EngineConfig
from baton.core.request.request import Request, token_key
from baton.core.request.sampling_params import SamplingParams
from baton.engine.local import LocalEngine
from baton.engine.model.model_config import ModelConfig
from baton.kernels.sampling.sample_spec import SampleSpec
from baton.kernels.sampling.sampling import sample

from ..floors.figures import Figure, repeat_s, time_s

_PROMPT_TOKENS = 512
_REPEATS = 15
_GREEDY = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)


def load_engine() -> LocalEngine:
    """The engine as a node configures it, but without a prefix cache: each prompt is computed."""
    config = EngineConfig(device="cpu", cpu_kv_bytes=96 << 20, enable_prefix_caching=False)
    return LocalEngine.load(config, lambda line: None)


def prompt(number: int, num_tokens: int) -> tuple[int, ...]:
    """A prompt whose token ids differ from those of every other number."""
    return tuple(1 + (number * 7919 + i * 104729) % 4000 for i in range(num_tokens))


def measure() -> list[Figure]:
    """Milliseconds per step: prefill, decode alone and in a batch, sampling."""
    local = load_engine()
    flops = _matmul_flops()
    num_weights = _num_weights(local.runner.model_config)
    prefill_floor_ms = 2 * num_weights * _PROMPT_TOKENS / flops * 1e3
    figures = [
        Figure(
            f"prefill of {_PROMPT_TOKENS} tokens",
            "ms",
            _prefill_ms(local),
            prefill_floor_ms,
            f"its products at the {flops / 1e9:.0f} GFLOP/s of a large torch product",
        )
    ]
    for batch in (1, 16):
        floor_ms = 2 * num_weights * batch / flops * 1e3
        weights_ms = 4 * num_weights / _read_rate() * 1e3
        figures.append(
            Figure(
                f"decode step, batch {batch}, context {_PROMPT_TOKENS}",
                "ms",
                _decode_ms(local, batch),
                max(floor_ms, weights_ms),
                "weights read once, or their products, whichever takes longer",
            )
        )
    return [*figures, _sampling()]


def _num_weights(model: ModelConfig) -> int:
    """Weights that every token is multiplied with; the LM head is applied to the last token
    only."""
    attention = model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    return model.num_layers * model.hidden_size * (attention + 3 * model.intermediate_size)


def _prefill_ms(local: LocalEngine) -> tuple[float, ...]:
    """Times of requests with one output token."""
    once = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    requests = [
        Request(f"{i:032x}", 0, prompt(i, _PROMPT_TOKENS), once) for i in range(_REPEATS + 1)
    ]
    times = [time_s(lambda r=request: [*local.generating([r], {})]) * 1e3 for request in requests]  # type: ignore[misc]
    return tuple(times[1:])


def _decode_ms(local: LocalEngine, batch: int) -> tuple[float, ...]:
    engine = local.engine
    requests = [
        Request(f"{i:032x}", 0, prompt(1000 + i, _PROMPT_TOKENS), _GREEDY) for i in range(batch)
    ]
    for request in requests:
        engine.add(request)
    while engine.stats.load().waiting_tokens > batch:
        engine.step()
    samples = repeat_s(engine.step, _REPEATS, warmups=3)
    for request in requests:
        engine.abort(request.key)
    return tuple(s * 1e3 for s in samples)


def _sampling() -> Figure:
    rows, vocab_size = 64, 4096
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=0.8, top_k=50, top_p=0.95)
    how = [SampleSpec(params, token_key(i, 0, 1)) for i in range(rows)]
    samples = repeat_s(lambda: sample(logits, how), _REPEATS, warmups=2)
    sort_s = min(repeat_s(lambda: torch.sort(logits, dim=-1), _REPEATS))
    return Figure(
        f"sampling {rows} rows of {vocab_size}, top-k and top-p",
        "ms",
        tuple(s * 1e3 for s in samples),
        sort_s * 1e3,
        "torch.sort of the logits alone",
    )


def _matmul_flops() -> float:
    """FLOP/s of torch in a large float32 GEMM, with as many threads as an engine has."""
    size = 768
    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / min(repeat_s(lambda: a @ b, 7))


def _read_rate() -> float:
    """Bytes per second of summing a tensor far larger than the caches."""
    data = torch.ones(16 << 20)
    return data.nbytes / min(repeat_s(data.sum, 7))
