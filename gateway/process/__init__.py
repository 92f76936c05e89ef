"""The gateway process: its start, its parts, its shutdown."""
