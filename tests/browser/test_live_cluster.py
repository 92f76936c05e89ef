"""The live page of a real deployment under load, whose gateway is killed and restarts."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deployments import Running, running

from baton.client import Client
from baton.core import flags
from baton.core.config import GatewayConfig
from baton.core.engine_config import EngineConfig
from baton.core.errors import BatonError

PROMPT = "The quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture
def system(chromium: Any) -> Iterator[Running]:
    """A prefill and a decode node; skipped without a browser."""
    config = EngineConfig(model="demo", device="cpu", cpu_kv_bytes=64 << 20)
    with running(config) as deployment:
        yield deployment


@contextlib.contextmanager
def load(address: str) -> Iterator[None]:
    """One call after the other, with retries while the gateway is away."""
    stop = threading.Event()

    def call() -> None:
        with Client(address) as client:
            for number in range(1_000_000):
                with contextlib.suppress(BatonError):
                    for _ in client.generate(f"{number} {PROMPT}", max_tokens=24):
                        if stop.is_set():
                            return
                if stop.wait(0.05):
                    return

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def gateway_again(system: Running, http_port: int) -> Iterator[None]:
    """Another gateway process that replaces the killed one."""
    cluster = system.deployment.cluster
    grpc_port = int(system.address.rpartition(":")[2])
    config = replace(system.deployment.gateway, grpc_port=grpc_port, http_port=http_port)
    assert isinstance(config, GatewayConfig)
    program = "import sys; from baton.cli.launch import gateway; sys.exit(gateway())"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *flags.to_argv(config), *flags.to_argv(cluster)],
        env=os.environ
        | {"PYTHONSAFEPATH": "1", "BATON_CLUSTER_SECRET": cluster.cluster_secret or ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=20)


@pytest.mark.slow
def test_load_a_killed_gateway_and_its_return(
    system: Running, open_page: Callable[..., Any]
) -> None:
    printed = "\n".join(system.lines)
    found = re.search(r"(http://127\.0\.0\.1:(\d+))", printed)
    assert found is not None, printed
    with load(system.address):
        page = open_page(f"{found[1]}/dashboard", may_lose_server=True)
        page.wait_for_selector("[data-state=live]")
        page.wait_for_selector("tr.call")
        page.wait_for_function(
            "() => document.querySelectorAll('.card[data-state=ready]').length === 2"
        )
        page.wait_for_selector(".card.decode .link-rate:text('shm')")
        assert "CPU" in page.locator(".card.prefill").inner_text()
        assert "restarted" not in page.locator("#cluster").inner_text()
        page.locator(".row-button").first.click()
        detail = page.locator("tr.opened").inner_text()
        for word in ("decode-", "prefill-0", "transfer ended", "shm", "grpc"):
            assert word in detail
        before = page.locator("#stats").inner_text()
        changed = "before => document.getElementById('stats').innerText !== before"
        page.wait_for_function(changed, arg=before)
        gateway = next(c for c in system.deployment.children if c.name == "gateway")
        os.kill(gateway.process.pid, signal.SIGKILL)
        page.wait_for_selector("[data-state=disconnected]")
        with gateway_again(system, int(found[2])):
            page.wait_for_selector("[data-state=live]", timeout=20_000)
            page.wait_for_selector("tr.call")
            page.wait_for_function("() => document.getElementById('attainment').innerText !== '–'")
            if folder := os.environ.get("SCREENSHOTS"):
                page.screenshot(path=Path(folder) / "cluster.png", full_page=True)
