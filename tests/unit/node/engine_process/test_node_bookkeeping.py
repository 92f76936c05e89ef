"""The small parts of a node: request book, its outputs, pulse, placement, policy."""

from __future__ import annotations

import queue
import time
from dataclasses import replace

import pytest
from fakes.clock import FakeClock

from baton.core.config import NodeConfig
from baton.core.engine_config import EngineConfig
from baton.core.errors import (
    Cancelled,
    InvalidRequest,
    StartupFailed,
)
from baton.core.request.request import FinishReason, Request
from baton.core.request.sampling_params import SamplingParams
from baton.core.request.token_ids import BlockHash, Tier
from baton.decode_node import engine_main as decode_main
from baton.engine.kv.limits import EngineLimits
from baton.engine.scheduling.outputs import TokenOutput
from baton.gateway.engines.engine_connection import tokens_from_wire
from baton.kv_transfer.protocol.handoff_side import TOMBSTONE_S
from baton.node.engine_process.cache_report import CacheReport
from baton.node.engine_process.heartbeat import STALL_S, HeartbeatSender
from baton.node.engine_process.startup_messages import describe_pool
from baton.node.requests.request_io import Entry, RequestIO
from baton.node.supervisor.placement import engine_configs
from baton.prefill_node import engine_main as prefill_main
from baton.proto.v1 import engine_pb2, node_pb2


def entry(number: int, *, gateway: str = "g", attempt: int = 0, deadline_s: float = 100.0) -> Entry:
    request = Request(f"{number:032x}", attempt, (1, 2, 3), SamplingParams())
    return Entry(request, gateway, deadline_s, ticket=None)


def book_of(clock: FakeClock, to: Recipients | None = None) -> RequestIO:
    return RequestIO((to or Recipients()).to_gateway, clock, "n", 1000)


class TestRequestBook:
    def test_key_is_refused_until_its_tombstone_is_forgotten(self) -> None:
        clock = FakeClock()
        book, one = book_of(clock), entry(1)
        book.open(one)
        with pytest.raises(InvalidRequest):
            book.open(one)
        assert book.end(one.key, None) is one
        clock.advance(TOMBSTONE_S - 1)
        book.overdue()
        with pytest.raises(Cancelled):
            book.open(one)
        clock.advance(1)
        book.overdue()
        book.open(one)

    def test_tens_of_thousands_that_are_over_cost_next_to_nothing(self) -> None:
        clock = FakeClock()
        book, start_s = book_of(clock), time.process_time()
        for number in range(60_000):
            book.end(str(number), None)
        clock.advance(TOMBSTONE_S)
        book.overdue()
        assert time.process_time() - start_s < 1.0

    def test_close_of_a_key_that_never_came_refuses_it(self) -> None:
        book, one = book_of(FakeClock()), entry(1)
        assert book.end(one.key, None) is None
        with pytest.raises(Cancelled):
            book.open(one)

    def test_deadlines_come_in_order_and_skip_the_closed(self) -> None:
        clock = FakeClock()
        book = book_of(clock)
        late, soon, ended = entry(1, deadline_s=9), entry(2, deadline_s=5), entry(3, deadline_s=1)
        for each in (late, soon, ended):
            book.open(each)
        book.end(ended.key, None)
        assert book.next_deadline_s() == 5
        clock.advance(5)
        assert book.overdue() == [soon.key]
        assert book.next_deadline_s() == 9

    def test_keys_of_one_gateway(self) -> None:
        book = book_of(FakeClock())
        for number, gateway in enumerate("xyx"):
            book.open(entry(number, gateway=gateway))
        assert book.forget_gateway("x") == [entry(0).key, entry(2).key]


class Recipients:
    """Records which gateway receives which outputs, in order."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, node_pb2.StepOutputs]] = []

    def to_gateway(self, name: str, message: node_pb2.NodeMessage) -> None:
        self.steps.append((name, message.outputs))


def never(_: engine_pb2.EngineOutput) -> None:
    raise AssertionError("nothing has changed")


def test_outputs_are_batched_by_gateway() -> None:
    to = Recipients()
    book = book_of(FakeClock(), to)
    for number, gateway in enumerate(("x", "y", "x", "gone")):
        book.queue_output(entry(number, gateway=gateway))
    book.forget_gateway("gone")
    book.flush()
    batches = [(name, [int(o.request_id, 16) for o in step.outputs]) for name, step in to.steps]
    assert batches == [("x", [0, 2]), ("y", [1])]
    book.flush()
    assert len(to.steps) == 2


def test_what_the_cache_has_adds_up_until_the_supervisor_reads() -> None:
    sent, has_room = list[engine_pb2.EngineOutput](), False
    changes = CacheReport(sent.append, lambda: has_room)
    a, b = (BlockHash(bytes([n]) * 16) for n in range(2))
    for moved in (((a,), Tier.NOWHERE, Tier.DEVICE), ((b,), Tier.NOWHERE, Tier.DEVICE)):
        changes.moved(*moved)
        changes.flush()
    changes.moved((a,), Tier.DEVICE, Tier.NOWHERE)
    assert not sent
    has_room = True
    changes.flush()
    assert [each.cache_changes for each in sent] == [engine_pb2.CacheChanges(stored=b)]


def test_who_waits_for_room_stops_once_it_is_there_though_nothing_is_left_to_say() -> None:
    """A cache report no longer waits for room once there is room, even if its changes have
    cancelled out; else the loop would spin."""
    answers: list[bool] = []
    has_room = False

    def ask() -> bool:
        answers.append(has_room)
        return has_room

    changes = CacheReport(never, ask)
    changes.flush()
    assert not answers
    changes.moved((a := BlockHash(bytes(16)),), Tier.NOWHERE, Tier.DEVICE)
    changes.flush()
    changes.moved((a,), Tier.DEVICE, Tier.NOWHERE)
    has_room = True
    changes.flush()
    assert answers == [False, True]
    changes.flush()
    assert len(answers) == 2


def test_plain_tokens_are_put_into_columns() -> None:
    to = Recipients()
    book = book_of(FakeClock(), to)
    a, b, c = entry(1, gateway="x"), entry(2, gateway="y", attempt=1), entry(3, gateway="x")
    d, gone = entry(4, gateway="x", attempt=2), entry(5, gateway="gone")
    book.emit(a, TokenOutput(a.key, 7, 300, 0.0, None))
    book.emit(b, TokenOutput(b.key, 8, 301, 0.0, None))
    book.emit(c, TokenOutput(c.key, 6, 299, 0.0, FinishReason.STOP))
    book.emit(d, TokenOutput(d.key, 9, 302, 0.0, None))
    book.emit(gone, TokenOutput(gone.key, 0, 0, 0.0, None))
    book.forget_gateway("gone")
    book.flush()
    steps = dict(to.steps)
    names = [each.request.request_id for each in (a, b, c, d)]
    plain = [(names[0], 0, 7, 300), (names[3], 2, 9, 302)]
    assert tokens_from_wire(steps["x"].tokens) == plain
    assert [output.request_id for output in steps["x"].outputs] == [names[2]]
    assert tokens_from_wire(steps["y"].tokens) == [(names[1], 1, 8, 301)]
    assert len(to.steps) == 2


def test_columns_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError):
        tokens_from_wire(node_pb2.PlainTokens(request_ids=["a", "b"], attempts=[0, 0]))


def test_pulse_stops_only_for_a_turn_that_does_not_end() -> None:
    clock = FakeClock()
    pulse = HeartbeatSender(lambda numbers: None, 1.0, clock)
    clock.advance(10 * STALL_S)
    assert not pulse.is_stalled()  # an idle engine is not stalled
    pulse.turn_started()
    clock.advance(STALL_S)
    assert not pulse.is_stalled()
    clock.advance(1)
    assert pulse.is_stalled()
    pulse.turn_ended()
    assert not pulse.is_stalled()


def test_pulse_beats_at_once_when_what_waits_moves() -> None:
    received: queue.SimpleQueue[node_pb2.Heartbeat] = queue.SimpleQueue()
    pulse = HeartbeatSender(received.put, 1000.0, FakeClock())
    pulse.start()
    pulse.count(node_pb2.Heartbeat(num_running=1))
    for tokens, num_steps in ((16, 1), (16, 2), (0, 3)):
        pulse.count(node_pb2.Heartbeat(waiting_tokens=tokens, num_steps=num_steps))
        assert received.get(timeout=10).waiting_tokens == tokens
    pulse.count(node_pb2.Heartbeat(num_steps=9))
    pulse.stop()
    assert received.empty()


def test_pulse_beats_at_once_when_a_link_came_or_went() -> None:
    received: queue.SimpleQueue[node_pb2.Heartbeat] = queue.SimpleQueue()
    pulse = HeartbeatSender(received.put, 1000.0, FakeClock())
    pulse.start()
    for names in (["a"], ["a", "b"], ["b"], []):
        links = [node_pb2.PeerLink(incarnation=name) for name in names]
        pulse.count(node_pb2.Heartbeat(links=links))
        assert [link.incarnation for link in received.get(timeout=10).links] == names
        pulse.count(node_pb2.Heartbeat(links=links, num_running=1))
    pulse.stop()
    assert received.empty()


class TestPlacement:
    def test_one_engine_for_each_gpu(self) -> None:
        configs = engine_configs(EngineConfig(), NodeConfig(gpus="0, 3"))
        assert [config.device for config in configs] == ["cuda:0", "cuda:3"]
        (config,) = engine_configs(EngineConfig(), NodeConfig(gpus="01"))
        assert config.device == "cuda:1"

    def test_ranks_of_an_engine_are_neighbours_in_the_list(self) -> None:
        engine = EngineConfig(tensor_parallel_size=2)
        configs = engine_configs(engine, NodeConfig(gpus="4,1,2,3"))
        assert [config.device for config in configs] == ["cuda:4,1", "cuda:2,3"]
        with pytest.raises(StartupFailed, match=r"0,1,2 are 3, which --tensor-parallel-size 2"):
            engine_configs(engine, NodeConfig(gpus="0,1,2"))

    def test_cpu_engines_are_counted(self) -> None:
        assert len(engine_configs(EngineConfig(), NodeConfig())) == 1
        assert len(engine_configs(EngineConfig(), NodeConfig(num_engines=3))) == 3

    @pytest.mark.parametrize("gpus", ["", "0,0", "0,00", "a", "0,-1"])
    def test_nonsense_is_refused(self, gpus: str) -> None:
        with pytest.raises(StartupFailed):
            engine_configs(EngineConfig(), NodeConfig(gpus=gpus))


def test_decode_steps_are_short_unless_the_operator_says_otherwise() -> None:
    for max_num_seqs, num_kv_blocks, num_tokens in (
        (256, None, 512), (1000, None, 1128), (None, None, 640), (None, 202, 512),
    ):  # fmt: skip
        config = EngineConfig(max_num_seqs=max_num_seqs, num_kv_blocks=num_kv_blocks)
        assert decode_main.adjust(config).max_num_batched_tokens == num_tokens
    chosen = EngineConfig(max_num_batched_tokens=4096)
    assert decode_main.adjust(chosen) == chosen
    chunked = EngineConfig(prefill_chunk_tokens=8192)
    assert decode_main.adjust(chunked) == decode_main.adjust(EngineConfig())


def test_credit_is_a_share_of_the_pool_and_never_nothing() -> None:
    node = NodeConfig(credit_fraction=0.25)
    assert prefill_main.max_held_blocks(node, 100) == 25
    assert prefill_main.max_held_blocks(node, 3) == 1


def test_a_prefill_node_takes_long_prompts_in_large_chunks() -> None:
    assert prefill_main.adjust(EngineConfig()).prefill_chunk_tokens == 8192
    for chosen in (EngineConfig(max_num_batched_tokens=64), EngineConfig(prefill_chunk_tokens=1)):
        assert prefill_main.adjust(chosen) == replace(chosen, pp_balance="prefill")


def test_pool_is_described_in_tokens_and_requests() -> None:
    limits = EngineLimits(num_blocks=12_347, block_size=16, max_model_len=4096)
    assert describe_pool(limits) == (
        "12,345 KV blocks of 16 = 197,520 tokens; 48 requests of 4,096"
    )
