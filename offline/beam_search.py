"""Parameters and outputs of `LLM.beam_search`, compatible with vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from ..core.errors import InvalidRequest
from ..core.request.sampling_params import MOST_OUTPUTS
from .outputs import LogprobsByToken, RequestOutput
from .sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """All `beam_width` beams are returned. See docs/sampling.md."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | str = False
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0

    def as_sampling(self) -> SamplingParams:
        """The parameters for `generate`, with the log-probabilities that a beam's score sums up.
        Raises InvalidRequest if `beam_width` exceeds the outputs that a prompt may have."""
        if not 1 <= self.beam_width <= MOST_OUTPUTS:
            message = f"beam_width must lie in [1, {MOST_OUTPUTS}], not {self.beam_width}"
            raise InvalidRequest(message, "beam_width")
        same = asdict(self)
        width, _ = same.pop("beam_width"), same.pop("include_stop_str_in_output")
        return SamplingParams(use_beam_search=True, n=width, best_of=width, logprobs=0, **same)


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One beam. `tokens` and `text` begin with the prompt; `logprobs` are of the output's tokens,
    including an EOS or stop token, and `cum_logprob` is their sum."""

    tokens: list[int]
    logprobs: list[LogprobsByToken]
    cum_logprob: float
    text: str
    finish_reason: str
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """One prompt's beams, best first."""

    sequences: list[BeamSearchSequence]


def beams_of(
    output: RequestOutput, params: BeamSearchParams, decode: Callable[[list[int]], str]
) -> BeamSearchOutput:
    """The beams of an output, without the EOS or stop token that ended one unless requested."""
    sequences = []
    for one in output.outputs:
        assert one.logprobs is not None and one.cumulative_logprob is not None, "as_sampling's"
        is_cut = one.finish_reason == "stop" and not params.include_stop_str_in_output
        kept = one.token_ids[:-1] if is_cut else one.token_ids
        tokens = [*output.prompt_token_ids, *kept]
        scores = (one.logprobs, one.cumulative_logprob)
        ended = (one.finish_reason, one.stop_reason)
        sequences.append(BeamSearchSequence(tokens, *scores, decode(tokens), *ended))
    return BeamSearchOutput(sequences)
