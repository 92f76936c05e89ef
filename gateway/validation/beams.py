"""The checks of `use_beam_search` and `best_of` together with other parameters. A combination that
is not possible is refused by the parameter's name."""

from __future__ import annotations

from dataclasses import replace

from ...core.errors import InvalidRequest
from ...core.request.request import Adapter
from ...core.request.sampling_params import SAMPLING, SamplingParams
from ...proto.v1 import common_pb2

# For beams only: without them they would have no effect.
_OF_BEAMS = ("length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty")
OF_SEARCHES = frozenset({"use_beam_search", "best_of", *_OF_BEAMS})  # these are checked here
# Parameters of drawing.
_OF_CHANCE = ("top_p", "top_k", "min_p")


def complete_search(
    sampling: SamplingParams, wire: common_pb2.SamplingParams, n: int, adapter: Adapter | None
) -> SamplingParams:
    """Check the combination of parameters that are valid by themselves; greedy for beams. Raises
    InvalidRequest."""
    width = sampling.best_of
    if width < n:
        raise _invalid("best_of", f"best_of {width} is less than n {n}")
    if not sampling.use_beam_search:
        for name in _OF_BEAMS:
            if getattr(sampling, name) != SAMPLING[name].default:
                raise _invalid(name, f"{name} needs use_beam_search")
        return sampling
    _check_alone(sampling, wire)
    if adapter is not None:
        message = "beam search with a LoRA adapter is not served"
        raise _invalid("use_beam_search", message, "unsupported_parameter")
    if width < 2:
        raise _invalid("best_of", "use_beam_search needs best_of, or n, of 2 at least")
    _check_groups(sampling)
    return replace(sampling, temperature=0.0)


def _check_alone(sampling: SamplingParams, wire: common_pb2.SamplingParams) -> None:
    if wire.HasField("seed"):
        raise _apart("seed", "beams are not sampled")
    if sampling.temperature not in (0.0, 1.0):
        raise _apart("temperature", "beams are not sampled; use 0 or 1")
    for name in _OF_CHANCE:
        if getattr(sampling, name) != SAMPLING[name].default:
            raise _apart(name, "beams are not sampled")
    if sampling.stop:
        raise _apart("stop", "beams end only at EOS and stop_token_ids")
    if sampling.allowed_token_ids:
        raise _apart("allowed_token_ids", "there may be fewer tokens than beams")
    if sampling.constraint is not None:
        raise _apart("constraint", "beams are not constrained")


def _check_groups(sampling: SamplingParams) -> None:
    width, num_groups = sampling.best_of, sampling.num_beam_groups
    if width % num_groups:
        message = f"num_beam_groups {num_groups} does not divide the {width} beams"
        raise _invalid("num_beam_groups", message)
    if (num_groups > 1) != (sampling.diversity_penalty > 0):
        message = "num_beam_groups above 1 and diversity_penalty above 0 must be set together"
        raise _invalid("diversity_penalty", message)


def _apart(name: str, why: str) -> InvalidRequest:
    return _invalid(name, f"{name} cannot go with use_beam_search: {why}", "unsupported_parameter")


def _invalid(name: str, message: str, code: str = "invalid_value") -> InvalidRequest:
    return InvalidRequest(message, name, code)
