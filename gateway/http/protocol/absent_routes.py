"""What an unknown path is answered with: paths that other servers have, and what is here instead.

Knows names alone; which routes exist is app.py's.
"""

from __future__ import annotations

from collections.abc import Mapping

_CHAT = "use POST /v1/chat/completions"
_TEXT = "use POST /v1/completions"
_TEXT_ALONE = "this server generates text and nothing else"
_STATELESS = "nothing is kept between requests: send the whole chat to POST /v1/chat/completions"
_NO_FILES = "no files are taken: send requests one by one"
_OPERATED = "a deployment is operated with `baton` and its nodes' own flags, not over HTTP"

# By the path behind a leading /v1, in its first part or two.
_INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("responses", "messages", "chat", "api/chat", "interactions"), _CHAT),
    "messages/count_tokens": "use POST /tokenize",
    **dict.fromkeys(("complete", "generate", "generate_stream", "invocations", "infer"), _TEXT),
    **dict.fromkeys(("api/generate", "engines", "inference"), _TEXT),
    **dict.fromkeys(("embeddings", "embed", "api/embed", "api/embeddings"), _TEXT_ALONE),
    **dict.fromkeys(("pooling", "score", "rerank", "classify", "moderations"), _TEXT_ALONE),
    **dict.fromkeys(("audio", "images", "videos", "realtime"), _TEXT_ALONE),
    **dict.fromkeys(("assistants", "threads", "conversations", "vector_stores"), _STATELESS),
    **dict.fromkeys(("files", "uploads", "batches", "fine_tuning"), _NO_FILES),
    **dict.fromkeys(("api/tags", "api/show", "get_model_info"), "use GET /v1/models"),
    **dict.fromkeys(("info", "get_server_info", "load"), "use GET /server_info"),
    **dict.fromkeys(("ping", "healthz", "livez"), "use GET /live"),
    **dict.fromkeys(("readyz", "health_generate"), "use GET /ready"),
    **dict.fromkeys(("docs", "redoc", "swagger"), "use GET /openapi.json"),
    **dict.fromkeys(("pause", "resume", "sleep", "wake_up", "update_weights"), _OPERATED),
    **dict.fromkeys(("load_lora_adapter", "unload_lora_adapter", "reset_prefix_cache"), _OPERATED),
    **dict.fromkeys(("flush_cache", "collective_rpc", "start_profile", "stop_profile"), _OPERATED),
}
_RENAMED: Mapping[str, str] = {  # ours, without /v1 or with one too many
    "chat/completions": "/v1/chat/completions",
    "completions": "/v1/completions",
    "models": "/v1/models",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
    "metrics": "/metrics",
    "health": "/health",
}
_ROUTES = (
    "there are /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /detokenize, and what "
    "GET /openapi.json lists"
)


def what_exists(path: str) -> str:
    """A sentence's second half, for people who looked for `path`."""
    name = path.lower().strip("/")
    while name == "v1" or name.startswith("v1/"):
        name = name.removeprefix("v1").lstrip("/")
    if name in _RENAMED:
        return f"the path is {_RENAMED[name]}"
    first_two = "/".join(name.split("/")[:2])
    first = name.partition("/")[0]
    return _INSTEAD.get(first_two) or _INSTEAD.get(first) or _ROUTES
