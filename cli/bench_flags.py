"""The flags of `baton bench` as a plan for loadgen/benchmark.py."""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import StartupFailed

if TYPE_CHECKING:  # the command line is parsed without them
    from ..core.metrics import Slo
    from ..loadgen.benchmark import BenchmarkPlan
    from ..loadgen.prompts import PromptShape

_DATASETS = ("words", "token-ids", "sharegpt", "lengths", "jsonl")
_ENDPOINTS = ("completions", "chat")
_SLO_NAMES = ("ttft_ms", "tbt_ms", "tpot_ms", "e2e_ms")


def plan_of(arguments: argparse.Namespace) -> BenchmarkPlan:
    """The plan of the parsed flags. Raises StartupFailed for flags that exclude each other."""
    from ..loadgen.benchmark import BenchmarkPlan
    from ..loadgen.target import Target

    num_requests, duration_s = arguments.num_requests, arguments.duration_s
    if num_requests is None:
        num_requests = 100 if duration_s is None else math.inf
    plan = BenchmarkPlan(
        target=Target(
            arguments.base_url,
            arguments.endpoint,
            arguments.model,
            os.environ.get("BATON_API_KEY") or None,
            _fields(arguments),
        ),
        shape=_shape(arguments),
        slo=_slo(arguments.slo or ()),
        rate_per_s=arguments.request_rate,
        concurrency=1 if arguments.concurrency is None else arguments.concurrency,
        num_requests=num_requests,
        duration_s=math.inf if duration_s is None else duration_s,
        drain_s=arguments.drain_s,
        num_warmups=arguments.num_warmups,
        is_exact=arguments.ignore_eos,
        result=arguments.result,
        plot=arguments.plot,
    )
    _check(plan)
    for path in (plan.result, plan.plot):  # before minutes of load, not after them
        if path is not None and not path.absolute().parent.is_dir():
            raise StartupFailed(f"{path}: there is no folder {path.absolute().parent}")
    return plan


def _check(plan: BenchmarkPlan) -> None:
    shape = plan.shape
    positive = {
        "--request-rate": plan.rate_per_s,
        "--concurrency": plan.concurrency,
        "--num-requests": plan.num_requests,
        "--duration-s": plan.duration_s,
        "--input-len": shape.input_len,
        "--output-len": shape.output_len,
    }
    for name, value in positive.items():
        if value is not None and not value > 0:
            raise StartupFailed(f"{name} must be more than 0")
    for name, number in (
        ("--num-warmups", plan.num_warmups),
        ("--shared-prefix-len", shape.shared_prefix_len),
        ("--drain-s", plan.drain_s),
    ):
        if not number >= 0:
            raise StartupFailed(f"{name} must not be less than 0")
    if not 0 <= shape.range_ratio < 1:
        raise StartupFailed("--range-ratio must be from 0 to less than 1")
    if plan.rate_per_s is not None and math.isinf(plan.rate_per_s):
        raise StartupFailed("--request-rate must be finite", hint="--concurrency N")


def _shape(arguments: argparse.Namespace) -> PromptShape:
    from ..loadgen.prompts import PromptShape, tokenizer_count

    dataset = arguments.dataset
    path = arguments.dataset_path
    if (path is None) != (dataset in ("words", "token-ids")):
        what = "needs a --dataset-path" if path is None else "takes no --dataset-path"
        raise StartupFailed(f"--dataset {dataset} {what}")
    if dataset == "token-ids" and (arguments.vocab_size or 0) < 4:
        raise StartupFailed("--dataset token-ids needs --vocab-size, that of the target's model")
    return PromptShape(
        dataset,
        arguments.input_len,
        arguments.output_len,
        arguments.range_ratio,
        arguments.shared_prefix_len,
        path,
        arguments.vocab_size,
        arguments.seed,
        tokenizer_count(arguments.tokenizer) if arguments.tokenizer else None,
    )


def _fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Additional fields of each request's body; null removes a field."""
    fields: dict[str, Any] = {} if arguments.ignore_eos else {"ignore_eos": None}
    if arguments.extra_body is None:
        return fields
    try:
        more = json.loads(arguments.extra_body)
    except ValueError as error:
        raise StartupFailed(f"--extra-body is no JSON: {error}") from error
    if not isinstance(more, dict):
        raise StartupFailed("--extra-body is no JSON object")
    return {**fields, **more}


def _slo(given: list[str] | tuple[()]) -> Slo:
    from ..core.metrics import Slo

    found: dict[str, float] = {}
    for one in given:
        name, _, text = one.partition("=")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if name not in _SLO_NAMES or not value > 0 or math.isinf(value):
            raise StartupFailed(
                f"--slo {one!r} is no target: NAME=MS, of {', '.join(_SLO_NAMES)}",
                hint="--slo ttft_ms=1000 tpot_ms=50",
            )
        found[f"{name.removesuffix('_ms')}_s"] = value / 1e3
    return Slo(**found)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Names are those of vLLM's `bench serve` where it has the same flag."""
    add = parser.add_argument
    add(
        "--base-url", default="http://localhost:8000", help="URL of the server, with or without /v1"
    )
    add("--model", help="model name to request; default: the model that the server lists")
    add(
        "--endpoint",
        choices=_ENDPOINTS,
        default="completions",
        help="API to send requests to (completions)",
    )
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument("--concurrency", type=int, help="closed loop: requests in flight (1)")
    loop.add_argument("--request-rate", type=float, help="open loop: Poisson arrivals per second")
    add(
        "--num-requests",
        type=int,
        help="end the load after this many requests (100, without --duration-s)",
    )
    add("--duration-s", type=float, help="end the load after this many seconds")
    add(
        "--drain-s",
        type=float,
        default=60.0,
        help="seconds that requests in flight have to finish after the load (60)",
    )
    add("--num-warmups", type=int, default=0, help="unmeasured requests before the load (0)")
    add("--dataset", choices=_DATASETS, default="words", help="source of prompts (words)")
    add("--dataset-path", type=Path, help="file of a sharegpt, lengths or jsonl dataset")
    add("--tokenizer", help="folder with a tokenizer.json; lengths then count tokens, not words")
    add("--vocab-size", type=int, help="vocabulary size, for --dataset token-ids")
    add("--input-len", type=int, default=256, help="words or tokens per prompt (256)")
    add("--output-len", type=int, default=128, help="tokens per answer (128)")
    add("--range-ratio", type=float, default=0.0, help="fraction by which lengths vary (0)")
    add(
        "--shared-prefix-len",
        type=int,
        default=0,
        help="length of an additional prefix that all prompts share (0)",
    )
    add("--seed", type=int, default=0, help="seed of prompts and arrivals (0)")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="answers have exactly --output-len tokens; other servers may reject the field (on)",
    )
    add("--extra-body", help="additional fields of each request, as a JSON object")
    add("--slo", nargs="+", help="targets for goodput: ttft_ms=1000 tbt_ms=.. tpot_ms=50 e2e_ms=..")
    add("--result", type=Path, help="write the results to this file, JSON")
    add("--plot", type=Path, help="write a page of plots to this file, HTML")
