"""A step as bytes: what rank 0 tells the other ranks, so that all launch the same.

    | header: counts | slices [n, 8] | keys, temperatures [n] | tokens | tables | targets | rest |

Little-endian int64, int32 for block ids, uint32 for tokens and targets. `rest` holds, for the few
slices that ask for more than a temperature, one record each. What comes back is equal to what was
sent, its sequences views of the bytes. Decoding trusts the sender: both ends are one engine.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from ...core.request.parameters import Number
from ...core.request.request import SAMPLING, SamplingParams
from ...core.request.token_ids import column
from ...kernels.sampling.sample_spec import SampleSpec
from ..execution.batch import SequenceSlice

_HEADER = struct.Struct("<4Q")  # slices, tokens, blocks, targets
_SLICE = ("tokens", "start", "blocks", "follows", "kind", "targets", "first_target", "num_top")
_ALL, _PLAIN, _NOTHING = 2, 1, 0  # the kinds of a slice's sampling
# Every parameter that is a number; the others beside them are judged by rank 0, or are temperature,
# top_k, logprobs and logit_bias.
_NUMBERS = [n for n, p in SAMPLING.items() if isinstance(p.kind, Number) and n != "temperature"]
_numbers_of = attrgetter(*_NUMBERS)
_PLAIN_NUMBERS = _numbers_of(SamplingParams())
# _NUMBERS; top_k, logprobs; entries of bias, forbidden, counts, forks; words of the mask of allowed
# tokens, which is padded to an even number.
_RECORD = struct.Struct(f"<{len(_NUMBERS)}d2q5Q")
_ABSENT = 0  # top_k, logprobs and follows are sent plus one


@dataclass(frozen=True, slots=True)
class _SentCounts:
    """`batch.Counts` of another rank."""

    token_ids: NDArray[np.int64]
    counts: NDArray[np.int64]


def encode(batch: Sequence[SequenceSlice]) -> bytes:
    """The message of one step; all that the counts of penalties say is copied."""
    slices, keys, temperatures = array("q"), array("Q"), array("d")
    tokens, tables, targets = column(), array("i"), column()
    rest: list[bytes] = []
    for piece in batch:
        spec, kind = piece.sample, _NOTHING
        if spec is not None:
            kind = _PLAIN if _is_plain(spec) else _ALL
            if kind == _ALL:
                rest.append(_encode_spec(spec))
        keys.append(0 if spec is None else spec.key)
        temperatures.append(0.0 if spec is None else spec.params.temperature)
        tokens.extend(piece.token_ids)
        tables.extend(piece.block_table)
        targets.extend(piece.prompt_targets)
        slices.extend(
            (
                len(piece.token_ids),
                piece.start,
                len(piece.block_table),
                _ABSENT if piece.follows is None else piece.follows + 1,
                kind,
                len(piece.prompt_targets),
                piece.first_prompt_target,
                piece.num_prompt_top,
            )
        )
    header = _HEADER.pack(len(batch), len(tokens), len(tables), len(targets))
    arrays = (slices, keys, temperatures, tokens, tables, targets)
    return b"".join((header, *(part.tobytes() for part in arrays), *rest))


def decode(message: memoryview) -> list[SequenceSlice]:
    """The batch again. Its sequences are views of `message`, which must stay as it is."""
    num_slices, num_tokens, num_blocks, num_targets = _HEADER.unpack_from(message)
    reader = _Reader(message, _HEADER.size)
    slices = np.frombuffer(reader.take("q", num_slices * len(_SLICE)), np.int64)
    keys, temperatures = reader.take("Q", num_slices), reader.take("d", num_slices)
    tokens, tables = reader.take("I", num_tokens), reader.take("i", num_blocks)
    targets = reader.take("I", num_targets)
    token, block, target = 0, 0, 0
    batch = []
    for index, row in enumerate(slices.reshape(num_slices, -1).tolist()):
        length, start, blocks, follows, kind, wanted, first_target, num_top = row
        spec = None
        if kind != _NOTHING:
            read = _plain_spec if kind == _PLAIN else reader.spec
            spec = read(keys[index], temperatures[index])
        batch.append(
            SequenceSlice(
                tokens[token : token + length],
                start,
                tables[block : block + blocks],
                spec,
                None if follows == _ABSENT else follows - 1,
                targets[target : target + wanted],
                first_target,
                num_top,
            )
        )
        token, block, target = token + length, block + blocks, target + wanted
    return batch


def _is_plain(spec: SampleSpec) -> bool:
    """Whether key and temperature are all that sampling looks at."""
    if spec.forbidden_ids or spec.counts is not None or spec.fork_keys or spec.allowed is not None:
        return False
    params = spec.params
    return (
        not params.logit_bias
        and params.logprobs is None
        and params.top_k is None
        and _numbers_of(params) == _PLAIN_NUMBERS
    )


def _plain_spec(key: int, temperature: float) -> SampleSpec:
    return SampleSpec(SamplingParams(temperature=temperature), key)


def _encode_spec(spec: SampleSpec) -> bytes:
    params = spec.params
    bias_ids, biases = zip(*params.logit_bias, strict=True) if params.logit_bias else ((), ())
    num_counts = 0 if spec.counts is None else len(spec.counts.token_ids) + 1
    record = _RECORD.pack(
        *_numbers_of(params),
        _ABSENT if params.top_k is None else params.top_k + 1,
        _ABSENT if params.logprobs is None else params.logprobs + 1,
        len(params.logit_bias),
        len(spec.forbidden_ids),
        num_counts,
        len(spec.fork_keys),
        0 if spec.allowed is None else len(spec.allowed),
    )
    parts = [array("q", bias_ids), array("d", biases), array("q", spec.forbidden_ids)]
    counts = () if spec.counts is None else (spec.counts.token_ids, spec.counts.counts)
    forks = array("Q", spec.fork_keys)
    mask = () if spec.allowed is None else (_whole_pairs(spec.allowed),)
    return b"".join((record, *(part.tobytes() for part in (*parts, *counts, forks, *mask))))


def _whole_pairs(mask: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.pad(mask, (0, len(mask) % 2))


class _Reader:
    """Takes arrays from a message, one behind the other."""

    def __init__(self, message: memoryview, offset: int) -> None:
        self._message = message
        self._offset = offset

    def take(self, kind: str, count: int) -> memoryview:
        """`count` numbers of the struct format `kind`."""
        num_bytes = count * struct.calcsize(kind)
        part = self._message[self._offset : self._offset + num_bytes]
        self._offset += num_bytes
        return part.cast(kind)  # type: ignore[call-overload, no-any-return]

    def spec(self, key: int, temperature: float) -> SampleSpec:
        """What `_encode_spec` wrote."""
        record = _RECORD.unpack_from(self._message, self._offset)
        self._offset += _RECORD.size
        numbers, (top_k, logprobs, *sizes) = record[: len(_NUMBERS)], record[len(_NUMBERS) :]
        num_bias, num_forbidden, num_counts, num_forks, num_words = sizes
        bias = zip(self.take("q", num_bias), self.take("d", num_bias), strict=True)
        params = SamplingParams(
            temperature=temperature,
            **dict(zip(_NUMBERS, numbers, strict=True)),
            top_k=None if top_k == _ABSENT else top_k - 1,
            logprobs=None if logprobs == _ABSENT else logprobs - 1,
            logit_bias=tuple(bias),
        )
        forbidden = tuple(self.take("q", num_forbidden))
        counts = None
        if num_counts:
            halves = (self.take("q", num_counts - 1) for _ in range(2))
            counts = _SentCounts(*(np.array(half, np.int64) for half in halves))
        forks = tuple(self.take("Q", num_forks))
        allowed = None
        if num_words:
            words = self.take("i", num_words + num_words % 2)
            allowed = np.frombuffer(words, np.int32)[:num_words]
        return SampleSpec(params, key, forbidden, counts, forks, allowed)
