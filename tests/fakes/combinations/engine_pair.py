"""Two engines with requests that are added, handed over between them, retried and cancelled, both
between steps and during one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from engines.integrity import check_integrity
from torch import Tensor

from baton.core.errors import Overloaded
from baton.core.request.request import Adapter, Request, TokenLogprobs
from baton.core.request.token_ids import block_hashes, root_hash
from baton.engine.engine import Engine
from baton.engine.execution.batch import SampledToken
from baton.engine.kv.block_pool import Reservation
from baton.engine.lora.adapter_files import HostAdapter
from baton.engine.scheduling.outputs import FinishedBeam, StepOutput, TokenOutput

FINGERPRINT = "f"  # of both engines
_MOST_IDLE = 500


@dataclass
class Outcome:
    """The outputs by request id. `scores`: prompt log-probabilities, by position."""

    tokens: dict[str, list[TokenOutput]] = field(default_factory=dict)
    beams: dict[str, FinishedBeam] = field(default_factory=dict)
    scores: dict[str, dict[int, TokenLogprobs]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def take(self, step: StepOutput) -> None:
        for token in step.tokens:
            tokens = self.tokens.setdefault(_id_of(token.key), [])
            assert token.index == len(tokens)
            tokens.append(token)
        for part in step.prompt_logprobs:
            scores = self.scores.setdefault(_id_of(part.key), {})
            scores |= dict(enumerate(part.logprobs, part.first_index))
        self.beams |= {_id_of(beam.key): beam for beam in step.beams}
        for key, error in step.failed:
            self.errors[_id_of(key)] = f"{type(error).__name__}: {error}"


def _id_of(key: str) -> str:
    return key.partition("/")[0]


@dataclass(eq=False)
class HandOff:
    """A hand-off of a prompt that the first engine has computed. `first`: the first sample of a
    beam search."""

    request: Request
    first: SampledToken | None
    reservation: Reservation | None = None


class EnginePair:
    """`pools`: for each engine, the pools of its ranks. `cancelled`: ids of requests. `files`:
    adapters that are fetched again, some time after an engine dropped them from host memory."""

    def __init__(
        self,
        engines: Sequence[Engine],
        pools: Sequence[Sequence[Tensor]],
        draw: random.Random,
        files: Sequence[HostAdapter] = (),
    ) -> None:
        self.engines, self.outcome = engines, Outcome()
        self.cancelled: set[str] = set()
        self._pools, self._draw = pools, draw
        self._held: dict[str, Request] = {}
        self._hand_offs: list[HandOff] = []
        self._sent: dict[str, tuple[Request, Engine]] = {}  # requests that are not held, by key
        self._waiting: list[Request] = []
        self._files = {file.digest: file for file in files}
        self._fetches: list[tuple[Engine, Adapter]] = []
        for engine in engines:
            if engine.adapters is not None:
                engine.adapters.fetch = partial(self._fetch_adapter, engine)

    def run(self, requests: Sequence[Request]) -> Outcome:
        self._waiting, num_idle = [*requests], 0
        while self._waiting or self._hand_offs or self._has_work or self._fetches:
            for engine in self._draw.sample(self.engines, 2):
                if engine.has_work:
                    self._take(engine.step(self._meanwhile if self._happens(0.5) else None))
                    check_integrity(engine)
            self._go_on()
            num_idle = 0 if self._has_work else num_idle + 1
            assert num_idle < _MOST_IDLE, "nothing gets on"
        return self.outcome

    def _meanwhile(self) -> bool:
        has_news = self._happens(0.3)
        if has_news:
            self._go_on()
        return has_news

    def _go_on(self) -> None:
        """Do random actions other than steps."""
        if self._waiting and self._happens(0.7):
            self._send(self._waiting.pop(0))
        for one in [*self._hand_offs]:
            if self._happens(0.5):
                self._advance(one)
        if self._sent and self._happens(0.05):
            self._disturb(*self._draw.choice([*self._sent.values()]))
        if self._fetches and self._happens(0.5):
            self._bring_adapter(*self._fetches.pop(0))
        if self._held and self._happens(0.02):
            self._cancel_held(self._draw.choice([*self._held.values()]))

    @property
    def _has_work(self) -> bool:
        return any(engine.has_work for engine in self.engines)

    def _happens(self, chance: float) -> bool:
        return self._draw.random() < chance

    def _take(self, step: StepOutput) -> None:
        self.outcome.take(step)
        ended = {token.key for token in step.tokens if token.finish_reason is not None}
        for key in ended | {beam.key for beam in step.beams} | {key for key, _ in step.failed}:
            self._sent.pop(key, None)
        for chunk in step.chunks:
            if chunk.is_last and chunk.key in self._held:
                first = chunk.sampled if chunk.sampled and chunk.sampled.candidates else None
                self._hand_offs.append(HandOff(self._held.pop(chunk.key), first))

    # -- what happens to requests -----------------------------------------------------------------

    def _send(self, request: Request) -> None:
        if self._happens(0.3):
            self._fetch_prefix(request)
        if self._happens(0.4):
            self._held[request.key] = request
            self.engines[0].add(request, hold=True)
            return
        engine = self._draw.choice(self.engines)
        engine.add(request)
        self._sent |= {one.key: (one, engine) for one in (request, *request.forks)}

    def _fetch_prefix(self, request: Request) -> None:
        """Fetch a cached prefix of the request from the first engine to the second."""
        source, puller = (engine.prefixes for engine in self.engines)
        root = root_hash(FINGERPRINT, request.cache_salt, request.adapter_digest)
        size = self.engines[0].limits.block_size
        hashes = block_hashes(root, request.known_token_ids, size)
        hashes = hashes[: self._draw.randint(0, len(hashes))]
        if not hashes or (lent := source.lend(hashes)) is None:
            return
        fence, refs = lent
        if (borrowed := puller.borrow(hashes)) is not None:
            self._copy(refs.block_ids.tolist(), borrowed.block_ids)
            puller.keep(borrowed)
        source.give_back(fence)

    def _copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for theirs, mine in zip(*self._pools, strict=True):
            mine[[*targets]] = theirs[[*sources]]

    def _fetch_adapter(self, engine: Engine, adapter: Adapter) -> None:
        if (engine, adapter) not in self._fetches:
            self._fetches.append((engine, adapter))

    def _bring_adapter(self, engine: Engine, adapter: Adapter) -> None:
        assert engine.adapters is not None
        with suppress(Overloaded):  # the requests that wanted it have ended
            engine.adapters.keep(self._files[adapter.digest])
        engine.unpark()

    def _advance(self, one: HandOff) -> None:
        """Reserve blocks for the hand-off, or copy its KV and start the decode."""
        (source, puller), request = self.engines, one.request
        if one.reservation is None:
            if request.key not in puller.by_key:
                puller.reserve(request)
            reserved = puller.next_reservation()
            for each in self._hand_offs:
                if reserved is not None and each.request.key == reserved.key:
                    each.reservation = reserved
            return
        self._hand_offs.remove(one)
        reservation = one.reservation
        cached, known = reservation.num_cached_blocks, reservation.num_known_blocks
        refs = source.block_refs(request.key, cached, known)
        self._copy(refs.block_ids.tolist(), reservation.block_ids[cached:known])
        source.abort(request.key)
        if one.first is not None:
            puller.beams.start(reservation, one.first)
            self._sent |= {each.key: (each, puller) for each in (request, *request.forks)}
            return
        for each in (*request.forks, request):
            token = self.outcome.tokens[each.request_id][-1]
            if token.finish_reason is not None:
                continue
            if each is request:
                puller.start(reservation, token.token_id)
            else:
                puller.start(reservation, token.token_id, each)
            self._sent[each.key] = (each, puller)
        puller.drop(reservation)  # in case its first sample has ended

    def _cancel_held(self, request: Request) -> None:
        """Cancel the request with all its forks, while its prompt is computed."""
        del self._held[request.key]
        self.engines[0].abort(request.key)
        self.cancelled |= {one.request_id for one in (request, *request.forks)}

    def _disturb(self, request: Request, engine: Engine) -> None:
        """Cancel the request with the forks that wait for it, or retry it with the tokens that it
        has."""
        sequence = engine.by_key.get(request.key)
        is_search = request.key in engine.beams.by_key
        if not is_search and sequence is None:
            return
        if sequence is not None and not is_search and sequence.forks:
            for one in (request, *sequence.forks):
                del self._sent[one.key]
                self.cancelled.add(one.request_id)
            engine.abort(request.key)
            return
        del self._sent[request.key]
        engine.abort(request.key)
        if is_search or self._happens(0.3):
            self.cancelled.add(request.request_id)
            return
        tokens = self.outcome.tokens.get(request.request_id, ())
        again = replace(
            request,
            attempt=request.attempt + 1,
            output_token_ids=tuple(one.token_id for one in tokens),
            fork_ids=(),
        )
        self._send(again)
