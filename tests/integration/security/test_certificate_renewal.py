"""Certificates are renewed under load, and then their CA is: no request fails.

    certificates   old ─► renewed ──────────────────► of the new CA
    CA file        the old CA ─────► both CAs ──────────────────────► the new CA

One file is written after the other, in place, and links break while only one half of a pair is new.
Blocks are transferred by tcp, so that data ports have certificates too.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from deployments import Running, running
from preloaded.starts import children_of
from steady_load import PROMPTS, SteadyLoad

from baton.cli.host.certs import ROLES, SERVER, make_certificates, sign_certificates
from baton.client import AsyncClient
from baton.cluster.tls import GATEWAY, role_name
from baton.core.config import NodeConfig, UpConfig
from baton.core.engine_config import EngineConfig

HELD, HTTPS = PROMPTS[:2]  # one over a persistent connection, the other over HTTPS
PAUSE_S = 2.5  # longer than any liveness limit
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")


@dataclass(frozen=True)
class Door:
    """A TLS port: the role of its certificate, and the role that it requires of clients."""

    port: int
    shows: str
    name: str
    wants: str | None

    def shown(self, certs: Path, trust: Path) -> bytes:
        """The certificate, DER, that the port presents to a client with those in `certs`. Raises
        OSError where either end refuses the other."""
        context = ssl.create_default_context(cafile=str(trust))
        context.set_alpn_protocols(["h2"])
        if self.wants is not None:
            context.load_cert_chain(certs / f"{self.wants}.crt", certs / f"{self.wants}.key")
        with (
            socket.create_connection(("127.0.0.1", self.port), 5) as plain,
            context.wrap_socket(plain, server_hostname=self.name) as opened,
        ):
            opened.settimeout(0.5)
            try:  # a refusal arrives after the client's end of the handshake
                if self.wants is not None and not opened.recv(1):
                    raise ConnectionError("hung up")
            except TimeoutError:
                pass  # the server waits for data: accepted
            shown = opened.getpeercert(binary_form=True)
        assert shown is not None
        return shown


@dataclass
class Renewed:
    """The deployment, its files, and the counts of faults."""

    system: Running
    live: Path
    trust: Path  # both CAs, for clients
    num_breaks: Counter[str] = field(default_factory=Counter)

    # --- the files ----------------------------------------------------------------------------

    def write(self, certs: Path, end: str) -> None:
        """Write all chains, or all keys, in place."""
        for name in (*ROLES, SERVER):
            shutil.copyfile(certs / f"{name}.{end}", self.live / f"{name}.{end}")

    def write_ca(self, *cas: Path) -> None:
        (self.live / "ca.crt").write_bytes(b"".join(ca.read_bytes() for ca in cas))

    # --- requests -----------------------------------------------------------------------------

    def client(self) -> AsyncClient:
        return AsyncClient(self.system.address, ca_file=self.trust)

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[Callable[[str], Awaitable[object]]]:
        context = ssl.create_default_context(cafile=str(self.trust))
        connector = aiohttp.TCPConnector(ssl=context, force_close=True)
        async with (
            aiohttp.ClientSession(self.http(), connector=connector) as http,
            self.client() as held,
        ):

            async def ask(prompt: str) -> object:
                if prompt == HTTPS:
                    body = {"model": "demo", "prompt": prompt, "max_tokens": 40, "temperature": 0}
                    async with http.post("/v1/completions", json=body) as answer:
                        assert answer.status == 200, await answer.text()
                        return (await answer.json())["choices"][0]["text"]
                if prompt == HELD:
                    return await tokens(held, prompt)
                async with self.client() as client:
                    return await tokens(client, prompt)

            yield ask

    def http(self) -> str:
        (ready,) = self.printed("gateway", "ready: ")
        return ready.split()[-2]

    def printed(self, name: str, *words: str) -> list[str]:
        return [
            line
            for line in list(self.system.lines)
            if line.startswith(name) and all(word in line for word in words)
        ]

    # --- faults -------------------------------------------------------------------------------

    def pids(self, name: str) -> list[int]:
        """The pids of the node and its engine."""
        (child,) = (c for c in self.system.deployment.children if c.name == name)
        pid = child.process.pid
        return [pid, *children_of(pid)]

    async def engines(self) -> dict[str, str]:
        """The incarnations by name if all engines are present and linked; else nothing."""
        async with self.client() as client:
            nodes = (await client.model_info()).nodes
        sources = {node.incarnation for node in nodes if node.role == "prefill"}
        is_whole = sorted(node.name for node in nodes) == sorted(NODES) and all(
            node.is_ready and (node.role == "prefill" or sources <= set(node.links))
            for node in nodes
        )
        return {node.name: node.incarnation for node in nodes} if is_whole else {}

    async def until_linked(self, without: Iterable[str] = ()) -> dict[str, str]:
        async with asyncio.timeout(40):
            while not (found := await self.engines()) or set(without) & {*found.values()}:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return found

    async def kill_engine(self, name: str) -> str:
        """Kill the engine; returns its incarnation."""
        incarnation = (await self.until_linked())[name]
        self.num_breaks[name] += 1
        (engine,) = self.pids(name)[1:]
        os.kill(engine, signal.SIGKILL)
        return incarnation

    async def replace_engines(self, *names: str) -> None:
        """Replace the engines one by one, so that all links are new."""
        for name in names:
            killed = await self.kill_engine(name)
            assert (await self.until_linked([killed]))[name] != killed

    async def break_links(self, name: str) -> None:
        """Break the links of a live node, so that links and data connections are made anew."""
        engines = await self.until_linked()
        before, broken = self.windows(), engines[name]
        self.num_breaks[name] += 1
        pids = self.pids(name)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(PAUSE_S)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        sources = {engines[each] for each in NODES if each.startswith("prefill")}
        pairs = {(each, s) for each in NODES if each.startswith("decode") for s in sources}
        expected = {pair for pair in pairs if name in pair or broken in pair}
        async with asyncio.timeout(20):
            while not expected <= (self.windows() - before).keys():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert await self.until_linked() == engines

    def windows(self) -> Counter[tuple[str, str]]:
        """How often a decode node has connected to the data port of a source."""
        found: Counter[tuple[str, str]] = Counter()
        for line in self.printed("decode", "reads from source", "over tcp"):
            name, _, printed = line.partition(" | ")
            found[name, printed.partition("reads from source ")[2].split()[0]] += 1
        return found

    # --- certificates presented ---------------------------------------------------------------

    async def doors(self) -> list[Door]:
        """The TLS ports of the gateway, of nodes and engines, and the data ports of sources."""
        grpc_port = int(self.system.address.rpartition(":")[2])
        ports = (grpc_port, int(self.http().rpartition(":")[2]))
        found = [Door(port, SERVER, "localhost", None) for port in ports]
        engines = await asyncio.to_thread(self.system.engines)
        for name, address in self.system.node_addresses().items():
            role = name.partition("-")[0]
            speaks_at = int(engines[name].engine_address.rpartition(":")[2])
            wanted = {int(address.rpartition(":")[2]): GATEWAY, speaks_at: GATEWAY}
            for port in {*listening(self.pids(name)[1])} - {speaks_at}:
                wanted[port] = "decode"
            assert len(wanted) == 3, wanted
            found += [Door(port, role, role_name(role), wants) for port, wants in wanted.items()]
        return found

    async def check_shown(self, certs: Path, trust: Path) -> None:
        """Check that every port presents the certificates of that folder to a client that has
        them."""
        for door in await self.doors():
            expected = ssl.PEM_cert_to_DER_cert((certs / f"{door.shows}.crt").read_text())
            assert await asyncio.to_thread(door.shown, certs, trust) == expected, door

    async def admits(self, door: Door, certs: Path) -> bool:
        """Whether the port accepts clients with the certificates of that folder."""
        try:
            await asyncio.to_thread(door.shown, certs, self.trust)
        except OSError:
            return False
        return True


def listening(pid: int) -> list[int]:
    """The TCP ports at which a process listens."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            sockets.add(os.readlink(descriptor))
    rows = [row.split() for row in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [
        int(row[1].rpartition(":")[2], 16)
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in sockets
    ]


async def tokens(client: AsyncClient, prompt: str) -> tuple[int, ...]:
    call = client.generate(prompt, max_tokens=40, temperature=0.0, ignore_eos=True)
    return (await call.finish()).token_ids


@pytest.fixture
def renewed(tmp_path: Path) -> Iterator[Renewed]:
    """A deployment that reads `live`; the certificates to be copied there are in folders beside
    it."""
    old, fresh, new, live = (tmp_path / name for name in ("old", "fresh", "new", "live"))
    make_certificates(old)
    make_certificates(new)
    fresh.mkdir()
    sign_certificates(fresh, old / "ca")
    shutil.copytree(old, live)
    trust = tmp_path / "trust.crt"
    trust.write_bytes((old / "ca.crt").read_bytes() + (new / "ca.crt").read_bytes())
    engine = EngineConfig(device="cpu", cpu_kv_bytes=32 << 20)
    up = UpConfig(mode="disaggregated", certs=str(live), num_prefill_nodes=2, num_decode_nodes=2)
    with running(engine, up=up, node=NodeConfig(kv_transport="tcp")) as system:
        try:
            yield Renewed(system, live, trust)
        finally:
            print(*system.lines, sep="\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_certificates_and_their_ca_are_renewed_under_load_without_an_error(
    renewed: Renewed, tmp_path: Path
) -> None:
    old, fresh, new = (tmp_path / name for name in ("old", "fresh", "new"))
    async with renewed.asking() as ask:
        load = SteadyLoad(ask)
        async with load.running():
            await renewed.check_shown(old, old / "ca.crt")

            renewed.write(fresh, "crt")
            await renewed.break_links("decode-0")
            await renewed.check_shown(old, old / "ca.crt")
            killed = await renewed.kill_engine("prefill-1")  # it never loaded a pair that matches
            await load.progress()
            renewed.write(fresh, "key")
            await renewed.until_linked(without=[killed])
            await renewed.replace_engines("prefill-0", "decode-0")
            await renewed.check_shown(fresh, old / "ca.crt")

            renewed.write_ca(old / "ca.crt", new / "ca.crt")
            await renewed.replace_engines("decode-1")
            await renewed.check_shown(fresh, old / "ca.crt")
            assert all([await renewed.admits(door, new) for door in await renewed.doors()])

            renewed.write(new, "key")
            await renewed.break_links("prefill-0")
            await renewed.check_shown(fresh, old / "ca.crt")
            renewed.write(new, "crt")
            await renewed.replace_engines("prefill-0", "decode-0")
            await renewed.check_shown(new, new / "ca.crt")

            renewed.write_ca(new / "ca.crt")
            await renewed.replace_engines(*NODES)
            await renewed.check_shown(new, new / "ca.crt")
            for door in await renewed.doors():
                assert await renewed.admits(door, fresh) == (door.wants is None), door
            await load.progress()
    for name in NODES:  # links end only by the faults of their node
        linked = renewed.printed("gateway", "linked to", f" {name} ")
        assert len(linked) == 1 + renewed.num_breaks[name], linked
