"""Conversion between vLLM's gRPC messages and ours. Skipped without the extra `smg`."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.runtime_version import VersionError

from baton.core.errors import InvalidRequest
from baton.core.request.request import FinishReason, TokenLogprobs
from baton.core.request.token_ids import pack
from baton.gateway.request.output_chunk import OutputChunk, RequestResult

try:
    from smg_grpc_proto import vllm_engine_pb2 as vllm
except (ImportError, VersionError) as error:
    pytest.skip(f"smg-grpc-proto: {error}", allow_module_level=True)
else:
    from baton.gateway.grpc.vllm_wire import SampleMessages, request_from_vllm


def ask(**sampling: Any) -> Any:
    return vllm.GenerateRequest(
        request_id="r", text="hi", sampling_params=vllm.SamplingParams(**sampling)
    )


def result(**changes: Any) -> RequestResult:
    fields: dict[str, Any] = {
        "finish_reason": FinishReason.LENGTH, "matched_stop": None, "prompt_tokens": 3,
        "completion_tokens": 3, "cached_tokens": 2, "prefill_node": "p", "decode_node": "d",
        "transfer": None, "attempts": 1, "seed": 0, "timeline": (),
    }  # fmt: skip
    return RequestResult(**fields | changes)


def test_what_is_not_set_is_not_asked_for() -> None:
    ours = request_from_vllm(ask())
    assert (ours.text, ours.request_id) == ("hi", "r")
    assert not ours.sampling.ListFields()
    assert not ours.HasField("n")


def test_what_is_set_keeps_its_name() -> None:
    given = {
        "temperature": 0.0, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "frequency_penalty": 0.5,
        "presence_penalty": -0.5, "repetition_penalty": 1.5, "max_tokens": 9, "min_tokens": 2,
        "ignore_eos": True, "seed": 0, "logprobs": 0, "prompt_logprobs": 3,
    }  # fmt: skip
    theirs = ask(**given, stop=["x"], stop_token_ids=[4], logit_bias={5: -1.0}, n=2)
    ours = request_from_vllm(theirs)
    assert {name: getattr(ours.sampling, name) for name in given} == given
    assert all(ours.sampling.HasField(n) for n in ("temperature", "seed", "logprobs"))
    assert (list(ours.sampling.stop), list(ours.sampling.stop_token_ids)) == (["x"], [4])
    assert dict(ours.sampling.logit_bias) == {5: -1.0}
    assert ours.n == 2


def test_token_ids() -> None:
    theirs = vllm.GenerateRequest(
        tokenized=vllm.TokenizedInput(original_text="a b", input_ids=[1, 2])
    )
    assert request_from_vllm(theirs).token_ids.packed == pack([1, 2])


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"regex": "a+"}, ("regex", "a+")),
        ({"json_schema": "{}"}, ("json_schema", "{}")),
        ({"grammar": "start: A"}, ("grammar", "start: A")),
        ({"json_object": True}, ("json_schema", '{"type": "object"}')),
        ({"json_object": False}, (None, None)),
    ],
)
def test_constraints(theirs: dict[str, Any], ours: tuple[str | None, str | None]) -> None:
    sampling = request_from_vllm(ask(**theirs)).sampling
    kind = sampling.WhichOneof("constraint")
    assert (kind, kind and getattr(sampling, kind)) == ours


def test_choices() -> None:
    theirs = ask(choice=vllm.ChoiceConstraint(choices=["yes", "no"]))
    assert list(request_from_vllm(theirs).sampling.choice.values) == ["yes", "no"]


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        ({"sampling_params": {"structural_tag": "x"}}, "structural_tag", "unsupported_parameter"),
        (
            {"sampling_params": {"truncate_prompt_tokens": 3}},
            "truncate_prompt_tokens",
            "unsupported_parameter",
        ),
        ({"sampling_params": {"seed": -1}}, "seed", "invalid_value"),
        ({"sampling_params": {"logprobs": -1}}, "logprobs", "invalid_value"),
        ({"sampling_params": {"logit_bias": {-1: 1.0}}}, "logit_bias", "invalid_value"),
        ({"data_parallel_rank": 1}, "data_parallel_rank", "unsupported_parameter"),
        ({"data_parallel_rank": -1}, "data_parallel_rank", "unsupported_parameter"),
        (
            {"kv_transfer_params_json": "{}"},
            "kv_transfer_params_json",
            "unsupported_parameter",
        ),
        (
            {"kv_transfer_params": {"remote_host": "h", "remote_port": 1}},
            "kv_transfer_params",
            "unsupported_parameter",
        ),
        ({"media_refs": {"items": [{"url": "file:///x"}]}}, "media_refs", "unsupported_parameter"),
        ({"mm_inputs": {"im_token_id": 1}}, "mm_inputs", "unsupported_parameter"),
    ],
)
def test_what_cannot_be_done_is_refused(changes: dict[str, Any], param: str, code: str) -> None:
    theirs = vllm.GenerateRequest(text="hi", **changes)
    with pytest.raises(InvalidRequest) as caught:
        request_from_vllm(theirs)
    assert (caught.value.param, caught.value.code) == (param, code)


SCORE = TokenLogprobs(-0.5, ((7, -0.25), (8, -2.0)))
CHUNKS = (
    OutputChunk("a", (7,), 0, logprobs=(SCORE,), prompt_logprobs=(TokenLogprobs(-1.0), SCORE)),
    OutputChunk("b", (), 1),
    OutputChunk("c", (8, 9), 1, result(matched_stop="c"), logprobs=(SCORE, SCORE)),
)


def test_a_stream_ends_with_why() -> None:
    answer = SampleMessages([1, 2, 3], is_stream=True)
    first, second, last = [message for chunk in CHUNKS for message in answer.messages(chunk)]
    assert (list(first.chunk.token_ids), first.chunk.completion_tokens) == ([7], 1)
    assert (list(second.chunk.token_ids), second.chunk.completion_tokens) == ([8, 9], 2)
    assert first.chunk.prompt_tokens == second.chunk.prompt_tokens == 3
    assert last.complete.finish_reason == "length"
    assert last.complete.matched_stop_str == "c"
    assert last.complete.cached_tokens == second.chunk.cached_tokens == 2


def test_a_stop_id_is_told_as_one() -> None:
    chunk = OutputChunk("", (9,), 0, result(matched_stop=9))
    (message,) = SampleMessages([1], is_stream=False).messages(chunk)
    assert message.complete.WhichOneof("matched_stop") == "matched_token_id"
    assert message.complete.matched_token_id == 9


def test_without_a_stream_there_is_one_message() -> None:
    answer = SampleMessages([1, 2, 3], is_stream=False)
    (message,) = [message for chunk in CHUNKS for message in answer.messages(chunk)]
    assert list(message.complete.output_ids) == [7, 8, 9]
    assert message.complete.completion_tokens == 3


def test_scores_stand_beside_their_tokens() -> None:
    answer = SampleMessages([1, 2, 3], is_stream=False)
    (message,) = [message for chunk in CHUNKS for message in answer.messages(chunk)]
    output, given = message.complete.output_logprobs, message.complete.input_logprobs
    assert list(output.token_ids) == [7, 8, 9]
    assert list(output.token_logprobs) == [-0.5] * 3
    assert list(output.top_logprobs[0].token_ids) == [7, 8]
    assert list(output.top_logprobs[0].values) == [-0.25, -2.0]
    assert list(given.token_ids) == [1, 2, 3]
    assert [score.HasField("value") for score in given.token_logprobs] == [False, True, True]
    assert [score.value for score in given.token_logprobs[1:]] == [-1.0, -0.5]
    assert len(given.top_logprobs) == 3
