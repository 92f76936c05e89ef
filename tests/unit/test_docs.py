"""The pages made from the code are fresh, and what people wrote still speaks of what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from baton.cli import reference
from baton.core import errors
from baton.core.config import GatewayConfig

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
STALE = "make docs"


def source() -> str:
    """All of the product's Python as one text, with string literals joined as Python joins them."""
    skip = {"tests", "bench", "docs"}
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


def test_the_table_of_parameters_is_fresh() -> None:
    page = (DOCS / "sampling.md").read_text()
    assert reference.refresh_sampling_page(page) == page, STALE


def test_every_error_has_facts_and_advice() -> None:
    page = (DOCS / "errors.md").read_text().split("\n## What a process says")[0]
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
    for page in [ROOT / "README.md", *DOCS.glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert not broken


def test_links_within_the_reference_lead_somewhere() -> None:
    page = reference.reference_page()
    headings = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", page, re.M)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= headings
