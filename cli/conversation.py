"""What a shell sends: the text so far, or a chat by the model's template. Knows no gateway.

    entry ── prompt ──► text to continue ── the model ──► answer ── answered ──► what follows
An entry whose request failed is never `answered`, and so forgotten.
"""

from __future__ import annotations

import asyncio
from typing import TypeAlias

from ..client.messages import GenerateParams
from ..core.errors import StartupFailed
from ..core.model_dir import resolve_model_dir
from ..gateway.http.chat.chat_template import ChatTemplate
from ..gateway.http.chat.messages import Message


class TextConversation:
    """A text that the model continues; later entries are appended to it.

    `params` go with every request; `manner` is how it speaks to the model, for people.
    """

    def __init__(self) -> None:
        self.params: GenerateParams = {}
        self.manner = "A plain completion shell: the model continues the text so far."
        self._text = ""

    def prompt(self, entry: str) -> str:
        gap = "\n" if self._text and not self._text.endswith("\n") else ""
        return self._text + gap + entry

    def answered(self, entry: str, answer: str) -> None:
        self._text = self.prompt(entry) + answer

    def reset(self) -> None:
        self._text = ""


class Chat:
    """Messages in turn, rendered by the model's own chat template."""

    def __init__(self, template: ChatTemplate) -> None:
        # The template writes the special tokens itself.
        self.params: GenerateParams = {"add_special_tokens": False}
        self.manner = "A chat, by the model's template."
        self._template = template
        self._messages: list[Message] = []

    def prompt(self, entry: str) -> str:
        """Raises InvalidRequest where the template refuses."""
        asked = [*self._messages, {"role": "user", "content": entry}]
        return asyncio.run(self._template.render(asked, ())).text

    def answered(self, entry: str, answer: str) -> None:
        self._messages.append({"role": "user", "content": entry})
        self._messages.append({"role": "assistant", "content": answer})

    def reset(self) -> None:
        self._messages.clear()


Conversation: TypeAlias = TextConversation | Chat


def conversation_with(served: str, model: str, served_model_name: str | None) -> Conversation:
    """A chat, if `model` lies here, is the one `served`, and has a template."""
    try:
        model_dir = resolve_model_dir(model)
    except StartupFailed:
        return TextConversation()
    if (served_model_name or model_dir.resolve().name) != served:
        return TextConversation()
    template = ChatTemplate.load(model_dir)
    return TextConversation() if template is None else Chat(template)
