"""The measured cost of steps."""
