"""One turn of a conversation as other APIs have it: OpenAI's Responses, Anthropic's messages."""
