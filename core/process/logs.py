"""Logs of every Baton process: to stderr, as text or as JSON lines, with a limit on repeated
records; and status lines for people on stdout.

A record may have values for machines (`extra=fields(...)`): they become keys of its JSON line.
Knows no record. Callers must not log prompts, keys or secrets.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

_TEXT = "%(levelname).1s %(name)s: %(message)s"
MAX_ALIKE = 20  # records of one kind...
ALIKE_S = 10.0  # ...within this time
_MAX_KINDS = 1000


def print_line(line: str) -> None:
    """Print a line for people on stdout, at once and in one write: `baton up` reads it through a
    pipe, into which engines also write their logs."""
    with suppress(OSError):  # the reader is gone, or the disk is full: serving goes on
        print(f"{line}\n", end="", flush=True)


def set_up_logging(process: str, *, as_json: bool) -> None:
    """Configure the root logger of this process; a second call replaces the configuration."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(process) if as_json else logging.Formatter(_TEXT))
    handler.addFilter(spare_traceback)
    handler.addFilter(FloodGate())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def fields(values: Mapping[str, object], *, is_unlimited: bool = False) -> dict[str, Any]:
    """The `extra` of a record with values. `is_unlimited`: exempt from the limit on repeats."""
    return {"fields": values, "is_unlimited": is_unlimited}


def spare_traceback(record: logging.LogRecord) -> bool:
    """Remove the traceback that gRPC's server logs when a caller was gone before its response: it
    shows gRPC's own code only. No record is dropped."""
    kind = record.exc_info[0] if record.exc_info else None
    is_gone = kind is not None and kind.__name__ == "ExecuteBatchError"
    if is_gone and record.name.startswith("grpc."):
        record.exc_info = None
    return True


class JsonLines(logging.Formatter):
    """One JSON object a record: `time` (unix seconds), `level`, `process`, `pid`, `logger`,
    `message`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process,  # gateways that share ports have the same name
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class FloodGate(logging.Filter):
    """Passes MAX_ALIKE records of one logger, level and text per ALIKE_S, and counts the others."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now_s = now_s
        self._passed: dict[tuple[str, int, str], tuple[float, int]] = {}  # since when, how many

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "is_unlimited", False):
            return True
        kind = (record.name, record.levelno, str(record.msg))
        now_s = self._now_s()
        since_s, count = self._passed.get(kind, (now_s, 0))
        if now_s - since_s >= ALIKE_S:
            if count > MAX_ALIKE:
                record.msg = f"{record.msg} ({count - MAX_ALIKE} more like this were suppressed)"
            since_s, count = now_s, 0
        if len(self._passed) >= _MAX_KINDS:
            self._passed.clear()
        self._passed[kind] = (since_s, count + 1)
        return count < MAX_ALIKE
