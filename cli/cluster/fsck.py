"""`baton fsck`: checks that all nodes of a cluster agree on requests, transfers and held blocks.

    every engine     is listed in Redis, is reachable, its block counts add up
    every request    that keeps blocks for a transfer has one
    every transfer   is known on both sides: source HELD ── puller ATTACHED, QUEUED or PULLING
    every link       is known on both sides
    prefix index     lists all cached blocks, and none but cached and held ones

Ledgers are taken at slightly different times, so operations in progress may look inconsistent:
`is_momentary` marks findings that count only if a second survey, some time later, has them too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass

from ...core.config import ClusterConfig
from ..host.finding import Finding, exit_code, ok, problem, render, warning
from .survey import EngineView, Ledger, Survey, survey

_SETTLE_S = 1.0

_UNASKED = "waiting"  # a puller's transfer that is unknown to its source yet
_ENDING = "ending"  # cancelled; its memory is kept only for copies in flight


@dataclass(frozen=True, slots=True)
class CheckedFinding:
    """A finding, and whether it may be due to the time of the survey."""

    finding: Finding
    is_momentary: bool = False


async def run(cluster: ClusterConfig, *, as_json: bool) -> int:
    """Print the report; exit code 1 if the nodes do not agree. Raises StartupFailed."""
    findings = await examine(lambda: survey(cluster), _SETTLE_S)
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        print(render(findings))
    return exit_code(findings)


async def examine(look: Callable[[], Awaitable[Survey]], settle_s: float) -> list[Finding]:
    """The findings, momentary ones only if a second survey has them too."""
    first = judge(await look())
    if not any(judged.is_momentary for judged in first):
        return [judged.finding for judged in first]
    await asyncio.sleep(settle_s)
    before = {judged.finding for judged in first}
    second = judge(await look())
    return [one.finding for one in second if not one.is_momentary or one.finding in before]


def judge(found: Survey) -> list[CheckedFinding]:
    """All warnings and problems, and a line for each engine without lasting ones."""
    judged = [*_entries(found)]
    by_incarnation = {
        engine.member.incarnation: engine
        for engine in found.engines
        if engine.member is not None and engine.ledger is not None
    }
    for engine in found.engines:
        wrong = [*_engine(engine, by_incarnation)]
        if all(one.is_momentary for one in wrong):
            judged.append(CheckedFinding(ok(engine.name, _summary(engine))))
        judged += wrong
    return [*judged, *_doubles(found)]


def _summary(engine: EngineView) -> str:
    assert engine.ledger is not None
    b = engine.ledger.blocks
    return (
        f"{b.free} free + {b.cached} cached + {b.held} held + {b.reserved} reserved = {b.total} "
        f"blocks, {len(engine.ledger.requests)} requests, {len(engine.ledger.transfers)} transfers"
    )


def _entries(found: Survey) -> Iterator[CheckedFinding]:
    if found.num_bad_entries:
        text = f"{found.num_bad_entries} entries are junk or not signed with this secret"
        yield CheckedFinding(
            warning("redis", text, "another BATON_CLUSTER_SECRET? they are ignored")
        )
    if not found.engines:
        yield CheckedFinding(
            problem("redis", "no engine is listed", "is this the right --cluster?")
        )


def _engine(engine: EngineView, living: Mapping[str, EngineView]) -> Iterator[CheckedFinding]:
    if engine.ledger is None:
        text = f"in Redis, but does not answer at {engine.address}: {engine.silence}"
        yield CheckedFinding(
            problem(engine.name, text, "if it has failed, its entry expires within seconds")
        )
        return
    if engine.member is None:
        text = f"answers at {engine.address}, but is not in Redis: no gateway finds it"
        yield CheckedFinding(problem(engine.name, text, "draining, or cut off from Redis"), True)
        return
    yield from _counts(engine.name, engine.ledger)
    yield from _requests(engine.name, engine.ledger)
    yield from _transfers(engine, engine.ledger, living)
    yield from _links(engine, engine.ledger, living)
    yield from _index(engine, engine.ledger)


def _counts(name: str, ledger: Ledger) -> Iterator[CheckedFinding]:
    b = ledger.blocks
    total = b.free + b.cached + b.held + b.reserved
    if total != b.total:
        yield CheckedFinding(problem(name, f"block counts add up to {total}, not to {b.total}"))
    owned = sum(request.num_blocks for request in ledger.requests.values())
    if b.held > owned and not ledger.num_fences:
        text = f"{b.held - owned} held blocks belong to no request: leaked"
        yield CheckedFinding(problem(name, text, "restart the node, and report it"))
    largest = max((request.num_blocks for request in ledger.requests.values()), default=0)
    if largest > b.held:
        yield CheckedFinding(
            problem(name, f"a request has {largest} blocks, but {b.held} are held")
        )


def _requests(name: str, ledger: Ledger) -> Iterator[CheckedFinding]:
    """Requests that only wait for a transfer must have one."""
    awaited = {transfer.key for transfer in ledger.transfers.values()}
    for key, request in sorted(ledger.requests.items()):
        if request.state in ("held", "reserved") and key not in awaited:
            text = f"request {key} is {request.state}, but has no transfer"
            yield CheckedFinding(
                problem(name, text, "it will never be released: restart the node"), True
            )


def _transfers(
    engine: EngineView, ledger: Ledger, living: Mapping[str, EngineView]
) -> Iterator[CheckedFinding]:
    assert engine.member is not None
    for transfer_id, transfer in sorted(ledger.transfers.items()):
        side, other = ("lease", "puller") if transfer.is_source else ("pull", "source")
        what = f"{side} {transfer_id} ({transfer.state})"
        if transfer.is_source and transfer.key and transfer.key not in ledger.requests:
            text = f"{what} is for request {transfer.key}, which is not here"
            yield CheckedFinding(problem(engine.name, text), True)
        peer = living.get(transfer.peer or "")
        if peer is None:
            text = f"{what}: its {other} {transfer.peer} is not running"
            yield CheckedFinding(problem(engine.name, text, "it ends with its lease"), True)
            continue
        assert peer.ledger is not None
        theirs = peer.ledger.transfers.get(transfer_id)
        is_expected = transfer.state not in (_UNASKED, _ENDING)
        if is_expected and (theirs is None or theirs.peer != engine.member.incarnation):
            text = f"{what}: its {other} {peer.name} has no record of it"
            yield CheckedFinding(problem(engine.name, text, "it ends with its lease"), True)


def _links(
    engine: EngineView, ledger: Ledger, living: Mapping[str, EngineView]
) -> Iterator[CheckedFinding]:
    assert engine.member is not None
    for incarnation in sorted(ledger.peers):
        peer = living.get(incarnation)
        if peer is None:
            text = f"linked to {incarnation}, which is not in Redis or does not answer"
            yield CheckedFinding(warning(engine.name, text), True)
        elif peer.ledger is not None and engine.member.incarnation not in peer.ledger.peers:
            yield CheckedFinding(
                warning(engine.name, f"linked to {peer.name}, which is not linked back"), True
            )


def _index(engine: EngineView, ledger: Ledger) -> Iterator[CheckedFinding]:
    """A held block is in the index once it is full and computed, so the count has a range."""
    b, count = ledger.blocks, engine.num_published
    if count is None:
        text = "has nothing in the prefix index"
        yield CheckedFinding(
            warning(engine.name, text, "gateways do not see what it has cached"), True
        )
    elif not b.cached <= count <= b.cached + b.held:
        text = f"the index has {count} blocks of it: {b.cached} are cached, {b.held} held"
        yield CheckedFinding(warning(engine.name, text, "gateways route by outdated entries"), True)


def _doubles(found: Survey) -> Iterator[CheckedFinding]:
    """A request runs on one engine. During a hand-off it is on two: held, and reserved."""
    running = Counter(
        key
        for engine in found.engines
        if engine.ledger is not None
        for key, request in engine.ledger.requests.items()
        if request.state == "running"
    )
    for key, count in sorted(running.items()):
        if count > 1:
            yield CheckedFinding(problem("cluster", f"request {key} runs on {count} engines"), True)
