"""The files around the code, for visitors of the repository, are complete and name only things that
exist.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
CALLERS = (
    ".ci/run",
    ".github/pull_request_template.md",
    ".github/workflows/ci.yml",
    ".pre-commit-config.yaml",
    "CONTRIBUTING.md",
    "README.md",
    "docs/quickstart.md",
    "tests/README.md",
)


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_license_is_there_and_named() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Copyright 2026 The Baton authors" in text
    assert project()["license"] == "Apache-2.0"
    files = project()["license-files"]
    assert isinstance(files, list) and all((ROOT / file).is_file() for file in files)


def test_the_changelog_has_the_version_or_what_leads_to_it() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in text and str(project()["version"]) in text


def test_pythons_that_are_promised_are_those_that_are_accepted() -> None:
    classifiers = project()["classifiers"]
    assert isinstance(classifiers, list)
    promised = {c.rpartition(" ")[2] for c in classifiers if re.search(r":: 3\.\d+$", c)}
    assert project()["requires-python"] == ">=3.11,<3.13" and promised == {"3.11", "3.12"}


@pytest.mark.parametrize("path", CALLERS)
def test_every_make_target_that_is_named_exists(path: str) -> None:
    text = (ROOT / path).read_text()
    named = set(re.findall(r"(?:`|run: |entry: |^\s*)make ([a-z-]+)", text, re.M))
    assert named, "it names none: take it off the list"
    assert named <= TARGETS


@pytest.mark.parametrize(
    "path",
    [ROOT / ".pre-commit-config.yaml", *sorted((ROOT / ".github").rglob("*.yml"))],
    ids=lambda path: path.name,
)
def test_yaml_parses(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text()), dict)
