"""The page's server side: engine states, recipients of data, headers, files, limits."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from fakes.clock import FakeClock

from baton.core.errors import InvalidRequest
from baton.core.membership import Member, Role
from baton.core.request.token_ids import BlockHash
from baton.gateway.engines.engine_table import EngineTable
from baton.gateway.engines.linked_engine import LinkedEngine
from baton.gateway.engines.reported_load import ReportedLoad
from baton.gateway.http.dashboard import routes
from baton.gateway.http.dashboard.routes import MAX_VIEWERS, add_dashboard, static_files
from baton.gateway.http.dashboard.snapshot import (
    MAX_RECENT,
    EngineRoster,
    SnapshotFeed,
    View,
    definitions,
)
from baton.gateway.http.protocol.errors import Refusal
from baton.gateway.telemetry.calls.ended_call import STAGES
from baton.gateway.telemetry.calls.slo import SloTargets
from baton.gateway.telemetry.window.window import TelemetryWindow
from baton.prefix_index.mirror import PrefixMirror
from baton.prefix_index.pages import Contents
from baton.proto.v1.node_pb2 import Counters

TARGETS = SloTargets(0.5, 0.05)
IDLE = ReportedLoad(0, 0, 0, 90, 40, False, frozenset())


class Cluster:
    """A table and a directory that tests change, and the feed over them."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.table = EngineTable(PrefixMirror(self.clock))
        self.members: list[Member] = []
        self.starting: set[str] = set()
        self.roster = EngineRoster(self.table, lambda: self.members, self.starting.__contains__)
        self.feed = SnapshotFeed(
            TelemetryWindow(self.clock),
            self.roster,
            lambda: {"model": "m"},
            TARGETS,
            self.clock,
            lambda: {"is_shared": False, "alone_since_unix_s": 0.0, "gateways": []},
        )

    def join(self, name: str, incarnation: str, load: ReportedLoad = IDLE) -> None:
        member = Member(incarnation * 32, Role.DECODE, name, "h:1", "m", "f", 64, 16, 100)
        self.members.append(member)
        self.table.add(LinkedEngine(member, None, load))  # type: ignore[arg-type]

    def leave(self, incarnation: str) -> None:
        self.unlink(incarnation)
        self.members = [m for m in self.members if m.incarnation != incarnation * 32]

    def unlink(self, incarnation: str) -> None:
        self.table.remove(incarnation * 32)

    def states(self) -> dict[str, tuple[str, int]]:
        self.roster.look(self.clock.unix_ns() / 1e9)
        return {row["name"]: (row["state"], row["restarts"]) for row in self.roster.rows()}

    def tick(self) -> None:
        self.clock.advance(1.0)
        self.feed.tick()


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_an_engine_never_vanishes_silently(cluster: Cluster) -> None:
    cluster.join("a", "1")
    engine = cluster.table.engines["1" * 32]
    cluster.unlink("1")
    cluster.starting.add("1" * 32)
    assert cluster.states() == {"a": ("starting", 0)}
    cluster.table.add(engine)
    assert cluster.states() == {"a": ("ready", 0)}
    cluster.unlink("1")
    cluster.starting.clear()
    assert cluster.states() == {"a": ("unlinked", 0)}
    cluster.members.clear()
    assert cluster.states() == {"a": ("gone", 0)}
    cluster.clock.advance(1800)
    assert cluster.states() == {"a": ("gone", 0)}
    cluster.join("a", "2")
    assert cluster.states() == {"a": ("ready", 1)}
    cluster.leave("2")
    cluster.join("a", "3", load=ReportedLoad(1, 0, 0, 9, 9, True, frozenset()))  # between two polls
    assert cluster.states() == {"a": ("draining", 2)}
    cluster.leave("3")
    cluster.states()
    cluster.clock.advance(3601)
    assert cluster.states() == {}


def test_what_an_engine_has_cached_and_where_hits_came_from(cluster: Cluster) -> None:
    def counted(queried: int, hit: int, host: int, fetched_blocks: int) -> ReportedLoad:
        counters = Counters(
            prefix_query_tokens=queried,
            prefix_hit_tokens=hit,
            host_hit_tokens=host,
            fetched_blocks=fetched_blocks,
        )
        return replace(IDLE, counters=counters)

    cluster.join("a", "1", load=counted(1000, 500, 100, 5))
    engine = cluster.table.engines["1" * 32]
    engine.welcome.block_bytes = 1 << 20
    hashes = [BlockHash(bytes([n]) * 16) for n in range(7)]
    contents = Contents("1" * 32, 1, 1, 5, 2, 0)
    copy = cluster.table.mirror.copies[contents.incarnation]
    copy.install(contents, set(hashes), set(hashes[5:]), cluster.clock.monotonic_s())
    cluster.tick()
    engine.load = counted(1900, 900, 200, 10)  # blocks of 16
    cluster.tick()
    [row] = cluster.roster.rows()
    assert row["cached"] == {
        "device_blocks": 5,
        "device_bytes": 5 << 20,
        "host_blocks": 2,
        "host_bytes": 2 << 20,
    }
    assert row["hit_tokens"] == {"device": 220, "host": 100, "fetched": 80, "missed": 500}
    for _ in range(301):
        cluster.tick()
    assert not any(cluster.roster.rows()[0]["hit_tokens"].values()), "of the last five minutes"
    cluster.unlink("1")
    cluster.tick()
    assert cluster.roster.rows()[0]["cached"] is None


@pytest.mark.parametrize("state", ["unlinked", "gone"])
def test_what_an_engine_did_lately_ends_with_its_link(cluster: Cluster, state: str) -> None:
    names = ("kept_share", "draft_means", "hit_tokens")
    cluster.join("a", "1")
    for steps in (1, 2):
        cluster.table.engines["1" * 32].load = replace(
            IDLE,
            counters=Counters(
                num_promised_steps=steps, num_kept_steps=steps, prefix_query_tokens=9 * steps,
                num_drafts=steps, num_draft_tokens=3 * steps, accepted_drafts=(steps,),
            ),
        )  # fmt: skip
        cluster.tick()
    assert None not in [cluster.roster.rows()[0][name] for name in names]
    cluster.unlink("1") if state == "unlinked" else cluster.leave("1")
    assert cluster.states() == {"a": (state, 0)}
    assert [cluster.roster.rows()[0][name] for name in names] == [None, None, None]


def test_an_idle_engine_s_whole_pool_is_free(cluster: Cluster) -> None:
    """Member.num_blocks includes two blocks that no request can use; the page divides by the usable
    pool."""
    cluster.join("a", "1", load=replace(IDLE, free_blocks=98))
    cluster.states()
    [row] = cluster.roster.rows()
    assert row["free_blocks"] == row["pool_blocks"] == row["num_blocks"] - 2
    assert "free_blocks / engine.pool_blocks" in static_files()["js/cluster.js"].body.decode()
    cluster.unlink("1")
    assert cluster.roster.rows()[0]["pool_blocks"] is None


def test_two_engines_of_one_name_are_two(cluster: Cluster) -> None:
    cluster.join("same", "1")
    cluster.join("same", "2")
    cluster.states()
    assert [row["incarnation"][0] for row in cluster.roster.rows()] == ["1", "2"]


async def test_first_all_then_what_is_new_then_all_for_the_slow(cluster: Cluster) -> None:
    updates = cluster.feed.follow(View(TARGETS))
    first = await anext(updates)
    assert first.kind == "snapshot"
    assert "definitions" in json.loads(first.data)
    following = asyncio.ensure_future(anext(updates))
    await asyncio.sleep(0)
    assert not following.done()
    cluster.tick()
    second = await following
    assert (second.kind, second.number) == ("update", first.number + 1)
    assert "definitions" not in json.loads(second.data)
    cluster.tick()
    cluster.tick()
    assert (await anext(updates)).kind == "snapshot"
    await updates.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("step_s", [7200, -7200])
async def test_a_time_of_day_that_is_set_anew_holds_nothing_up(
    cluster: Cluster, step_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.join("a", "1")
    cluster.tick()
    cluster.leave("1")
    for _ in range(9):
        cluster.tick()
    unix_ns = cluster.clock.unix_ns
    monkeypatch.setattr(cluster.clock, "unix_ns", lambda: unix_ns() + step_s * 10**9)
    updates = cluster.feed.follow(View(TARGETS))
    before = json.loads((await anext(updates)).data)
    cluster.tick()
    cluster.tick()
    assert (await anext(updates)).kind == "snapshot"
    cluster.tick()
    update = await anext(updates)
    assert update.kind == "update"
    now = json.loads(update.data)
    assert now["now_unix_s"] == before["now_unix_s"] + 3
    assert now["series"]["t_unix_s"][-1] == before["series"]["t_unix_s"][-1] + 3
    assert len(now["series"]["t_unix_s"]) == 5, "a second that is new, and four once more"
    [engine] = now["engines"]
    assert now["now_unix_s"] - engine["since_unix_s"] == 11
    await updates.aclose()  # type: ignore[attr-defined]


def test_viewers_of_the_same_targets_share(cluster: Cluster) -> None:
    assert cluster.feed.data(View(TARGETS)) is cluster.feed.data(View(SloTargets(0.5, 0.05)))
    other = cluster.feed.data(View(SloTargets(0.1, 0.05)))
    assert json.loads(other)["slo"]["ttft_slo_s"] == 0.1
    before = cluster.feed.data(View(TARGETS))
    cluster.tick()
    assert cluster.feed.data(View(TARGETS)) is not before


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "nan", "inf", "1e9", "9" * 5000])
def test_targets_are_judged(text: str) -> None:
    with pytest.raises(InvalidRequest):
        routes.target_s(text, "ttft_ms")
    assert routes.target_s("250", "ttft_ms") == 0.25


def test_the_docs_name_what_is_served(cluster: Cluster) -> None:
    text = (Path(__file__).resolve().parents[4] / "docs" / "dashboard.md").read_text()
    [paragraph] = re.findall(r"^\*\*series\*\*: (.*?)\n\n", text, re.M | re.S)
    places = {"<stage>": STAGES, "<latency>": ("ttft", "tbt", "handoff_gap")}
    named = {
        re.sub(r"<\w+>", each, name)
        for name in re.findall(r"`([\w<>]+)`", paragraph)
        for each in places.get("".join(re.findall(r"<\w+>", name)), [""])
    } - {*places["<latency>"]}
    assert named == json.loads(cluster.feed.data(View(TARGETS)))["series"].keys()
    assert f"| `recent` | up to {MAX_RECENT} calls" in text


def test_definitions_are_the_ones_of_the_code() -> None:
    found = dict(definitions())
    assert set(found) == {"TTFT", "TBT (= ITL)", "TPOT", "hand-off gap", "goodput"}
    assert found["goodput"] == "requests/s that keep to every target of an SLO"


def test_vendored_files_are_as_released() -> None:
    """The files equal uPlot 1.6.32 of the npm registry; `npm pack uplot@1.6.32 && tar xf ... &&
    sha256sum`."""
    released = {
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }
    for name, sha256 in released.items():
        body = static_files()[f"vendor/uplot/{name}"].body
        assert hashlib.sha256(body).hexdigest() == sha256


def test_the_page_has_nothing_inline_and_nothing_from_outside() -> None:
    for name, file in static_files().items():
        text = file.body.decode()
        if name.startswith("vendor/"):
            continue
        assert "innerHTML" not in text and "eval(" not in text, name
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace(
            "/v1/chat", ""
        ), name
        if name.endswith(".html"):
            assert " style=" not in text and "<style" not in text
            assert " on" + "click" not in text and "<script>" not in text
        assert len(text.splitlines()) < 250, name


# --- routes ---------------------------------------------------------------------------------------


async def client_of(cluster: Cluster, max_viewers: int = 2) -> TestClient[Any, Any]:
    @web.middleware
    async def refusing(request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            return await handler(request)  # type: ignore[no-any-return]
        except (Refusal, InvalidRequest) as error:
            status = error.http_status
            return web.Response(status=status)

    app = web.Application(middlewares=[refusing])
    cluster.feed.num_viewers = MAX_VIEWERS - max_viewers
    add_dashboard(app, cluster.feed)
    client = TestClient(TestServer(app, handler_cancellation=True))
    await client.start_server()
    return client


async def test_pages_and_files(cluster: Cluster) -> None:
    client = await client_of(cluster)
    page = await client.get("/dashboard")
    policy = page.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert page.headers["X-Content-Type-Options"] == "nosniff"
    slash = await client.get("/dashboard/", allow_redirects=False)
    assert (slash.status, slash.headers["Location"]) == (308, "../dashboard")
    script = await client.get("/dashboard/js/main.js", headers={"Range": "bytes=0-1,2-3"})
    assert (script.status, script.content_type) == (200, "text/javascript")
    again = {"If-None-Match": script.headers["ETag"]}
    assert (await client.get("/dashboard/js/main.js", headers=again)).status == 304
    for path in ("../routes.py", "%2e%2e/routes.py", "js/..%2f..%2froutes.py", "nothing", "js/"):
        assert (await client.get(f"/dashboard/{path}")).status == 404
    assert (await client.post("/dashboard")).status == 405
    await client.close()


async def test_a_stream_and_its_limits(cluster: Cluster, monkeypatch: Any) -> None:
    monkeypatch.setattr(routes, "PING_S", 0.0)
    client = await client_of(cluster, max_viewers=1)
    stream = await client.get("/api/stream?ttft_ms=200")
    assert stream.headers["Content-Type"] == "text/event-stream"
    assert stream.headers["Cache-Control"] == "no-store"
    assert stream.headers["X-Accel-Buffering"] == "no"
    lines = [await stream.content.readline() for _ in range(7)]
    assert lines[0] == b"retry: 1000\n"
    assert lines[2].startswith(b"id: ") and lines[3] == b"event: snapshot\n"
    assert json.loads(lines[4].removeprefix(b"data: "))["slo"]["ttft_slo_s"] == 0.2
    assert lines[6] == b": ping\n"
    assert (await client.get("/api/stream")).status == 503
    assert (await client.get("/api/stream?ttft_ms=no")).status == 400
    assert (await client.get("/api/snapshot?span_s=60")).status == 400
    hour = await (await client.get("/api/snapshot?span_s=3600")).json()
    assert (hour["span_s"], hour["row_s"]) == (3600, 30)
    whole = await client.get("/api/snapshot")
    assert (await whole.json())["gateway"] == {"model": "m"}
    assert cluster.feed.num_viewers == MAX_VIEWERS
    stream.close()
    await client.close()
    assert cluster.feed.num_viewers == MAX_VIEWERS - 1


async def test_a_viewer_that_does_not_read_is_cut_off(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A viewer that does not read is disconnected; its slot and its state are freed."""
    monkeypatch.setattr(routes, "_SLOWEST_WRITE_S", 0.05)
    client = await client_of(cluster, max_viewers=1)
    monkeypatch.setattr(cluster.feed, "data", lambda *_, **__: bytes(16 << 20))
    _, writer = await asyncio.open_connection("127.0.0.1", client.server.port, limit=1)
    writer.write(b"GET /api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
    async with asyncio.timeout(5):
        for is_connected in (True, False):
            while bool(client.server.handler.connections) != is_connected:  # type: ignore[union-attr]  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert cluster.feed.num_viewers == MAX_VIEWERS - 1
    writer.close()
    await client.close()
