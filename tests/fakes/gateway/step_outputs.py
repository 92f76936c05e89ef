"""The outputs of a step on the wire, in either form: whole outputs, or plain tokens by column."""

from __future__ import annotations

from baton.gateway.request.engine_link import EngineOutput
from baton.gateway.request.session import Session
from baton.proto.v1 import node_pb2


def outputs_of(step: node_pb2.StepOutputs) -> list[node_pb2.RequestOutput]:
    """All outputs of the step as whole outputs."""
    tokens = step.tokens
    rows = zip(tokens.request_ids, tokens.attempts, tokens.indices, tokens.token_ids, strict=True)
    plain = [
        node_pb2.RequestOutput(
            request_id=request_id, attempt=attempt, first_index=index, token_ids=[token_id]
        )
        for request_id, attempt, index, token_id in rows
    ]
    return [*plain, *step.outputs]


def step_of(output: node_pb2.RequestOutput) -> node_pb2.StepOutputs:
    """A step with one output, in the form that an engine would choose."""
    ids, first = output.token_ids, output.first_index
    plain = node_pb2.RequestOutput(
        request_id=output.request_id, attempt=output.attempt, first_index=first, token_ids=ids
    )
    if output != plain or len(ids) != 1:
        return node_pb2.StepOutputs(outputs=[output])
    tokens = node_pb2.PlainTokens(
        request_ids=[output.request_id], attempts=[output.attempt], indices=[first], token_ids=ids
    )
    return node_pb2.StepOutputs(tokens=tokens)


def give(session: Session, incarnation: str, output: EngineOutput) -> None:
    """Deliver an output as the gateway's table does: a plain token by the fast path first."""
    name, number, first, ids = output[:4]
    is_plain = output == EngineOutput(name, number, first, ids) and len(ids) == 1
    if not (is_plain and session.next_token(incarnation, number, first, ids[0])):
        session.engine_output(incarnation, output)
