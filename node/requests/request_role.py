"""The half of a role that is the same for source and puller: requests of gateways, in and out.

    Dispatch ─► filed ─► local: engine.add, one a sample    step ─► stamps, prompt's scores, tokens
                    └──► with a ticket: _take_up            Cancel, loss, error ─► _end
Knows no transfer: what a ticket is for, and what ends with a request, its subclass says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from ...core.errors import BatonError, InvalidRequest
from ...core.request.request import Request, Ticket
from ...core.request.timeline import Event
from ...engine.engine import Engine
from ...engine.scheduling.outputs import StepOutput, TokenOutput
from ...proto.v1 import node_pb2
from .request_io import RequestIO
from .request_table import Entry


class RequestRole(ABC):
    """`ticket_work` is the work that this role does with a ticket."""

    ticket_work: node_pb2.Work

    def __init__(self, engine: Engine, request_io: RequestIO) -> None:
        self._engine = engine
        self._request_io = request_io

    def dispatch(self, gateway: str, dispatch: node_pb2.Dispatch) -> None:
        """See `role.Role`, as for the others."""
        entry = self._request_io.accept(gateway, dispatch)
        if entry is None:
            return
        samples = (entry.request, *entry.request.forks)
        try:
            self._admit(entry, samples, dispatch.work)
        except BatonError as error:
            for sample in samples:
                self.fail(sample.key, error)

    def _admit(self, entry: Entry, samples: Sequence[Request], work: node_pb2.Work) -> None:
        if work == node_pb2.WORK_LOCAL:
            for sample in samples:
                self._engine.add(replace(sample, fork_ids=()))
        elif work == self.ticket_work and entry.ticket is not None:
            self._take_up(entry, entry.ticket, samples)
        else:
            name = node_pb2.Work.Name(self.ticket_work)
            raise InvalidRequest(f"this engine takes WORK_LOCAL, or {name} with a ticket")

    def cancel(self, key: str) -> None:
        self._end(key, None)

    def fail(self, key: str, error: BatonError) -> None:
        self._end(key, error)

    def gateway_lost(self, gateway: str) -> None:
        for key in self._request_io.forget_gateway(gateway):
            self.cancel(key)

    def _tell(self, output: StepOutput) -> None:
        """What a step brought for gateways: what began in it, prompts' scores, tokens."""
        for key, cached_tokens in output.started.items():
            if entry := self._request_io.book.get(key):
                event = self._start_of(entry)
                self._request_io.stamp_started(entry, event)
                if event is Event.PREFILL_STARTED:
                    entry.cached_tokens = cached_tokens
        for prompt in output.prompt_logprobs:
            self._request_io.emit_prompt(prompt)
        for token in output.tokens:
            self._on_token(token)

    @abstractmethod
    def _take_up(self, entry: Entry, ticket: Ticket, samples: Sequence[Request]) -> None:
        """Take up the hand-off's end of a request. Raises BatonError: it fails, with its forks."""

    @abstractmethod
    def _end(self, key: str, error: BatonError | None) -> None:
        """End a request in any state; with an error its gateway is told."""

    @abstractmethod
    def _start_of(self, entry: Entry) -> Event:
        """What it is called when the engine begins with a request."""

    @abstractmethod
    def _on_token(self, token: TokenOutput) -> None: ...
