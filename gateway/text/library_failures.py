"""Turns failures of compiled libraries (tokenizers, llguidance) into errors of one request."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NoReturn

import tokenizers

from ...core.errors import BatonError, InvalidRequest

log = logging.getLogger(__name__)

REPLACEMENT = "\ufffd"
_PANIC = "PanicException"  # of pyo3, for a Rust panic: created at run time, no Exception


def is_failure(error: BaseException) -> bool:
    """Whether a library raised it: not a cancellation or the end of the process."""
    return isinstance(error, Exception) or type(error).__name__ == _PANIC


def refuse(error: BaseException, what: str, param: str) -> NoReturn:
    """Raise InvalidRequest(`what`) for a library's failure, which depends on the input. Re-raise
    other errors."""
    if isinstance(error, BatonError) or not is_failure(error):
        raise error
    log.error("%s: %s: %s", what, type(error).__name__, error)
    raise InvalidRequest(what, param, "invalid_value") from None


def decode_few(
    library: tokenizers.Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool = True
) -> str:
    """The text of a few tokens; U+FFFD if the library fails to decode them."""
    try:
        text: str = library.decode(token_ids, skip_special_tokens=skip_special_tokens)
    except BaseException as error:
        if not is_failure(error):
            raise
        return REPLACEMENT
    return text
