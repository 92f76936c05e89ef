"""The deployments of the end-to-end tests: started once, used by many tests, checked at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from checkpoints import write_byte_tokenizer, write_checkpoint
from deployments import Running, running
from e2e.oracle import GreedyOracle
from e2e.subject import Subject

from baton.cli.deployment.deployment import UpConfig
from baton.core.engine_config import EngineConfig
from baton.engine.execution.runner import ModelRunner
from baton.engine.local import LocalEngine

BUNDLED = Path(__file__).resolve().parents[2] / "models" / "demo"


@pytest.fixture(scope="session")
def demo_system() -> Iterator[tuple[Running, LocalEngine]]:
    """The bundled model with chunks of 64, two decode nodes and HTTP, and an engine in this
    process."""
    config = _engine_config(BUNDLED, max_num_batched_tokens=64)
    local = LocalEngine(config, ModelRunner(config))
    with running(config, up=UpConfig(mode="disaggregated", num_decode_nodes=2)) as system:
        yield system, local


def _engine_config(model_dir: Path, **changes: int) -> EngineConfig:
    return EngineConfig(model=str(model_dir), device="cpu", cpu_kv_bytes=64 << 20, **changes)


def _subject(config: EngineConfig, num_decode_nodes: int) -> Iterator[Subject]:
    runner = ModelRunner(config)
    local = LocalEngine(config, runner)
    with running(
        config, up=UpConfig(mode="disaggregated", num_decode_nodes=num_decode_nodes)
    ) as system:
        vocab_size = runner.model_config.vocab_size
        yield Subject(system, GreedyOracle(Path(config.model)), local, vocab_size, num_decode_nodes)


TINY, MHA = "tiny, chunks of 16", "tiny MHA, chunks of 40"


@pytest.fixture(
    scope="module",
    params=["bundled", *(pytest.param(each, marks=pytest.mark.slow) for each in (TINY, MHA))],
)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    """A prefill node, and one or two decode nodes, for each checkpoint and chunk budget."""
    if request.param == "bundled":
        system, local = request.getfixturevalue("demo_system")
        vocab_size = local.runner.model_config.vocab_size
        yield Subject(system, GreedyOracle(BUNDLED), local, vocab_size, 2)
        system.wait_idle()
        return
    folder = tmp_path_factory.mktemp("checkpoint")
    write_byte_tokenizer(folder)
    if request.param == TINY:
        write_checkpoint(folder, seed=3, max_position_embeddings=1024)
        yield from _subject(_engine_config(folder, max_num_batched_tokens=16), 1)
    else:
        write_checkpoint(
            folder,
            seed=5,
            max_position_embeddings=1024,
            num_key_value_heads=4,
            tie_word_embeddings=True,
        )
        yield from _subject(_engine_config(folder, max_num_batched_tokens=40, block_size=8), 2)
