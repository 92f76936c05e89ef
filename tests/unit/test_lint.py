"""Patterns that product code must not contain: executing or unpickling foreign data, and validating
input by assert.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_PRODUCT = {"tests", "bench", "docs", "deploy", "build"}

MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "torch.load", "yaml.load", "yaml.unsafe_load", "numpy.load", "np.load", "os.system", "os.popen",
    "jinja2.Environment", "jinja2.Template", "ssl._create_unverified_context",
}  # fmt: skip
KEYWORDS = {"shell": True, "trust_remote_code": True, "check_hostname": False}

# Code that handles external input: an assert there is a check that `python -O` removes.
EDGES = (
    "gateway/http", "gateway/security", "gateway/grpc/service.py", "gateway/grpc/vllm_wire.py",
    "gateway/grpc/unary_methods.py", "gateway/grpc/vllm_engine.py", "gateway/validation",
    "gateway/engines/engine_connection.py", "gateway/engines/reported_load.py",
    "core/request/parameters.py", "core/request/text_parameters.py", "core/request/json_fields.py",
    "proto/codec.py", "cluster", "prefix_index/messages.py", "node/supervisor/rpc.py",
    "kv_transfer/protocol/messages.py", "kv_transfer/export/pool_address.py", "core/model_dir.py",
    "engine/model/weights/checkpoint.py", "engine/model/weights/weight_files.py",
    "engine/model/model_config.py", "engine/model/config_fields.py", "engine/model/rope_config.py",
    "engine/model/quantization.py", "engine/lora/adapter_config.py", "engine/lora/adapter_files.py",
)  # fmt: skip
# An attribute that is set by then: this assert is for the type checker and validates no input.
OWN_STATE = re.compile(r"self\._[\w.]+ is not None\Z")
# Banned patterns that are right where they are: file and finding, with the reason.
ALLOWED: dict[tuple[str, str], str] = {}


def product_files() -> Iterator[Path]:
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*/**/*.py")]:
        top = path.relative_to(ROOT).parts[0]
        if not top.startswith(".") and top not in NOT_PRODUCT:
            yield path


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def banned(tree: ast.AST) -> Iterator[str]:
    """All banned patterns in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            if node.module.split(".")[0] in MODULES:
                yield node.module
            yield from (
                f"{node.module}.{a.name}" for a in node.names if f"{node.module}.{a.name}" in CALLS
            )
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in BUILTINS or name in CALLS:
                yield name
            yield from (
                f"{keyword.arg}={keyword.value.value}"
                for keyword in node.keywords
                if keyword.arg in KEYWORDS
                and isinstance(keyword.value, ast.Constant)
                and keyword.value.value is KEYWORDS[keyword.arg]
            )


def asserts(tree: ast.AST) -> Iterator[str]:
    return (ast.unparse(node.test) for node in ast.walk(tree) if isinstance(node, ast.Assert))


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import pickle", "pickle"), ("import os, marshal as m", "marshal"),
        ("from shelve import open", "shelve"), ("eval('1')", "eval"), ("exec(x)", "exec"),
        ("torch.load(path)", "torch.load"), ("from torch import load", "torch.load"),
        ("from yaml import load", "yaml.load"), ("run(x, shell=True)", "shell=True"),
        ("model(x, trust_remote_code=True)", "trust_remote_code=True"),
        ("from jinja2 import Environment", "jinja2.Environment"),
    ],
)  # fmt: skip
def test_the_search_finds_it(code: str, found: str) -> None:
    assert list(banned(ast.parse(code))) == [found]


def test_what_looks_alike_is_not_found() -> None:
    fine = "model.eval(); json.load(f); run(x, shell=False); re.compile('a'); from .pickle import a"
    assert not list(banned(ast.parse(fine)))


def test_nothing_of_others_is_run_or_unpickled() -> None:
    found = {
        (str(path.relative_to(ROOT)), what)
        for path in product_files()
        for what in banned(ast.parse(path.read_text()))
    }
    assert found - ALLOWED.keys() == set()
    assert not ALLOWED.keys() - found, "an exception that nothing needs"


def test_input_is_not_checked_by_assert() -> None:
    assert not [edge for edge in EDGES if not (ROOT / edge).exists()]
    found = {
        (name, expression)
        for path in product_files()
        if (name := str(path.relative_to(ROOT))).startswith(EDGES)
        for expression in asserts(ast.parse(path.read_text()))
        if not OWN_STATE.match(expression)
    }
    assert found == set()
