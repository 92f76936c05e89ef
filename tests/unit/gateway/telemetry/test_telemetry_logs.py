"""Log lines: JSON, no prompt text unless requested, rate-limited."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator

import pytest
from fakes.clock import FakeClock
from fakes.gateway.calls import PlayedCall, feed_of
from grpc._cython import cygrpc

from baton.core.config import GatewayConfig
from baton.core.errors import EngineFailed, InvalidRequest, StartupFailed
from baton.core.process.logs import ALIKE_S, MAX_ALIKE, FloodGate, JsonLines, fields, set_up_logging
from baton.gateway.security.caller import anyone
from baton.gateway.telemetry.calls.ended_call import log_ended, log_refused


def printed(name: str, error: Exception, capsys: pytest.CaptureFixture[str]) -> str:
    """The line that a process writes for an error on this logger."""
    set_up_logging("node", as_json=False)
    try:
        raise error
    except Exception:
        logging.getLogger(name).exception("raised in core")
    return capsys.readouterr().err


class Lines(logging.Handler):
    """The lines that a process would write."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.setFormatter(JsonLines("gateway"))
        self.addFilter(FloodGate(self.clock.monotonic_s))
        self.lines: list[dict[str, object]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))


@pytest.fixture
def written() -> Iterator[Lines]:
    handler, root = Lines(), logging.getLogger("baton")
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


def finished_call(prompt: str | None = None) -> PlayedCall:
    clock = FakeClock()
    call = PlayedCall(clock, feed_of(clock, log_ended), tenant="acme")
    call.record.prompt = prompt
    clock.advance(0.112)
    call.deliver(1)
    clock.advance(0.012)
    call.deliver(1)
    call.finish(cached_tokens=3)
    return call


def test_a_finished_call_is_one_line(written: Lines) -> None:
    call = finished_call()
    [line] = written.lines
    expected = {
        "level": "info",
        "process": "gateway",
        "pid": os.getpid(),
        "request_id": call.record.call_id,
        "tenant": "acme",
        "outcome": "length",
        "prompt_tokens": 7,
        "cached_tokens": 3,
        "output_tokens": 2,
        "prefill_node": "p",
        "decode_node": "d",
        "transport": "shm",
        "transfer_bytes": 1000,
        "ttft_s": 0.112,
        "tpot_s": 0.012,
        "e2e_s": 0.124,
    }
    assert {key: line[key] for key in expected} == expected
    assert "prompt" not in line


def test_prompts_only_where_they_were_kept(written: Lines) -> None:
    finished_call("tell me a secret")
    assert written.lines[0]["prompt"] == "tell me a secret"


def test_failures_tell_their_code_and_not_their_words(written: Lines) -> None:
    clock = FakeClock()
    PlayedCall(clock, feed_of(clock, log_ended)).end(EngineFailed("prompt was: hush"))
    log_refused(anyone("http"), InvalidRequest("no such field: hush"))
    assert [line["outcome"] for line in written.lines] == ["engine_failed", "invalid_request"]
    assert "hush" not in json.dumps(written.lines)


def test_floods_are_cut_and_told(written: Lines) -> None:
    log = logging.getLogger("baton.test")
    for number in range(100):
        log.warning("node %d is away", number)
    log.warning("something else")
    assert len(written.lines) == MAX_ALIKE + 1
    written.clock.advance(ALIKE_S)
    log.warning("node %d is away", 7)
    assert written.lines[-1]["message"] == "node 7 is away (80 more like this were suppressed)"
    for _ in range(100):
        log.info("call", extra=fields({"a": 1}, is_unlimited=True))
    assert len(written.lines) == MAX_ALIKE + 2 + 100


def test_an_exception_is_in_its_line(written: Lines) -> None:
    try:
        raise ValueError("odd")
    except ValueError:
        logging.getLogger("baton.test").exception("it broke")
    assert "ValueError: odd" in str(written.lines[0]["exception"])


@pytest.fixture
def bare_root() -> Iterator[None]:
    """The process's root logger without handlers, for one test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    yield
    root.handlers, root.level = handlers, level


@pytest.mark.usefixtures("bare_root")
def test_set_up_replaces_what_was_there(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("a", as_json=False)
    set_up_logging("b", as_json=True)
    logging.getLogger("x").info("hello")
    [line] = capsys.readouterr().err.splitlines()
    assert json.loads(line)["process"] == "b"


def test_prompts_are_never_asked_for_by_half() -> None:
    with pytest.raises(StartupFailed):
        GatewayConfig(log_prompts=True)
    assert GatewayConfig(log_prompts=True, log_json=True).log_prompts


@pytest.mark.usefixtures("bare_root")
def test_a_caller_that_has_gone_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    gone = cygrpc.ExecuteBatchError('Failed "execute_batch"')
    assert printed("grpc._cython.cygrpc", gone, capsys) == "E grpc._cython.cygrpc: raised in core\n"
    assert "Traceback" in printed("grpc._cython.cygrpc", ValueError("x"), capsys)
    assert "Traceback" in printed("baton.node", gone, capsys)
