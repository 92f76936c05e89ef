"""How every process of ours logs: to stderr, for people or as JSON lines, and never in floods; and
how it tells people on stdout how it is.

A record may carry values for machines (`extra=fields(...)`): they become keys of its JSON line.
Knows no record. Who logs must not put prompts, keys or secrets into it.
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
ALIKE_S = 10.0  # ...within so long
_MAX_KINDS = 1000


def print_line(line: str) -> None:
    """A line for people, on stdout, at once and in one piece: `baton up` reads it through a pipe,
    into which engines write their logs."""
    with suppress(OSError):  # nobody reads any more, or the disk is full: serving goes on
        print(f"{line}\n", end="", flush=True)


def set_up_logging(process: str, *, as_json: bool) -> None:
    """Configure the root logger of this process; called again, it starts anew."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(process) if as_json else logging.Formatter(_TEXT))
    handler.addFilter(spare_traceback)
    handler.addFilter(FloodGate())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def fields(values: Mapping[str, object], *, is_unlimited: bool = False) -> dict[str, Any]:
    """The `extra` of a record with values. `is_unlimited`: no flood, however many there are."""
    return {"fields": values, "is_unlimited": is_unlimited}


def spare_traceback(record: logging.LogRecord) -> bool:
    """Where a caller had gone before its answer, gRPC's server tells it with a traceback of its own
    code: the line says all. Nothing is left out but that."""
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
            "pid": record.process,  # gateways that share ports have one name
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class FloodGate(logging.Filter):
    """Lets MAX_ALIKE records of one place and level pass in ALIKE_S, and counts the others."""

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
                record.msg = f"{record.msg} ({count - MAX_ALIKE} more like this were left out)"
            since_s, count = now_s, 0
        if len(self._passed) >= _MAX_KINDS:
            self._passed.clear()
        self._passed[kind] = (since_s, count + 1)
        return count < MAX_ALIKE
