"""The validator, row by row: refusals with error and field; the meaning of defaults."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fakes.gateway.requests import validated_at_once

from baton.core.errors import (
    BatonError,
    ContextLengthExceeded,
    InvalidRequest,
    PromptTooLarge,
)
from baton.core.request.sampling_params import SamplingParams
from baton.core.request.token_ids import column, pack
from baton.gateway.grpc.unary_methods import check_names
from baton.gateway.validation.served_model import ModelLimits
from baton.gateway.validation.validation import ValidatedRequest
from baton.proto.v1 import common_pb2, inference_pb2

LIMITS = ModelLimits("demo", vocab_size=100, max_model_len=50)


def wire(**fields: Any) -> inference_pb2.GenerateRequest:
    """A request with prompt "ab" by default; sampling fields may be given by name."""
    names = common_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    sampling = {key: fields.pop(key) for key in list(fields) if key in names}
    forms = inference_pb2.TokenIds.DESCRIPTOR.fields_by_name
    if ids := {key: fields.pop(key) for key in list(fields) if key in forms}:
        fields["token_ids"] = inference_pb2.TokenIds(**ids)
    elif "text" not in fields:
        fields["text"] = "ab"
    return inference_pb2.GenerateRequest(sampling=common_pb2.SamplingParams(**sampling), **fields)


def validate(
    request: inference_pb2.GenerateRequest,
    limits: ModelLimits = LIMITS,
    encode: Callable[[str], Sequence[int]] = lambda text: range(len(text)),
) -> ValidatedRequest:
    return validated_at_once(request, limits, encode, drawn_seed=77)


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"text": ""}, InvalidRequest, "prompt"),
        ({"ids": []}, InvalidRequest, "prompt"),
        ({"ids": [1, 99, 100]}, InvalidRequest, "prompt[2]"),
        ({"ids": [2**32 - 1]}, InvalidRequest, "prompt[0]"),
        ({"packed": b""}, InvalidRequest, "prompt"),
        ({"packed": b"12345"}, InvalidRequest, "prompt"),
        ({"packed": pack([1]), "ids": [1]}, InvalidRequest, "prompt"),
        ({"packed": pack([1, 99, 100])}, InvalidRequest, "prompt[2]"),
        ({"packed": pack([2**32 - 1])}, InvalidRequest, "prompt[0]"),
        ({"packed": pack([1] * 50)}, ContextLengthExceeded, "prompt"),
        ({"request_id": "x" * 257}, InvalidRequest, "request_id"),
        ({"max_tokens": 0}, InvalidRequest, "max_tokens"),
        ({"max_tokens": 49}, ContextLengthExceeded, "max_tokens"),
        ({"max_tokens": 2**32 - 1}, ContextLengthExceeded, "max_tokens"),
        ({"ids": [1] * 50}, ContextLengthExceeded, "prompt"),
        ({"ids": [1] * 51, "max_tokens": 1}, ContextLengthExceeded, "prompt"),
        ({"temperature": -0.01}, InvalidRequest, "temperature"),
        ({"temperature": 2.01}, InvalidRequest, "temperature"),
        ({"temperature": math.nan}, InvalidRequest, "temperature"),
        ({"temperature": math.inf}, InvalidRequest, "temperature"),
        ({"top_p": 0.0}, InvalidRequest, "top_p"),
        ({"top_p": -0.1}, InvalidRequest, "top_p"),
        ({"top_p": 1.1}, InvalidRequest, "top_p"),
        ({"top_p": math.nan}, InvalidRequest, "top_p"),
        ({"min_p": -0.1}, InvalidRequest, "min_p"),
        ({"min_p": 2.0}, InvalidRequest, "min_p"),
        ({"repetition_penalty": 0.0}, InvalidRequest, "repetition_penalty"),
        ({"repetition_penalty": 2.1}, InvalidRequest, "repetition_penalty"),
        ({"repetition_penalty": math.nan}, InvalidRequest, "repetition_penalty"),
        ({"presence_penalty": -2.1}, InvalidRequest, "presence_penalty"),
        ({"presence_penalty": math.inf}, InvalidRequest, "presence_penalty"),
        ({"frequency_penalty": 1e38}, InvalidRequest, "frequency_penalty"),
        ({"frequency_penalty": math.nan}, InvalidRequest, "frequency_penalty"),
        ({"logit_bias": {100: 1.0}}, InvalidRequest, "logit_bias"),
        ({"logit_bias": {1: 1e9}}, InvalidRequest, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, InvalidRequest, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, InvalidRequest, "logit_bias"),
        ({"min_tokens": 6, "max_tokens": 5}, InvalidRequest, "min_tokens"),
        ({"min_tokens": 49}, InvalidRequest, "min_tokens"),
        ({"min_tokens": 1, "stop_token_ids": range(100)}, InvalidRequest, "min_tokens"),
        (
            {"min_tokens": 1, "stop_token_ids": [4, 5], "allowed_token_ids": [5, 4, 4]},
            InvalidRequest,
            "min_tokens",
        ),
        ({"allowed_token_ids": [1, 100]}, InvalidRequest, "allowed_token_ids[1]"),
        (
            {"allowed_token_ids": [1, 2], "use_beam_search": True, "best_of": 2},
            InvalidRequest,
            "allowed_token_ids",
        ),
        ({"logprobs": 21}, InvalidRequest, "logprobs"),
        ({"prompt_logprobs": 10_000}, InvalidRequest, "prompt_logprobs"),
        ({"n": 0}, InvalidRequest, "n"),
        ({"n": 17}, InvalidRequest, "n"),
        ({"n": 10**9}, InvalidRequest, "n"),
        ({"seed": 2**63}, InvalidRequest, "seed"),
        ({"seed": 2**64 - 1}, InvalidRequest, "seed"),
        ({"stop": ["a"] * 17}, InvalidRequest, "stop"),
        ({"stop": ["a", ""]}, InvalidRequest, "stop[1]"),
        ({"stop": ["é" * 129]}, InvalidRequest, "stop[0]"),
        ({"stop_token_ids": [1, 100]}, InvalidRequest, "stop_token_ids[1]"),
        ({"stop_token_ids": [1] * 257}, InvalidRequest, "stop_token_ids"),
    ],
)
def test_refused(fields: dict[str, Any], error: type[BatonError], param: str) -> None:
    with pytest.raises(BatonError) as caught:
        validate(wire(**fields))
    assert (type(caught.value), caught.value.param) == (error, param)
    assert len(caught.value.message) < 200, "a caller's value is not thrown back whole"


def test_no_prompt_at_all() -> None:
    with pytest.raises(InvalidRequest, match="give a prompt"):
        validate(inference_pb2.GenerateRequest())


def test_a_text_of_no_tokens() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        validate(wire(), encode=lambda text: ())


def test_a_text_with_a_token_of_the_tokenizer_alone() -> None:
    with pytest.raises(InvalidRequest, match="token 100") as caught:
        validate(wire(), encode=lambda text: (5, 100))
    assert (caught.value.code, caught.value.param) == ("invalid_token_id", "prompt")


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 48},
        {"ids": [0, 99], "max_tokens": 1},
        {"ids": [1] * 49},
        {"temperature": 2.0},
        {"temperature": 0.0},
        {"top_p": 1.0},
        {"top_p": 1e-6},
        {"top_k": 2**32 - 1},
        {"seed": 2**63 - 1},
        {"stop": ["a", "b", "c", "é" * 128]},
        {"stop_token_ids": [0, 99]},
        {"allowed_token_ids": [0, 99], "min_tokens": 1, "stop_token_ids": [0]},
        {"model": "demo", "request_id": "x" * 256},
    ],
)
def test_accepted(fields: dict[str, Any]) -> None:
    validate(wire(**fields))


def test_token_ids_are_the_same_packed_or_not() -> None:
    ids = [0, 99, 7]
    plain, packed = validate(wire(ids=ids)), validate(wire(packed=pack(ids)))
    assert plain == packed
    assert packed.prompt_token_ids == column(ids)


def test_defaults() -> None:
    request = validate(wire())
    assert request.sampling == SamplingParams(
        max_tokens=48, temperature=1.0, top_p=1.0, top_k=None, seed=77
    )
    assert (request.prompt_token_ids, request.label) == (column((0, 1)), "")


def test_values_pass_through() -> None:
    fields = {"max_tokens": 3, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": 5}
    more = {"stop": ["x"], "stop_token_ids": [4, 9, 4], "ignore_eos": True}
    request = validate(wire(**fields, **more, request_id="mine"))
    assert request.sampling == SamplingParams(3, 0.5, 0.25, 7, 5, ("x",), (4, 9), True)
    assert request.label == "mine"


def test_an_explicit_zero_top_k_is_no_limit() -> None:
    assert validate(wire(top_k=0)).sampling.top_k is None


@pytest.mark.parametrize(
    "name", ["temperature", "min_p", "presence_penalty", "frequency_penalty", "logit_bias"]
)
def test_numbers_too_small_for_the_sampler_are_zero_and_minus_zero_is_none(name: str) -> None:
    def validated(number: float) -> object:
        fields = {name: {1: number} if name == "logit_bias" else number}
        return getattr(validate(wire(**fields)).sampling, name)

    zero = validated(0.0)
    for tiny in (1e-40, 1e-50):
        assert repr(validated(tiny)) == repr(zero)
    assert validated(1e-37) != zero
    for minus_zero in (-0.0, -1e-40, -1e-50):
        with pytest.raises(InvalidRequest, match="-0") as caught:
            validated(minus_zero)
        assert (caught.value.code, caught.value.param) == ("invalid_value", name)


def test_lengths_are_both_named() -> None:
    with pytest.raises(ContextLengthExceeded, match=r"2 tokens.*60.*50"):
        validate(wire(max_tokens=60))


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"),
    [(10, 10, True), (11, 1, False), (10, 11, False), (1, 19, True), (1, 20, False)],
)
def test_what_no_pool_can_hold(prompt: int, max_tokens: int, fits: bool) -> None:
    pools = ModelLimits("demo", 100, 50, max_prompt_tokens=10, max_total_tokens=20)
    request = wire(ids=[1] * prompt, max_tokens=max_tokens)
    if fits:
        validate(request, pools)
        return
    with pytest.raises(PromptTooLarge):
        validate(request, pools)


def test_the_default_length_fits_the_pools() -> None:
    pools = ModelLimits("demo", 100, 50, max_prompt_tokens=10, max_total_tokens=20)
    assert validate(wire(ids=[1] * 5), pools).sampling.max_tokens == 15


@pytest.mark.parametrize("label", ["x" * 257, "a b", "a\n", "a\r\nb: c", "\0", "é", "😀", "\x7f"])
def test_labels_are_visible_ascii(label: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(wire(request_id=label))
    assert (caught.value.code, caught.value.param) == ("invalid_value", "request_id")


def test_names_to_abort_are_bounded() -> None:
    check_names(["x"] * 1024)
    with pytest.raises(InvalidRequest) as caught:
        check_names(["x"] * 1025)
    assert (caught.value.code, caught.value.param) == ("array_too_long", "ids")
