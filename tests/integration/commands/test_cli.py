"""The commands against a real deployment: the chat shell on a pseudo-terminal, fsck, doctor."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from deployments import Running, running

from baton.client import Client
from baton.cluster.redis_client import RedisClient
from baton.cluster.redis_directory import RedisDirectory
from baton.cluster.secret import ClusterSecret
from baton.core.engine_config import EngineConfig
from baton.core.membership import Member, Role

BATON = Path(sys.executable).parent / "baton"
GHOST = Member(
    *("f" * 32, Role.DECODE, "ghost", "127.0.0.1:1", "demo", "fp", 2048, 16, 100),
    engine_address="127.0.0.1:1",
    host_id="0" * 32,
)


@pytest.fixture(scope="module")
def system() -> Iterator[Running]:
    with running(EngineConfig(device="cpu", cpu_kv_bytes=64 << 20)) as system:
        yield system


class Terminal:
    """`baton chat` on a pseudo-terminal: input as typed, output as displayed."""

    def __init__(self, *arguments: str) -> None:
        self._fd, child = pty.openpty()
        self.process = subprocess.Popen(
            [BATON, "chat", *arguments],
            stdin=child,
            stdout=child,
            stderr=child,
            env=os.environ | {"PYTHONSAFEPATH": "1", "TERM": "dumb"},
            start_new_session=True,
            preexec_fn=_take_terminal,  # ^C sends a signal
        )
        os.close(child)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def expect(self, pattern: str, timeout_s: float = 20.0) -> str:
        """Read until `pattern` follows what was expected before; returns the text read."""
        deadline_s = time.monotonic() + timeout_s
        while not (match := re.search(pattern, self.seen)):
            assert time.monotonic() < deadline_s, f"no {pattern!r} in {self.seen!r}"
            self.seen += os.read(self._fd, 65536).decode(errors="replace")
        before, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return before

    def close(self) -> int:
        code = self.process.wait(timeout=20)
        os.close(self._fd)
        return code


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_chat_on_a_terminal(system: Running) -> None:
    shell = Terminal(
        *("--address", system.address, "--completion", "--temperature", "0", "--max-tokens", "24")
    )
    shell.expect("plain completion shell.*\n> ")
    prompt = "def read_file(path):"
    shell.type(f"{prompt}\n")
    shown = shell.expect(r"\n> $").replace("\r\n", "\n")
    with Client(system.address) as client:
        text = client.generate(prompt, max_tokens=24, temperature=0.0).result.text
    assert text in shown
    shell.type("/info\n")
    assert "prefill-0 -> decode-0" in shell.expect("tokens/s")

    shell.type("/set max_tokens 1900\n/reset\n")
    shell.expect("forgotten")
    shell.type("import os\n")
    shell.expect("import os")
    time.sleep(0.3)
    shell.type("\x03")
    shell.expect(r"\[cancelled\](.*\n)+> $")  # EOF is ignored before the prompt
    shell.type("\x04")
    assert shell.close() == 0


def test_a_chat_by_the_template_is_the_one_over_http(system: Running) -> None:
    printed = subprocess.run(
        [BATON, "chat", "--address", system.address, "--temperature", "0", "--max-tokens", "24"],
        input="read a file\n",
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert printed.returncode == 0, printed.stderr
    (line,) = (line for line in system.deployment.startup_lines if line.startswith("Try: "))
    _, curl, url, *arguments = shlex.split(line)
    assert curl == "curl"
    body = json.loads(arguments[-1])
    body |= {"temperature": 0, "max_tokens": 24}
    body["messages"][0]["content"] = "read a file"
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        message = json.load(answer)["choices"][0]["message"]
    assert message["content"] in printed.stdout


def test_chat_without_a_gateway(system: Running) -> None:
    printed = subprocess.run(
        [BATON, "chat", "--address", "127.0.0.1:1"], capture_output=True, text=True, timeout=30
    )
    assert printed.returncode == 1
    assert "no gateway answers at 127.0.0.1:1" in printed.stderr


@pytest.mark.slow
def test_chat_starts_a_deployment_of_its_own() -> None:
    printed = subprocess.run(
        [BATON, "chat", "--device", "cpu", "--cpu-kv-bytes", "67108864", "--max-tokens", "4"],
        input="def f(\n/info\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert printed.returncode == 0, printed.stderr
    assert re.search(r"(prefill|decode)-0", printed.stdout), "whichever engine it was"


def fsck(
    system: Running, *arguments: str, secret: str | None = None, command: str = "fsck"
) -> tuple[int, str]:
    cluster = system.deployment.cluster
    printed = subprocess.run(
        [BATON, command, "--redis-url", cluster.redis_url, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"BATON_CLUSTER_SECRET": secret or cluster.cluster_secret or ""},
    )
    return printed.returncode, printed.stdout + printed.stderr


def test_fsck_of_a_sound_cluster(system: Running) -> None:
    code, printed = fsck(system)
    assert code == 0, printed
    assert len(re.findall(r"^ok +(?:prefill|decode)-0 ", printed, re.MULTILINE)) == 2


def test_fsck_while_requests_run(system: Running) -> None:
    with Client(system.address) as client:
        streams = [
            client.generate(f"def f{i}(", max_tokens=400, temperature=0.0, ignore_eos=True)
            for i in range(4)
        ]
        for stream in streams:
            next(stream)
        code, printed = fsck(system, "--json")
        for stream in streams:
            stream.cancel()
    assert code == 0, printed
    assert {finding["level"] for finding in json.loads(printed)} == {"ok"}


def test_fsck_finds_an_entry_that_nobody_stands_behind(system: Running) -> None:
    cluster = system.deployment.cluster

    async def announce() -> None:
        directory = RedisDirectory(
            RedisClient(cluster.redis_url, cluster.cluster, ClusterSecret.of(cluster))
        )
        await directory.announce(GHOST, 60.0)
        await directory.close()

    def remove() -> None:  # a clean exit would add an entry too
        with redis.Redis.from_url(cluster.redis_url) as client:
            client.delete(f"baton:{cluster.cluster}:member:{GHOST.incarnation}")

    asyncio.run(announce())
    try:
        code, printed = fsck(system)
    finally:
        remove()
    assert code == 1
    assert re.search(r"^problem +ghost +in Redis, but does not answer", printed, re.MULTILINE), (
        printed
    )


def test_fsck_with_another_secret_finds_nothing(system: Running) -> None:
    code, printed = fsck(system, secret="another")
    assert code == 1
    assert "2 entries are junk or not signed with this secret" in printed


def test_an_index_of_no_engine_says_so(system: Running) -> None:
    code, printed = fsck(system, command="index")
    assert code == 0, printed
    for code, printed in (
        fsck(system, command="index", secret="another"),
        fsck(system, "--cluster", "another", command="index"),
    ):
        assert code == 1
        assert re.search(r"^error: no engine of cluster '\w+' is listed", printed, re.MULTILINE), (
            printed
        )


def test_fsck_without_redis() -> None:
    printed = subprocess.run(
        [BATON, "fsck", "--redis-url", "redis://127.0.0.1:1/0"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert printed.returncode == 1
    assert "Redis does not answer" in printed.stderr
