"""Mixtures of experts on a GPU: finds the fastest plan by number of tokens and writes the table.

python -m baton.bench.kernels.experts [--mixtures NAME...] [--weights bf16|fp8|fp8-block|int4]
                                      [--tokens N,N] [--tp N] [--persistent] [--dry] [--out FILE]

Each GEMM is measured alone in a CUDA graph, over several routings (uniform, so that no cache holds
the weights); then the whole layer with the best cuts of each tile size, and with single pairs.
Floor: reading the weights of the activated experts, or operations. Every plan's output is compared
with plain torch's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor

from baton.kernels.experts.experts import (
    ExpertInputs,
    ExpertWeights,
    Fp8Groups,
    Int4Experts,
    Mixture,
    StackedWeights,
)
from baton.kernels.experts.experts_triton import compute_experts, sizes_of
from baton.kernels.experts.grouped_triton import down_products, gated_products
from baton.kernels.experts.router_logits_triton import router_logits
from baton.kernels.experts.routing_triton import Choice, Order, choose_and_order
from baton.kernels.experts.tiles import (
    TABLE,
    WIDE_ROWS,
    Cut,
    Few,
    Persistent,
    Plan,
    Tiles,
    as_json,
    choose_plan,
)
from baton.kernels.layers.ops import Ops
from baton.kernels.products.int4_weights import CHUNK, quantise_groups
from baton.kernels.products.weights import quantise_blocks, quantise_rows

from ..floors.figures import commit
from ..floors.gpu_shapes import BYTES_PER_S, FLOPS, FP8_BLOCK_FLOPS, FP8_FLOPS
from .graph_times import graph_times_us

_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
_REPEATS = 5
_ROUTINGS = 4
_COMPILERS = 14
_SHARED_BYTES = 227 << 10
_MAX_FEW_TOKENS = 16
# Relative error in the norm: with bf16, and with FP8 activations, which plain torch quantises in
# all rows.
_TOLERANCE, _FP8_TOLERANCE = 2e-2, 8e-2
_QUANTISE = {"fp8": quantise_rows, "fp8-block": quantise_blocks}
_BYTES = {"": 2, "int4": 0.5 + 4 / CHUNK}  # bytes per weight; else 1


@dataclass(frozen=True)
class Sizes:
    """The sizes of one layer, and the number of layers."""

    num_experts: int
    num_chosen: int
    hidden: int
    inner: int
    layers: int


MIXTURES = {
    "qwen3-30b-a3b": Sizes(128, 8, 2048, 768, 48),
    "mixtral-8x7b": Sizes(8, 2, 4096, 14_336, 32),
}


def few_plans(weights: str) -> list[Few]:
    """The candidates for single pairs of token and expert; FP8 needs more inputs for as many bytes
    in flight."""
    if weights == "int4":
        return []
    sizes = [(2, 1024), (4, 1024), (4, 2048), (8, 1024)]
    outputs = ((2, 2), (4, 2), (4, 4), (8, 4))
    return [Few(*of_both, *size) for of_both in outputs for size in sizes]


def cuts(rows: int, weights: str, *, is_gated: bool, has_fp8_rows: bool = False) -> list[Cut]:
    """The candidates that fit into shared memory."""
    if weights == "int4":
        return _int4_cuts(rows)
    if weights and rows <= 32:
        sizes = [(128, 128)] if is_gated and has_fp8_rows else [(64, 128), (128, 128)]
        found = [
            Cut(outputs, inputs, stages, 4, 1, is_turned)
            for (outputs, inputs), stages in itertools.product(sizes, (3, 4, 5))
            for is_turned in ((True,) if has_fp8_rows else (False, True))
        ]
    elif weights:
        found = [
            Cut(outputs, 128, stages, warps)
            for outputs in ((128,) if is_gated else (64, 128))
            for stages, warps in itertools.product((2, 3, 4), (4, 8))
            if rows * outputs * (3 if is_gated else 2) // (warps * 32) <= 192  # sums of a thread
            and (warps == 4 or rows * outputs >= 128 * 64)
        ]
    elif rows <= 32:
        sizes = [(32, 128), (64, 128), (128, 64), (128, 128)]
        found = [
            Cut(outputs, inputs, stages, 4, 1, is_turned)
            for (outputs, inputs), stages in itertools.product(sizes, (3, 4, 5))
            for is_turned in ((False, True) if outputs >= 64 else (False,))
            if stages < 5 or outputs * inputs <= 64 * 128
        ]
    else:
        sizes = [(64, 64), (128, 64), (128, 128)] + ([] if is_gated else [(256, 64)])
        found = [
            Cut(outputs, inputs, stages, warps, 1)
            for (outputs, inputs), stages, warps in itertools.product(sizes, (3, 4), (4, 8))
            if rows * outputs * (2 if is_gated else 1) // (warps * 32) <= 128  # sums of a thread
            and (warps == 4 or rows * outputs >= 128 * 64)
        ]
    halves, of_row, of_weight = 2 if is_gated else 1, 1 if has_fp8_rows else 2, 1 if weights else 2

    def shared_bytes(cut: Cut) -> int:
        return (rows * of_row + halves * cut.outputs * of_weight) * cut.inputs * cut.stages

    if rows >= 64 or has_fp8_rows:
        found += [replace(cut, has_descriptor=True) for cut in found]
    return [cut for cut in found if shared_bytes(cut) <= _SHARED_BYTES]


def _int4_cuts(rows: int) -> list[Cut]:
    return [
        Cut(outputs, CHUNK, stages, warps, 1, is_turned=True)
        for outputs, warps in ((64, 4), (128, 4), (128, 8), (256, 8))
        for stages in ((3, 4, 6, 8) if rows <= 32 else (2, 3, 4))
        if 2 * rows * outputs // (warps * 32) <= 128  # sums of a thread, and those of a group
        and (2 * rows + outputs // 2) * CHUNK * stages <= _SHARED_BYTES
    ]


def persistent_plans(layer: Layer, num_tokens: int) -> list[Persistent]:
    """The candidates; each takes nearly all of shared memory, or leaves room for another kernel's
    programs."""
    mixture, is_fp8 = layer.mixture, layer.weights in _QUANTISE
    if not sizes_of(mixture).is_whole:
        return []
    rows = tile_rows(num_tokens * mixture.num_chosen, mixture.num_experts)
    stages = {16: ((6, 11), (5, 8)), 32: ((5, 10), (4, 7))} if is_fp8 else {}
    stages[WIDE_ROWS] = ((4, 4),)
    return [Persistent(one, *both, is_fp8) for one in rows for both in stages.get(one, ())]


def kinds_of_rows(rows: int, weights: str) -> tuple[bool, ...]:
    """Whether FP8 activations are tried, or bf16, or both."""
    if weights in ("", "int4"):
        return (False,)
    return (False, True) if rows == 16 else (True,)


def tile_rows(num_pairs: int, num_experts: int) -> list[int]:
    """The tile heights worth trying for the mean number of rows per expert."""
    mean = num_pairs / min(num_pairs, num_experts)
    fitting = [rows for rows in (16, 32, 64) if rows <= max(16, 4 * mean) and 4 * rows >= mean]
    return fitting + ([128] if mean >= 32 else [])


class Layer:
    """One mixture with random weights, and inputs of several routings."""

    def __init__(self, sizes: Sizes, weights: str) -> None:
        options = {"device": "cuda", "dtype": torch.bfloat16}
        experts, hidden, inner = sizes.num_experts, sizes.hidden, sizes.inner
        gate_up = torch.empty(experts, 2 * inner, hidden, **options).normal_(0, hidden**-0.5)
        down = torch.empty(experts, hidden, inner, **options).normal_(0, inner**-0.5)
        router = torch.randn(experts, hidden, **options)
        gated, ungated = (_stacked(floats, weights) for floats in (gate_up, down))
        self.mixture = Mixture(router, gated, ungated, sizes.num_chosen, True)
        self.sizes, self.weights = sizes, weights

    def inputs(self, num_tokens: int) -> list[Tensor]:
        hidden = self.sizes.hidden
        options = {"device": "cuda", "dtype": torch.bfloat16}
        return [torch.randn(num_tokens, hidden, **options) for _ in range(_ROUTINGS)]

    def route(self, x: Tensor, rows: int) -> tuple[Choice, Order]:
        logits = router_logits(x, self.mixture.router)
        return choose_and_order(logits, self.mixture, None, rows)

    def in_fp8(self, x: Tensor) -> Fp8Groups:
        """Quantise x as the router kernel does; its logits are discarded."""
        quantised = Fp8Groups.empty(x.shape[0], x.shape[1], x.device)
        router_logits(x, torch.empty(1, x.shape[1], device=x.device, dtype=x.dtype), quantised)
        return quantised

    def num_bytes(self, touched: float) -> float:
        """Bytes of the weights of `touched` experts."""
        one = 3 * self.sizes.hidden * self.sizes.inner
        return _BYTES.get(self.weights, 1) * one * touched

    def floor_us(self, num_tokens: int, touched: float) -> float:
        one = 3 * self.sizes.hidden * self.sizes.inner
        operations = 2 * one * num_tokens * self.sizes.num_chosen
        flops = {"fp8": FP8_FLOPS, "fp8-block": FP8_BLOCK_FLOPS}.get(self.weights, FLOPS)
        return max(self.num_bytes(touched) / BYTES_PER_S, operations / flops) * 1e6


def _stacked(floats: Tensor, weights: str) -> StackedWeights:
    """[experts, outputs, inputs], quantised or not."""
    if not weights:
        return ExpertWeights(floats)
    if weights != "int4":
        made = zip(*map(_QUANTISE[weights], floats), strict=True)
        return ExpertWeights(*map(torch.stack, made))
    experts, outputs, inputs = floats.shape
    packed = Int4Experts.empty(experts, outputs, inputs, CHUNK, floats.device)
    for expert, matrix in enumerate(floats):
        packed.of(expert).fill(*quantise_groups(matrix, CHUNK))
    return packed


def time_us(calls: list[Callable[[], object]]) -> float:
    """The median time of one of the calls, all in a CUDA graph."""
    return statistics.median(graph_times_us(calls, _REPEATS))


def best_cut(measure: Callable[[Cut], float], found: list[Cut], groups: tuple[int, ...]) -> Cut:
    """The fastest cut; groups of tiles are tried only with the best three."""
    times = {cut: _or_inf(measure, cut) for cut in found}
    leaders = sorted(times, key=times.__getitem__)[:3]
    for cut, group in itertools.product(leaders, groups):
        grouped = replace(cut, group=group)
        times[grouped] = _or_inf(measure, grouped)
    return min(times, key=times.__getitem__)


def _or_inf(measure: Callable[[Cut], float], cut: Cut) -> float:
    try:
        return measure(cut)
    except triton.runtime.errors.OutOfResources as error:
        print(f"  {cut}: {error}")
        return float("inf")


def best_tiles(layer: Layer, xs: list[Tensor], rows: int, *, has_fp8_rows: bool) -> Tiles:
    mixture, k = layer.mixture, layer.mixture.num_chosen
    routed = [layer.route(x, rows) for x in xs]
    groups = (4, 8) if len(xs[0]) * k > rows * mixture.num_experts else ()
    inner = [torch.randn(len(o.pairs), mixture.inner, device="cuda").bfloat16() for _, o in routed]
    inputs: list[ExpertInputs] = [layer.in_fp8(x) for x in xs] if has_fp8_rows else [*xs]
    gated: list[ExpertInputs] = [layer.in_fp8(h) for h in inner] if has_fp8_rows else [*inner]

    def gated_us(cut: Cut) -> float:
        one = gated_products
        return time_us(
            [
                lambda x=x, o=o: one(x, mixture.gate_up, o, k, rows, cut)
                for x, (_, o) in zip(inputs, routed, strict=True)
            ]
        )

    def down_us(cut: Cut) -> float:
        one, dtype = down_products, torch.bfloat16
        return time_us(
            [
                lambda h=h, c=c, o=o: one(h, mixture.down, o, c, rows, cut, dtype)
                for h, (c, o) in zip(gated, routed, strict=True)
            ]
        )

    kind = {"weights": layer.weights, "has_fp8_rows": has_fp8_rows}
    return Tiles(
        rows,
        best_cut(gated_us, cuts(rows, is_gated=True, **kind), groups),
        best_cut(down_us, cuts(rows, is_gated=False, **kind), groups),
        has_fp8_rows,
    )


def plan_us(layer: Layer, xs: list[Tensor], plan: Plan, expected: Tensor) -> float:
    """The time of the whole layer; infinite if its output is wrong."""
    found = compute_experts(xs[0], layer.mixture, None, plan).float()
    error = ((found - expected).norm() / expected.norm()).item()
    if not error < (_FP8_TOLERANCE if layer.weights in _QUANTISE else _TOLERANCE):
        print(f"  WRONG by {error:.1e}: {plan}")
        return float("inf")
    return time_us([lambda x=x: compute_experts(x, layer.mixture, None, plan) for x in xs])


def routing_us(layer: Layer, xs: list[Tensor], plan: Plan) -> float:
    rows = 128 if isinstance(plan, Few) else plan.rows
    return time_us([lambda x=x: layer.route(x, rows) for x in xs])


def measure(layer: Layer, num_tokens: int, *, only_persistent: bool) -> Plan:
    """Print the figures for one number of tokens; returns the fastest plan."""
    xs = layer.inputs(num_tokens)
    mixture = layer.mixture
    num_pairs = num_tokens * mixture.num_chosen
    before = choose_plan(sizes_of(mixture), num_tokens, 2)
    plans: list[Plan] = [before] if only_persistent else []
    if not only_persistent:
        plans += [
            best_tiles(layer, xs, rows, has_fp8_rows=has_fp8_rows)
            for rows in tile_rows(num_pairs, mixture.num_experts)
            for has_fp8_rows in kinds_of_rows(rows, layer.weights)
        ]
        plans += few_plans(layer.weights) if num_tokens <= _MAX_FEW_TOKENS else []
    plans += [plan for plan in persistent_plans(layer, num_tokens) if plan not in plans]
    expected = Ops().experts(xs[0], mixture, None).float()
    times = {plan: plan_us(layer, xs, plan, expected) for plan in plans}
    best = min(plans, key=times.__getitem__)
    if times[best] == float("inf"):
        raise SystemExit(f"no plan has the right output for {num_tokens} tokens")
    touched = statistics.mean(len(layer.route(x, 16)[0].chosen.unique()) for x in xs)
    floor_us = layer.floor_us(num_tokens, touched)
    best_us = times[best]
    rate = 6 * mixture.hidden * mixture.inner * num_pairs / best_us / 1e6
    read = layer.num_bytes(touched) / best_us / 1e6
    few_us = min((times[plan] for plan in plans if isinstance(plan, Few)), default=float("nan"))
    by_rows = ", ".join(
        f"{plan.rows}{' in FP8' if plan.has_fp8_rows else ''}: {times[plan]:.0f}"
        for plan in plans
        if isinstance(plan, Tiles)
    )
    persistent = ", ".join(
        f"{plan.rows} by {plan.gated} and {plan.down}: {times[plan]:.0f}"
        for plan in plans
        if isinstance(plan, Persistent)
    )
    print(
        f"{num_tokens:6d} tokens, {touched:5.1f} experts: best {best_us:8.1f} us, "
        f"floor {floor_us:8.1f}, {read:4.2f} TB/s, {rate:5.0f} TFLOP/s; "
        f"in {layer.sizes.layers} layers {best_us * layer.sizes.layers / 1e3:6.2f} ms\n"
        f"       tiles {by_rows}; persistent {persistent}; single pairs {few_us:.0f}; "
        f"routing alone {routing_us(layer, xs, best):.1f}, of which the router "
        f"{time_us([lambda x=x: router_logits(x, mixture.router) for x in xs]):.1f}; "
        f"as before {plan_us(layer, xs, before, expected):.0f}\n       {best}",
        flush=True,
    )
    return best


def compile_all(mixtures: list[Sizes], weights: str, tokens: list[int]) -> None:
    """Compile all candidates into Triton's cache, in many processes."""
    todo: list[Callable[[], None]] = [
        partial(_compile_product, rows, cut, weights, is_gated, has_fp8_rows)
        for rows, is_gated in itertools.product((128, 64, 32, 16), (True, False))
        for has_fp8_rows in kinds_of_rows(rows, weights)
        for cut in cuts(rows, weights, is_gated=is_gated, has_fp8_rows=has_fp8_rows)
    ]
    for whole in mixtures:
        # The same kernels as for the full sizes: multiples of 16, and no narrower steps.
        sizes = replace(whole, hidden=2048, inner=1024)
        plans: list[Plan] = [*few_plans(weights)] if min(tokens) <= _MAX_FEW_TOKENS else []
        chosen_alone = replace(whole, num_experts=whole.num_chosen)  # their sizes are constexpr
        todo += [partial(_compile_plan, chosen_alone, weights, 1, plan) for plan in plans]
        cut = Cut(128, 128, 3, 4, is_turned=True)
        any_plan = Tiles(16, cut, cut, weights in _QUANTISE)
        todo += [partial(_compile_plan, sizes, weights, count, any_plan) for count in tokens]
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(_COMPILERS, mp_context=spawned) as pool:
        for done in [pool.submit(one) for one in todo]:
            done.result()


def _compile_plan(sizes: Sizes, weights: str, num_tokens: int, plan: Plan) -> None:
    layer = Layer(sizes, weights)
    compute_experts(layer.inputs(num_tokens)[0], layer.mixture, None, plan)
    torch.cuda.synchronize()


def _compile_product(rows: int, cut: Cut, weights: str, is_gated: bool, has_fp8_rows: bool) -> None:
    layer = Layer(Sizes(2, 1, 512, 512, 1), weights)
    x = torch.randn(4, 512, device="cuda").bfloat16()
    choice, order = layer.route(x, rows)
    inputs = layer.in_fp8(x) if has_fp8_rows else x
    try:
        if is_gated:
            gated_products(inputs, layer.mixture.gate_up, order, 1, rows, cut)
        else:
            down_products(inputs, layer.mixture.down, order, choice, rows, cut, x.dtype)
    except triton.runtime.errors.OutOfResources:
        pass  # reported when it is measured


def main(argv: list[str]) -> int:
    """Measure, print the figures and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixtures", nargs="*", choices=MIXTURES, default=list(MIXTURES))
    parser.add_argument("--weights", choices=("bf16", *_QUANTISE, "int4"), default="bf16")
    parser.add_argument("--tokens", default=",".join(map(str, _TOKENS)))
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the inner dimension")
    parser.add_argument(
        "--persistent", action="store_true", help="only such plans, beside that of the table"
    )
    parser.add_argument("--dry", action="store_true", help="do not write the table")
    parser.add_argument("--out", type=Path, default=TABLE)
    arguments = parser.parse_args(argv)
    began_s = time.perf_counter()
    weights = "" if arguments.weights == "bf16" else arguments.weights
    tokens = list(map(int, arguments.tokens.split(",")))
    if not arguments.persistent:
        compile_all([MIXTURES[name] for name in arguments.mixtures], weights, tokens)
        print(f"compiled in {time.perf_counter() - began_s:.0f} s", flush=True)
    table = json.loads(TABLE.read_text()) if TABLE.is_file() else {"mixtures": {}, "measured": {}}
    measured = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit(),
    }
    for name in arguments.mixtures:
        whole = MIXTURES[name]
        layer = Layer(replace(whole, inner=whole.inner // arguments.tp), weights)
        key = sizes_of(layer.mixture).key
        print(f"{name}: {key}", flush=True)
        before = table["mixtures"].get(key, []) if arguments.persistent else []
        plans = {step["tokens"]: step["plan"] for step in before}
        for num_tokens in tokens:
            plan = measure(layer, num_tokens, only_persistent=arguments.persistent)
            plans[num_tokens] = as_json(plan)
        table["mixtures"][key] = [{"tokens": n, "plan": plans[n]} for n in sorted(plans)]
        if before:
            table["measured"][key]["commit of persistent"] = measured["commit"]
        else:
            table["measured"][key] = measured
        if not arguments.dry:
            arguments.out.write_text(json.dumps(table, indent=1) + "\n")
        del layer
        torch.cuda.empty_cache()
    print(f"all in {time.perf_counter() - began_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
