"""`baton fsck`: do all nodes of a cluster agree on who holds which blocks for whom?

Looks twice, some time apart, where the first look finds what may only be a moment's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable

from ...core.config import ClusterConfig
from ..host.finding import Finding, exit_code, render
from .fsck_rules import Judged, judge
from .survey import Survey, survey

_SETTLE_S = 1.0


async def run(cluster: ClusterConfig, *, as_json: bool) -> int:
    """Print the report; exit code 1 if the nodes do not agree. Raises StartupFailed."""
    findings = await examine(lambda: survey(cluster), _SETTLE_S)
    if as_json:
        print(json.dumps([as_dict(finding) for finding in findings], indent=1))
    else:
        print(render(findings))
    return exit_code(findings)


async def examine(look: Callable[[], Awaitable[Survey]], settle_s: float) -> list[Finding]:
    """The findings that last."""
    first = judge(await look())
    if not any(judged.is_momentary for judged in first):
        return [judged.finding for judged in first]
    await asyncio.sleep(settle_s)
    before = {judged.finding for judged in first}
    return [judged.finding for judged in judge(await look()) if _lasts(judged, before)]


def _lasts(judged: Judged, before: set[Finding]) -> bool:
    return not judged.is_momentary or judged.finding in before


def as_dict(finding: Finding) -> dict[str, str]:
    return dataclasses.asdict(finding) | {"level": finding.level.value}
