"""The last minutes of a gateway."""
