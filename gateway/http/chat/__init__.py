"""POST /v1/chat/completions: templates, messages, tools."""
