"""Beam search without an engine: candidates in, beams and hypotheses out.

    width 3, one step      beam 0 ── a  -1.0 ─► lives      score: sum of its tokens' scores
                             └────── EOS -1.2 ─► finished     finished: score / length ** penalty
                           beam 1 ── c  -1.3 ─► lives
                           beam 2 ── a  -2.9 ─► lives

Of all candidates of a step the `width` best may finish, and the `width` best that do not finish
continue; the `width` best hypotheses of all steps are kept. Scores, order and the three kinds of
early stopping are those of transformers' `generate(num_beams=...)`. Beam groups are separate
searches that take turns in each step: a token costs a later group `diversity_penalty` for each beam
of earlier groups that chose it (Vijayakumar et al. 2018, "Diverse Beam Search", section 4). Equal
scores are ordered by beam, then by candidate. Knows no sequence and no block.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from ...core.request.request import FinishReason, TokenLogprobs
from ...core.request.sampling_params import SamplingParams
from ...kernels.sampling.top_logprobs import Candidate
from ..execution.batch import SampledToken


class _Token(NamedTuple):
    """The newest token of a beam; beams with the same beginning share it."""

    token_id: int
    logprobs: TokenLogprobs
    previous: _Token | None


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A live continuation: beam number `parent` of the previous step, continued by `token_id`."""

    parent: int
    token_id: int
    score: float
    last: _Token


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """A complete continuation; hypotheses are compared by `score`."""

    score: float
    last: _Token
    finish_reason: FinishReason

    def tokens(self) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
        """The token ids, and the log-probabilities of each token."""
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        token: _Token | None = self.last
        while token is not None:
            token_ids.append(token.token_id)
            logprobs.append(token.logprobs)
            token = token.previous
        return tuple(reversed(token_ids)), tuple(reversed(logprobs))


@dataclass(frozen=True, slots=True)
class BeamRules:
    """Parameters of a search. `max_tokens` bounds a hypothesis; each of `stop_ids` ends it."""

    width: int
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    length_penalty: float = 1.0
    early_stopping: str = "false"  # "true", "false" or "never"
    num_groups: int = 1
    diversity_penalty: float = 0.0

    @classmethod
    def of(cls, sampling: SamplingParams, max_tokens: int, stop_ids: frozenset[int]) -> BeamRules:
        """The rules of a request."""
        return cls(
            sampling.best_of,
            max_tokens,
            stop_ids,
            sampling.length_penalty,
            sampling.early_stopping,
            sampling.num_beam_groups,
            sampling.diversity_penalty,
        )

    def finished_score(self, score: float, length: int) -> float:
        return float(score / length**self.length_penalty)


def num_candidates(width: int, num_stop_ids: int) -> int:
    """How many of a beam's likeliest tokens are needed: `width` that continue or are penalised for
    another group's choice, and one for each stop id."""
    return width + num_stop_ids


@dataclass(slots=True)
class _Group:
    """One beam group, with `size` beams."""

    size: int
    hypotheses: list[Hypothesis] = field(default_factory=list)  # best first
    is_over: bool = False

    def finish(self, hypotheses: list[Hypothesis]) -> None:
        """Keep the best hypotheses; of equal scores the earlier ones."""
        best = sorted([*self.hypotheses, *hypotheses], key=attrgetter("score"), reverse=True)
        self.hypotheses = best[: self.size]


class BeamGroup:
    """One search. `beams`: the beams of the next step; none at first, which computes the prompt."""

    def __init__(self, rules: BeamRules) -> None:
        self._rules = rules
        size = rules.width // rules.num_groups
        self._groups = [_Group(size) for _ in range(rules.num_groups)]
        self._members: list[list[Beam]] = [[] for _ in self._groups]
        self._num_tokens = 0  # of each beam

    @property
    def beams(self) -> list[Beam]:
        """The live beams, group by group, the best of each first."""
        return [beam for members in self._members for beam in members]

    @property
    def is_over(self) -> bool:
        return all(group.is_over for group in self._groups)

    def best(self, n: int) -> list[Hypothesis]:
        """The at most `n` best hypotheses of all groups, best first."""
        found = [one for group in self._groups for one in group.hypotheses]
        return sorted(found, key=attrgetter("score"), reverse=True)[:n]

    def advance(self, sampled: Sequence[SampledToken]) -> list[Beam]:
        """Take the candidates that follow each of `beams`, or the prompt; returns the new beams."""
        begins = self._num_tokens == 0
        self._num_tokens += 1
        chosen: Counter[int] = Counter()  # tokens chosen by earlier groups
        first, members = 0, self._members
        self._members = []
        for group, old in zip(self._groups, members, strict=True):
            rows = range(first, first + (1 if begins else len(old)))
            first += 0 if begins else len(old)
            new: list[Beam] = []
            if not group.is_over:
                scores = [0.0] if begins else [beam.score for beam in old]
                lasts = [None] if begins else [beam.last for beam in old]
                new = self._advance(group, list(rows), scores, lasts, sampled, chosen)
            chosen.update(beam.token_id for beam in new)
            self._members.append(new)
        return self.beams

    def _advance(
        self,
        group: _Group,
        rows: list[int],
        scores: Sequence[float],
        lasts: Sequence[_Token | None],
        sampled: Sequence[SampledToken],
        chosen: Counter[int],
    ) -> list[Beam]:
        rules, penalty = self._rules, self._rules.diversity_penalty

        def score(place: int, candidate: Candidate) -> float:
            return scores[place] + candidate.score - penalty * chosen[candidate.token_id]

        found = [
            (score(place, candidate), -place, -rank, candidate)
            for place, row in enumerate(rows)
            for rank, candidate in enumerate(sampled[row].candidates)
            if candidate.score > -math.inf
        ]
        num_wanted = group.size + len(rows) * len(rules.stop_ids)
        live: list[Beam] = []
        finished: list[Hypothesis] = []
        for order, (total, place, _, candidate) in enumerate(heapq.nlargest(num_wanted, found)):
            row = rows[-place]
            logprobs = TokenLogprobs(candidate.logprob, sampled[row].top)
            token = _Token(candidate.token_id, logprobs, lasts[-place])
            is_stop = candidate.token_id in rules.stop_ids
            if is_stop or self._num_tokens == rules.max_tokens:
                if order < group.size:
                    reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
                    worth = rules.finished_score(total, self._num_tokens)
                    finished.append(Hypothesis(worth, token, reason))
            elif len(live) < group.size:
                live.append(Beam(row, candidate.token_id, total, token))
        group.finish(finished)
        group.is_over = not live or self._is_decided(group, live[0].score)
        return [] if group.is_over else live

    def _is_decided(self, group: _Group, best_score: float) -> bool:
        """Whether, by the rule of early stopping, no beam can beat the worst kept hypothesis."""
        rules = self._rules
        if len(group.hypotheses) < group.size:
            return False
        if rules.early_stopping == "true":
            return True
        length = self._num_tokens
        if rules.early_stopping == "never" and rules.length_penalty > 0:
            length = rules.max_tokens
        return rules.finished_score(best_score, length) <= group.hypotheses[-1].score
