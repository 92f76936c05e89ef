"""A deployment that runs on a thread of its own, for callers that are not asyncio's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from .deployment import Deployment


@contextmanager
def running_in_background(deployment: Deployment) -> Iterator[str]:
    """Start it, yield the gateway's address, stop it. Raises StartupFailed.

    Its children die with the thread that started them: it lives as long as this context.
    """
    started: Future[str] = Future()

    async def serve() -> None:
        try:
            async with deployment:
                started.set_result(deployment.address)
                await deployment.keep()
        except asyncio.CancelledError:
            return  # the context is left
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)  # whatever it is: the caller's thread raises it

    loop = asyncio.new_event_loop()
    serving = loop.create_task(serve())
    thread = threading.Thread(target=loop.run_until_complete, args=(serving,), name="deployment")
    thread.start()
    try:
        yield started.result()
    finally:
        loop.call_soon_threadsafe(serving.cancel)  # no error if it has ended
        thread.join()
        loop.close()
