"""One open gateway for all tests of this folder, and one that requires keys."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bad_input.cases.fronts import Target, running
from fakes.gateway.byte_model import write_byte_model

from baton.gateway.security.caller import INFER, METRICS
from baton.gateway.security.key_file import add_key

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}\n{% endfor %}assistant:"
)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_byte_model(tmp_path_factory.mktemp("bad_input") / "demo")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Target]:
    """A gateway without keys. Session-wide: all tests share its state."""
    with running(tmp_path_factory.mktemp("open"), {"model": str(model_dir)}) as started:
        yield started


@dataclass(frozen=True, slots=True)
class Keyed:
    """A gateway that requires keys, and one key for each tenant, by the tenant's name."""

    target: Target
    keys: Mapping[str, str]

    def bearer(self, tenant: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[tenant]}"}


TENANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "elsewhere": {"models": ["another"]},
    "slow": {"requests_per_minute": 1},
    "small": {"tokens_per_minute": 20},
    "single": {"max_concurrent_requests": 1},
    "watcher": {},
}


@pytest.fixture(scope="session")
def keyed(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("keyed")
    path = folder / "keys.json"
    keys = {
        tenant: add_key(path, tenant, frozenset({METRICS if tenant == "watcher" else INFER}))
        for tenant in TENANTS
    }
    file = json.loads(path.read_text())
    for tenant, limits in TENANTS.items():
        file["tenants"].setdefault(tenant, {}).update(limits)
    path.write_text(json.dumps(file))
    with running(folder, {"model": str(model_dir), "api_keys": str(path)}) as started:
        yield Keyed(started, keys)
