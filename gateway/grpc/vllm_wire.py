"""Conversion between vLLM's gRPC messages and the gateway's. Validates only what is vLLM's.

Sampling parameters have the same names and meanings on both sides; in vLLM's message a plain field
that is 0 is not set. A chunk has its own number of tokens; the reader adds them up.
Needs the stubs of smg-grpc-proto (the extra `smg`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smg_grpc_proto import vllm_engine_pb2

from ...core.errors import InvalidRequest
from ...core.request.request import TokenLogprobs
from ...core.request.sampling_params import SAMPLING
from ...core.request.token_ids import pack
from ...proto.v1 import common_pb2, inference_pb2
from ..request.output_chunk import OutputChunk, RequestResult

_ANY_OBJECT = '{"type": "object"}'
# Not implemented here, or not allowed from a client.
_UNSUPPORTED = (
    *("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "extra_mm_inputs"),
    "media_refs",
)


def request_from_vllm(theirs: Any) -> inference_pb2.GenerateRequest:
    """vLLM's GenerateRequest as ours. Raises InvalidRequest for fields that ours does not have."""
    given = {descriptor.name for descriptor, _ in theirs.ListFields()}
    if unsupported := sorted(given.intersection(_UNSUPPORTED)):
        raise _unsupported(unsupported[0])
    if theirs.data_parallel_rank:
        raise _unsupported("data_parallel_rank")  # there is one rank, 0
    ours = inference_pb2.GenerateRequest(request_id=theirs.request_id)
    match theirs.WhichOneof("input"):
        case "text":
            ours.text = theirs.text
        case "tokenized":
            ours.token_ids.packed = pack(theirs.tokenized.input_ids[:])
    params = theirs.sampling_params
    ours.sampling.CopyFrom(_sampling_from_vllm(params))
    if params.n:
        ours.n = params.n
    ours.skip_special_tokens = params.skip_special_tokens
    ours.include_stop_str_in_output = params.include_stop_str_in_output
    return ours


def _sampling_from_vllm(theirs: Any) -> common_pb2.SamplingParams:
    if theirs.HasField("truncate_prompt_tokens"):
        raise _unsupported("truncate_prompt_tokens")
    given = {field.name: value for field, value in theirs.ListFields() if field.name in SAMPLING}
    for name in ("seed", "logprobs", "prompt_logprobs"):
        if given.get(name, 0) < 0:
            raise _not_negative(name)
    if any(token_id < 0 for token_id in theirs.logit_bias):
        raise _not_negative("logit_bias")
    return common_pb2.SamplingParams(**given, **_constraint(theirs))


def _constraint(theirs: Any) -> Mapping[str, Any]:
    match theirs.WhichOneof("constraint"):
        case "json_object":
            return {"json_schema": _ANY_OBJECT} if theirs.json_object else {}
        case "choice":
            return {"choice": common_pb2.Choices(values=theirs.choice.choices)}
        case "structural_tag":
            raise _unsupported("structural_tag")
        case str(name):
            return {name: getattr(theirs, name)}
    return {}


def _unsupported(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is not supported here", name, "unsupported_parameter")


def _not_negative(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} must not be negative", name, "invalid_value")


@dataclass(slots=True)
class SampleMessages:
    """The messages of one sample. `is_stream`: a message for each chunk, else one at the end."""

    prompt_token_ids: Sequence[int]
    is_stream: bool
    _kept: list[OutputChunk] = field(default_factory=list)

    def messages(self, chunk: OutputChunk) -> Iterable[Any]:
        """The GenerateResponses to send after `chunk`."""
        if not self.is_stream:
            self._kept.append(chunk)
        elif chunk.token_ids or chunk.prompt_logprobs:
            yield vllm_engine_pb2.GenerateResponse(chunk=self._chunk(chunk))
        if chunk.result is not None:
            last = self._kept or [chunk]
            yield vllm_engine_pb2.GenerateResponse(complete=self._complete(last, chunk.result))

    def _chunk(self, chunk: OutputChunk) -> Any:
        return vllm_engine_pb2.GenerateStreamChunk(
            token_ids=chunk.token_ids,
            completion_tokens=len(chunk.token_ids),
            index=chunk.sample_index,
            prompt_tokens=len(self.prompt_token_ids),
            cached_tokens=chunk.result.cached_tokens if chunk.result else 0,
            output_logprobs=_output_logprobs([chunk]),
            input_logprobs=self._input_logprobs([chunk]),
        )

    def _complete(self, chunks: Sequence[OutputChunk], result: RequestResult) -> Any:
        """The last message; of a stream it has the last chunk's tokens, which were sent before."""
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        stop = result.matched_stop
        name = "matched_token_id" if isinstance(stop, int) else "matched_stop_str"
        return vllm_engine_pb2.GenerateComplete(
            output_ids=token_ids,
            finish_reason=result.finish_reason.value,
            completion_tokens=len(token_ids),
            index=chunks[-1].sample_index,
            prompt_tokens=result.prompt_tokens,
            cached_tokens=result.cached_tokens,
            output_logprobs=_output_logprobs(chunks),
            input_logprobs=self._input_logprobs(chunks),
            **{name: stop},
        )

    def _input_logprobs(self, chunks: Sequence[OutputChunk]) -> Any:
        """The log-probabilities of all prompt tokens; the first has none."""
        found = [logprobs for chunk in chunks for logprobs in chunk.prompt_logprobs]
        if not found:
            return None
        values = [vllm_engine_pb2.InputTokenLogProb(value=of.logprob) for of in found]
        return vllm_engine_pb2.InputLogProbs(
            token_ids=self.prompt_token_ids,
            token_logprobs=[vllm_engine_pb2.InputTokenLogProb(), *values],
            top_logprobs=[vllm_engine_pb2.TopLogProbs(), *map(_top_logprobs, found)],
        )


def _output_logprobs(chunks: Sequence[OutputChunk]) -> Any:
    found = [logprobs for chunk in chunks for logprobs in chunk.logprobs]
    if not found:
        return None
    return vllm_engine_pb2.OutputLogProbs(
        token_ids=[token_id for chunk in chunks for token_id in chunk.token_ids],
        token_logprobs=[of.logprob for of in found],
        top_logprobs=list(map(_top_logprobs, found)),
    )


def _top_logprobs(of: TokenLogprobs) -> Any:
    return vllm_engine_pb2.TopLogProbs(
        token_ids=[token_id for token_id, _ in of.top], values=[value for _, value in of.top]
    )
