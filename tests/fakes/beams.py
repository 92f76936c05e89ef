"""Beam search by definition, over the whole vocabulary: the oracle for engines and beam_group.py.

Follows GroupBeamSearch of transformers 4.40 and the beam search of later versions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product

LogprobsOf = Callable[[Sequence[int]], Sequence[float]]
Found = list[tuple[float, tuple[int, ...]]]  # (score, tokens), best first


def search(
    logprobs_of: LogprobsOf,
    width: int,
    max_tokens: int,
    stop_ids: frozenset[int],
    *,
    length_penalty: float = 1.0,
    early_stopping: str = "false",
    num_groups: int = 1,
    diversity_penalty: float = 0.0,
) -> Found:
    """The returned hypotheses, best first."""
    size = width // num_groups
    live: list[Found] = [[(0.0, ())] for _ in range(num_groups)]
    done: list[Found] = [[] for _ in range(num_groups)]
    for length in range(1, max_tokens + 1):
        used: Counter[int] = Counter()
        for group in range(num_groups):
            grown = [
                (score + logprob - diversity_penalty * used[token], (*tokens, token))
                for score, tokens in live[group]
                for token, logprob in enumerate(logprobs_of(tokens))
            ]
            grown.sort(key=lambda one: -one[0])
            ends = [one for one in grown if one[1][-1] in stop_ids or length == max_tokens]
            for score, tokens in grown[:size]:
                if tokens[-1] in stop_ids or length == max_tokens:
                    done[group].append((score / length**length_penalty, tokens))
            done[group] = sorted(done[group], key=lambda one: -one[0])[:size]
            ended = {tokens for _, tokens in ends}
            live[group] = [one for one in grown if one[1] not in ended][:size]
            if live[group] and len(done[group]) == size:
                reach = max_tokens if early_stopping == "never" and length_penalty > 0 else length
                hope = live[group][0][0] / reach**length_penalty
                if early_stopping == "true" or hope <= done[group][-1][0]:
                    live[group] = []
            used.update(tokens[-1] for _, tokens in live[group])
        if not any(live):
            break
    return sorted((one for found in done for one in found), key=lambda one: -one[0])


def best_of_all(
    logprobs_of: LogprobsOf,
    vocab_size: int,
    max_tokens: int,
    stop_ids: frozenset[int],
    length_penalty: float,
) -> Found:
    """All possible sequences, best first."""
    found = {}
    for tokens in product(range(vocab_size), repeat=max_tokens):
        ends = [i for i, token in enumerate(tokens) if token in stop_ids]
        whole = tokens[: ends[0] + 1] if ends else tokens
        if whole not in found:
            score = sum(logprobs_of(whole[:i])[token] for i, token in enumerate(whole))
            found[whole] = score / len(whole) ** length_penalty
    return sorted(((score, tokens) for tokens, score in found.items()), key=lambda one: -one[0])
