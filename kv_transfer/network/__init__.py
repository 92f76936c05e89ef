"""Data connections between hosts."""
