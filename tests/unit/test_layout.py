"""The package structure: allowed imports, and a complete list of packages."""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_PRODUCT = {"tests", "bench", "docs", "deploy", "build"}

# folder -> the folders of the product that it may import, besides itself
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "kernels": {"core"},
    "models": set(),
    "proto": {"core"},
    "constraints": {"core"},
    "engine": {"core", "kernels", "constraints"},
    "kv_transfer": {"core", "engine", "kernels"},
    "cluster": {"core", "proto"},
    "prefix_index": {"core", "cluster"},
    "node": {
        "core",
        "proto",
        "constraints",
        "engine",
        "kv_transfer",
        "cluster",
        "prefix_index",
    },
    "prefill_node": {"core", "proto", "engine", "kv_transfer", "node"},
    "decode_node": {"core", "proto", "engine", "kv_transfer", "node"},
    "gateway": {"core", "proto", "constraints", "cluster", "prefix_index"},
    "client": {"core", "proto"},
    "offline": {"core", "proto", "engine", "gateway", "client"},
    "loadgen": {"core"},
    "cli": {
        *("core", "proto", "cluster", "prefix_index", "node", "gateway", "client", "engine"),
        *("offline", "loadgen"),
    },
}

# folder -> its parts from top to bottom, "" for its own files: a file may import from lower parts
FLOORS: dict[str, tuple[str, ...]] = {
    "core": ("channels", "request", "", "process"),
    "kernels": ("lora", "sampling", "layers", "experts", "attention", "kv", "products", ""),
    "engine": (
        *(
            "",
            "beams",
            "speculation",
            "parallel",
            "hosts",
            "scheduling",
            "execution",
            "lora",
            "model",
            "kv",
        ),
    ),
    "kv_transfer": (
        *("ranks", "protocol", "", "nccl", "network"),
        *("cuda_ipc", "shm", "export", "window"),
    ),
    "node": ("engine_process", "requests", "peers", "supervisor", "channels", ""),
    "gateway": (
        *("process", "grpc", "http", "admission", "adapters", "telemetry", "security"),
        *("moves", "promises", "engines", "request", "validation", "text", ""),
    ),
    "gateway/http": ("", "turns", "chat", "generate", "dashboard", "protocol"),
    "gateway/telemetry": ("", "window", "metrics", "calls"),
    "cli": ("", "deployment", "cluster", "host"),
}
MAX_FILES = 14  # per folder, not counting subfolders


@functools.cache
def product_files() -> list[Path]:
    folders = [
        path
        for path in ROOT.iterdir()
        if path.is_dir() and not path.name.startswith(".") and path.name not in NOT_PRODUCT
    ]
    return [*ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]


@functools.cache
def imports_of(path: Path) -> set[tuple[str, ...]]:
    """The product's modules that a file imports anywhere in it, as paths from the root."""
    package = path.relative_to(ROOT).parent.parts
    found: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - (node.level - 1)]
            names = tuple(node.module.split(".")) if node.module else ()
            found |= {(*base, *names, alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(tuple(node.module.split("."))[1:] if node.module[:6] == "baton." else ())
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("baton."):
                    found.add(tuple(alias.name.split("."))[1:])
    return {parts for parts in found if parts and (ROOT / parts[0]).is_dir()}


def test_no_import_runs_up() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {'.'.join(target)}"
        for path in product_files()
        for target in imports_of(path)
        if len(path.relative_to(ROOT).parts) > 1
        and target[0] != path.relative_to(ROOT).parts[0]
        and target[0] not in MAY_IMPORT.get(path.relative_to(ROOT).parts[0], set())
    ]
    assert not wrong, "not in MAY_IMPORT above:\n" + "\n".join(wrong)


def room(parts: tuple[str, ...], folder: tuple[str, ...]) -> str:
    """The part of `folder` in which a module lies; `parts` is its path from the root."""
    is_deep = (ROOT / Path(*parts[: len(folder) + 1])).is_dir()
    return parts[len(folder)] if is_deep else ""


@pytest.mark.parametrize("name", FLOORS)
def test_no_import_runs_up_within_a_folder(name: str) -> None:
    folder, floors = tuple(name.split("/")), FLOORS[name]
    own = {path.parent.name for path in (ROOT / name).glob("*/__init__.py")}
    assert own == set(floors) - {""}, f"FLOORS above lists the packages in {name}/, highest first"
    wrong = []
    for path in product_files():
        parts = path.relative_to(ROOT).parts
        if parts[: len(folder)] != folder:
            continue
        floor = floors.index(room(parts, folder))
        for target in imports_of(path):
            is_inside = target[: len(folder)] == folder and len(target) > len(folder)
            if is_inside and floors.index(room(target, folder)) < floor:
                wrong.append(f"{path.relative_to(ROOT)} imports {'.'.join(target)}")
    assert not wrong, f"{name}/ from the top: {floors}\n" + "\n".join(wrong)


def file_of(parts: tuple[str, ...]) -> Path | None:
    """The file of a module, or of a name imported from a module; None for a package."""
    candidates = (
        ROOT.joinpath(*names).with_suffix(".py") for names in (parts, parts[:-1]) if names
    )
    return next((path for path in candidates if path.is_file()), None)


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports for types only and imports within functions count, too."""
    graph = {
        path: {found for parts in imports_of(path) if (found := file_of(parts)) not in (None, path)}
        for path in product_files()
    }
    graphlib.TopologicalSorter(graph).prepare()  # its error names the circle


def test_no_folder_is_full() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    folders = Counter(
        path.parent for path in map(Path, listed.stdout.split("\n")) if path.suffix == ".py"
    )
    full = {str(folder): n for folder, n in folders.items() if n > MAX_FILES}
    assert not full, f"more than {MAX_FILES}: some go into a folder of their own"


def test_no_two_classes_share_a_name() -> None:
    """Private classes apart, and `SamplingParams`, which is vLLM's name in `offline`."""
    names = Counter(
        node.name
        for path in product_files()
        if "proto" not in path.parts  # generated
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, number in names.items() if number > 1] == ["SamplingParams"]


def test_package_list_is_complete() -> None:
    declared = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    )
    folders = {path.parent.relative_to(ROOT) for path in product_files()}
    expected = {"baton" if not f.parts else "baton." + ".".join(f.parts) for f in folders}
    assert declared == expected, "pyproject.toml: packages of [tool.setuptools]"


def run_python(program: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    return result.stdout.strip()


def test_control_plane_never_imports_torch() -> None:
    faces = (
        *("baton", "baton.client", "baton.gateway.process.server"),
        *("baton.node.supervisor.supervisor", "baton.offline.batch"),
    )
    heavy = {"torch", "transformers"}
    program = (
        "import importlib, sys; "
        f"print([f for f in {faces} if importlib.import_module(f) and {heavy} & {{*sys.modules}}])"
    )
    assert run_python(program) == "[]", "the first of these, or what it imports"


def test_engine_processes_never_import_grpc() -> None:
    """gRPC's threads would compete with the engine's loop for the interpreter."""
    faces = "baton.prefill_node.engine_main, baton.decode_node.engine_main"
    program = f"import sys, {faces}; print([m for m in sys.modules if 'grpc' in m])"
    assert run_python(program) == "[]"


@pytest.mark.parametrize("is_safe", [False, True])
@pytest.mark.parametrize("folder", ["tmp_path", "ROOT"])
def test_the_module_is_the_command(tmp_path: Path, folder: str, is_safe: bool) -> None:
    """`python -m baton` works from any folder."""
    (tmp_path / "core.py").write_text("raise SystemExit('not ours')")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    printed = subprocess.run(
        [sys.executable, "-m", "baton", "--help"],
        capture_output=True,
        text=True,
        cwd=tmp_path if folder == "tmp_path" else ROOT,
        env=environment | ({"PYTHONSAFEPATH": "1"} if is_safe else {}),
    )
    assert printed.returncode == 0 and printed.stdout.startswith("usage: baton [-h]"), printed


def test_generic_names_are_not_importable_bare() -> None:
    """`kernels` is also a package that transformers imports: it must not be ours."""
    program = (
        "import importlib.util as u; "
        f"print([n for n in ('kernels', 'gateway', 'core') if (s := u.find_spec(n)) "
        f"and str(s.origin).startswith({str(ROOT) + '/'!r}) and '.venv' not in str(s.origin)])"
    )
    assert run_python(program) == "[]"


def test_stubs_are_fresh(tmp_path: Path) -> None:
    from baton.proto.generate import generate

    generate(tmp_path)
    for stub in tmp_path.iterdir():
        assert stub.read_text() == (ROOT / "proto/v1" / stub.name).read_text(), stub.name
