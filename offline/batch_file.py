"""The two files of a batch, in OpenAI's format: one request per line, one result per line.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, ...}, "error": null}

A result is written and synced completely or not at all: an incomplete last line, left by a killed
run, is truncated. Lines without a valid custom_id are identified by their number.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..core.errors import BatonError, InvalidRequest, StartupFailed

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_ID = "batch_req_{}"


@dataclass(frozen=True, slots=True)
class BatchLine:
    """Line `number` (from 1) of the requests; `error`: why it is invalid (then without a body)."""

    number: int
    custom_id: str | None
    url: str = ""
    body: Any = None
    error: InvalidRequest | None = None

    @property
    def key(self) -> str:
        """The key that identifies the line's result."""
        return _key(self.custom_id, _ID.format(self.number))

    def result(self, status: int, request_id: str, body: Any) -> str:
        """The result line of an endpoint's response."""
        response = {"status_code": status, "request_id": request_id, "body": body}
        return self._line(response, None)

    def refusal(self) -> str:
        """The result line of an invalid request, which is not sent to an endpoint."""
        assert self.error is not None
        return self._line(None, {"code": self.error.code, "message": self.error.message})

    def _line(self, response: Any, error: Any) -> str:
        found = {"id": _ID.format(self.number), "custom_id": self.custom_id}
        return json.dumps({**found, "response": response, "error": error})


def read_lines(path: Path) -> Iterator[BatchLine]:
    """All non-empty lines. Raises StartupFailed if the file cannot be read."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _read(number, line)
    except OSError as error:
        raise StartupFailed(f"cannot read {path}: {error.strerror}") from error


def check_ids(path: Path) -> int:
    """The number of lines. Raises StartupFailed for a duplicate custom_id, and for a file that
    cannot be read twice."""
    if path.exists() and not path.is_file():
        hint = "-i is read twice: write the requests to a file"
        raise StartupFailed(f"{path} is no regular file", hint=hint)
    first: dict[str, int] = {}
    num_lines = 0
    for line in read_lines(path):
        num_lines += 1
        if line.custom_id is not None and first.setdefault(line.key, line.number) != line.number:
            raise StartupFailed(
                f"custom_id {line.custom_id!r} is on lines {first[line.key]} and {line.number}",
                hint="it identifies results: give each line its own",
            )
    return num_lines


def _read(number: int, line: bytes) -> BatchLine:
    custom_id = None
    try:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"the line is not JSON: {error}", code="invalid_json") from None
        if not isinstance(value, dict):
            raise InvalidRequest("the line is not a JSON object", code="invalid_value")
        if not isinstance(value.get("custom_id"), str):
            message = "custom_id must be a text"
            raise InvalidRequest(message, "custom_id", "missing_required")
        custom_id = value["custom_id"]
        return _checked(number, custom_id, value)
    except InvalidRequest as error:
        return BatchLine(number, custom_id, error=error)


def _checked(number: int, custom_id: str, value: dict[str, Any]) -> BatchLine:
    if value.get("method") != "POST":
        raise InvalidRequest("method must be POST", "method", "invalid_value")
    if value.get("url") not in URLS:
        raise InvalidRequest(f"url must be one of {', '.join(URLS)}", "url", "invalid_value")
    body = value.get("body")
    if not isinstance(body, dict):
        raise InvalidRequest("body must be an object", "body", "invalid_value")
    if body.get("stream"):
        raise InvalidRequest("a batch has no streams", "stream", "unsupported_parameter")
    return BatchLine(number, custom_id, value["url"], body)


def _key(custom_id: str | None, line_id: str) -> str:
    return f"line {line_id}" if custom_id is None else f"id {custom_id}"


def _may_be_ours(begin: bytes) -> bool:
    """Whether an incomplete line with this begin may be a result (or zeros of a crash)."""
    ours = f'{{"id": "{_ID.format("")}'.encode()
    return begin.startswith(ours) or ours.startswith(begin) or not begin.strip(b"\0")


class ResultFile:
    """The file of results, locked for one run at a time.

    `done`: keys of lines with a result. `num_errors`: results without status 200.
    """

    def __init__(self, path: Path) -> None:
        """Raises StartupFailed if the file cannot be written, or is no file of results."""
        self._path = path
        self._lock = threading.Lock()
        self.done: set[str] = set()
        self.num_errors = 0
        try:
            if path.exists() and not path.is_file():
                hint = "-o continues the results that it finds"
                raise StartupFailed(f"{path} is no regular file", hint=hint)
            path.touch()
            self._file: BinaryIO = path.open("r+b")
        except OSError as error:
            raise StartupFailed(f"cannot write {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._resume()
        except BlockingIOError:
            self._file.close()
            raise StartupFailed(f"{path} is being written by another run") from None
        except BaseException:
            self._file.close()
            raise

    def _resume(self) -> None:
        end = 0
        for number, line in enumerate(self._file, 1):
            is_whole = line.endswith(b"\n")
            if not is_whole and _may_be_ours(line):
                break  # incomplete: its request runs again
            try:
                value = json.loads(line if is_whole else b"")
                self._note(value["custom_id"], value["id"], value["response"])
            except (ValueError, KeyError, TypeError):
                raise StartupFailed(
                    f"line {number} of {self._path} is no result of a batch",
                    hint="-o continues the results that it finds: name another file",
                ) from None
            end += len(line)
        try:
            self._file.truncate(end)
        except OSError as error:
            raise StartupFailed(f"cannot write {self._path}: {error.strerror}") from error
        self._file.seek(end)

    def _note(self, custom_id: str | None, line_id: str, response: Any) -> None:
        self.done.add(_key(custom_id, line_id))
        self.num_errors += response is None or response["status_code"] != 200

    def append(self, lines: Sequence[str]) -> None:
        """Write whole lines and sync them to disk. Thread-safe. Raises BatonError."""
        with self._lock:
            try:
                self._file.write("".join(f"{line}\n" for line in lines).encode())
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as error:
                raise BatonError(f"cannot write {self._path}: {error.strerror}") from error
            for line in lines:
                value = json.loads(line)
                self._note(value["custom_id"], value["id"], value["response"])

    def close(self) -> None:
        with self._lock, contextlib.suppress(OSError):  # failed writes were reported
            self._file.close()
