"""Compiles constraints for one model's vocabulary, and caches the last compiled grammars.

    Constraint ── compile ──► Grammar ── follow ──► LLMatcher: which tokens may come next
                  any thread    shared, immutable      of one sample, fed with its tokens
Compiling takes milliseconds, 0.1 s for the largest accepted source, and does not hold the GIL.
Nothing is fetched and nothing is written to disk.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import InvalidRequest
from ..core.request.constraint import Constraint, ConstraintKind
from .multiples import count_remainders
from .schema_references import BadReference, check_references

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

log = logging.getLogger(__name__)

MAX_SOURCE_BYTES = 64 << 10  # of one constraint
MAX_CHOICES = 1024
MAX_KEPT_BYTES = 64 << 20

JSON_OPTIONS: JsonCompileOptions = {
    # Otherwise a model that is forced to write JSON could write whitespace for ever.
    "whitespace_pattern": r"[ ]|\n[ ]{0,64}",
    # If two alternatives of a oneOf overlap, the output may match both.
    "coerce_one_of": True,
}

# Resident memory, measured on llguidance 1.9.1: about 145 KB for the smallest grammars, 130 bytes
# per byte of a large schema, 84 to 150 bytes per unit of lexer fuel. Fuel: 4 units per mandatory
# repetition, 5,000 for large character classes, up to 4.6 per byte of a schema. Rounded up here.
_GRAMMAR_BYTES = 160 << 10
_BYTES_PER_SOURCE_BYTE = 160
_BYTES_PER_REMAINDER = 520
_BYTES_PER_FUEL = 170
_FUEL_PER_REPETITION = 5
_FUEL_OF_CLASSES = 6_000
_LEXER_FUEL, _FUEL_PER_SOURCE_BYTE = 50_000, 5
_REPETITION = re.compile(r"\{(\d{1,9})")
_LARGE_CLASS = re.compile(r"\\[pPwW]")
_MAX_LEXER_STATES = 10_000  # of each sample; a state takes 1 to 2 KB
# Of one mask: about 10 us each. Schemas within the parser's limit of items per row stay below; a
# grammar so ambiguous that it needs more would delay all other sequences of a step.
_MAX_STEP_ITEMS = 5000
_MAX_REASON_CHARS = 200
_INSTALL = "pip install 'baton-serve[structured]'"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled constraint, immutable: samples use copies of its matcher."""

    _matcher: LLMatcher
    num_bytes: int  # approximate

    def follow(self) -> LLMatcher:
        """A matcher at the beginning of the output."""
        return self._matcher.deep_copy()


class Grammars:
    """The grammars of one model. Thread-safe. `refusal`: why it cannot be constrained, or None."""

    def __init__(
        self,
        model_dir: Path,
        vocab_size: int,
        eos_token_ids: Collection[int],
        *,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        """Does not load the tokenizer yet: it takes up to a second, and few deployments need it."""
        self._path = model_dir / "tokenizer.json"
        self.vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._max_kept_bytes = max_kept_bytes
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[Constraint, Grammar] = OrderedDict()
        self.num_kept_bytes = 0
        self.refusal = self._find_refusal()

    def _find_refusal(self) -> str | None:
        if importlib.util.find_spec("llguidance") is None:
            return f"structured output is not installed: {_INSTALL}"
        if not self._path.is_file():
            return "structured output needs the model's tokenizer.json, which is missing"
        if not self._eos_token_ids:
            return "structured output needs an end of sequence token, and the model has none"
        return None

    def is_kept(self, constraint: Constraint) -> bool:
        """Whether `compile` would return at once."""
        with self._lock:
            return constraint in self._kept

    def compile(self, constraint: Constraint) -> Grammar:
        """The grammar, cached or compiled. Raises InvalidRequest: `unsupported_parameter`, or
        `invalid_schema` with the reason."""
        if self.refusal is not None:
            raise _unsupported(self.refusal)
        with self._lock:
            if (grammar := self._kept.get(constraint)) is not None:
                self._kept.move_to_end(constraint)
                return grammar
        grammar = Grammar(self._compiled(constraint), _size_of(constraint))
        with self._lock:
            self._keep(constraint, grammar)
        return grammar

    def _compiled(self, constraint: Constraint) -> LLMatcher:
        from llguidance import LLMatcher

        num_bytes = len(constraint.source.encode())
        if num_bytes > MAX_SOURCE_BYTES:
            raise _invalid(f"it has {num_bytes} bytes; at most {MAX_SOURCE_BYTES} are accepted")
        try:
            count_remainders(constraint)
            text = grammar_text(constraint)
        except ValueError as error:
            raise _invalid(_reference_fault(constraint) or str(error)) from None
        matcher = LLMatcher(self._load_tokenizer(), text, log_level=0, limits=_limits(constraint))
        # The mask of the first token shows whether any output exists, and is already computed in
        # every sample's copy.
        allows_some = not matcher.is_error() and any(matcher.compute_bitmask())
        if matcher.is_error() or not allows_some:
            fault = _reference_fault(constraint)
            raise _invalid(fault or _reason(matcher) or "nothing matches it")
        return matcher

    def _load_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._loading:
            if self._tokenizer is None:
                text = self._path.read_text(encoding="utf-8")
                load = partial(LLTokenizer, n_vocab=self.vocab_size, eos_token=self._eos_token_ids)
                try:
                    try:
                        self._tokenizer = load(text)
                    except ValueError:  # its padding tokens may exceed the vocabulary
                        self._tokenizer = load(_within(text, self.vocab_size))
                except ValueError as error:
                    log.error("structured output is off: %s: %s", self._path, error)
                    self.refusal = "structured output is not possible with the model's tokenizer"
                    raise _unsupported(self.refusal) from error
            return self._tokenizer

    def _keep(self, constraint: Constraint, grammar: Grammar) -> None:
        if constraint not in self._kept:
            self.num_kept_bytes += grammar.num_bytes
        self._kept[constraint] = grammar
        while self.num_kept_bytes > self._max_kept_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.num_kept_bytes -= oldest.num_bytes


def accept(matcher: LLMatcher, token_ids: Sequence[int]) -> None:
    """Advance a matcher by these tokens; raises InvalidRequest if they do not fit."""
    if token_ids and not matcher.consume_tokens(list(token_ids)):
        raise cannot_go_on(matcher)


def cannot_go_on(matcher: LLMatcher) -> InvalidRequest:
    """The error of a request whose matcher has failed."""
    return _invalid(f"the output cannot match it any further: {_reason(matcher)}")


def _reason(matcher: LLMatcher) -> str:
    return matcher.get_error().replace("<non-verbose/>", "")


def _reference_fault(constraint: Constraint) -> str | None:
    """The bad reference of a schema that did not compile: the compiler does not name loops."""
    if constraint.kind is not ConstraintKind.JSON_SCHEMA:
        return None
    try:
        check_references(json.loads(constraint.source))
    except BadReference as error:
        return f"it {error}"
    except (ValueError, RecursionError):  # no JSON, or too deep: the compiler reports it
        return None
    return None


def _invalid(reason: str) -> InvalidRequest:
    shown = " ".join(reason.split())[:_MAX_REASON_CHARS]
    return InvalidRequest(
        f"the constraint cannot be used: {shown}", param="constraint", code="invalid_schema"
    )


def _unsupported(reason: str) -> InvalidRequest:
    return InvalidRequest(reason, param="constraint", code="unsupported_parameter")


def _within(tokenizer: str, vocab_size: int) -> str:
    """The tokenizer without added tokens beyond the vocabulary."""
    spec = json.loads(tokenizer)
    added = spec.get("added_tokens", ())
    spec["added_tokens"] = [one for one in added if one["id"] < vocab_size]
    return json.dumps(spec)


def _size_of(constraint: Constraint) -> int:
    source = constraint.source
    fuel = _FUEL_PER_REPETITION * math.prod(max(1.0, float(n)) for n in _REPETITION.findall(source))
    fuel += _FUEL_OF_CLASSES * (_LARGE_CLASS.search(source) is not None)
    num_bytes = _GRAMMAR_BYTES + len(source) * _BYTES_PER_SOURCE_BYTE
    num_bytes += int(min(fuel, _LEXER_FUEL)) * _BYTES_PER_FUEL
    return num_bytes + count_remainders(constraint) * _BYTES_PER_REMAINDER


def _limits(constraint: Constraint) -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_lexer_states=_MAX_LEXER_STATES,
        step_max_items=_MAX_STEP_ITEMS,
        initial_lexer_fuel=_LEXER_FUEL + len(constraint.source) * _FUEL_PER_SOURCE_BYTE,
        verbose_errors=False,
    )


def grammar_text(constraint: Constraint) -> str:
    """The grammar in the form that LLMatcher takes. Raises ValueError if it cannot be parsed."""
    from llguidance import LLMatcher

    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            source = constraint.source
            if source.strip() in ("true", "false"):  # valid schemas, but the options need an object
                source = f'{{"allOf": [{source}]}}'
            return LLMatcher.grammar_from_json_schema(source, overrides=JSON_OPTIONS)
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(constraint.source)
        case ConstraintKind.CHOICE:
            choices = " | ".join(map(json.dumps, json.loads(constraint.source)))
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        case ConstraintKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(constraint.source)
