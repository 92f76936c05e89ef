"""Takes the pictures in docs/images: a CPU deployment under load, best on a quiet machine.

PYTHONSAFEPATH=1 .venv/bin/python tests/browser/screenshots.py docs/images
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from deployments import running
from playwright.sync_api import sync_playwright

from baton.client import Client
from baton.core.config import UpConfig
from baton.core.engine_config import EngineConfig
from baton.core.errors import BatonError

LOAD_S = 85  # charts span two minutes from the first on
NUM_CLIENTS = 3
WORDS = [
    "the",
    "baton",
    "passes",
    "from",
    "prefill",
    "to",
    "decode",
    "block",
    "token",
    "request",
    "cache",
    "stream",
    "first",
]


def call_until(stop: threading.Event, address: str, seed: int) -> None:
    """One client: prompts of many lengths, some with a common prefix."""
    draw = random.Random(seed)
    beginnings = [words(random.Random(i), 60) for i in range(3)]
    with Client(address) as client:
        while not stop.is_set():
            beginning = draw.choice(beginnings) if draw.random() < 0.6 else ""
            prompt = beginning + words(draw, draw.choice((10, 20, 60, 120)))
            with contextlib.suppress(BatonError):
                for _ in client.generate(prompt, max_tokens=draw.choice((16, 24, 48, 96))):
                    pass
            stop.wait(draw.expovariate(1.2))


def words(draw: random.Random, number: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(number))


def take(browser: Any, url: str, path: Path, size: tuple[int, int], scheme: str, down: int) -> None:
    """Take one picture; further down the page, with a request opened."""
    page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    page.goto(f"{url}/dashboard?ttft_ms=200&tbt_ms=50")
    page.wait_for_selector("tr.call")
    page.wait_for_timeout(2500)
    if down:
        page.locator(".row-button").nth(1).click()
        page.evaluate("y => scrollTo(0, y)", down)
        page.wait_for_timeout(600)
    page.screenshot(path=path)
    page.close()


def main(folder: Path) -> None:
    config = EngineConfig(model="demo", device="cpu", cpu_kv_bytes=64 << 20)
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    stop = threading.Event()
    with (
        running(
            config, up=UpConfig(mode="disaggregated", num_prefill_nodes=2, num_decode_nodes=2)
        ) as system,
        sync_playwright() as playwright,
    ):
        found = re.search(r"http://127\.0\.0\.1:\d+", "\n".join(system.lines))
        assert found is not None
        clients = [
            threading.Thread(target=call_until, args=(stop, system.address, seed))
            for seed in range(NUM_CLIENTS)
        ]
        for client in clients:
            client.start()
        time.sleep(LOAD_S)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        take(browser, found[0], folder / "dashboard-light.png", (1440, 1150), "light", 0)
        take(browser, found[0], folder / "dashboard-dark.png", (1440, 1640), "dark", 1090)
        take(browser, found[0], folder / "dashboard-mobile.png", (390, 844), "dark", 0)
        browser.close()
        stop.set()
        for client in clients:
            client.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
