"""Recorded conversations: requests and responses as bytes of HTTP, and how responses may differ.

A conversation is a JSON file: the client, and its exchanges in order. `writes` is the model's
output; `request` is the bytes that the client sent; `answer` is normalised:

    ids       of 24 or 32 hex digits, by the order in which they appear first
    times     created, created_at, Date: digits are 0
    pieces    consecutive deltas that differ only in their text are joined, including one with an
              end; chunks of HTTP are joined
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "scenes"
_ID = re.compile(rb"(?<![0-9a-f])[0-9a-f]{24}(?:[0-9a-f]{8})?(?![0-9a-f])")
_TIME = re.compile(rb'("created(?:_at)?":)(\d+)|(\r\nDate:)([^\r]*)')
_TEXT = rb'"((?:[^"\\]|\\.)*)"'
_DELTA = re.compile(
    rb'("delta":(?:\{(?:"type":"\w+",)?(?:"tool_calls":\[\{"function":\{)?'
    rb'"(?:content|reasoning_content|text|thinking|partial_json|arguments)":)?'
    rb'|"choices":\[\{"index":\d+,"text":)' + _TEXT
)
_ENDING = re.compile(rb'"finish_reason":"\w+"(?:,"stop_reason":(?:null|\d+|"[^"]*"))?')
_RUNNING = b'"finish_reason":null'
_COUNTS = re.compile(rb'("sequence_number":)\d+')
_BEGUN = re.compile(rb'("type":"message_start".*"output_tokens":)\d+')


@dataclass(frozen=True, slots=True)
class Exchange:
    writes: str
    request: str
    answer: str


@dataclass(frozen=True, slots=True)
class Conversation:
    name: str
    client: str
    exchanges: tuple[Exchange, ...]

    def save(self) -> None:
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        (FOLDER / f"{self.name}.json").write_text(text + "\n", encoding="utf-8")


def conversations() -> list[Conversation]:
    """All recorded conversations."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))]
    return [
        Conversation(one["name"], one["client"], tuple(Exchange(**e) for e in one["exchanges"]))
        for one in found
    ]


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """Read a whole request or response; empty at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""
    names = head.lower()
    if length := re.search(rb"\r\ncontent-length: *(\d+)", names):
        return head + await reader.readexactly(int(length[1]))
    if b"\r\ntransfer-encoding: chunked" not in names:
        return head
    body = b""
    while True:
        line = await reader.readuntil(b"\r\n")
        body += line + await reader.readexactly(int(line, 16) + 2)
        if int(line, 16) == 0:
            return head + body


def normalised(answer: bytes, ids: dict[bytes, bytes]) -> str:
    """The normalised response, see above; `ids` is shared by the conversation: each id, and its
    name."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"chunked" in head:
        body = _joined_chunks(body)
    if b"event-stream" in head:
        body = _joined_pieces(body)
    whole = _BEGUN.sub(rb"\g<1>0", head + b"\r\n\r\n" + body)
    whole = _TIME.sub(_without_digits, whole)
    return _ID.sub(lambda found: _named(found[0], ids), whole).decode()


def _named(found: bytes, ids: dict[bytes, bytes]) -> bytes:
    name = ids.setdefault(found, b"%0*x" % (len(found), len(ids) + 1))
    return name


def with_ids(request: bytes, ids: Mapping[bytes, bytes]) -> bytes:
    """A request with this run's ids in place of the names in a normalised response."""
    ours = {name: found for found, name in ids.items()}
    return _ID.sub(lambda found: ours.get(found[0], found[0]), request)


def _without_digits(found: re.Match[bytes]) -> bytes:
    if found[3]:
        return found[3] + b" -"
    return found[1] + re.sub(rb"\d", b"0", found[2])


def _joined_chunks(body: bytes) -> bytes:
    data, at = b"", 0
    while at < len(body):
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        data += body[end + 2 : end + 2 + size]
        at = end + 4 + size
    return data


def _joined_pieces(body: bytes) -> bytes:
    """Join consecutive events that are deltas of the same piece; event numbers count joined
    events."""
    events: list[bytes] = []
    shape = b""
    for event in body.split(b"\n\n"):
        if event.startswith(b":"):
            continue
        counted = _COUNTS.sub(rb"\g<1>0", event)
        found = _DELTA.search(counted)
        ours = b"" if found is None else counted[: found.start(2)] + counted[found.end(2) :]
        is_more = found is not None and shape in (ours, _ENDING.sub(_RUNNING, ours))
        if found is not None and is_more:
            before = _DELTA.search(events[-1])
            assert before is not None
            events[-1] = events[-1][: before.end(2)] + found[2] + events[-1][before.end(2) :]
        if not is_more:
            events.append(counted)
        elif ours != shape:  # the last one, which also has an end
            events.append(ours)
        shape = ours
    numbers = iter(range(len(events)))
    return b"\n\n".join(
        _COUNTS.sub(lambda one: one[1] + b"%d" % next(numbers), event) for event in events
    )


def of_generating(request: bytes) -> bool:
    """Whether the model generates a response to it."""
    line = request.partition(b"\r\n")[0]
    paths = (b"/v1/completions", b"/v1/chat/completions", b"/v1/responses", b"/v1/messages")
    return line.startswith(b"POST") and line.split()[1].partition(b"?")[0] in paths
