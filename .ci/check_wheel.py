"""`python .ci/check_wheel.py dist/*.whl`: the wheel holds the product, and nothing else.

Every file of a product folder that git tracks must be in it, whatever its type: code, .proto
files, the dashboard's static files, the bundled models. Tests, benchmarks and docs must not.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_SHIPPED = ("tests/", "bench/", "docs/", "deploy/", ".")
SHIPPED_AT_THE_ROOT = {"__init__.py", "__main__.py"}


def product_files() -> set[str]:
    """Paths in the repository of all that the wheel must hold."""
    paths = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    return {
        path
        for path in paths
        if (path in SHIPPED_AT_THE_ROOT) or ("/" in path and not path.startswith(NOT_SHIPPED))
    }


def main(wheel: Path) -> int:
    """Compare; print what is missing or too much. Returns the exit code."""
    names = zipfile.ZipFile(wheel).namelist()
    packed = {name.removeprefix("baton/") for name in names if name.startswith("baton/")}
    expected = product_files()
    wrong = [f"missing: {path}" for path in sorted(expected - packed)]
    wrong += [f"not the product's: {path}" for path in sorted(packed - expected)]
    if not any(name.endswith("/licenses/LICENSE") for name in names):
        wrong.append("missing: LICENSE")
    size_mb = wheel.stat().st_size / 1e6
    print(*wrong, f"{wheel.name}: {len(packed)} files, {size_mb:.1f} MB", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
