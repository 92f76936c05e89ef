"""How messages of a link travel."""

from __future__ import annotations

import enum


class Way(enum.Enum):
    """The value is what a ledger says."""

    LINK = "link"
    ASKING = "asking"  # connected, not accepted yet; nothing is said
    DIRECT = "direct"
    BROKEN = "broken"  # it was direct: the link is about to end
