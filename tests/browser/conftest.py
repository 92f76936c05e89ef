"""Chromium for the page's tests, and the page's server on a thread of its own.

Without a browser these tests are skipped, loudly; CHROMIUM names one that is not on the PATH.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from browser.page_server import PageServer
from browser.synthetic import SyntheticGateway

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser. Not session-wide: Playwright's event loop would interfere with other tests."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("NO CHROMIUM: the live page is not tested (install it, or set CHROMIUM)")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def window(chromium: Any) -> Any:
    """The window of all pages without special needs: opening a window costs more than its
    contents."""
    return chromium.new_context(viewport={"width": 1440, "height": 900})


@pytest.fixture(scope="module")
def busy() -> Iterator[PageServer]:
    """A gateway with a minute of traffic in its history, and more arriving."""
    gateway = SyntheticGateway()
    gateway.add_usual_engines()
    gateway.live_through(60, 5)
    server = PageServer(gateway, 5)
    server.start()
    yield server
    server.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., PageServer]]:
    """Serve a synthetic gateway until the test's end."""
    servers: list[PageServer] = []

    def start(gateway: SyntheticGateway, rps: float | None = None) -> PageServer:
        server = PageServer(gateway, rps)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def open_page(chromium: Any, window: Any) -> Iterator[Callable[..., Any]]:
    """Open a URL; at the end, no page may have logged an error or contacted another server."""
    pages, complaints = [], []

    def open_it(url: str, *, may_lose_server: bool = False, **options: Any) -> Any:
        page = (chromium.new_context(**options) if options else window).new_page()
        pages.append(page)
        origin = url.partition("/dashboard")[0]

        def stay_inside(route: Any) -> None:
            if route.request.url.startswith((origin, "data:")):
                route.fallback()
            else:
                complaints.append(f"asked {route.request.url}")
                route.abort()

        page.route("**/*", stay_inside)
        page.set_default_timeout(15_000)

        def printed(message: Any) -> None:
            is_loss = may_lose_server and "Failed to load resource" in message.text
            if message.type in ("error", "warning") and not is_loss:
                complaints.append(f"{message.type}: {message.text}")

        page.on("console", printed)
        page.on("pageerror", lambda error: complaints.append(f"thrown: {error}"))
        page.goto(url)
        return page

    yield open_it
    for page in pages:
        page.close()
        if page.context is not window:
            page.context.close()
    window.clear_cookies()
    assert not complaints, complaints
