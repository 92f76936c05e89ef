"""`baton run-batch`: runs the requests of a file on an engine in this process or on a running
deployment, and writes the results to a file.

A repeated run, e.g. after a kill, processes only requests without a result.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from tqdm import tqdm

from ..core.engine_config import EngineConfig
from ..core.errors import Unavailable
from ..core.process.event_loop import interruptible
from .batch_file import BatchLine, ResultFile, check_ids, read_lines

log = logging.getLogger(__name__)

SOME_FAILED = 3
_BUSY = (429, 500, 502, 503, 504)  # statuses to retry
_REFUSED = (401, 403)  # statuses that do not depend on the request
_MAX_TRIES = 30
_MAX_RETRY_S = 30.0
_ERROR_CHARS = 300  # of a response, in an error message


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """`url` None: an engine in this process; else a deployment's HTTP URL, used with `api_key`."""

    requests: Path
    results: Path
    url: str | None = None
    api_key: str | None = None
    max_concurrent: int = 256


async def run(batch: BatchConfig, engine: EngineConfig) -> int:
    """Returns 0, or SOME_FAILED if a result is an error. Raises StartupFailed, Unavailable."""
    num_lines = check_ids(batch.requests)
    results = ResultFile(batch.results)
    try:
        todo = [line.number for line in read_lines(batch.requests) if line.key not in results.done]
        if todo:
            print(f"{len(todo)} of {num_lines} lines to do", file=sys.stderr)
            async with _endpoints(batch, engine) as session:
                with tqdm(total=len(todo), desc="Processed lines", disable=None) as bar:
                    await _Run(batch, session, results, bar).run()
    finally:
        results.close()
    num_answers = len(results.done) - results.num_errors
    print(f"{num_answers} answers, {results.num_errors} errors: {batch.results}", file=sys.stderr)
    return SOME_FAILED if results.num_errors else 0


@asynccontextmanager
async def _endpoints(
    batch: BatchConfig, engine: EngineConfig
) -> AsyncIterator[aiohttp.ClientSession]:
    async with AsyncExitStack() as opened:
        connector: aiohttp.BaseConnector
        if batch.url is not None:
            connector = aiohttp.TCPConnector(limit=0)
        else:
            with interruptible():
                from .batch_endpoints import local_endpoints  # so that --url does not import torch

            path = await opened.enter_async_context(local_endpoints(engine))
            connector = aiohttp.UnixConnector(str(path), limit=0)
        session = aiohttp.ClientSession(
            batch.url or "http://batch",
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"Authorization": f"Bearer {batch.api_key}"} if batch.api_key else None,
        )
        yield await opened.enter_async_context(session)


class _Run:
    """The workers of one run: each takes the next line without a result."""

    def __init__(
        self, batch: BatchConfig, session: aiohttp.ClientSession, results: ResultFile, bar: Any
    ) -> None:
        self._batch = batch
        self._session = session
        self._results = results
        self._bar = bar
        done = frozenset(results.done)
        self._lines = (line for line in read_lines(batch.requests) if line.key not in done)
        self._finished: list[str] = []
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Process all lines. On an interruption, finished results are written."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._batch.max_concurrent):
                    tasks.create_task(self._work())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._results.append(self._finished)

    async def _work(self) -> None:
        for line in self._lines:
            result = line.refusal() if line.error else await self._answer(line)
            self._finished.append(result)
            async with self._writing:  # waiting workers' results are written by the first
                if self._finished:
                    finished, self._finished = self._finished, []
                    await asyncio.shield(asyncio.to_thread(self._results.append, finished))
            self._bar.update()

    async def _answer(self, line: BatchLine) -> str:
        """The endpoint's response as a result line; retries while the endpoint is busy."""
        for number in range(1, _MAX_TRIES + 1):
            try:
                async with self._session.post(line.url, json=line.body) as response:
                    status, wait = response.status, response.headers.get("Retry-After", "")
                    if status not in (*_BUSY, *_REFUSED):
                        body = json.loads(await response.read())
                        return line.result(status, body.get("id", ""), body)
                    message = (await response.text())[:_ERROR_CHARS]
            except (aiohttp.ClientError, ValueError, AttributeError, OSError) as error:
                whom = self._batch.url or "the local engine"
                why = getattr(error, "strerror", None) or error  # shorter than aiohttp's message
                raise Unavailable(f"no answer from {whom}: {why}") from error
            if status in _REFUSED or number == _MAX_TRIES:
                break
            await asyncio.sleep(min(float(wait) if wait.isdecimal() else 1.0, _MAX_RETRY_S))
        raise Unavailable(f"{line.key}: {line.url} was answered with {status}: {message}")
