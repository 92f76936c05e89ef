"""The HTTP front: OpenAI's API over the front door, health, and the live page."""
