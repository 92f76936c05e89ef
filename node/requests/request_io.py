"""The front desk of an engine: dispatches in, outputs out. Both roles stand behind it.

It decodes and files dispatches, writes tokens and errors as RequestOutputs, stamps timelines and
watches deadlines. It knows no transfer and gives no order to the engine.
"""

from __future__ import annotations

import logging

import numpy as np

from ...core.errors import BatonError, Cancelled, DeadlineExceeded, InvalidRequest, Unavailable
from ...core.ports import Clock
from ...core.request.request import TokenLogprobs
from ...core.request.timeline import Event, NodeStamp
from ...engine.scheduling.outputs import PromptLogprobs, TokenOutput
from ...proto import codec
from ...proto.v1 import node_pb2
from ..channels.outbox import Outbox
from .request_table import Entry, RequestTable

log = logging.getLogger(__name__)


class RequestIO:
    """Belongs to the engine loop's thread."""

    def __init__(self, outbox: Outbox, clock: Clock, node_name: str, vocab_size: int) -> None:
        self.book = RequestTable(clock)
        self.node_name = node_name
        self.is_draining = False
        self._outbox = outbox
        self._clock = clock
        self._vocab_size = vocab_size
        self._step_began_ns = 0

    def accept(self, gateway: str, dispatch: node_pb2.Dispatch) -> Entry | None:
        """File a dispatch, and each of its forks. None: refused, and its gateway was told why."""
        try:
            return self._open(gateway, dispatch)
        except BatonError as error:
            log.info("refused %s/%d: %s", dispatch.request_id, dispatch.attempt, error.message)
            for request_id in (dispatch.request_id, *dispatch.fork_request_ids):
                self._send_error(gateway, request_id, dispatch.attempt, error)
            return None

    def _open(self, gateway: str, dispatch: node_pb2.Dispatch) -> Entry:
        if self.is_draining:
            raise Unavailable(f"{self.node_name} is draining")
        request = codec.request_from_wire(dispatch)
        known = np.frombuffer(dispatch.prompt_token_ids + dispatch.output_token_ids, "<u4")
        if known.max(initial=0) >= self._vocab_size:
            raise InvalidRequest(f"a token id is outside the vocabulary of {self._vocab_size}")
        deadline_s = self._clock.monotonic_s() + dispatch.deadline_remaining_us / 1e6
        ticket = codec.ticket_from_wire(dispatch.ticket) if dispatch.HasField("ticket") else None
        now_ns = self._now_ns()
        entry = Entry(request, gateway, deadline_s, ticket, now_ns)
        self.book.open(entry)
        for fork in request.forks:
            self.book.open(Entry(fork, gateway, deadline_s, ticket, now_ns))
        return entry

    def stamp(self, entry: Entry, event: Event) -> None:
        """Note that `event` happens now; the request's next output carries it."""
        entry.stamps.append(NodeStamp(event, self._now_ns()))

    def begin_step(self) -> None:
        """A step is about to run: what starts in it starts now, though it is told afterwards."""
        self._step_began_ns = self._now_ns()

    def stamp_started(self, entry: Entry, event: Event) -> None:
        """Note that `event` happened when the step began, or as soon as it came during one."""
        began_ns = max(self._step_began_ns, entry.accepted_ns)
        entry.stamps.append(NodeStamp(event, began_ns))

    def _now_ns(self) -> int:
        return int(self._clock.monotonic_s() * 1e9)

    def emit(self, entry: Entry, token: TokenOutput) -> None:
        """Queue one token, with all that has waited for an output of this request."""
        request = entry.request
        if token.finish_reason is None and request.sampling.logprobs is None and entry.is_quiet:
            self._outbox.token_to_gateway(
                entry.gateway, request.request_id, request.attempt, token.index, token.token_id
            )
            return
        output = self._output(entry)
        output.first_index = token.index
        output.token_ids.append(token.token_id)
        output.finish_reason = codec.finish_to_wire(token.finish_reason)
        if request.sampling.logprobs is not None:
            logprobs = TokenLogprobs(token.logprob, token.top)
            output.logprobs.append(codec.logprobs_to_wire(logprobs))
        self._outbox.to_gateway(entry.gateway, output)

    def emit_prompt(self, prompt: PromptLogprobs) -> None:
        """Queue what is known of a request's prompt; of one that is over, nothing."""
        if entry := self.book.get(prompt.key):
            output = self._output(entry)
            output.first_prompt_index = prompt.first_index
            output.prompt_logprobs.extend(map(codec.logprobs_to_wire, prompt.logprobs))
            self._outbox.to_gateway(entry.gateway, output)

    def end(self, key: str, error: BatonError | None) -> Entry | None:
        """Close a request; with an error its gateway is told. None: it was not open."""
        entry = self.book.close(key)
        if entry is not None and error is not None:
            if not isinstance(error, Cancelled):
                log.info("failed %s: %s", key, error.message)
            output = self._output(entry)
            output.error.CopyFrom(codec.error_to_wire(error))
            self._outbox.to_gateway(entry.gateway, output)
        return entry

    def forget_gateway(self, gateway: str) -> list[str]:
        """The keys that now run for nobody."""
        self._outbox.forget_gateway(gateway)
        return self.book.keys_of_gateway(gateway)

    def overdue(self) -> list[tuple[str, DeadlineExceeded]]:
        """Requests to fail because their time is up."""
        error = DeadlineExceeded("the request's deadline passed")
        return [(key, error) for key in self.book.overdue()]

    def _output(self, entry: Entry) -> node_pb2.RequestOutput:
        output = node_pb2.RequestOutput(
            request_id=entry.request.request_id,
            attempt=entry.request.attempt,
            events=codec.node_stamps_to_wire(entry.stamps),
            cached_tokens=entry.cached_tokens,
        )
        if entry.transfer is not None:
            output.transfer.bytes = entry.transfer.num_bytes
            output.transfer.cached_tokens = entry.transfer.cached_tokens
            output.transfer.transport = entry.transfer.transport
        entry.stamps.clear()
        entry.cached_tokens = entry.transfer = None
        return output

    def _send_error(self, gateway: str, request_id: str, attempt: int, error: BatonError) -> None:
        output = node_pb2.RequestOutput(
            request_id=request_id, attempt=attempt, error=codec.error_to_wire(error)
        )
        self._outbox.to_gateway(gateway, output)
