"""`baton index`: rows by engine, tenant and tier from Redis, and unreadable entries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes.index_link import FakeIndexLink

from baton.cli.cluster.index import Cached, Listing, read_listing, render, run, tenant_names
from baton.cluster.secret import ClusterSecret, salt_key
from baton.core.config import ClusterConfig
from baton.core.errors import StartupFailed
from baton.core.membership import Member, Role
from baton.core.ports import Clock
from baton.core.request.token_ids import block_hashes, root_hash, tenant_tag
from baton.gateway.security.caller import Caller, Limits
from baton.gateway.security.key_file import add_key
from baton.gateway.security.tenancy import Tenancy
from baton.prefix_index.journal import CacheJournal
from baton.prefix_index.pages import encode_contents

A, B = "aa" * 16, "bb" * 16
SECRET = "a secret of the cluster"


def member(incarnation: str, role: Role, name: str) -> Member:
    return Member(incarnation, role, name, "127.0.0.1:1", "demo", "fp", 2048, 16, 100)


async def stored(link: FakeIndexLink, journal: CacheJournal, unix_s: int) -> None:
    pages = journal.stored.encode(range(journal.stored.num_pages), unix_s)
    await link.write_pages(journal.incarnation, pages)
    await link.write_contents(journal.incarnation, encode_contents(journal.contents(unix_s)))


async def test_blocks_are_listed_by_engine_tenant_and_tier(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    add_key(keys, "acme", frozenset({"infer"}))
    names = {bytes(4): "-"} | tenant_names(ClusterSecret(SECRET), str(keys))
    tenancy = Tenancy(Clock(), salt_key(SECRET))
    salts = [
        tenancy.cache_salt(Caller(tenant, frozenset(), None, Limits()), requested)
        for tenant, requested in (("acme", ""), ("acme", "own"), ("other", ""))
    ]
    chains = [block_hashes(root_hash("fp", salt), range(160), 16) for salt in ["", *salts]]
    assert len({each for chain in chains for each in chain}) == 40, "all are separate"
    journal, link = CacheJournal(A), FakeIndexLink()
    journal.record([], [*chains[0], *chains[1], *chains[2][:5], *chains[3]])
    journal.record([], [], [*chains[1][8:], *chains[2][5:]])
    await stored(link, journal, 990)
    members = [member(A, Role.PREFILL, "p0"), member(B, Role.DECODE, "d0")]
    found = await read_listing(link, members, names, 1000)
    other = tenant_tag(salts[2]).hex()
    rows = {(row.tenant, row.tier): row.blocks for row in found.rows}
    expected = {("-", "gpu"): 10, ("acme", "gpu"): 13, ("acme", "host"): 7, (other, "gpu"): 10}
    assert rows == expected
    assert found.rows[0] == Cached("p0", A, "prefill", "-", "gpu", 10, 160, 10)
    assert found.missing == ("d0",)
    lines = render(found).splitlines()
    assert len(lines) == 6 and lines[-1].startswith("d0: ")
    assert render(Listing((), ())).split() == [
        *("engine", "role", "tenant", "tier", "blocks", "tokens", "written")
    ]


def test_names_need_the_secret_and_the_file(tmp_path: Path) -> None:
    assert tenant_names(ClusterSecret(), None) == {}
    with pytest.raises(StartupFailed, match="secret"):
        tenant_names(ClusterSecret(), "keys.json")
    with pytest.raises(StartupFailed, match="--api-keys"):
        tenant_names(ClusterSecret(SECRET), str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text(json.dumps({"keys": 1}))
    with pytest.raises(StartupFailed, match="--api-keys"):
        tenant_names(ClusterSecret(SECRET), str(tmp_path / "bad.json"))


async def test_without_redis_the_error_has_a_type(tmp_path: Path) -> None:
    cluster = ClusterConfig(redis_url=f"unix://{tmp_path}/none.sock")
    with pytest.raises(StartupFailed, match="Redis does not answer"):
        await run(cluster, None, as_json=True)
