"""The pages made from the code are up to date, and pages written by people name only things that
exist.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.bench import report
from baton.bench.pages import reference
from baton.core import errors
from baton.core.config import GatewayConfig

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
STALE = "make docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("[a-z]*/README.md")])

# A file by its path or name; without placeholders, home directories or addresses.
_FILE = re.compile(
    r"(?<![\w/.:{*~$-])((?:[\w.-]+/)*[\w-][\w.-]*\.(?:py|md|proto|toml|svg|ya?ml|json))(?![\w/*{])"
)
_FOLDER = re.compile(r"`([\w-]+(?:/[\w.-]+)*/)`")
# Named, but not in this repository: users' files, and files that are not to be written.
_NOT_OURS = {"path/to/file.py", "utils.py", "URL/openapi.json"}


@functools.cache
def tracked_files() -> list[Path]:
    """The existing files that git tracks or would track."""
    listed = subprocess.check_output(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
    )
    return [path for name in listed.splitlines() if (path := ROOT / name).is_file()]


def docstrings(path: Path) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, kinds):
            yield ast.get_docstring(node) or ""


def absent(text: str, at: Path, names: set[str]) -> Iterator[str]:
    """Files that are named in a text at `at` and do not exist.

    A path starts at the root or at a folder above the text; a bare name may be that of any file.
    """
    folders = [folder for folder in at.parents if folder.is_relative_to(ROOT)]
    for name in _FILE.findall(text):
        if name in _NOT_OURS:
            continue
        if "/" in name:
            if not any((folder / name).exists() for folder in folders):
                yield name
        elif name not in names and not name.endswith((".json", ".yaml", ".yml")):
            yield name


def source() -> str:
    """All Python code of the product as one text, with adjacent string literals joined."""
    skip = {"tests", "bench", "docs", "build"}
    files = [
        path
        for path in ROOT.glob("*/**/*.py")
        if not path.relative_to(ROOT).parts[0].startswith(".")
        and path.relative_to(ROOT).parts[0] not in skip
    ]
    text = "\n".join(path.read_text() for path in files)
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_reference_is_fresh() -> None:
    assert (DOCS / "reference.md").read_text() == reference.reference_page(), STALE


def test_reference_names_every_field_of_the_configuration() -> None:
    page = reference.reference_page()
    assert "`--grpc-port`" in page
    for name in GatewayConfig.__dataclass_fields__:
        assert f"`--{name.replace('_', '-')}`" in page


def test_reference_shows_the_code_s_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    page = reference.reference_page()
    monkeypatch.setenv("BATON_GRPC_PORT", "1234")
    assert reference.reference_page() == page


def test_the_tests_that_security_md_names_are_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", (DOCS / "security.md").read_text()))
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 20
    assert named <= set(re.findall(r"def (test_\w+)", tests))


def test_error_facts_are_fresh() -> None:
    page = (DOCS / "errors.md").read_text()
    assert reference.refresh_errors_page(page) == page, STALE


def test_contracts_show_the_code_as_it_is() -> None:
    page = (DOCS / "contracts.md").read_text()
    assert reference.refresh_contracts_page(page) == page, STALE


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_tables_of_results_are_fresh(page: Path) -> None:
    assert report.refreshed(page) == page.read_text(), STALE


@pytest.mark.parametrize("path", report.PICTURES, ids=lambda path: path.name)
def test_pictures_of_results_are_fresh(path: Path) -> None:
    assert report.PICTURES[path]() == path.read_text(), STALE


def test_every_table_is_on_a_page_and_every_result_in_a_table() -> None:
    used = [
        name
        for page in report.PAGES
        for name in re.findall(r"<!-- made: (.+?) -->", page.read_text())
    ]
    assert sorted(used) == sorted(report.TABLES)
    named = "".join(page.read_text() for page in report.PAGES)
    results = (ROOT / "bench" / "results").glob("*.json")
    assert not [path.name for path in results if path.name not in named]


def test_parts_of_a_page_are_made_and_the_rest_is_left_alone() -> None:
    page = "a\n<!-- made: x -->\nold\n<!-- /made -->\nb <!-- /made -->"
    made = reference.refresh_parts(page, lambda name: f"new {name}\n")
    assert made == "a\n<!-- made: x -->\n\nnew x\n\n<!-- /made -->\nb <!-- /made -->"
    assert reference.refresh_parts(made, lambda name: f"new {name}\n") == made


def test_what_the_contracts_show_of_a_class() -> None:
    shown = reference.code_of("kv_transfer/window/transport.py: PoolWindow")
    assert "    num_steps: int | None\n        # How many of the source's steps" in shown
    assert "def prepare(pairs: BlockPairs) -> Starter" in shown
    value = reference.code_of("engine/kv/block_pool.py: BlockCounts")
    assert "BlockCounts(free: int, cached: int, held: int, reserved: int)" in value
    with pytest.raises(KeyError):
        reference.code_of("engine/engine.py: NoSuchClass")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_folders_that_a_page_names_exist(page: Path) -> None:
    names = {path.name for path in tracked_files()}
    text = page.read_text()
    assert not list(absent(text, page, names))
    folders = [page.parent, ROOT]
    assert not [
        name for name in _FOLDER.findall(text) if not any((f / name).is_dir() for f in folders)
    ]


def test_files_that_docstrings_name_exist() -> None:
    tracked = tracked_files()
    names = {path.name for path in tracked}
    assert not {
        f"{path.relative_to(ROOT)}: {name}"
        for path in tracked
        if path.suffix == ".py" and any(absent(path.read_text(), path, names))  # whole file: quick
        for text in docstrings(path)
        for name in absent(text, path, names)
    }


def test_every_page_is_reached_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert not [page.name for page in DOCS.glob("*.md") if f"(docs/{page.name})" not in readme]


def test_the_table_of_parameters_is_fresh() -> None:
    page = (DOCS / "sampling.md").read_text()
    assert reference.refresh_sampling_page(page) == page, STALE


def test_every_error_has_facts_and_advice() -> None:
    page, starts = (DOCS / "errors.md").read_text().split("\n## What a process says")
    assert "\n### " not in starts
    sections = dict(re.findall(r"^### `(\w+)`\n\n(.*?)(?=^### |\Z)", page, re.M | re.S))
    assert set(sections) == set(errors._tree(errors.BatonError))
    for code, section in sections.items():
        facts, _, advice = section.partition("\n")
        assert errors._tree(errors.BatonError)[code].grpc_status in facts
        assert len(advice.split()) >= 8, f"{code}: no advice"


def test_every_finer_code_is_explained() -> None:
    section = (DOCS / "errors.md").read_text().split("### `invalid_request`")[1].split("### ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.M)) == errors.INVALID_REQUEST_CODES


def test_messages_that_are_explained_exist() -> None:
    page = (DOCS / "errors.md").read_text().split("\n## What a process says")[1]
    rows = re.findall(r"^\| `([^`]+)` \|", page, re.M)
    text = source()
    assert len(rows) > 10
    assert not [row for row in rows if row not in text]


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        text = page.read_text()
        for target, heading in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
            if "://" in target:
                continue
            led_to = page.parent / target if target else page
            if not led_to.exists() or (heading and heading not in anchors(led_to.read_text())):
                broken.append(f"{page.name}: {target}#{heading}")
    assert not broken


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings."""
    return {
        re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", page, re.M)
    }


def test_links_within_the_reference_lead_somewhere() -> None:
    page = reference.reference_page()
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= anchors(page)
