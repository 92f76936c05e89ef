"""The faults that fsck must find in a cluster, each alone in an otherwise sound one."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from fakes.index_link import FakeIndexLink

from baton.cli.cluster.fsck import examine, judge
from baton.cli.cluster.survey import (
    BadLedger,
    EngineView,
    Ledger,
    LedgerTransfer,
    Survey,
    count_published,
    parse_ledger,
)
from baton.cli.host.finding import Finding, Level
from baton.core.membership import Member, Role
from baton.core.request.token_ids import BlockHash
from baton.prefix_index.journal import CacheJournal
from baton.prefix_index.pages import encode_contents

P, D = "a" * 32, "b" * 32
KEY = "c" * 32 + "/0"
TRANSFER = "d" * 32


def member(incarnation: str, role: Role, name: str) -> Member:
    return Member(incarnation, role, name, "127.0.0.1:1", "demo", "fp", 2048, 16, 100)


def ledger(node: str, **changes: Any) -> dict[str, Any]:
    """A ledger as an idle engine writes it."""
    blocks = {"free": 90, "cached": 8, "held": 0, "reserved": 2, "total": 100}
    idle: dict[str, Any] = {
        "node": node,
        "blocks": blocks,
        "requests": {},
        "num_held_blocks": 0,
        "num_fences": 0,
        "num_preemptions": 0,
        "transfers": {},
        "peers": {},
        "num_tombstones": 0,
    }
    return idle | changes


def request(state: str, num_blocks: int) -> dict[str, Any]:
    return {"state": state, "num_blocks": num_blocks, "num_tokens": 9, "num_computed_tokens": 9}


class Cluster:
    """A prefill and a decode engine in the middle of one hand-off; each test adds a fault."""

    def __init__(self) -> None:
        self.num_published: int | None = 6
        counts = {"free": 88, "cached": 6, "held": 4, "reserved": 2, "total": 100}
        self.prefill = ledger(
            "p0",
            blocks=dict(counts),
            requests={KEY: request("held", 4)},
            transfers={TRANSFER: {"state": "held", "key": KEY, "puller": D}},
            peers={D: "matched"},
        )
        self.decode = ledger(
            "d0",
            blocks=dict(counts),
            requests={KEY: request("reserved", 4)},
            transfers={TRANSFER: {"state": "pulling", "key": KEY, "source": P}},
            peers={P: "ready"},
        )

    def survey(self) -> Survey:
        return Survey(
            (
                self.view(member(P, Role.PREFILL, "p0"), self.prefill),
                self.view(member(D, Role.DECODE, "d0"), self.decode),
            )
        )

    def view(self, entry: Member, raw: dict[str, Any]) -> EngineView:
        parsed = parse_ledger(json.dumps(raw))
        return EngineView(entry.name, entry.address, entry, parsed, "", self.num_published)

    def wrong(self) -> list[str]:
        return wrong(self.survey())


def wrong(survey: Survey) -> list[str]:
    findings = [judged.finding for judged in judge(survey)]
    return [f"{f.subject}: {f.text}" for f in findings if f.level is not Level.OK]


def test_a_hand_off_under_way_is_sound() -> None:
    cluster = Cluster()
    assert cluster.wrong() == []
    assert len(judge(cluster.survey())) == 2  # one line per engine


def test_block_counts_must_add_up() -> None:
    cluster = Cluster()
    cluster.prefill["blocks"]["free"] -= 1
    assert cluster.wrong() == ["p0: block counts add up to 99, not to 100"]


def test_held_blocks_must_be_somebody_s() -> None:
    cluster = Cluster()
    cluster.decode["blocks"] |= {"free": 85, "held": 7}
    assert cluster.wrong() == ["d0: 3 held blocks belong to no request: leaked"]
    cluster.decode["num_fences"] = 1  # a copy or a step may still hold them
    assert cluster.wrong() == []


def test_shared_blocks_may_be_named_by_several_requests() -> None:
    cluster = Cluster()
    cluster.decode["requests"]["e" * 32 + "/0"] = request("running", 3)
    assert cluster.wrong() == []


def test_a_held_request_needs_a_transfer() -> None:
    cluster = Cluster()
    cluster.prefill["transfers"] = {}
    found = cluster.wrong()
    assert f"p0: request {KEY} is held, but has no transfer" in found
    assert f"d0: pull {TRANSFER} (pulling): its source p0 has no record of it" in found


def test_a_lease_needs_its_puller_s_transfer() -> None:
    cluster = Cluster()
    cluster.decode["transfers"] = {}
    cluster.decode["requests"] = {KEY: request("running", 4)}
    assert cluster.wrong() == [f"p0: lease {TRANSFER} (held): its puller d0 has no record of it"]


def test_a_pull_that_waits_or_ends_needs_no_source() -> None:
    for state in ("waiting", "ending"):
        cluster = Cluster()
        cluster.prefill |= {"transfers": {}, "requests": {}}
        cluster.prefill["blocks"] |= {"free": 92, "held": 0}
        cluster.decode["transfers"][TRANSFER]["state"] = state
        assert cluster.wrong() == []


def test_a_lease_for_a_request_that_is_gone() -> None:
    cluster = Cluster()
    cluster.prefill["requests"] = {}
    cluster.prefill["blocks"] |= {"free": 92, "held": 0}
    assert cluster.wrong() == [
        f"p0: lease {TRANSFER} (held) is for request {KEY}, which is not here"
    ]


def test_a_request_that_runs_twice() -> None:
    cluster = Cluster()
    cluster.prefill["requests"][KEY]["state"] = "running"
    cluster.decode["requests"][KEY]["state"] = "running"
    assert cluster.wrong() == [f"cluster: request {KEY} runs on 2 engines"]


def test_engines_that_do_not_answer() -> None:
    survey = Cluster().survey()
    dead = dataclasses.replace(survey.engines[1], ledger=None, silence="UNAVAILABLE: refused")
    found = wrong(Survey((survey.engines[0], dead)))
    assert "d0: in Redis, but does not answer at 127.0.0.1:1: UNAVAILABLE: refused" in found
    assert f"p0: lease {TRANSFER} (held): its puller {D} is not running" in found
    assert f"p0: linked to {D}, which is not in Redis or does not answer" in found


def test_engines_that_nobody_finds() -> None:
    survey = Cluster().survey()
    stranger = EngineView("x9", "127.0.0.1:1", None, parse_ledger(json.dumps(ledger("x9"))))
    (found,) = wrong(Survey((*survey.engines, stranger)))
    assert "answers at 127.0.0.1:1, but is not in Redis" in found


def test_links_are_mutual() -> None:
    cluster = Cluster()
    cluster.decode["peers"] = {}
    assert cluster.wrong() == ["p0: linked to d0, which is not linked back"]


@pytest.mark.parametrize(
    ("num_published", "is_sound"), [(5, False), (6, True), (10, True), (11, False)]
)
def test_the_index_lists_all_that_is_cached(num_published: int, is_sound: bool) -> None:
    cluster = Cluster()  # 6 cached, 4 held
    cluster.num_published = num_published
    assert (not cluster.wrong()) == is_sound


def test_an_engine_that_publishes_nothing() -> None:
    cluster = Cluster()
    cluster.num_published = None
    assert "p0: has nothing in the prefix index" in cluster.wrong()


def test_junk_in_redis_and_an_empty_cluster_are_reported() -> None:
    assert wrong(Survey((), num_bad_entries=2)) == [
        "redis: 2 entries are junk or not signed with this secret",
        "redis: no engine is listed",
    ]


async def look_at(*surveys: Survey) -> list[Finding]:
    """Examine a cluster that is in the given states one after the other."""
    looks = iter(surveys)

    async def look() -> Survey:
        return next(looks)

    return await examine(look, settle_s=0.0)


async def test_only_what_lasts_is_reported() -> None:
    sound, torn = Cluster(), Cluster()
    torn.decode["transfers"] = {}
    assert [f.level for f in await look_at(sound.survey())] == [Level.OK] * 2  # one look is enough
    assert [f.level for f in await look_at(torn.survey(), sound.survey())] == [Level.OK] * 2
    lasting = await look_at(torn.survey(), torn.survey())
    assert sum(f.level is Level.PROBLEM for f in lasting) == 2  # the lease, and the reservation
    assert {"level": "problem", "subject": "p0"}.items() <= dataclasses.asdict(lasting[1]).items()


async def test_wrong_counts_need_no_second_look() -> None:
    cluster = Cluster()
    cluster.prefill["blocks"]["total"] = 101
    found = await look_at(cluster.survey())
    assert Level.PROBLEM in [f.level for f in found]


def test_ledgers_parse() -> None:
    parsed = parse_ledger(json.dumps(Cluster().prefill))
    assert isinstance(parsed, Ledger)
    transfer = parsed.transfers[TRANSFER]
    assert transfer == LedgerTransfer("held", KEY, puller=D)
    assert (transfer.is_source, transfer.peer) == (True, D)
    assert parsed.requests[KEY].num_blocks == 4


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"incarnation": "x", "error": "no answer"}', json.dumps({"node": "p"})],
)
def test_what_is_no_ledger_is_refused(text: str) -> None:
    with pytest.raises(BadLedger):
        parse_ledger(text)


async def test_published_blocks_are_those_on_the_device() -> None:
    journal, link = CacheJournal(P), FakeIndexLink()
    hashes = [BlockHash(i.to_bytes(16, "little")) for i in range(1, 5001)]
    journal.record([], hashes, hashes[:10])
    journal.record([], [], hashes[:10])
    await link.write_contents(P, encode_contents(journal.contents(0)))
    await link.write_contents(D, b"junk")
    assert await count_published(link, [P]) == {P: 4990}
    assert await count_published(link, [P, D]) == {P: 4990}
    link.is_away = True
    assert await count_published(link, [P]) == {}
