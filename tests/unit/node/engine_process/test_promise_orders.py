"""Orders about an engine's promise: only those of the newest lease are followed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.node.engine_process.promise_orders import PromiseOrders
from baton.proto.v1 import node_pb2


@dataclass
class FakePromise:
    tbt_target_s: float | None = 0.02
    is_promising: bool = True


def order(epoch: int, leader: str = "a", target_s: float | None = None) -> node_pb2.SetPromise:
    return node_pb2.SetPromise(epoch=epoch, leader=leader, tbt_target_s=target_s)


def made(target_s: float | None = 0.02) -> tuple[FakePromise, PromiseOrders]:
    engine = FakePromise(target_s)
    return engine, PromiseOrders(engine)  # type: ignore[arg-type]


def test_what_a_leader_orders_is_done_and_an_older_epoch_is_refused() -> None:
    engine, orders = made()
    assert orders.take(order(2)) and not engine.is_promising
    assert engine.tbt_target_s == 0.02, "what decodes is kept to it"
    assert not orders.take(order(1, "b", 0.02)) and not engine.is_promising
    assert not orders.take(order(2, "b", 0.02)), "two that were given the same epoch"
    assert orders.take(order(2, "a", 0.03)) and engine.is_promising
    assert engine.tbt_target_s == 0.03 and orders.epoch == 2
    assert orders.take(order(3, "b")) and not engine.is_promising
    assert not orders.take(order(2, "a", 0.02)) and (orders.epoch, orders.leader) == (3, "b")


@pytest.mark.parametrize("target_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_target_that_is_none(target_s: float) -> None:
    engine, orders = made()
    assert not orders.take(order(1, target_s=target_s)) and engine.is_promising
    assert orders.epoch == 0


def test_an_engine_without_a_promise_makes_none() -> None:
    engine, orders = made(None)
    assert not orders.take(order(1, target_s=0.02)) and engine.tbt_target_s is None
    assert not orders.take(order(0, leader=""))


def test_an_order_without_an_epoch_is_none() -> None:
    assert not made()[1].take(order(0, "a", 0.02))


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from("ab"), st.booleans())))
def test_whatever_comes_the_epoch_never_falls_and_has_one_leader(
    sent: list[tuple[int, str, bool]],
) -> None:
    engine, orders = made()
    leaders: dict[int, str] = {}
    newest = 0
    for epoch, leader, promises in sent:
        is_followed = orders.take(order(epoch, leader, 0.02 if promises else None))
        assert is_followed == (epoch > newest or (epoch == newest and leaders[epoch] == leader))
        if is_followed:
            newest = leaders.setdefault(epoch, leader) and epoch
            assert engine.is_promising == promises
        assert orders.epoch == newest
