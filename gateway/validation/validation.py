"""The one validator of requests: what a client may ask, and what absent fields mean.

Two steps, since a text's length is known only after tokenisation:

    GenerateRequest ── check_request ──► Draft ── complete_request ──► ValidatedRequest
                       ids, ranges, model    (tokenise)   lengths, defaults, seed

Errors name the field at fault as the client knows it. Knows no node: what the deployment can hold
comes in as `ModelLimits`.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ...core.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, PromptTooLarge
from ...core.request.request import SamplingParams
from ...core.request.token_ids import column, unpack
from ...proto.v1 import common_pb2, inference_pb2
from .sampling_validation import check_sampling, check_token_ids

MAX_LABEL_CHARS = 256
MAX_SAMPLES = 8
_MAX_ABORTED = 1024

_LABEL = re.compile(rf"[!-~]{{1,{MAX_LABEL_CHARS}}}\Z")
_CACHE_SALT = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What requests are measured against. The pools' sizes are None while no node is known.

    `max_prompt_tokens`: what the largest prefill pool can hold; `max_total_tokens`: prompt and
    output, in the largest decode pool.
    """

    model: str
    vocab_size: int
    max_model_len: int
    max_prompt_tokens: int | None = None
    max_total_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How output tokens become text. Those that end it have no text in either case."""

    skips_special_tokens: bool = True
    includes_stop: bool = False


@dataclass(frozen=True, slots=True)
class Draft:
    """A request whose fields are each in order; `None` takes the default of complete_request."""

    prompt: str | array[int]
    max_tokens: int | None
    seed: int | None
    sampling: SamplingParams  # all but these two
    num_samples: int
    label: str
    cache_salt: str = ""
    adds_special_tokens: bool = True
    text: TextOptions = TextOptions()


@dataclass(frozen=True, slots=True)
class ValidatedRequest:
    """A request that the deployment can serve. `label` is the caller's name for it.

    `cache_salt`: as the caller wrote it, until security/tenancy.py has keyed it with the tenant.
    """

    prompt_token_ids: array[int]  # read only
    sampling: SamplingParams
    label: str
    num_samples: int = 1
    cache_salt: str = ""
    tenant: str = ""
    caller_id: int = 0
    text: TextOptions = TextOptions()


def check_request(wire: inference_pb2.GenerateRequest, limits: ModelLimits) -> Draft:
    """Check every field that needs no tokeniser; raises InvalidRequest kin or ModelNotFound."""
    check_model(wire.model, limits)
    check_label(wire.request_id, "request_id")
    return Draft(
        prompt=_prompt(wire, limits.vocab_size),
        max_tokens=_max_tokens(wire.sampling),
        seed=_seed(wire.sampling),
        sampling=check_sampling(wire.sampling, limits.vocab_size),
        num_samples=_num_samples(wire),
        label=wire.request_id,
        cache_salt=_cache_salt(wire),
        adds_special_tokens=_true_unless_false(wire, "add_special_tokens"),
        text=TextOptions(
            skips_special_tokens=_true_unless_false(wire, "skip_special_tokens"),
            includes_stop=wire.include_stop_str_in_output,
        ),
    )


def complete_request(
    draft: Draft, prompt_token_ids: Iterable[int], limits: ModelLimits, *, drawn_seed: int
) -> ValidatedRequest:
    """Check the lengths and fill in the defaults.

    `max_tokens` defaults to what is left of the context, or of the largest decode pool where that
    is smaller. Raises ContextLengthExceeded, PromptTooLarge.
    """
    prompt = column(prompt_token_ids)
    if not prompt:
        raise _empty_prompt()
    max_tokens = _fitting_max_tokens(len(prompt), draft.max_tokens, limits)
    if draft.sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens {draft.sampling.min_tokens} is more than the {max_tokens} there can be",
            param="min_tokens",
            code="invalid_value",
        )
    seed = drawn_seed if draft.seed is None else draft.seed
    sampling = replace(draft.sampling, max_tokens=max_tokens, seed=seed)
    return ValidatedRequest(
        prompt,
        sampling,
        draft.label,
        draft.num_samples,
        draft.cache_salt,
        text=draft.text,
    )


def check_model(name: str, limits: ModelLimits) -> None:
    """Raise ModelNotFound unless `name` is empty or the one that is served."""
    if name and name != limits.model:
        raise ModelNotFound(f"The model `{name[:64]}` does not exist.", param="model")


def is_label(text: str) -> bool:
    """Whether a caller may name its request so: the name stands in logs and headers as it is."""
    return _LABEL.match(text) is not None


def check_label(label: str, param: str) -> None:
    """Raise InvalidRequest unless it is a label, or empty: the request has none."""
    if label and not is_label(label):
        raise InvalidRequest(
            f"{param} must be 1 to {MAX_LABEL_CHARS} visible ASCII characters",
            param=param,
            code="invalid_value",
        )


def check_names(names: Sequence[str]) -> None:
    """Raise InvalidRequest for more names of requests, to be aborted, than one call may have."""
    if len(names) > _MAX_ABORTED:
        raise InvalidRequest(
            f"ids has more than {_MAX_ABORTED} items", param="ids", code="array_too_long"
        )


def _prompt(wire: inference_pb2.GenerateRequest, vocab_size: int) -> str | array[int]:
    """A oneof holds at most one of the two; an empty text or list is no prompt either."""
    if wire.WhichOneof("prompt") is None:
        raise InvalidRequest(
            "give a prompt: text or token ids", param="prompt", code="missing_required"
        )
    if wire.HasField("text"):
        if not wire.text:
            raise _empty_prompt()
        return wire.text
    token_ids = _token_ids(wire.token_ids)
    if not token_ids:
        raise _empty_prompt()
    check_token_ids(token_ids, vocab_size, "prompt")
    return token_ids


def _token_ids(wire: inference_pb2.TokenIds) -> array[int]:
    if not wire.packed:
        return column(wire.ids[:])  # a slice is read at once, the field itself id by id
    if wire.ids:
        raise InvalidRequest(
            "give token_ids as ids or packed, not both", param="prompt", code="invalid_value"
        )
    try:
        return unpack(wire.packed)
    except ValueError as error:
        raise InvalidRequest(
            "packed token ids are cut off", param="prompt", code="invalid_value"
        ) from error


def _empty_prompt() -> InvalidRequest:
    return InvalidRequest("the prompt is empty", param="prompt", code="empty_prompt")


def _true_unless_false(wire: inference_pb2.GenerateRequest, name: str) -> bool:
    return bool(getattr(wire, name)) if wire.HasField(name) else True


def _max_tokens(sampling: common_pb2.SamplingParams) -> int | None:
    if not sampling.HasField("max_tokens"):
        return None
    if sampling.max_tokens == 0:
        raise InvalidRequest(
            "max_tokens must be at least 1", param="max_tokens", code="invalid_value"
        )
    return sampling.max_tokens


def _num_samples(wire: inference_pb2.GenerateRequest) -> int:
    num_samples = wire.n if wire.HasField("n") else 1
    if not 1 <= num_samples <= MAX_SAMPLES:
        raise InvalidRequest(
            f"n must lie in [1, {MAX_SAMPLES}], not {num_samples}", param="n", code="invalid_value"
        )
    return num_samples


def _cache_salt(wire: inference_pb2.GenerateRequest) -> str:
    if not wire.HasField("cache_salt"):
        return ""
    if not _CACHE_SALT.match(wire.cache_salt):
        raise InvalidRequest(
            "cache_salt must be 1 to 64 of A-Z a-z 0-9 _ . -",
            param="cache_salt",
            code="invalid_value",
        )
    return wire.cache_salt


def _seed(sampling: common_pb2.SamplingParams) -> int | None:
    if not sampling.HasField("seed"):
        return None
    if sampling.seed >= 1 << 63:
        raise InvalidRequest("seed must lie in [0, 2**63)", param="seed", code="invalid_value")
    return sampling.seed


def _fitting_max_tokens(num_prompt: int, max_tokens: int | None, limits: ModelLimits) -> int:
    """`max_tokens` or its default; raises where prompt and output cannot fit."""
    context = limits.max_model_len
    if num_prompt + (max_tokens or 1) > context:
        asked = "1 token at least" if max_tokens is None else f"max_tokens {max_tokens}"
        raise ContextLengthExceeded(
            f"prompt ({num_prompt} tokens) + {asked} is more than the context of {context} tokens",
            param="prompt" if num_prompt >= context else "max_tokens",
        )
    prompt_room = context if limits.max_prompt_tokens is None else limits.max_prompt_tokens
    total_room = context if limits.max_total_tokens is None else limits.max_total_tokens
    if num_prompt > prompt_room or num_prompt + (max_tokens or 1) > total_room:
        raise PromptTooLarge(
            f"prompt ({num_prompt} tokens) and max_tokens ({max_tokens or 1}) fit the context but "
            f"no KV pool here: prefill nodes hold {prompt_room}, decode nodes {total_room} tokens",
            param="prompt",
        )
    return min(context, total_room) - num_prompt if max_tokens is None else max_tokens
