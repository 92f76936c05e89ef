"""The client without a network: requests built, streams collected, failures translated."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

import grpc
import numpy as np
import pytest

from baton.client import AsyncClient, Client, FinishReason
from baton.client.client import Generation
from baton.client.messages import GenerateParams, build_request
from baton.client.unary_calls import abort_call, detokenize_call, tokenize_call, translate
from baton.core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    Overloaded,
    PromptTooLarge,
    Unavailable,
)
from baton.core.request.constraint import ConstraintKind
from baton.core.request.sampling_params import OPTIONS, SAMPLING, Parameter
from baton.core.request.text_parameters import EARLY_STOPPING
from baton.core.request.timeline import Event, Stamp
from baton.proto.v1 import common_pb2, inference_pb2


def test_absent_parameters_stay_absent() -> None:
    request, timeout_s = build_request("hi", {})
    assert request == inference_pb2.GenerateRequest(text="hi")
    assert timeout_s is None
    assert not request.HasField("sampling")


@pytest.mark.parametrize(
    ("params", "sampling"),
    [
        ({"json_schema": {"type": "object"}}, {"json_schema": '{"type": "object"}'}),
        ({"json_schema": "{}"}, {"json_schema": "{}"}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"choice": ["a", "b"]}, {"choice": common_pb2.Choices(values=["a", "b"])}),
        ({"grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
    ],
)
def test_a_constraint_arrives(params: GenerateParams, sampling: dict[str, Any]) -> None:
    request, _ = build_request("hi", params)
    assert request.sampling == common_pb2.SamplingParams(**sampling)


def test_a_constraint_that_cannot_be_said_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        build_request("hi", {"choice": [1]})  # type: ignore[list-item]


LOOP: dict[str, Any] = {}
LOOP["not"] = LOOP
EXAMPLES: dict[str, Any] = {
    "number": 0.5, "integer": 7, "boolean": True, "string": "ours",
    "texts": ["END"], "early": "never", "array": [1, 2], "object": {4: -2.0},
}  # fmt: skip
TYPES: dict[str, Any] = {
    "number": float, "integer": int, "boolean": bool, "string": str,
    "early": bool | str, "texts": str | Sequence[str], "array": Sequence[int],
    "object": Mapping[int, float],
}  # fmt: skip


def shape(parameter: Parameter) -> str:
    """The JSON type of a parameter's values."""
    if parameter.kind is EARLY_STOPPING:
        return "early"
    return str(parameter.field.schema.get("type", "texts"))


def test_the_client_s_types_are_those_of_the_table() -> None:
    hints = get_type_hints(GenerateParams)
    table = {**SAMPLING, **OPTIONS}
    assert {name: hints[name] for name in table} == {
        name: TYPES[shape(one)] for name, one in table.items()
    }
    beside = {"prompt_token_ids", "model", "timeout_s", "request_id"}
    assert set(hints) - set(table) == beside | {kind.value for kind in ConstraintKind}


def test_every_parameter_arrives() -> None:
    sampling = {name: EXAMPLES[shape(one)] for name, one in SAMPLING.items()}
    options = {name: EXAMPLES[shape(one)] for name, one in OPTIONS.items()}
    sampling["top_k"] = 0
    params: Any = sampling | options | {"model": "m", "request_id": "mine"}
    request, timeout_s = build_request(
        None, params | {"prompt_token_ids": (3, 4), "timeout_s": 1.5, "stop": "END"}
    )
    expected = inference_pb2.GenerateRequest(
        model="m", request_id="mine", sampling=common_pb2.SamplingParams(**sampling), **options
    )
    expected.token_ids.packed = b"\3\0\0\0\4\0\0\0"
    assert (request, timeout_s) == (expected, 1.5)
    assert request.sampling.HasField("top_k"), "an explicit 0 is not nothing"


def test_early_stopping_may_be_a_boolean() -> None:
    for value, text in ((True, "true"), (False, "false"), ("never", "never")):
        request, _ = build_request("x", {"early_stopping": value})
        assert request.sampling.early_stopping == text


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ("x", {"prompt_token_ids": [1]}, "prompt"),
        (None, {"prompt_token_ids": [-1]}, "prompt"),
        (None, {"prompt_token_ids": [2**32]}, "prompt"),
        (None, {"prompt_token_ids": ["a"]}, "prompt"),
        (None, {"prompt_token_ids": [1.0]}, "prompt"),
        (None, {"prompt_token_ids": 5}, "prompt"),
        ("\ud800", {}, "prompt"),
        (5, {}, "prompt"),
        ("x", {"max_tokens": -1}, "max_tokens"),
        ([1, 2], {}, "prompt"),
        ("x", {"max_tokens": 2**32}, "max_tokens"),
        ("x", {"max_tokens": "10"}, "max_tokens"),
        ("x", {"max_tokens": 1.5}, "max_tokens"),
        ("x", {"temperature": "hot"}, "temperature"),
        ("x", {"seed": -1}, "seed"),
        ("x", {"seed": 2**64}, "seed"),
        ("x", {"stop": [1]}, "stop"),
        ("x", {"stop": 5}, "stop"),
        ("x", {"stop_token_ids": 5}, "stop_token_ids"),
        ("x", {"allowed_token_ids": []}, "allowed_token_ids"),
        ("x", {"logit_bias": {"abc": 1.0}}, "logit_bias"),
        ("x", {"logit_bias": {-1: 1.0}}, "logit_bias"),
        ("x", {"logit_bias": [1]}, "logit_bias"),
        ("x", {"logprobs": -1}, "logprobs"),
        ("x", {"min_tokens": -1}, "min_tokens"),
        ("x", {"n": -1}, "n"),
        ("x", {"json_schema": {"enum": {1}}}, "json_schema"),
        ("x", {"json_schema": LOOP}, "json_schema"),
        ("x", {"json_schema": [1]}, "json_schema"),
        ("x", {"max_tokens": np.int64(-1)}, "max_tokens"),
        ("x", {"timeout_s": math.nan}, "timeout_s"),
        ("x", {"timeout_s": "5"}, "timeout_s"),
        ("x", {"timeout_s": [5]}, "timeout_s"),
        ("x", {"timeout_s": True}, "timeout_s"),
    ],
)
def test_what_the_wire_cannot_say(prompt: Any, params: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_request(prompt, params)
    assert caught.value.param == param


def test_none_is_not_given() -> None:
    names = [*get_type_hints(GenerateParams)]
    assert build_request("x", dict.fromkeys(names)) == build_request("x", {})  # type: ignore[arg-type]


def test_numbers_may_be_numpys() -> None:
    given: Any = {"max_tokens": np.int64(3), "temperature": np.float32(0.5), "n": np.int32(2)}
    plain: Any = {"max_tokens": 3, "temperature": 0.5, "n": 2}
    assert build_request("x", given) == build_request("x", plain)


def test_a_timeout_that_is_far_off() -> None:
    """A deadline too far for gRPC to represent is shortened; gRPC would treat it as expired."""
    for timeout_s, expected in ((math.inf, None), (None, None), (0, 0.0), (np.float32(0.5), 0.5)):
        assert build_request("x", {"timeout_s": timeout_s})[1] == expected  # type: ignore[typeddict-item]
    for timeout_s in (1e12, 1e300):
        assert 1e6 < (build_request("x", {"timeout_s": timeout_s})[1] or 0) < 1e9


def test_unknown_parameters_are_the_callers_bug() -> None:
    with pytest.raises(TypeError, match="max_token"):
        build_request("x", {"max_token": 5})  # type: ignore[typeddict-unknown-key]


def test_a_collected_stream() -> None:
    first = inference_pb2.GenerateChunk(id="g", text="a", token_ids=[1], index=0)
    last = inference_pb2.GenerateChunk(id="g", text="bc", token_ids=[2, 3], index=1)
    last.finish_reason, last.matched_stop = common_pb2.FINISH_REASON_STOP, "END"
    last.result.prefill_node, last.result.seed = "p", 4
    last.result.timeline.add(event="finished", unix_ns=5, node="gateway")
    generation = Generation(iter((first, last)), 1, time.monotonic())
    assert generation.id == ""
    chunk = next(generation)
    assert generation.id == "g"
    assert (chunk.text, chunk.token_ids, chunk.index, chunk.finish_reason) == ("a", (1,), 0, None)
    assert next(generation).finish_reason is FinishReason.STOP
    result = generation.result
    assert (result.id, result.text, result.token_ids) == ("g", "abc", (1, 2, 3))
    assert (result.matched_stop, result.decode_node, result.transport) == ("END", None, None)
    assert result.timeline == (Stamp(Event.FINISHED, 5, "gateway"),)
    assert len(result.times.token_s) == 3 and result.times.sent_s <= result.times.token_s[0]


def test_a_torn_stream_is_noticed() -> None:
    torn = Generation(iter([inference_pb2.GenerateChunk(token_ids=[1], index=1)]))
    with pytest.raises(BatonError, match="missing"):
        next(torn)


class Failure:
    """The methods that both kinds of gRPC errors have."""

    def __init__(self, status: grpc.StatusCode, details: str = "", **metadata: str) -> None:
        self._status, self._details = status, details
        self._metadata = [(key.replace("_", "-"), value) for key, value in metadata.items()]

    def code(self) -> grpc.StatusCode:
        return self._status

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> list[tuple[str, str]] | None:
        return self._metadata or None


@pytest.mark.parametrize(
    ("failure", "error", "message", "param"),
    [
        (Failure(grpc.StatusCode.UNAVAILABLE, "refused"), Unavailable, "refused", None),
        (Failure(grpc.StatusCode.DEADLINE_EXCEEDED), DeadlineExceeded, "DEADLINE_EXCEEDED", None),
        (Failure(grpc.StatusCode.UNKNOWN, "?"), BatonError, "?", None),
        (Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"), Overloaded, "full", None),
        (
            Failure(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (5 vs. 4)"
            ),
            InvalidRequest,
            "the request is too large: Received message larger than max (5 vs. 4)",
            None,
        ),
        (
            Failure(grpc.StatusCode.INTERNAL, "m", baton_error_code="engine_failed"),
            EngineFailed,
            "m",
            None,
        ),
        (
            Failure(
                grpc.StatusCode.FAILED_PRECONDITION,
                "m",
                baton_error_code="prompt_too_large_for_deployment",
                baton_error_param="prompt",
            ),
            PromptTooLarge,
            "m",
            "prompt",
        ),
        (Failure(grpc.StatusCode.ABORTED, "m", baton_error_code="new"), BatonError, "m", None),
    ],
)
def test_failures_become_typed_errors(
    failure: Failure, error: type[BatonError], message: str, param: str | None
) -> None:
    translated = translate(failure)
    assert (type(translated), translated.message, translated.param) == (error, message, param)


@pytest.mark.parametrize(
    ("call", "given", "param"),
    [
        (tokenize_call, None, "text"),
        (detokenize_call, [-1], "ids"),
        (detokenize_call, 1, "ids"),
        (abort_call, (["a", "b"],), "ids"),
        (abort_call, (1,), "ids"),
    ],
)
def test_what_other_calls_cannot_say(call: Any, given: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        call(given)
    assert caught.value.param == param


def test_a_stream_that_ends_without_a_result_is_an_error() -> None:
    with pytest.raises(BatonError, match="without a result"):
        _ = Generation(iter(())).result


class Left(Failure, grpc.RpcError):
    """A call of two samples that its client has cancelled; like gRPC's, it is also the error."""

    def __init__(self) -> None:
        super().__init__(grpc.StatusCode.CANCELLED)
        self._indices = iter(range(2))

    def __next__(self) -> inference_pb2.GenerateChunk:
        for index in self._indices:
            chunk = inference_pb2.GenerateChunk(id="g", text="a", sample_index=index)
            chunk.finish_reason = common_pb2.FINISH_REASON_STOP
            return chunk
        raise self


def test_what_came_whole_outlives_the_call() -> None:
    generation = Generation(Left(), 2)
    next(generation)
    next(generation)
    assert generation.result.text == "a"
    assert len(generation.results) == 2
    generation = Generation(Left(), 3)
    with pytest.raises(Cancelled):
        _ = generation.results


def test_both_clients_can_do_the_same() -> None:
    def calls(client: type) -> set[str]:
        members = inspect.getmembers(client, inspect.isfunction)
        return {name for name, _ in members if not name.startswith("_")}

    assert calls(Client) == calls(AsyncClient)
