"""Other APIs for one turn of a conversation: OpenAI's Responses, Anthropic's messages."""
