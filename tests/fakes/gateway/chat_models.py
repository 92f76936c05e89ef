"""Model directories for chats: vocabularies with special tokens, and templates of model families.

The templates use the same tests, trims and concatenations as the families' own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

_DEMO = Path(__file__).parents[3] / "models" / "demo" / "tokenizer.json"

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(seen=false, text='') %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == 'user' %}
        {%- if not(content.startswith('<think>') and content.endswith('</think>')) %}
            {%- set ns.seen = true %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n') %}
            {%- set reasoning = reasoning.split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if reasoning %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content | trim }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {%- if loop.first and content[:1] == 'B' %}{%- set ns.text = content %}{%- endif %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ content.strip() ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
{%- if ns.text and not ns.seen %}{{- '<|endoftext|>' }}{%- endif %}
"""
PHI = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
GLM = (
    "<sop>{% for item in messages %}<|{{ item['role'] }}|>\n{{ item['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content | trim + ' ' "
    "+ eos_token }}{% else %}{{ bos_token + '[INST] ' + m.content | trim + ' [/INST]' }}{% endif %}"
    "{% endfor %}"
)
NAMED = (
    "{{ bos_token }}{% macro turn(who, text) %}<|im_start|>{{ who }}: {{ text }}<|im_end|>"
    "{% endmacro %}{% for m in messages %}{{ turn(m.name | default(m.role), m.content) }}"
    "{{ m.content }}{% endfor %}{% set end = '<|im_end|>' %}{{ end[:4] }}{{ end }}"
    "{{ end | length }}"
)
TEMPLATES = {
    "chatml": CHATML, "qwen": QWEN, "phi": PHI, "glm": GLM, "llama2": LLAMA2, "named": NAMED,
}  # fmt: skip

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>",
            "<|tool|>", "<sop>")  # fmt: skip
WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # added tokens that are not special


def _byte_level() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(_DEMO))


def _composing() -> tokenizers.Tokenizer:
    """Qwen's: normalised to NFC."""
    library = _byte_level()
    library.normalizer = normalizers.NFC()
    return library


def _pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    letters = [chr(c) for c in range(33, 127)] + ["▁", "é"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁"), ("i", "m"), ("<", "|"), ("|", ">")]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    pieces += [left + right for left, right in merges]
    return {piece: i for i, piece in enumerate(pieces)}, merges


def _sentencepiece(first_only: bool) -> tokenizers.Tokenizer:
    """Llama 2's: special tokens are part of the vocabulary; texts get a leading space."""
    vocab, merges = _pieces()
    model = models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    library = tokenizers.Tokenizer(model)
    if first_only:
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        library.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


def _unigram() -> tokenizers.Tokenizer:
    """Special tokens are ordinary pieces: the most likely tokenisation of their own text."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -3.0), ("im", -4.0)]
    pieces += [(chr(c), -5.0) for c in range(33, 127)]
    library = tokenizers.Tokenizer(models.Unigram(pieces, 0))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


VOCABULARIES = {
    "byte-level": _byte_level,
    "composing": _composing,
    "byte-fallback": lambda: _sentencepiece(False),
    "byte-fallback, first": lambda: _sentencepiece(True),
    "unigram": _unigram,
}


def write_chat_model(folder: Path, vocabulary: str, template: str) -> tokenizers.Tokenizer:
    """Write tokenizer.json, tokenizer_config.json and a chat template; returns the tokenizer."""
    library = VOCABULARIES[vocabulary]()
    library.add_special_tokens(
        [AddedToken(text, rstrip=text == "<|end|>", normalized=False) for text in SPECIALS]
    )
    library.add_tokens([AddedToken(text, normalized=False) for text in WORDS])
    library.save(str(folder / "tokenizer.json"))
    bos, eos = named_tokens(vocabulary)
    config: dict[str, Any] = {"bos_token": bos, "eos_token": {"content": eos}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return library


def named_tokens(vocabulary: str) -> tuple[str, str]:
    """The begin and end tokens of a text."""
    is_bytes = vocabulary in ("byte-level", "composing")
    return ("<|endoftext|>", "<|im_end|>") if is_bytes else ("<s>", "</s>")
