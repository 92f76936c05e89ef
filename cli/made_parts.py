"""Pages that people write, with parts that are made from code or results.

A part stands between two markers; what is between them is made anew, the rest is left alone:

    <!-- made: NAME -->
    ...
    <!-- /made -->
"""

from __future__ import annotations

import re
from collections.abc import Callable

_PART = re.compile(r"(<!-- made: (.+?) -->\n).*?(<!-- /made -->)", re.S)


def refresh(page: str, make: Callable[[str], str]) -> str:
    """The page with every part as `make` makes it by its name."""

    def made(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        return f"{begin}\n{make(name).strip()}\n\n{end}"

    return _PART.sub(made, page)


def names(page: str) -> list[str]:
    """The parts of a page, in its order."""
    return [name for _, name, _ in _PART.findall(page)]
