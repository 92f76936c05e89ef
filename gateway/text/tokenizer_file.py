"""Loading tokenizer.json of a model directory, at start-up."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import tokenizers

from ...core.errors import StartupFailed
from .least_tokens import least_tokens
from .library_failures import is_failure
from .special_tokens import MarkedEncoder, SpecialTokens, specials_of
from .text_stream import WholeTexts
from .token_text import token_texts
from .tokenizer import TextLanes, Tokenizer

log = logging.getLogger(__name__)


def load_tokenizer(
    model_dir: Path, hidden_ids: Iterable[int] = (), *, refuses_special: bool = False
) -> Tokenizer:
    """Read `model_dir`/tokenizer.json; raises StartupFailed if it is absent or broken."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise StartupFailed(
            f"{model_dir} has no tokenizer.json",
            hint="save it beside the weights: AutoTokenizer.from_pretrained(DIR)"
            ".save_pretrained(DIR) writes one",
        )
    # A call has one text and its thread: the library's own threads would take all cores for it,
    # and processes that fork would lose them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        text = path.read_text(encoding="utf-8")
        library = tokenizers.Tokenizer.from_str(text)
        spec = json.loads(text)
    except BaseException as error:  # the library raises plain Exception, or panics
        if not is_failure(error):
            raise
        raise StartupFailed(f"cannot read {path}: {error}") from error
    library.no_truncation()
    library.no_padding()
    specials = specials_of(spec, model_dir)
    marked = None
    try:
        marked = MarkedEncoder(spec, specials)
    except Exception as error:  # plain ones again
        log.error(
            "no chats: special tokens of %s cannot be distinguished from text: %s", path, error
        )
    whole_texts = WholeTexts(library, frozenset(hidden_ids))
    unknown = spec["model"].get("unk_token")  # any text may have it
    found = {library.token_to_id(text) for text in specials if text != unknown}
    special_ids = frozenset(i for i in found if i is not None)
    return Tokenizer(
        library,
        whole_texts,
        TextLanes(),
        least_tokens(spec),
        SpecialTokens(special_ids, marked, refuses_special),
        token_texts(library, whole_texts.special_ids, whole_texts.hidden_ids),
        library.token_to_id,
    )
