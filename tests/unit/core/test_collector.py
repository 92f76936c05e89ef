"""Settings of Python's garbage collector, which are process-wide."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from baton.core.process import collector
from baton.core.process.collector import collect_some, settle

OWN = (700, 11, 12)


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Set thresholds, and freeze objects again afterwards: pytest excludes what it has loaded from
    collections, as some users do."""
    before = gc.get_threshold()
    gc.set_threshold(*OWN)
    yield
    gc.set_threshold(*before)
    gc.freeze()


def test_all_is_as_it_was_behind_the_last() -> None:
    gc.unfreeze()
    one, other = settle(), settle()
    one()
    one()
    assert gc.get_threshold()[0] > OWN[0] and gc.get_freeze_count() > 0
    other()
    assert gc.get_threshold() == OWN and gc.get_freeze_count() == 0


def test_what_others_keep_out_of_collections_stays_out() -> None:
    gc.freeze()
    settle()()
    assert gc.get_threshold() == OWN and gc.get_freeze_count() > 0


def test_in_a_process_that_is_not_ours_nothing_is_kept_out_of_collections() -> None:
    gc.unfreeze()
    end = settle(keeps_all=False)
    assert gc.get_threshold()[0] > OWN[0] and gc.get_freeze_count() == 0
    end()
    assert gc.get_threshold() == OWN


def test_what_is_collected_may_have_settled() -> None:
    """The collection in `settle` may free an object that unsettles in another thread."""

    class Owner:
        def __init__(self) -> None:
            self.itself = self
            unsettle = settle(keeps_all=False)
            weakref.finalize(self, in_a_thread, unsettle)

    def in_a_thread(run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()

    Owner()
    settle()()
    gc.unfreeze()
    assert gc.get_threshold() == OWN


def test_what_others_keep_meanwhile_stays_out() -> None:
    gc.unfreeze()
    end = settle(keeps_all=False)
    gc.freeze()
    end()
    assert gc.get_freeze_count() > 0


def cycles(n: int) -> list[weakref.ref[list[object]]]:
    class Cycle(list[object]):
        pass

    found = []
    for _ in range(n):
        cycle = Cycle()
        cycle.append(cycle)
        found.append(weakref.ref(cycle))
    return found


def test_some_are_collected_where_enough_is_new() -> None:
    gc.set_threshold(20_000, *OWN[1:])
    gc.collect()
    few = cycles(50)
    collect_some()
    assert all(one() for one in few)
    many = cycles(1_000)
    collect_some()
    assert not any(one() for one in few + many)


def test_what_survives_is_collected_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation is collected after enough collections of the younger one, as in Python."""
    gc.set_threshold(20_000, *OWN[1:])
    gc.collect()
    old = cycles(10)
    kept = [one() for one in old]
    cycles(1_000)
    collect_some()
    kept.clear()
    collected = []
    for _ in range(21):
        cycles(1_000)
        collect_some()
        collected.append(not any(one() for one in old))
    assert collected[-1] and not collected[0]
    monkeypatch.setattr(collector, "_NUM_TIMES", (20, 20))  # else it takes 8 million objects
    oldest, counts = cycles(10), []
    kept = [one() for one in oldest]
    gc.collect(1)
    kept.clear()
    for _ in range(21 * 22):
        cycles(1_000)
        collect_some()
        counts.append(sum(one() is not None for one in oldest))
    assert counts[0] == 10 and counts[-1] == 0


def test_what_is_old_is_walked_as_seldom_as_by_thresholds() -> None:
    """The oldest generation is collected as rarely as by the thresholds: with a host tier of
    200,000 blocks a collection takes 20 ms, longer than a step."""
    gc.set_threshold(20_000, 20, 20)
    gc.collect()
    num_before = gc.get_stats()[2]["collections"]
    for _ in range(20 * 30):  # less than a tenth of 20,000 * 20 * 20 objects
        kept = cycles(1_000)
        collect_some()
    assert len(kept) == 1_000 and gc.get_stats()[2]["collections"] == num_before


def test_a_burst_between_two_waits_is_no_reason_to_walk_what_is_old() -> None:
    """A burst of objects, e.g. prompt log-probabilities of a step, exceeds the youngest generation
    but causes no collection of the oldest."""
    end = settle(collects_some=True)
    gc.collect()
    num_before = gc.get_stats()[2]["collections"]
    old: list[object] = []
    for _ in range(30 * 21):
        cycles(1_000)
        old += [[] for _ in range(50)]
        collect_some()
    burst = cycles(25_000)
    assert len(burst) == 25_000 and gc.get_count()[0] < 20_000, "they were collected, as young ones"
    assert gc.get_stats()[2]["collections"] == num_before
    end()
