"""The validation of requests."""
