"""The choice of GPUs for the engines of `baton up`, where its flags leave it open, with the reason.

    number of engines of --tp x --pp GPUs
                                prefill              decode
    none                        the CPU              the CPU
    1                           the same GPUs, each with half of their memory
    N                           N/2, rounded up      N/2, rounded down

If every engine does both, they get all GPUs; with --mode auto and GPUs for only one engine, it does
both. `choose_gpus` depends on flags, GPUs and the size of the weights only; `choose_here` applies
it to this host. An odd engine is used for prefill: by the README's figures, a request of 1024
prompt and 256 output tokens takes 23 ms of a prefill engine and 15 ms of a decode engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...core.config import NodeConfig, UpConfig
from ...core.engine_config import EngineConfig
from ...core.errors import StartupFailed
from ...core.model_dir import resolve_model_dir
from ...engine.model.weights.weight_files import weights_bytes
from .host_gpus import HostGpu, HostGpus, find_host_gpus

_CONTEXT_BYTES = 1 << 30  # memory of an engine's process, besides weights and KV
_USUAL_SHARE = EngineConfig().gpu_memory_utilization

_Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GpuChoice:
    """The flags with every GPU named, and a line with the choice and its reason."""

    up: UpConfig
    engine: EngineConfig
    line: str


def choose_here(up: UpConfig, engine: EngineConfig, node: NodeConfig) -> GpuChoice:
    """`choose_gpus` on this host. Raises StartupFailed, also for a model that does not exist."""
    resolve_model_dir(engine.model)
    host = HostGpus() if engine.device == "cpu" else find_host_gpus()
    return choose_gpus(up, engine, node, host)


def choose_gpus(up: UpConfig, engine: EngineConfig, node: NodeConfig, host: HostGpus) -> GpuChoice:
    """Fill in the GPUs that the flags leave open; `--gpus` limits the choice.

    Raises StartupFailed if a flag names a GPU that does not exist, or if the weights do not fit
    into the memory that an engine may take.
    """
    named = {"--prefill-gpus": up.prefill_gpus, "--decode-gpus": up.decode_gpus}
    if engine.device == "cpu":
        for flag, text in {**named, "--gpus": node.gpus}.items():
            if text is not None:
                raise StartupFailed(f"{flag} {text} and --device cpu exclude each other")
        return GpuChoice(up, engine, "engines run on the CPU: --device cpu")
    pool = _pool(node.gpus, host)
    if not pool and not all(named.values()):
        return _on_cpu(up, engine, [f for f, text in named.items() if text], node, host)
    is_one = len(pool) < 2 * engine.num_ranks and not any(named.values())
    if up.mode == "aggregated" or (up.mode == "auto" and is_one):
        return _for_all(up, engine, pool, named, host)
    prefill, decode, why = _split(
        _ids("--prefill-gpus", up.prefill_gpus, engine, host),
        _ids("--decode-gpus", up.decode_gpus, engine, host),
        pool,
        engine,
    )
    for flag, count in (
        ("--num-prefill-nodes", up.num_prefill_nodes),
        ("--num-decode-nodes", up.num_decode_nodes),
    ):
        if count > 1:
            raise StartupFailed(
                f"{flag} {count} is for CPUs: here the number of GPUs sets that of engines",
                hint="--device cpu, or leave it out",
            )
    shared = sorted(set(prefill) & set(decode))
    engine = _with_share(engine, shared)
    names = _check_memory({*prefill, *decode}, bool(shared), engine, host)
    up = replace(up, prefill_gpus=_text(prefill), decode_gpus=_text(decode))
    line = f"prefill on GPU {up.prefill_gpus}, decode on GPU {up.decode_gpus}{names}: {why}"
    if shared:
        share = engine.gpu_memory_utilization
        line += f"; on a shared GPU each engine takes {share:g} of its memory"
    return GpuChoice(up, engine, line)


def _for_all(
    up: UpConfig,
    engine: EngineConfig,
    pool: _Ids,
    named: dict[str, str | None],
    host: HostGpus,
) -> GpuChoice:
    """Engines that prefill and decode."""
    for flag, text in named.items():
        if text is not None:
            raise StartupFailed(
                f"{flag} {text}: with --mode aggregated every engine does both",
                hint=f"--gpus {text}",
            )
    size = engine.num_ranks
    gpus = pool[: len(pool) // size * size]
    if not gpus:
        raise StartupFailed(
            f"{engine.size_flags}, and there are {len(pool)} GPUs", hint="a smaller --tp"
        )
    names = _check_memory(set(gpus), False, engine, host)
    why = f"--mode {up.mode}" if up.mode == "aggregated" else "too few GPUs for a second engine"
    up = replace(up, mode="aggregated", prefill_gpus=None, decode_gpus=_text(gpus))
    return GpuChoice(up, engine, f"prefill and decode on GPU {_text(gpus)}{names}: {why}")


def _on_cpu(
    up: UpConfig, engine: EngineConfig, flags: Sequence[str], node: NodeConfig, host: HostGpus
) -> GpuChoice:
    asked = [*flags, *(["--gpus"] if node.gpus else [])]
    if engine.device == "cuda":
        asked.append("--device cuda")
    if asked:
        raise StartupFailed(f"{asked[0]}: {host.why_none}", hint="--device cpu, or baton doctor")
    return GpuChoice(up, engine, f"engines run on the CPU: {host.why_none}")


def _pool(text: str | None, host: HostGpus) -> _Ids:
    """The GPUs to choose from."""
    there = tuple(range(len(host.gpus)))
    return there if text is None or not there else _parsed("--gpus", text, host)


def _ids(flag: str, text: str | None, engine: EngineConfig, host: HostGpus) -> _Ids:
    """A flag's GPUs; empty if it is not given."""
    if text is None:
        return ()
    found, size = _parsed(flag, text, host), engine.num_ranks
    if len(found) % size:
        raise StartupFailed(f"{flag} {text}: {engine.size_flags} does not divide {len(found)} GPUs")
    return found


def _parsed(flag: str, text: str, host: HostGpus) -> _Ids:
    words = [word.strip() for word in text.split(",")]
    found, count = tuple(int(word) for word in words if word.isdecimal()), len(host.gpus)
    if len(set(found)) < len(words):
        raise StartupFailed(f"{flag} {text}: not a list of different GPUs", hint=f"{flag} 0,1")
    for index in found:
        if count and index >= count:
            has = "GPU 0 alone" if count == 1 else f"GPUs 0 to {count - 1}"
            raise StartupFailed(f"{flag} {index}: this host has {has}", hint="nvidia-smi -L")
    return found


def _split(prefill: _Ids, decode: _Ids, pool: _Ids, engine: EngineConfig) -> tuple[_Ids, _Ids, str]:
    """The GPUs of prefill and decode, and the reason."""
    size = engine.num_ranks
    if prefill and decode:
        return prefill, decode, "as set by the flags"
    if prefill or decode:
        taken, flag = ("prefill", "--decode-gpus") if prefill else ("decode", "--prefill-gpus")
        free = [gpu for gpu in pool if gpu not in {*prefill, *decode}]
        rest = tuple(free[: len(free) // size * size])
        if not rest:
            raise StartupFailed(
                f"{taken} has {_text(prefill or decode)} of GPU {_text(pool)}: the rest is too "
                "few for an engine",
                hint=f"fewer GPUs for {taken}, or {flag} to share them",
            )
        return (
            prefill or rest,
            decode or rest,
            f"the flag's GPUs for {taken}, the rest for the other role",
        )
    num_engines = len(pool) // size
    if not num_engines:
        raise StartupFailed(
            f"{engine.size_flags}, and there are {len(pool)} GPUs", hint="a smaller --tp"
        )
    if num_engines == 1:
        return pool[:size], pool[:size], "too few GPUs for a second engine"
    first, last = -(-num_engines // 2) * size, num_engines * size
    kind = "one per engine" if size == 1 else f"{size} per engine"
    odd = ", the odd engine for prefill, which is the busier role" if num_engines % 2 else ""
    left = f"; GPU {_text(pool[last:])} is left over" if pool[last:] else ""
    return pool[:first], pool[first:last], f"{kind}{odd}{left}"


def _with_share(engine: EngineConfig, shared: Sequence[int]) -> EngineConfig:
    """Two engines on one GPU take half of a single engine's memory each."""
    share = engine.gpu_memory_utilization
    if not shared or 2 * share <= 1:
        return engine
    half = round(_USUAL_SHARE / 2, 3)
    if share != _USUAL_SHARE:
        raise StartupFailed(
            f"prefill and decode share GPU {_text(shared)}, and each takes {share:g} of its memory",
            hint=f"--gpu-memory-utilization {half:g}, or GPUs of their own",
        )
    return replace(engine, gpu_memory_utilization=half)


def _check_memory(used: set[int], is_shared: bool, engine: EngineConfig, host: HostGpus) -> str:
    """Raises StartupFailed unless the weights fit into an engine's share of every GPU. Returns the
    GPUs' names for people."""
    gpus = [gpu for index, gpu in enumerate(host.gpus) if index in used]
    sizes = [gpu.total_bytes for gpu in gpus if gpu.total_bytes is not None]
    names = sorted({_described(gpu) for gpu in gpus})
    if sizes:
        needed = weights_bytes(engine) / engine.num_ranks + _CONTEXT_BYTES
        share = engine.gpu_memory_utilization
        if needed > share * min(sizes):
            twice = " twice" if is_shared else ""
            raise StartupFailed(
                f"the weights of {engine.model} do not fit{twice} into a GPU of "
                f"{_gib(min(sizes))}: an engine needs {_gib(needed)} for them and its process, and "
                f"{share:g} of the GPU is {_gib(share * min(sizes))}",
                hint="more GPUs (--tp and --pp spread an engine over several), a smaller model, or "
                "--device cpu",
            )
    return f" ({', '.join(names)})" if names else ""


def _described(gpu: HostGpu) -> str:
    return gpu.name if gpu.total_bytes is None else f"{gpu.name}, {_gib(gpu.total_bytes)}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _text(gpus: Sequence[int]) -> str:
    return ",".join(map(str, gpus))
