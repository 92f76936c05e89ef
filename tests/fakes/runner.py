"""A runner without a model: the next token is a hash of the whole history, read back from its KV.

A KV slot is 16 bytes, (token id, chain), where chain = mix(chain of the position before, token id).
Every step reads the history back through the block table, so a block that is mixed up, missing,
stale or overwritten is found at once, and any wrong position changes the tokens.
`expected_tokens` computes the same continuation without blocks.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from baton.core.request.request import TokenLogprobs, mix64, token_key
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.batch import SampledToken, SequenceSlice
from baton.kernels.sampling.sample_spec import SampleSpec
from baton.kernels.sampling.top_logprobs import Candidate

_SLOT = struct.Struct("<QQ")  # token id, chain
GREEDY = SamplingParams(temperature=0.0)


@functools.lru_cache(1 << 16)  # each step reads all histories again
def _extend_chain(chain: int, token_id: int) -> int:
    return mix64(chain ^ mix64(token_id + 1))


def _sample(chain: int, key: int, params: SamplingParams, vocab_size: int) -> int:
    noise = key if params.temperature > 0 else 0
    return mix64(chain ^ noise) % vocab_size


def next_logprobs(tokens: Sequence[int], vocab_size: int) -> list[float]:
    """The log-probability of every token after these, as for beam search."""
    chain = 0
    for token_id in tokens:
        chain = _extend_chain(chain, token_id)
    return _logprobs(chain, vocab_size)


def _logprobs(chain: int, vocab_size: int) -> list[float]:
    logits = [mix64(chain ^ mix64(1000 + i)) % 4096 / 1024 for i in range(vocab_size)]
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total for logit in logits]


def expected_tokens(
    prompt: Sequence[int],
    n: int,
    *,
    params: SamplingParams = GREEDY,
    vocab_size: int = 1000,
    sample_index: int = 0,
) -> list[int]:
    """The first `n` tokens after `prompt`; the engine decides where they end."""
    chain = 0
    for token_id in prompt:
        chain = _extend_chain(chain, token_id)
    outputs: list[int] = []
    for position in range(len(prompt), len(prompt) + n):
        key = token_key(params.seed, sample_index, position)
        token_id = _sample(chain, key, params, vocab_size)
        chain = _extend_chain(chain, token_id)
        outputs.append(token_id)
    return outputs


class FakeStep:
    """A step in flight."""

    device_s = None

    def __init__(self, runner: FakeRunner, batch: Sequence[SequenceSlice]) -> None:
        self._runner = runner
        self._num_looks = 0
        self.batch = batch
        self.number = runner.num_launched if runner.on_completed is not None else 0

    def has_completed(self) -> bool:
        """Not at the first polls: a host has other work while it waits."""
        self._num_looks += 1
        return self._num_looks > self._runner.num_looks

    def collect(self) -> list[SampledToken | None]:
        return self._runner._execute(self)

    def prompt_logprobs(self) -> dict[int, tuple[TokenLogprobs, ...]]:
        """For each target its own id and position, so that a shift or a gap is detected."""
        return {
            index: tuple(
                TokenLogprobs(-float(token_id), ((one.start + 1 + place, 0.0),))
                for place, token_id in enumerate(one.prompt_targets, one.first_prompt_target)
            )
            for index, one in enumerate(self.batch)
            if one.prompt_targets
        }


class FakeRunner:
    """A `Runner`. Its KV is in `memory` (writable, num_blocks * block_bytes), if given.

    `on_completed` gets the number of each computed step: then steps are counted. `on_execute` is
    called with each batch before it is computed, as if the step were in flight. With `runs_ahead` a
    step is computed as late as possible: when it is collected. With several stages as many steps
    may be in flight, and one more, and no step follows another. `batch_sizes` holds the number of
    tokens of every slice of every step, `most_in_flight` the largest number of steps in flight.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        vocab_size: int = 1000,
        memory: bytearray | memoryview | None = None,
        on_execute: Callable[[Sequence[SequenceSlice]], None] | None = None,
        runs_ahead: bool = False,
        num_looks: int = 0,
        on_completed: Callable[[int], None] | None = None,
        num_stages: int = 1,
    ) -> None:
        self.most_in_flight = 0
        self._num_stages = num_stages
        self.on_completed = on_completed
        self.num_launched = 0
        self.num_copied = 0  # blocks
        self.block_bytes = block_size * _SLOT.size
        self.batch_sizes: list[list[int]] = []
        self.on_execute = on_execute
        self.runs_ahead = runs_ahead or num_stages > 1
        self.num_looks = num_looks  # polls of a step in flight before it completes
        self._in_flight: list[FakeStep] = []
        self._last_results: list[SampledToken | None] = []
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._kv = memoryview(
            bytearray(num_blocks * self.block_bytes) if memory is None else memory
        )

    def launch(self, batch: Sequence[SequenceSlice]) -> FakeStep:
        assert batch, "a step without work"
        most = 1 + (self.runs_ahead if self._num_stages == 1 else self._num_stages)
        assert len(self._in_flight) < most, "too many steps in flight"
        if self._num_stages > 1:
            assert all(one.follows is None for one in batch), "its token is in the pipeline"
        if self.on_execute is not None:
            self.on_execute(batch)
        self.batch_sizes.append([len(s.token_ids) for s in batch])
        # The device has its own copy of the tables: the host's may change while it computes.
        tables = [s._replace(block_table=[*s.block_table]) for s in batch]
        self.num_launched += 1
        step = FakeStep(self, tables)
        self._in_flight.append(step)
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        return step

    def _execute(self, step: FakeStep) -> list[SampledToken | None]:
        assert step is self._in_flight.pop(0), "steps complete in order"
        batch = [self._with_token(s) for s in step.batch]
        self._last_results = self._compute(batch)
        if self.on_completed is not None:
            self.on_completed(step.number)
        return self._last_results

    def _with_token(self, one: SequenceSlice) -> SequenceSlice:
        """Insert the token of the previous step, if the host did not know it at the launch."""
        if one.follows is None:
            return one
        sampled = self._last_results[one.follows]
        assert sampled is not None and len(one.token_ids) == 1
        return one._replace(token_ids=[sampled.token_id], follows=None)

    def _compute(self, batch: Sequence[SequenceSlice]) -> list[SampledToken | None]:
        for one in batch:
            self._write(one)
        return [self._attend(one) for one in batch]

    def read_block(self, block_id: int) -> bytes:
        return bytes(self._block(block_id))

    def write_block(self, block_id: int, content: bytes) -> None:
        self._block(block_id)[:] = content

    def block_tokens(self, block_id: int) -> list[int]:
        """The token ids whose KV is in the block."""
        return [token_id for token_id, _chain in _SLOT.iter_unpack(self._block(block_id))]

    def _write(self, one: SequenceSlice) -> None:
        chain = self._read(one, one.start - 1)[1] if one.start else 0
        for position, token_id in enumerate(one.token_ids, start=one.start):
            chain = _extend_chain(chain, token_id)
            _SLOT.pack_into(self._kv, self._offset(one, position), token_id, chain)

    def _attend(self, one: SequenceSlice) -> SampledToken | None:
        """Read the history as attention would, after all slices of the step have written."""
        chain = 0
        first_draft = one.start + 1
        at_drafts = []
        end = one.start + len(one.token_ids)
        for position, (token_id, stored) in enumerate(self._history(one, end)):
            chain = _extend_chain(chain, token_id)
            assert chain == stored, f"position {position} is not the KV of this sequence"
            if one.draft_samples and first_draft <= position + 1 < end:
                spec = one.draft_samples[position + 1 - first_draft]
                at_drafts.append(self._sampled(chain, spec))
        if one.sample is None:
            return None
        return self._sampled(chain, one.sample)._replace(at_drafts=tuple(at_drafts))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.num_copied += len(pairs)
        for source, target in pairs:
            self.write_block(target, self.read_block(source))

    def _sampled(self, chain: int, spec: SampleSpec) -> SampledToken:
        def draw(key: int) -> SampledToken:
            token_id = _sample(chain, key, spec.params, self._vocab_size)
            if spec.allowed is not None:
                bits = np.unpackbits(spec.allowed.view(np.uint8), bitorder="little")
                allowed_ids = np.flatnonzero(bits)
                token_id = int(allowed_ids[token_id % len(allowed_ids)])
            return SampledToken(token_id, logprob=-float(token_id), top=((token_id, 0.0),))

        candidates = ()
        if spec.num_candidates:
            logprobs = _logprobs(chain, self._vocab_size)
            best = sorted(range(self._vocab_size), key=lambda i: (-logprobs[i], i))
            wanted = best[: spec.num_candidates]
            candidates = tuple(Candidate(i, logprobs[i], logprobs[i]) for i in wanted)
        forks = tuple(map(draw, spec.fork_keys))
        return draw(spec.key)._replace(forks=forks, candidates=candidates)

    def _history(self, one: SequenceSlice, end: int) -> Iterator[tuple[int, int]]:
        """The slots read by `_read` for the positions before `end`, a block at a time."""
        for first in range(0, end, self._block_size):
            num_slots = min(self._block_size, end - first)
            at = self._offset(one, first)
            yield from _SLOT.iter_unpack(self._kv[at : at + num_slots * _SLOT.size])

    def _read(self, one: SequenceSlice, position: int) -> tuple[int, int]:
        return _SLOT.unpack_from(self._kv, self._offset(one, position))

    def _offset(self, one: SequenceSlice, position: int) -> int:
        block_id = one.block_table[position // self._block_size]
        assert block_id >= 2, "blocks 0 and 1 are reserved"
        return block_id * self.block_bytes + position % self._block_size * _SLOT.size

    def _block(self, block_id: int) -> memoryview:
        return self._kv[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]
