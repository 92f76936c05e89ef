"""Mixtures of experts on a GPU: which plan is fastest for how many tokens; writes the table.

python -m baton.bench.kernels.experts [--mixtures NAME...] [--tokens N,N] [--tp N] [--dry]
                                      [--out FILE]

Each product is measured by itself in a CUDA graph, over several routings (uniform, so that no cache
holds the weights); then the whole layer with the best cuts of each tile size, by single pairs, and
by torch's grouped product. Floor: reading the weights of the experts that are touched, or
multiplying. Every plan's output is compared with torch's.
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

from baton.kernels.experts.experts import ExpertWeights, Mixture
from baton.kernels.experts.experts_triton import by_library, compute_experts, sizes_of
from baton.kernels.experts.grouped_triton import down_products, gated_products
from baton.kernels.experts.routing_triton import Choice, Order, choose_and_order, router_logits
from baton.kernels.experts.tiles import TABLE, Cut, Few, Library, Plan, Tiles, as_json, choose_plan

from ..floors.figures import commit
from ..floors.gpu_shapes import BYTES_PER_S, FLOPS
from .graph_times import graph_times_us

_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
_REPEATS = 5
_ROUTINGS = 4
_COMPILERS = 14
_SHARED_BYTES = 227 << 10
_MAX_FEW_TOKENS = 16
_MIN_LIBRARY_TOKENS = 256
_TOLERANCE = 2e-2  # relative, in the norm: of bf16


@dataclass(frozen=True)
class Sizes:
    """One layer of a model."""

    num_experts: int
    num_chosen: int
    hidden: int
    inner: int
    layers: int


MIXTURES = {
    "qwen3-30b-a3b": Sizes(128, 8, 2048, 768, 48),
    "mixtral-8x7b": Sizes(8, 2, 4096, 14_336, 32),
}

_FEW = [
    Few(*outputs, warps, inputs)
    for outputs in ((1, 1), (2, 2), (4, 4))
    for warps, inputs in ((2, 512), (4, 1024), (4, 256), (8, 1024))
]


def cuts(rows: int, *, is_gated: bool) -> list[Cut]:
    """The candidates that fit into shared memory."""
    if rows <= 32:
        sizes = [(32, 128), (32, 256), (64, 64), (64, 128), (64, 256), (128, 64), (128, 128)]
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
    halves = 2 if is_gated else 1
    return [
        cut
        for cut in found
        if (rows + halves * cut.outputs) * cut.inputs * 2 * cut.stages <= _SHARED_BYTES
    ]


def tile_rows(num_pairs: int, num_experts: int) -> list[int]:
    """Those worth a look for so many rows an expert."""
    mean = num_pairs / min(num_pairs, num_experts)
    fitting = [rows for rows in (16, 32, 64) if rows <= max(16, 4 * mean) and 4 * rows >= mean]
    return fitting + ([128] if mean >= 32 else [])


class Layer:
    """One mixture with random weights, and inputs of several routings."""

    def __init__(self, sizes: Sizes) -> None:
        options = {"device": "cuda", "dtype": torch.bfloat16}
        experts, hidden, inner = sizes.num_experts, sizes.hidden, sizes.inner
        gate_up = torch.empty(experts, 2 * inner, hidden, **options).normal_(0, hidden**-0.5)
        down = torch.empty(experts, hidden, inner, **options).normal_(0, inner**-0.5)
        router = torch.randn(experts, hidden, **options)
        weights = (ExpertWeights(gate_up), ExpertWeights(down))
        self.mixture = Mixture(router, *weights, sizes.num_chosen, True)
        self.sizes = sizes

    def inputs(self, num_tokens: int) -> list[Tensor]:
        hidden = self.sizes.hidden
        options = {"device": "cuda", "dtype": torch.bfloat16}
        return [torch.randn(num_tokens, hidden, **options) for _ in range(_ROUTINGS)]

    def route(self, x: Tensor, rows: int) -> tuple[Choice, Order]:
        logits = router_logits(x, self.mixture.router)
        return choose_and_order(logits, self.mixture, None, rows)

    def floor_us(self, num_tokens: int, touched: float) -> float:
        one = 3 * self.sizes.hidden * self.sizes.inner
        num_bytes = 2 * one * touched
        operations = 2 * one * num_tokens * self.sizes.num_chosen
        return max(num_bytes / BYTES_PER_S, operations / FLOPS) * 1e6


def time_us(calls: list[Callable[[], object]]) -> float:
    """Of one of the calls, all in a CUDA graph."""
    return statistics.median(graph_times_us(calls, _REPEATS))


def best_cut(measure: Callable[[Cut], float], found: list[Cut], groups: tuple[int, ...]) -> Cut:
    """The fastest; groups of tiles are tried with the best three alone."""
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


def library_us(layer: Layer, xs: list[Tensor]) -> float:
    """Infinite where this torch cannot capture it."""
    try:
        return plan_us(layer, xs, Library())
    except RuntimeError as error:
        print(f"  library: {error}")
        return float("inf")


def best_tiles(layer: Layer, xs: list[Tensor], rows: int) -> Tiles:
    mixture, k = layer.mixture, layer.mixture.num_chosen
    routed = [layer.route(x, rows) for x in xs]
    groups = (4, 8) if len(xs[0]) * k > rows * mixture.num_experts else ()
    gated = [torch.randn(len(o.pairs), mixture.inner, device="cuda").bfloat16() for _, o in routed]

    def gated_us(cut: Cut) -> float:
        one = gated_products
        return time_us(
            [
                lambda x=x, o=o: one(x, mixture.gate_up, o, k, rows, cut)
                for x, (_, o) in zip(xs, routed, strict=True)
            ]
        )

    def down_us(cut: Cut) -> float:
        return time_us(
            [
                lambda h=h, c=c, o=o: down_products(h, mixture.down, o, c, rows, cut)
                for h, (c, o) in zip(gated, routed, strict=True)
            ]
        )

    return Tiles(
        rows,
        best_cut(gated_us, cuts(rows, is_gated=True), groups),
        best_cut(down_us, cuts(rows, is_gated=False), groups),
    )


def plan_us(layer: Layer, xs: list[Tensor], plan: Plan) -> float:
    """Of the whole layer; infinite if its output is wrong."""
    found = compute_experts(xs[0], layer.mixture, None, plan).float()
    choice, order = layer.route(xs[0], 128)
    expected = by_library(xs[0], layer.mixture, choice, order).float()
    error = ((found - expected).norm() / expected.norm()).item()
    if not error < _TOLERANCE:
        print(f"  WRONG by {error:.1e}: {plan}")
        return float("inf")
    return time_us([lambda x=x: compute_experts(x, layer.mixture, None, plan) for x in xs])


def routing_us(layer: Layer, xs: list[Tensor], plan: Plan) -> float:
    rows = plan.rows if isinstance(plan, Tiles) else 128
    return time_us([lambda x=x: layer.route(x, rows) for x in xs])


def measure(layer: Layer, num_tokens: int) -> Plan:
    """Print the figures of one number of tokens; the fastest plan."""
    xs = layer.inputs(num_tokens)
    mixture = layer.mixture
    num_pairs = num_tokens * mixture.num_chosen
    plans: list[Plan] = [
        best_tiles(layer, xs, rows) for rows in tile_rows(num_pairs, mixture.num_experts)
    ]
    if num_tokens <= _MAX_FEW_TOKENS:
        plans += _FEW
    plans.append(Library())
    times = {plan: plan_us(layer, xs, plan) for plan in plans[:-1]}
    times[plans[-1]] = library_us(layer, xs)
    allowed = [
        plan for plan in plans if not isinstance(plan, Library) or num_tokens >= _MIN_LIBRARY_TOKENS
    ]
    best = min(allowed, key=times.__getitem__)
    if times[best] == float("inf"):
        raise SystemExit(f"no plan has the right output for {num_tokens} tokens")
    before = choose_plan(sizes_of(mixture), num_tokens, 2)
    touched = statistics.mean(len(layer.route(x, 16)[0].chosen.unique()) for x in xs)
    floor_us = layer.floor_us(num_tokens, touched)
    best_us = times[best]
    rate = 6 * mixture.hidden * mixture.inner * num_pairs / best_us / 1e6
    read = 6 * mixture.hidden * mixture.inner * touched / best_us / 1e6
    few_us = min((times[plan] for plan in plans if isinstance(plan, Few)), default=float("nan"))
    by_rows = ", ".join(f"{p.rows}: {times[p]:.0f}" for p in plans if isinstance(p, Tiles))
    print(
        f"{num_tokens:6d} tokens, {touched:5.1f} experts: best {best_us:8.1f} us, "
        f"floor {floor_us:8.1f}, {read:4.2f} TB/s, {rate:5.0f} TFLOP/s; "
        f"in {layer.sizes.layers} layers {best_us * layer.sizes.layers / 1e3:6.2f} ms\n"
        f"       tiles {by_rows}; single pairs {few_us:.0f}; library {times[Library()]:.0f}; "
        f"routing alone {routing_us(layer, xs, best):.1f}; "
        f"as before {plan_us(layer, xs, before):.0f}\n       {best}",
        flush=True,
    )
    return best


def compile_all() -> None:
    """Into Triton's cache, in many processes at once."""
    todo: list[Callable[[], None]] = [
        partial(_compile_product, rows, cut, is_gated)
        for rows, is_gated in itertools.product((128, 64, 32, 16), (True, False))
        for cut in cuts(rows, is_gated=is_gated)
    ]
    for whole in MIXTURES.values():
        # The same kernels as for the whole sizes: multiples of 16, and no narrower steps.
        sizes = replace(whole, hidden=2048, inner=1024)
        todo += [partial(_compile_plan, sizes, 1, plan) for plan in _FEW]
        any_plan = Tiles(16, *[Cut(32, 128, 3, 4)] * 2)
        todo += [partial(_compile_plan, sizes, num_tokens, any_plan) for num_tokens in _TOKENS]
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(_COMPILERS, mp_context=spawned) as pool:
        for done in [pool.submit(one) for one in todo]:
            done.result()


def _compile_plan(sizes: Sizes, num_tokens: int, plan: Plan) -> None:
    layer = Layer(sizes)
    compute_experts(layer.inputs(num_tokens)[0], layer.mixture, None, plan)
    torch.cuda.synchronize()


def _compile_product(rows: int, cut: Cut, is_gated: bool) -> None:
    layer = Layer(Sizes(2, 1, 512, 512, 1))
    x = torch.randn(4, 512, device="cuda").bfloat16()
    choice, order = layer.route(x, rows)
    try:
        if is_gated:
            gated_products(x, layer.mixture.gate_up, order, 1, rows, cut)
        else:
            down_products(x, layer.mixture.down, order, choice, rows, cut)
    except triton.runtime.errors.OutOfResources:
        pass  # told where it is measured


def main(argv: list[str]) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixtures", nargs="*", choices=MIXTURES, default=list(MIXTURES))
    parser.add_argument("--tokens", default=",".join(map(str, _TOKENS)))
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the inner dimension")
    parser.add_argument("--dry", action="store_true", help="do not write the table")
    parser.add_argument("--out", type=Path, default=TABLE)
    arguments = parser.parse_args(argv)
    began_s = time.perf_counter()
    compile_all()
    print(f"compiled in {time.perf_counter() - began_s:.0f} s", flush=True)
    table = json.loads(TABLE.read_text()) if TABLE.is_file() else {"mixtures": {}}
    table |= {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit(),
    }
    for name in arguments.mixtures:
        whole = MIXTURES[name]
        layer = Layer(replace(whole, inner=whole.inner // arguments.tp))
        key = sizes_of(layer.mixture).key
        print(f"{name}: {key}, bf16", flush=True)
        steps = []
        for num_tokens in map(int, arguments.tokens.split(",")):
            plan = measure(layer, num_tokens)
            steps.append({"tokens": num_tokens, "plan": as_json(plan)})
        table["mixtures"][key] = steps
        if not arguments.dry:
            arguments.out.write_text(json.dumps(table, indent=1) + "\n")
        del layer
        torch.cuda.empty_cache()
    print(f"all in {time.perf_counter() - began_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
