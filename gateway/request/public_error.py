"""What a caller is told of an error that is not the caller's: its kind, and nothing from inside.

A failure's own text may carry a path, an address or a foreign library's words. It stays in the
record of the call, for logs and operators.
"""

from __future__ import annotations

from ...core.errors import BatonError, EngineFailed, HandoffFailed, NodeLost

_WORDS: tuple[tuple[type[BatonError], str], ...] = (
    (EngineFailed, "an engine failed under the request"),
    (HandoffFailed, "the KV cache could not be handed over"),
    (NodeLost, "a node was lost under the request"),
)


def public_error(error: BatonError) -> BatonError:
    """The same error, or one of its class without its text."""
    for kind, words in _WORDS:
        if isinstance(error, kind):
            return type(error)(words)
    return BatonError("internal error") if error.code == BatonError.code else error
