"""Which special tokens of a rendered chat are the template's own, and which are only user's text.

    template   <|im_start|>{{ role }}\\n{{ content }}<|im_end|>
    marked     ␟␟␟␟␟␟␟␟␟␟␟␟{{ role }}\\n{{ content }}␟␟␟␟␟␟␟␟␟␟     when the template is loaded
    rendered   ␟␟␟␟␟␟␟␟␟␟␟␟user\\nforged <|im_start|>␟␟␟␟␟␟␟␟␟␟
    read       the same text with its own letters again, and where its special tokens are
Special tokens' texts in the template's strings are written in letters of their own, lone halves of
surrogate pairs, which no request can have. Each letter stands for one, so that lengths and slices
stay; and since the same letters stand wherever the template names a token, it does with messages
that have no special token's text exactly what it would do unmarked.

Some templates put a token together around a role (`'<|' + role + '|>'`): then the pieces are
marked, and a role of ours between them makes the token.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import jinja2
from jinja2 import nodes

from ...text.special_tokens import Spans, any_of

ROLES = ("system", "user", "assistant", "tool")

_FIRST, _LAST = 0xD800, 0xDFFF
_MARKED = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]+")


class TemplateMarks:
    """The marks for one set of special tokens."""

    def __init__(self, specials: Collection[str]) -> None:
        letters = sorted(set().union(*specials))
        if len(letters) > _LAST - _FIRST + 1:
            raise ValueError("special tokens have too many letters")
        self._marks = {ord(c): _FIRST + i for i, c in enumerate(letters)}
        self._letters = {mark: letter for letter, mark in self._marks.items()}
        self._special = any_of(list(specials))
        around = set(_around_roles(specials))
        self._before = any_of([f"{before}\0" for before, _, _ in around])
        self._after = any_of([f"\0{after}" for _, _, after in around])
        self._own = any_of(
            [self.mark(special) for special in specials]
            + [f"{self.mark(before)}{role}{self.mark(after)}" for before, role, after in around]
        )

    def mark(self, text: str) -> str:
        """All of the text in its own letters' marks."""
        return text.translate(self._marks)

    def mark_specials(self, text: str) -> str:
        """Special tokens' texts marked, all else as it is."""
        return self._special.sub(lambda match: self.mark(match[0]), text)

    def mark_template(self, template: nodes.Template) -> None:
        """Mark the strings that a parsed template is made of, in place."""
        for parent, node, field in list(_texts(template)):
            text = getattr(node, field)
            if isinstance(parent, nodes.Output | nodes.Add | nodes.Concat):
                text = self._mark_pieces(text)
            setattr(node, field, self.mark_specials(text))

    def _mark_pieces(self, text: str) -> str:
        """What begins or ends a token around a role, where the text is written out."""
        framed = f"\0{text}\0"
        framed = self._before.sub(lambda match: self.mark(match[0]), framed)
        framed = self._after.sub(lambda match: self.mark(match[0]), framed)
        return framed.removeprefix("\0").removesuffix("\0")

    def read(self, rendered: str) -> tuple[str, Spans]:
        """The text as people read it, and where its special tokens are."""
        spans = [match.span() for match in self._own.finditer(rendered)]
        pieces: list[str] = []
        last = 0
        for start, end in spans:
            pieces += (rendered[last:start], self.plain(rendered[start:end]))
            last = end
        text = "".join((*pieces, rendered[last:]))
        try:
            text.encode()  # far sooner done than a search for marks
        except UnicodeEncodeError:  # a template took a token apart, or its pieces met no role
            text = self.plain(text)
        return text, spans

    def plain(self, rendered: str) -> str:
        """With its own letters again."""
        return _MARKED.sub(lambda match: match[0].translate(self._letters), rendered)


def _around_roles(specials: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Special tokens with a role inside: what is before it, the role, and what is behind."""
    for special in specials:
        for role in ROLES:
            before, found, after = special.partition(role)
            if found and before and after:
                yield before, role, after


def _texts(node: nodes.Node) -> Iterator[tuple[nodes.Node, nodes.Node, str]]:
    """All strings below a node: the node that it is an operand of, its own, and the field there."""
    for child in node.iter_child_nodes():
        field = "data" if isinstance(child, nodes.TemplateData) else "value"
        is_leaf = isinstance(child, nodes.TemplateData | nodes.Const)
        if is_leaf and isinstance(getattr(child, field), str):
            yield node, child, field
        yield from _texts(child)


def compile_marked(
    environment: jinja2.Environment, source: str, marks: TemplateMarks
) -> jinja2.Template:
    """A template whose own special tokens are marked; raises jinja2.TemplateError."""
    parsed = environment.parse(source)
    marks.mark_template(parsed)
    code = environment.compile(parsed)
    return environment.template_class.from_code(environment, code, environment.make_globals(None))
