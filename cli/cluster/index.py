"""`baton index`: how many blocks of each tenant's prompts each engine has cached, according to
Redis.

A block's hash begins with a tag of its tenant, derived from the cluster secret: with a key file
tenants are listed by their names, without one by their tags.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from ...cluster.redis_client import answering_redis
from ...cluster.secret import ClusterSecret, salt_key
from ...core.config import ClusterConfig
from ...core.errors import StartupFailed
from ...core.membership import Member
from ...core.request.token_ids import NO_TENANT, TAG_BYTES, BlockHash, tenant_tag
from ...gateway.security.key_file import BadKeyFile, load_keys
from ...gateway.security.tenancy import salt_of_tenant
from ...prefix_index.messages import BadMessage
from ...prefix_index.pages import Contents, decode_contents, decode_page
from ...prefix_index.redis_link import RedisIndexLink
from .survey import members_of

GPU, HOST = "gpu", "host"
_HEAD = ("engine", "role", "tenant", "tier", "blocks", "tokens", "written")


@dataclass(frozen=True, slots=True)
class Cached:
    """Blocks of one tenant in one tier of one engine. `tier`: the fastest that has the block;
    `age_s`: time since the last page with one of them was written."""

    engine: str
    incarnation: str
    role: str
    tenant: str
    tier: str
    blocks: int
    tokens: int
    age_s: int


@dataclass(frozen=True, slots=True)
class Listing:
    """`missing`: engines without readable contents in the index."""

    rows: tuple[Cached, ...]
    missing: tuple[str, ...]


async def run(cluster: ClusterConfig, key_file: str | None, *, as_json: bool) -> int:
    """Print the listing. Raises StartupFailed if Redis does not answer or lists no engine, or for a
    bad key file."""
    secret = ClusterSecret.of(cluster)
    names = {NO_TENANT: "-"} | tenant_names(secret, key_file)
    async with answering_redis(cluster.redis_url, cluster.cluster, secret) as redis:
        members, _ = await members_of(redis)
        if not members:
            raise StartupFailed(
                f"no engine of cluster {cluster.cluster!r} is listed in Redis",
                hint="is one running with this --redis-url, --cluster and BATON_CLUSTER_SECRET?",
            )
        found = await read_listing(RedisIndexLink(redis), members, names, int(time.time()))
    print(json.dumps(dataclasses.asdict(found), indent=1) if as_json else render(found))
    return 0


def tenant_names(secret: ClusterSecret, key_file: str | None) -> dict[bytes, str]:
    """The names of the file's tenants, by their tags. Raises StartupFailed."""
    if key_file is None:
        return {}
    if secret.current is None:
        raise StartupFailed(
            "without a cluster secret each gateway has its own random tags of tenants",
            hint="set BATON_CLUSTER_SECRET, or leave --api-keys out",
        )
    try:
        tenants = {key.caller.tenant for key in load_keys(Path(key_file))}
    except (BadKeyFile, OSError) as error:
        raise StartupFailed(f"--api-keys {key_file}: {error}", hint="see `baton keys`") from error
    keys = salt_key(secret.current)
    return {tenant_tag(salt_of_tenant(keys, tenant)): tenant for tenant in tenants}


async def read_listing(
    link: RedisIndexLink, members: Iterable[Member], names: Mapping[bytes, str], unix_s: int
) -> Listing:
    """The cached blocks of these engines, in the order of their names. Raises RedisAway."""
    rows: list[Cached] = []
    missing: list[str] = []
    for member in sorted(members, key=lambda member: (member.role.value, member.name)):
        try:
            rows += await _rows(link, member, names, unix_s)
        except BadMessage:
            missing.append(member.name)
    return Listing(tuple(rows), tuple(missing))


async def _rows(
    link: RedisIndexLink, member: Member, names: Mapping[bytes, str], unix_s: int
) -> list[Cached]:
    name = member.incarnation
    contents: Contents = decode_contents(await link.read_contents(name), name)
    counts: Counter[tuple[bytes, str]] = Counter()
    written_s: dict[tuple[bytes, str], int] = {}
    async with aclosing(link.read_pages(name, contents.num_pages)) as pages:
        async for index, raw in pages:
            page = decode_page(raw, name, index)
            in_host = _by_tag(page.in_host)
            for tier, tags in ((GPU, _by_tag(page.hashes) - in_host), (HOST, in_host)):
                for tag, count in tags.items():
                    counts[tag, tier] += count
                    written_s[tag, tier] = max(page.unix_s, written_s.get((tag, tier), 0))
    return [
        Cached(
            member.name,
            name,
            member.role.value,
            names.get(tag, tag.hex()),
            tier,
            count,
            count * member.block_size,
            max(0, unix_s - written_s[tag, tier]),
        )
        for (tag, tier), count in sorted(counts.items())
    ]


def _by_tag(hashes: Iterable[BlockHash]) -> Counter[bytes]:
    return Counter(each[:TAG_BYTES] for each in hashes)


def render(found: Listing) -> str:
    """The listing as a table, with a line for each missing engine."""
    rows: list[Sequence[str]] = [_HEAD]
    rows += [
        (
            *(row.engine, row.role, row.tenant, row.tier),
            *(f"{row.blocks:,}", f"{row.tokens:,}", f"{row.age_s:,} s ago"),
        )
        for row in found.rows
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = [
        "  ".join(
            cell.rjust(width) if i > 3 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines += [f"{name}: has no valid index in Redis" for name in found.missing]
    return "\n".join(lines)
