"""The files of a batch: which lines are requests, which are done, and the state after a kill."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import StartupFailed
from baton.offline.batch_endpoints import serving
from baton.offline.batch_file import ResultFile, check_ids, read_lines

BODY = {"model": "demo", "prompt": "x"}


def request_line(custom_id: object = "a", **changes: object) -> str:
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": BODY}
    return json.dumps(line | changes)


@pytest.mark.parametrize(
    ("text", "code", "custom_id"),
    [
        ("{", "invalid_json", None),
        ("[1]", "invalid_value", None),
        (request_line(5), "missing_required", None),
        (request_line(method="GET"), "invalid_value", "a"),
        (request_line(url="/v1/embeddings"), "invalid_value", "a"),
        (request_line(body="x"), "invalid_value", "a"),
        (request_line(body={**BODY, "stream": True}), "unsupported_parameter", "a"),
        ("[" * 100_000, "invalid_json", None),
    ],
)
def test_bad_lines_become_error_lines(
    tmp_path: Path, text: str, code: str, custom_id: str | None
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(f"\n{text}\n")
    (line,) = read_lines(path)
    result = json.loads(line.refusal())
    assert (result["id"], result["custom_id"]) == ("batch_req_2", custom_id)
    assert result["response"] is None and result["error"]["code"] == code


def test_an_id_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join([request_line("a"), "no json", "no json", request_line("a")]))
    with pytest.raises(StartupFailed, match="lines 1 and 4"):
        check_ids(path)
    path.write_text("\n".join([request_line("a"), "no json", "no json", request_line("b")]))
    assert check_ids(path) == 4
    with pytest.raises(StartupFailed):
        check_ids(tmp_path / "none.jsonl")


@given(cut=st.integers(0, 400))
@examples(quick=60, thorough=400)
def test_any_cut_leaves_whole_results_alone(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    requests, path = folder / "in.jsonl", folder / "out.jsonl"
    requests.write_text("\n".join(request_line(name) for name in "äbc"))
    lines = [*read_lines(requests)]
    with_all = [line.result(200, "r", {"text": "é"}) for line in lines]
    results = ResultFile(path)
    results.append(with_all[:1])
    results.append(with_all[1:])
    results.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    again = ResultFile(path)
    num_kept = whole[:cut].count(b"\n")
    assert again.done == {line.key for line in lines[:num_kept]}
    again.append(with_all[num_kept:])
    again.close()
    assert path.read_bytes() == whole


def test_a_file_of_something_else_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes\nand more")
    with pytest.raises(StartupFailed, match="line 1"):
        ResultFile(path)
    assert path.read_text() == "my notes\nand more"


def test_one_run_at_a_time_has_the_file(tmp_path: Path) -> None:
    first = ResultFile(tmp_path / "out.jsonl")
    with pytest.raises(StartupFailed, match="another run"):
        ResultFile(tmp_path / "out.jsonl")
    first.close()
    ResultFile(tmp_path / "out.jsonl").close()


def test_errors_are_counted(tmp_path: Path) -> None:
    requests = tmp_path / "in.jsonl"
    requests.write_text("\n".join([request_line("a"), request_line("b"), "x"]))
    a, b, bad = read_lines(requests)
    results = ResultFile(tmp_path / "out.jsonl")
    results.append([a.result(200, "", {}), b.result(400, "", {}), bad.refusal()])
    assert (len(results.done), results.num_errors) == (3, 2)
    results.close()


_COMPACT = '{"id":"batch_req_1","custom_id":"a","response":null}'


@pytest.mark.parametrize("text", ["no newline", '{"custom_id": "a"}', request_line(), _COMPACT])
def test_a_line_of_another_file_is_not_cut_off(tmp_path: Path, text: str) -> None:
    """A file of other content is not truncated, though its last line has no newline either."""
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(StartupFailed, match="is no result of a batch"):
        ResultFile(path)
    assert path.read_text() == text


async def test_as_many_lines_as_may_be_at_once() -> None:
    """All 600 lines connect before the first reply."""

    async def answer(_: web.Request) -> web.Response:
        await asyncio.sleep(0.05)
        return web.Response(text="yes")

    app = web.Application()
    app.add_routes([web.get("/", answer)])
    async with (
        serving(app) as path,
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path), limit=0)) as session,
    ):

        async def ask() -> str:
            async with session.get("http://batch/") as response:
                return await response.text()

        assert set(await asyncio.gather(*(ask() for _ in range(600)))) == {"yes"}


def test_what_a_file_system_filled_up_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(bytes(100))
    ResultFile(path).close()
    assert path.read_bytes() == b""


async def test_what_a_killed_batch_left_goes_with_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(prefix="b-") as root:  # pytest's paths are too long
        monkeypatch.setenv("XDG_RUNTIME_DIR", root)
        left = tempfile.mkdtemp(prefix="baton-batch-", dir=root)
        async with serving(web.Application()) as path:
            assert os.listdir(root) == [path.parent.name] != [Path(left).name]
        assert not os.listdir(root)


def test_requests_come_from_no_pipe(tmp_path: Path) -> None:
    """Requests are read twice, so a pipe is refused."""
    reader, writer = os.pipe()
    with open(reader, "rb"), open(writer, "wb") as into:
        into.write(b"no json")
        into.close()
        with pytest.raises(StartupFailed, match="is no regular file"):
            check_ids(Path(f"/proc/self/fd/{reader}"))


def test_results_go_to_no_device_and_to_no_pipe(tmp_path: Path) -> None:
    """Results cannot be resumed on a device or a pipe, so both are refused."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/full"), tmp_path):
        with pytest.raises(StartupFailed, match=f"{path} is no regular file"):
            ResultFile(path)
