"""The message that a gateway prints once it can serve: its addresses and a curl command to try."""

from __future__ import annotations

import json
import shlex

from ...core.config import GatewayConfig

READY = "Ready: "
TRY = "Try: "

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # address to dial, by wildcard address


def startup_lines(
    config: GatewayConfig,
    model: str,
    *,
    http_port: int,
    grpc_port: int,
    own_http_port: int | None,
    has_chat_template: bool,
) -> tuple[str, str]:
    """The lines with the addresses (READY) and a curl request (TRY). `model`: the model's name."""
    host = _EVERYWHERE.get(config.host, config.host)
    host = f"[{host}]" if ":" in host else host
    s = "s" if config.tls_cert is not None else ""
    url = f"http{s}://{host}:{http_port}"
    grpc_url = f"grpc{s}://{host}:{grpc_port}"
    own_url = f"http{s}://{host}:{own_http_port or http_port}"
    content: dict[str, object] = {"prompt": [1, 2, 3] if config.skip_tokenizer_init else "hello"}
    if has_chat_template:
        content = {"messages": [{"role": "user", "content": "hello"}]}
    path = "chat/completions" if has_chat_template else "completions"
    body = json.dumps({"model": model, **content, "max_tokens": 32}, ensure_ascii=False)
    key = ' -H "Authorization: Bearer $BATON_API_KEY"' if config.api_keys is not None else ""
    curl = f"curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    return f"{READY}{url} {grpc_url} dashboard {own_url}/dashboard", f"{TRY}{curl}"
