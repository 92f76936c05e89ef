"""The HTTP front: OpenAI's API over the front door, health, and what else a browser may ask."""
